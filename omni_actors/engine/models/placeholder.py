"""The language model that a diffusion stage claims to be in vLLM's configuration. It is never built.

vLLM's configuration requires an architecture, a vocabulary and a context length. An entry of vLLM's own registry would
do, but vLLM inspects it in a subprocess that imports all of vLLM (7 s on a fresh machine); a class object is not
inspected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from omni_actors.errors import ConfigError

ARCHITECTURE = "OmniActorsPlaceholder"


class PlaceholderModel(nn.Module):
    """Class with the methods by which vLLM recognises a text generation model."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        raise _built()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Never called."""
        raise _built()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Never called."""
        raise _built()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Never called."""
        raise _built()


def _built() -> ConfigError:
    return ConfigError("A diffusion stage got a worker for language models; this is an error in its configuration.")


def placeholder_overrides(part: str, max_steps: int) -> Callable[[PretrainedConfig], PretrainedConfig]:
    """`hf_overrides` of a diffusion stage.

    Args:
        part: attribute by which the checkpoint's real configuration is recognised; vLLM first calls the function with
            an empty one, which must be returned as it is.
        max_steps: maximum of denoise steps per request; they count as tokens.
    """

    def override(config: PretrainedConfig) -> PretrainedConfig:
        if not hasattr(config, part):
            return config
        return PretrainedConfig(
            architectures=[ARCHITECTURE],
            vocab_size=2,  # STEP_TOKEN and FAILED_TOKEN
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=max_steps + 1,
        )

    return override
