"""Deadlines and byte budget of diffusion requests, on a scheduler reduced to what the mixin uses of vLLM's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.engine.scheduler import Claim, DiffusionMixin
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.stage.sound import LONG_STEP_TOKENS, STRETCH, TOKENS_PER_SECOND

NOW, SOON, LATER = 100.0, 100.1, 110.0


@dataclass
class FakeRequest:
    request_id: str
    sampling_params: Any
    num_prompt_tokens: int = 1
    num_computed_tokens: int = 0
    next_decode_eligible_step: int = 0
    num_output_placeholders: int = 0
    priority: int = 0


@dataclass
class FakeOutput:
    scheduled: list[str]

    @property
    def total_num_scheduled_tokens(self) -> int:
        return len(self.scheduled)


@dataclass
class FakeScheduler:
    """Does what vLLM's scheduler does around the hooks: advance, run the eligible, then admit in order."""

    vllm_config: Any
    running: list[FakeRequest] = field(default_factory=list)
    waiting: list[FakeRequest] = field(default_factory=list)
    current_step: int = 0

    def schedule(self) -> FakeOutput:
        self.current_step += 1
        chosen = [request for request in self.running if self.current_step >= request.next_decode_eligible_step]
        for request in list(self.waiting):
            if self._handle_blocked_waiting_request(request):
                self.waiting.remove(request)
                self.running.append(request)
                chosen.append(request)
        for request in chosen:
            request.num_computed_tokens += 1
            if request.num_computed_tokens == request.sampling_params.max_tokens:
                self._free_request(request)
        return FakeOutput([request.request_id for request in chosen])

    def add_request(self, request: FakeRequest) -> None:
        self.waiting.append(request)

    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def _free_request(self, request: FakeRequest) -> None:
        self.running.remove(request)

    def _handle_blocked_waiting_request(self, request: FakeRequest) -> bool:
        return True


class Scheduler(DiffusionMixin, FakeScheduler):
    """The mixin under test."""

    def names(self) -> set[str]:
        """Of all requests."""
        return {request.request_id for request in (*self.running, *self.waiting)}


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
) -> FakeRequest:
    final = step_bytes if final_bytes is None else final_bytes
    job = DiffusionJob(None, steps, step_bytes, final, share=share, **counted)
    params = SimpleNamespace(max_tokens=steps, extra_args={"omni": {"diffusion": job, "due": due}})
    return FakeRequest(request_id, params)


def autoregressive(request_id: str, tokens: int) -> FakeRequest:
    return FakeRequest(request_id, SimpleNamespace(max_tokens=tokens, extra_args=None))


def run(
    budget: int, *requests: FakeRequest, arrivals: dict[int, FakeRequest] | None = None, places: int = 64
) -> list[list[str]]:
    scheduler = Scheduler(config(places, budget_bytes=budget))
    scheduler.clock = lambda: NOW
    scheduler.waiting = list(requests)
    steps = []
    for number in range(100):
        if arrivals and number in arrivals:
            scheduler.waiting.append(arrivals[number])
        if not scheduler.running and not scheduler.waiting:
            return steps
        steps.append(scheduler.schedule().scheduled)
    pytest.fail(f"starved: {steps}")


def test_running_request_waits_for_its_expensive_last_step():
    # Both run together until the decoding at the end, for which there is room only one at a time.
    steps = run(10, diffusion("a", 3, 2, 9), diffusion("b", 3, 2, 9))
    assert steps == [["a", "b"], ["a", "b"], ["a"], ["b"]]


def test_of_two_jobs_in_progress_the_more_urgent_takes_the_step_that_has_room_for_one():
    patient, urgent = diffusion("patient", 3, 2, 9), diffusion("urgent", 3, 2, 9)
    patient.priority, urgent.priority = 5, 1
    steps = run(10, patient, urgent)
    assert steps == [["patient", "urgent"], ["patient", "urgent"], ["urgent"], ["patient"]]


def test_while_requests_wait_for_memory_that_waits_for_input_there_is_nothing_to_do():
    scheduler = Scheduler(config(budget_bytes=10))
    first, second = diffusion("a/0", 1, 1), diffusion("b/0", 1, 1)
    for request, name in ((first, "a"), (second, "b")):
        request.sampling_params.extra_args["omni"]["claim"] = Claim(name, 6, 1)
        scheduler.add_request(request)
    assert scheduler.has_runnable()
    assert scheduler.schedule().scheduled == ["a/0"]
    assert scheduler.schedule().scheduled == []
    assert not scheduler.has_runnable(), "the first has no job now, and the second no room"
    scheduler.add_request(diffusion("c/0", 1, 1))
    assert scheduler.has_runnable()
    scheduler.schedule()
    scheduler.schedule()
    assert not scheduler.has_runnable()
    scheduler.release("a")
    assert scheduler.has_runnable()
    assert scheduler.schedule().scheduled == ["b/0"]


