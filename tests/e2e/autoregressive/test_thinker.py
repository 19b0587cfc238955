"""The thinker in a real vLLM engine core, against transformers: batches, ends, preemption, media."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from omni_actors.engine.tensors import to_torch
from omni_actors.errors import InvalidPayload, ModelOutputInvalid
from omni_actors.protocol.results import FinishReason
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.engine_interface import StageInputs, StreamEvent, TextEvent
from tests.support.stage_driver import (
    BOTH_MODES,
    Driver,
    count_preemptions,
    encode_media_prompt,
    kv_cache,
    make_engine,
    prompt_length,
    talker_inputs,
    token_inputs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@BOTH_MODES
def test_thinker_equals_transformers_in_a_mixed_batch(thinker, answers, reference):
    """Nine requests of three lengths, joining one by one; some stop early, some stream no rows."""
    waiting = []
    for number in range(9):
        answer = answers[number % 3]
        limit = (32, 32, 11)[number // 3]
        waiting.append((f"r{number}", answer, limit, number < 6))

    def join(_step: int) -> None:
        if waiting:
            name, answer, limit, streams = waiting.pop(0)
            thinker.start(name, token_inputs(answer.prompt_token_ids), max_tokens=limit, streams=streams)

    join(0)
    thinker.run(join)
    assert not waiting
    tokenizer = reference.processor.tokenizer
    for number in range(9):
        name, answer, limit = f"r{number}", answers[number % 3], (32, 32, 11)[number // 3]
        assert thinker.tokens(name) == answer.thinker_tokens[:limit]
        assert thinker.text(name) == tokenizer.decode(answer.thinker_tokens[:limit], skip_special_tokens=True)
        finished = thinker.finished(name)
        assert finished.input_tokens == prompt_length(answer)
        assert finished.output_tokens == limit
        assert finished.reason is FinishReason.LENGTH
        if number < 6:
            torch.testing.assert_close(thinker.rows(name), answer.thinker_rows, atol=1e-4, rtol=1e-5)
            streams = thinker.streams(name)
            assert streams[0].scalars == {"prompt_tokens": prompt_length(answer)}
            assert [event.final for event in streams] == [False] * (len(streams) - 1) + [True]
        else:
            assert not thinker.streams(name)


@BOTH_MODES
def test_thinker_stops_at_end_tokens(thinker, answers):
    answer = answers[0]
    stop = answer.thinker_tokens[5]
    end = answer.thinker_tokens.index(stop)
    inputs = token_inputs(answer.prompt_token_ids)
    thinker.start("stop", inputs, max_tokens=32, stop_token_ids=(stop,))
    thinker.start("more", inputs, max_tokens=32, stop_token_ids=(stop,), min_tokens=end + 2)
    thinker.run()
    assert thinker.tokens("stop") == answer.thinker_tokens[: end + 1]
    assert thinker.finished("stop").reason is FinishReason.STOP
    assert len(thinker.rows("stop")) == prompt_length(answer) + end
    assert len(thinker.tokens("more")) > end + 1


def test_thinker_knows_the_checkpoints_end_tokens(thinker, reference):
    ends = set(reference.model.generation_config.eos_token_id)
    assert set(thinker.engine.adapter.end_token_ids) == ends
    assert len(ends) == 2


def test_long_prompts_are_computed_in_chunks(tiny_checkpoint, answers):
    engine = make_engine(tiny_checkpoint, "thinker", max_num_batched_tokens=32)
    try:
        driver = Driver(engine)
        longest = answers[2]
        assert prompt_length(longest) > 64
        driver.start("long", token_inputs(longest.prompt_token_ids), max_tokens=12)
        driver.start("short", token_inputs(answers[0].prompt_token_ids), max_tokens=12)
        driver.run()
        assert driver.tokens("long") == longest.thinker_tokens[:12]
        assert driver.tokens("short") == answers[0].thinker_tokens[:12]
        expected = longest.thinker_rows[: prompt_length(longest) + 11]
        torch.testing.assert_close(driver.rows("long"), expected, atol=1e-4, rtol=1e-5)
        assert len(driver.streams("long")) > 12
        driver.assert_idle()
    finally:
        engine.shutdown()


def test_a_preempted_thinker_gives_each_row_once(tiny_checkpoint, answers):
    engine = make_engine(tiny_checkpoint, "thinker", max_model_len=160, **kv_cache(tiny_checkpoint, "thinker", 9))
    try:
        driver = Driver(engine)
        preemptions = count_preemptions(engine)
        for number in range(6):
            driver.start(f"r{number}", token_inputs(answers[number % 2].prompt_token_ids), max_tokens=32)
        driver.run()
        assert preemptions
        assert engine.statistics().preemptions == len(preemptions)
        scheduled = engine.take_scheduled()
        assert sorted(request_id for request_id, _ in scheduled) == [f"r{number}" for number in range(6)], "once each"
        assert engine.take_scheduled() == []
        for number in range(6):
            answer = answers[number % 2]
            assert driver.tokens(f"r{number}") == answer.thinker_tokens
            torch.testing.assert_close(driver.rows(f"r{number}"), answer.thinker_rows, atol=1e-4, rtol=1e-5)
        driver.assert_idle()
    finally:
        engine.shutdown()


def test_requests_without_rows_share_a_prefix_and_those_with_rows_compute_it(thinker, answers):
    answer = answers[2]
    inputs = token_inputs(answer.prompt_token_ids)
    hits = []
    for number, streams in enumerate((False, False, True)):
        before = thinker.engine.statistics()
        thinker.start(f"r{number}", inputs, max_tokens=4, streams=streams)
        thinker.run()
        after = thinker.engine.statistics()
        assert after.prefix_queries - before.prefix_queries in (0, prompt_length(answer))
        hits.append(after.prefix_hits - before.prefix_hits)
        assert thinker.tokens(f"r{number}") == answer.thinker_tokens[:4]
    torch.testing.assert_close(
        thinker.rows("r2"), answer.thinker_rows[: prompt_length(answer) + 3], atol=1e-4, rtol=1e-5
    )
    assert hits[0] == hits[2] == 0
    assert 0 < hits[1] < prompt_length(answer)


def test_events_come_in_order(thinker, answers):
    """Text, then rows, then the end; no event after it."""
    thinker.start("r", token_inputs(answers[0].prompt_token_ids), max_tokens=3)
    thinker.run()
    kinds = [type(event) for event in thinker.events["r"]]
    assert kinds == [TextEvent, StreamEvent] * 3 + [type(thinker.finished("r"))]


@pytest.fixture(scope="module")
def media_answer(reference, tiny_checkpoint):
    """A prompt with audio and an image: (inputs of the thinker, what transformers answers)."""
    from PIL import Image

    samples = (np.sin(np.arange(16000) * 0.05) * 0.3).astype(np.float32)
    pixels = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    content = [
        {"type": "audio", "audio": "a"},
        {"type": "image", "image": "b"},
        {"type": "text", "text": "What is this?"},
    ]
    text = reference.prompt([{"role": "user", "content": content}])
    answer = reference.generate(reference.inputs(text, audios=[(samples, 16000)], images=[image]), speaks=False)
    inputs = encode_media_prompt(tiny_checkpoint, text, {"audio": (samples, 16000), "image": image})
    return inputs, answer


def test_media_prompts_equal_transformers_through_thinker_and_talker(thinker, talker, answers, media_answer):
    inputs, answer = media_answer
    assert list(inputs.token_ids) == answer.prompt_token_ids
    thinker.start("media", inputs, max_tokens=32)
    thinker.start("text", token_inputs(answers[0].prompt_token_ids), max_tokens=32)
    thinker.run()
    assert thinker.tokens("media") == answer.thinker_tokens
    assert thinker.tokens("text") == answers[0].thinker_tokens
    rows = thinker.rows("media")
    torch.testing.assert_close(rows, answer.thinker_rows, atol=1e-4, rtol=1e-5)
    positions = to_torch(thinker.streams("media")[0].tensors["mrope_positions"])
    assert positions.shape == (3, prompt_length(answer))
    assert not torch.equal(positions[0], positions[1])
    talker.start(
        "media", talker_inputs(rows, prompt_length(answer), positions=positions), max_tokens=64, temperature=0.0
    )
    talker.run()
    assert talker.tokens("media") == answer.codec_tokens
    # The positions matter: as a text prompt the same rows speak differently.
    talker.start("flat", talker_inputs(rows, prompt_length(answer)), max_tokens=64, temperature=0.0)
    talker.run()
    assert talker.tokens("flat") != answer.codec_tokens


def test_parameters_inside_the_encoded_request_are_ignored(thinker, media_answer):
    """The frames ask for one token at temperature 1 under another id."""
    inputs, answer = media_answer
    thinker.start("mine", inputs, max_tokens=3)
    thinker.run()
    assert thinker.tokens("mine") == answer.thinker_tokens[:3]
    assert set(thinker.events) == {"mine"}


def test_bad_frames_are_refused(thinker, media_answer):
    inputs, answer = media_answer
    frame = bytes(inputs.tensors["vllm.0"].data)

    def frames(**changes):
        return dataclasses.replace(inputs, tensors={**inputs.tensors, **changes})

    def bytes_of(data: bytes) -> HostTensor:
        return HostTensor(DType.U8, (len(data),), data)

    generator = random.Random(0)
    bad = [
        StageInputs(tensors={"vllm.1": inputs.tensors["vllm.1"]}),
        StageInputs(tensors={"vllm.0": inputs.tensors["vllm.0"]}),
        StageInputs(tensors={"other": inputs.tensors["vllm.0"]}),
        frames(**{"vllm.0": bytes_of(b"\xc1")}),
        frames(**{"vllm.0": bytes_of(b"")}),
        frames(**{"vllm.0": bytes_of(b"\x91" * 100_000)}),
        frames(**{"vllm.0": bytes_of(frame[: len(frame) // 2])}),
        frames(**{"vllm.0": HostTensor(DType.U8, (len(frame) + 1,), frame)}),
        frames(**{"vllm.0": HostTensor(DType.I32, (1,), b"1234")}),
        dataclasses.replace(inputs, token_ids=[*inputs.token_ids[:-1], 1]),
    ]
    for number, case in enumerate(bad):
        with pytest.raises(InvalidPayload):
            thinker.start(f"bad{number}", case, max_tokens=3)
    for _ in range(200):  # whatever a broken sender makes of it, it is refused or served, and never worse
        broken = bytearray(frame)
        for _ in range(generator.randrange(1, 4)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        try:
            thinker.engine.adapter.requests.read(frames(**{"vllm.0": bytes_of(bytes(broken))}).tensors, [])
        except InvalidPayload:
            continue
    thinker.start("good", inputs, max_tokens=3)
    thinker.run()
    assert thinker.tokens("good") == answer.thinker_tokens[:3]


@BOTH_MODES
def test_weights_that_are_nan_fail_the_warm_up_and_every_request(thinker, answers):
    engine = thinker.engine
    norm = engine.core.worker.model_runner.model.language_model.model.norm.weight
    usual = norm.detach().clone()
    try:
        with torch.no_grad():
            norm.fill_(torch.nan)
        with pytest.raises(ModelOutputInvalid, match="logits hold NaN"):
            engine.warm_up([1])
        engine.abort("_warm_up/0")
        thinker.start("broken", token_inputs(answers[0].prompt_token_ids), max_tokens=8, temperature=0.0)
        thinker.start("sampled", token_inputs(answers[1].prompt_token_ids), max_tokens=8, temperature=0.9)
        thinker.run()
    finally:
        with torch.no_grad():
            norm.copy_(usual)
    for name in ("broken", "sampled"):
        assert isinstance(thinker.error(name), ModelOutputInvalid)
        assert not thinker.tokens(name)
    thinker.start("mended", token_inputs(answers[0].prompt_token_ids), max_tokens=8, temperature=0.0)
    thinker.run()
    assert thinker.tokens("mended") == answers[0].thinker_tokens[:8]
