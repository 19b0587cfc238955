"""Priority in thinker and talker: who gets a free place, and who loses its KV blocks when there are too few."""

from __future__ import annotations

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import Request

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.tensors import to_host
from tests.support.nightly import nightly
from tests.support.stage_driver import (
    BOTH_MODES,
    BOTH_TALKER_MODES,
    SMALL,
    Driver,
    count_preemptions,
    kv_cache,
    make_engine,
    prompt_length,
    talker_inputs,
    token_inputs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BOTH = pytest.mark.parametrize("asynchronous", [nightly(False), True], ids=["sync", "async"])
BLOCK = 32


def scheduled_while_full(driver: Driver, inputs: object) -> list[str]:
    """The order in which a full engine takes up two ordinary requests and then an urgent one."""
    places = driver.engine.core.vllm_config.scheduler_config.max_num_seqs
    driver.engine.take_scheduled()
    for number in range(places):
        driver.start(f"running{number}", inputs, max_tokens=6, temperature=0.0, ignore_eos=True)
    while driver.engine.statistics().running < places:  # not all prompts fit into one step
        driver.step()
    for name, priority in (("first", 0), ("second", 0), ("urgent", -1)):
        driver.start(name, inputs, max_tokens=1, temperature=0.0, priority=priority)
    driver.run()
    return [request_id for request_id, _ in driver.engine.take_scheduled()][places:]


@BOTH_MODES
def test_an_urgent_request_overtakes_in_a_full_thinker(thinker, answers):
    inputs = token_inputs(answers[0].prompt_token_ids)
    assert scheduled_while_full(thinker, inputs) == ["urgent", "first", "second"]


@BOTH_TALKER_MODES
def test_an_urgent_request_overtakes_in_a_full_talker(talker, answers):
    inputs = talker_inputs(answers[0].thinker_rows, prompt_length(answers[0]))
    assert scheduled_while_full(talker, inputs) == ["urgent", "first", "second"]


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_every_stage_takes_requests_by_priority_unless_the_yaml_says_otherwise(tiny_checkpoint, stage):
    kind = "diffusion" if stage == "code2wav" else "autoregressive"
    model = OmniModelConfig(str(tiny_checkpoint), stage)
    usual = {} if stage == "code2wav" else SMALL
    policies = [
        OmniEngineArgs(model, kind, {**usual, **engine}).create_engine_config().scheduler_config.policy
        for engine in ({}, {"scheduling_policy": "fcfs"})
    ]
    assert policies == ["priority", "fcfs"]


@BOTH
def test_the_least_urgent_talkers_lose_their_blocks_and_equal_transformers(tiny_checkpoint, answers, asynchronous):
    """Few KV blocks, priorities against the order of arrival; the rows of some requests come while they run."""
    engine = make_engine(
        tiny_checkpoint,
        "talker",
        asynchronous=asynchronous,
        max_model_len=160,
        **kv_cache(tiny_checkpoint, "talker", 11, BLOCK),
    )
    try:
        driver = Driver(engine)
        preemptions = count_preemptions(engine)
        missing: dict[str, list[torch.Tensor]] = {}
        for number in range(6):
            answer = answers[number % 2]
            replies = 2 if number % 3 else None
            inputs = talker_inputs(answer.thinker_rows, prompt_length(answer), replies=replies)
            voice = ("Chelsie", "Ethan")[number % 2]
            driver.start(f"r{number}", inputs, voice=voice, max_tokens=64, temperature=0.0, priority=-number)
            if replies is not None:
                missing[f"r{number}"] = list(answer.thinker_rows[prompt_length(answer) + 1 + replies :].split(1))
        while missing:
            driver.run()
            for name, parts in list(missing.items()):
                part = parts.pop(0)
                engine.extend(name, to_host(part), complete=not parts)
                if not parts:
                    del missing[name]
        driver.run()
        assert preemptions
        assert "r5" not in preemptions, "the most urgent one keeps its blocks"
        for number in range(6):
            assert driver.tokens(f"r{number}") == answers[number % 2].codec_tokens
        driver.assert_idle()
    finally:
        engine.shutdown()


@BOTH
def test_a_preempted_request_resumes_only_when_its_next_row_has_come(tiny_checkpoint, answers, asynchronous):
    """Blocks for one long request: it takes those of one that waits for a row, and ends before that row comes."""
    engine = make_engine(
        tiny_checkpoint,
        "talker",
        asynchronous=asynchronous,
        max_model_len=4 * BLOCK,
        **kv_cache(tiny_checkpoint, "talker", 5, BLOCK),
    )
    try:
        driver = Driver(engine)
        preemptions = count_preemptions(engine)
        answer = answers[0]
        rows, length = answer.thinker_rows, prompt_length(answer)
        driver.start("held", talker_inputs(rows, length, replies=2), max_tokens=32, temperature=0.0, priority=1)
        driver.run()
        assert engine.waits_for_input("held")
        driver.start("long", talker_inputs(rows, length), max_tokens=64, temperature=0.0)
        driver.run()
        assert preemptions == ["held"]
        assert driver.tokens("long") == answer.codec_tokens
        assert engine.waits_for_input("held")
        assert not engine.runnable()
        for row in rows[length + 3 :].split(1):
            engine.extend("held", to_host(row), complete=False)
            driver.run()
        engine.extend("held", None, complete=True)
        driver.run()
        assert driver.tokens("held") == answer.codec_tokens[:32]
        driver.assert_idle()
    finally:
        engine.shutdown()


def test_vllm_takes_requests_by_priority_and_arrival_and_keeps_the_tokens_of_a_preempted_one():
    order = [(-1, 9.0), (0, 1.0), (0, 2.0), (1, 0.0)]
    requests = [
        Request(f"r{index}", [1, 2, 3], SamplingParams(max_tokens=4), None, arrival_time=arrival, priority=priority)
        for index, (priority, arrival) in enumerate(order)
    ]
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    for request in reversed(requests):
        queue.add_request(request)
    assert [queue.pop_request() for _ in order] == requests
    requests[0].append_output_token_ids(7)
    assert requests[0].num_tokens == 4
