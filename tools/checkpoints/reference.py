"""Models and their inputs as transformers has them, with what has to be mended there."""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any

import torch

AUDIO_RATE = 16000


def keep_talker_attention_mask(model: Any) -> None:
    """Makes the talker of a loaded transformers model receive its attention mask of ones.

    transformers 5.19 drops an all-ones mask in `generate()`, and the talker adds the embeddings of the codec's pad and
    start tokens to its prompt only `if attention_mask is not None`. Without this, an unpadded prompt gets a talker
    that differs from the published one. Only this instance is changed.
    """
    talker = model.talker
    original_forward = talker.forward

    @wraps(original_forward)  # generate() validates its arguments against the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None:
            embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
            batch, length = (kwargs["input_ids"] if embeds is None else embeds).shape[:2]
            past = 0 if cache is None else cache.get_seq_length()
            kwargs["attention_mask"] = torch.ones(batch, past + length, dtype=torch.long)
        return original_forward(*args, **kwargs)

    talker.forward = forward


def generate_arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns a processor's output as keyword arguments for the `generate()` of Qwen2.5-Omni.

    transformers 5.19 passes arguments without a prefix to all three parts, and the talker refuses pixels.
    """
    pixels = ("pixel_values", "pixel_values_videos")
    return {f"thinker_{name}" if name in pixels else name: value for name, value in inputs.items()}


def is_qwen3(folder: Path) -> bool:
    """Returns whether a checkpoint is Qwen3-Omni's; else it is Qwen2.5-Omni's."""
    return bool(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "qwen3_omni_moe")


def load_reference_model(folder: Path) -> Any:
    """Returns transformers' model of a checkpoint in float32, with two errors of transformers 5.19 mended.

    For Qwen2.5-Omni see `keep_talker_attention_mask`. Qwen3-Omni's talker reads the audio encoder's configuration,
    which it does not have, where a prompt has audio and pictures; here it has it.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration

    if is_qwen3(folder):
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        model.talker.config.audio_config = model.config.thinker_config.audio_config
        return model
    older = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    keep_talker_attention_mask(older)
    return older


def voices_of(model: Any) -> tuple[str, ...]:
    """Returns the voices that a model knows."""
    return tuple(getattr(model, "speaker_map", None) or model.config.talker_config.speaker_id)


def quiet_transformers() -> None:
    """Silences warnings of transformers that do not apply.

    It compares all ids of the talker's configuration with the talker's vocabulary, even those of text tokens.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
