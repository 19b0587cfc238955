"""Checkpoints of Qwen3-TTS.

All have the layout of the published ones: the talker in the folder, its codec in `speech_tokenizer/`. The names and the
defaults are those of Qwen's package `qwen-tts`. The sizes of the published 1.7B and 0.6B (28 layers, their widths, the
ids of codes, voices and languages, the codec's sizes) are not in that package; they are from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.checkpoints import claim_folder, write_json
from tools.checkpoints.families import Family, Sizes
from tools.checkpoints.omni import derived_codes
from tools.checkpoints.tokenizer import make_tokenizer
from tools.checkpoints.weights import draw_parameter, normal, restrict_output

KINDS = ("custom_voice", "voice_design", "base")
WIDTHS = {"1b7": (2048, 6144), "0b6": (1024, 3072)}  # of the talker, and between
SIZES = tuple(WIDTHS)
DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}  # what a voice speaks instead of Chinese
TINY_VOICES = ("vivian", "ryan", "eric")
CODEC_FOLDER = "speech_tokenizer"
CODE_GROUPS = 16
Shapes = Iterator[tuple[str, torch.Size]]


def _derive(sizes: Sizes) -> dict[str, Any]:
    published = FAMILY.published
    shift = published["codec_pad"] - derived_codes(sizes)["codec_pad"]  # from ids of the published vocabulary to these
    return derived_codes(sizes) | {
        "first_special": sizes["vocabulary"] - 42,
        "speakers": {voice: published["speakers"][voice] - shift for voice in TINY_VOICES},
        "languages": {language: code - shift for language, code in published["languages"].items()},
    }


# The tiny predictor is not as wide as its talker, as in the 1.7B: between the two lies a projection. The encoder has a
# window, which the reference does without: whoever keeps it hears the difference.
FAMILY = Family("qwen3_tts", _derive)
SAMPLING = FAMILY.fill("sampling", FAMILY.published)


def write_tiny(
    folder: Path, kind: str = "custom_voice", seed: int = 0, *, size: str = "1b7", sizes: Sizes | None = None
) -> None:
    """Writes a tiny checkpoint of one of `KINDS`; `size` is what it says of itself. Raises FolderError."""
    claim_folder(folder, {"kind": "tiny-qwen3-tts", "model": kind, "seed": seed})
    chosen = FAMILY.tiny_sizes(sizes)
    config, codec = _write_configurations(folder, kind, size, chosen)
    weights = {name: _talker_weight(name, shape, seed, chosen["sounds"]) for name, shape in _model_shapes(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tensors = {name: _codec_weight(name, shape, seed) for name, shape in _decoder_shapes(codec["decoder_config"])}
    tensors |= _encoder_weights(codec["encoder_config"], seed)
    save_file(tensors, folder / CODEC_FOLDER / "model.safetensors", metadata={"format": "pt"})


def write_full(folder: Path, kind: str = "custom_voice", size: str = "1b7") -> None:
    """Writes a checkpoint with the published sizes, without weights. Raises FolderError."""
    claim_folder(folder, {"kind": "full-qwen3-tts", "model": kind, "size": size})
    width, between = WIDTHS[size]
    _write_configurations(folder, kind, size, {**FAMILY.published, "width": width, "between": between})


def _write_configurations(folder: Path, kind: str, size: str, sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes all but weights; returns the two configurations."""
    speakers = sizes["speakers"] if kind == "custom_voice" else {}
    dialects = {voice: DIALECTS.get(voice, False) for voice in speakers}
    names = {**sizes, "kind": kind, "size": size, "speakers": speakers, "dialects": dialects}
    sub_folder = folder / CODEC_FOLDER
    sub_folder.mkdir(exist_ok=True)
    (sub_folder / "model.safetensors").unlink(missing_ok=True)
    config, codec = FAMILY.fill("configuration", names), FAMILY.fill("codec", names)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", FAMILY.fill("sampling", names))
    write_json(sub_folder / "config.json", codec)
    write_json(sub_folder / "preprocessor_config.json", FAMILY.fill("features", names))
    make_tokenizer(FAMILY.layout(sizes)).save_pretrained(folder)
    return config, codec


# -- the parameters of the model


def _layers(prefix: str, config: dict[str, Any]) -> Shapes:
    """Decoder layers of Qwen3 and the norm after them."""
    hidden, between, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "self_attn.q_norm": [size],
        "self_attn.k_norm": [size],
        "post_attention_layernorm": [hidden],
        "mlp.gate_proj": [between, hidden],
        "mlp.up_proj": [between, hidden],
        "mlp.down_proj": [hidden, between],
    }
    for index in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            yield f"{prefix}layers.{index}.{name}.weight", torch.Size(shape)
    yield f"{prefix}norm.weight", torch.Size([hidden])


