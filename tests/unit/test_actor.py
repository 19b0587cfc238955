"""The stage actor with an engine that records what it is asked: what it takes, and what it keeps of what it sent."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from omni_actors.config import FlowConfig
from omni_actors.errors import EngineError, ErrorCode, InvalidPayload, PromptTooLong, StageLost
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import DType, Header, HostTensor, ReplicaId, TensorRef, pack_token_ids
from omni_actors.protocol.messages import (
    Abort,
    Chunk,
    Delivered,
    Ended,
    FinishReason,
    HeldRequest,
    OpenRequest,
    Resend,
    StageDone,
    TextDelta,
    Unreachable,
)
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget
from omni_actors.stage import actor as actor_module
from omni_actors.stage import attempts
from omni_actors.stage.attempts import COPIED_BYTES, ENTRY_BYTES, JOINED_BYTES, Receiver, ResendBuffer
from omni_actors.stage.engine_interface import ErrorEvent, FinishedEvent, StreamEvent, TextEvent
from omni_actors.stage.outbound import Outgoing
from omni_actors.stage.processors import Thinker2Talker
from tests.support.builders import header_from, pipeline
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


TALKER, AGAIN = ROUTE[2], ReplicaId("talker", 0, 6)


def token(index: int, final: bool = False, request_id: str = "r1") -> StreamEvent:
    return StreamEvent(request_id, [index], start=index, final=final)


def row(index: int) -> StreamEvent:
    return StreamEvent("r1", [index], {"rows": HostTensor(DType.F32, (1, 1), memoryview(b"row%d" % index))}, {}, index)


def started(**options: object) -> StageUnderTest:
    stage = StageUnderTest("thinker", **options)
    stage.expect()
    stage.tokens("ab")
    return stage


def finish(stage: StageUnderTest) -> None:
    stage.engine.held.clear()
    *end, done = stage.do(FinishedEvent("r1", FinishReason.STOP, 2, 2))
    assert type(done.body) is StageDone
    assert all(item.body.final for item in end)  # where the engine itself gave no end


def resend(stage: StageUnderTest, receiver: ReplicaId = AGAIN, attempt: int = 1, own: int = 0) -> list[Outgoing]:
    header = Header("resend", "r1", attempt=own)
    return stage.actor.receive(Envelope(header, Resend(receiver=receiver, attempt=attempt)))


def chunks(messages: list[Outgoing]) -> list[tuple[ReplicaId, int, int, bytes, bool]]:
    sent = [item for item in messages if isinstance(item.body, Chunk)]
    return [
        (item.destination, item.header.attempt, item.header.seq, item.body.token_ids, item.body.final) for item in sent
    ]


def test_what_was_sent_is_sent_again_and_what_follows_goes_on_from_there() -> None:
    stage = started()
    assert chunks(stage.do(row(0), row(1))) == [
        (TALKER, 0, 0, pack_token_ids([0]), False),
        (TALKER, 0, 1, pack_token_ids([1]), False),
    ]
    assert resend(stage) == []
    assert stage.actor.runnable()
    sent = stage.do(row(2))
    assert chunks(sent) == [(AGAIN, 1, index, pack_token_ids([index]), False) for index in range(3)]
    assert [bytes(item.buffers[0]) for item in sent] == [b"row0", b"row1", b"row2"]
    assert sent[0].body.tensors == {"rows": TensorRef(DType.F32, (1, 1), 0)}
    assert {item.header.deadline for item in sent} == {stage.clock.now + 600}
    assert not stage.actor.runnable()
    end, result = stage.do(FinishedEvent("r1", FinishReason.STOP, 2, 3))
    assert chunks([end]) == [(AGAIN, 1, 3, b"", True)]
    assert type(result.body) is StageDone
    assert result.header.attempt == 0, "this stage's own attempt is what it was"


def test_a_finished_request_is_kept_until_it_is_over_everywhere() -> None:
    stage = started()
    stage.do(token(0), token(1, final=True))
    finish(stage)
    counts = stage.held()
    assert counts["requests"] == 0
    assert counts["retained"] == 1
    assert counts["retained_bytes"] == ENTRY_BYTES + 8 + ENTRY_BYTES, "tokens for the talker, and that it is done"
    resend(stage)
    assert chunks(stage.actor.step()) == [(AGAIN, 1, 0, pack_token_ids([0, 1]), True)]
    resend(stage, ReplicaId("talker", 0, 7), 2)
    assert chunks(stage.actor.step()) == [(ReplicaId("talker", 0, 7), 2, 0, pack_token_ids([0, 1]), True)]
    stage.ended()
    assert stage.held() == EMPTY
    (refused,) = resend(stage, ReplicaId("talker", 0, 8), 3)
    assert refused.body.code is ErrorCode.STAGE_LOST
    assert refused.header.attempt == 0


@pytest.mark.parametrize("how", ["abort", "deadline", "next attempt", "failure"])
def test_nothing_is_kept_of_what_is_over(how: str) -> None:
    for finished in (True, False):
        stage = started()
        stage.do(row(0))
        if finished:
            finish(stage)
        resend(stage)
        if how == "abort":
            stage.abort()
        elif how == "deadline":
            stage.clock.now += 700
            stage.actor.tick()
        elif how == "failure":
            (told,) = stage.actor.reject(Header("", "r1", "thinker", 0, 5), InvalidPayload("too large to send"))
            assert told.body.code is ErrorCode.INVALID_PAYLOAD, "also when it is finished here"
        else:
            stage.expect(attempt=1)
            stage.abort(attempt=1)
        assert stage.held() == EMPTY
        assert stage.actor.step() == []
        assert not stage.actor.runnable()


def test_over_the_budget_nothing_of_the_request_is_kept() -> None:
    config = StageUnderTest("thinker").stage
    stage = started(stage=msgspec.structs.replace(config, retain_bytes=2 * ENTRY_BYTES))
    stage.do(row(0))
    stage.expect("r2")
    stage.tokens("ab", request_id="r2")
    assert len(chunks(stage.do(row(1)))) == 1, "it is sent all the same"
    assert stage.held()["retained_bytes"] == 0
    assert stage.actor.counts()["dropped_retained"] == 1
    stage.do(token(0, request_id="r2"))
    assert stage.held()["retained_bytes"] == ENTRY_BYTES + 4, "others are kept"
    (refused,) = resend(stage)
    assert refused.body.code is ErrorCode.STAGE_LOST
    assert refused.body.stage == "thinker"
    assert ("abort", "r1") in stage.engine.calls


def test_a_receiver_that_takes_nothing_is_reported_and_what_is_made_meanwhile_kept() -> None:
    stage = started()
    stage.do(row(0))
    (told,) = stage.actor.undelivered("r1", TALKER, StageLost("gone"))
    assert told.body == Unreachable(receiver=TALKER, attempt=0)
    assert told.destination is None
    assert told.header.seq == 0
    assert stage.actor.undelivered("r1", TALKER, StageLost("gone")) == [], "once"
    assert stage.do(row(1)) == []
    resend(stage)
    assert [item[2] for item in chunks(stage.actor.step())] == [0, 1]
    assert stage.actor.undelivered("r1", TALKER, StageLost("gone")) == [], "its life before"
    *_, done = stage.do(FinishedEvent("r1", FinishReason.STOP, 2, 2))
    assert done.header.seq == 1
    (told,) = stage.actor.undelivered("r1", AGAIN, StageLost("gone"))
    assert told.body == Unreachable(receiver=AGAIN, attempt=1)
    assert told.header.seq == 2, "also when it is finished here"


def test_small_buffers_are_copied_and_large_ones_referred_to() -> None:
    budget = Budget(1 << 30)
    output = ResendBuffer(budget, [TALKER], 0)
    batch = bytearray(COPIED_BYTES + 8)
    small, large = memoryview(batch)[:8], memoryview(batch)[8:]
    large = memoryview(bytearray(COPIED_BYTES + 1))
    output.keep(Chunk(tensors={"x": TensorRef(DType.U8, (8,), 0)}), [small])
    output.keep(Chunk(tensors={"x": TensorRef(DType.U8, (len(large),), 0)}), [large])
    output.restart(receiver := Receiver(AGAIN, 1))
    first, second = (output.next_resend(receiver)[1][0] for _ in range(2))
    assert first == bytes(8)
    assert first is not small
    assert second is large
    assert output.next_resend(receiver) is None
    assert budget.used == 2 * ENTRY_BYTES + 8 + len(large)


def test_only_consecutive_tokens_are_joined_and_not_without_end() -> None:
    output = ResendBuffer(Budget(1 << 30), [TALKER], 0)
    many = JOINED_BYTES // 4
    for begin, count in ((0, 2), (2, 1), (9, 1), (10, many), (10 + many, 1)):
        output.keep(Chunk(token_ids=bytes(4 * count), start=begin), [])
    output.restart(receiver := Receiver(AGAIN, 1))
    got = []
    while (entry := output.next_resend(receiver)) is not None:
        got.append((entry[0].start, len(entry[0].token_ids) // 4))
    assert got == [(0, 3), (9, 1), (10, many), (10 + many, 1)]


def text(index: int) -> TextEvent:
    return TextEvent("r1", chr(97 + index), (index,))


def fetch(stage: StageUnderTest, had: int) -> list[Outgoing]:
    """The next coordinator asks for the results, of which its client has so many tokens."""
    checksum = zlib.crc32(pack_token_ids(range(had)))
    delivered = Delivered(counts={"tokens": had, "characters": had}, checksum=checksum)
    return stage.actor.receive(Envelope(Header("resend", "r1"), Resend(delivered=delivered)))


def results(messages: list[Outgoing]) -> list[tuple[int, str]]:
    return [(item.header.seq, item.body.text) for item in messages if isinstance(item.body, TextDelta)]


def test_results_are_kept_while_there_is_no_coordinator_and_the_next_one_gets_what_its_client_lacks() -> None:
    stage = started()
    assert results(stage.do(text(0), text(1))) == [(0, "a"), (1, "b")]
    stage.actor.detach()
    (sent,) = stage.do(text(2), token(0))
    assert chunks([sent]) == [(TALKER, 0, 0, pack_token_ids([0]), False)], "the stages after it go on"
    assert stage.actor.held_requests() == (HeldRequest("r1", 0, 3, ((TALKER, 0),)),)
    assert fetch(stage, 1) == []
    assert results(stage.do(text(3))) == [(0, "b"), (1, "c"), (2, "d")]
    assert results(stage.do(text(4))) == [(3, "e")]


def test_a_client_that_has_something_else_gets_an_error() -> None:
    stage = started()
    stage.do(text(0), text(1))
    stage.actor.detach()
    other = Delivered(counts={"tokens": 1, "characters": 1}, checksum=zlib.crc32(pack_token_ids([9])))
    stage.actor.receive(Envelope(Header("resend", "r1"), Resend(delivered=other)))
    (failed,) = stage.actor.step()
    assert failed.body.code is ErrorCode.STAGE_LOST


def test_a_request_that_fails_while_its_results_are_fetched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "RESENT_MESSAGES", 1)
    stage = started()
    stage.do(text(0), text(1), text(2))
    stage.actor.detach()
    fetch(stage, 0)
    sent = stage.do(ErrorEvent("r1", EngineError("It broke.")))
    assert results(sent) == [(0, "a")]
    assert sent[-1].body.code is ErrorCode.ENGINE_ERROR
    assert not stage.actor.runnable() or stage.actor.step() == []


def test_results_that_cannot_be_kept_while_they_are_fetched_leave_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "RESENT_MESSAGES", 1)
    stage = started(stage=msgspec.structs.replace(pipeline().stage("thinker"), retain_bytes=3 * ENTRY_BYTES))
    stage.do(text(0), text(1), text(2))
    stage.actor.detach()
    fetch(stage, 0)
    sent = stage.do(text(3))
    assert results(sent) == [(0, "a")]
    assert sent[-1].body.code is ErrorCode.STAGE_LOST
    assert results(stage.do(text(4))) == []
