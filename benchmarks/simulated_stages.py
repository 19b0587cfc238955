"""Thinker, talker and vocoder as a discrete-event model, for playback_simulation.py.

A step of a stage is host time, then time on the device, which all three share. While others are on the device, a
stage's own time there passes more slowly. Times are those of one H200 and Qwen2.5-Omni-7B's sizes: steps of each stage
alone (the talker's in bursts of four), and `SLOWDOWN` and loads fitted to what was measured together ("From outside,
over HTTP" in docs/benchmarks.md).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workload import Sample

from omni_actors.config import CoordinatorConfig
from omni_actors.coordinator.core.admission import SpeechLine
from omni_actors.coordinator.core.slots import Tenant, Ticket
from omni_actors.stage.sound import (
    FIRST_SECONDS,
    HEARD_SECONDS,
    PIECES_AHEAD,
    POLL_SECONDS,
    Ahead,
    Arrivals,
    DemandFlag,
    DevicePriority,
    Forecast,
    Outlook,
    Piece,
    choose,
    needs_device,
)
from omni_actors.telemetry.request_log import Playback

PROMPT_TOKENS, TEXT_TOKENS, CODEC_TOKENS = 65, 64, 512
BLOCK = 12  # codec tokens
BLOCK_SECONDS = 0.24
HELD_BACK_SECONDS = 0.11  # of a chunk, whose last samples need frames that are not there yet
LIGHT_BLOCKS = 64  # the vocoder's own
POLICY = (1, 1, 2, 4, 8)  # and its chunks, in blocks; the last length repeats
THINKER_SEATS, TALKER_SEATS = 128, 64  # max_num_seqs
PROMPT_BUDGET = 2048  # tokens of prompts in a step of the thinker: max_num_batched_tokens
CHUNKS = 32  # and of the vocoder
PROMPT_SECONDS = 0.003  # of the prompt stage, which takes one prompt after the other
HOP_SECONDS = 0.003  # from one stage to the next, or to the client
TICK_SECONDS = 0.1  # of the coordinator
HEARTBEAT_SECONDS = 0.5  # after which a stage reports what it can make
FOREVER = 1e9
SPREAD = 0.12  # of the logarithm of step times
YIELDS = ("thinker", "code2wav")  # to which the talker does
ORDERS = ("number", "deadline")

# By how much a stage slows down while another one is on the device, times that one's load. Under MPS, where the vocoder
# has a lower priority than the others.
SLOWDOWN = {
    "thinker": {"talker": 0.16, "code2wav": 0.4},
    "talker": {"thinker": 0.5, "code2wav": 1.0},
    "code2wav": {"thinker": 3.0, "talker": 1.3},
}


def ends(policy: tuple[int, ...], chunks: int) -> list[int]:
    """The blocks at which the first chunks end."""
    return list(itertools.accumulate(policy[min(chunk, len(policy) - 1)] for chunk in range(chunks)))


@dataclass(frozen=True)
class Setting:
    """What is simulated; see the options of playback_simulation.py."""

    concurrency: int
    policy: tuple[int, ...]
    order: str
    rounds: int = 2
    stagger: float = 0.0
    talker_yields_to: tuple[str, ...] = YIELDS
    seed: int = 0
    keeps: bool = True
    slowness: float = 1.0  # of the device
    lengths: tuple[int, ...] = (CODEC_TOKENS,)  # codec tokens of the answers, in turn
    rate: float = 0.0  # requests a second, at random moments, in place of a closed loop
    cold: bool = False  # no warm-up
    points: int = 10  # of the vocoder's solver
    pace: float = CoordinatorConfig().speech_pace  # 0: no speech waits


@dataclass(eq=False)
class Answer:
    """One answer: what each stage has made of it."""

    name: str
    began: float
    tokens: int = CODEC_TOKENS  # of its sound, in the end
    speaks: bool = False  # its speech may be made
    sample: Sample = field(default_factory=Sample)
    text: int = 0
    rows: int = 0  # of the thinker, at the talker
    codec: int = 0
    arrived: int = 0  # codec tokens at the vocoder
    arrivals: Arrivals | None = None
    chunk: int = 0
    begin: int = 0  # block at which the chunk begins
    steps: int = 0  # of the chunk
    queued: float = 0.0
    made: Playback = field(default_factory=Playback)
    first_due: float = 0.0
    rank: float = 0.0  # when its next piece is due, for the order
    leaves: float = 0.0  # when the first sound leaves
    left: bool = False  # it has
    kept: list[float] = field(default_factory=list)  # seconds of the pieces made before that

    @property
    def due(self) -> float:
        """When its listener falls silent."""
        return self.made.runs_out if self.made.first else self.first_due


class Stage(ABC):
    """A process with requests; does one step of a batch after the other."""

    load = 1.0  # of the device during a step, for others

    def __init__(self, pipeline: Pipeline, name: str, yields_to: tuple[str, ...], folder: Path) -> None:
        self.pipeline, self.name = pipeline, name
        self.answers: list[Answer] = []
        self.batch: list[Answer] = []
        self._next: list[Answer] = []  # picked when the step before it began: scheduling is asynchronous
        self.host = self.device = 0.0  # seconds left of the step
        self.poll_at = math.inf
        self.steps, self.busy_seconds, self._began = 0, 0.0, 0.0
        self._flag = DemandFlag(folder, name, 0, clock=lambda: pipeline.now)
        self._priority = DevicePriority(folder, yields_to, clock=lambda: pipeline.now)

    @abstractmethod
    def pick(self) -> list[Answer]:
        """The next batch."""

    @abstractmethod
    def cost(self) -> tuple[float, float]:
        """Milliseconds of the batch on the host and, alone, on the device."""

    @abstractmethod
    def urgent(self) -> bool:
        """Whether answers wait for their first output here, and not for input."""

    @abstractmethod
    def done(self) -> None:
        """Take the results of the batch."""

    def begin(self) -> None:
        """Begin a step, unless there is nothing to do or another stage goes first."""
        self.poll_at = math.inf
        self._flag.set(self.urgent())
        batch = self._next or self.pick()
        if batch and self._priority.yields():
            self.poll_at = self.pipeline.now + POLL_SECONDS
        elif batch:
            self.batch, self._began = batch, self.pipeline.now
            self._next = self.pick()
            spread = self.pipeline.random.lognormvariate(0, SPREAD)
            self.host, self.device = (milliseconds / 1000 * spread for milliseconds in self.cost())
            self.device *= self.pipeline.setting.slowness

    def end(self) -> None:
        """End the step."""
        self.steps += 1
        self.busy_seconds += self.pipeline.now - self._began
        self.done()
        self.batch = []


class Thinker(Stage):
    """Writes text; the first step of an answer is its prompt."""

    def pick(self) -> list[Answer]:
        picked, prompts = [], 0
        for answer in self.answers[:THINKER_SEATS]:
            if answer.text + (answer in self.batch) < TEXT_TOKENS and prompts < PROMPT_BUDGET:
                picked.append(answer)
                prompts += PROMPT_TOKENS if answer.text == 0 and answer not in self.batch else 0
        return picked

    def cost(self) -> tuple[float, float]:
        prompts = sum(PROMPT_TOKENS for answer in self.batch if answer.text == 0)
        self.load = min(1.0, 0.45 + 0.017 * len(self.batch))
        return 1.4, 4.0 + 0.02 * len(self.batch) + 0.022 * prompts

    def urgent(self) -> bool:
        return any(answer.text == 0 for answer in self.answers)

    def done(self) -> None:
        pipeline = self.pipeline
        for answer in self.batch:
            answer.text += 1
            if answer.text == 1:
                answer.sample.first_text = pipeline.now + HOP_SECONDS - answer.began
                pipeline.later(HOP_SECONDS, lambda answer=answer: pipeline.admission.enter(answer))
            elif answer.text == 2:
                pipeline.later(HOP_SECONDS, lambda answer=answer: pipeline.talker.answers.append(answer))
            pipeline.later(HOP_SECONDS, lambda answer=answer, rows=answer.text: setattr(answer, "rows", rows))
        self.answers = [answer for answer in self.answers if answer.text < TEXT_TOKENS]


class Talker(Stage):
    """Makes codec tokens; token k needs row k of the thinker, while there are any to come."""

    def pick(self) -> list[Answer]:
        return [answer for answer in self.answers if self._ready(answer)][:TALKER_SEATS]

    def _ready(self, answer: Answer) -> bool:
        codec = answer.codec + (answer in self.batch)
        return answer.speaks and codec < answer.tokens and (codec < answer.rows or answer.rows == TEXT_TOKENS)

    def cost(self) -> tuple[float, float]:
        prompts = sum(PROMPT_TOKENS for answer in self.batch if answer.codec == 0)
        return 0.35 + 0.006 * len(self.batch), 1.7 + 0.006 * len(self.batch) + 0.005 * prompts

    def urgent(self) -> bool:
        return any(answer.codec < BLOCK and self._ready(answer) for answer in self.answers)

    def done(self) -> None:
        vocoder = self.pipeline.vocoder
        for answer in self.batch:
            answer.codec += 1
            if answer.codec % BLOCK == 0 or answer.codec == answer.tokens:
                tokens = answer.codec
                self.pipeline.later(HOP_SECONDS, lambda answer=answer, tokens=tokens: vocoder.arrive(answer, tokens))
        self.answers = [answer for answer in self.answers if answer.codec < answer.tokens]


class Vocoder(Stage):
    """Makes sound, chunk by chunk, each in a step for every interval of its solver."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._forecast = Forecast(CHUNKS)
        self._intervals = self.pipeline.setting.points - 1
        self._share = 0.0  # of a light step, in the last one

    def arrive(self, answer: Answer, tokens: int) -> None:
        """Take codec tokens: so many in all."""
        if not answer.arrived:
            answer.arrivals = self._forecast.arrivals()
            answer.rank = answer.first_due = self.pipeline.now + FIRST_SECONDS
            self.answers.append(answer)
        answer.arrived = tokens
        answer.arrivals.add(self.pipeline.now, tokens)

    def _end(self, answer: Answer) -> int:
        """The block at which the answer's chunk ends."""
        policy, total = self.pipeline.setting.policy, -(-answer.tokens // BLOCK)
        return min(answer.begin + policy[min(answer.chunk, len(policy) - 1)], total)

    def _blocks(self, answer: Answer) -> int:
        """The chunk's blocks, with its look-ahead."""
        total = -(-answer.tokens // BLOCK)
        return min(self._end(answer) + 1, total) - answer.begin

    def _ready(self, answer: Answer) -> bool:
        if answer in self.batch and answer.steps == self._intervals - 1:
            return False  # its chunk ends with this step, and only then comes the next one
        return answer.arrived == answer.tokens or answer.arrived >= (answer.begin + self._blocks(answer)) * BLOCK

    def pick(self) -> list[Answer]:
        ready = [answer for answer in self.answers if self._ready(answer)]
        if self.pipeline.setting.order == "number":
            running = [answer for answer in ready if answer.steps or answer in self.batch]
            waiting = [answer for answer in ready if answer not in running]
            waiting.sort(key=lambda answer: (answer.chunk, answer.queued))
            return [*running, *waiting][:CHUNKS]
        pieces = [Piece(answer, 0, answer.rank, self._blocks(answer) / LIGHT_BLOCKS) for answer in ready]
        return choose(pieces, self.pipeline.now, CHUNKS)

    def cost(self) -> tuple[float, float]:
        blocks = sum(self._blocks(answer) for answer in self.batch)
        self._share = blocks / LIGHT_BLOCKS
        self.load = min(1.0, 0.4 + blocks / 60)
        device = 2.8 + 0.14 * blocks
        decoded = [self._end(answer) - answer.begin for answer in self.batch if answer.steps == self._intervals - 1]
        if decoded:
            device += 3.5 + 1.1 * sum(decoded) * BLOCK_SECONDS
        return 1.0, device

    @property
    def listeners(self) -> int:
        """For how many it makes sound in time."""
        return self._forecast.listeners

    def urgent(self) -> bool:
        able = {answer for answer in self.answers if answer in self.batch or self._ready(answer)}
        waiting = (answer.due for answer in self.answers if answer not in able)
        return needs_device((answer.due for answer in able), waiting, self.pipeline.now)

    def done(self) -> None:
        for answer in self.batch:
            answer.steps += 1
            if answer.steps == self._intervals:
                self._send(answer)
        self._foresee()
        for answer in [*self.batch, *self.answers]:
            if answer.kept and answer.leaves <= self.pipeline.now:
                for seconds in answer.kept:
                    self._leave(answer, seconds)
                answer.kept.clear()
                answer.left = True

    def _foresee(self) -> None:
        """Note how long the step took, and decide when first sounds that are kept leave."""
        now = self.pipeline.now
        self._forecast.stepped(self._share, self._began, now)
        kept = [answer for answer in self.answers if answer.kept and not answer.left]
        if kept and self.pipeline.setting.keeps:
            outlooks = {answer: self._outlook(answer) for answer in self.answers}
            self._forecast.look(list(outlooks.values()), now)
            for answer in kept:
                answer.leaves = outlooks[answer].leaves()

    def _outlook(self, answer: Answer) -> Outlook:
        """What is to be made of an answer."""
        policy, complete = self.pipeline.setting.policy, answer.arrived == answer.tokens
        total = -(-answer.tokens // BLOCK) if complete else math.inf
        ahead, begin, chunk, steps = [], answer.begin, answer.chunk, self._intervals - answer.steps
        while begin < total and len(ahead) < PIECES_AHEAD:
            end = min(begin + policy[min(chunk, len(policy) - 1)], total)
            window_end = min(end + 1, total)
            missing = 0 if complete else max(0, int(window_end) * BLOCK - answer.arrived)
            before = max(0.0, begin * BLOCK_SECONDS - HELD_BACK_SECONDS)
            ahead.append(Ahead(before, (window_end - begin) / LIGHT_BLOCKS, steps, missing))
            begin, chunk, steps = end, chunk + 1, self._intervals
        return Outlook(answer.made, answer.rank, answer.arrivals, ahead)

    def _leave(self, answer: Answer, seconds: float) -> None:
        pipeline = self.pipeline
        pipeline.later(HOP_SECONDS, lambda: answer.sample.playback.add(pipeline.now - answer.began, seconds))

    def _send(self, answer: Answer) -> None:
        pipeline, end = self.pipeline, self._end(answer)
        last = end * BLOCK >= answer.tokens
        total = answer.tokens / BLOCK * BLOCK_SECONDS if last else end * BLOCK_SECONDS - HELD_BACK_SECONDS
        seconds = total - answer.made.seconds
        self._forecast.completed(self._blocks(answer) / LIGHT_BLOCKS, self._intervals, seconds, total)
        first = not answer.made.first
        answer.made.add(pipeline.now, seconds)
        if first:
            answer.leaves = FOREVER if pipeline.setting.keeps else pipeline.now
        answer.begin, answer.steps, answer.queued = end, 0, pipeline.now
        answer.chunk += 1
        heard = self.pipeline.setting.keeps and not first and not answer.kept
        answer.rank = answer.due - (HEARD_SECONDS if heard else 0.0)
        answer.kept.append(seconds)
        if last:
            answer.leaves = pipeline.now
        if last:
            self.answers.remove(answer)
            pipeline.later(2 * HOP_SECONDS, lambda: pipeline.ended(answer))


class Admission:
    """The coordinator's part: lets the speech of answers begin, by the rule of the product."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        pace = pipeline.setting.pace
        settings = CoordinatorConfig(speech_pace=pace, speech_queue=10_000, speech_wait=FOREVER)
        self._line = SpeechLine(settings) if pace else None
        self._waiting: dict[str, Answer] = {}
        self._reported = -HEARTBEAT_SECONDS
        if self._line is not None:
            pipeline.later(0.0, self._tick)

    def enter(self, answer: Answer) -> None:
        """An answer has its first text."""
        if self._line is None:
            answer.speaks = True
            return
        self._waiting[answer.name] = answer
        self._line.enter(Ticket(answer.name, b"", Tenant(b""), 0, 0, ()), self.pipeline.now)
        self._begin()

    def leave(self, answer: Answer) -> None:
        """All of its sound has come."""
        if self._line is not None:
            self._line.leave(answer.name)
            self._begin()

    def _begin(self) -> None:
        for name, _ in self._line.begin(self.pipeline.now):  # type: ignore[union-attr]
            self._waiting.pop(name).speaks = True

    def _tick(self) -> None:
        if self.pipeline.now - self._reported >= HEARTBEAT_SECONDS:
            self._reported = self.pipeline.now
            self._line.report("code2wav/0", self.pipeline.vocoder.listeners or 0)  # type: ignore[union-attr]
        self._begin()
        self.pipeline.later(TICK_SECONDS, self._tick)


class Pipeline:
    """The three stages, their device, and clients of which each asks again when it has been answered."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        self.now = 0.0
        self.random = random.Random(setting.seed)
        self.thinker = Thinker(self, "thinker", (), folder)
        self.talker = Talker(self, "talker", setting.talker_yields_to, folder)
        self.vocoder = Vocoder(self, "code2wav", ("thinker",), folder)
        self._stages: tuple[Stage, ...] = (self.thinker, self.talker, self.vocoder)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers, self._answers = itertools.count(), itertools.count()
        self.admission = Admission(self)
        self._samples: list[Sample] = []
        self._left = 0
        self._prompt_free = 0.0

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        """Do something in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def run(self) -> tuple[list[Sample], float]:
        """Warm up with one answer for each client, then measure; return the samples and the seconds they took."""
        if not self.setting.cold:
            self._load(self.setting.concurrency, 0.0)
        self._samples.clear()
        began = self.now
        self._load(max(3, self.setting.rounds * self.setting.concurrency), self.setting.stagger)
        return self._samples, self.now - began

    def busy(self) -> dict[str, str]:
        """Steps a second, their length and the share of the time, by stage."""
        return {
            stage.name: f"{stage.steps / self.now:.0f} x {1000 * stage.busy_seconds / stage.steps:.1f} ms, "
            f"{stage.busy_seconds / self.now:.0%}"
            for stage in self._stages
        }

    def ended(self, answer: Answer) -> None:
        """Take an answer; its client asks again."""
        self.admission.leave(answer)
        answer.sample.total = self.now - answer.began
        self._samples.append(answer.sample)
        if not self.setting.rate:
            self._submit()

    def _load(self, count: int, stagger: float) -> None:
        self._left, goal = count, len(self._samples) + count
        if self.setting.rate:
            moment = 0.0
            for _ in range(count):
                moment += self.random.expovariate(self.setting.rate)
                self.later(moment, self._submit)
        else:
            for number in range(self.setting.concurrency):
                self.later(stagger * number / self.setting.concurrency, self._submit)
        while len(self._samples) < goal:
            self._advance()

    def _submit(self) -> None:
        if not self._left:
            return
        self._left -= 1
        number = next(self._answers)
        answer = Answer(str(number), self.now, self.setting.lengths[number % len(self.setting.lengths)])
        spread = self.random.lognormvariate(0, SPREAD)
        self._prompt_free = max(self.now, self._prompt_free) + PROMPT_SECONDS * spread
        self.later(self._prompt_free + 3 * HOP_SECONDS - self.now, lambda: self.thinker.answers.append(answer))

    def _rate(self, stage: Stage, others: list[Stage]) -> float:
        """How fast the stage's time on the device passes while these others are on it."""
        return 1 / (1 + sum(SLOWDOWN[stage.name][other.name] * other.load for other in others))

    def _advance(self) -> None:
        """Go on to the next event."""
        for stage in self._stages:
            if not stage.batch:
                stage.begin()
        busy = [stage for stage in self._stages if stage.batch]
        on_device = [stage for stage in busy if not stage.host]
        rates = {stage: self._rate(stage, [other for other in on_device if other is not stage]) for stage in on_device}
        moments = [stage.poll_at for stage in self._stages] + [moment for moment, _, _ in self._events[:1]]
        waits = [stage.device / rates[stage] if stage in rates else stage.host for stage in busy]
        wait = max(0.0, min([*waits, *(moment - self.now for moment in moments)]))
        if math.isinf(wait):
            raise RuntimeError(f"Nothing happens any more after {self.now:.1f} s.")
        self.now += wait
        for stage in busy:
            if stage in rates:
                stage.device -= wait * rates[stage]
            else:
                stage.host = 0.0 if stage.host - wait < 1e-9 else stage.host - wait
            if stage in rates and stage.device < 1e-9:
                stage.end()
        while self._events and self._events[0][0] <= self.now + 1e-9:
            heapq.heappop(self._events)[2]()
