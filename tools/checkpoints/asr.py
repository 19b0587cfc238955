"""Checkpoints of Qwen3-ASR and of Qwen3-ForcedAligner.

They have the layout of the published ones. Names are those of Qwen's package `qwen-asr` and of transformers' script
that converts the published checkpoints; sizes and ids are from models that others have described.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.checkpoints import claim_folder, write_json
from tools.checkpoints.families import Family, Sizes
from tools.checkpoints.omni import make_generation_config
from tools.checkpoints.reference import AUDIO_RATE
from tools.checkpoints.tokenizer import make_tokenizer
from tools.checkpoints.weights import draw_parameter, restrict_output, spoken_token_ids

WIDTHS = {
    "1b7": {"audio_layers": 24, "audio_heads": 16, "audio_between": 4096, "audio_width": 1024}
    | {"width": 2048, "between": 6144},
    "0b6": {"audio_layers": 18, "audio_heads": 14, "audio_between": 3584, "audio_width": 896}
    | {"width": 1024, "between": 3072},
}
LANGUAGES = ["Chinese", "English", "German", "Japanese"]  # of 30
UNKNOWN = ("model_type", "max_source_positions", "conv_chunksize", "rope_scaling")  # in transformers
# Parameters as published, and in transformers: the first match counts.
NAMES = {
    "thinker.audio_tower.proj1.": "model.multi_modal_projector.linear_1.",
    "thinker.audio_tower.proj2.": "model.multi_modal_projector.linear_2.",
    "thinker.model.": "model.language_model.",
    "thinker.lm_head.": "lm_head.",
    "thinker.": "model.",
}


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {
        "first_special": sizes["vocabulary"] - 42,
        "first_speech": sizes["vocabulary"] - 4,
        "sections": [3 * sizes["head_width"] // 16, *[5 * sizes["head_width"] // 32] * 2],
    }


FAMILY = Family("qwen3_asr", _derive)


def transformers_config(config: dict[str, Any]) -> Any:
    """Returns transformers' configuration of a published one."""
    from transformers import Qwen3ASRConfig

    thinker = config["thinker_config"]
    both = {part: thinker[part] for part in ("audio_config", "text_config")}
    parts = {part: {n: value for n, value in given.items() if n not in UNKNOWN} for part, given in both.items()}
    tied = parts["text_config"]["tie_word_embeddings"]
    labels = {"num_labels": thinker["classify_num"]} if "classify_num" in thinker else {}
    return Qwen3ASRConfig(**parts, audio_token_id=thinker["audio_token_id"], tie_word_embeddings=tied, **labels)


def transformers_names(names: Iterable[str], aligner: bool) -> dict[str, str]:
    """Returns transformers' names of published parameters."""
    known = {**NAMES, "thinker.lm_head.": "score."} if aligner else NAMES
    prefixes = {name: next(prefix for prefix in known if name.startswith(prefix)) for name in names}
    return {name: known[prefix] + name.removeprefix(prefix) for name, prefix in prefixes.items()}


def published_name(name: str) -> str:
    """Returns the published name of a parameter of transformers."""
    known = {**NAMES, "thinker.lm_head": "score"}
    prefix = next(prefix for prefix, other in known.items() if name.startswith(other))
    return prefix + name.removeprefix(known[prefix])


def write_tiny(folder: Path, seed: int = 0, *, sizes: Sizes | None = None, aligner: bool = False) -> None:
    """Writes a tiny checkpoint, of the forced aligner or of the model that writes. Raises FolderError."""
    from transformers import Qwen3ASRForConditionalGeneration, Qwen3ASRForTokenClassification

    claim_folder(folder, {"kind": f"tiny-qwen3-{'aligner' if aligner else 'asr'}", "seed": seed})
    config, tokenizer = _write_rest(folder, FAMILY.tiny_sizes(sizes), aligner)
    model_class = Qwen3ASRForTokenClassification if aligner else Qwen3ASRForConditionalGeneration
    with torch.device("meta"):
        model = model_class(transformers_config(config))
    spoken, weights = spoken_token_ids(tokenizer), {}
    for theirs, parameter in model.named_parameters():
        name = published_name(theirs)
        weights[name] = draw_parameter(name, parameter.shape, seed)
        if not aligner:
            restrict_output(name, weights[name], spoken, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_full(folder: Path, size: str = "1b7", *, aligner: bool = False) -> None:
    """Writes a checkpoint with the published sizes, without weights. Raises FolderError."""
    claim_folder(folder, {"kind": f"full-qwen3-{'aligner' if aligner else 'asr'}", "size": size})
    _write_rest(folder, {**FAMILY.published, **WIDTHS["0b6" if aligner else size]}, aligner)


def _write_rest(folder: Path, sizes: Sizes, aligner: bool) -> tuple[dict[str, Any], Any]:
    """Writes all but weights; returns the configuration and the tokenizer."""
    from transformers import WhisperFeatureExtractor

    layout = FAMILY.layout(sizes)
    config, tokenizer = FAMILY.fill("configuration", {**sizes, "languages": LANGUAGES}), make_tokenizer(layout)
    if aligner:
        config |= FAMILY.fill("aligner", sizes)
        config["thinker_config"]["classify_num"] = sizes["classes"]
    write_json(folder / "config.json", config)
    make_generation_config(layout).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The extractor pads nothing to its 30 s here, and cuts nothing to them.
    extractor = WhisperFeatureExtractor(feature_size=128, sampling_rate=AUDIO_RATE, hop_length=160, n_fft=400)
    extractor.save_pretrained(folder)
    return config, tokenizer
