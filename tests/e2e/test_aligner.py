"""Qwen3-ForcedAligner in this process, behind the prompt stage, against transformers: when words are said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.encoder import EncoderEngine
from omni_actors.errors import InvalidPayload, PromptTooLong
from omni_actors.protocol.messages import TEXT
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import FinishedEvent, StageInputs, StageRequest, WordsEvent
from tests.support import drawn_sizes
from tests.support.drawn_sizes import DRAWS
from tests.support.qwen3_asr_reference import Qwen3AsrReference
from tests.support.recordings import RecordingPrompts, noise
from tests.support.reference import one_thread
from tools.checkpoints import asr

pytestmark = pytest.mark.e2e

OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
CPU = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 24}
# One has several windows of the encoder and is computed in several chunks.
CASES = {
    "short": (noise(0.5), "The."),
    "marks": (noise(1.2507), "  The tide -- isn't full; well-known, 12.5%!\n"),
    "long": (noise(8.513), "They sail the sea. " * 12),
    "two scripts": (noise(2.0), "你好, the sea\u3000こんにちは世界!"),
}


class Aligner:
    """An aligner's stage and the prompt stage before it."""

    def __init__(self, checkpoint: Path) -> None:
        self.prompts = RecordingPrompts(checkpoint, OPTIONS)
        self.engine = EncoderEngine(
            OmniEngineArgs(OmniModelConfig(str(checkpoint), "aligner"), "encoder", OPTIONS | CPU)
        )
        self.engine.warm_up()

    def start(self, name: str, sound: np.ndarray, text: str) -> None:
        made = self.prompts.of(sound)
        self.engine.start(StageRequest(name, StageParams(), 0), StageInputs(tensors=made.tensors, scalars={TEXT: text}))

    def run(self) -> dict[str, list[Any]]:
        """All events by request."""
        events: dict[str, list[Any]] = {}
        with one_thread():
            while self.engine.runnable():
                for event in self.engine.step():
                    events.setdefault(event.request_id, []).append(event)
        return events

    def shutdown(self) -> None:
        self.prompts.engine.shutdown()
        self.engine.shutdown()


@pytest.fixture(scope="module")
def aligner(tiny_qwen3_aligner: Path) -> Iterator[Aligner]:
    made = Aligner(tiny_qwen3_aligner)
    yield made
    made.shutdown()


def check(aligner: Aligner, reference: Qwen3AsrReference) -> None:
    """Each case, in one batch and alone, has the words and the times of transformers."""
    for name, (sound, text) in CASES.items():
        aligner.start(name, sound, text)
    together = aligner.run()
    for name, (sound, text) in CASES.items():
        aligner.start(f"{name}, alone", sound, text)
        for events in (together[name], aligner.run()[f"{name}, alone"]):
            words, finished = events
            assert isinstance(words, WordsEvent)
            expected = reference.align(sound, text)
            found = [{"text": one.word, "start_time": one.start, "end_time": one.end} for one in words.words]
            assert found == expected, name
            assert len({time for one in words.words for time in (one.start, one.end)}) > 1 or name == "short"
            assert isinstance(finished, FinishedEvent)
            assert all(text[one.place] == one.word[0] for one in words.words)
    assert not any(aligner.engine.counts().values())


def test_words_and_times_are_those_of_transformers(aligner: Aligner, tiny_qwen3_aligner: Path) -> None:
    check(aligner, Qwen3AsrReference(tiny_qwen3_aligner))


@DRAWS
def test_those_of_drawn_models_are_too(draw: str, tmp_path: Path) -> None:
    generator = Random(f"qwen3-aligner {draw}")
    sizes, seed = drawn_sizes.qwen3_asr_sizes(generator), generator.randrange(1 << 31)
    print(f"seed {seed}, {sizes}")
    asr.write_tiny(tmp_path, seed, sizes=sizes, aligner=True)
    made = Aligner(tmp_path)
    try:
        check(made, Qwen3AsrReference(tmp_path))
    finally:
        made.shutdown()


def test_the_stage_says_how_long_a_recording_may_be(aligner: Aligner) -> None:
    assert aligner.engine.facts.hearing.max_seconds == 200 * 0.08, "as far as its classes reach"


def test_what_cannot_be_aligned_is_refused(aligner: Aligner) -> None:
    sound = CASES["marks"][0]
    with pytest.raises(InvalidPayload, match="a word in it"):
        aligner.start("no word", sound, " -- ")
    with pytest.raises(PromptTooLong, match="at most 1023"):
        aligner.start("long", sound, "sail " * 400)
    with pytest.raises(InvalidPayload, match="needs a recording"):
        aligner.engine.start(StageRequest("no sound", StageParams(), 0), StageInputs(scalars={TEXT: "The tide."}))
    assert not any(aligner.engine.counts().values())
