"""The vocoder's budget in a real EngineCore: what is held between chunks, who waits for it, and who goes first."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest
from tests.support.code2wav import CHUNKS, difference, run_dry
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
def watch(engine, monkeypatch):
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
    monkeypatch.setattr(engine.core.scheduler.budget.held, "limit", requests * held + largest)
    return requests * held + largest


def test_the_account_is_what_the_model_has_allocated(engine, watch):
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


def failing(original, job_ids_of):
    """A function that fails for the jobs of request a."""

    def call(given):
        if any(job_id.startswith("a/") for job_id in job_ids_of(given)):
            raise RuntimeError("out of luck")
        return original(given)

    return call


def end(how, speech, monkeypatch):
    """End request a in one of the ways that there are."""
    worker = speech.engine.core.worker
    runner = worker.model_runner
    if how == "abort":
        speech.engine.abort("a")
    else:
        if how == "a failing chunk":
            monkeypatch.setattr(runner, "integrate", failing(runner.integrate, list))
        if how == "a failing step":  # outside of the model, where no request can be told from another
            ids = operator.attrgetter("num_scheduled_tokens")
            monkeypatch.setattr(worker, "execute_model", failing(worker.execute_model, ids))
        speech.feed_all("a")


@pytest.mark.parametrize("how", ["finish", "abort", "a failing chunk", "a failing step"])
def test_however_a_request_ends_its_memory_goes_to_the_next(engine, monkeypatch, how):
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
    end(how, speech, monkeypatch)
    speech.waiting.pop("a", None)
    speech.run()
    assert len(speech.wave("b")) == 80 * 480
    assert ("a" in speech.finished) == (how == "finish")
    if "failing" in how:
        assert "out of luck" in speech.errors["a"].error.message


def test_who_has_sound_in_hand_lets_others_go_first_even_in_the_middle_of_a_chunk(vocoders, monkeypatch):
    engine = vocoders(False, DECODE, max_num_seqs=1)
    alone = Speech(engine)
    specs: dict[str, Spec] = {"a": (80, "Ethan", 0.5, 0), "b": (BLOCK, "Ethan", 0.5, 1), "c": (BLOCK, "Ethan", 0.5, 2)}
    for name, spec in specs.items():
        alone.start(name, spec, first=80)
        alone.feed(name, 1)
        alone.run()
    seen, speech = watched(engine, monkeypatch), Speech(engine)
    now = engine.core.scheduler.clock()
    monkeypatch.setattr(engine.core.scheduler, "clock", lambda: now)  # so that nothing that has been sent is heard
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
