"""The stage actor with an engine that records what it is asked."""

from __future__ import annotations

import msgspec
import pytest

from omni_actors.config import FlowConfig
from omni_actors.errors import ErrorCode, InvalidPayload, PromptTooLong
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import DType, Header, HostTensor
from omni_actors.protocol.messages import Abort, Ended, FinishReason, OpenRequest, Resend
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage import attempts
from omni_actors.stage.engine_interface import FinishedEvent, TextEvent
from omni_actors.stage.processors import Thinker2Talker
from tests.support.builders import header_from
from tests.support.stage import EMPTY, ROUTE, StageUnderTest, failed


def test_chunks_before_the_announcement_are_kept_in_order_and_none_follows_the_last() -> None:
    stage = StageUnderTest("thinker")
    stage.tokens("ab", 0, final=False)
    stage.tokens("cd", 1, start=2)
    counts = stage.held()
    assert counts["early_requests"] == 1
    assert counts["early_chunk_bytes"] > 0
    assert stage.engine.calls == []
    assert stage.expect() == []
    assert [list(inputs.token_ids) for inputs in stage.engine.started()] == [list(b"abcd")]
    assert stage.held() == {**EMPTY, "requests": 1, "engine_requests": 1}
    assert failed(stage.tokens("e", 2, start=4)).code is ErrorCode.PROTOCOL_ERROR, "after the last one"


def test_chunks_whose_announcement_does_not_come_are_answered_and_remembered() -> None:
    stage = StageUnderTest("thinker")
    stage.tokens("ab")
    stage.clock.now += 10.0
    message = failed(stage.actor.tick())
    assert message.code is ErrorCode.PROTOCOL_ERROR
    assert stage.held() == EMPTY
    assert stage.expect() == [], "too late"
    assert stage.engine.calls == []


def test_early_chunks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_EARLY_BYTES", 4000)
    stage = StageUnderTest("thinker")
    stage.tokens("a", 0, "small", final=False)
    rows = HostTensor(DType.F32, (750, 1), bytes(3000))
    message = failed(stage.chunk("large", tensors={"rows": rows}))
    assert message.code is ErrorCode.PROTOCOL_ERROR
    assert stage.actor.dropped["early_overflow"] == 1
    for i in range(10):
        stage.tokens("a", 0, f"r{i}", final=False)
    assert stage.held()["early_chunk_bytes"] <= 4000
    assert stage.expect("small") == []


@pytest.mark.parametrize(
    ("error", "code"), [(PromptTooLong("long"), ErrorCode.PROMPT_TOO_LONG), (ValueError("odd"), ErrorCode.ENGINE_ERROR)]
)
def test_a_refused_start_fails_this_request_alone(error: Exception, code: ErrorCode) -> None:
    stage = StageUnderTest("thinker")
    stage.expect("good")
    stage.tokens("a", request_id="good")
    stage.engine.refuse = error
    stage.expect("bad")
    message = failed(stage.tokens("a", request_id="bad"))
    assert message.code is code
    assert message.stage == "thinker"
    assert str(error).split()[0] in message.message
    assert stage.held() == {**EMPTY, "requests": 1, "engine_requests": 1}
    assert ("abort", "bad") in stage.engine.calls, "whatever the engine took of it is given back"


def test_a_processor_that_breaks_harms_its_request_only_and_quotes_nothing_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = StageUnderTest("talker", processor="thinker2talker")

    def broken(self: object, source: str, piece: object) -> list:
        raise IndexError("a bug, with the prompt in its text")

    monkeypatch.setattr(Thinker2Talker, "feed", broken)
    stage.expect()
    assert failed(stage.chunk(final=True)).code is ErrorCode.ENGINE_ERROR
    assert stage.held() == EMPTY
    assert "IndexError" in caplog.text
    assert "in broken" in caplog.text
    assert "the prompt" not in caplog.text


def test_abort_is_idempotent_and_frees_everything() -> None:
    stage = StageUnderTest("thinker")
    stage.expect()
    stage.tokens("ab")
    for _ in range(2):
        assert stage.abort() == []
    assert stage.held() == EMPTY
    assert stage.engine.calls.count(("abort", "r1")) == 1
    stage.tokens("late", 1)
    assert stage.actor.dropped["late"] == 1
    stage.tokens("early", request_id="r2")
    stage.abort("r2")
    assert stage.held() == EMPTY, "an abort drops early chunks, too"
    stage.expect("r2")
    assert stage.held() == EMPTY, "an abort that overtook the announcement counts"


def test_a_deadline_or_the_default_ends_the_request() -> None:
    stage = StageUnderTest("thinker", default_timeout=50.0)
    stage.expect(deadline=1010.0)
    stage.expect("forever")
    for number, now in enumerate((1010.0, 1050.0)):
        stage.clock.now = now - 0.1
        assert stage.actor.tick() == []
        stage.clock.now = now
        assert failed(stage.actor.tick()).code is ErrorCode.DEADLINE_EXCEEDED
        assert stage.held()["requests"] == 1 - number


def test_undecodable_messages_fail_their_request_known_or_not() -> None:
    stage = StageUnderTest("thinker")
    stage.expect()
    header = Header("chunk", "r1", "prompt", 0, 5)
    assert failed(stage.actor.reject(header, InvalidPayload("bad"))).code is ErrorCode.INVALID_PAYLOAD
    assert stage.actor.reject(header, InvalidPayload("again")) == [], "told once"
    message = failed(stage.actor.reject(Header("expect", "r2", attempt=1), InvalidPayload("bad")))
    assert message.code is ErrorCode.INVALID_PAYLOAD
    assert stage.actor.reject(Header("expect", "r2"), InvalidPayload("again")) == []
    assert stage.actor.reject(Header("expect"), InvalidPayload("no request at all")) == []
    assert stage.held() == EMPTY


def test_a_new_attempt_is_another_request_to_the_engine() -> None:
    stage = StageUnderTest("thinker")
    stage.expect(attempt=0)
    stage.tokens("ab", attempt=0)
    stage.abort(attempt=0)
    stage.expect(attempt=1)
    stage.tokens("ab", attempt=0)
    assert stage.actor.dropped == {"foreign_epoch": 1}
    stage.tokens("ab", attempt=1)
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
    stage.expect(attempt=0)
    stage.tokens("old", attempt=0)
    stage.tokens("new", attempt=1)
    if aborted:
        stage.abort(attempt=0)
        assert stage.held()["early_requests"] == 1
    stage.expect(attempt=1)
    assert [bytes(inputs.token_ids) for inputs in stage.engine.started()] == [b"old", b"new"]
    assert ("abort", "r1") in stage.engine.calls
    assert stage.engine.held == {"r1~1"}


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
