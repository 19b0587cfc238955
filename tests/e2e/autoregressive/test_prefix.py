"""Prefixes that were computed before: rows for the talker, positions of pictures, and sounds that are still growing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.prompt import PromptEngine
from omni_actors.engine.rows import to_torch
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import DType, HostTensor, TensorRef
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest
from omni_actors.telemetry import metrics as table
from tests.support.stage_driver import SMALL, encode_media_prompt, prompt_length, token_inputs

pytestmark = pytest.mark.e2e
BLOCK = 32  # of the key/value cache
RATE = 16_000
WINDOW = 2 * RATE  # samples that the encoder encodes together
MEL = 160  # samples of a frame of features


def cached(driver):
    return driver.engine.statistics()[table.VLLM_HITS]


def check(driver, name, answer, tokens):
    """A request's tokens and rows are those of transformers."""
    assert driver.tokens(name) == answer.thinker_tokens[:tokens]
    expected = answer.thinker_rows[: prompt_length(answer) + tokens - 1]
    torch.testing.assert_close(driver.rows(name), expected, atol=1e-4, rtol=1e-5)


def test_a_prompt_that_was_computed_before_is_not_computed_again(thinker, answers):
    longest = answers[2]
    blocks = (prompt_length(longest) - 1) // BLOCK * BLOCK
    assert blocks >= 4 * BLOCK
    for name in ("before", "again"):
        before = cached(thinker)
        thinker.start(name, token_inputs(longest.prompt_token_ids), max_tokens=12)
        thinker.run()
        check(thinker, name, longest, 12)
        assert thinker.streams(name)[0].scalars == {"prompt_tokens": prompt_length(longest)}
    assert cached(thinker) - before == blocks
    turn = token_inputs([*longest.prompt_token_ids, *longest.thinker_tokens[:20]])
    thinker.start("turn", turn, max_tokens=4)
    thinker.start("plain", turn, max_tokens=4, streams=False)
    thinker.run()
    assert cached(thinker) - before > 2 * blocks
    assert thinker.tokens("turn") == thinker.tokens("plain") == longest.thinker_tokens[20:24]
    expected = longest.thinker_rows[: prompt_length(longest) + 23]
    torch.testing.assert_close(thinker.rows("turn"), expected, atol=1e-4, rtol=1e-5)


def test_answers_to_one_prompt_that_come_at_a_time_compute_it_once(thinker, answers):
    prompt = [*answers[2].prompt_token_ids[:3], *answers[2].prompt_token_ids]  # in no test's cache
    before = cached(thinker)
    for index in range(4):
        thinker.start(f"n{index}", token_inputs(prompt), max_tokens=6, temperature=1.0, seed=index)
    thinker.run()
    assert cached(thinker) - before == 3 * ((len(prompt) - 1) // BLOCK * BLOCK)
    rows = [thinker.rows(f"n{index}")[: len(prompt)] for index in range(4)]
    assert all(torch.equal(each, rows[0]) for each in rows)


def test_what_a_text_request_left_in_the_cache_is_computed_again_for_its_rows(tight, answers):
    longest, tight = answers[2], tight("thinker")
    for name, streams in (("text", False), ("spoken", True)):
        tight.start(name, token_inputs(longest.prompt_token_ids), max_tokens=12, streams=streams)
        tight.run()
    check(tight, "spoken", longest, 12)
    # The one that computes is gone halfway; the one that waited for its rows goes on by itself.
    prompt = [*longest.prompt_token_ids[:2], *longest.prompt_token_ids]
    for name in ("goes", "stays"):
        tight.start(name, token_inputs(prompt), max_tokens=4)
    tight.step()
    tight.engine.abort("goes")
    tight.run()
    assert len(tight.rows("stays")) == len(prompt) + 3
    for index in range(4):
        tight.start(f"p{index}", token_inputs(longest.prompt_token_ids), max_tokens=32)
    tight.run()
    assert tight.preempted
    for index in range(4):
        check(tight, f"p{index}", longest, 32)


def test_a_turn_with_a_picture_gets_its_rows_and_positions_from_the_cache(thinker, tiny_checkpoint):
    text = "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|>what is this, said slowly, and again<|im_end|>\n"
    picture = Image.fromarray(np.arange(112 * 112 * 3, dtype=np.uint8).reshape(112, 112, 3))
    prompt = encode_media_prompt(tiny_checkpoint, f"{text}<|im_start|>assistant\n", {"image": picture})
    before, positions = cached(thinker), []
    for name in ("first", "second"):
        thinker.start(name, prompt, max_tokens=5)
        thinker.run()
        positions.append(to_torch(thinker.streams(name)[0].tensors["mrope_positions"]))
    assert cached(thinker) > before
    assert thinker.tokens("second") == thinker.tokens("first")
    torch.testing.assert_close(thinker.rows("second"), thinker.rows("first"), atol=1e-5, rtol=1e-5)
    assert positions[0].shape == (3, len(prompt.token_ids))
    assert torch.equal(*positions)


def voice(seconds, seed, loudness=0.1):
    """Noise that never falls silent: all of it is above the floor that the loudest frame of a sound sets."""
    noise = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    return (noise * loudness).astype(np.float32)


@pytest.fixture(scope="module")
def prompts(tiny_checkpoint):
    engine = PromptEngine(OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "thinker"), "prompt", SMALL))
    yield engine
    engine.shutdown()


