"""Streamed rows and kept ones: who waits for what, and their memory, on a scheduler that only counts."""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from omni_actors.engine.models import SpeechLimit
from omni_actors.engine.rows import FollowedRows, RowCache
from omni_actors.engine.scheduler import OmniSchedulerBase, RowStream
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.messages import StageDone
from omni_actors.protocol.payloads import AdditionalInformationEntry, AdditionalInformationPayload
from omni_actors.transport.link import ReceivedCredit, Window
from tests.support.row_streams import CountedRequest, CountingEngine, StreamScheduler
from tests.support.stage import StageUnderTest

SEEDS = st.integers(0, (1 << 32) - 1)


def test_a_request_without_its_row_waits_outside_the_batch():
    scheduler = StreamScheduler()
    assert isinstance(scheduler, OmniSchedulerBase)
    scheduler.open_stream("a", RowStream(1, False, 8))
    scheduler.add_request(CountedRequest("a"))
    scheduler.add_request(CountedRequest("b"))  # an ordinary request
    batches = [sorted(scheduler.schedule().num_scheduled_tokens) for _ in range(4)]
    assert batches == [["a", "b"], ["a", "b"], ["b"], ["b"]]
    assert [scheduler.waits_for_input(name) for name in ("a", "b", "unknown")] == [True, False, False]
    counts = {"streams": 1, "held": 1, "pending_rows": 0, "row_bytes": 8, "waiting_for_budget": 0, "followed": 0}
    assert scheduler.omni_counts() == counts
    scheduler.push_rows("a", torch.zeros(2, 3), complete=False)
    assert scheduler.omni_counts()["pending_rows"] == 2
    assert not scheduler.waits_for_input("a")
    output = scheduler.schedule()
    assert sorted(output.num_scheduled_tokens) == ["a", "b"]
    assert [len(rows) for rows in output.omni_row_updates["a"].rows] == [2]
    assert not output.omni_row_updates["a"].complete
    scheduler.push_rows("a", None, complete=True)
    for _ in range(5):
        assert "a" in scheduler.schedule().num_scheduled_tokens


def test_a_preempted_request_waits_in_the_queue_for_the_row_of_its_last_token():
    scheduler = StreamScheduler()
    scheduler.open_stream("a", RowStream(1, False, 8))
    request = CountedRequest("a")
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.waits_for_input("a")
    scheduler.preempt(request)
    assert scheduler.waits_for_input("a")
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert not scheduler.has_runnable()
    scheduler.push_rows("a", torch.zeros(1, 3), complete=False)
    assert scheduler.has_runnable()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 3}, "its prompt, its first token, and its second"
    assert list(output.omni_row_updates) == ["a"], "in the step that makes the request known to the worker again"


def test_a_scheduler_that_found_nothing_sleeps_until_something_happens():
    scheduler = StreamScheduler(places=1)
    scheduler.open_stream("a", RowStream(0, False, 0))
    scheduler.add_request(CountedRequest("a"))
    scheduler.schedule()
    scheduler.add_request(CountedRequest("b"))  # no place for it while a waits for rows
    assert scheduler.has_runnable()
    output = scheduler.schedule()
    scheduler.update_from_output(output, None)  # vLLM also hands over the result of an empty batch
    assert not scheduler.has_runnable()
    scheduler.push_rows("a", torch.zeros(1, 1), complete=False)
    assert scheduler.has_runnable()


@pytest.mark.parametrize(
    ("asked", "params", "longest"),
    [
        (1000, {}, 10 + 3 * 6),
        (20, {}, 20),
        (1000, {"min_tokens": 40}, 40),
        (1000, {"min_tokens": 5}, 28),
        (1000, {"ignore_eos": True}, 1000),
    ],
)
@pytest.mark.parametrize("known", ["from the start", "later", "before the request is queued"])
def test_a_speech_ends_at_the_latest_where_its_text_allows(asked, params, longest, known):
    """A text of six tokens: one in the prompt, five rows."""
    scheduler = StreamScheduler()
    scheduler.speech_limit = SpeechLimit(10, 3)
    request = CountedRequest("a", max_tokens=asked, sampling_params=SamplingParams(max_tokens=asked, **params))
    scheduler.open_stream("a", RowStream(5 if known == "from the start" else 2, known == "from the start", 0, 1))
    if known == "later":
        scheduler.add_request(request)
        scheduler.push_rows("a", torch.zeros(1, 1), complete=False)
        assert request.max_tokens == asked, "more text may come"
        scheduler.push_rows("a", torch.zeros(2, 1), complete=True)
    else:
        if known == "before the request is queued":
            scheduler.push_rows("a", torch.zeros(3, 1), complete=True)
        scheduler.add_request(request)
    assert request.max_tokens == longest


