"""What a stage keeps of what it sent, and how a stage that starts again gets it."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from omni_actors.errors import EngineError, ErrorCode, InvalidPayload, StageLost
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.fields import DType, Header, HostTensor, ReplicaId, TensorRef, pack_token_ids
from omni_actors.protocol.messages import (
    Chunk,
    Delivered,
    FinishReason,
    HeldRequest,
    Resend,
    StageDone,
    TextDelta,
    Unreachable,
)
from omni_actors.protocol.payloads import PromptEmbedsPayload
from omni_actors.sharing import Budget
from omni_actors.stage import actor as actor_module
from omni_actors.stage.attempts import COPIED_BYTES, ENTRY_BYTES, JOINED_BYTES, Receiver, ResendBuffer
from omni_actors.stage.engine_interface import ErrorEvent, FinishedEvent, StreamEvent, TextEvent
from omni_actors.stage.outbound import Outgoing
from tests.support.builders import pipeline
from tests.support.stage import EMPTY, ROUTE, StageUnderTest

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
    assert sent[0].body.rows == PromptEmbedsPayload(TensorRef(DType.F32, (1, 1), 0))
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
