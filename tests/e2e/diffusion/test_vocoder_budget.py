"""The vocoder's budget in a real EngineCore: what is held between chunks, who waits for it, and who goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.diffusion_runner import DiffusionJob
from omni_actors.errors import EngineError, InvalidPayload
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest
from tests.support.code2wav import CHUNKS, arguments, difference, run_dry
from tests.support.speech import STEPS, Spec, Speech

pytestmark = pytest.mark.e2e

BLOCK = 12  # codec tokens
LONG: Spec = (80, "Chelsie", 0.5, 2)  # several chunks
DECODE = CHUNKS


@dataclass
class Step:
    """One step of the model: its jobs, what the account says, and what they really need and hold."""

    jobs: tuple[str, ...]
    held: int
    needed: int
    allocated: int

    @property
    def requests(self) -> list[str]:
        return [job_id.rpartition("/")[0] for job_id in self.jobs]


@dataclass
class Watch:
    """The steps of the model, the jobs in it and how often each was in a step."""

    steps: list[Step] = field(default_factory=list)
    jobs: dict[str, DiffusionJob] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def order(self) -> list[str]:
        """The jobs in the order of their first steps."""
        return list(dict.fromkeys(job_id for step in self.steps for job_id in step.jobs))


@pytest.fixture
def watch(engine: DiffusionEngine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watched(engine, monkeypatch)


def watched(engine: DiffusionEngine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    runner, seen = engine.core.worker.model_runner, Watch()
    add, step = runner.add, runner.step

    def watched_add(job_id: str, job: DiffusionJob) -> None:
        seen.jobs[job_id] = job
        add(job_id, job)

    def watched_step(job_ids: Sequence[str]) -> Any:
        counts = engine.counts()
        for job_id in job_ids:
            seen.done[job_id] = seen.done.get(job_id, 0) + 1
        needed = sum(seen.jobs[job_id].bytes_at(seen.done[job_id]) for job_id in job_ids)
        seen.steps.append(Step(tuple(job_ids), counts["held_bytes"], needed, counts["allocated_bytes"]))
        return step(job_ids)

    monkeypatch.setattr(runner, "add", watched_add)
    monkeypatch.setattr(runner, "step", watched_step)
    return seen


def claim(engine: DiffusionEngine) -> tuple[int, int]:
    """What a request like LONG keeps between its chunks, and what the largest of them holds and needs."""
    request = StageRequest("", StageParams(num_steps=STEPS, guidance_scale=0.5), 0)
    stream = engine.core.worker.model_runner.open(request, StageInputs(token_ids=[1], complete=False))
    return stream.held_bytes, stream.job_bytes


def limit(engine: DiffusionEngine, monkeypatch: pytest.MonkeyPatch, requests: int) -> int:
    """Set a budget that has room for this many requests."""
    held, largest = claim(engine)
    monkeypatch.setattr(engine.core.scheduler.budget, "limit_bytes", requests * held + largest)
    return requests * held + largest


def test_the_account_is_what_the_model_has_allocated(engine: DiffusionEngine, watch: Watch) -> None:
    speech = Speech(engine)
    speech.start("r", LONG)
    speech.run()
    kept, largest = claim(engine)
    for step in watch.steps:
        (job_id,) = step.jobs
        job, carried = watch.jobs[job_id], step.allocated - watch.jobs[job_id].held_bytes
        assert step.held == kept + job.held_bytes
        if job_id == "r/0":
            assert carried == 0, "a job's own memory is known to the byte"
        else:
            assert 0.9 * kept < carried <= kept
        assert job.held_bytes + job.most_bytes <= largest
    watch.steps.clear()
    for number in range(4):
        speech.start(f"m{number}", (30 + 17 * number, "Ethan", 0.5 if number % 2 else 0.0, number))
    speech.run(3)
    assert max(len(step.jobs) for step in watch.steps) >= 3
    for step in watch.steps:
        assert 0.5 * step.held < step.allocated <= step.held


def test_requests_wait_until_those_before_them_have_ended(
    engine: DiffusionEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: dict[str, Spec] = {f"r{number}": (80, "Ethan", 0.5, number) for number in range(5)}
    free = Speech(engine)
    for name, spec in specs.items():
        free.start(name, spec)
    free.run()
    watch.steps.clear()
    watch.done.clear()
    budget = limit(engine, monkeypatch, 2)
    before = engine.statistics().budget
    speech = Speech(engine)
    for name, spec in specs.items():
        speech.start(name, spec)
    speech.run()
    assert list(speech.finished) == sorted(specs)
    last = {name: max(i for i, step in enumerate(watch.steps) if name in step.requests) for name in specs}
    first = {name: min(i for i, step in enumerate(watch.steps) if name in step.requests) for name in specs}
    for number, step in enumerate(watch.steps):
        assert step.held + step.needed <= budget
        assert step.allocated <= step.held
        assert sum(first[name] <= number <= last[name] for name in specs) <= 2, "requests admitted at a time"
    assert any(len(step.jobs) == 2 for step in watch.steps)
    after = engine.statistics().budget
    assert after.limit_bytes == budget
    assert after.deferrals > before.deferrals
    assert after.held_bytes == after.step_bytes == 0
    for name in specs:
        assert difference(speech.wave(name), free.wave(name)) <= 5e-6


def test_a_budget_for_less_than_one_request_serves_one_at_a_time(
    engine: DiffusionEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.core.scheduler.budget, "limit_bytes", 1)
    speech = Speech(engine)
    for number in range(3):
        speech.start(f"r{number}", (40, "Ethan", 0.5, number))
    speech.run()
    assert {len(step.jobs) for step in watch.steps} == {1}
    assert list(speech.finished) == ["r0", "r1", "r2"]


def finish(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    speech.feed_all("a")


def abort(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    speech.engine.abort("a")


def send_nonsense(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidPayload):
        speech.engine.extend("a", token_ids=[-1], complete=False)


def fail_its_chunk(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = speech.engine.core.worker.model_runner
    original = runner.integrate

    def integrate(job_ids: Sequence[str]) -> Any:
        if any(job_id.startswith("a/") for job_id in job_ids):
            raise RuntimeError("out of luck")
        return original(job_ids)

    monkeypatch.setattr(runner, "integrate", integrate)
    speech.feed_all("a")


def fail_its_step(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the model, where no request can be told from another."""
    worker = speech.engine.core.worker
    original = worker.execute_model

    def execute_model(scheduled: Any) -> Any:
        if any(job_id.startswith("a/") for job_id in scheduled.num_scheduled_tokens):
            raise RuntimeError("out of luck")
        return original(scheduled)

    monkeypatch.setattr(worker, "execute_model", execute_model)
    speech.feed_all("a")


