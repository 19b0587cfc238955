"""A request goes to the replica that is through with its work first, or to one that already has something of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.forecast import AVERAGE
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.requests import ActiveRequest
from omni_actors.coordinator.core.routing import SAME_GPU, Router
from omni_actors.coordinator.core.states import ReplicaState
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StageParams
from omni_actors.protocol.results import FinishReason, StageDone, StageUsage, TextDelta
from tests.support.builders import chain, header_from
from tests.support.requests import ALICE, NOW, CheckedRequestMachine, ask, bring_back, lose, ready, replica_id, sound

STAGES = ("prompt", "thinker", "talker", "code2wav")
QUESTION = "What is the capital of France, and how long has it been that?"


def chat(*texts: str) -> Prompt:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return Prompt(
        messages=tuple(
            ChatMessage(role=roles[index % 2], content=(ContentPart(text=text),)) for index, text in enumerate(texts)
        )
    )


def on_two_hosts(per_host: int, **routing: Any) -> RequestMachine:
    """The echo chain with `per_host` replicas of each stage on each of two hosts, each with a GPU of its own."""
    made = chain()
    for stage in made["stages"]:
        stage.update(replicas=2 * per_host, node=[0, 1], devices=list(range(per_host)))
    made["coordinator"] = {"max_in_flight": 10_000, "routing": routing}
    state = CheckedRequestMachine(msgspec.convert(made, PipelineConfig), new_seed=lambda: 1)
    for stage in STAGES:
        for index in range(2 * per_host):
            state.replicas.add(stage, index, 1, node=index % 2, slot=index // 2).state = ReplicaState.READY
    return state


def at(state: RequestMachine, request_id: str, stage: str = "thinker") -> int:
    """The replica that a request is bound to."""
    return state.active[request_id].bound[stage].replica


def load(state: RequestMachine, index: int, stage: str = "thinker") -> int:
    replica = state.replicas.current(stage, index)
    assert replica is not None
    return replica.load


def hear(state: RequestMachine, request_id: str, stage: str, body: Any, buffers: Sequence[bytes] = ()) -> None:
    """A stage sends this for a request."""
    request = state.active[request_id]
    header = header_from(request.bound[stage], request_id, request.next_seq.get(stage, 0), request.attempts[stage])
    state.from_stage(header, body, tuple(buffers), NOW)


def answer(
    state: RequestMachine, request_id: str, tokens: int, seconds: float = 1.0, samples: int = 0, **limit: Any
) -> None:
    """All stages of a request finish, after text of so many tokens and so many samples of sound."""
    reason = FinishReason.LENGTH if limit.get("cut") else FinishReason.STOP
    for stage in state.active[request_id].stages:
        if stage == "code2wav":
            hear(state, request_id, stage, *sound(0, samples))
        hear(state, request_id, stage, StageDone(usage=StageUsage(reason, 0, tokens, 0.0, seconds * tokens)))


def teach(state: RequestMachine, tokens: int, count: int = 20, *modalities: str, samples: int = 0) -> None:
    """Let the coordinator see answers of so many tokens."""
    for number in range(count):
        ask(state, f"lesson {number}", ALICE, *(modalities or ("text",)))
        answer(state, f"lesson {number}", tokens, samples=samples)


# -- load -------------------------------------------------------------------------------------------------------------


def test_what_a_stage_has_finished_is_no_load_although_it_is_still_bound() -> None:
    state = ready(replicas=2)
    for name in "ab":
        ask(state, name)
    hear(state, "b", "thinker", StageDone(usage=StageUsage(FinishReason.STOP)))
    assert at(state, "b") == 1
    ask(state, "c")
    ask(state, "d")
    assert [at(state, name) for name in "cd"] == [1, 0], "it holds b, and computes nothing"


def test_a_short_answer_is_less_work_than_a_long_one() -> None:
    state = ready(replicas=2)
    teach(state, 200)
    ask(state, "long", ALICE, "text")
    for name in "ab":
        ask(state, name, ALICE, "text", params={"thinker": StageParams(max_tokens=10)})
    assert at(state, "long") == 0
    assert [at(state, name) for name in "ab"] == [1, 1]
    ask(state, "third", ALICE, "text")
    assert at(state, "third") == 0, "two short ones take longer than one long one: each is in every step"


def test_answers_that_a_limit_cut_do_not_make_others_look_short() -> None:
    state = ready()
    teach(state, 200)
    for number in range(50):
        ask(state, f"cut {number}", ALICE, "text", params={"thinker": StageParams(max_tokens=10)})
        answer(state, f"cut {number}", 10, cut=True)
    ask(state, "free", ALICE, "text")
    whole = load(state, 0)
    ask(state, "short", ALICE, "text", params={"thinker": StageParams(max_tokens=10)})
    assert load(state, 0) - whole < whole / 2


def test_an_answer_that_is_nearly_there_is_less_work() -> None:
    state = ready(replicas=2)
    teach(state, 100)
    for name in "ab":
        ask(state, name, ALICE, "text")
    before = load(state, 1)
    loads = []
    for _ in range(10):
        hear(state, "b", "thinker", TextDelta(text="x", token_ids=pack_token_ids([1] * 10)))
        loads.append(load(state, 1))
    assert loads == sorted(loads, reverse=True)
    assert 0 < loads[-1] < before
    ask(state, "c", ALICE, "text")
    assert at(state, "c") == 1


def test_sound_that_is_there_is_taken_off_all_stages_of_speech() -> None:
    state = ready(replicas=2)
    teach(state, 10, 20, "text", "audio", samples=1000)
    ask(state, "a")
    before = {stage: load(state, 0, stage) for stage in STAGES}
    hear(state, "a", "code2wav", *sound(0, 900))
    after = {stage: load(state, 0, stage) for stage in STAGES}
    assert {stage for stage in STAGES if after[stage] < before[stage]} == {"talker", "code2wav"}


def test_a_long_text_means_long_speech() -> None:
    state = ready(replicas=2)
    teach(state, 100, 20, "text", "audio", samples=1000)
    ask(state, "a")
    before = load(state, 0, "talker")
    hear(state, "a", "thinker", StageDone(usage=StageUsage(FinishReason.STOP, 0, 400)))
    assert load(state, 0, "talker") > 1.5 * before
    assert load(state, 0, "thinker") == 0


def test_a_replica_that_takes_twice_as_long_gets_fewer_requests() -> None:
    state = ready(replicas=2, max_in_flight=1000)
    for turn in range(40):
        for name in ("x", "y"):  # at the same time, so that each has one
            ask(state, f"{name}{turn}", ALICE, "text")
        for name in ("x", "y"):
            answer(state, f"{name}{turn}", 100, seconds=2.0 if at(state, f"{name}{turn}") else 1.0)
    for number in range(90):
        ask(state, f"r{number}", ALICE, "text")
    held = [len(state.replicas.current("thinker", index).requests) for index in (0, 1)]
    assert 20 < held[1] < 40 < held[0], held


def test_by_requests_it_is_as_it_says() -> None:
    state = ready(replicas=2, routing={"balance": "requests", "prefix_lead": 0})
    teach(state, 200)
    ask(state, "long", ALICE, "text", prompt=chat("same"))
    ask(state, "short", ALICE, "text", prompt=chat("same"), params={"thinker": StageParams(max_tokens=1)})
    hear(state, "short", "thinker", StageDone(usage=StageUsage(FinishReason.LENGTH, 0, 1)))
    ask(state, "next", ALICE, "text")
    assert [at(state, name) for name in ("long", "short", "next")] == [0, 1, 0]


# -- conversations ----------------------------------------------------------------------------------------------------


def test_the_next_turn_goes_to_the_replica_that_has_the_first() -> None:
    state = ready(replicas=3)
    ask(state, "other", ALICE, "text")
    ask(state, "one", ALICE, "text", prompt=chat(QUESTION))
    home = at(state, "one")
    assert home == 1
    for name in ("other", "one"):
        answer(state, name, 10)
    ask(state, "two", ALICE, "text", prompt=chat(QUESTION, "Paris.", "And of Italy?"))
    ask(state, "stranger", ALICE, "text", prompt=chat("What is it?", "Paris.", "And of Italy?"))
    assert [at(state, name) for name in ("two", "stranger")] == [home, 0]
    assert state.planner.router.chosen["prefix"] == 1


def test_so_does_a_longer_prompt_of_tokens() -> None:
    state = ready(replicas=2)
    ask(state, "other", ALICE, "text")
    ask(state, "one", ALICE, "text", prompt=Prompt(token_ids=pack_token_ids(range(600))))
    ask(state, "two", ALICE, "text", prompt=Prompt(token_ids=pack_token_ids(range(900))))
    ask(state, "three", ALICE, "text", prompt=Prompt(token_ids=pack_token_ids(range(1, 901))))
    assert [at(state, name) for name in ("one", "two", "three")] == [1, 1, 0]


@pytest.mark.parametrize("loss", ["killed", "back", "drains", "spare", "full"])
def test_a_conversation_whose_replica_is_gone_or_busy_goes_elsewhere(loss: str) -> None:
    state = ready(replicas=2)
    ask(state, "one", ALICE, "text", prompt=chat(QUESTION))
    answer(state, "one", 10)
    home = state.replicas.current("thinker", 0)
    if loss == "drains":
        home.state = ReplicaState.DRAINING
    elif loss == "spare":
        home.spare = True
    elif loss == "full":
        home.congested = True
    else:
        lose(state, "thinker", 0)
    if loss == "back":  # a new process, which has an empty cache
        bring_back(state, "thinker", 0)
        ask(state, "busy", ALICE, "text")
    ask(state, "two", ALICE, "text", prompt=chat(QUESTION, "Paris.", "And of Italy?"))
    assert at(state, "two") == 1


def test_an_adapter_has_a_prefix_of_its_own() -> None:
    state = ready(replicas=2)
    router = state.planner.router
    plain, other = ({"thinker": StageParams(adapter=adapter)} for adapter in (None, "x"))
    assert router.parts(chat(QUESTION), (), plain) == router.parts(chat(QUESTION), (), plain)
    assert router.parts(chat(QUESTION), (), plain) != router.parts(chat(QUESTION), (), other)


@given(st.integers(2, 6), st.floats(0, 10), st.integers(1, 60))
def test_a_hot_conversation_never_overloads_a_replica(replicas: int, lead: float, requests: int) -> None:
    state = ready(replicas=replicas, max_in_flight=1000, routing={"prefix_lead": lead})
    for number in range(requests):
        ask(state, f"r{number}", ALICE, "text", prompt=chat(QUESTION))
        loads = [load(state, index) for index in range(replicas)]
        assert max(loads) <= min(loads) + (lead + 1) * AVERAGE


@given(st.integers(0, 5), st.lists(st.integers(0, 20), max_size=60))
def test_what_is_remembered_of_conversations_is_bounded(most: int, asked: list[int]) -> None:
    state = ready(replicas=2, max_in_flight=1000, routing={"conversations": most})
    for number, conversation in enumerate(asked):
        ask(state, f"r{number}", ALICE, "text", prompt=chat(*(f"{conversation} {turn}" for turn in range(41))))
        assert len(state.active[f"r{number}"].parts) <= 16
        assert len(state.planner.router.conversations) <= most


# -- hosts ------------------------------------------------------------------------------------------------------------


def test_speech_stays_on_the_host_and_on_the_gpu_of_the_text() -> None:
    state = on_two_hosts(2)
    for number in range(8):
        ask(state, f"r{number}")
    for request in state.active:
        assert len({replica.replica for replica in request.route}) == 1, "replica i of each stage shares a GPU"
    assert len({at(state, request.request_id) for request in state.active}) == 4


def test_without_a_lead_of_the_host_only_load_counts() -> None:
    for lead, expected in ((0, 1), (1, 2)):
        state = on_two_hosts(2, host_lead=lead)
        state.replicas.current("thinker", 0).congested = state.replicas.current("thinker", 1).congested = True
        state.replicas.current("talker", 0).slowness = 1.5
        ask(state, "r")
        assert at(state, "r") == 2
        assert at(state, "r", "talker") == expected


def test_a_busy_host_gives_its_speech_away() -> None:
    state = on_two_hosts(1)
    state.replicas.current("talker", 0).slowness = 4.0  # as if it had three more requests
    state.replicas.current("thinker", 1).congested = True
    ask(state, "r")
    assert (at(state, "r"), at(state, "r", "talker")) == (0, 1)


# -- always -----------------------------------------------------------------------------------------------------------

CONDITIONS = ("ready", "draining", "dead", "starting", "spare", "reserved", "congested")


@given(
    conditions=st.lists(st.tuples(st.sampled_from(CONDITIONS), st.integers(0, 9)), min_size=1, max_size=8),
    home=st.integers(0, 7),
    source=st.sampled_from([0, 1, None]),
    prefix_lead=st.floats(0, 20),
    host_lead=st.floats(0, 20),
)
def test_a_choice_is_always_one_that_takes_requests_at_a_bounded_price(
    conditions: list[tuple[str, int]], home: int, source: int | None, prefix_lead: float, host_lead: float
) -> None:
    state = on_two_hosts(4, prefix_lead=prefix_lead, host_lead=host_lead)
    for index in range(8):
        condition, held = conditions[index] if index < len(conditions) else ("dead", 0)
        replica = state.replicas.current("thinker", index)
        for number in range(held):
            replica.hold(f"{index} {number}")
        if condition in ("spare", "reserved", "congested"):
            setattr(replica, condition, True)
        else:
            replica.state = ReplicaState(condition)
    router: Router = state.planner.router
    parts = router.parts(chat(QUESTION), (), {})
    request = ActiveRequest("r", ALICE, STAGES, frozenset(), NOW, {}, 1, parts=parts)
    router.conversations.computes(state.replicas.current("thinker", home), parts)
    sources = [] if source is None else [state.replicas.current("prompt", source)]
    chosen = router.choose("thinker", request, sources)
    free = [replica for replica in state.replicas.of("thinker") if replica.takes_requests]
    assert (chosen is None) == (not free), "no request waits while a replica takes it"
    if chosen is not None:
        assert chosen in free
        assert not chosen.congested or all(replica.congested for replica in free)
        least = min(replica.cost for replica in free if replica.congested == chosen.congested)
        assert chosen.cost <= least + AVERAGE * (prefix_lead + SAME_GPU * host_lead)
    assert router.choose("thinker", request, sources) is chosen, "the same again"


def test_loads_are_what_is_ahead_whatever_happens() -> None:
    state = ready(replicas=2)
    teach(state, 50)
    for name in "abcd":
        ask(state, name)
    hear(state, "a", "thinker", TextDelta(text="x", token_ids=pack_token_ids([1] * 30)))
    lose(state, "thinker", 0)
    bring_back(state, "thinker", 0)
    state.abort(ALICE, "b", NOW)
    for replica in state.replicas:
        assert replica.load == sum(replica.ahead.values())
    for name in "acd":
        state.abort(ALICE, name, NOW)
    assert {replica.load for replica in state.replicas} == {0}
    assert state.replicas.at(replica_id("thinker", 0, 2)) is not None
