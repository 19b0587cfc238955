"""The vocoder keeps first sounds until the rest can follow, and sends the same sound as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.stage.sound import LONGEST_SECONDS, Costs
from tests.support.code2wav import CHUNKS, difference, run_dry
from tests.support.speech import Spec, Speech

pytestmark = pytest.mark.e2e

BLOCK = 12  # codec tokens
SLOW = 1.0  # seconds for the tokens of a block, which are heard in 0.24 s
SPEC: Spec = (4 * BLOCK, "Ethan", 0.5, 3)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()  # for all tests, because the vocoders are, and time does not go back


@pytest.fixture
def engine(
    vocoders: Callable[..., DiffusionEngine], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DiffusionEngine]:
    engine = vocoders(True, CHUNKS | {"smooth_start": True})
    monkeypatch.setattr(engine.core.scheduler, "clock", clock)
    monkeypatch.setattr(engine, "_costs", Costs(16))  # which remembers no other test
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


def begin(engine: DiffusionEngine, clock: Clock, name: str, pace: float = SLOW, spec: Spec = SPEC) -> Speech:
    """An answer whose first piece has been made, and whose tokens take so many seconds per block."""
    speech = Speech(engine)
    speech.start(name, spec, first=BLOCK)
    go_on(speech)
    clock.now += pace
    speech.feed(name, BLOCK)
    go_on(speech)
    return speech


def test_a_first_sound_is_kept_if_its_answers_tokens_come_too_slowly(engine: DiffusionEngine, clock: Clock) -> None:
    speech = begin(engine, clock, "kept")
    assert not speech.heard["kept"]
    clock.now += LONGEST_SECONDS - 0.01
    assert not engine.runnable()
    clock.now += 0.02
    assert engine.runnable()
    speech.step()
    assert len(speech.heard["kept"]) == 1
    assert not engine.runnable()
    speech.feed_all("kept")
    speech.run()
    fast = begin(engine, clock, "fast", pace=0.05)
    fast.feed_all("fast")
    fast.run()
    assert difference(speech.wave("kept"), fast.wave("fast")) <= 1e-5


def test_another_answers_sound_is_begun_only_while_there_is_time_to_make_it(
    engine: DiffusionEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Costs(16)
    slow.stepped([0.1], 1.0, 900.0)
    monkeypatch.setattr(engine, "_costs", slow)
    speech = begin(engine, clock, "first")
    for name, priority in (("second", 0), ("third", -1)):
        speech.start(name, SPEC, first=SPEC[0], priority=priority)
        assert engine.waits_for_input(name), "there is no room for it"
    speech.feed_all("first")
    while "first" not in speech.finished:
        assert engine.waits_for_input("second")
        assert engine.waits_for_input("third")
        speech.step()
    assert engine.waits_for_input("second")
    assert not engine.waits_for_input("third"), "the more urgent one comes first"
    engine.abort("third")
    assert not engine.waits_for_input("second"), "what is aborted makes room at once"
    speech.run()
    assert len(speech.wave("second")) == SPEC[0] * 480


def test_sound_that_is_sent_at_once_waits_for_no_room(
    vocoders: Callable[..., DiffusionEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vocoders(True, CHUNKS | {"smooth_start": False})
    slow = Costs(16)
    slow.stepped([0.1], 1.0, 900.0)
    slow.completed(0.1, 1, 0.2)
    monkeypatch.setattr(engine, "_costs", slow)
    speech = Speech(engine)
    for name in ("first", "second"):
        speech.start(name, SPEC, first=SPEC[0])
        assert not engine.waits_for_input(name)
    speech.run()


def test_a_request_that_is_aborted_leaves_nothing_kept(engine: DiffusionEngine, clock: Clock) -> None:
    gone = begin(engine, clock, "gone")
    engine.abort("gone")
    clock.now += 10
    assert not engine.runnable()
    assert not gone.heard["gone"]


def test_kept_sound_leaves_before_the_error_of_a_later_chunk(
    engine: DiffusionEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    speech = begin(engine, clock, "failing")
    assert not speech.heard["failing"]

    def integrate(job_ids: Sequence[str]) -> NoReturn:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.core.worker.model_runner, "integrate", integrate)
    speech.feed_all("failing")
    go_on(speech)
    assert len(speech.heard["failing"]) == 1
    assert "out of luck" in speech.errors["failing"].error.message