@pytest.mark.parametrize(
    ("end", "outcome"),
    [(finish, "finished"), (abort, ""), (send_nonsense, ""), (fail_its_chunk, "errors"), (fail_its_step, "errors")],
)
def test_however_a_request_ends_its_memory_goes_to_the_next(
    engine: DiffusionEngine,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Speech, pytest.MonkeyPatch], None],
    outcome: str,
) -> None:
    limit(engine, monkeypatch, 1)
    speech = Speech(engine)
    speech.start("a", LONG, first=3 * BLOCK)  # two blocks are a chunk and its look-ahead
    speech.start("b", LONG)
    while not speech.heard["a"]:
        speech.step()
    speech.feed_all("b")
    run_dry(engine)
    assert not speech.heard["b"]
    assert engine.counts()["held_bytes"] == claim(engine)[0], "the first holds what it keeps for its next chunk"
    assert engine.counts()["deferred"] == 1
    assert not engine.waits_for_input("b"), "it waits for memory"
    end(speech, monkeypatch)
    speech.waiting.pop("a", None)
    speech.run()
    assert len(speech.wave("b")) == 80 * 480
    if outcome:
        assert "a" in getattr(speech, outcome)
    if outcome == "errors":
        assert isinstance(speech.errors["a"].error, EngineError)


