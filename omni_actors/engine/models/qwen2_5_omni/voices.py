"""The voices of a Qwen2.5-Omni checkpoint, from its spk_dict.pt."""

from __future__ import annotations

from typing import Any

import torch

from omni_actors.errors import ConfigError


def load_voices(model: str) -> dict[str, dict[str, Any]]:
    """Voice name -> {"bos_token": int, "cond": [1, speaker_dim], "ref_mel": [1, frames, mel_dim]}, in file order.

    Raises:
        ConfigError: the file is missing or lacks something that the published checkpoints have.
    """
    from transformers.utils import cached_file

    try:
        path = cached_file(model, "spk_dict.pt")
        voices = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise ConfigError(f"The checkpoint {model!r} has no readable spk_dict.pt: {error}") from error
    if not isinstance(voices, dict) or not voices:
        raise ConfigError(f"spk_dict.pt of {model!r} holds no voices.")
    for name, entry in voices.items():
        if not isinstance(entry, dict) or not {"bos_token", "cond", "ref_mel"} <= set(entry):
            raise ConfigError(f"Voice {name!r} in spk_dict.pt of {model!r} lacks bos_token, cond or ref_mel.")
    return voices
