"""Deadlines, memory and tokens of diffusion requests, on a scheduler reduced to what the mixin uses of vLLM's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5OmniToken2WavConfig

from omni_actors.config import StageConfig, StageKind
from omni_actors.engine.models.qwen2_5_omni.code2wav import Qwen2_5OmniCode2Wav
from omni_actors.engine.models.qwen2_5_omni.stream import Geometry
from omni_actors.engine.scheduler import Claim, DeviceBudget, DiffusionMixin
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.stage.sound import LONG_STEP_TOKENS, STRETCH, TOKENS_PER_SECOND
from tests.support.row_streams import CountedRequest, CountingScheduler

NOW, SOON, LATER = 100.0, 100.1, 110.0


class Scheduler(DiffusionMixin, CountingScheduler):
    def step(self) -> list[str]:
        """Schedule one; the requests in it."""
        return list(self.schedule().num_scheduled_tokens)


def config(places: int = 64, policy: str = "priority", step_tokens: int = 4096, **options: int) -> SimpleNamespace:
    scheduler = SimpleNamespace(max_num_seqs=places, policy=policy, max_num_batched_tokens=step_tokens)
    return SimpleNamespace(scheduler_config=scheduler, additional_config={"omni": options})


def diffusion(
    request_id: str,
    steps: int,
    step_bytes: int,
    final_bytes: int | None = None,
    due: float = 0.0,
    share: float = 0.0,
    **counted: int,
) -> CountedRequest:
    final = step_bytes if final_bytes is None else final_bytes
    job = DiffusionJob(None, steps, step_bytes, final, share=share, **counted)
    params = SimpleNamespace(extra_args={"omni": {"diffusion": job, "due": due}})
    return CountedRequest(request_id, max_tokens=steps, sampling_params=params)


def autoregressive(request_id: str, tokens: int) -> CountedRequest:
    return CountedRequest(request_id, max_tokens=tokens, sampling_params=SimpleNamespace(extra_args=None))


def run(
    budget: int, *requests: CountedRequest, arrivals: dict[int, CountedRequest] | None = None, places: int = 64
) -> list[list[str]]:
    scheduler = Scheduler(config(places, budget_bytes=budget))
    scheduler.clock = lambda: NOW
    for request in requests:
        scheduler.add_request(request)
    steps = []
    for number in range(100):
        if arrivals and number in arrivals:
            scheduler.add_request(arrivals[number])
        if not scheduler.requests:
            return steps
        steps.append(scheduler.step())
    pytest.fail(f"starved: {steps}")


def test_running_request_waits_for_its_expensive_last_step():
    # Both run together until the decoding at the end, for which there is room only one at a time.
    steps = run(10, diffusion("a", 3, 2, 9), diffusion("b", 3, 2, 9))
    assert steps == [["a", "b"], ["a", "b"], ["a"], ["b"]]


def test_while_requests_wait_for_memory_that_waits_for_input_there_is_nothing_to_do():
    scheduler = Scheduler(config(budget_bytes=10))
    first, second = diffusion("a/0", 1, 1), diffusion("b/0", 1, 1)
    for request, name in ((first, "a"), (second, "b")):
        request.sampling_params.extra_args["omni"]["claim"] = Claim(name, 6, 1)
        scheduler.add_request(request)
    assert scheduler.has_runnable()
    assert scheduler.step() == ["a/0"]
    assert scheduler.step() == []
    assert not scheduler.has_runnable(), "the first has no job now, and the second no room"
    scheduler.add_request(diffusion("c/0", 1, 1))
    assert scheduler.has_runnable()
    scheduler.schedule()
    scheduler.schedule()
    assert not scheduler.has_runnable()
    scheduler.release("a")
    assert scheduler.has_runnable()
    assert scheduler.step() == ["b/0"]


def test_autoregressive_requests_are_never_counted_nor_deferred():
    steps = run(5, autoregressive("x", 3), diffusion("a", 2, 5), autoregressive("y", 2), diffusion("b", 1, 5))
    assert steps == [["x", "a", "y"], ["x", "a", "y"], ["x", "b"]]


def test_without_a_budget_nothing_is_deferred():
    scheduler = Scheduler(config())
    for index in range(5):
        scheduler.add_request(diffusion(str(index), 1, 1 << 50))
    assert len(scheduler.step()) == 5
    assert scheduler.budget.deferrals == 0


def test_a_full_step_makes_room_for_who_falls_silent_earlier_and_goes_on_afterwards():
    ahead, pressing = diffusion("ahead", 4, 1, due=LATER), diffusion("pressing", 2, 1, due=SOON)
    steps = run(10, ahead, arrivals={2: pressing}, places=1)
    assert steps == [["ahead"], ["ahead"], ["pressing"], ["pressing"], ["ahead"], ["ahead"]]


@pytest.mark.parametrize(("policy", "first"), [("priority", "urgent"), ("fcfs", "silent")])
def test_priority_counts_before_deadlines_unless_the_stage_ignores_it(policy, first):
    scheduler = Scheduler(config(1, policy))
    scheduler.clock = lambda: NOW
    urgent = diffusion("urgent", 1, 1, due=LATER)
    urgent.priority = -1
    for request in (urgent, diffusion("silent", 1, 1, due=SOON)):
        scheduler.add_request(request)
    assert scheduler.step() == [first]


def test_who_has_sound_in_hand_skips_steps_that_must_stay_light():
    ahead = [diffusion(name, 3, 1, due=LATER + number, share=0.6) for number, name in enumerate("ab")]
    pressing = diffusion("pressing", 2, 1, due=SOON, share=0.3)
    steps = run(10, *ahead, arrivals={1: pressing})
    assert [set(step) for step in steps] == [{"a", "b"}, {"pressing", "a"}, {"pressing", "a"}, {"b"}, {"b"}]


def test_who_waits_for_memory_in_vain_does_not_stop_those_that_hold_it():
    scheduler = Scheduler(config(budget_bytes=10))
    scheduler.clock = lambda: NOW
    holder, pressing = diffusion("a/0", 3, 1, due=LATER, share=1.0), diffusion("b/0", 1, 1, due=SOON, share=1.0)
    for request, name in ((holder, "a"), (pressing, "b")):
        request.sampling_params.extra_args["omni"]["claim"] = Claim(name, 6, 1)
        scheduler.schedule()
        scheduler.add_request(request)
    assert scheduler.step() == ["a/0"]
    assert scheduler.step() == ["a/0"]
    scheduler.release("a")
    assert scheduler.step() == ["b/0"]


def test_a_job_whose_last_step_is_in_flight_takes_no_place():
    scheduler = Scheduler(config(places=1))
    flying, waiting = diffusion("flying", 2, 1, due=SOON), diffusion("waiting", 1, 1, due=LATER)
    flying.num_computed_tokens = 2
    for request in (flying, waiting):
        scheduler.add_request(request)
    scheduler.waiting.remove(flying)
    scheduler.running.append(flying)
    assert "waiting" in scheduler.step()


def picture(name: str, steps: int, tokens: int, arrived: float = NOW, **others: int) -> CountedRequest:
    return diffusion(name, steps, 1, due=arrived, tokens=tokens, **others)


# Name, steps and tokens of each picture that is there; the one that comes later, and before which step; the steps.
SMALL_DURING_LARGE = [["large"], ["small"], ["small"], ["large"], ["large"], ["large"]]
PICTURES = {
    "as many as the tokens of a step allow, and a larger one alone": (
        [("a", 1, 2000), ("b", 1, 2000), ("c", 1, 2000), ("large", 1, 9000)],
        {},
        [["a", "b"], ["c"], ["large"]],
    ),
    "what does not fit leaves its place to what does, as it is not short of memory": (
        [("a", 1, 1500), ("b", 1, 3000), ("c", 2, 2000)],
        {},
        [["a", "c"], ["b"], ["c"]],
    ),
    "a small one during a large one": ([("large", 4, 16_000)], {1: ("small", 2, 1000, 100.1)}, SMALL_DURING_LARGE),
    "a large one, which takes four seconds alone, is not overdue": (
        [("large", 10, 16_000)],
        {9: ("small", 1, 1000, NOW + 15)},
        [*9 * [["large"]], ["small"], ["large"]],
    ),
    "it is overdue": (
        [("large", 10, 16_000)],
        {9: ("small", 1, 1000, NOW + 17)},
        [*9 * [["large"]], ["large"], ["small"]],
    ),
}


@pytest.mark.parametrize(("there", "arrivals", "steps"), PICTURES.values(), ids=list(PICTURES))
def test_pictures_share_steps(there, arrivals, steps):
    coming = {number: picture(*given) for number, given in arrivals.items()}
    assert run(99, *(picture(*given) for given in there), arrivals=coming) == steps


@pytest.mark.parametrize(("tokens", "behind"), [(LONG_STEP_TOKENS + 1, []), (LONG_STEP_TOKENS, ["large"])])
def test_behind_a_long_step_none_is_queued(tokens, behind):
    """So a picture that comes meanwhile waits for the end of that one only."""
    scheduler, large = Scheduler(config()), picture("large", 3, tokens)
    scheduler.clock = lambda: NOW
    scheduler.add_request(large)
    assert scheduler.step() == ["large"]
    large.num_output_placeholders = 1
    assert scheduler.step() == behind
    large.num_output_placeholders = 0
    scheduler.add_request(picture("small", 1, 1000))
    assert scheduler.step() == ["small"]


@given(
    large=st.tuples(st.integers(1, 20), st.integers(100, 20_000)),
    others=st.lists(st.tuples(st.integers(1, 8), st.integers(100, 4096)), min_size=1, max_size=8),
)
def test_no_picture_waits_for_ever_however_many_smaller_ones_keep_coming(large, others):
    # One more comes before every step, and the stage computes less than comes: it can never be empty.
    scheduler = Scheduler(config(budget_bytes=1 << 40))
    now = NOW
    scheduler.clock = lambda: now
    scheduler.add_request(picture("large", *large, now))
    steps, tokens = large
    for number in itertools.count():
        if "large" not in scheduler.requests:
            break
        scheduler.add_request(picture(str(number), *others[number % len(others)], now))
        done = scheduler.step()
        assert done, "a step with work to do does some"
        now += 0.1
        # Only those that came before it is due go before it; each of their steps takes a tenth of a second.
        earlier = STRETCH * steps * tokens / TOKENS_PER_SECOND / 0.1 + 1
        assert number <= (earlier + 1) * 9 + steps


LIMIT = 100


def job(*, held: int = 0, step: int = 0, final: int | None = None, steps: int = 1) -> DiffusionJob:
    return DiffusionJob(None, steps, step, step if final is None else final, held)


def admitted(budget: DeviceBudget, request_id: str, number: int, work: DiffusionJob, claim: Claim) -> bool:
    return budget.admits(f"{request_id}/{number}", work, claim)


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
