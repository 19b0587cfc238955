"""A sound that is still growing is encoded as far as it goes; the whole costs only what is new, and is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.prompt import PromptEngine
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.protocol.tensors import DType, HostTensor, TensorRef
from omni_actors.stage.engine_interface import StageInputs, StageRequest, StreamEvent, TextEvent
from tests.support.reference import Reference
from tests.support.stage_driver import SMALL, Driver, make_engine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
RATE = 16_000
WINDOW = 2 * RATE  # samples that the encoder encodes together
BLOCK = 32  # of the key/value cache
MEL = 160  # samples of a frame of features
Sound = NDArray[np.float32]


def voice(seconds: float, seed: int, loudness: float = 0.1) -> Sound:
    """Noise that never falls silent: all of it is above the floor that the loudest frame of a sound sets."""
    noise = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    return (noise * loudness).astype(np.float32)


@pytest.fixture(scope="module")
def prompts(tiny_checkpoint: Path) -> Iterator[PromptEngine]:
    engine = PromptEngine(OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "thinker"), "prompt", SMALL))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path):
    engine = make_engine(tiny_checkpoint, "thinker", asynchronous=True, block_size=BLOCK)
    yield engine
    engine.shutdown()


@pytest.fixture
def thinker(engine) -> Iterator[Driver]:
    """Finds its engine idle and leaves it idle."""
    driver = Driver(engine)
    yield driver
    driver.assert_idle()


@pytest.fixture
def encoded(engine) -> Iterator[list[int]]:
    """Frames of sound that the encoder has encoded, call by call."""
    calls: list[int] = []
    tower = engine.core.worker.model_runner.model.audio_tower
    hook = tower.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[-1]))
    yield calls
    hook.remove()


def heard(prompts: PromptEngine, *sounds: Sound) -> StageInputs:
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
    assert isinstance(stream, StreamEvent), stream
    return StageInputs(token_ids=stream.token_ids, tensors=stream.tensors)


def pieces(inputs: StageInputs) -> list[tuple[int, int, str]]:
    """Place, length and name of each feature of a prompt."""
    frames = [bytearray(tensor.data) for tensor in inputs.tensors.values()]
    found = MsgpackDecoder(EngineCoreRequest).decode(frames).mm_features
    return [(feature.mm_position.offset, feature.mm_position.length, feature.identifier) for feature in found]


def answered(thinker: Driver, name: str, inputs: StageInputs) -> list[int]:
    thinker.start(name, inputs, max_tokens=8, ignore_eos=True)
    thinker.run()
    return [token for event in thinker.events[name] if isinstance(event, TextEvent) for token in event.token_ids]


def by_transformers(reference: Reference, *sounds: Sound) -> list[int]:
    content = [*({"type": "audio"} for _ in sounds), {"type": "text", "text": "What is said?"}]
    inputs = reference.inputs([{"role": "user", "content": content}], audios=[(sound, RATE) for sound in sounds])
    limits = {"thinker_max_tokens": 8, "talker_max_tokens": 2, "num_steps": 2, "thinker_eos": []}
    return reference.generate(inputs, **limits).thinker_tokens


@pytest.mark.parametrize(
    ("samples", "lengths"),
    [
        ([2 * WINDOW + 25_000], [50, 50, 39]),
        ([WINDOW + 2 * MEL], [50]),  # two frames more than a window make no embedding
        ([WINDOW, 3 * WINDOW + 3 * MEL], [50, 50, 50, 50, 1]),
    ],
)
def test_a_sound_in_pieces_is_heard_as_transformers_hears_it(
    prompts: PromptEngine, thinker: Driver, reference: Reference, samples: list[int], lengths: list[int]
) -> None:
    sounds = [voice(5.0 + number, number)[:count] for number, count in enumerate(samples)]
    sounds = [np.resize(sound, count) for sound, count in zip(sounds, samples, strict=True)]
    inputs = heard(prompts, *sounds)
    assert [length for _, length, _ in pieces(inputs)] == lengths
    name = f"r{len(lengths)}"
    assert answered(thinker, name, inputs) == by_transformers(reference, *sounds)


def test_only_what_is_new_of_a_sound_is_encoded_and_computed(
    prompts: PromptEngine, thinker: Driver, reference: Reference, encoded: list[int]
) -> None:
    sound = voice(7.0, 7)
    for number in (1, 2, 3):
        ahead = heard(prompts, sound[: number * WINDOW + 1000])
        thinker.start(f"ahead{number}", ahead, streams=False, max_tokens=0)
        thinker.run()
        assert thinker.finished(f"ahead{number}").output_tokens == 0
        assert len(thinker.events[f"ahead{number}"]) == 1
    assert encoded == [200 + 7] * 3  # each time one window, and the thousand samples behind it
    before, hits = len(encoded), thinker.engine.statistics().prefix_hits
    whole = heard(prompts, sound)
    tokens = answered(thinker, "whole", whole)
    assert encoded[before:] == [100]
    last = pieces(whole)[-1][0]  # the place of its first embedding
    assert thinker.engine.statistics().prefix_hits - hits == last // BLOCK * BLOCK
    assert tokens == by_transformers(reference, sound)


def test_a_louder_end_that_lifts_the_floor_of_the_whole_changes_no_answer(
    prompts: PromptEngine, thinker: Driver, reference: Reference, encoded: list[int]
) -> None:
    """Features are cut off 80 dB below the loudest frame of a sound, which may come last."""
    quiet = voice(5.0, 3, loudness=2e-4)
    loud = np.concatenate([quiet, voice(1.0, 4, loudness=0.5)])
    first, second = heard(prompts, quiet), heard(prompts, loud)
    assert [name for *_, name in pieces(first)[:2]] != [name for *_, name in pieces(second)[:2]]
    thinker.start("ahead", first, streams=False, max_tokens=0)
    thinker.run()
    assert answered(thinker, "whole", second) == by_transformers(reference, loud)
    assert sum(encoded) == 500 + 600


def test_rows_of_the_whole_are_those_without_anything_ahead(
    prompts: PromptEngine, thinker: Driver, tiny_checkpoint: Path
) -> None:
    sound = voice(5.0, 11)
    thinker.start("ahead", heard(prompts, sound[: 2 * WINDOW + 1000]), streams=False, max_tokens=0)
    thinker.run()
    inputs = heard(prompts, sound)
    tokens = answered(thinker, "whole", inputs)
    fresh = make_engine(tiny_checkpoint, "thinker", asynchronous=True, block_size=BLOCK)
    try:
        other = Driver(fresh)
        assert answered(other, "whole", inputs) == tokens
        torch.testing.assert_close(thinker.rows("whole"), other.rows("whole"), atol=1e-5, rtol=1e-5)
    finally:
        fresh.shutdown()


def test_features_are_made_of_a_sound_and_not_of_the_silence_after_it(
    prompts: PromptEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[int] = []
    stft = torch.stft

    def transform(sound: torch.Tensor, *args, **options) -> torch.Tensor:
        samples.append(sound.shape[-1])
        return stft(sound, *args, **options)

    monkeypatch.setattr(torch, "stft", transform)
    heard(prompts, voice(1.0, 1))
    heard(prompts, voice(2.0, 2))
    assert samples == [RATE + 3 * MEL, 2 * RATE + 3 * MEL]  # a frame sees 200 samples to each side


def test_a_prompt_alone_cannot_be_spoken(prompts: PromptEngine, thinker: Driver) -> None:
    with pytest.raises(InvalidRequest, match="nothing to speak") as caught:
        thinker.start("r", heard(prompts, voice(1.0, 1)), max_tokens=0)
    assert caught.value.field == "max_tokens"
