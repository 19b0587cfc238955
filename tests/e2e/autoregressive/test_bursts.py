"""Several steps per scheduling give the tokens of single steps, whatever happens to the requests meanwhile."""

from __future__ import annotations

import random

import pytest
import torch

from omni_actors.engine.bursts import burst_of
from omni_actors.engine.tensors import to_host
from omni_actors.protocol.results import FinishReason
from tests.support.nightly import nightly
from tests.support.stage_driver import (
    BOTH_TALKER_MODES,
    VOICES,
    Driver,
    count_preemptions,
    kv_cache,
    make_engine,
    prompt_length,
    sample,
    talker_inputs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SAMPLED = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.3}
REQUESTS = (
    {"temperature": 0.0, "max_tokens": 19},
    {**SAMPLED, "max_tokens": 22},
    {**SAMPLED, "max_tokens": 23, "min_p": 0.001},
    {**SAMPLED, "max_tokens": 40, "min_tokens": 9},
    {"temperature": 0.0, "max_tokens": 1},
    {**SAMPLED, "max_tokens": 26, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.7, "max_tokens": 2},
)
Ended = tuple[list[int], FinishReason, int]


def play(driver: Driver, answers, steps: int, *, streamed: bool = True) -> dict[str, Ended]:
    """Requests that join one after the other, some with rows that come while they speak; one is aborted."""
    driver.clear()
    driver.engine.core.scheduler.steps_per_schedule = steps
    generator = random.Random(steps)
    late: dict[str, list[torch.Tensor]] = {}
    waiting = list(enumerate(REQUESTS))

    def begin() -> None:
        number, params = waiting.pop(0)
        answer = answers[number % 3]
        length, name = prompt_length(answer), f"r{number}"
        replies = number if streamed and number % 3 else None
        inputs = talker_inputs(answer.thinker_rows, length, replies=replies)
        driver.start(name, inputs, voice=VOICES[number % 2], seed=number, **params)
        if replies is not None:
            late[name] = list(answer.thinker_rows[length + 1 + replies :].split(1))

    def feed(number: int = 0) -> None:
        if waiting and generator.random() < 0.7:
            begin()
        if number == 4:
            driver.engine.abort("r2")
            late.pop("r2", None)
        for name, parts in list(late.items()):
            count = generator.randrange(4)
            rows, parts[:count] = parts[:count], []
            driver.engine.extend(name, to_host(torch.cat(rows)) if rows else None, complete=not parts)
            if not parts:
                del late[name]

    begin()
    while waiting or late:
        driver.run(feed)
        feed()
    driver.run()
    ended = {name: driver.finished(name) for name in driver.events if name != "r2"}
    return {name: (driver.tokens(name), event.reason, event.output_tokens) for name, event in ended.items()}


@pytest.fixture
def ends_often(talker, answers):
    """A talker that ends its speech with any of a third of the tokens, so that requests end within bursts."""
    adapter = talker.engine.adapter
    usual = adapter.end_token_ids, adapter.facts
    adapter.end_token_ids = frozenset(range(0, adapter.vocabulary, 24))
    yield talker
    adapter.end_token_ids = usual[0]
    talker.engine.core.scheduler.steps_per_schedule = 4


@BOTH_TALKER_MODES
def test_bursts_give_the_tokens_of_single_steps(ends_often, answers):
    single = play(ends_often, answers, 1)
    taken = ends_often.steps
    reasons = [reason for _, reason, _ in single.values()]
    assert FinishReason.STOP in reasons
    assert FinishReason.LENGTH in reasons
    for steps in (4, 7):
        assert play(ends_often, answers, steps) == single
    assert ends_often.steps < taken
    for tokens, reason, counted in single.values():
        assert counted == len(tokens) + (reason is FinishReason.STOP), "what follows the end is not counted"


@BOTH_TALKER_MODES
def test_a_burst_ends_for_each_request_where_its_input_does(talker, answers, monkeypatch):
    scheduler = talker.engine.core.scheduler
    bursts: list[dict[str, int]] = []
    original = scheduler.schedule

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        bursts.append({name: burst_of(output).get(name, 1) for name in output.num_scheduled_tokens})
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule)
    answer = answers[0]
    rows, length = answer.thinker_rows, prompt_length(answer)
    talker.start("rows", talker_inputs(rows, length, replies=2), max_tokens=9, temperature=0.0)
    talker.start("all", talker_inputs(rows, length), max_tokens=9, temperature=0.0)
    talker.run()
    prompts, *decoding = [burst for burst in bursts if burst]
    assert prompts == {"rows": 1, "all": 1}
    assert decoding == [{"all": 3, "rows": 2}, {"all": 4}, {"all": 1}], "up to multiples of four"
    assert len(talker.tokens("all")) == 9
    assert talker.tokens("rows") == []  # three tokens, less than a block of the vocoder
    talker.engine.extend("rows", to_host(rows[length + 3 :]), complete=True)
    talker.run()
    assert talker.tokens("rows") == talker.tokens("all") == answer.codec_tokens[:9]


@pytest.mark.parametrize("asynchronous", [nightly(False), True], ids=["sync", "async"])
def test_preempted_bursts_give_the_tokens_of_single_steps(tiny_checkpoint, answers, asynchronous):
    """A KV cache for half of the requests, and a longest length that cuts some of them off."""
    small = {"max_model_len": 160, **kv_cache(tiny_checkpoint, "talker", 9)}
    engine = make_engine(tiny_checkpoint, "talker", asynchronous=asynchronous, **small)
    try:
        driver = Driver(engine)
        preemptions = count_preemptions(engine)
        given: dict[int, list[tuple[list[int], int]]] = {}
        for steps in (1, 4):
            driver.clear()
            engine.core.scheduler.steps_per_schedule = steps
            for number in range(5):
                sample(driver, answers[number % 2], f"r{number}", seed=number, max_tokens=70 + number, **SAMPLED)
            driver.run()
            names = [f"r{number}" for number in range(5)]
            given[steps] = [(driver.tokens(name), driver.finished(name).output_tokens) for name in names]
            assert preemptions
            preemptions.clear()
        assert given[4] == given[1]
        driver.assert_idle()
    finally:
        engine.shutdown()