@pytest.fixture(scope="module")
def one_at_a_time(tiny_checkpoint: Path) -> Iterator[DiffusionEngine]:
    engine = DiffusionEngine(arguments(tiny_checkpoint, decode=DECODE, max_num_seqs=1))
    yield engine
    engine.shutdown()


def stop_time(engine: DiffusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no time pass from now on, so that nothing that has been sent is heard."""
    now = engine.core.scheduler.clock()
    monkeypatch.setattr(engine.core.scheduler, "clock", lambda: now)


def test_who_has_sound_in_hand_lets_others_go_first_even_in_the_middle_of_a_chunk(
    one_at_a_time: DiffusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, alone = one_at_a_time, Speech(one_at_a_time)
    specs: dict[str, Spec] = {"a": (80, "Ethan", 0.5, 0), "b": (BLOCK, "Ethan", 0.5, 1), "c": (BLOCK, "Ethan", 0.5, 2)}
    for name, spec in specs.items():
        alone.start(name, spec, first=80)
        alone.feed(name, 1)
        alone.run()
    seen, speech = watched(engine, monkeypatch), Speech(engine)
    stop_time(engine, monkeypatch)
    speech.start("a", specs["a"], first=80)
    speech.feed("a", 1)
    while seen.done.get("a/2", 0) < 2:
        speech.step()
    for name in ("b", "c"):
        speech.start(name, specs[name], first=BLOCK)
        speech.feed(name, 1)
    speech.run()
    assert seen.order() == ["a/0", "a/1", "a/2", "b/0", "c/0", "a/3"], "in the order of their first steps"
    assert list(speech.finished) == ["b", "c", "a"]
    last = {job: max(number for number, step in enumerate(seen.steps) if job in step.jobs) for job in seen.jobs}
    assert last["c/0"] < last["a/2"], "the first sound of others came in the middle of the third chunk"
    for name in specs:
        assert difference(speech.wave(name), alone.wave(name)) <= 1e-5, "being left out of steps changes no sound"


def test_who_falls_silent_soon_goes_before_new_answers_and_who_has_more_in_hand_after_them(
    one_at_a_time: DiffusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks if chunks are ranked by their number."""
    seen, speech = watched(one_at_a_time, monkeypatch), Speech(one_at_a_time)
    stop_time(one_at_a_time, monkeypatch)
    speech.start("a", (80, "Ethan", 0.5, 0), first=80)
    speech.feed("a", 1)
    while seen.done.get("a/0", 0) < 2:
        speech.step()
    speech.start("new", (BLOCK, "Ethan", 0.5, 1), first=BLOCK)
    speech.feed("new", 1)
    speech.run()
    assert seen.order() == ["a/0", "a/1", "new/0", "a/2", "a/3"]


def test_urgent_requests_go_first(one_at_a_time: DiffusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, speech, seen = one_at_a_time, Speech(one_at_a_time), watched(one_at_a_time, monkeypatch)
    speech.start("now", (BLOCK, "Ethan", 0.5, 0), first=BLOCK)
    speech.feed("now", 1)
    engine.step()
    for name, priority, count in (("patient", 1, BLOCK), ("usual", 0, BLOCK), ("urgent", -1, 30)):
        speech.start(name, (count, "Ethan", 0.5, 1), first=count, priority=priority)
        speech.feed(name, 1)
    speech.run()
    assert seen.order() == ["now/0", "urgent/0", "urgent/1", "urgent/2", "usual/0", "patient/0"]


def test_of_those_that_wait_for_memory_the_most_urgent_is_admitted_first(
    engine: DiffusionEngine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(engine, monkeypatch, 1)
    speech = Speech(engine)
    for name, priority in (("now", 0), ("usual", 0), ("later", 0), ("urgent", -3)):
        speech.start(name, (30, "Ethan", 0.5, 1), first=30, priority=priority)
        if name == "now":
            speech.step()
    speech.run()
    assert list(speech.finished) == ["now", "urgent", "usual", "later"]
