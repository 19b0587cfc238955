"""The account of a diffusion stage's memory: what requests hold, what jobs hold, what a step needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5OmniToken2WavConfig

from omni_actors.config import StageConfig, StageKind
from omni_actors.engine.models.qwen2_5_omni.code2wav import Qwen2_5OmniCode2Wav
from omni_actors.engine.models.qwen2_5_omni.stream import Geometry
from omni_actors.engine.scheduler import Claim, DeviceBudget
from omni_actors.engine.workers.diffusion import DiffusionJob

LIMIT = 100


def job(*, held: int = 0, step: int = 0, final: int | None = None, steps: int = 1) -> DiffusionJob:
    return DiffusionJob(None, steps, step, step if final is None else final, held)


def admitted(budget: DeviceBudget, request_id: str, number: int, work: DiffusionJob, claim: Claim) -> bool:
    return budget.admits(f"{request_id}/{number}", work, claim)


def test_a_request_holds_its_bytes_from_its_first_job_to_its_end() -> None:
    budget = DeviceBudget(LIMIT)
    a, b = Claim("a", 40, 20), Claim("b", 45, 20)
    budget.begin_step()
    assert admitted(budget, "a", 0, job(held=5, step=10), a)
    assert budget.held.used == 45
    assert budget.step_bytes == 10
    budget.job_ended("a/0")
    assert budget.held.used == 40, "between its jobs, too"
    budget.begin_step()
    assert not admitted(budget, "b", 0, job(step=10), b), "40 + 45, and 20 for a job to come"
    assert budget.deferred == 1
    budget.request_ended("a")
    budget.begin_step()
    assert admitted(budget, "b", 0, job(step=10), b)
    budget.job_ended("b/0")
    budget.request_ended("b")
    assert budget.held.used == 0


def test_later_jobs_pass_a_request_that_waits_and_new_requests_do_not() -> None:
    budget = DeviceBudget(LIMIT)
    a, large, small = Claim("a", 40, 20), Claim("large", 50, 20), Claim("small", 1, 20)
    budget.begin_step()
    assert admitted(budget, "a", 0, job(step=20), a)
    budget.job_ended("a/0")
    budget.begin_step()
    assert not admitted(budget, "large", 0, job(step=20), large)
    assert not admitted(budget, "small", 0, job(step=20), small), "it would fit, but must not overtake"
    assert admitted(budget, "a", 1, job(step=20), a), "only its end makes room for the others"


def test_a_job_that_is_left_out_of_steps_still_counts() -> None:
    budget = DeviceBudget(LIMIT)
    first, second = job(held=30, step=10, final=40, steps=2), job(held=30, step=10, final=40, steps=2)
    budget.begin_step()
    assert budget.admits("a", first)
    assert budget.admits("b", second)
    budget.begin_step()
    assert budget.takes(first, 2)
    assert not budget.takes(second, 2), "60 held and 80 for the two last steps"
    assert budget.held.used == 60
    assert not budget.admits("c", job()), "nothing is admitted past it"
    assert budget.deferred == 2
    budget.job_ended("a")
    budget.begin_step()
    assert budget.deferred == 0
    assert budget.takes(second, 2)


def test_a_job_waits_until_each_job_in_progress_could_take_its_dearest_step() -> None:
    budget = DeviceBudget(LIMIT)
    budget.begin_step()
    assert budget.admits("a", job(held=20, step=5, final=50, steps=3))
    assert not budget.admits("b", job(held=35, step=5, steps=3)), "with it, the last step of the first would not fit"


@dataclass
class Spoken:
    """A request in the simulation: its jobs, and how many steps of the present one are done."""

    claim: Claim
    jobs: list[DiffusionJob]
    at: int = 0
    step: int = 0
    running: bool = False


sizes = st.integers(0, 60)
jobs = st.builds(
    lambda held, step, final, steps: DiffusionJob(None, steps, step, final, held),
    sizes,
    sizes,
    sizes,
    st.integers(1, 4),
)


@given(st.lists(st.tuples(sizes, st.lists(jobs, min_size=1, max_size=4)), min_size=1, max_size=8), st.randoms())
def test_any_requests_stay_within_the_budget_and_all_of_them_end(requests, random) -> None:
    budget = DeviceBudget(LIMIT)
    spoken = [
        Spoken(Claim(str(number), held, max(each.held_bytes + each.most_bytes for each in work)), work)
        for number, (held, work) in enumerate(requests)
    ]
    for _ in range(1000):
        if not spoken:
            break
        random.shuffle(spoken)  # any order of precedence, another in each step
        budget.begin_step()
        taken = [each for each in spoken if each.running and budget.takes(each.jobs[each.at], each.step + 1)]
        for each in spoken:
            name = f"{each.claim.request_id}/{each.at}"
            if not each.running and budget.admits(name, each.jobs[each.at], each.claim):
                each.running = True
                taken.append(each)
        assert taken, "something can always go on"
        admitted_requests = sum(bool(each.running or each.at) for each in spoken)
        assert budget.held.used + budget.step_bytes <= LIMIT or admitted_requests == 1
        for each in taken:
            each.step += 1
            if each.step == each.jobs[each.at].num_steps:
                budget.job_ended(f"{each.claim.request_id}/{each.at}")
                each.at, each.step, each.running = each.at + 1, 0, False
                if each.at == len(each.jobs):
                    budget.request_ended(each.claim.request_id)
                    spoken.remove(each)
    assert not spoken
    assert budget.held.used == 0


def test_the_default_admits_as_many_requests_of_the_published_size_as_its_description_says() -> None:
    geometry = Geometry(Qwen2_5OmniToken2WavConfig(), Qwen2_5OmniCode2Wav.chunks, kept_itemsize=2)
    kept, largest = (measure(9, 2) for measure in (geometry.carried_bytes, geometry.largest_job_bytes))
    assert kept == pytest.approx(14.2e6, rel=0.01)
    budget = DeviceBudget(StageConfig(name="code2wav", kind=StageKind.DIFFUSION).budget_bytes)
    admits = 0
    for number in range(1000):
        budget.begin_step()
        admits += budget.admits(f"{number}/0", DiffusionJob(None, 1), Claim(str(number), kept, largest))
        budget.job_ended(f"{number}/0")
    assert f"14.2 MB for a request, and the default admits {admits} requests" in " ".join(StageConfig.__doc__.split())
