"""The diffusion transformer of token2wav: one interval of its solver for any mix of chunks.

Its attention is local: a frame sees the frames of its own block (24), in a few layers those of the block before or
after as well. So a batch is a stack of blocks, called rows: all chunks, both guidance branches, [rows, frames, width].
The cost is linear in the length, there is no padding beyond a request's last block, and nothing can leak between
requests. A chunk continues the previous one exactly: its first block reads the keys and values that the block before
had at the same evaluation, which were kept (`left`), so blocks to the left are never computed twice and reach as far
back as in a whole decode.

On CUDA an interval is one graph, captured for several numbers of rows; the results of unused rows are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.diffusion_layers import add_and_norm
from omni_actors.engine.models.qwen2_5_omni.kernels import MIN_HALF_HEAD, block_attention

if TYPE_CHECKING:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTDecoderLayer, Qwen2_5OmniToken2WavDiTModel


@dataclass(frozen=True)
class Solver:
    """A method by its Butcher tableau, in parts of an interval.

    Args:
        nodes: where in the interval each slope is evaluated.
        stages: for each evaluation, the weights of the slopes before it.
        weights: of all slopes in the result.
    """

    nodes: tuple[float, ...]
    stages: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]

    @property
    def evaluations(self) -> int:
        """Evaluations of the network per interval."""
        return len(self.nodes)

    def times(self, start: float, end: float) -> list[float]:
        """The points in time of an interval's evaluations, with float32 arithmetic as in transformers."""
        step = np.float32(end) - np.float32(start)
        return [end if node == 1 else float(start + step * np.float32(node)) for node in self.nodes]

    def advance(
        self, state: torch.Tensor, step: torch.Tensor, slope: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The state after an interval of width `step`; `slope` takes the evaluation's number and its state."""
        slopes: list[torch.Tensor] = []
        for number, weights in enumerate(self.stages):
            slopes.append(slope(number, state + step * _sum(weights, slopes) if weights else state))
        return state + step * _sum(self.weights, slopes)


def _sum(weights: Sequence[float], slopes: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = zip(weights, slopes, strict=True)
    first, *rest = [slope if weight == 1 else weight * slope for weight, slope in pairs if weight]
    return sum(rest, start=first)


SOLVERS = {
    # The 3/8 rule, which is transformers' "RungeKutta4ODESolver".
    "rk4": Solver((0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
    "midpoint": Solver((0, 1 / 2), ((), (1 / 2,)), (0, 1)),
    "euler": Solver((0,), ((),), (1,)),
}


Reach = tuple[int, int]  # number of blocks that a layer looks back, and ahead


@dataclass
class DitChunk:
    """One chunk on its way through the network.

    Args:
        state: f32 [blocks, frames, mel_dim], the latents at the start of the interval.
        fixed: f32 [branches * blocks, frames, width], the constant part of the input; see `Dit.condition`.
        frames: number of real frames; the rest of the last block is padding.
        guidance: scale; used if there are two branches.
        times: the solver's points in time.
        left: [evaluations, layers, branches, frames, 2 * width], keys and values of the block before, or None.
        keep: receives the same of block `keep_block`, in the same shape; None to keep nothing.
        interval: how many intervals are done.
    """

    state: torch.Tensor
    fixed: torch.Tensor
    frames: int
    guidance: float
    times: Sequence[float]
    left: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    keep_block: int = 0
    interval: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the chunk, those of the look-ahead included."""
        return self.state.shape[0]

    @property
    def branches(self) -> int:
        """2 with guidance, otherwise 1."""
        return self.fixed.shape[0] // self.blocks

    @property
    def now(self) -> tuple[float, float]:
        """The points in time between which the interval lies."""
        return self.times[self.interval], self.times[self.interval + 1]


def lay_out(
    chunks: Sequence[DitChunk], rows: int, entries: int, reaches: Sequence[Reach], frames: int
) -> tuple[list[tuple[float, float]], int, dict[str, np.ndarray]]:
    """Lay out chunk after chunk, in each the conditional and then the null branch.

    Args:
        rows: rows of the batch; at least those of the chunks.
        entries: entries of `keep`; at least one per chunk and branch.
        reaches: the distinct reaches of the layers.
        frames: frames per block.

    Returns:
        The distinct `DitChunk.now`, of which a row's `slot` is an index; the rows that chunks take, the others see only
        themselves; and what goes into the tensors of these names.
    """
    intervals = list(dict.fromkeys(chunk.now for chunk in chunks))
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
        index["slot"][span] = intervals.index(chunk.now)
        index["conditional"][span] = np.tile(np.arange(first, first + blocks), chunk.branches)
        if chunk.branches == 2:
            index["null"][span] = np.tile(np.arange(first + blocks, first + 2 * blocks), 2)
            guidance[span] = chunk.guidance
        block = np.arange(blocks)
        real = np.minimum(frames, chunk.frames - block * frames)
        for branch in range(chunk.branches):
            begin = first + branch * blocks
            for number, (back, ahead) in enumerate(reaches):
                wanted = block[:, None] + np.arange(-back, ahead + 1)
                inside = (wanted >= 0) & (wanted < blocks)
                keys[number, begin : begin + blocks, : back + 1 + ahead] = np.where(inside, begin + wanted, -1)
                valid[number, begin : begin + blocks, : back + 1 + ahead] = np.where(inside, real[wanted % blocks], 0)
                if back and chunk.left is not None:
                    keys[number, begin, 0], valid[number, begin, 0] = rows + left_entries + branch, frames
            keep[entry] = begin + chunk.keep_block
            entry += 1
        first = span.stop
        left_entries += chunk.branches if chunk.left is not None else 0
    widths = np.array([np.float32(end) - np.float32(start) for start, end in intervals], np.float32)
    own: dict[str, np.ndarray] = {"keep": keep, "keys": keys, "valid": valid, "guidance": guidance, "width": widths}
    return intervals, first, index | own


EPS = 1e-6  # of norms
_Affine = tuple[torch.Tensor, torch.Tensor]  # weight [outputs, inputs] and bias [outputs]
_Window = tuple[torch.Tensor, torch.Tensor]  # `keys` and `valid` of `block_attention`

# Numbers of rows for which an interval is a graph. 32 chunks of 17 blocks with both branches have 1088.
GRAPH_ROWS = (6, 8, 12, 18, 24, 32, 36, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, *range(256, 1089, 32))
MODULATIONS_KEPT = 64  # intervals whose modulations are cached: enough for several common schedules


def solver_times(num_steps: int, sway_coefficient: float) -> torch.Tensor:
    """The solver's points in time, f32 [num_steps] from 0 to 1, as transformers computes them.

    `num_steps` counts points, so there are `num_steps - 1` intervals. With one point there is none: like the reference,
    we then decode the initial noise.
    """
    times = torch.linspace(0, 1, num_steps, dtype=torch.float32)
    times += sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
    return times


def graph_rows(most: int) -> tuple[int, ...]:
    """The numbers of rows to capture if a step has at most `most`; beyond the largest of `GRAPH_ROWS` none is."""
    most = min(most, GRAPH_ROWS[-1])
    return (*(rows for rows in GRAPH_ROWS if rows < most), most)


# The tensors that one interval reads, by name; `_shapes` has them all. Those of a captured graph keep their addresses.
_Rows = Mapping[str, torch.Tensor]


class _Layer:
    """Weights of one layer, in as few matrices as possible."""

    def __init__(self, layer: DiTDecoderLayer, dtype: torch.dtype) -> None:
        attention = layer.attn
        # The checkpoint interleaves its rotary pairs; half-split heads, which a kernel reads in order, give the same
        # products.
        head_dim = attention.inner_dim // attention.heads
        order = torch.arange(attention.inner_dim).view(attention.heads, head_dim)
        order = torch.cat([order[:, 0::2], order[:, 1::2]], dim=1).flatten().to(attention.to_q.weight.device)
        weight = [attention.to_q.weight[order], attention.to_k.weight[order], attention.to_v.weight]
        bias = [attention.to_q.bias[order], attention.to_k.bias[order], attention.to_v.bias]
        self.qkv: _Affine = torch.cat(weight).to(dtype), torch.cat(bias).to(dtype)
        self.out: _Affine = attention.to_out[0].weight.to(dtype), attention.to_out[0].bias.to(dtype)
        self.up: _Affine = layer.ff.ff[0].weight.to(dtype), layer.ff.ff[0].bias.to(dtype)
        self.down: _Affine = layer.ff.ff[3].weight.to(dtype), layer.ff.ff[3].bias.to(dtype)
        self.modulation: _Affine = layer.attn_norm.linear.weight, layer.attn_norm.linear.bias
        self.back: int = layer.look_backward_block
        self.ahead: int = layer.look_ahead_block


class Dit:
    """The network and its solver.

    Args:
        model: the loaded `Qwen2_5OmniToken2WavDiTModel`; only its weights are used.
        dtype: of the matrix products; the residual, the norms, the modulations and the solver stay float32.
        precise: compute float32 products in float32, not TF32.
        max_requests: maximum of chunks in a batch.
        solver: by which an interval is advanced.
    """

    def __init__(
        self,
        model: Qwen2_5OmniToken2WavDiTModel,
        *,
        dtype: torch.dtype,
        precise: bool,
        max_requests: int,
        solver: Solver = SOLVERS["rk4"],
    ) -> None:
        config = model.config
        self.solver = solver
        self.dtype, self.precise, self.max_requests = dtype, precise, max_requests
        self.device: torch.device = model.proj_out.weight.device
        self.frames: int = config.block_size
        self.mel_dim: int = config.mel_dim
        self.width: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.inner: int = config.head_dim * config.num_attention_heads
        self.repeats: int = config.repeats
        self.fused: bool = self.device.type == "cuda" and config.head_dim // 2 >= MIN_HALF_HEAD
        self.layers = [_Layer(layer, dtype) for layer in model.transformer_blocks]
        self.reaches = sorted({(layer.back, layer.ahead) for layer in self.layers})
        self.kept_layers = [index for index, layer in enumerate(self.layers) if layer.back]
        self._time_embed: torch.nn.Module = model.time_embed
        self._final_modulation: _Affine = model.norm_out.linear.weight, model.norm_out.linear.bias
        self._proj_out: _Affine = model.proj_out.weight.to(dtype), model.proj_out.bias.to(dtype)
        self._split_input(model, config)
        self._rotary = {reach: self._rotary_table(model, *reach) for reach in self.reaches}
        # Of all the modulations of an interval, those that scale.
        self._scales = [6 * layer + part for layer in range(len(self.layers)) for part in (1, 4)]
        self._scales.append(6 * len(self.layers))
        self._modulation = lru_cache(MODULATIONS_KEPT)(self._modulations)
        self._graphs: CudaGraphs[int, tuple[torch.Tensor, torch.Tensor]] = CudaGraphs()  # by rows
        self._static: _Rows | None = None

    def _split_input(self, model: Qwen2_5OmniToken2WavDiTModel, config: Qwen2_5OmniDiTConfig) -> None:
        """Split the linear input projection into parts that change at different times: latents, code, voice."""
        weight, bias = model.input_embed.proj.weight, model.input_embed.proj.bias
        widths = [self.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim]
        self._state_weight, voice, code, conditioning = (part.contiguous() for part in weight.split(widths, dim=1))
        self._voice_weight = torch.cat([voice, conditioning], dim=1)
        self._code_table = model.text_embed.codec_embed.weight @ code.T + bias  # [codes, width]

    def _rotary_table(
        self, model: Qwen2_5OmniToken2WavDiTModel, back: int, ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines by position in a window: only differences of positions matter."""
        positions = torch.arange((back + 1 + ahead) * self.frames, device=self.device)
        angles = positions[:, None].float() * model.rotary_embed.inv_freq.to(self.device)
        scaling = model.rotary_embed.attention_scaling
        return (angles.cos() * scaling).contiguous(), (angles.sin() * scaling).contiguous()

    # ------------------------------------------------------------------------------------------------------ conditions

    def condition(self, tokens: torch.Tensor, voices: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """`DitChunk.fixed` for codec `tokens` i64 [blocks * tokens per block] on the device.

        `voices` holds (speaker [enc_dim], conditioning [enc_emb_dim]) of each branch; the second branch has no code.
        """
        branches = []
        for branch, (speaker, conditioning) in enumerate(voices):
            voice = self._voice_weight @ torch.cat([speaker, conditioning])
            code = self._code_table[tokens if branch == 0 else torch.zeros_like(tokens)]
            branches.append((code + voice).repeat_interleave(self.repeats, dim=0))
        return torch.cat(branches).view(-1, self.frames, self.width)

    def _modulations(self, start: float, end: float) -> torch.Tensor:
        """All scales, shifts and gates of the interval's evaluations, f32 [evaluations, modulations]."""
        times = torch.tensor(self.solver.times(start, end), dtype=torch.float32, device=self.device)
        embedding = F.silu(self._time_embed(times))
        parts = [F.linear(embedding, *layer.modulation) for layer in self.layers]
        made = torch.cat([*parts, F.linear(embedding, *self._final_modulation)], dim=1)
        made.unflatten(1, (-1, self.width))[:, self._scales] += 1.0
        return made

    def kept_shape(self, intervals: int, branches: int) -> tuple[int, ...]:
        """Shape of the keys and values that one block leaves for the next chunk; see `DitChunk.left`."""
        return (self.solver.evaluations * intervals, len(self.kept_layers), branches, self.frames, 2 * self.inner)

    # -------------------------------------------------------------------------------------------------------- interval

    @torch.inference_mode()
    def advance(self, chunks: Sequence[DitChunk]) -> list[torch.Tensor]:
        """Advance all chunks by one interval of the solver, each at its own time.

        Returns their new states f32 [blocks, frames, mel_dim].
        """
        rows = sum(chunk.fixed.shape[0] for chunk in chunks)
        size = min((size for size in self._graphs.tensors if size >= rows), default=None)
        entries = sum(chunk.branches for chunk in chunks)
        if self._static is not None and size is not None and len(chunks) <= self.max_requests:
            batch = self._view(self._static, size)
            self._fill(batch, chunks, size)
            state, kept = self._graphs.replay(size)
            state = state.clone()
        else:
            batch = self._allocate(rows, len(chunks), entries)
            self._fill(batch, chunks, rows)
            state, kept = self._interval(batch)
        states, first, entry = [], 0, 0
        for chunk in chunks:
            states.append(state[first : first + chunk.blocks])
            if chunk.keep is not None:
                self._now(chunk, chunk.keep).copy_(kept[:, :, entry : entry + chunk.branches])
            first += chunk.fixed.shape[0]
            entry += chunk.branches
        return states

    def _allocate(self, rows: int, slots: int, entries: int) -> _Rows:
        shapes = self._shapes(rows, slots, entries)
        return {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in shapes.items()}

    def _shapes(self, rows: int, slots: int, entries: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each of the tensors of `_Rows`.

        `conditional` and `null` are the two rows that guide a row's slope, by `guidance`. `slot` is the row's index
        into `modulation` and `width`, the widths of the intervals. `keys` and `valid` are the windows of
        `block_attention`, one for each distinct reach. `keep` are the rows whose keys and values are kept.
        """
        evaluations, kept, frames = self.solver.evaluations, len(self.kept_layers), self.frames
        modulations, windows = (6 * len(self.layers) + 2) * self.width, (len(self.reaches), rows, 3)
        return {
            "state": ((rows, frames, self.mel_dim), torch.float32),
            "fixed": ((rows, frames, self.width), torch.float32),
            "conditional": ((rows,), torch.int64),
            "null": ((rows,), torch.int64),
            "guidance": ((rows, 1, 1), torch.float32),
            "slot": ((rows,), torch.int64),
            "modulation": ((evaluations, slots, modulations), torch.float32),
            "width": ((slots,), torch.float32),
            "keys": (windows, torch.int32),
            "valid": (windows, torch.int32),
            "left": ((evaluations, kept, entries, frames, 2 * self.inner), self.dtype),
            "keep": ((entries,), torch.int64),
        }

    def _view(self, whole: _Rows, rows: int) -> _Rows:
        """The first `rows` rows of a larger allocation, with the slots and entries that this many rows can need."""
        shapes = self._shapes(rows, *self._room(rows))
        return {name: whole[name][tuple(map(slice, shape))] for name, (shape, _) in shapes.items()}

    def _room(self, rows: int) -> tuple[int, int]:
        return min(rows, self.max_requests), min(rows, 2 * self.max_requests)

    def _fill(self, batch: _Rows, chunks: Sequence[DitChunk], rows: int) -> None:
        """Lay out the chunks in `batch`: chunk after chunk, in each the conditional and then the null branch."""
        intervals, used, arrays = lay_out(chunks, rows, len(batch["keep"]), self.reaches, self.frames)
        slots = len(intervals)
        if chunks:  # none only while graphs are captured
            states = [chunk.state for chunk in chunks for _ in range(chunk.branches)]
            torch.cat(states, out=batch["state"][:used])
            torch.cat([chunk.fixed for chunk in chunks], out=batch["fixed"][:used])
            modulations = [self._modulation(*interval) for interval in intervals]
            batch["modulation"][:, :slots] = torch.stack(modulations, dim=1) if slots > 1 else modulations[0][:, None]
        lefts = [self._now(chunk, chunk.left) for chunk in chunks if chunk.left is not None]
        if lefts:
            joined = torch.cat(lefts, dim=2) if len(lefts) > 1 else lefts[0]
            batch["left"][:, :, : joined.shape[2]] = joined
        self._upload([(batch[name][: len(array)], array) for name, array in arrays.items()])

    def _now(self, chunk: DitChunk, tensor: torch.Tensor) -> torch.Tensor:
        """The part of `left` or `keep` that belongs to the evaluations of the chunk's interval."""
        count = self.solver.evaluations
        return tensor[count * chunk.interval : count * (chunk.interval + 1)]

    def _upload(self, pairs: Sequence[tuple[torch.Tensor, np.ndarray]]) -> None:
        """Copy arrays to the device, all in one."""
        if self.device.type != "cuda":
            for target, source in pairs:
                target.copy_(torch.from_numpy(source).view(target.shape))
            return
        packed = torch.from_numpy(np.concatenate([source.reshape(-1).view(np.uint8) for _, source in pairs]))
        packed = packed.pin_memory().to(self.device, non_blocking=True)
        offset = 0
        for target, source in pairs:
            target.copy_(packed[offset : offset + source.nbytes].view(target.dtype).view(target.shape))
            offset += source.nbytes

    def _interval(self, batch: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """New states [rows, frames, mel_dim], and the keys and values to keep, in the shape of `left`."""
        step = batch["width"][batch["slot"]].view(-1, 1, 1)
        kept = torch.empty(
            (self.solver.evaluations, len(self.kept_layers), len(batch["keep"]), *batch["left"].shape[3:]),
            dtype=self.dtype,
            device=self.device,
        )
        windows: dict[Reach, _Window] = {}
        for number, reach in enumerate(self.reaches):
            seen = slice(sum(reach) + 1)
            windows[reach] = (batch["keys"][number, :, seen].contiguous(), batch["valid"][number, :, seen].contiguous())

        def slope(evaluation: int, at: torch.Tensor) -> torch.Tensor:
            return self._slope(batch, evaluation, at, windows, kept[evaluation])

        return self.solver.advance(batch["state"], step, slope), kept

    def _slope(
        self, batch: _Rows, evaluation: int, state: torch.Tensor, windows: Mapping[Reach, _Window], kept: torch.Tensor
    ) -> torch.Tensor:
        """The guided slope at `state` [rows, frames, mel_dim]; also writes the keys and values to keep into `kept`."""
        width = self.width
        modulation = batch["modulation"][evaluation]
        hidden, owner = batch["fixed"] + F.linear(state, self._state_weight), batch["slot"][:, None]

        def part(index: int) -> torch.Tensor:
            return modulation[:, index * width : (index + 1) * width]

        def norm(update: torch.Tensor | None, gate: int, scale: int, shift: int) -> torch.Tensor:
            nonlocal hidden
            hidden, normed = add_and_norm(
                hidden, update, part(gate), part(scale), owner, part(shift), eps=EPS, fused=self.fused, dtype=self.dtype
            )
            return normed

        update: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            # In the order of the checkpoint: shift, scale and gate of the attention, then of the feed-forward layer.
            first = 6 * index
            normed = norm(update, max(0, first - 1), first + 1, first)
            qkv = F.linear(normed, *layer.qkv)
            left = batch["left"][evaluation, 0][:0]
            if layer.back:
                place = self.kept_layers.index(index)
                left = batch["left"][evaluation, place]
                torch.index_select(qkv[..., self.inner :], 0, batch["keep"], out=kept[place])
            reach = (layer.back, layer.ahead)
            mixed = block_attention(
                qkv,
                left,
                *windows[reach],
                self._rotary[reach],
                self.heads,
                back=layer.back,
                precise=self.precise,
                fused=self.fused,
            )
            normed = norm(F.linear(mixed, *layer.out), first + 2, first + 4, first + 3)
            update = F.linear(self._gelu_linear(normed, *layer.up), *layer.down)
        last = 6 * len(self.layers)
        slope = F.linear(norm(update, last - 1, last, last + 1), *self._proj_out).float()
        conditional = slope[batch["conditional"]]
        return conditional + (conditional - slope[batch["null"]]) * batch["guidance"]

    def _gelu_linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not self.fused:
            return F.gelu(F.linear(hidden, weight, bias), approximate="tanh")
        # The same in the epilogue of the product, which saves reading and writing the widest activation.
        flat = torch._addmm_activation(bias, hidden.flatten(0, 1), weight.T, use_gelu=True)
        return flat.view(*hidden.shape[:2], -1)

    # ---------------------------------------------------------------------------------------------------------- graphs

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture the graph of an interval for each of these numbers of rows. Needs CUDA."""
        largest = max(sizes)
        self._static = self._allocate(largest, *self._room(largest))
        for size in sorted(sizes, reverse=True):
            batch = self._view(self._static, size)
            self._fill(batch, [], size)
            self._graphs.capture(size, partial(self._interval, batch))
