"""A request goes to the replica that computes the fewest, or to one that already has something of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core import routing
from omni_actors.coordinator.core.replicas import ReplicaState
from omni_actors.coordinator.core.request import ActiveRequest
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.coordinator.core.routing import ABOVE_MEAN
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt
from tests.support.builders import chain
from tests.support.requests import ALICE, NOW, CheckedRequestMachine, ask, bring_back, finish, lose, ready

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


def on_two_hosts(per_host: int) -> RequestMachine:
    """The echo chain with `per_host` replicas of each stage on each of two hosts."""
    made = chain()
    for stage in made["stages"]:
        stage.update(replicas=2 * per_host, node=[0, 1])
    made["coordinator"] = {"max_in_flight": 10_000}
    state = CheckedRequestMachine(msgspec.convert(made, PipelineConfig))
    for stage in STAGES:
        for index in range(2 * per_host):
            state.replicas.add(stage, index, 1, node=index % 2, slot=index // 2).state = ReplicaState.READY
    return state


def at(state: RequestMachine, request_id: str, stage: str = "thinker") -> int:
    return state.active[request_id].bound[stage].replica


def load(state: RequestMachine, index: int, stage: str = "thinker") -> int:
    replica = state.replicas.current(stage, index)
    return len(replica.computing)


def test_the_next_turn_goes_to_the_replica_that_has_the_first() -> None:
    state = ready(replicas=3)
    ask(state, "other", ALICE, "text")
    ask(state, "one", ALICE, "text", prompt=chat(QUESTION))
    home = at(state, "one")
    assert home == 1
    for name in ("other", "one"):
        finish(state, name)
    ask(state, "two", ALICE, "text", prompt=chat(QUESTION, "Paris.", "And of Italy?"))
    ask(state, "stranger", ALICE, "text", prompt=chat("What is it?", "Paris.", "And of Italy?"))
    assert [at(state, name) for name in ("two", "stranger")] == [home, 0]
    assert state.planner.router.chosen["prefix"] == 1


@pytest.mark.parametrize("loss", ["killed", "back", "drains", "spare", "full"])
def test_a_conversation_whose_replica_is_gone_or_busy_goes_elsewhere(loss: str) -> None:
    state = ready(replicas=2)
    ask(state, "one", ALICE, "text", prompt=chat(QUESTION))
    finish(state, "one")
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


@given(st.integers(2, 6), st.integers(1, 60))
def test_a_conversation_that_everyone_asks_about_never_overloads_a_replica(replicas: int, requests: int) -> None:
    state = ready(replicas=replicas, max_in_flight=1000)
    for number in range(requests):
        ask(state, f"r{number}", ALICE, "text", prompt=chat(QUESTION))
        loads = [load(state, index) for index in range(replicas)]
        assert max(loads) <= ABOVE_MEAN * sum(loads) / replicas + 2
    if requests > 4:
        assert state.planner.router.chosen["prefix"] > 0


def test_what_is_remembered_of_conversations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "CONVERSATIONS", 3)
    state = ready(replicas=2, max_in_flight=1000)
    router = state.planner.router
    for number in range(5):
        ask(state, f"r{number}", ALICE, "text", prompt=chat(*(f"{number} {turn}" for turn in range(41))))
        assert len(state.active[f"r{number}"].parts) == routing.CUTS
        finish(state, f"r{number}")
    ask(state, "busy", ALICE, "text")  # on thinker/0: what is not recognized goes to thinker/1
    for number, known in ((4, True), (0, False)):
        before = router.chosen["prefix"]
        ask(state, f"again {number}", ALICE, "text", prompt=chat(*(f"{number} {turn}" for turn in range(43))))
        assert (router.chosen["prefix"] > before) is known


def test_of_those_that_compute_as_few_one_beside_the_source_takes_a_request() -> None:
    state = on_two_hosts(1)
    router, (here, there) = state.planner.router, state.replicas.of("thinker")
    request = ActiveRequest("r", ALICE, STAGES, frozenset(), NOW, {}, 1)
    source = state.replicas.current("prompt", 1)
    assert router.choose("thinker", request, [source]) is there
    there.hold("other")
    assert router.choose("thinker", request, [source]) is here, "it computes fewer"
    assert router.chosen == {"host": 1, "load": 1}
