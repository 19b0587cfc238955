"""Arguments and inputs of the vocoder stage, what transformers answers, and how far two waveforms are apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.rows import to_torch
from omni_actors.errors import EngineError
from omni_actors.protocol.fields import Scalar
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, StageInputs, StageRequest
from tests.support.reference import InjectedNoise, Reference, one_thread
from tools.checkpoints.omni import QWEN2_5_OMNI

WHOLE = {"policy": "whole"}
CHUNKS = {"first_blocks": 1, "largest_blocks": 4}


def arguments(
    checkpoint: Path, *, asynchronous: bool = False, decode: dict[str, Any] = WHOLE, **engine: Any
) -> OmniEngineArgs:
    config = OmniModelConfig(str(checkpoint), "code2wav", decode={"smooth_start": False} | decode)
    return OmniEngineArgs(config, "diffusion", engine=engine, asynchronous=asynchronous)


def run_dry(engine: DiffusionEngine) -> None:
    """Steps until nothing is left to do."""
    for _ in range(500):
        if not engine.runnable():
            return
        engine.step()
    pytest.fail("the engine does not become idle")


def sound_of(
    checkpoint: Path,
    codes: list[int],
    scalars: Mapping[str, Scalar],
    voice: str | None = None,
    seed: int = 0,
    **engine: Any,
) -> torch.Tensor:
    """What a vocoder of its own makes of a whole utterance: f32 [samples]."""
    vocoder = DiffusionEngine(arguments(checkpoint, **engine))
    try:
        vocoder.start(StageRequest("r", StageParams(), seed, voice), StageInputs(codes, scalars=scalars))
        events = [event for _ in range(50) if vocoder.runnable() for event in vocoder.step()]
    finally:
        vocoder.shutdown()
    return torch.cat([to_torch(event.samples) for event in events if isinstance(event, AudioEvent)])


def out_of_memory(*_: object) -> Any:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")


def assert_out_of_memory(error: Exception) -> None:
    """Check that it says what to do, and keeps no traceback, which would keep its step's tensors alive."""
    assert isinstance(error, EngineError)
    assert "OutOfMemoryError: CUDA out of memory" in error.message
    assert "budget_bytes" in error.hint
    assert error.__cause__ is error.__context__ is None


def codec_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, QWEN2_5_OMNI.tiny["sounds"] + 1, (count,), generator=generator).tolist()


def difference(waveform: np.ndarray, other: np.ndarray) -> float:
    """Largest difference, relative to the peak of `other`."""
    assert waveform.shape == other.shape
    return float(np.abs(waveform - other).max() / np.abs(other).max())


def expected(reference: Reference, spec: tuple[int, int, str, float], seed: int) -> np.ndarray:
    """What transformers answers to a request of tokens, points in time, voice and guidance, with our noise."""
    tokens, points, voice, guidance = spec
    speaker = reference.voices[voice]
    noise = InjectedNoise(lambda *shape: reference.noise(seed, *shape))
    with torch.no_grad(), one_thread(), noise:
        waveform = reference.model.token2wav(
            torch.tensor([codec_tokens(tokens, seed)]),
            conditioning=speaker["cond"].float(),
            reference_mel=speaker["ref_mel"].float(),
            num_steps=points,
            guidance_scale=guidance,
        )
    return waveform.reshape(-1).numpy()
