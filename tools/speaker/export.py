"""Puts four trained parts together as a checkpoint in the published layout, in float16."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tools.checkpoints import claim_folder
from tools.checkpoints.omni import VOICES_FILE
from tools.speaker import SpeakerError
from tools.speaker.layout import PARTS, TOKENS, load_tokenizer, speaker_config, write_layout
from tools.speaker.parts import read_part, read_voices

MAX_BYTES = 20_000_000  # the checkpoint is a part of the repository


@cache
def expected_shapes(user_token: int) -> dict[str, torch.Size]:
    """Returns the shape of every tensor of the whole model, without computing any."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(speaker_config(user_token))
    return {name: value.shape for name, value in model.state_dict().items()}


def whole_model(parts: Path, user_token: int) -> dict[str, Tensor]:
    """Returns all weights in float16. Raises SpeakerError if a tensor is missing, unknown, misshapen or not finite."""
    tensors: dict[str, Tensor] = {}
    for part, prefix in PARTS.items():
        tensors |= {prefix + name: value.half().contiguous() for name, value in read_part(parts, part).items()}
    wanted = expected_shapes(user_token)
    wrong = sorted(set(wanted) ^ set(tensors))
    wrong += [name for name, shape in wanted.items() if name in tensors and tensors[name].shape != shape]
    if wrong:
        raise SpeakerError(f"{len(wrong)} tensors of {parts} do not fit the configuration, such as {wrong[0]}.")
    broken = [name for name, value in tensors.items() if not bool(value.isfinite().all())]
    if broken:
        raise SpeakerError(f"{len(broken)} tensors of {parts} hold NaN or infinity, such as {broken[0]}: train again.")
    return tensors


def export(parts: Path, tokenizer_folder: Path, out: Path) -> int:
    """Writes the checkpoint into `out`; returns its size in bytes.

    Raises:
        SpeakerError: the parts do not fit or are not sound, or the result is above 20 MB.
        FolderError: `out` holds files of something else.
    """
    from safetensors.torch import save_file

    tokenizer = load_tokenizer(tokenizer_folder)
    tensors = whole_model(parts, tokenizer.convert_tokens_to_ids("user"))
    voices = {name: {"bos_token": TOKENS.voices[name], **fields} for name, fields in read_voices(parts).items()}
    claim_folder(out, {"kind": "speaker"})
    write_layout(out, tokenizer)
    weights = out / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    torch.save(voices, out / VOICES_FILE)
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > MAX_BYTES:
        raise SpeakerError(f"{out} has {size} bytes, more than the {MAX_BYTES} that may lie in the repository.")
    return size