def admitted(scheduler: StreamScheduler, **sizes: int) -> set[str]:
    """Those that run after new requests with rows of these sizes have come and a step was made."""
    for name, size in sizes.items():
        scheduler.open_stream(name, RowStream(0, True, size))
        scheduler.add_request(CountedRequest(name))
    scheduler.schedule()
    return scheduler.running_ids()


def test_an_urgent_request_is_the_next_to_get_room_and_a_small_one_does_not_overtake_a_large_one():
    assert admitted(StreamScheduler(budget_bytes=10), a=6, large=6, small=2) == {"a"}
    scheduler = StreamScheduler(budget_bytes=10)
    assert admitted(scheduler, a=6, b=6, c=6) == {"a"}
    scheduler.open_stream("urgent", RowStream(0, True, 6))
    scheduler.add_request(CountedRequest("urgent", priority=-1))
    scheduler.schedule()
    assert scheduler.running_ids() == {"a"}
    for name, then in (("a", "urgent"), ("urgent", "b"), ("b", "c")):
        scheduler.finish(scheduler.requests[name])
        scheduler.schedule()
        assert scheduler.running_ids() == {then}


def test_what_was_admitted_gets_all_its_rows_and_its_place_back():
    scheduler = StreamScheduler(budget_bytes=10)
    request = CountedRequest("a")
    scheduler.open_stream("a", RowStream(0, False, 8))
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.push_rows("a", torch.zeros(100, 1), complete=False)
    assert admitted(scheduler, b=1) == {"a"}
    scheduler.preempt(request)
    scheduler.schedule()
    assert scheduler.running_ids() == {"a"}, "its rows are with the worker, over the budget or not"
    scheduler.finish(request)
    scheduler.schedule()
    assert scheduler.running_ids() == {"b"}


WIDTH = 4
ROW_BYTES = 4 * WIDTH


class Edge:
    """A thinker's queue to its talker: one for all requests, with the credit of a small window."""

    def __init__(self, stage: StageUnderTest, messages: int) -> None:
        self.stage = stage
        self.queue: collections.deque[tuple[str, int, int, int]] = collections.deque()  # request, seq, first row, rows
        self.lengths: dict[str, tuple[int, int]] = {}  # rows of the prompt, rows in all
        self._window = Window(messages, 1 << 30)
        self._received: ReceivedCredit[str] = ReceivedCredit(messages, 1 << 30)

    def send(self) -> bool:
        """Deliver the first message, if there is credit for it; whether it left."""
        if not self.queue or not self._window.admits(1):
            return False
        request_id, seq, first, rows = self.queue.popleft()
        self._window.sent(1)
        prompt, total = self.lengths[request_id]
        information = AdditionalInformationPayload({"prompt_tokens": AdditionalInformationEntry(scalar=prompt)})
        tensor = HostTensor(DType.F32, (rows, WIDTH), bytes(rows * ROW_BYTES))
        final = first + rows == total
        fields = {"start": first, "final": final, "information": information}
        assert self.stage.chunk(request_id, seq, tensors={"rows": tensor}, **fields) == []
        self._received.take("thinker", 1)
        return True

    def grant(self) -> bool:
        """Give credit as the engine's loop does; whether any was withheld."""
        if self.stage.actor.saturated:
            return True
        for _, messages, size in self._received.collect(everything=True):
            self._window.granted(messages, size)
        return False


@given(SEEDS)
def test_every_request_ends_whatever_the_order_of_rows_and_however_small_budget_and_window(seed: int) -> None:
    generator = random.Random(seed)
    scheduler = StreamScheduler(budget_bytes=generator.randint(1, 30) * ROW_BYTES, places=generator.randint(1, 4))
    engine = CountingEngine(scheduler, WIDTH)
    stage = StageUnderTest("talker", engine, processor="thinker2talker")
    edge = Edge(stage, messages=generator.randint(1, 6))
    unsent: dict[str, list[tuple[str, int, int, int]]] = {}
    for number in range(generator.randint(1, 8)):
        name, prompt, reply = f"r{number}", generator.randint(1, 12), generator.randint(1, 12)
        edge.lengths[name] = (prompt, prompt + reply)
        rest = [(name, index + 1, prompt + 1 + index, 1) for index in range(reply - 1)]
        unsent[name] = [(name, 0, 0, prompt + 1), *rest]
        stage.expect(name, priority=generator.randint(-2, 2))
    ended: list[str] = []
    for _ in range(5000):  # far more than it takes: the bound ends a deadlock
        if unsent and generator.random() < 0.7:  # the thinker makes a row of any of its requests
            name = generator.choice(list(unsent))
            edge.queue.append(unsent[name].pop(0))
            if not unsent[name]:
                del unsent[name]
        if generator.random() < 0.8:
            edge.send()
        if generator.random() < 0.8:
            ended += [
                message.header.request_id for message in stage.actor.step() if isinstance(message.body, StageDone)
            ]
        edge.grant()
        if len(ended) == len(edge.lengths):
            break
    assert sorted(ended) == sorted(edge.lengths)
    assert not any(engine.counts().values())