def _model_shapes(config: dict[str, Any]) -> Shapes:
    """All parameters of model.safetensors."""
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    width, text, narrow = talker["hidden_size"], talker["text_hidden_size"], predictor["hidden_size"]
    yield from _layers("talker.model.", talker)
    yield "talker.model.codec_embedding.weight", torch.Size([talker["vocab_size"], width])
    yield "talker.model.text_embedding.weight", torch.Size([talker["text_vocab_size"], text])
    yield "talker.codec_head.weight", torch.Size([talker["vocab_size"], width])
    for layer, shape in (("linear_fc1", [text, text]), ("linear_fc2", [width, text])):
        yield f"talker.text_projection.{layer}.weight", torch.Size(shape)
        yield f"talker.text_projection.{layer}.bias", torch.Size(shape[:1])
    yield from _layers("talker.code_predictor.model.", predictor)
    for group in range(CODE_GROUPS - 1):
        embedding = f"talker.code_predictor.model.codec_embedding.{group}.weight"
        yield embedding, torch.Size([predictor["vocab_size"], width])
        yield f"talker.code_predictor.lm_head.{group}.weight", torch.Size([predictor["vocab_size"], narrow])
    if narrow != width:
        yield "talker.code_predictor.small_to_mtp_projection.weight", torch.Size([narrow, width])
        yield "talker.code_predictor.small_to_mtp_projection.bias", torch.Size([narrow])
    if config["tts_model_type"] == "base":
        for name, value in _speaker_encoder(config["speaker_encoder_config"]).state_dict().items():
            yield f"speaker_encoder.{name}", value.shape


def _speaker_encoder(config: dict[str, Any]) -> Any:
    """The same network as the one of Qwen2.5-Omni's vocoder."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

    sizes = {name: value for name, value in config.items() if name.startswith("enc_")}
    dit = Qwen2_5OmniDiTConfig(**sizes, mel_dim=config["mel_dim"])
    dit.enc_kernel_sizes, dit.enc_dilations = [5, 3, 3, 3, 1], [1, 2, 3, 4, 1]
    return ECAPA_TimeDelayNet(dit)


def _talker_weight(name: str, shape: torch.Size, seed: int, sounds: int) -> torch.Tensor:
    # As in the thinker, which has the table of texts in Qwen3-Omni.
    value = draw_parameter(name.replace("talker.model.text_embedding", "thinker.model.embed_tokens"), shape, seed)
    restrict_output(name, value, (), sounds)
    return value


# -- the parameters of the codec


def _decoder_shapes(config: dict[str, Any]) -> Shapes:
    """Parameters of the decoder, by the names of speech_tokenizer/model.safetensors."""
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    narrow, wide, size = config["hidden_size"], config["latent_dim"], config["codebook_dim"]
    for part, count in (("rvq_first", 1), ("rvq_rest", CODE_GROUPS - 1)):
        for index in range(count):
            codebook = f"decoder.quantizer.{part}.vq.layers.{index}._codebook"
            yield f"{codebook}.cluster_usage", torch.Size([config["codebook_size"]])
            yield f"{codebook}.embedding_sum", torch.Size([config["codebook_size"], size // 2])
        yield f"decoder.quantizer.{part}.input_proj.weight", torch.Size([size // 2, size, 1])
        yield f"decoder.quantizer.{part}.output_proj.weight", torch.Size([size, size // 2, 1])
    yield "decoder.pre_conv.conv.weight", torch.Size([wide, size, 3])
    yield "decoder.pre_conv.conv.bias", torch.Size([wide])
    for name, shape in (("input_proj", [narrow, wide]), ("output_proj", [wide, narrow])):
        yield f"decoder.pre_transformer.{name}.weight", torch.Size(shape)
        yield f"decoder.pre_transformer.{name}.bias", torch.Size(shape[:1])
    # The rest is Qwen3-Omni's, whose transformer is as wide as the layers after it.
    for part, width in (("pre_transformer.", narrow), ("", wide)):
        known = {name: value for name, value in config.items() if name not in ("latent_dim", "codebook_dim")}
        sizes = Qwen3OmniMoeConfig(code2wav_config=known | {"hidden_size": width}).code2wav_config
        with torch.device("meta"):
            decoder = Qwen3OmniMoeCode2Wav(sizes)
        for name, value in decoder.state_dict().items():
            in_transformer = name.startswith("pre_transformer.")
            if in_transformer == bool(part) and not name.startswith("code_embedding."):
                yield f"decoder.{name}", value.shape


def _codec_weight(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    if name.endswith("cluster_usage"):
        return normal(shape, seed, name).abs() + 0.5
    if name.endswith("embedding_sum"):
        return normal(shape, seed, name, 2.0)
    # The distributions that Qwen3-Omni's decoder has.
    return draw_parameter(name.replace("decoder.", "code2wav.", 1), shape, seed)


def _encoder_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Parameters of the encoder: those of Mimi without its decoder."""
    from transformers import MimiConfig, MimiModel

    with torch.random.fork_rng():
        model = MimiModel(MimiConfig(**config))
    weights = {}
    for name, value in model.state_dict().items():
        if name.startswith(("decoder.", "decoder_transformer.", "upsample.")):
            continue
        if name.endswith("cluster_usage"):
            weights[f"encoder.{name}"] = normal(value.shape, seed, name).abs() + 0.5
        elif name.endswith("embed_sum"):
            weights[f"encoder.{name}"] = normal(value.shape, seed, name)
        elif name.endswith("initialized"):
            weights[f"encoder.{name}"] = torch.ones_like(value)
        else:
            weights[f"encoder.{name}"] = draw_parameter(f"encoder.{name}", value.shape, seed)
    return weights
