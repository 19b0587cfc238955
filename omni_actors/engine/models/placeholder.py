"""The language model that a diffusion stage claims to be in vLLM's configuration. It is never built.

vLLM's configuration requires an architecture, a vocabulary and a context length. An entry of vLLM's own registry would
do, but vLLM inspects it in a subprocess that imports all of vLLM (7 s on a fresh machine); a class object is not
inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from omni_actors.engine.models import ModelSpec, Overrides, served_as
from omni_actors.errors import ConfigError
from omni_actors.protocol.payloads import StageParams

ARCHITECTURE = "OmniActorsPlaceholder"


def _never(self: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    raise ConfigError("A diffusion stage got a worker for language models; this is an error in its configuration.")


class PlaceholderModel(nn.Module):
    """Class with the methods by which vLLM recognises a text generation model. None is ever called."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    embed_input_ids = forward = compute_logits = _never


def placeholder_overrides(part: str, max_steps: int) -> Overrides:
    """`hf_overrides` of a diffusion stage.

    Args:
        part: see `served_as`.
        max_steps: maximum of denoise steps per request; they count as tokens.
    """

    @served_as(ARCHITECTURE, part)
    def override(_config: PretrainedConfig) -> PretrainedConfig:
        return PretrainedConfig(
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


def diffusion_spec(
    runner: type,
    part: str,
    max_steps: int,
    engine: Mapping[str, Any],
    *,
    params: StageParams = StageParams(),  # noqa: B008 - immutable
    folder: str = "",
    required: Mapping[str, Any] = MappingProxyType({"enforce_eager": True}),
) -> ModelSpec:
    """The spec of a stage that a `DiffusionModelRunner` computes; for the other arguments see `ModelSpec`.

    Args:
        runner: its class.
        part: see `placeholder_overrides`; so is `max_steps`.
    """
    return ModelSpec(
        kind="diffusion",
        hf_overrides=placeholder_overrides(part, max_steps),
        vllm_models={ARCHITECTURE: PlaceholderModel},
        engine=engine,
        required={"max_model_len": max_steps + 1, "skip_tokenizer_init": True, **required},
        params=params,
        runner=f"{runner.__module__}.{runner.__qualname__}",
        folder=folder,
    )


# Far more than the one of a request: vLLM takes no more requests at a time than it has tokens.
MAX_STEPS = 1023


def vocoder_spec(runner: type, part: str, max_steps: int = MAX_STEPS, most: int = 16, **options: Any) -> ModelSpec:
    """The spec of a stage that turns codes into sound, for `most` requests at a time; see `diffusion_spec`."""
    required = {"max_num_batched_tokens": max_steps + 1, "dtype": "float32", "enforce_eager": True}
    return diffusion_spec(runner, part, max_steps, {"max_num_seqs": most}, required=required, **options)
