"""The code predictor in few kernels: five a layer and two a code, for at most `MOST_ROWS` frames at a time.

A pass of the predictor reads one position of each frame. Its matrix products read all weights for a handful of rows, so
they are bound by memory, and everything between them by launches: each kernel ends with all that the next one would
otherwise begin with. The norms cost no kernel. Whoever makes a row also multiplies it by the weights of the next norm
and leaves the sum of its squares in parts; the product that reads the row scales its own results with them.

Triton's interpreter runs the kernels on the CPU, so the tests compare them with `CodePredictor.forward` without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from omni_actors.engine.models import predictor_kernels as kernels

if TYPE_CHECKING:
    from omni_actors.engine.models.code_predictor import CodePredictor, PredictorConfig

MOST_ROWS = 64  # with more, launches matter less, and the products of the library are as fast


def fits(config: PredictorConfig, rows: int) -> bool:
    """Whether the kernels can complete this many frames of a predictor of these sizes."""
    inner = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim, config.input_size)
    half = config.head_dim // 2
    return (
        0 < rows <= MOST_ROWS
        and all(size % 16 == 0 for size in (*inner, config.vocab_size))
        and config.head_dim == 2 * triton.next_power_of_2(half)
    )


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut.

    Args:
        columns: of the result, of a program.
        lines: rows of the result, of a program; 1 to multiply without matrix units.
        parts: of the inner dimension, which are read at a time.
        depth: columns of the weights in a part.
    """

    columns: int
    lines: int
    parts: int
    depth: int
    warps: int = 4
    stages: int = 3

    @classmethod
    def of(cls, inner: int, outer: int, rows: int, gated: bool) -> Tiling:
        """For the product of `rows` rows with weights [outer, inner]."""
        whole = inner & -inner  # the largest power of two in it
        if rows == 1:
            return cls(columns=4, lines=1, parts=1, depth=min(1024, whole))
        if rows <= 16:
            stretch = min(512, whole)
            depth = max(16, stretch // 4)
            return cls(8 if gated or outer <= 1024 else 16, 16, stretch // depth, depth)
        return cls(16 if gated or outer <= 1024 or outer % 32 else 32, 64, parts=1, depth=min(128, whole), stages=4)


class FrameKernels:
    """What a frame of some requests is completed with: buffers, and the kernels in their order."""

    def __init__(self, predictor: CodePredictor, rows: int) -> None:
        config, norm = predictor.config, predictor.norm
        self.predictor, self.config, self.rows = predictor, config, rows

        def buffer(*shape: int, dtype: torch.dtype = norm.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=norm.device)

        heads = config.heads + 2 * config.kv_heads
        self.x = buffer(rows, config.hidden_size, dtype=torch.float32)
        self.weighted = buffer(rows, config.hidden_size)
        self.squares = buffer(config.hidden_size // 4 * rows, dtype=torch.float32)
        self.tiles = 0  # parts of the sums of squares
        self.entered = buffer(rows, config.input_size)
        self.qkv = buffer(rows, heads * config.head_dim)
        self.mixed = buffer(rows, config.heads * config.head_dim)
        self.gated = buffer(rows, config.intermediate_size)
        self.logits = buffer(rows, config.vocab_size, dtype=torch.float32)
        self.cache = buffer(config.layers, 2, rows, config.kv_heads, config.groups, config.head_dim)

    def product(
        self,
        given: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        normed: bool = False,
        gated: bool = False,
        norm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        added: bool = False,
    ) -> None:
        """Multiply rows with the transpose of `weight`.

        Args:
            out: where the result goes; by default it is the next layer's input, whose norm has the weights `norm`.
            normed: whether the rows await their norm.
            gated: whether the result is silu of one half times the other.
            added: whether it is added to the rows between the layers.
        """
        outer, inner = weight.shape
        outer = outer // 2 if gated else outer
        tiling = Tiling.of(inner, outer, self.rows, gated)
        grid = outer // tiling.columns, triton.cdiv(self.rows, tiling.lines)
        kind = kernels.GATED if gated else kernels.PLAIN if out is not None else kernels.ROW
        kernels.product[grid](
            given, weight, self.squares, weight if bias is None else bias, self.x, self.weighted, self.squares,
            weight if norm is None else norm, self.x if out is None else out, self.rows, self.config.eps,
            K=inner, N=outer, TILES=self.tiles if normed else 0, KIND=kind, BIASED=bias is not None, ADDED=added,
            COLUMNS=tiling.columns, LINES=tiling.lines, PARTS=tiling.parts, DEPTH=tiling.depth,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
        if out is None:
            self.tiles = grid[0]

    def attend(self, index: int, position: int) -> None:
        """The attention of layer `index`."""
        config, predictor = self.config, self.predictor
        kernels.attention[(self.rows, config.heads)](
            self.qkv, *self.cache[index], predictor.layers[index].qk_norm, predictor.cos, predictor.sin, self.mixed,
            position, config.eps, config.head_dim**-0.5,
            HEADS=config.heads, KV_HEADS=config.kv_heads, HALF=config.head_dim // 2, POSITIONS=config.groups,
            SEEN=triton.next_power_of_2(config.groups), num_warps=2,
        )  # fmt: skip

    def read(self, position: int) -> None:
        """Pass the position through the layers; the rows await the last norm."""
        predictor = self.predictor
        layers: list[Any] = list(predictor.layers)
        norms = [*(layer.input_norm for layer in layers[1:]), predictor.norm]
        if predictor.projection is not None:
            bias = predictor.projection.bias
            self.product(self.entered, predictor.projection.weight, norm=layers[0].input_norm, bias=bias)
        for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
            self.product(self.weighted, layer.qkv.weight, self.qkv, normed=True)
            self.attend(index, position)
            self.product(self.mixed, layer.o.weight, norm=layer.mlp_norm, added=True)
            self.product(self.weighted, layer.gate_up.weight, self.gated, normed=True, gated=True)
            self.product(self.gated, layer.down.weight, norm=norm, added=True)

    def enter(self, given: torch.Tensor) -> None:
        """Make rows [rows, E] the next input."""
        if self.predictor.projection is not None:
            self.entered.copy_(given)
            return
        width, norm = self.config.hidden_size, self.predictor.layers[0].input_norm
        padded = triton.next_power_of_2(width)
        kernels.enter[(self.rows,)](given, self.x, self.weighted, self.squares, norm, WIDTH=width, PADDED=padded)
        self.tiles = 1

    def draw(
        self, group: int, codes: torch.Tensor, total: torch.Tensor, summed: torch.Tensor, *drawn_by: torch.Tensor
    ) -> None:
        """Draw the code of a group by seeds, frames and whether to be greedy; its embedding is the next input."""
        config, predictor = self.config, self.predictor
        projected = predictor.projection is not None
        self.product(self.weighted, predictor.heads[group], self.logits, normed=True)
        kernels.draw[(self.rows,)](
            self.logits, *drawn_by, group, codes, predictor.embeddings[group], total, summed, self.x,
            self.entered if projected else self.weighted, self.squares, predictor.layers[0].input_norm,
            config.temperature, config.top_p,
            VOCABULARY=config.vocab_size, PADDED=triton.next_power_of_2(config.vocab_size),
            TOP_K=min(config.top_k, config.vocab_size), GROUPS=config.groups, WIDTH=config.input_size,
            PADDED_WIDTH=triton.next_power_of_2(config.input_size), LAST=group == config.groups - 2,
            PROJECTED=projected, num_warps=4,
        )  # fmt: skip
        self.tiles = 1


def complete(
    predictor: CodePredictor,
    hidden: torch.Tensor,
    first: torch.Tensor,
    seeds: torch.Tensor,
    frames: torch.Tensor,
    greedy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `CodePredictor.forward` computes, of as many frames as `fits` allows."""
    frame = FrameKernels(predictor, len(hidden))
    residual = predictor.config.groups - 1
    codes = torch.empty((len(hidden), residual), dtype=torch.int64, device=hidden.device)
    total, summed = first.to(torch.float32, copy=True), torch.empty_like(first)
    frame.enter(hidden.contiguous())
    frame.read(0)
    frame.enter(first.contiguous())
    for group in range(residual):
        frame.read(group + 1)
        frame.draw(group, codes, total, summed, seeds, frames, greedy)
    return codes, summed
