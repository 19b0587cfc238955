"""MiniCPM-o's configuration and tokenizer, which transformers does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2Tokenizer,
    Qwen3Config,
    SiglipVisionConfig,
    WhisperConfig,
)

from omni_actors.errors import ConfigError

SPEECH = {"backbone_model": "llama", "condition_type": "hidden_text_merge", "projector_type": "mlp", "num_vq": 1}
QUERIES, PATCH, POOLED = 64, 14, 5
SEEING, PATCHES = {"query_num": QUERIES}, {"patch_size": PATCH}
HEARING = {"audio_pool_step": POOLED, "audio_chunk_length": 1.0}


class MiniCpmOConfig(Qwen3Config):  # type: ignore[misc]  # has no type
    """The thinker's sizes, and a part for each of the others."""

    model_type = "minicpmo"


AutoConfig.register(MiniCpmOConfig.model_type, MiniCpmOConfig, exist_ok=True)
# The checkpoint's own class adds names for tokens; texts become the same ids.
AutoTokenizer.register(MiniCpmOConfig, tokenizer_class=Qwen2Tokenizer, exist_ok=True)


def speech_part(config: PretrainedConfig) -> dict[str, Any]:
    """The talker's part of the configuration. Raises `ConfigError` if it is of another kind than 4.5's."""
    given: dict[str, Any] = config.tts_config
    _check("tts_config.", given, SPEECH)
    return given


def hearing_part(config: PretrainedConfig) -> WhisperConfig:
    """That of the encoder of sounds. Raises `ConfigError` likewise."""
    _check("", vars(config), HEARING)
    return WhisperConfig(**config.audio_config)


def seeing_part(config: PretrainedConfig) -> SiglipVisionConfig:
    """That of the encoder of pictures. Raises `ConfigError` likewise."""
    _check("", vars(config), SEEING)
    _check("vision_config.", config.vision_config, PATCHES)
    return SiglipVisionConfig(**config.vision_config)


def _check(part: str, given: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    for name, wanted in needed.items():
        if given.get(name, wanted) != wanted:
            raise ConfigError(
                f"{part}{name} of the checkpoint is {given[name]!r}; this model needs {wanted!r}.",
                hint="Use a checkpoint of MiniCPM-o 4.5.",
            )
