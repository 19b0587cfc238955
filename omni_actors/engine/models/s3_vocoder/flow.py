"""Tokens to mel frames, two each: a conformer encodes the tokens, a transformer with convolutions solves the flow.

A chunk sees all of itself and what is kept of the past: of the conformer the first positions (those of the recording
whose voice is spoken) and the last `HISTORY` frames; of the transformer, whose newest frames come first, the newest as
many as the recording has, and the last `HISTORY` of the rest. So does the package whose weights these are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.s3_vocoder.weights import Weights
from omni_actors.engine.rows import moved

HISTORY = 100  # mel frames
FRAMES = 2  # of a token
INTERVALS = 10  # of the solver
GUIDANCE = 0.7
BRANCHES = 2  # with the condition, and without
LONGEST = 600 * 50  # mel frames that have noise of their own
TIME_WIDTH, TIME_SCALE, TIME_PERIOD = 256, 1000.0, 10_000.0
EPS = 1e-6


class FlowState(NamedTuple):
    """What an utterance leaves for its next chunk.

    Args:
        token_conv: [width, 2], of the tokens' convolution; `frame_conv` [width, 4], of that of the frames.
        token_keys: [layers, 2, heads, tokens, head size], keys and values; `frame_keys` likewise.
        convs: [intervals, blocks, branches, 2 width, 2], of the transformer's convolutions.
        keys: [intervals, blocks, branches, 2, heads, frames, head size], the newest frames first.
    """

    token_conv: torch.Tensor
    frame_conv: torch.Tensor
    token_keys: torch.Tensor
    frame_keys: torch.Tensor
    convs: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class FlowChunk:
    """The next tokens of an utterance.

    Args:
        tokens: i64 [tokens], those of the look-ahead and of the padding among them.
        count: how many of them are the utterance's.
        speaker: [mels], the voice.
        prompt_frames: mel frames of the recording.
        state: `Flow.begun` at the beginning.
        given: [frames, mels] that the first frames resemble; they are the recording's.
        ahead: how many of the look-ahead follow the utterance's.
    """

    tokens: torch.Tensor
    count: int
    speaker: torch.Tensor
    prompt_frames: int
    state: Any
    given: torch.Tensor | None = None
    ahead: int = 0


class _ConformerLayer(nn.Module):
    """Attention by relative position, and linear layers. A key's distance counts only positions that are kept."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out, self.position = (
            weights.linear(f"{name}.self_attn.linear_{part}") for part in ("q", "k", "v", "out", "pos")
        )
        self.content_bias, self.position_bias = (  # [heads, 1, head size]
            nn.Parameter(weights.take(f"{name}.self_attn.pos_bias_{part}")[:, None], requires_grad=False)
            for part in "uv"
        )
        self.norm, self.norm_mlp = weights.norm(f"{name}.norm_mha", 1e-12), weights.norm(f"{name}.norm_ff", 1e-12)
        self.up, self.down = weights.linear(f"{name}.feed_forward.w_1"), weights.linear(f"{name}.feed_forward.w_2")

    def forward(
        self, hidden: torch.Tensor, past: torch.Tensor, distances: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, _, size = self.content_bias.shape
        count, inputs = hidden.shape[1], self.norm(hidden)
        query, key, value = (
            part(inputs).unflatten(-1, (heads, size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        new = torch.stack([key, value], 1)
        keys, values = torch.cat([past, new], 3).unbind(1)
        position = self.position(distances).unflatten(-1, (heads, size)).permute(1, 2, 0)  # [heads, size, distances]
        offsets = torch.arange(count - 1, -1, -1, device=hidden.device)[:, None]
        index = (offsets + torch.arange(keys.shape[2], device=hidden.device)).expand(*query.shape[:2], -1, -1)
        bias = ((query + self.position_bias) @ position).gather(-1, index) / math.sqrt(size)
        bias = bias.masked_fill(~seen, -math.inf)
        attended = F.scaled_dot_product_attention(query + self.content_bias, keys, values, attn_mask=bias)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.silu(self.up(self.norm_mlp(hidden)))), new


class _Conformer(nn.Module):
    """An input layer, and layers with their past."""

    def __init__(self, weights: Weights, embed: str, layers: str) -> None:
        super().__init__()
        self.input, self.norm = weights.linear(f"{embed}.out.0"), weights.norm(f"{embed}.out.1")
        names = [f"{layers}.{index}" for index in range(weights.count(f"{layers}."))]
        heads, size = weights.shape(f"{layers}.0.self_attn.pos_bias_u")
        self.empty = (len(names), 2, heads, 0, size)  # shape of the keys of no past
        self.layers = nn.ModuleList(_ConformerLayer(weights, name) for name in names)

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs [batch, time, width] as the layers take them."""
        embedded: torch.Tensor = self.norm(self.input(inputs))
        return embedded * math.sqrt(embedded.shape[-1])

    def forward(
        self, hidden: torch.Tensor, past: torch.Tensor, lengths: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a chunk, and its keys [batch, layers, 2, heads, time, head size].

        Args:
            past: keys of the past [batch, layers, 2, heads, room, head size], at the right end: so distances do not
                depend on how long it is.
            lengths: i64 [batch], how many of these there are.
            valid: bool [batch, time or 1, time], what each position sees of the chunk.
        """
        room, (_, count, width) = past.shape[4], hidden.shape
        before = torch.arange(room, 0, -1, device=hidden.device)
        seen = torch.cat([(before <= lengths[:, None])[:, None].expand(-1, valid.shape[1], -1), valid], 2)[:, None]
        distances = _sinusoids(torch.arange(room + count - 1, -count, -1, device=hidden.device), width).to(hidden.dtype)
        keys = []
        for index, layer in enumerate(self.layers):
            hidden, new = layer(hidden, past[:, index], distances, seen)
            keys.append(new)
        return hidden, torch.stack(keys, 1)


def visible(valid: torch.Tensor, within: int = 0) -> torch.Tensor:
    """What each position sees, bool [batch, time or 1, time]: to the end of its part of `within`, or all.

    Args:
        valid: bool [batch, time], what is not padding.
    """
    if not within:
        return valid[:, None]
    places = torch.arange(valid.shape[1], device=valid.device)
    return valid[:, None] & (places < (places[:, None] // within + 1) * within)


def _sinusoids(distances: torch.Tensor, width: int) -> torch.Tensor:
    """Sine and cosine by turns, f32 [distances, width]."""
    rates = torch.exp(torch.arange(0, width, 2, device=distances.device).float() * (-math.log(10_000.0) / width))
    angles = distances[:, None].float() * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class TokenEncoder(nn.Module):
    """Tokens to the means of mel frames."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.table = nn.Parameter(weights.take("input_embedding.weight"), requires_grad=False)
        self.tokens = _Conformer(weights, "encoder.embed", "encoder.encoders")
        self.ahead, self.behind = (weights.conv(f"encoder.pre_lookahead_layer.conv{part}") for part in (1, 2))
        self.widening = weights.conv("encoder.up_layer.conv")
        self.frames = _Conformer(weights, "encoder.up_embed", "encoder.up_encoders")
        self.norm, self.project = weights.norm("encoder.after_norm"), weights.linear("encoder_proj")
        self.look_ahead = int(self.ahead.kernel_size[0]) - 1  # tokens
        self._graphs: CudaGraphs[Encoding, tuple[torch.Tensor, ...]] = CudaGraphs()

    def forward(
        self, chunks: Sequence[FlowChunk], *, last: bool, within: int = 0
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """[batch, frames, mels], and of the first four parts of the states those of these chunks alone.

        The next call may write over them.

        Args:
            within: see `visible`, in tokens; for chunks that begin utterances.
        """
        count, shape = len(chunks), (len(chunks[0].tokens), last)
        room = max(chunk.state.token_keys.shape[3] for chunk in chunks)
        captured = None if within else smallest(self._graphs.tensors, shape, count, room)
        encoding = captured or Encoding(self, count, shape, room)
        encoding.load(chunks)
        means, *left = self.compute(encoding, within) if captured is None else self._graphs.replay(captured)
        return means[:count], left

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], lengths: Sequence[int], room: int) -> None:
        """Have memory for so many chunks of these tokens, with those of the look-ahead, on CUDA with graphs.

        Args:
            room: past tokens.
        """
        graphs: CudaGraphs[Encoding, tuple[torch.Tensor, ...]] = CudaGraphs(cuda=self.table.is_cuda)
        for size in sorted(sizes, reverse=True):  # the largest first: the others use its memory
            for shape in itertools.product(sorted(lengths, reverse=True), (True, False)):
                encoding = Encoding(self, size, shape, room, next(iter(graphs.tensors), None))
                graphs.capture(encoding, partial(self.compute, encoding))
        self._graphs = graphs

    def compute(self, encoding: Encoding, within: int = 0) -> tuple[torch.Tensor, ...]:
        """See `forward`."""
        _, last = encoding.shape
        counts, read, token_past, frame_past = encoding.numbers
        token_conv, frame_conv, token_keys, frame_keys = encoding.past
        embedded = self.tokens.embed(self.table[encoding.tokens])
        embedded = embedded * (torch.arange(embedded.shape[1], device=read.device) < read[:, None])[..., None]
        if last:
            embedded = F.pad(embedded, (0, 0, 0, self.look_ahead))
        seen_ahead = F.leaky_relu(self.ahead(embedded.transpose(1, 2)))
        token_conv = torch.cat([token_conv, seen_ahead], 2)
        hidden = self.behind(token_conv).transpose(1, 2) + embedded[:, : seen_ahead.shape[2]]
        valid = torch.arange(hidden.shape[1], device=read.device) < (counts[:, None] if last else hidden.shape[1])
        valid = valid.expand(len(counts), -1)
        hidden, token_keys = self.tokens(hidden, token_keys, token_past, visible(valid, within))
        wide = hidden.transpose(1, 2).repeat_interleave(FRAMES, 2)
        frame_conv = torch.cat([frame_conv, wide], 2)
        hidden = self.frames.embed(self.widening(frame_conv).transpose(1, 2))
        valid = visible(valid.repeat_interleave(FRAMES, 1), FRAMES * within)
        hidden, frame_keys = self.frames(hidden, frame_keys, frame_past, valid)
        means = self.project(self.norm(hidden))
        return means, token_conv[..., -2:], frame_conv[..., -2 * FRAMES :], token_keys, frame_keys


class Encoding:
    """Chunks of equal length: the inputs of `TokenEncoder.compute` in memory of their own.

    Args:
        size: utterances.
        shape: tokens of each, with those of the look-ahead, and whether they are the last.
        room: past tokens.
        base: one of at least so many utterances, whose memory for the past is used.

    Attributes:
        numbers: i64 [4, size]: tokens of each, the same with what is read of the look-ahead, past tokens and frames.
        past: the first four parts of `FlowState`, each [size, ...], the keys at the right end.
    """

    def __init__(
        self, encoder: TokenEncoder, size: int, shape: tuple[int, bool], room: int, base: Encoding | None = None
    ) -> None:
        self.shape, self.size, self.room = shape, size, room
        make, width = encoder.table.new_zeros, encoder.table.shape[1]
        self.tokens = make(size, shape[0], dtype=torch.int64)
        self.numbers = make(4, size, dtype=torch.int64)
        self.past: list[torch.Tensor] = [] if base is None else [part[:size] for part in base.past]
        if base is None:
            keys = (encoder.tokens.empty, room), (encoder.frames.empty, FRAMES * room)
            self.past = [make(size, width, count) for count in (2, 2 * FRAMES)]
            self.past += [make(size, *sizes[:3], places, sizes[4]) for sizes, places in keys]

    def load(self, chunks: Sequence[FlowChunk]) -> None:
        """Copy the chunks and their past."""
        count, device, states = len(chunks), self.tokens.device, [chunk.state for chunk in chunks]
        self.tokens[:count] = moved(torch.stack([chunk.tokens for chunk in chunks]), device)
        read = [(chunk.count, chunk.count + chunk.ahead) for chunk in chunks]
        kept = [(state.token_keys.shape[3], state.frame_keys.shape[3]) for state in states]
        self.numbers[:, :count] = moved(torch.cat([torch.tensor(read), torch.tensor(kept)], 1), device).T
        for part, own in enumerate(self.past[:2]):
            torch.stack([state[part] for state in states], out=own[:count])
        for part, own in enumerate(self.past[2:]):
            places = [own[row, :, :, :, own.shape[4] - lengths[part] :] for row, lengths in enumerate(kept)]
            torch._foreach_copy_(places, [state[2 + part] for state in states])


class _Block(nn.Module):
    """Attention, convolutions and linear layers, each moved, scaled and gated by the time."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.query, self.key, self.value = (weights.linear(f"{name}.attn.to_{part}") for part in "qkv")
        self.norm_query, self.norm_key = weights.norm(f"{name}.attn.q_norm"), weights.norm(f"{name}.attn.k_norm")
        self.out = weights.linear(f"{name}.attn.proj")
        self.first, self.second = (weights.conv(f"{name}.conv.block.{index}") for index in (1, 6))
        self.norm_conv = weights.norm(f"{name}.conv.block.3")
        self.up, self.down = weights.linear(f"{name}.mlp.fc1"), weights.linear(f"{name}.mlp.fc2")
        self.modulation = weights.linear(f"{name}.adaLN_modulation.1")

    def forward(
        self,
        hidden: torch.Tensor,
        modulation: torch.Tensor,
        past: torch.Tensor,
        convs: torch.Tensor,
        seen: torch.Tensor,
        interval: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        modulation, past, convs = [part.index_select(0, interval)[0] for part in (modulation, past, convs)]
        move, scale, gate, move_mlp, scale_mlp, gate_mlp, move_conv, scale_conv, gate_conv = modulation
        size = self.norm_query.normalized_shape[0]
        inputs = _modulated(hidden, move, scale)
        query, key, value = (
            part(inputs).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        new = torch.stack([self.norm_key(key), value], 1)
        keys, values = torch.cat([new, past], 3).unbind(1)
        attended = F.scaled_dot_product_attention(self.norm_query(query), keys, values, attn_mask=seen)
        hidden = hidden + gate * self.out(attended.transpose(1, 2).flatten(2))
        inputs = _modulated(hidden, move_conv, scale_conv).transpose(1, 2)
        before, between = convs.split(inputs.shape[1], 1)
        first = torch.cat([before, inputs], 2)
        second = F.mish(self.norm_conv(self.first(first).transpose(1, 2))).transpose(1, 2)
        second = torch.cat([between, second], 2)
        hidden = hidden + gate_conv * self.second(second).transpose(1, 2)
        inputs = _modulated(hidden, move_mlp, scale_mlp)
        hidden = hidden + gate_mlp * self.down(F.gelu(self.up(inputs), approximate="tanh"))
        return hidden, new, torch.cat([first[..., -2:], second[..., -2:]], 1)


def _modulated(hidden: torch.Tensor, move: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], eps=EPS) * (1 + scale) + move


class Estimator(nn.Module):
    """The flow's slope at a moment.

    Attributes:
        width, count, heads, size: of a frame, of blocks, and of heads and what each is wide.
    """

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.input = weights.linear(f"{name}.in_proj")
        self.width, self.count = self.input.out_features, weights.count(f"{name}.blocks.")
        (self.size,) = weights.shape(f"{name}.blocks.0.attn.q_norm.weight")
        self.heads = weights.shape(f"{name}.blocks.0.attn.to_q.weight")[0] // self.size
        self.blocks = nn.ModuleList(_Block(weights, f"{name}.blocks.{index}") for index in range(self.count))
        self.modulation = weights.linear(f"{name}.final_layer.adaLN_modulation.1")
        self.output = weights.linear(f"{name}.final_layer.linear")
        self.time_in, self.time_out = (weights.linear(f"{name}.t_embedder.mlp.{index}") for index in (0, 2))

    def modulations(self, time: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What the time does to the blocks, [blocks, 9, width], and to the output, [2, width]."""
        rates = torch.exp(-math.log(TIME_PERIOD) * torch.arange(TIME_WIDTH // 2) / (TIME_WIDTH // 2))
        angles = (time * TIME_SCALE * rates).to(self.time_in.weight)
        hidden = F.silu(self.time_out(F.silu(self.time_in(torch.cat([angles.cos(), angles.sin()])))))
        blocks = [cast("_Block", block).modulation(hidden).unflatten(0, (9, -1)) for block in self.blocks]
        return torch.stack(blocks), self.modulation(hidden).unflatten(0, (2, -1))

    def forward(
        self,
        inputs: torch.Tensor,
        modulation: torch.Tensor,
        final: torch.Tensor,
        past: torch.Tensor,
        convs: torch.Tensor,
        seen: torch.Tensor,
        interval: torch.Tensor,
        blocks: Iterable[Callable[..., Any]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The slope of rows [rows, frames, mels], and what they leave: keys and convolutions.

        Args:
            inputs: [rows, frames, 4 mels]: state, mean, speaker and what is given.
            modulation, final: see `modulations`, of all intervals.
            past: [intervals, blocks, rows, 2, heads, past frames, head size].
            convs: [intervals, blocks, rows, 2 width, 2].
            seen: bool [rows, 1, 1, frames + past frames].
            interval: i64 [1], the one of these.
            blocks: compiled ones, if there are any.
        """
        hidden, keys, left = self.input(inputs), [], []
        for index, block in enumerate(self.blocks if blocks is None else blocks):
            hidden, new, conv = block(hidden, modulation[:, index], past[:, index], convs[:, index], seen, interval)
            keys.append(new)
            left.append(conv)
        slope = self.output(_modulated(hidden, *final.index_select(0, interval)[0]))
        return slope, torch.stack(keys), torch.stack(left)


def voice_of(layer: nn.Linear, embedding: torch.Tensor) -> torch.Tensor:
    """[mels], by the `speaker` of a flow, of a speaker's embedding [size]."""
    voice: torch.Tensor = layer(F.normalize(embedding.to(layer.weight), dim=0))
    return voice


def empty_state(encoder: TokenEncoder) -> FlowState:
    """Of an utterance that begins, without the solver's part."""
    width, make = encoder.table.shape[1], encoder.table.new_zeros
    keys = make(encoder.tokens.empty), make(encoder.frames.empty)
    return FlowState(make(width, 2), make(width, 2 * FRAMES), *keys, make(0), make(0))


class Flow(nn.Module):
    """Tokens to mel frames.

    Args:
        seed: of the noise that all utterances begin with: one table, by the position among the frames that are kept.

    Attributes:
        recomputes: whether each chunk is computed with all before it.
        estimator_class: of the network that gives the slope.
        begun: the state of an utterance that begins.
    """

    recomputes: ClassVar[bool] = False
    estimator_class: ClassVar[type[Any]] = Estimator
    begun: Any

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__()
        self.encoder = TokenEncoder(weights)
        self.estimator = self.estimator_class(weights, "decoder.estimator")
        self.speaker = weights.linear("spk_embed_affine_layer")
        weights.done()
        # The noise that all utterances begin with, f32 [frames, mels], whatever the type of the weights.
        generator = torch.Generator().manual_seed(seed)
        self.noise = torch.randn(LONGEST, self.speaker.out_features, generator=generator)
        # When the solver's intervals begin, and the last one ends.
        self.times: list[float] = (1 - torch.cos(torch.linspace(0, 1, INTERVALS + 1) * 0.5 * torch.pi)).tolist()
        self._graphs: CudaGraphs[Intervals, None] = CudaGraphs()

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to the device; compute what the time alone decides, and `begun`."""
        self.to(device, dtype)
        self.noise = self.noise.to(device)
        self.begin()

    def begin(self) -> None:
        """Compute what the time alone decides, and `begun`."""
        modulations = (self.estimator.modulations(time) for time in self.times[:-1])
        self.modulations = [torch.stack(parts) for parts in zip(*modulations, strict=True)]
        durations = [end - begin for begin, end in itertools.pairwise(self.times)]
        self.durations = torch.tensor(durations, device=self.noise.device)
        make, estimator = self.speaker.weight.new_zeros, self.estimator
        solved = INTERVALS, estimator.count, BRANCHES
        self.begun = empty_state(self.encoder)._replace(
            convs=make(*solved, 2 * estimator.width, 2), keys=make(*solved, 2, estimator.heads, 0, estimator.size)
        )

    def state_bytes(self, state: Any, frames: int) -> int:
        """Bytes that an utterance keeps at most, if this is its state after a recording of so many frames."""
        size: int = sum(part.nbytes for part in state)
        return size + size * HISTORY // frames

    def forward(self, chunks: Sequence[FlowChunk], *, last: bool) -> tuple[Sequence[torch.Tensor], list[Any]]:
        """Decode the next tokens of utterances.

        Args:
            chunks: of equal length, look-ahead included.
            last: whether they are the utterances' last. If not, the look-ahead is not decoded.

        Returns:
            f32 mel frames [frames, mels] of each, and the states after them; none if they are the last.
        """
        means, left = self.encoder(chunks, last=last)
        batch, frames, _ = means.shape
        room = max(chunk.state.keys.shape[5] for chunk in chunks)
        captured = smallest(self._graphs.tensors, frames, batch, room)
        solver = captured or Intervals(self, batch, frames, room, 0 if last else frames)
        solver.load(chunks, means, last=last)
        for _ in range(INTERVALS):
            solver.advance() if captured is None else self._graphs.replay(captured)
        states = [] if last else [self._state(index, chunk, left, solver) for index, chunk in enumerate(chunks)]
        return list(solver.state[:batch].clone()), states

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], lengths: Sequence[int], room: int) -> None:
        """Have memory for batches of these sizes and chunks of these tokens, on CUDA with graphs.

        A last chunk is filled up to the length that others have with their look-ahead.

        Args:
            room: past frames.
        """
        cuda, read = self.noise.is_cuda, [self.encoder.look_ahead + length for length in lengths]
        self.encoder.capture(sizes, read, room // FRAMES)
        graphs: CudaGraphs[Intervals, None] = CudaGraphs(cuda=cuda)
        # Equal blocks share their code, for any size. It is for graphs alone, or a request could wait for a compiler.
        blocks = [torch.compile(block, dynamic=True) for block in self.estimator.blocks] if cuda else None
        for size in sorted(sizes, reverse=True):  # the largest first: the others use its memory
            for frames in sorted({FRAMES * each for each in (*read, *lengths)}, reverse=True):
                solver = Intervals(self, size, frames, room, frames, next(iter(graphs.tensors), None))
                graphs.capture(solver, partial(solver.advance, blocks))
        self._graphs = graphs

    def _state(self, index: int, chunk: FlowChunk, left: Sequence[torch.Tensor], solver: Intervals) -> FlowState:
        token_conv, frame_conv, token_keys, frame_keys = (part[index] for part in left)
        before, frames = chunk.state, chunk.prompt_frames
        keys, convs = (part.unflatten(2, (BRANCHES, -1))[:, :, :, index] for part in (solver.new_keys, solver.convs))
        return FlowState(
            token_conv.clone(),
            frame_conv.clone(),
            joined([before.token_keys, token_keys], 3, frames // FRAMES, HISTORY // FRAMES),
            joined([before.frame_keys, frame_keys], 3, frames, HISTORY),
            convs.clone(),
            joined([keys, before.keys], 5, frames, HISTORY),
        )


def joined(parts: Sequence[torch.Tensor], dim: int, first: int, last: int) -> torch.Tensor:
    """Of all positions the first and the last ones, or all if there are no more."""
    total, begin, kept = sum(part.shape[dim] for part in parts), 0, []
    for part in parts:
        length = part.shape[dim]
        head = min(length, max(0, first - begin))
        tail = max(head, min(length, total - last - begin))
        kept += [part.narrow(dim, 0, head), part.narrow(dim, tail, length - tail)]
        begin += length
    return torch.cat(kept, dim)


Step = TypeVar("Step", Encoding, "Intervals")


def smallest(steps: Iterable[Step], shape: object, size: int, room: int) -> Step | None:
    """The one for the fewest utterances among those of a shape that take so many with so long a past, if any."""
    fitting = (step for step in steps if step.shape == shape and step.size >= size and step.room >= room)
    return min(fitting, key=lambda step: step.size, default=None)


class Intervals:
    """The solver's intervals, with all that they need and leave in memory of their own.

    Args:
        size: utterances. Each has a row with its condition, and `size` rows later one without.
        room: past frames.
        kept: frames whose keys are kept, all or none.
        base: one of at least so many utterances and frames, whose memory for the past and for new keys is used.

    Attributes:
        state: f32 [size, frames, mels].
        new_keys: [intervals, blocks, rows, 2, heads, frames, head size].
        convs: [intervals, blocks, rows, 2 width, 2], those before the chunk and, once an interval is solved, after it.
    """

    def __init__(self, flow: Flow, size: int, frames: int, room: int, kept: int, base: Intervals | None = None) -> None:
        self.shape, self.size, self.room = frames, size, room
        self._flow, estimator, rows = flow, flow.estimator, BRANCHES * size
        make = estimator.input.weight.new_zeros
        self._inputs = make(rows, frames, estimator.input.in_features)
        self.state = make(size, frames, flow.noise.shape[1], dtype=torch.float32)
        self._seen = make(rows, 1, 1, frames + room, dtype=torch.bool).fill_(True)
        self._interval = make(1, dtype=torch.int64)
        if base is None:
            solved = INTERVALS, estimator.count, rows
            self._keys, self.new_keys = (
                make(*solved, 2, estimator.heads, places, estimator.size) for places in (room, kept)
            )
            self.convs = make(*solved, 2 * estimator.width, 2)
        else:
            self._keys, self.convs = base._keys[:, :, :rows], base.convs[:, :, :rows]
            self.new_keys = base.new_keys[:, :, :rows, :, :, :kept]

    def load(self, chunks: Sequence[FlowChunk], means: torch.Tensor, *, last: bool) -> None:
        """Copy what the intervals need of the chunks, and begin with the first."""
        batch, frames, mels = means.shape
        states = [chunk.state for chunk in chunks]
        pasts = [state.keys.shape[5] for state in states]
        inputs = self._inputs[:batch, :, mels:]  # of the other branch they are zero
        speakers = torch.stack([chunk.speaker for chunk in chunks])[:, None].expand(-1, frames, -1)
        torch.cat([means, speakers, torch.zeros_like(means)], 2, out=inputs)
        for row, chunk in zip(inputs, chunks, strict=True):
            if chunk.given is not None:
                row[: len(chunk.given), 2 * mels :] = chunk.given
        valid = torch.tensor([FRAMES * chunk.count if last else frames for chunk in chunks])[:, None]
        places, ends = torch.arange(frames + self.room), frames + torch.tensor(pasts)[:, None]
        seen = moved(torch.where(places < frames, places < valid, places < ends), means.device)
        self._seen.unflatten(0, (BRANCHES, -1))[:, :batch, 0, 0] = seen
        torch.stack([self._flow.noise[past : past + frames] for past in pasts], out=self.state[:batch])
        keys, convs = (part.unflatten(2, (BRANCHES, -1)) for part in (self._keys, self.convs))
        own = [convs[:, :, :, row] for row in range(batch)]
        own += [keys[:, :, :, row, :, :, :past] for row, past in enumerate(pasts)]
        torch._foreach_copy_(own, [state.convs for state in states] + [state.keys for state in states])
        self._interval.zero_()

    def advance(self, blocks: Iterable[Callable[..., Any]] | None = None) -> None:
        """Solve the next interval, by compiled blocks if there are any."""
        flow, interval = self._flow, self._interval
        self._inputs.unflatten(0, (BRANCHES, -1))[..., : self.state.shape[2]] = self.state
        inputs = self._inputs, *flow.modulations, self._keys, self.convs, self._seen, interval
        slopes, new_keys, convs = flow.estimator(*inputs, blocks)
        with_condition, without = slopes.float().unflatten(0, (BRANCHES, -1))
        self.state += flow.durations[interval] * ((1 + GUIDANCE) * with_condition - GUIDANCE * without)
        if self.new_keys.numel():
            self.new_keys.index_copy_(0, interval, new_keys[None])
        self.convs.index_copy_(0, interval, convs[None])
        interval += 1
