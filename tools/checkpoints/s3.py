"""The files of an S3 vocoder as MiniCPM-o 4.5 and Step-Audio 2 have them, or CosyVoice 2, with random weights.

`flow.pt` and `hift.pt` have the published tensors in any size. The two models that encode recordings are a layer each,
in ONNX's format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import soundfile
import torch

from tools.checkpoints.weights import normal

MELS, SPEAKER = 80, 192
HEARD = 128  # mels that the tokenizer hears
VOICES = {"alto": (220.0, 1.2), "bass": (90.0, 2.0)}  # Hz, and seconds
RATE = 16_000
FLOAT32, INT32, INT64 = 1, 6, 7  # of ONNX
IR_VERSION, OPSET = 8, 17
PUBLISHED = {"tokens": 6561, "width": 512, "layers": 6, "wide_layers": 4, "heads": 8, "between": 2048, "blocks": 16}
PUBLISHED |= {"head_size": 64, "channels": 512, "pitch": 512}
TINY = {"tokens": 60, "width": 32, "layers": 2, "wide_layers": 1, "heads": 4, "between": 48, "blocks": 2}
TINY |= {"head_size": 16, "channels": 32, "pitch": 24}
# Of CosyVoice 2's solver: width, heads, stages in the middle, and layers of each stage.
PUBLISHED |= {"unet_width": 256, "unet_heads": 8, "unet_stages": 12, "unet_layers": 4}
TINY |= {"unet_width": 32, "unet_heads": 2, "unet_stages": 2, "unet_layers": 1}
UNET_HEAD = 64  # width of a head, in all sizes
KERNELS = (3, 7, 11)
HARMONICS = 9
SPECTRUM = 18  # magnitudes and phases of a window of 16 samples
GAIN, DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_vocoder(folder: Path, sizes: Mapping[str, int], seed: int = 0, *, cosyvoice: bool = False) -> None:
    """Writes the four files into a folder: those of MiniCPM-o, or of CosyVoice 2."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = normal((sizes["tokens"], HEARD, 4), seed, "tokenizer")
    speaker = normal((MELS, SPEAKER), seed, "speaker") / MELS**0.5
    parts = [_node("Conv", "feats", "kernel", "out", strides=[4]), _node("ArgMax", "out", "tokens", axis=1, keepdims=0)]
    inputs = {"feats": (FLOAT32, 1, HEARD, 0), "feats_length": (INT32, 1)}
    tokenizer = "speech_tokenizer_v2.onnx" if cosyvoice else "speech_tokenizer_v2_25hz.onnx"
    (folder / tokenizer).write_bytes(_model(parts, tokens, inputs, "tokens", INT64))
    parts = [_node("MatMul", "x", "kernel", "out"), _node("ReduceMean", "out", "speaker", axes=[1], keepdims=0)]
    (folder / "campplus.onnx").write_bytes(_model(parts, speaker, {"x": (FLOAT32, 1, 0, MELS)}, "speaker", FLOAT32))
    for name, shapes in (("flow.pt", _flow(sizes, cosyvoice)), ("hift.pt", _hift(sizes, cosyvoice))):
        generator = torch.Generator().manual_seed(seed)
        drawn = {each: _drawn(each, shape, generator) for each, shape in shapes}
        if cosyvoice:  # fewer inputs meet in each output
            drawn |= {each: 2 * drawn[each] for each in drawn if each.startswith("ups.") and each.endswith(GAIN)}
        prefix = "generator." if cosyvoice and name == "hift.pt" else ""  # it was trained beside another network
        torch.save({prefix + each: tensor for each, tensor in drawn.items()}, folder / name)


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A parameter with which its layer matters and the sound stays far from where it is clipped."""
    drawn = torch.randn(shape, generator=generator)
    if name.startswith("f0_predictor.classifier"):  # around 100 Hz, and now and then unvoiced
        return drawn * 100 if name.endswith("weight") else drawn * 30
    if name.endswith("alpha"):
        return 1 + 0.3 * drawn
    if name.endswith(GAIN):
        return (0.3 if "conv_post" in name else 0.7) + 0.1 * drawn.abs()
    if name == "conv_post.bias":
        return drawn * 0.1 - 2.5
    if len(shape) > 1:
        fan_in = drawn[0].numel()
        return drawn if "embedding" in name else drawn * 0.8 * fan_in**-0.5
    return (1 if "norm" in name and name.endswith("weight") else 0) + 0.1 * drawn


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _conv(name: str, inputs: int, outputs: int, kernel: int, *, normalized: bool = False) -> Shapes:
    yield f"{name}.bias", (outputs,)
    if normalized:
        yield f"{name}.{GAIN}", (outputs, 1, 1)
    yield f"{name}.{DIRECTION if normalized else 'weight'}", (outputs, inputs, kernel)


def _flow(sizes: Mapping[str, int], cosyvoice: bool) -> Shapes:
    width = sizes["width"]
    yield "input_embedding.weight", (sizes["tokens"], width)
    yield from _linear("spk_embed_affine_layer", SPEAKER, MELS)
    yield from _linear("encoder_proj", width, MELS)
    yield from _conv("encoder.pre_lookahead_layer.conv1", width, width, 4)
    yield from _conv("encoder.pre_lookahead_layer.conv2", width, width, 3)
    yield from _conv("encoder.up_layer.conv", width, width, 5)
    yield from _norm("encoder.after_norm", width)
    for part, count in (("", sizes["layers"]), ("up_", sizes["wide_layers"])):
        yield from _linear(f"encoder.{part}embed.out.0", width, width)
        yield from _norm(f"encoder.{part}embed.out.1", width)
        for index in range(count):
            yield from _conformer_layer(f"encoder.{part}encoders.{index}", sizes)
    yield from _unet(sizes) if cosyvoice else _estimator(sizes)


def _unet(sizes: Mapping[str, int]) -> Shapes:
    width, name = sizes["unet_width"], "decoder.estimator"
    inner = sizes["unet_heads"] * UNET_HEAD
    yield from _linear(f"{name}.time_mlp.linear_1", 4 * MELS, 4 * width)
    yield from _linear(f"{name}.time_mlp.linear_2", 4 * width, 4 * width)
    middle = {f"{name}.mid_blocks.{index}": width for index in range(sizes["unet_stages"])}
    for stage, inputs in {f"{name}.down_blocks.0": 4 * MELS, **middle, f"{name}.up_blocks.0": 2 * width}.items():
        yield from _linear(f"{stage}.0.mlp.1", 4 * width, width)
        for part, taken in ((1, inputs), (2, width)):
            yield from _conv(f"{stage}.0.block{part}.block.0", taken, width, 3)
            yield from _norm(f"{stage}.0.block{part}.block.2", width)
        yield from _conv(f"{stage}.0.res_conv", inputs, width, 1)
        for index in range(sizes["unet_layers"]):
            layer = f"{stage}.1.{index}"
            yield from _norm(f"{layer}.norm1", width)
            yield from _norm(f"{layer}.norm3", width)
            for letter in "qkv":
                yield from _linear(f"{layer}.attn1.to_{letter}", width, inner, bias=False)
            yield from _linear(f"{layer}.attn1.to_out.0", inner, width)
            yield from _linear(f"{layer}.ff.net.0.proj", width, 4 * width)
            yield from _linear(f"{layer}.ff.net.2", 4 * width, width)
        if stage not in middle:
            yield from _conv(f"{stage}.2", width, width, 3)
    yield from _conv(f"{name}.final_block.block.0", width, width, 3)
    yield from _norm(f"{name}.final_block.block.2", width)
    yield from _conv(f"{name}.final_proj", width, MELS, 1)


def _estimator(sizes: Mapping[str, int]) -> Shapes:
    width, size = sizes["width"], sizes["head_size"]
    yield from _linear("decoder.estimator.t_embedder.mlp.0", 256, width)
    yield from _linear("decoder.estimator.t_embedder.mlp.2", width, width)
    yield from _linear("decoder.estimator.in_proj", 4 * MELS, width)
    yield from _linear("decoder.estimator.final_layer.adaLN_modulation.1", width, 2 * width)
    yield from _linear("decoder.estimator.final_layer.linear", width, MELS)
    for index in range(sizes["blocks"]):
        name, inner = f"decoder.estimator.blocks.{index}", sizes["heads"] * size
        for part in ("to_q", "to_k", "to_v"):
            yield from _linear(f"{name}.attn.{part}", width, inner)
        yield from _norm(f"{name}.attn.q_norm", size)
        yield from _norm(f"{name}.attn.k_norm", size)
        yield from _linear(f"{name}.attn.proj", inner, width)
        yield from _linear(f"{name}.mlp.fc1", width, 4 * width)
        yield from _linear(f"{name}.mlp.fc2", 4 * width, width)
        yield from _conv(f"{name}.conv.block.1", width, width, 3)
        yield from _norm(f"{name}.conv.block.3", width)
        yield from _conv(f"{name}.conv.block.6", width, width, 3)
        yield from _linear(f"{name}.adaLN_modulation.1", width, 9 * width)


def _conformer_layer(name: str, sizes: Mapping[str, int]) -> Shapes:
    width, heads = sizes["width"], sizes["heads"]
    for part in ("linear_q", "linear_k", "linear_v", "linear_out", "linear_pos"):
        yield from _linear(f"{name}.self_attn.{part}", width, width, bias=part != "linear_pos")
    for part in ("pos_bias_u", "pos_bias_v"):
        yield f"{name}.self_attn.{part}", (heads, width // heads)
    yield from _linear(f"{name}.feed_forward.w_1", width, sizes["between"])
    yield from _linear(f"{name}.feed_forward.w_2", sizes["between"], width)
    yield from _norm(f"{name}.norm_ff", width)
    yield from _norm(f"{name}.norm_mha", width)


def _residual(name: str, channels: int, kernel: int) -> Shapes:
    for part in (1, 2):
        for index in range(3):
            yield from _conv(f"{name}.convs{part}.{index}", channels, channels, kernel, normalized=True)
            yield f"{name}.activations{part}.{index}.alpha", (channels,)


def _hift(sizes: Mapping[str, int], cosyvoice: bool) -> Shapes:
    channels, pitch = sizes["channels"], sizes["pitch"]
    yield from _linear("m_source.l_linear", HARMONICS, 1)
    yield from _conv("conv_pre", MELS, channels, 7 if cosyvoice else 5, normalized=True)
    for index in range(5):
        name, kernel = f"f0_predictor.condnet.{2 * index}", 3 if index or cosyvoice else 4
        yield from _conv(name, pitch if index else MELS, pitch, kernel, normalized=True)
    yield from _linear("f0_predictor.classifier", pitch, 1)
    for index, (kernel, stride, source) in enumerate(zip((16, 11, 7), (15, 3, 1), (7, 7, 11), strict=True)):
        name, channels = f"ups.{index}", channels // 2
        if cosyvoice:  # transposed
            yield f"{name}.bias", (channels,)
            yield f"{name}.{GAIN}", (2 * channels, 1, 1)
            yield f"{name}.{DIRECTION}", (2 * channels, channels, kernel)
        else:
            yield from _conv(name, 2 * channels, channels, kernel, normalized=True)
        yield from _conv(f"source_downs.{index}", SPECTRUM, channels, 2 * stride if stride > 1 else 1)
        yield from _residual(f"source_resblocks.{index}", channels, source)
        for place, between in enumerate(KERNELS):
            yield from _residual(f"resblocks.{len(KERNELS) * index + place}", channels, between)
    yield from _conv("conv_post", channels, SPECTRUM, 7, normalized=True)


def write_voices(folder: Path) -> None:
    """Writes recordings: tones with overtones, which swell and fade."""
    folder.mkdir(exist_ok=True)
    for name, (hertz, seconds) in VOICES.items():
        time = np.arange(int(RATE * seconds)) / RATE
        tone = sum(np.sin(2 * np.pi * hertz * part * time) / part for part in range(1, 8))
        soundfile.write(folder / f"{name}.wav", 0.2 * tone * np.sin(np.pi * 3 * time) ** 2, RATE, "PCM_16")


# -- ONNX's format, as far as a model of two nodes needs it: numbers of fields and types are those of its protobufs


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    value = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    more, last = bytearray(), value
    while last > 127:
        more.append(last & 127 | 128)
        last >>= 7
    return bytes([*more, last])


def _node(kind: str, *names: str, **attributes: int | list[int]) -> bytes:
    """A node; the last name is that of its output."""
    made = b"".join(_field(1, name) for name in names[:-1]) + _field(2, names[-1]) + _field(4, kind)
    for name, value in attributes.items():
        values = value if isinstance(value, list) else [value]
        numbers = b"".join(_field(8 if isinstance(value, list) else 3, number) for number in values)
        made += _field(5, _field(1, name) + numbers + _field(20, 7 if isinstance(value, list) else 2))
    return made


def _value(name: str, kind: int, *shape: int) -> bytes:
    """An input or output; a dimension of 0 may have any size."""
    sizes = b"".join(_field(1, _field(1, size) if size else _field(2, "any")) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, sizes)))


def _model(
    nodes: list[bytes], kernel: torch.Tensor, inputs: Mapping[str, tuple[int, ...]], output: str, kind: int
) -> bytes:
    sizes = b"".join(_field(1, size) for size in kernel.shape)
    weight = sizes + _field(2, FLOAT32) + _field(8, "kernel") + _field(9, kernel.numpy().tobytes())
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, "graph") + _field(5, weight)
    graph += b"".join(_field(11, _value(name, *value)) for name, value in inputs.items())
    graph += _field(12, _value(output, kind, 0, 0))
    return _field(1, IR_VERSION) + _field(7, graph) + _field(8, _field(1, "") + _field(2, OPSET))
