"""The actor with several attempts at a request, with deadlines and with bounds."""

from __future__ import annotations

import pytest

from omni_actors.config import FlowConfig
from omni_actors.errors import EngineError, ErrorCode
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import Header, pack_token_ids
from omni_actors.protocol.messages import Abort, FinishReason, OpenRequest
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import FinishedEvent, TextEvent
from omni_actors.stage.outbound import Outgoing
from tests.support.stage import EMPTY, ROUTE, StageUnderTest, failed


def expect_attempt(stage: StageUnderTest, attempt: int) -> list[Outgoing]:
    body = OpenRequest(route=ROUTE, params=StageParams(), seed=3)
    return stage.actor.receive(Envelope(Header("expect", "r1", attempt=attempt), body))


def abort_attempt(stage: StageUnderTest, attempt: int) -> list[Outgoing]:
    return stage.actor.receive(Envelope(Header("abort", "r1", attempt=attempt), Abort()))


def tokens_of_attempt(stage: StageUnderTest, attempt: int, text: str = "ab") -> list[Outgoing]:
    return stage.chunk("r1", 0, attempt=attempt, token_ids=pack_token_ids(list(text.encode())), final=True)


def test_a_new_attempt_is_another_request_to_the_engine() -> None:
    stage = StageUnderTest("thinker")
    expect_attempt(stage, 0)
    tokens_of_attempt(stage, 0)
    abort_attempt(stage, 0)
    expect_attempt(stage, 1)
    tokens_of_attempt(stage, 0)
    assert stage.actor.dropped == {"foreign_epoch": 1}
    tokens_of_attempt(stage, 1)
    assert [call[:2] for call in stage.engine.calls if call[0] == "abort"] == [("abort", "r1")]
    assert stage.engine.held == {"r1~1"}
    assert stage.do(TextEvent("r1", "late", [1])) == []
    assert stage.actor.dropped["event_of_ended_request"] == 1
    (message,) = stage.do(TextEvent("r1~1", "x", [1]))
    assert message.header.request_id == "r1"
    assert message.header.attempt == 1
    assert message.header.seq == 0
    stage.engine.held.clear()
    stage.do(FinishedEvent("r1~1", FinishReason.STOP, 1, 1))
    stage.ended()
    assert stage.held() == EMPTY
    assert stage.do(TextEvent("r1~1", "late", [1])) == []
    assert stage.actor.dropped["event_of_ended_request"] == 2


@pytest.mark.parametrize("aborted", [True, False])
def test_chunks_of_the_next_attempt_may_come_first(aborted: bool) -> None:
    stage = StageUnderTest("thinker")
    expect_attempt(stage, 0)
    tokens_of_attempt(stage, 0, "old")
    tokens_of_attempt(stage, 1, "new")
    if aborted:
        abort_attempt(stage, 0)
        assert stage.held()["early_requests"] == 1
    expect_attempt(stage, 1)
    assert [bytes(inputs.token_ids) for inputs in stage.engine.started()] == [b"old", b"new"]
    assert ("abort", "r1") in stage.engine.calls
    assert stage.engine.held == {"r1~1"}


def test_old_attempts_touch_nothing() -> None:
    stage = StageUnderTest("thinker")
    expect_attempt(stage, 1)
    tokens_of_attempt(stage, 1)
    expect_attempt(stage, 0)
    abort_attempt(stage, 0)
    own = Header("", "r1", "thinker", 0, 5, 0)
    assert stage.actor.reject(own, EngineError("could not be sent")) == []
    assert stage.engine.held == {"r1~1"}
    abort_attempt(stage, 1)
    expect_attempt(stage, 1)
    assert stage.engine.held == set()
    assert stage.actor.dropped == {"opened_twice": 2, "late": 1}


def test_request_without_a_deadline_gets_one() -> None:
    stage = StageUnderTest("talker", default_timeout=50.0)
    stage.expect()
    stage.clock.now += 49.9
    assert stage.actor.tick() == []
    stage.clock.now += 0.1
    assert failed(stage.actor.tick()).code is ErrorCode.DEADLINE_EXCEEDED


def test_open_requests_are_bounded() -> None:
    stage = StageUnderTest("talker", max_in_flight=2)
    for number in range(4):
        assert stage.expect(f"r{number}") == []
    assert failed(stage.expect("r4")).code is ErrorCode.OVERLOADED
    stage.abort("r0")
    assert stage.expect("r5") == []


def test_saturated_only_by_whole_requests_and_while_the_engine_can_work() -> None:
    stage = StageUnderTest("talker", flow=FlowConfig(backlog_requests=2))
    for number in range(4):
        stage.expect(f"r{number}")
        stage.tokens("ab", request_id=f"r{number}", final=False)
    stage.engine.events.append(FinishedEvent("other", FinishReason.STOP, 1, 1))  # makes it runnable
    assert not stage.actor.saturated, "all of them wait for more input, which must not be held back"
    for number in range(3):
        stage.tokens("c", 1, f"r{number}", start=2)
    assert stage.actor.saturated
    stage.engine.events.clear()
    assert not stage.actor.saturated, "an engine that cannot work must get what it waits for"
    stage.engine.events.append(FinishedEvent("r0", FinishReason.STOP, 1, 1))
    assert stage.actor.saturated
    stage.actor.step()
    stage.engine.events.append(FinishedEvent("other", FinishReason.STOP, 1, 1))
    assert not stage.actor.saturated
    stage.abort("r1")
    stage.abort("r1")
    stage.tokens("c", 1, "r3", start=2)
    assert not stage.actor.saturated, "r2 and r3"
    stage.expect("r4")
    stage.tokens("c", request_id="r4")
    assert stage.actor.saturated
