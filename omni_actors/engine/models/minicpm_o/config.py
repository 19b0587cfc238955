"""MiniCPM-o's configuration and tokenizer, which transformers does not know."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, Qwen2Tokenizer, Qwen3Config

from omni_actors.errors import ConfigError

SPEECH = {"backbone_model": "llama", "condition_type": "hidden_text_merge", "projector_type": "mlp", "num_vq": 1}


class MiniCpmOConfig(Qwen3Config):  # type: ignore[misc]  # has no type
    """The thinker's sizes, and a part for each of the others."""

    model_type = "minicpmo"


AutoConfig.register(MiniCpmOConfig.model_type, MiniCpmOConfig, exist_ok=True)
# The checkpoint's own class adds names for tokens; texts become the same ids.
AutoTokenizer.register(MiniCpmOConfig, tokenizer_class=Qwen2Tokenizer, exist_ok=True)


def speech_part(config: PretrainedConfig) -> dict[str, Any]:
    """The talker's part of the configuration. Raises `ConfigError` if it is of another kind than 4.5's."""
    given: dict[str, Any] = config.tts_config
    for name, wanted in SPEECH.items():
        if given.get(name, wanted) != wanted:
            raise ConfigError(
                f"tts_config.{name} of the checkpoint is {given[name]!r}; this model needs {wanted!r}.",
                hint="Use a checkpoint of MiniCPM-o 4.5.",
            )
    return given
