"""The thinker in a real vLLM engine core, against transformers: batches, ends, preemption, media."""

from __future__ import annotations

import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from triton import knobs

from omni_actors.engine.rows import to_torch
from omni_actors.errors import InvalidPayload, ModelOutputInvalid
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.messages import FinishReason
from omni_actors.stage.engine_interface import StageInputs
from omni_actors.telemetry import metrics as table
from tests.support.stage_driver import encode_media_prompt, prompt_length, talker_inputs, token_inputs

pytestmark = pytest.mark.e2e
MAX_TOKENS = (32, 32, 11)


def test_thinker_equals_transformers_in_a_mixed_batch(thinker, answers, reference):
    """Nine requests of three lengths, joining one by one; some stop early, some stream no rows."""
    waiting = list(range(9))

    def join(_step):
        if waiting:
            number = waiting.pop(0)
            inputs = token_inputs(answers[number % 3].prompt_token_ids)
            thinker.start(f"r{number}", inputs, max_tokens=MAX_TOKENS[number // 3], streams=number < 6)

    join(0)
    thinker.run(join)
    assert not waiting
    for number in range(9):
        name, answer, count = f"r{number}", answers[number % 3], MAX_TOKENS[number // 3]
        wanted = answer.thinker_tokens[:count]
        assert thinker.tokens(name) == wanted
        assert thinker.text(name) == reference.processor.tokenizer.decode(wanted, skip_special_tokens=True)
        finished = thinker.finished(name)
        assert (finished.input_tokens, finished.output_tokens) == (prompt_length(answer), count)
        assert finished.reason is FinishReason.LENGTH
        streams = thinker.streams(name)
        if number < 6:
            torch.testing.assert_close(thinker.rows(name), answer.thinker_rows, atol=1e-4, rtol=1e-5)
            assert streams[0].scalars == {"prompt_tokens": prompt_length(answer)}
            assert [event.final for event in streams] == [False] * (len(streams) - 1) + [True]
        else:
            assert not streams
    assert set(thinker.engine.adapter.end_token_ids) == set(reference.model.generation_config.eos_token_id)


def test_preempted_requests_and_prompts_in_chunks_give_each_row_once(tight, answers):
    tight = tight("thinker")
    names = [f"r{number}" for number in range(6)]
    tight.engine.take_scheduled()
    before = tight.engine.statistics()[table.VLLM_PREEMPTIONS]
    for number, name in enumerate(names):
        tight.start(name, token_inputs(answers[number % 3].prompt_token_ids), max_tokens=32)
    tight.run()
    assert prompt_length(answers[2]) > 64
    assert tight.preempted
    assert tight.engine.statistics()[table.VLLM_PREEMPTIONS] - before == len(tight.preempted)
    assert sorted(name for name, _ in tight.engine.take_scheduled()) == names, "once each"
    for number, name in enumerate(names):
        assert tight.tokens(name) == answers[number % 3].thinker_tokens
        torch.testing.assert_close(tight.rows(name), answers[number % 3].thinker_rows, atol=1e-4, rtol=1e-5)
    assert len(tight.streams("r2")) > 32


@pytest.fixture(scope="module")
def media_answer(reference, tiny_checkpoint):
    """A prompt with audio and an image: (inputs of the thinker, what transformers answers)."""
    samples = (np.sin(np.arange(16000) * 0.05) * 0.3).astype(np.float32)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8))
    content = [{"type": "audio"}, {"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = reference.prompt([{"role": "user", "content": content}])
    answer = reference.generate(reference.inputs(text, audios=[(samples, 16000)], images=[image]), speaks=False)
    return encode_media_prompt(tiny_checkpoint, text, {"audio": (samples, 16000), "image": image}), answer


@pytest.mark.nightly
def test_media_prompts_equal_transformers_through_thinker_and_talker(thinker, talker, answers, media_answer):
    """The frames of the prompt ask for one token at temperature 1 under another id, which is ignored."""
    inputs, answer = media_answer
    assert list(inputs.token_ids) == answer.prompt_token_ids
    thinker.start("media", inputs, max_tokens=32)
    thinker.start("text", token_inputs(answers[0].prompt_token_ids), max_tokens=32)
    thinker.run()
    assert set(thinker.events) == {"media", "text"}
    assert thinker.tokens("media") == answer.thinker_tokens
    assert thinker.tokens("text") == answers[0].thinker_tokens
    rows, length = thinker.rows("media"), prompt_length(answer)
    torch.testing.assert_close(rows, answer.thinker_rows, atol=1e-4, rtol=1e-5)
    positions = to_torch(thinker.streams("media")[0].tensors["mrope_positions"])
    assert positions.shape == (3, length)
    assert not torch.equal(positions[0], positions[1])
    for name, given in (("media", positions), ("flat", None)):  # as a text prompt the same rows speak differently
        talker.start(name, talker_inputs(rows, length, positions=given), max_tokens=64, temperature=0.0)
    talker.run()
    assert talker.tokens("media") == answer.codec_tokens
    assert talker.tokens("flat") != answer.codec_tokens


def test_bad_frames_are_refused(thinker, media_answer):
    inputs, answer = media_answer
    frame = bytes(inputs.tensors["vllm.0"].data)

    def frames(data, dtype=DType.U8, length=0):
        tensors = {**inputs.tensors, "vllm.0": HostTensor(dtype, (length or len(data),), data)}
        return msgspec.structs.replace(inputs, tensors=tensors)

    bad = [
        StageInputs(tensors={"vllm.1": inputs.tensors["vllm.1"]}),
        StageInputs(tensors={"vllm.0": inputs.tensors["vllm.0"]}),
        StageInputs(tensors={"other": inputs.tensors["vllm.0"]}),
        *map(frames, (b"\xc1", b"", b"\x91" * 100_000, frame[: len(frame) // 2])),
        frames(frame, length=len(frame) + 1),
        frames(b"1234", DType.I32, 1),
        msgspec.structs.replace(inputs, token_ids=[*inputs.token_ids[:-1], 1]),
    ]
    for case in bad:
        with pytest.raises(InvalidPayload):
            thinker.start("bad", case, max_tokens=3)
    generator = random.Random(0)
    for _ in range(200):  # whatever a broken sender makes of it, it is refused or served, and never worse
        broken = bytearray(frame)
        for _ in range(generator.randrange(1, 4)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        try:
            thinker.engine.adapter.requests.read(frames(bytes(broken)).tensors, [])
        except InvalidPayload:
            continue
    thinker.start("good", inputs, max_tokens=3)
    thinker.run()
    assert thinker.tokens("good") == answer.thinker_tokens[:3]


def test_weights_that_are_nan_fail_the_warm_up_and_every_request(thinker, answers):
    norm = thinker.engine.core.worker.model_runner.model.language_model.model.norm.weight
    usual = norm.detach().clone()
    try:
        with torch.no_grad():
            norm.fill_(torch.nan)
        with pytest.raises(ModelOutputInvalid, match="logits hold NaN"):
            thinker.engine.warm_up([1])
        thinker.engine.abort("_warm_up/0")
        for name, temperature in (("greedy", 0.0), ("sampled", 0.9)):
            inputs = token_inputs(answers[0].prompt_token_ids)
            thinker.start(name, inputs, max_tokens=8, temperature=temperature)
        thinker.run()
    finally:
        with torch.no_grad():
            norm.copy_(usual)
    for name in ("greedy", "sampled"):
        assert isinstance(thinker.error(name), ModelOutputInvalid)
        assert not thinker.tokens(name)
    thinker.start("mended", token_inputs(answers[0].prompt_token_ids), max_tokens=8, temperature=0.0)
    thinker.run()
    assert thinker.tokens("mended") == answers[0].thinker_tokens[:8]


def test_the_log_names_a_kernel_that_a_request_waits_for_a_compiler_of(thinker, answers, caplog):
    thinker.start("r", token_inputs(answers[0].prompt_token_ids), max_tokens=1)
    thinker.run()
    assert not [message for message in caplog.messages if "during inference" in message]
    knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="snake"), compile={}, key="f32")
    assert "snake" in next(message for message in caplog.messages if "during inference" in message)
