"""A coordinator that takes over: clients claim what stages still hold of their requests, and the rest runs again."""

from __future__ import annotations

import zlib

from omni_actors.coordinator.core.instructions import Instruction, ToStage
from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.coordinator.core.requests import CLAIM_SECONDS, RequestMachine
from omni_actors.protocol.fields import ATTEMPTS, Header, pack_token_ids
from omni_actors.protocol.messages import Abort, Delivered, Done, HeldRequest, Resend
from tests.support.builders import done, header_from, submit
from tests.support.requests import (
    ALICE,
    NOW,
    STAGES,
    CheckedRequestMachine,
    aborts,
    letter,
    opened_stages,
    ready,
    replica_id,
    resends,
    sound,
)

SEED = 77
FIRST = 1 << 32  # the number of the first result for the second coordinator
HAD = Delivered(counts={"tokens": 2, "characters": 2, "samples": 5})


def next_coordinator(*stages: str, attempts: dict[str, int] | None = None, seed: int = SEED) -> RequestMachine:
    """The second coordinator of a launch; these stages hold request r1, each with the attempt that is given, or 0."""
    before = ready()
    state = CheckedRequestMachine(before.pipeline, generation=1)
    numbers = dict.fromkeys(STAGES, 0) | (attempts or {})
    for index, stage in enumerate(STAGES):
        replica = state.replicas.add(stage, 0, 1)
        replica.state = ReplicaState.READY
        after = STAGES[index + 1 : index + 2]
        receivers = tuple((replica_id(name), numbers[name]) for name in after)
        if stage in stages:
            state.replica_holds(replica, [HeldRequest("r1", numbers[stage], seed, receivers)])
    state.serve_clients(NOW)
    return state


def had_text(*tokens: int) -> Delivered:
    """The client has these letters of the text."""
    return Delivered(
        counts=dict.fromkeys(("tokens", "characters"), len(tokens)), checksum=zlib.crc32(pack_token_ids(tokens))
    )


def claim(state: RequestMachine, delivered: Delivered = HAD) -> list[Instruction]:
    return state.submit(ALICE, Header("", "r1"), submit(seed=SEED, delivered=delivered), [b"media"], NOW)


def result_resends(instructions: list[Instruction]) -> dict[str, Delivered | None]:
    asked = [item for item in instructions if isinstance(item, ToStage) and isinstance(item.body, Resend)]
    return {item.replica_id.stage: item.body.delivered for item in asked if item.body.receiver is None}


def test_a_request_that_all_stages_hold_goes_on() -> None:
    state = next_coordinator(*STAGES, attempts={"talker": 3, "code2wav": 3})
    instructions = claim(state)
    assert result_resends(instructions) == dict.fromkeys(STAGES, HAD)
    assert opened_stages(instructions) == []
    assert state.active["r1"].attempts == {"prompt": 0, "thinker": 0, "talker": 3, "code2wav": 3}

    late = state.from_stage(header_from(replica_id("thinker"), "r1", 0), letter(2), (), NOW)
    assert late == [], "it was on its way to the coordinator before"
    (more,) = state.from_stage(header_from(replica_id("thinker"), "r1", FIRST), letter(2), (), NOW)
    assert more.body == letter(2), "stages send only what the client lacks, so nothing is left out here"
    for stage in STAGES:
        number, seq = state.active["r1"].attempts[stage], FIRST + (stage == "thinker")
        last = state.from_stage(header_from(replica_id(stage), "r1", seq, number), done(), (), NOW)
    assert isinstance(last[-1].body, Done)


def test_a_stage_that_has_lost_it_runs_again_with_those_after_it_and_only_the_rest_is_delivered() -> None:
    state = next_coordinator("prompt", "thinker", "code2wav")
    instructions = claim(state)
    assert set(result_resends(instructions)) == {"prompt", "thinker"}
    assert aborts(instructions) == ["code2wav"], "what it has came from a talker that is gone"
    assert opened_stages(instructions) == [("code2wav", ATTEMPTS), ("talker", ATTEMPTS)]
    assert ("thinker", "talker", ATTEMPTS) in resends_to_stages(instructions)
    body, buffers = sound(0, 8)
    (rest,) = state.from_stage(header_from(replica_id("code2wav"), "r1", 0, ATTEMPTS), body, buffers, NOW)
    assert rest.body.samples.shape == (3,)


def resends_to_stages(instructions: list[Instruction]) -> list[tuple[str, str, int]]:
    return resends(
        [item for item in instructions if not (isinstance(item.body, Resend) and item.body.receiver is None)]
    )


def test_a_stage_whose_source_sends_to_another_attempt_runs_again() -> None:
    """The order that would have told the source was lost with the coordinator."""
    state = next_coordinator("prompt", "thinker")
    talker = state.replicas.current("talker", 0)
    state.replica_holds(talker, [HeldRequest("r1", 1, SEED, ((replica_id("code2wav"), 0),))])
    assert opened_stages(claim(state)) == [("code2wav", ATTEMPTS), ("talker", ATTEMPTS)]


def test_a_request_that_nobody_holds_starts_over_and_is_delivered_from_where_the_client_is() -> None:
    state = next_coordinator()
    instructions = claim(state, had_text(0))
    assert opened_stages(instructions) == [(stage, ATTEMPTS) for stage in reversed(STAGES)]
    header = header_from(replica_id("thinker"), "r1", 0, ATTEMPTS)
    assert state.from_stage(header, letter(0), (), NOW) == []
    (second,) = state.from_stage(header_from(replica_id("thinker"), "r1", 1, ATTEMPTS), letter(1), (), NOW)
    assert second.body == letter(1)


def test_another_request_of_that_id_gets_nothing_of_it() -> None:
    state = next_coordinator(*STAGES, seed=SEED + 1)
    instructions = claim(state)
    assert sorted(aborts(instructions)) == sorted(STAGES)
    assert result_resends(instructions) == {}
    assert {number for _, number in opened_stages(instructions)} == {ATTEMPTS}


def test_what_no_client_claims_is_ended() -> None:
    state = next_coordinator(*STAGES)
    assert state.tick(NOW + CLAIM_SECONDS - 0.1) == []
    ended = state.tick(NOW + CLAIM_SECONDS)
    assert [(item.replica_id.stage, item.attempt, type(item.body)) for item in ended] == [
        (stage, 0, Abort) for stage in STAGES
    ]
    assert state.tick(NOW + CLAIM_SECONDS + 1) == []