@pytest.fixture
def encoded(thinker):
    """Frames of sound that the encoder has encoded, call by call."""
    calls = []
    tower = thinker.engine.core.worker.model_runner.model.audio_tower
    hook = tower.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[-1]))
    yield calls
    hook.remove()


def heard(prompts, *sounds):
    """What the prompt stage makes of a question about sounds."""
    tensors = [HostTensor(DType.F32, sound.shape, sound.tobytes()) for sound in sounds]
    media = tuple(
        Media("audio", MediaEncoding.ARRAY, TensorRef(DType.F32, sound.shape, index), sample_rate=RATE)
        for index, sound in enumerate(sounds)
    )
    content = (*(ContentPart(media=index) for index in range(len(sounds))), ContentPart(text="What is said?"))
    prompt = Prompt(messages=(ChatMessage("user", content),), media=media)
    prompts.start(StageRequest("r", StageParams(), 0), StageInputs(prompt=prompt, media=tensors))
    stream = prompts.step()[0]
    return StageInputs(token_ids=stream.token_ids, tensors=stream.tensors)


def pieces(inputs):
    """Place, length and name of each feature of a prompt."""
    frames = [bytearray(tensor.data) for tensor in inputs.tensors.values()]
    found = MsgpackDecoder(EngineCoreRequest).decode(frames).mm_features
    return [(feature.mm_position.offset, feature.mm_position.length, feature.identifier) for feature in found]


def answered(thinker, name, inputs, **params):
    thinker.start(name, inputs, **{"max_tokens": 8, "ignore_eos": True, **params})
    thinker.run()
    return thinker.written(name)


def by_transformers(reference, *sounds):
    content = [*({"type": "audio"} for _ in sounds), {"type": "text", "text": "What is said?"}]
    inputs = reference.inputs([{"role": "user", "content": content}], audios=[(sound, RATE) for sound in sounds])
    return reference.generate(inputs, thinker_max_tokens=8, talker_max_tokens=2, thinker_eos=[], speaks=False)


@pytest.mark.parametrize(
    ("samples", "lengths"),
    [
        ([2 * WINDOW + 25_000], [50, 50, 39]),
        ([WINDOW + 2 * MEL], [50]),  # two frames more than a window make no embedding
        ([WINDOW, 3 * WINDOW + 3 * MEL], [50, 50, 50, 50, 1]),
    ],
)
def test_a_sound_in_pieces_is_heard_as_transformers_hears_it(prompts, thinker, reference, samples, lengths):
    sounds = [np.resize(voice(5.0 + number, number), count) for number, count in enumerate(samples)]
    inputs = heard(prompts, *sounds)
    assert [length for _, length, _ in pieces(inputs)] == lengths
    assert answered(thinker, "r", inputs) == by_transformers(reference, *sounds).thinker_tokens


def test_only_what_is_new_of_a_sound_is_encoded_and_computed(prompts, thinker, reference, encoded):
    sound = voice(7.0, 7)
    for number in (1, 2, 3):
        ahead = heard(prompts, sound[: number * WINDOW + 1000])
        assert answered(thinker, f"ahead{number}", ahead, streams=False, max_tokens=0) == []
        assert len(thinker.events[f"ahead{number}"]) == 1
    assert encoded == [200 + 7] * 3  # each time one window, and the thousand samples behind it
    encoded.clear()
    hits, whole = cached(thinker), heard(prompts, sound)
    tokens, wanted = answered(thinker, "whole", whole), by_transformers(reference, sound)
    assert encoded == [100]
    assert cached(thinker) - hits == pieces(whole)[-1][0] // BLOCK * BLOCK, "up to its last embeddings"
    assert tokens == wanted.thinker_tokens
    rows = thinker.rows("whole")
    torch.testing.assert_close(rows, wanted.thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)


def test_a_louder_end_that_lifts_the_floor_of_the_whole_changes_no_answer(prompts, thinker, reference, encoded):
    """Features are cut off 80 dB below the loudest frame of a sound, which may come last."""
    quiet = voice(5.0, 3, loudness=2e-4)
    loud = np.concatenate([quiet, voice(1.0, 4, loudness=0.5)])
    first, second = heard(prompts, quiet), heard(prompts, loud)
    assert [name for *_, name in pieces(first)[:2]] != [name for *_, name in pieces(second)[:2]]
    answered(thinker, "ahead", first, streams=False, max_tokens=0)
    assert answered(thinker, "whole", second) == by_transformers(reference, loud).thinker_tokens
    assert sum(encoded) == 500 + 600
    with pytest.raises(InvalidRequest, match="nothing to speak") as caught:  # of a prompt alone
        thinker.start("r", first, max_tokens=0)
    assert caught.value.field == "max_tokens"


def test_features_are_made_of_a_sound_and_not_of_the_silence_after_it(prompts, monkeypatch):
    samples, stft = [], torch.stft

    def transform(sound, *args, **options):
        samples.append(sound.shape[-1])
        return stft(sound, *args, **options)

    monkeypatch.setattr(torch, "stft", transform)
    for seconds in (1, 2):
        heard(prompts, voice(seconds, seconds))
    assert samples == [RATE + 3 * MEL, 2 * RATE + 3 * MEL]  # a frame sees 200 samples to each side