def test_credit_is_withheld_while_the_engine_can_work_and_only_then() -> None:
    """Two rows of the admitted request are behind those of one that waits for the budget."""
    scheduler = StreamScheduler(budget_bytes=4 * ROW_BYTES)
    stage = StageUnderTest("talker", CountingEngine(scheduler, WIDTH), processor="thinker2talker")
    edge = Edge(stage, messages=2)
    edge.lengths = {"a": (2, 5), "b": (2, 3)}
    edge.queue.extend([("a", 0, 0, 3), ("b", 0, 0, 3), ("a", 1, 3, 1), ("a", 2, 4, 1)])
    for name in edge.lengths:
        stage.expect(name)
    assert edge.send()
    assert edge.send()
    assert edge.grant(), "over the budget, and a can start"
    assert not edge.send()
    stage.actor.step()
    stage.actor.step()
    assert scheduler.running_ids() == {"a"}
    assert not stage.actor.runnable()
    assert not edge.grant(), "b waits for a, and a for its rows"
    while edge.send():
        pass
    while stage.actor.runnable():
        stage.actor.step()
    assert not edge.queue
    assert stage.held()["engine_row_bytes"] == 0


SIZE, KEPT_WIDTH = 4, 2
BLOCK_BYTES = SIZE * KEPT_WIDTH * 4


@dataclass
class Asked:
    """Stands for vLLM's request."""

    request_id: str
    block_hashes: list[str]
    num_prompt_tokens: int = field(default=0)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.block_hashes) * SIZE + 1


def rows(first: int, last: int) -> torch.Tensor:
    """Row i holds the number i."""
    return torch.arange(first, last, dtype=torch.float32).unsqueeze(1).repeat(1, KEPT_WIDTH)


def follow(cache: RowCache, name: str, blocks: str, prompt: int = 0) -> FollowedRows:
    return FollowedRows(cache, Asked(name, list(blocks), prompt))


def computed(followed: FollowedRows, first: int, last: int) -> tuple[int, list[float]]:
    """What is passed on when positions [first, last) are computed: the first position, and each row's number."""
    emitted = followed.complete({"start": first, "rows": rows(first, last)})
    return emitted["start"], emitted["rows"][:, 0].tolist()


@pytest.mark.parametrize("pieces", [[1] * 18, [3, 5, 7, 3], [4, 4, 4, 4, 2], [17, 1]])
def test_rows_are_kept_by_whole_blocks_however_they_come(pieces: list[int]) -> None:
    cache = RowCache(1 << 20, SIZE)
    request = follow(cache, "r", "abcd", prompt=9)
    request.use(0)
    start = 0
    for piece in pieces:
        assert computed(request, start, start + piece) == (start, list(range(start, start + piece)))
        start += piece
    assert [block[:, 0].tolist() for block in cache.take("abcd")] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert cache.held_bytes == 4 * BLOCK_BYTES


def test_memory_is_bounded_and_the_beginning_of_a_used_prefix_goes_last() -> None:
    cache = RowCache(4 * BLOCK_BYTES, SIZE)
    old = follow(cache, "old", "abc")
    old.use(0)
    computed(old, 0, 13)
    old.close()
    new = follow(cache, "new", "xy")
    new.use(0)
    computed(new, 0, 9)
    assert cache.held_bytes == 4 * BLOCK_BYTES
    assert (cache.covers("abc"), cache.covers("xy")) == (2, 2), "the end of the older prefix made room"
    nothing = RowCache(0, SIZE)
    none = follow(nothing, "none", "abc")
    none.use(0)
    computed(none, 0, 13)
    assert len(nothing) == nothing.held_bytes == 0


def test_no_request_waits_for_one_that_has_ended_or_for_rows_that_are_not_kept() -> None:
    cache = RowCache(1 << 20, SIZE)
    first, second = follow(cache, "1", "abcd"), follow(cache, "2", "abcd")
    first.use(0)
    assert second.waits()
    first.close()
    assert not second.waits()
    small = RowCache(2 * BLOCK_BYTES, SIZE)
    first, second = follow(small, "1", "abcd"), follow(small, "2", "abcd")
    first.use(0)
    computed(first, 0, 17)
    assert not second.waits(), "the first block has made room already, and is not computed again"
    unkept = RowCache(0, SIZE)
    follow(unkept, "1", "ab").use(0)
    assert not follow(unkept, "2", "ab").waits()
