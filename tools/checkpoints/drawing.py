"""Random weights for the parts of a diffusion pipeline."""

from __future__ import annotations

from typing import Any

import torch

from tools.checkpoints.weights import normal


@torch.no_grad()
def drawn(model: Any, seed: int, part: str) -> Any:
    """Returns the model, float32, with weights that keep the size of what goes through it; norms differ by channel.

    The same seed and part give the same weights.
    """
    for name, parameter in model.named_parameters():
        value = normal(parameter.shape, seed, f"{part}.{name}")
        norm = name.endswith("gamma") or ("norm" in name and name.endswith("weight") and parameter.ndim == 1)
        if norm:
            parameter.copy_(1 + 0.2 * value)
        elif parameter.ndim >= 2 and not name.endswith("pad_token"):
            parameter.copy_(value / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.2 * value)
    return model.float().eval()
