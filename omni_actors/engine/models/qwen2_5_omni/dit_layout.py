"""How chunks lie in a batch of the diffusion transformer: index arithmetic on the host, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

Reach = tuple[int, int]  # number of blocks that a layer looks back, and ahead


@dataclass(frozen=True)
class DitChunk:
    """One chunk in one interval, as input of the network.

    Args:
        state: f32 [blocks, frames, mel_dim], the latents at the start of the interval.
        fixed: f32 [branches * blocks, frames, width], the constant part of the input; see `Dit.condition`.
        frames: number of real frames; the rest of the last block is padding.
        guidance: scale; used if there are two branches.
        times: the interval's two points in time.
        left: [evaluations, layers, branches, frames, 2 * width], keys and values of the block before, or None.
        keep: receives the same of block `keep_block`, in the same shape; None to keep nothing.
    """

    state: torch.Tensor
    fixed: torch.Tensor
    frames: int
    guidance: float
    times: tuple[float, float]
    left: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    keep_block: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the chunk, those of the look-ahead included."""
        return self.state.shape[0]

    @property
    def branches(self) -> int:
        """2 with guidance, otherwise 1."""
        return self.fixed.shape[0] // self.blocks


@dataclass(frozen=True)
class Layout:
    """The host's part of a batch, in arrays of `rows` rows.

    Args:
        intervals: the distinct `DitChunk.times`; a row's `slot` is an index into them.
        used: rows that chunks take; the others see only themselves.
        left_entries: entries of earlier chunks' keys and values.
        conditional, null, slot: i64 [rows], see `dit.py`.
        guidance: f32 [rows].
        keys, valid: i32 [reaches, rows, 3], the windows of `block_attention`.
        keep: i64 [entries], rows whose keys and values are kept.
        widths: f32 [intervals].
    """

    intervals: list[tuple[float, float]]
    used: int
    left_entries: int
    conditional: np.ndarray
    null: np.ndarray
    slot: np.ndarray
    guidance: np.ndarray
    keys: np.ndarray
    valid: np.ndarray
    keep: np.ndarray
    widths: np.ndarray


def lay_out(chunks: Sequence[DitChunk], rows: int, entries: int, reaches: Sequence[Reach], frames: int) -> Layout:
    """Lay out chunk after chunk, in each the conditional and then the null branch.

    Args:
        rows: rows of the batch; at least those of the chunks.
        entries: entries of `Layout.keep`; at least one per chunk and branch.
        reaches: the distinct reaches of the layers.
        frames: frames per block.
    """
    intervals = list(dict.fromkeys(chunk.times for chunk in chunks))
    index = {name: np.zeros(rows, np.int64) for name in ("conditional", "null", "slot")}
    index["conditional"][:] = index["null"][:] = np.arange(rows)
    guidance = np.zeros(rows, np.float32)
    keys = np.full((len(reaches), rows, 3), -1, np.int32)
    valid = np.zeros((len(reaches), rows, 3), np.int32)
    for number, (back, _) in enumerate(reaches):  # unused rows see themselves
        keys[number, :, back], valid[number, :, back] = np.arange(rows), frames
    # All of it is written: an index left over from a larger batch would point outside of this one.
    keep, entry = np.zeros(entries, np.int64), 0
    first, left_entries = 0, 0
    for chunk in chunks:
        blocks = chunk.blocks
        span = slice(first, first + blocks * chunk.branches)
        index["slot"][span] = intervals.index(chunk.times)
        index["conditional"][span] = np.tile(np.arange(first, first + blocks), chunk.branches)
        if chunk.branches == 2:
            index["null"][span] = np.tile(np.arange(first + blocks, first + 2 * blocks), 2)
            guidance[span] = chunk.guidance
        block = np.arange(blocks)
        real = np.minimum(frames, chunk.frames - block * frames)
        for branch in range(chunk.branches):
            begin = first + branch * blocks
            for number, (back, ahead) in enumerate(reaches):
                for place in range(back + 1 + ahead):
                    wanted = block + place - back
                    inside = (wanted >= 0) & (wanted < blocks)
                    keys[number, begin : begin + blocks, place] = np.where(inside, begin + wanted, -1)
                    valid[number, begin : begin + blocks, place] = np.where(inside, real[wanted % blocks], 0)
                if back and chunk.left is not None:
                    keys[number, begin, 0], valid[number, begin, 0] = rows + left_entries + branch, frames
            keep[entry] = begin + chunk.keep_block
            entry += 1
        first = span.stop
        left_entries += chunk.branches if chunk.left is not None else 0
    return Layout(
        intervals=intervals,
        used=first,
        left_entries=left_entries,
        conditional=index["conditional"],
        null=index["null"],
        slot=index["slot"],
        guidance=guidance,
        keys=keys,
        valid=valid,
        keep=keep,
        widths=np.array([np.float32(end) - np.float32(start) for start, end in intervals], np.float32),
    )
