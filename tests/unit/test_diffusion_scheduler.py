"""Deadlines and byte budget of diffusion requests, on a scheduler reduced to what the mixin uses of vLLM's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.engine.scheduler import Claim, DiffusionMixin
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.stage.sound import LONG_STEP_TOKENS, STRETCH, TOKENS_PER_SECOND
from tests.support.row_streams import CountedRequest, CountingScheduler

NOW, SOON, LATER = 100.0, 100.1, 110.0


class Scheduler(DiffusionMixin, CountingScheduler):
    """The mixin under test."""

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


def test_of_two_jobs_in_progress_the_more_urgent_takes_the_step_that_has_room_for_one():
    patient, urgent = diffusion("patient", 3, 2, 9), diffusion("urgent", 3, 2, 9)
    patient.priority, urgent.priority = 5, 1
    steps = run(10, patient, urgent)
    assert steps == [["urgent", "patient"], ["urgent", "patient"], ["urgent"], ["patient"]]


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
