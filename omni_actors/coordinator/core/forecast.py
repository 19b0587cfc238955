"""Expects how much work a request is for each stage, learnt from those that have ended. Pure: no clock.

Work is counted in hundredths of an average request of the stage (`AVERAGE`). Beforehand it follows from the limit of
tokens and from how long such answers were; then what has come of text and sound is taken off, and once the text is
there its length says how much is to be spoken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from omni_actors.config import Modality, PipelineConfig
from omni_actors.protocol.fields import TOKEN_BYTES
from omni_actors.protocol.header import Body
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.results import AudioChunk, FinishReason, StageUsage, TextDelta

AVERAGE = 100
LARGEST = 8.0  # average requests that one may count as; the smallest is the inverse
PRESENT = 0.6  # of an average request: what any request costs the others as long as it is in their steps
STEPS = 4  # in which work that is done is taken off; the last one stays until the stage has finished
GAIN = 1 / 32  # of a newly observed value in an average
PACE_GAIN = 1 / 8
PACED_TOKENS = 16  # of a request, to say how fast its replica is
PACED_REQUESTS = 8  # after which a replica's pace is used
EVEN = 1.25  # paces that differ by less count as one
SLOWEST = 4.0


class Average:
    """A moving average."""

    def __init__(self, gain: float = GAIN) -> None:
        self._gain = gain
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Take one more value; the first ones weigh as much as each other."""
        self.count += 1
        self.value += max(self._gain, 1 / self.count) * (value - self.value)


@dataclass(slots=True)
class Work:
    """What a request is for one stage. `done` and `expected` are tokens of text or samples of sound."""

    size: float = 1.0  # in average requests
    expected: float = math.inf
    done: float = 0.0
    steps: int = 0

    @property
    def ahead(self) -> int:
        """What it still costs, in hundredths of an average request that has just begun: its presence and its length."""
        left = self.size * (STEPS - self.steps) / STEPS
        return round(AVERAGE * (PRESENT + (1 - PRESENT) * left))

    def advance(self, amount: float) -> bool:
        """Take note of output. Returns whether `ahead` has changed."""
        self.done += amount
        if self.done * STEPS < self.expected * (self.steps + 1):
            return False
        steps = min(STEPS - 1, int(STEPS * self.done / self.expected))
        changed, self.steps = steps > self.steps, max(steps, self.steps)
        return changed

    def resize(self, size: float, expected: float) -> None:
        """More is known about it."""
        self.size, self.expected = size, expected
        self.advance(0)


@dataclass
class Pace:
    """How many seconds a replica takes for a token of a request, compared with the replicas of its stage."""

    seconds: Average = field(default_factory=lambda: Average(PACE_GAIN))

    def slowness(self, usual: float) -> float:
        """1 for a usual replica, 2 for one that takes twice as long; differences that may be chance count as none."""
        if self.seconds.count < PACED_REQUESTS or usual <= 0:
            return 1.0
        ratio = self.seconds.value / usual
        if 1 / EVEN < ratio < EVEN:
            return 1.0
        return min(SLOWEST, max(1 / SLOWEST, round(4 * ratio) / 4))


class Forecast:
    """What the stages of a pipeline have taken so far, and what a request is therefore expected to take."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        made = {modality: stage.name for stage in pipeline.stages for modality in stage.outputs}
        self.text, self.sound = made.get(Modality.TEXT, ""), made.get(Modality.AUDIO, "")
        for_text = pipeline.route([Modality.TEXT]) if self.text else ()
        spoken = pipeline.route([Modality.AUDIO]) if self.sound else ()
        self.speech = tuple(stage for stage in spoken if stage not in for_text)
        self._tokens = {stage.name: Average() for stage in pipeline.stages}
        self._natural: dict[tuple[str, int], Average] = {}  # of answers that no limit cut, by the stages of their route
        self._samples = Average()
        self._pace = {stage.name: Average() for stage in pipeline.stages}

    def work(self, stage: str, stages: Sequence[str], params: StageParams) -> Work:
        """What a request is expected to be for a stage."""
        usual, natural = self._tokens[stage].value, self._natural.get((stage, len(stages)))
        likely = natural.value if natural is not None else usual
        limit = params.max_tokens
        if not usual:
            return Work()
        tokens = likely if limit is None else min(likely, limit)
        tokens = max(tokens, params.min_tokens or 0)
        expected = self._samples.value if stage in self.speech else tokens
        return Work(_bounded(tokens / usual), expected or math.inf)

    def spoken(self, tokens: int) -> tuple[float, float]:
        """The size of the speech of a text of so many tokens, and its samples as far as is known."""
        usual = self._tokens[self.text].value
        size = _bounded(tokens / usual) if usual and tokens else 1.0
        return size, size * self._samples.value or math.inf

    @staticmethod
    def amount(body: Body) -> float:
        """Tokens of text or samples of sound that a message brings."""
        if isinstance(body, TextDelta):
            return len(body.token_ids) // TOKEN_BYTES
        return body.samples.shape[0] if isinstance(body, AudioChunk) else 0.0

    def learn(self, stage: str, stages: Sequence[str], usage: StageUsage, work: Work | None) -> None:
        """Take note of what a stage took for a request."""
        tokens = usage.output_tokens
        if tokens:
            self._tokens[stage].add(tokens)
            natural = self._natural.setdefault((stage, len(stages)), Average())
            if usage.finish_reason is not FinishReason.LENGTH or tokens > natural.value:
                natural.add(tokens)
        if stage == self.sound and work is not None and work.done:
            self._samples.add(work.done)

    def pace(self, stage: str, pace: Pace, usage: StageUsage) -> float:
        """Take note of how fast a replica was. Returns its slowness."""
        seconds = usage.finished - usage.first_output
        if usage.output_tokens >= PACED_TOKENS and seconds > 0:
            pace.seconds.add(seconds / usage.output_tokens)
            self._pace[stage].add(seconds / usage.output_tokens)
        return pace.slowness(self._pace[stage].value)


def _bounded(size: float) -> float:
    return min(LARGEST, max(1 / LARGEST, size))
