"""Requests whose rows a later stage takes use the prefix cache, and get the same rows as without it."""

from __future__ import annotations

import numpy
import pytest
import torch
from PIL import Image

from omni_actors.engine.tensors import to_torch
from omni_actors.stage.engine_interface import StageInputs
from tests.support.nightly import nightly
from tests.support.stage_driver import (
    Driver,
    count_preemptions,
    encode_media_prompt,
    kv_cache,
    make_engine,
    prompt_length,
    token_inputs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
BLOCK = 32  # the smallest on a CPU


@pytest.fixture(scope="module", params=[nightly(False), True], ids=["sync", "async"])
def engine(request, tiny_checkpoint):
    engine = make_engine(tiny_checkpoint, "thinker", asynchronous=request.param, block_size=BLOCK)
    yield engine
    engine.shutdown()


@pytest.fixture
def driver(engine):
    """Finds its engine idle and leaves it idle."""
    driver = Driver(engine)
    yield driver
    driver.assert_idle()


def cached(driver: Driver) -> int:
    return driver.engine.statistics().prefix_hits


def check(driver: Driver, name: str, answer, tokens: int) -> None:
    """A request's tokens and rows are those of transformers."""
    assert driver.tokens(name) == answer.thinker_tokens[:tokens]
    expected = answer.thinker_rows[: prompt_length(answer) + tokens - 1]
    torch.testing.assert_close(driver.rows(name), expected, atol=1e-4, rtol=1e-5)


def test_a_prompt_that_was_computed_before_is_not_computed_again(driver, answers):
    longest = answers[2]
    blocks = (prompt_length(longest) - 1) // BLOCK * BLOCK
    assert blocks >= 4 * BLOCK
    driver.start("before", token_inputs(longest.prompt_token_ids), max_tokens=12)
    driver.run()
    before = cached(driver)
    driver.start("again", token_inputs(longest.prompt_token_ids), max_tokens=12)
    driver.run()
    assert cached(driver) - before == blocks
    check(driver, "again", longest, 12)
    assert driver.streams("again")[0].scalars == {"prompt_tokens": prompt_length(longest)}
    turn = token_inputs([*longest.prompt_token_ids, *longest.thinker_tokens[:20]])
    driver.start("turn", turn, max_tokens=4)
    driver.start("plain", turn, max_tokens=4, streams=False)
    driver.run()
    assert cached(driver) - before > 2 * blocks
    assert driver.tokens("turn") == driver.tokens("plain") == longest.thinker_tokens[20:24]
    expected = longest.thinker_rows[: prompt_length(longest) + 23]
    torch.testing.assert_close(driver.rows("turn"), expected, atol=1e-4, rtol=1e-5)


def test_answers_to_one_prompt_that_come_at_a_time_compute_it_once(driver, answers):
    longest = answers[2]
    prompt = [*longest.prompt_token_ids[:3], *longest.prompt_token_ids]  # in no test's cache
    blocks = (len(prompt) - 1) // BLOCK * BLOCK
    before = cached(driver)
    for index in range(4):
        driver.start(f"n{index}", token_inputs(prompt), max_tokens=6, temperature=1.0, seed=index)
    driver.run()
    assert cached(driver) - before == 3 * blocks
    rows = driver.rows("n0")[: len(prompt)]
    for index in range(1, 4):
        torch.testing.assert_close(driver.rows(f"n{index}")[: len(prompt)], rows, atol=0, rtol=0)


def test_what_a_text_request_left_in_the_cache_is_computed_again_for_its_rows(tiny_checkpoint, answers):
    engine = make_engine(
        tiny_checkpoint,
        "thinker",
        max_num_batched_tokens=64,
        max_model_len=256,
        **kv_cache(tiny_checkpoint, "thinker", 9, BLOCK),
    )
    try:
        driver = Driver(engine)
        longest = answers[2]
        driver.start("text", token_inputs(longest.prompt_token_ids), max_tokens=12, streams=False)
        driver.run()
        driver.start("spoken", token_inputs(longest.prompt_token_ids), max_tokens=12)
        driver.run()
        check(driver, "spoken", longest, 12)
        # The one that computes is gone halfway; the one that waited for its rows goes on by itself.
        prompt = [*longest.prompt_token_ids[:2], *longest.prompt_token_ids]
        driver.start("goes", token_inputs(prompt), max_tokens=4)
        driver.start("stays", token_inputs(prompt), max_tokens=4)
        driver.step()
        engine.abort("goes")
        driver.run()
        assert len(driver.rows("stays")) == len(prompt) + 3
        preempted = count_preemptions(engine)
        for index in range(4):
            driver.start(f"p{index}", token_inputs(longest.prompt_token_ids), max_tokens=32)
        driver.run()
        assert preempted
        for index in range(4):
            check(driver, f"p{index}", longest, 32)
        driver.assert_idle()
    finally:
        engine.shutdown()


def test_a_turn_with_a_picture_gets_its_rows_and_positions_from_the_cache(driver, tiny_checkpoint):
    prompt = encode_media_prompt(
        tiny_checkpoint,
        "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|>what is this, said slowly, and again<|im_end|>\n"
        "<|im_start|>assistant\n",
        {"image": Image.fromarray(numpy.arange(112 * 112 * 3, dtype=numpy.uint8).reshape(112, 112, 3))},
    )
    before = cached(driver)
    for name in ("first", "second"):
        driver.start(name, StageInputs(token_ids=prompt.token_ids, tensors=prompt.tensors), max_tokens=5)
        driver.run()
    assert cached(driver) > before
    assert driver.tokens("second") == driver.tokens("first")
    torch.testing.assert_close(driver.rows("second"), driver.rows("first"), atol=1e-5, rtol=1e-5)
    first, second = (to_torch(driver.streams(name)[0].tensors["mrope_positions"]) for name in ("first", "second"))
    assert first.shape == (3, len(prompt.token_ids))
    assert torch.equal(first, second)