def test_autoregressive_requests_are_never_counted_nor_deferred():
    steps = run(5, autoregressive("x", 3), diffusion("a", 2, 5), autoregressive("y", 2), diffusion("b", 1, 5))
    assert steps == [["x", "a", "y"], ["x", "a", "y"], ["x", "b"]]


def test_without_a_budget_nothing_is_deferred():
    scheduler = Scheduler(config())
    scheduler.waiting = [diffusion(str(index), 1, 1 << 50) for index in range(5)]
    assert len(scheduler.schedule().scheduled) == 5
    assert scheduler.budget.deferrals == 0


def test_a_full_step_makes_room_for_who_falls_silent_earlier_and_goes_on_afterwards():
    ahead, pressing = diffusion("ahead", 4, 1, due=LATER), diffusion("pressing", 2, 1, due=SOON)
    steps = run(10, ahead, arrivals={2: pressing}, places=1)
    assert steps == [["ahead"], ["ahead"], ["pressing"], ["pressing"], ["ahead"], ["ahead"]]


@pytest.mark.parametrize(("policy", "first"), [("priority", "urgent"), ("fcfs", "silent")])
def test_priority_counts_before_deadlines_unless_the_stage_ignores_it(policy, first):
    scheduler = Scheduler(config(1, policy))
    scheduler.clock = lambda: NOW
    scheduler.waiting = [diffusion("urgent", 1, 1, due=LATER), diffusion("silent", 1, 1, due=SOON)]
    scheduler.waiting[0].priority = -1
    assert scheduler.schedule().scheduled == [first]


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
    assert scheduler.schedule().scheduled == ["a/0"]
    assert scheduler.schedule().scheduled == ["a/0"]
    scheduler.release("a")
    assert scheduler.schedule().scheduled == ["b/0"]


def test_a_job_whose_last_step_is_in_flight_takes_no_place():
    scheduler = Scheduler(config(places=1))
    flying, waiting = diffusion("flying", 2, 1, due=SOON), diffusion("waiting", 1, 1, due=LATER)
    flying.num_computed_tokens = 2
    scheduler.running, scheduler.waiting = [flying], [waiting]
    assert "waiting" in scheduler.schedule().scheduled


def picture(name: str, steps: int, tokens: int, arrived: float = NOW, **others: int) -> FakeRequest:
    return diffusion(name, steps, 1, due=arrived, tokens=tokens, **others)


def test_a_step_takes_as_many_pictures_as_its_tokens_allow_and_a_larger_one_runs_alone():
    steps = run(99, picture("a", 1, 2000), picture("b", 1, 2000), picture("c", 1, 2000), picture("large", 1, 9000))
    assert steps == [["a", "b"], ["c"], ["large"]]


def test_what_does_not_fit_the_tokens_of_a_step_leaves_its_place_to_what_does():
    # It is not short of memory, so nothing has to be kept free for it.
    steps = run(99, picture("a", 1, 1500), picture("b", 1, 3000), picture("c", 2, 2000))
    assert steps == [["a", "c"], ["b"], ["c"]]


def test_a_small_picture_that_comes_during_a_large_one_is_done_first_and_the_large_one_then_goes_on():
    large, small = picture("large", 4, 16_000), picture("small", 2, 1000, NOW + 0.1)
    steps = run(99, large, arrivals={1: small})
    assert steps == [["large"], ["small"], ["small"], ["large"], ["large"], ["large"]]


@pytest.mark.parametrize(("arrived", "order"), [(NOW + 15, ["small", "large"]), (NOW + 17, ["large", "small"])])
def test_a_large_picture_of_which_most_is_made_yields_to_small_ones_until_it_is_overdue(arrived, order):
    """It takes four seconds alone."""
    large, small = picture("large", 10, 16_000), picture("small", 1, 1000, arrived)
    steps = run(99, large, arrivals={9: small})
    assert steps == [*9 * [["large"]], *([name] for name in order)]


@pytest.mark.parametrize(("tokens", "behind"), [(LONG_STEP_TOKENS + 1, []), (LONG_STEP_TOKENS, ["large"])])
def test_behind_a_long_step_none_is_queued(tokens, behind):
    """So a picture that comes meanwhile waits for the end of that one only."""
    scheduler, large = Scheduler(config()), picture("large", 3, tokens)
    scheduler.clock = lambda: NOW
    scheduler.add_request(large)
    assert scheduler.schedule().scheduled == ["large"]
    large.num_output_placeholders = 1
    assert scheduler.schedule().scheduled == behind
    large.num_output_placeholders = 0
    scheduler.add_request(picture("small", 1, 1000))
    assert scheduler.schedule().scheduled == ["small"]


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
        if not any(request.request_id == "large" for request in (*scheduler.running, *scheduler.waiting)):
            break
        scheduler.add_request(picture(str(number), *others[number % len(others)], now))
        done = scheduler.schedule().scheduled
        assert done, "a step with work to do does some"
        now += 0.1
        # Only those that came before it is due go before it; each of their steps takes a tenth of a second.
        earlier = STRETCH * steps * tokens / TOKENS_PER_SECOND / 0.1 + 1
        assert number <= (earlier + 1) * 9 + steps
