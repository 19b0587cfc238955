"""Weights of the four parts, from files of training or from a whole checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tools.speaker import SpeakerError
from tools.speaker.codec import VOICES
from tools.speaker.layout import PARTS

VOICE_FIELDS = ("cond", "ref_mel")
VOICE_PREFIX = "voices."  # voices.NAME.cond and voices.NAME.ref_mel lie beside the DiT's weights


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """Returns a part's weights in float32, under their names within the part.

    `folder` holds PART.safetensors, or is a checkpoint. Raises SpeakerError if it has no such part.
    """
    from safetensors import safe_open

    prefix = PARTS[part]
    for path in (folder / f"{part}.safetensors", folder / "model.safetensors"):
        if path.exists():
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a mapping
                tensors = {name.removeprefix(prefix): file.get_tensor(name).float() for name in names}
            if tensors:
                return tensors
    raise SpeakerError(f"{folder} has no weights of the {part}; train it first, or name another folder.")


def read_voices(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Returns {voice: {"cond": [1, 192], "ref_mel": [1, frames, 80]}} of the DiT's part or of a checkpoint."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    if (folder / "dit.safetensors").exists():
        found = load_file(folder / "dit.safetensors")
    elif (folder / "spk_dict.pt").exists():
        for voice, fields in torch.load(folder / "spk_dict.pt", weights_only=True).items():
            found |= {f"{VOICE_PREFIX}{voice}.{field}": value for field, value in fields.items()}
    names = {voice: {field: f"{VOICE_PREFIX}{voice}.{field}" for field in VOICE_FIELDS} for voice in VOICES}
    if not all(name in found for fields in names.values() for name in fields.values()):
        raise SpeakerError(f"{folder} lacks the voices {', '.join(VOICES)}; the training of the DiT writes them.")
    return {voice: {field: found[name].float() for field, name in fields.items()} for voice, fields in names.items()}


def write_part(folder: Path, part: str, tensors: dict[str, Tensor], voices: dict[str, dict[str, Tensor]]) -> Path:
    """Writes PART.safetensors in float16, with voices if there are any; returns its path."""
    from safetensors.torch import save_file

    named = {PARTS[part] + name: value.detach().half().cpu().contiguous() for name, value in tensors.items()}
    for voice, fields in voices.items():
        named |= {f"{VOICE_PREFIX}{voice}.{field}": value.float().cpu() for field, value in fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}.safetensors"
    temporary = path.with_suffix(".new")
    save_file(named, temporary)
    temporary.replace(path)
    return path
