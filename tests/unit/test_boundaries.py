"""The four boundaries of the protocol: what each does with a message about another request, life, attempt or order."""

from __future__ import annotations

import msgspec
import pytest

from omni_actors.coordinator.core.instructions import ToClient, ToStage
from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import Abort, Ended, OpenRequest, Resend, TextDelta
from omni_actors.protocol.payloads import StageParams
from tests.support.builders import header_from, submit
from tests.support.requests import ALICE, NOW, STAGES, aborts, ask, failure, ready, replica_id
from tests.support.stage import EMPTY, ROUTE, StageUnderTest, failed


def test_what_a_client_claims_to_be_changes_nothing() -> None:
    """Stage, epoch, attempt and seq are the coordinator's to give."""
    plain, lying = ready(), ready()
    header = Header("", "r1", "thinker", 3, 9, attempt=7, seq=5)
    expected = plain.submit(ALICE, Header("", "r1"), submit(), [], NOW)
    assert lying.submit(ALICE, header, submit(), [], NOW) == expected
    assert {item.attempt for item in expected if isinstance(item, ToStage)} == {0}


@pytest.mark.parametrize(
    "kind",
    [
        OpenRequest(route=ROUTE, params=StageParams(), seed=1),
        Abort(),
        Resend(receiver=ROUTE[2], attempt=1),
        Ended(request_ids=("r1",)),
    ],
)
def test_only_the_coordinator_opens_and_ends(kind: OpenRequest | Abort | Resend | Ended) -> None:
    """Other stages can reach a stage's inbox, but they may not open or end its requests."""
    stage = StageUnderTest("thinker")
    if not isinstance(kind, OpenRequest):
        stage.expect()
    before = stage.actor.counts()
    header = msgspec.structs.replace(header_from(ROUTE[0], "r1"), kind="x", deadline=1010.0)
    assert stage.actor.receive(Envelope(header, kind)) == []
    assert stage.actor.counts() == before
    assert stage.actor.dropped == {"not_the_coordinator": 1}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"request_id": "r9"}, "early"),
        ({"source": msgspec.structs.replace(ROUTE[0], epoch=4)}, "foreign_epoch"),
        ({"source": msgspec.structs.replace(ROUTE[0], epoch=6)}, "foreign_epoch"),
        ({"source": msgspec.structs.replace(ROUTE[0], replica=1)}, "foreign_epoch"),
        ({"source": ROUTE[3]}, "unexpected_source"),
        ({"attempt": 1}, "early"),
        ({"seq": 1}, ErrorCode.PROTOCOL_ERROR),
        ({}, "taken"),
    ],
)
def test_a_chunk(change: dict, outcome: object) -> None:
    stage = StageUnderTest("thinker")
    stage.expect()
    messages = stage.chunk(**{"request_id": "r1", "seq": 0, **change}, token_ids=bytes(4), final=True)
    if isinstance(outcome, ErrorCode):
        assert failed(messages).code is outcome
        assert stage.held() == EMPTY
        return
    assert messages == []
    assert dict(stage.actor.dropped) == ({outcome: 1} if outcome not in ("early", "taken") else {})
    assert (stage.actor.counts()["early_requests"] == 1) is (outcome == "early")
    assert (len(stage.engine.started()) == 1) is (outcome == "taken")


@pytest.mark.parametrize(
    ("header", "outcome"),
    [
        (header_from(replica_id("thinker"), "r9"), "unknown_request"),
        (header_from(replica_id("thinker", epoch=2), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker", epoch=0), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker", 1), "r1"), "foreign_epoch"),
        (header_from(replica_id("stranger"), "r1"), "foreign_epoch"),
        (header_from(replica_id("thinker"), "r1", attempt=1), "foreign_attempt"),
        (header_from(replica_id("thinker"), "r1", seq=1), ErrorCode.PROTOCOL_ERROR),
        (header_from(replica_id("thinker"), "r1"), None),
    ],
)
def test_a_result(header: Header, outcome: object) -> None:
    state = ready()
    ask(state)
    instructions = state.from_stage(header, TextDelta(text="a"), (), NOW)
    if isinstance(outcome, ErrorCode):
        assert failure(instructions).code is outcome
        assert sorted(aborts(instructions)) == sorted(STAGES)
    elif outcome is None:
        assert [one.body for one in instructions if isinstance(one, ToClient)] == [TextDelta(text="a")]
    else:
        assert instructions == []
        assert state.reject_from_stage(header, InvalidPayload("x"), NOW) == []
        assert state.dropped == {outcome: 2}
        assert state.in_flight == 1
