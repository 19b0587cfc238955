"""Arguments and inputs of the vocoder stage, and how far two waveforms are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig

WHOLE = {"policy": "whole"}


def arguments(
    checkpoint: Path, *, asynchronous: bool = False, decode: dict[str, Any] = WHOLE, **engine: Any
) -> OmniEngineArgs:
    config = OmniModelConfig(str(checkpoint), "code2wav", decode=decode)
    return OmniEngineArgs(config, "diffusion", engine=engine, asynchronous=asynchronous)


def codec_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 257, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def difference(waveform: np.ndarray, other: np.ndarray) -> float:
    """Largest difference, relative to the peak of `other`."""
    assert waveform.shape == other.shape
    return float(np.abs(waveform - other).max() / np.abs(other).max())
