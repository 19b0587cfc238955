"""Checkpoints of MiniCPM-o 4.5: encoders, thinker, talker and vocoder.

Names are those of the model's public code; the sizes that it leaves to the checkpoint are from memory. The vocoder's
files have random weights in the full sizes, too: its sizes stand in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.checkpoints import claim_folder, write_json
from tools.checkpoints.families import Family, Sizes
from tools.checkpoints.omni import make_generation_config
from tools.checkpoints.s3 import DIRECTION, GAIN, PUBLISHED, TINY, write_vocoder, write_voices
from tools.checkpoints.tokenizer import make_tokenizer
from tools.checkpoints.weights import draw_parameter, restrict_output, spoken_token_ids

TOKENIZER = "tokenizer_config.json"
CLASS = "MiniCPMOTokenizerFast"
# Published checkpoints name code of their own, which no one runs: it is not among the files here.
CODE = {"tokenizer_class": CLASS, "auto_map": {"AutoTokenizer": [f"tokenization_minicpmo_fast.{CLASS}", None]}}
# Parameters, and those of other families that are drawn alike: the first match counts.
ALIKE = {
    "llm.": "thinker.",
    "tts.emb_code.0.": "talker.model.embed_tokens.",
    "tts.head_code.0.": "talker.codec_head.",
    "tts.emb_text.": "thinker.model.embed_tokens.",
    "tts.": "talker.",
    "resampler.query": "resampler.query.weight",
    "resampler.proj": "resampler.proj.weight",
    "resampler.attn.in_proj_": "resampler.attn.in_proj.",
    **{part: part for part in ("apm.", "audio_projection_layer.", "vpm.", "resampler.")},
}


def _derive(sizes: Sizes) -> dict[str, Any]:
    return {"first_special": sizes["vocabulary"] - 32, "first_speech": sizes["vocabulary"] - 4}


FAMILY = Family("minicpm_o", _derive)


def write_tiny(folder: Path, seed: int = 0, *, sizes: Sizes | None = None) -> None:
    """Writes a tiny checkpoint. Raises FolderError."""
    claim_folder(folder, {"kind": "tiny-minicpm-o", "seed": seed})
    chosen = FAMILY.tiny_sizes(sizes)
    config, tokenizer = _write_rest(folder, chosen, TINY, seed)
    spoken, weights = spoken_token_ids(tokenizer), {}
    for name, shape in _shapes(config):
        alike = next(other + name.removeprefix(prefix) for prefix, other in ALIKE.items() if name.startswith(prefix))
        weights[name] = draw_parameter(alike, shape, seed)
        restrict_output(alike, weights[name], spoken, chosen["sounds"])
    head = weights.pop("tts.head_code.0.weight")
    weights[f"tts.head_code.0.{GAIN}"] = head.norm(dim=1, keepdim=True)
    weights[f"tts.head_code.0.{DIRECTION}"] = head + (head == 0)  # a direction has a length
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_full(folder: Path) -> None:
    """Writes a checkpoint with the published sizes, without weights but the vocoder's. Raises FolderError."""
    claim_folder(folder, {"kind": "full-minicpm-o"})
    _write_rest(folder, FAMILY.published, PUBLISHED, 0)


def _write_rest(folder: Path, sizes: Sizes, vocoder: Mapping[str, int], seed: int) -> tuple[dict[str, Any], Any]:
    """Writes all but thinker and talker; returns the configuration and the tokenizer."""
    layout = FAMILY.layout(sizes)
    config, tokenizer = FAMILY.fill("configuration", {**sizes, "codes": sizes["sounds"] + 1}), make_tokenizer(layout)
    write_json(folder / "config.json", config)
    make_generation_config(layout).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    write_json(folder / TOKENIZER, {**settings, **CODE})
    write_vocoder(folder / "assets" / "token2wav", vocoder, seed)
    write_voices(folder / "assets")
    return config, tokenizer


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a configuration that is the thinker's."""
    others = ("architectures", "auto_map", "model_type", "tts_config", "audio_config", "vision_config")
    return {name: value for name, value in config.items() if name not in others}


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, torch.Size]]:
    """All parameters but the vocoder's."""
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    speech, hearing, seeing = config["tts_config"], config["audio_config"], config["vision_config"]
    with torch.device("meta"):
        models = {
            "llm.": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**own_settings(config))),
            "tts.model.": transformers.LlamaModel(talker_config(config)),
            "apm.": WhisperEncoder(transformers.WhisperConfig(**hearing)),
            "vpm.": transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**seeing, vision_use_head=False)),
            "resampler.": resampler(config),
        }
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            if not name.startswith("embed_tokens"):
                yield prefix + name, parameter.shape
    width = speech["hidden_size"]
    for part in ("emb_code.0", "head_code.0"):
        yield f"tts.{part}.weight", torch.Size([speech["num_audio_tokens"], width])
    yield "tts.emb_text.weight", torch.Size([speech["num_text_tokens"], width])
    projections = {"tts.projector_semantic": (config["hidden_size"], width)}
    projections["tts.projector_spk"] = projections["tts.projector_semantic"]
    projections["audio_projection_layer"] = (hearing["d_model"], config["hidden_size"])
    for part, (inputs, outputs) in projections.items():
        for layer, taken in (("linear1", inputs), ("linear2", outputs)):
            yield f"{part}.{layer}.weight", torch.Size([outputs, taken])
            yield f"{part}.{layer}.bias", torch.Size([outputs])


def resampler(config: dict[str, Any]) -> Any:
    """Returns a module with the parameters of the resampler."""
    width = config["hidden_size"]
    made = torch.nn.ModuleDict({name: torch.nn.LayerNorm(width, eps=1e-6) for name in ("ln_q", "ln_kv", "ln_post")})
    made["kv_proj"] = torch.nn.Linear(config["vision_config"]["hidden_size"], width, bias=False)
    made["attn"] = torch.nn.MultiheadAttention(width, width // 128)
    made.query = torch.nn.Parameter(torch.empty(config["query_num"], width))
    made.proj = torch.nn.Parameter(torch.empty(width, width))
    return made


def talker_config(config: dict[str, Any]) -> Any:
    """Returns transformers' configuration of the talker's layers."""
    from transformers import LlamaConfig

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    speech = config["tts_config"]
    positions = speech["max_position_embeddings"]
    return LlamaConfig(**{name: speech[name] for name in names}, max_position_embeddings=positions, vocab_size=1)
