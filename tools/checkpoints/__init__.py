"""Writes checkpoints without a network: tiny ones that run, and full-sized ones without weights.

    python -m tools.checkpoints tiny|tiny-qwen3|tiny-z-image|tiny-qwen-image OUT_DIR [--seed N]
    python -m tools.checkpoints full OUT_DIR [--weights]
    python -m tools.checkpoints full-qwen3|full-z-image|full-qwen-image OUT_DIR
    python -m tools.checkpoints tiny-qwen3-tts|full-qwen3-tts OUT_DIR [--kind KIND] [--size 1b7|0b6]

`tiny` has the real architecture at toy size and random weights, scaled so that the outputs are useful in tests: greedy
tokens vary with the prompt and do not fall into a cycle, the waveform has amplitude and is not clipped
(docs/decisions.md). It checks this at the end and fails if the outputs do not vary enough.

`full` has the published sizes of Qwen2.5-Omni-7B and no weights; vLLM fills it with `load_format: dummy`. With
`--weights` it has random ones, 21.5 GB, for measurements of loading; their answers are not checked.

`tiny-qwen3` and `full-qwen3` (tools/checkpoints/qwen3_omni) are the same for Qwen3-Omni, `tiny-qwen3-tts` and
`full-qwen3-tts` (tools/checkpoints/qwen3_tts) for the three kinds of Qwen3-TTS, `tiny-z-image` and `full-z-image`
(tools/checkpoints/z_image.py) for Z-Image, `tiny-qwen-image` and `full-qwen-image` (tools/checkpoints/qwen_image.py)
for Qwen-Image-2.1; those of pictures need the extra `image`.

All use the layout of the published checkpoint, so the same code loads either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints.configuration import (
    ARCHITECTURE,
    FULL_CODEC,
    TINY,
    TinySizes,
    full_config,
    make_generation_config,
    make_processor,
    tiny_config,
)
from tools.checkpoints.errors import CheckpointError, FolderError
from tools.checkpoints.measure import Answer, failed_checks, measure_answers, print_answers
from tools.checkpoints.shards import INDEX_FILE, write_random_shards
from tools.checkpoints.tokenizer import FULL_TOKENS, make_tokenizer
from tools.checkpoints.weights import draw_weights, make_voices, spoken_token_ids

MARKER_FILE = "omni_actors_checkpoint.json"


def claim_folder(folder: Path, contents: dict[str, Any]) -> None:
    """Creates the folder or takes over one that this module wrote; refuses any other that is not empty."""
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is not a directory")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / MARKER_FILE).exists():
        raise FolderError(f"{folder} is not empty and was not written by this command; name another directory")
    for old in [*folder.glob("*.safetensors"), *folder.glob(INDEX_FILE)]:
        old.unlink()  # a full checkpoint over a tiny one must not keep the weights
    (folder / MARKER_FILE).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def write_voices(folder: Path, voices: dict[str, dict[str, Any]]) -> None:
    """Writes spk_dict.pt; it loads with torch.load(weights_only=True)."""
    torch.save(voices, folder / "spk_dict.pt")


def write_tiny(folder: Path, seed: int = 0, *, sizes: TinySizes = TINY, check: bool = True) -> list[Answer]:
    """Writes a tiny checkpoint and returns its answers (none with check=False).

    Raises FolderError if the folder holds other files, CheckpointError if the outputs do not vary enough.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration

    claim_folder(folder, {"kind": "tiny", "seed": seed})
    tokenizer = make_tokenizer(sizes.layout)
    config = tiny_config(tokenizer.convert_tokens_to_ids("user"), sizes)
    model = Qwen2_5OmniForConditionalGeneration(config).to(torch.float32)
    draw_weights(model, seed, spoken_token_ids(tokenizer), sizes.sounds)
    model.generation_config = make_generation_config(sizes.layout)
    model.save_pretrained(folder)
    config.architectures = [ARCHITECTURE]  # saving the model has written its class name there
    config.save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=30, max_pixels=256 * 28 * 28).save_pretrained(folder)
    dit = config.token2wav_config.dit_config
    write_voices(folder, make_voices(sizes.layout, seed, mel_dim=dit.mel_dim, speaker_dim=dit.enc_emb_dim))
    if not check:
        return []
    answers = measure_answers(folder)
    failed = failed_checks(answers)
    if failed:
        print_answers(answers)
        raise CheckpointError("the outputs do not vary enough:\n  " + "\n  ".join(failed))
    return answers


def write_full(folder: Path, *, weights: bool = False) -> None:
    """Writes the checkpoint with the published sizes; with `weights` random ones too, 21.5 GB of bfloat16.

    Raises FolderError like `write_tiny`.
    """
    claim_folder(folder, {"kind": "full"})
    tokenizer = make_tokenizer(FULL_TOKENS)
    config = full_config(tokenizer.convert_tokens_to_ids("user"))
    config.save_pretrained(folder)
    make_generation_config(FULL_TOKENS).save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=300, max_pixels=12845056).save_pretrained(folder)
    dit = config.token2wav_config.dit_config
    write_voices(folder, make_voices(FULL_TOKENS, 0, mel_dim=dit.mel_dim, speaker_dim=dit.enc_emb_dim))
    if weights:
        write_random_shards(folder, config, spoken_ids=spoken_token_ids(tokenizer), sounds=FULL_CODEC.sounds)
