"""Writes Qwen3-Omni checkpoints without a network: one tiny and runnable, one full-sized and without weights.

Both use the layout of the published checkpoint. The tiny one's weights are scaled as those of Qwen2.5-Omni are
(docs/decisions.md), so that its answers vary with everything in the request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.checkpoints import claim_folder
from tools.checkpoints.configuration import make_generation_config
from tools.checkpoints.errors import CheckpointError
from tools.checkpoints.measure import Answer, failed_checks, print_answers
from tools.checkpoints.qwen3_omni.configuration import (
    ARCHITECTURE,
    TINY,
    TinySizes,
    full_config,
    make_processor,
    tiny_config,
)
from tools.checkpoints.qwen3_omni.measure import FRAMES, WANTED_SAMPLES, measure_answers
from tools.checkpoints.qwen3_omni.tokens import FULL_TOKENS, ROLES
from tools.checkpoints.tokenizer import make_tokenizer
from tools.checkpoints.weights import draw_weights, spoken_token_ids

OLD_VOICES = "spk_dict.pt"  # of a Qwen2.5-Omni checkpoint; these voices are in the configuration


def role_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the id of the one token of every role."""
    return {role: tokenizer.convert_tokens_to_ids(role) for role in ROLES}


def write_tiny(folder: Path, seed: int = 0, *, sizes: TinySizes = TINY, check: bool = True) -> list[Answer]:
    """Writes a tiny checkpoint and returns its answers (none with check=False).

    Raises FolderError if the folder holds other files, CheckpointError if the outputs do not vary enough.
    """
    from transformers import Qwen3OmniMoeForConditionalGeneration

    claim_folder(folder, {"kind": "tiny-qwen3", "seed": seed})
    (folder / OLD_VOICES).unlink(missing_ok=True)
    tokenizer = make_tokenizer(sizes.layout)
    config = tiny_config(role_ids(tokenizer), sizes)
    model = Qwen3OmniMoeForConditionalGeneration(config).to(torch.float32)
    draw_weights(model, seed, spoken_token_ids(tokenizer), sizes.sounds)
    model.generation_config = make_generation_config(sizes.layout)
    model.save_pretrained(folder)
    config.architectures = [ARCHITECTURE]
    config.save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=30, max_pixels=256 * 32 * 32).save_pretrained(folder)
    if not check:
        return []
    answers = measure_answers(folder)
    if failed := failed_checks(answers, codec_tokens=FRAMES, wanted_samples=WANTED_SAMPLES):
        print_answers(answers)
        raise CheckpointError("the outputs do not vary enough:\n  " + "\n  ".join(failed))
    return answers


def write_full(folder: Path) -> None:
    """Writes the checkpoint with the published sizes, without weights. Raises FolderError like `write_tiny`."""
    claim_folder(folder, {"kind": "full-qwen3"})
    (folder / OLD_VOICES).unlink(missing_ok=True)
    tokenizer = make_tokenizer(FULL_TOKENS)
    full_config(role_ids(tokenizer)).save_pretrained(folder)
    make_generation_config(FULL_TOKENS).save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=300, max_pixels=12845056).save_pretrained(folder)
