"""Checkpoints of CosyVoice 2: the talker's file, the folder of its layers, and the vocoder.

Names and sizes are those of its public code, but for the Qwen2 of 0.5B, whose sizes are from memory. The vocoder's
files have random weights in the full sizes, too: its sizes stand in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints import claim_folder, write_json
from tools.checkpoints.families import Family, Sizes
from tools.checkpoints.s3 import PUBLISHED, TINY, write_vocoder, write_voices
from tools.checkpoints.tokenizer import make_tokenizer
from tools.checkpoints.weights import draw_parameter, normal

FAMILY = Family("cosyvoice2")
LAYERS, SPOKEN = "CosyVoice-BlankEN", "the tide"  # said in one of the recordings
CODES, END, UNLIKELY = 6564, 6561, -100.0
ALIKE = {
    "llm.model.model.": "thinker.model.",
    "llm_embedding.": "talker.model.embed_tokens.",
    "speech_embedding.": "talker.model.embed_tokens.",
    "llm_decoder.": "talker.codec_head.",
}


def write_tiny(folder: Path, seed: int = 0, *, sizes: Sizes | None = None, vocoder: Mapping[str, int] = TINY) -> None:
    """Writes a tiny checkpoint. Raises FolderError.

    Args:
        vocoder: its sizes.
    """
    claim_folder(folder, {"kind": "tiny-cosyvoice2", "seed": seed})
    chosen = FAMILY.tiny_sizes(sizes)
    config, weights = _write_rest(folder, chosen, vocoder, seed), {}
    for name, shape in _shapes(config):
        alike = next(other + name.removeprefix(prefix) for prefix, other in ALIKE.items() if name.startswith(prefix))
        weights[name] = draw_parameter(alike, shape, seed)
    # The vocoder knows the first tokens alone; only these and the one that ends the speech are likely.
    bias = torch.full((CODES,), UNLIKELY)
    bias[[*range(chosen["sounds"]), END]] = normal((chosen["sounds"] + 1,), seed, "bias")
    torch.save({**weights, "llm_decoder.bias": bias}, folder / "llm.pt")


def write_full(folder: Path) -> None:
    """Writes a checkpoint with the published sizes, without weights but the vocoder's. Raises FolderError."""
    claim_folder(folder, {"kind": "full-cosyvoice2"})
    _write_rest(folder, FAMILY.published, PUBLISHED, 0)


def _write_rest(folder: Path, sizes: Sizes, vocoder: Mapping[str, int], seed: int) -> dict[str, Any]:
    """Writes all but the talker's weights; returns the configuration of its layers."""
    config = FAMILY.fill("configuration", sizes)
    (folder / LAYERS).mkdir(exist_ok=True)
    write_json(folder / "model_index.json", {"_class_name": "CosyVoice2Model"})
    write_json(folder / LAYERS / "config.json", config)
    make_tokenizer(FAMILY.layout(sizes)).save_pretrained(folder / LAYERS)
    write_vocoder(folder, vocoder, seed, cosyvoice=True)
    write_voices(folder / "asset")
    (folder / "asset" / "bass.txt").write_text(SPOKEN, encoding="utf-8")
    return config


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, torch.Size]]:
    """The talker's parameters, but for the bias of its head."""
    from transformers import Qwen2Config, Qwen2Model

    with torch.device("meta"):
        layers = Qwen2Model(Qwen2Config(**config))
    for name, parameter in layers.named_parameters():
        yield f"llm.model.model.{name}", parameter.shape
    for name, count in (("llm_embedding", 2), ("speech_embedding", CODES), ("llm_decoder", CODES)):
        yield f"{name}.weight", torch.Size([count, config["hidden_size"]])
