"""The folder that is trained: a checkpoint in the published layout, whole from the first step on."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.checkpoints import MARKER_FILE, claim_folder
from tools.checkpoints.omni import VOICES_FILE
from tools.speaker import SpeakerError

LAYOUT = Path(__file__).resolve().parents[2] / "examples" / "speaker"
WEIGHTS = "model.safetensors"
EMBEDDING_SIZE = 0.25  # the talker reads embeddings beside hidden states, which are about that large
SEED = 1


def initialise(model: Any) -> None:
    """Gives a new model torch's usual weights, but each block of the DiT begins as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv3d | nn.ConvTranspose1d):
            module.reset_parameters()
    for part in (model.thinker, model.talker):
        nn.init.normal_(part.model.embed_tokens.weight, std=EMBEDDING_SIZE)
    dit = model.token2wav.code2wav_dit_model
    nn.init.normal_(dit.text_embed.codec_embed.weight)
    for last in (*(block.attn_norm.linear for block in dit.transformer_blocks), dit.norm_out.linear, dit.proj_out):
        nn.init.zeros_(last.weight)
    dit.proj_out.bias.copy_(torch.cat([fields["ref_mel"] for fields in model.speaker_map.values()]).mean((0, 1)))


def write_new(folder: Path) -> None:
    """Writes a checkpoint with new weights; all else, the voices too, is that of `examples/speaker`.

    Raises FolderError if the folder holds files of something else.
    """
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    claim_folder(folder, {"kind": "speaker"})
    for path in LAYOUT.iterdir():
        if path.name not in (WEIGHTS, MARKER_FILE, "README.md"):
            shutil.copyfile(path, folder / path.name)
    torch.manual_seed(SEED)
    model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig.from_pretrained(folder))
    model.load_speakers(folder / VOICES_FILE)
    with torch.no_grad():
        initialise(model)
    save(model.state_dict(), folder)


def save(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes weights in float16 and keeps the file's other ones, as parts may be trained at the same time.

    Raises SpeakerError, and leaves what was there, if one is not finite.
    """
    from safetensors.torch import load_file, save_file

    made = {name: value.detach().half().cpu().contiguous() for name, value in weights.items()}
    if broken := [name for name, value in made.items() if not bool(value.isfinite().all())]:
        raise SpeakerError(f"{len(broken)} tensors hold NaN or infinity, such as {broken[0]}; lower --rate.")
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = load_file(folder / WEIGHTS) if (folder / WEIGHTS).exists() else {}
        save_file({**kept, **made}, folder / "new.safetensors", metadata={"format": "pt"})
        (folder / "new.safetensors").chmod(0o644)
        (folder / "new.safetensors").replace(folder / WEIGHTS)
    finally:
        os.close(lock)
