"""The vocoder keeps first sounds while others would have had gaps, and sends the same sound as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from tests.support.code2wav import CHUNKS, difference, run_dry
from tests.support.speech import Spec, Speech

pytestmark = pytest.mark.e2e

BLOCK = 12  # codec tokens
LATE = 1.0  # seconds after the first piece, at which tokens for the second come
SPEC: Spec = (4 * BLOCK, "Ethan", 0.5, 3)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(
    vocoders: Callable[..., DiffusionEngine], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DiffusionEngine]:
    engine = vocoders(True, CHUNKS | {"smooth_start": True})
    monkeypatch.setattr(engine.core.scheduler, "clock", clock)
    yield engine
    run_dry(engine)
    assert set(engine.counts().values()) == {0}, engine.counts()


def go_on(speech: Speech) -> None:
    """Step until there is nothing to do at this moment."""
    for _ in range(500):
        if not speech.engine.runnable():
            return
        speech.step()
    pytest.fail("the engine does not become idle")


def begin(engine: DiffusionEngine, name: str) -> Speech:
    """An answer whose first piece has been made."""
    speech = Speech(engine)
    speech.start(name, SPEC, first=2 * BLOCK)
    go_on(speech)
    return speech


def answer_late(engine: DiffusionEngine, clock: Clock, name: str) -> Speech:
    """A whole answer, the second piece of which comes too late."""
    speech = begin(engine, name)
    clock.now += LATE
    speech.feed_all(name)
    go_on(speech)
    return speech


def test_the_first_sound_is_kept_for_as_long_as_the_last_answers_needed(engine: DiffusionEngine, clock: Clock) -> None:
    clock.now += 100  # nothing is known of the load now
    before = [answer_late(engine, clock, f"before{number}") for number in range(3)]
    assert len(before[0].heard["before0"]) > 1, "nothing was kept of the first"
    first = len(before[0].heard["before0"][0]) / 24_000
    speech = begin(engine, "kept")
    assert not speech.heard["kept"]
    clock.now += LATE - first - 0.01
    assert not engine.runnable()
    clock.now += 0.02
    assert engine.runnable()
    speech.step()
    assert len(speech.heard["kept"]) == 1
    assert not engine.runnable()
    speech.feed_all("kept")
    speech.run()
    assert difference(speech.wave("kept"), before[0].wave("before0")) <= 1e-5


def test_kept_sound_goes_with_the_end_of_its_answer_or_with_the_answer(engine: DiffusionEngine, clock: Clock) -> None:
    clock.now += 200
    for number in range(3):
        answer_late(engine, clock, f"before{number}")
    speech = begin(engine, "whole")
    speech.feed_all("whole")
    go_on(speech)
    assert "whole" in speech.finished
    assert len(speech.wave("whole")) == SPEC[0] * 480
    gone = begin(engine, "gone")
    engine.abort("gone")
    clock.now += 10
    assert not engine.runnable()
    assert not gone.heard["gone"]


def test_kept_sound_leaves_before_the_error_of_a_later_chunk(
    engine: DiffusionEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.now += 300
    for number in range(3):
        answer_late(engine, clock, f"before{number}")
    speech = begin(engine, "failing")
    assert not speech.heard["failing"]

    def integrate(job_ids: Sequence[str]) -> NoReturn:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.core.worker.model_runner, "integrate", integrate)
    speech.feed_all("failing")
    go_on(speech)
    assert len(speech.heard["failing"]) == 1
    assert "out of luck" in speech.errors["failing"].error.message
