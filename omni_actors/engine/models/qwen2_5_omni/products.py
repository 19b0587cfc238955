"""The matrix products of one layer of the vocoder's network, with what is fused to them, in one precision."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from omni_actors.engine.models.qwen2_5_omni.kernels import (
    Fp8Rows,
    NormInputs,
    modulated_norm,
    quantise,
    quantise_rows,
    quantised_norm,
)
from omni_actors.errors import ConfigError

CAPABILITY = (8, 9)  # of the first GPUs whose tensor cores multiply eight-bit floating point numbers
Affine = tuple[torch.Tensor, torch.Tensor]  # weight [outputs, inputs] and bias [outputs]


def check_fp8(device: torch.device) -> None:
    """Check that `device` can multiply eight-bit numbers.

    Raises:
        ConfigError: it is a GPU that cannot.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        wanted, found = (".".join(map(str, version)) for version in (CAPABILITY, capability))
        raise ConfigError(
            f"decode.precision is 'fp8', which needs a GPU of compute capability {wanted} or above, not {found}.",
            hint="Set decode.precision to bf16, or to auto.",
        )


class LayerWeights(NamedTuple):
    """What a layer multiplies by, in the precision of the checkpoint."""

    qkv: Affine
    out: Affine
    up: Affine
    down: Affine


class Products(Protocol):
    """The products of a layer; all of them take and return [rows, frames, width of each]."""

    def qkv(self, inputs: NormInputs) -> torch.Tensor:
        """Queries, keys and values of the normalised `inputs`."""

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        """The projection after the attention."""

    def feed_forward(self, inputs: NormInputs) -> torch.Tensor:
        """The two-layer network over the normalised `inputs`."""


class PlainProducts:
    """Products in one dtype of PyTorch's.

    Args:
        weights: of the layer.
        dtype: of weights and results.
        fused: use the kernels for CUDA.
    """

    def __init__(self, weights: LayerWeights, dtype: torch.dtype, *, fused: bool) -> None:
        self._weights = LayerWeights(*((weight.to(dtype), bias.to(dtype)) for weight, bias in weights))
        self._dtype, self._fused = dtype, fused

    def qkv(self, inputs: NormInputs) -> torch.Tensor:
        """Queries, keys and values of the normalised `inputs`."""
        return F.linear(modulated_norm(inputs, self._dtype, fused=self._fused), *self._weights.qkv)

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        """The projection after the attention."""
        return F.linear(mixed, *self._weights.out)

    def feed_forward(self, inputs: NormInputs) -> torch.Tensor:
        """The two-layer network over the normalised `inputs`."""
        normed = modulated_norm(inputs, self._dtype, fused=self._fused)
        return F.linear(self._gelu_linear(normed, *self._weights.up), *self._weights.down)

    def _gelu_linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not self._fused:
            return F.gelu(F.linear(hidden, weight, bias), approximate="tanh")
        # The same in the epilogue of the product, which saves reading and writing the widest activation.
        flat = torch._addmm_activation(bias, hidden.flatten(0, 1), weight.T, use_gelu=True)
        return flat.view(*hidden.shape[:2], -1)


class Fp8Products:
    """Products of eight-bit floating point numbers (e4m3), with one scale for each row of both factors.

    A row of activations is divided by a scale such that its largest value is the largest that e4m3 has, and so is each
    output channel of the weights, once. On CUDA the tensor cores take such factors; a CPU gets the same numbers from
    slower products.

    Args:
        weights: of the layer.
        dtype: of results.
        fused: use the kernels for CUDA.
    """

    def __init__(self, weights: LayerWeights, dtype: torch.dtype, *, fused: bool) -> None:
        self._qkv, self._out, self._up, self._down = (_Fp8Affine(*affine, dtype) for affine in weights)
        self._fused = fused

    def qkv(self, inputs: NormInputs) -> torch.Tensor:
        """Queries, keys and values of the normalised `inputs`."""
        return self._qkv(quantised_norm(inputs, fused=self._fused))

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        """The projection after the attention."""
        return self._out(quantise_rows(mixed, gelu=False, fused=self._fused))

    def feed_forward(self, inputs: NormInputs) -> torch.Tensor:
        """The two-layer network over the normalised `inputs`."""
        hidden = self._up(quantised_norm(inputs, fused=self._fused))
        return self._down(quantise_rows(hidden, gelu=True, fused=self._fused))


class _Fp8Affine:
    """Weights [outputs, inputs], quantised by output, and a bias [outputs] in `dtype`, which is that of results."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> None:
        self._weight, self._bias, self._dtype = quantise(weight), bias.to(dtype), dtype

    def __call__(self, rows: Fp8Rows) -> torch.Tensor:
        values, scales = rows
        weight, weight_scales = self._weight
        flat = torch._scaled_mm(
            values.flatten(0, -2),
            weight.T,
            scale_a=scales.flatten(0, -2),
            scale_b=weight_scales.T,
            bias=self._bias,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )
        return flat.view(*values.shape[:-1], -1)
