"""Tokens to mel frames, two each: a conformer encodes the tokens, a transformer with convolutions solves the flow.

A chunk sees all of itself and what is kept of the past: of the conformer the first positions (those of the recording
whose voice is spoken) and the last `HISTORY` frames; of the transformer, whose newest frames come first, the newest as
many as the recording has, and the last `HISTORY` of the rest. So does the package whose weights these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.s3_vocoder.weights import Weights

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
        self, hidden: torch.Tensor, pasts: Sequence[torch.Tensor], valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a chunk, and its keys [batch, layers, 2, heads, time, head size].

        Args:
            pasts: `FlowState.token_keys` or `frame_keys` of each.
            valid: bool [batch, time or 1, time], what each position sees of the chunk.
        """
        most, (_, count, width) = max(past.shape[3] for past in pasts), hidden.shape
        # At the right end, so that distances do not depend on how long the past is.
        joined = torch.stack([F.pad(past, (0, 0, most - past.shape[3], 0)) for past in pasts])
        before = torch.arange(most, 0, -1, device=hidden.device)
        lengths = torch.tensor([past.shape[3] for past in pasts], device=hidden.device)
        seen = torch.cat([(before <= lengths[:, None])[:, None].expand(-1, valid.shape[1], -1), valid], 2)[:, None]
        distances = _sinusoids(torch.arange(most + count - 1, -count, -1, device=hidden.device), width).to(hidden.dtype)
        keys = []
        for index, layer in enumerate(self.layers):
            hidden, new = layer(hidden, joined[:, index], distances, seen)
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

    def forward(
        self, chunks: Sequence[FlowChunk], *, last: bool, within: int = 0
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """[batch, frames, mels], and of the first four parts of the states those of these chunks alone.

        Args:
            within: see `visible`, in tokens; for chunks that begin utterances.
        """
        inputs = torch.stack([chunk.tokens for chunk in chunks])
        counts = torch.tensor([chunk.count for chunk in chunks], device=inputs.device)
        embedded = self.tokens.embed(self.table[inputs])
        read = counts + torch.tensor([chunk.ahead for chunk in chunks], device=inputs.device)
        embedded = embedded * (torch.arange(inputs.shape[1], device=inputs.device) < read[:, None])[..., None]
        if last:
            embedded = F.pad(embedded, (0, 0, 0, self.look_ahead))
        seen_ahead = F.leaky_relu(self.ahead(embedded.transpose(1, 2)))
        token_conv = torch.cat([torch.stack([chunk.state.token_conv for chunk in chunks]), seen_ahead], 2)
        hidden = self.behind(token_conv).transpose(1, 2) + embedded[:, : seen_ahead.shape[2]]
        valid = torch.arange(hidden.shape[1], device=inputs.device) < (counts[:, None] if last else hidden.shape[1])
        valid = valid.expand(len(chunks), -1)
        pasts = [chunk.state.token_keys for chunk in chunks]
        hidden, token_keys = self.tokens(hidden, pasts, visible(valid, within))
        wide = hidden.transpose(1, 2).repeat_interleave(FRAMES, 2)
        frame_conv = torch.cat([torch.stack([chunk.state.frame_conv for chunk in chunks]), wide], 2)
        hidden = self.frames.embed(self.widening(frame_conv).transpose(1, 2))
        valid, pasts = valid.repeat_interleave(FRAMES, 1), [chunk.state.frame_keys for chunk in chunks]
        hidden, frame_keys = self.frames(hidden, pasts, visible(valid, FRAMES * within))
        left = (token_conv[..., -2:], frame_conv[..., -2 * FRAMES :], token_keys, frame_keys)
        return self.project(self.norm(hidden)), left


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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
        blocks: Iterable[Callable[..., Any]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The slope of rows [rows, frames, mels], and what they leave: keys and convolutions.

        Args:
            inputs: [rows, frames, 4 mels]: state, mean, speaker and what is given.
            past: [blocks, rows, 2, heads, past frames, head size].
            convs: [blocks, rows, 2 width, 2].
            seen: bool [rows, 1, 1, frames + past frames].
            blocks: compiled ones, if there are any.
        """
        hidden, keys, left = self.input(inputs), [], []
        for index, block in enumerate(self.blocks if blocks is None else blocks):
            hidden, new, conv = block(hidden, modulation[index], past[index], convs[index], seen)
            keys.append(new)
            left.append(conv)
        return self.output(_modulated(hidden, *final)), torch.stack(keys), torch.stack(left)


def noise_table(mels: int, seed: int) -> torch.Tensor:
    """The noise that all utterances begin with, f32 [frames, mels], whatever the type of the weights."""
    return torch.randn(LONGEST, mels, generator=torch.Generator().manual_seed(seed))


def interval_times() -> list[float]:
    """When the solver's intervals begin, and the last one ends."""
    times: list[float] = (1 - torch.cos(torch.linspace(0, 1, INTERVALS + 1) * 0.5 * torch.pi)).tolist()
    return times


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
        width: of a frame.
    """

    recomputes = False

    def __init__(self, weights: Weights, seed: int) -> None:
        super().__init__()
        self.encoder = TokenEncoder(weights)
        self.estimator = Estimator(weights, "decoder.estimator")
        self.speaker = weights.linear("spk_embed_affine_layer")
        weights.done()
        self.width = self.estimator.width
        self.noise, self.times = noise_table(self.speaker.out_features, seed), interval_times()
        self._steps: list[Interval] = []

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to the device; compute what the time alone decides, and the state of an utterance that begins."""
        self.to(device, dtype)
        self.noise = self.noise.to(device)
        self.modulations = [self.estimator.modulations(time) for time in self.times[:-1]]
        make, estimator = self.speaker.weight.new_zeros, self.estimator
        solved = INTERVALS, estimator.count, BRANCHES
        self.begun = empty_state(self.encoder)._replace(
            convs=make(*solved, 2 * estimator.width, 2), keys=make(*solved, 2, estimator.heads, 0, estimator.size)
        )

    def state_bytes(self, state: FlowState, frames: int) -> int:
        """Bytes that an utterance keeps at most, if this is its state after a recording of so many frames."""
        size = sum(part.nbytes for part in state)
        return size + size * HISTORY // frames

    def forward(self, chunks: Sequence[FlowChunk], *, last: bool) -> tuple[torch.Tensor, list[FlowState]]:
        """Decode the next tokens of utterances.

        Args:
            chunks: of equal length, look-ahead included.
            last: whether they are the utterances' last. If not, the look-ahead is not decoded.

        Returns:
            f32 mel frames [batch, frames, mels], and the states after them; none if they are the last.
        """
        means, left = self.encoder(chunks, last=last)
        batch, frames, mels = means.shape
        pasts = [chunk.state.keys.shape[5] for chunk in chunks]
        given = [means.new_zeros(0, mels) if chunk.given is None else chunk.given.to(means) for chunk in chunks]
        fixed = [
            means,
            torch.stack([chunk.speaker for chunk in chunks])[:, None].expand(-1, frames, -1),
            torch.stack([F.pad(each, (0, 0, 0, frames - len(each))) for each in given]),
        ]
        step = self._interval(batch, frames, max(pasts))
        inputs, seen = (part.unflatten(0, (BRANCHES, -1)) for part in (step.inputs, step.seen))
        inputs[0, :batch, :, mels:].copy_(torch.cat(fixed, 2))  # of the other branch they are zero
        valid = torch.tensor([FRAMES * chunk.count if last else frames for chunk in chunks], device=means.device)
        places = torch.arange(frames + step.room, device=means.device)
        kept = torch.tensor(pasts, device=means.device)[:, None]
        seen[:, :batch, 0, 0].copy_(torch.where(places < frames, places < valid[:, None], places < frames + kept))
        state = torch.stack([self.noise[past : past + frames] for past in pasts])
        made: list[list[torch.Tensor]] = [[], []]  # keys and convolutions of all intervals
        for interval in range(INTERVALS):
            inputs[:, :batch, :, :mels].copy_(state)
            step.load(self.modulations[interval], [chunk.state for chunk in chunks], interval)
            slopes, *new_parts = step.run()
            with_condition, without = slopes.float().unflatten(0, (BRANCHES, -1))[:, :batch]
            slope = (1 + GUIDANCE) * with_condition - GUIDANCE * without
            state = state + (self.times[interval + 1] - self.times[interval]) * slope
            if not last:
                for every, new in zip(made, new_parts, strict=True):
                    every.append(new.unflatten(1, (BRANCHES, -1))[:, :, :batch].clone())
        if last:
            return state, []
        keys, convs = map(torch.stack, made)
        return state, [self._state(index, chunk, left, keys, convs) for index, chunk in enumerate(chunks)]

    def _interval(self, batch: int, frames: int, room: int) -> Interval:
        """The smallest of those that there are that takes the batch, or one of its own."""
        fitting = (step for step in self._steps if step.frames == frames and step.size >= batch and step.room >= room)
        return min(fitting, key=lambda step: step.size, default=None) or Interval(self.estimator, batch, frames, room)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], lengths: Sequence[int], room: int) -> None:
        """Make room for batches of these sizes, chunks of these frames and `room` past frames; on CUDA as graphs."""
        graphs: CudaGraphs[Interval, Results] = CudaGraphs()
        past = None
        # Equal blocks share their code, for any size. It is for graphs alone, or a request could wait for a compiler.
        blocks = [torch.compile(block, dynamic=True) for block in self.estimator.blocks]
        for size in sorted(sizes, reverse=True):  # the largest first: the others use its memory
            for frames in sorted(lengths, reverse=True):
                step = Interval(self.estimator, size, frames, room, past)
                past = step.past if past is None else past
                if self.noise.is_cuda:
                    step.capture(graphs, blocks)
                self._steps.append(step)

    def _state(
        self, index: int, chunk: FlowChunk, left: Sequence[torch.Tensor], keys: torch.Tensor, convs: torch.Tensor
    ) -> FlowState:
        token_conv, frame_conv, token_keys, frame_keys = (part[index] for part in left)
        before, frames = chunk.state, chunk.prompt_frames
        return FlowState(
            token_conv.clone(),
            frame_conv.clone(),
            joined([before.token_keys, token_keys], 3, frames // FRAMES, HISTORY // FRAMES),
            joined([before.frame_keys, frame_keys], 3, frames, HISTORY),
            convs[:, :, :, index].clone(),
            joined([keys[:, :, :, index], before.keys], 5, frames, HISTORY),
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


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Interval:
    """An interval of the solver: its inputs in memory of their own, and its computation, captured or not.

    Args:
        size: utterances. Each has a row with its condition, and `size` rows later one without.
        room: past frames.
        past: memory for at least so many utterances.
    """

    def __init__(
        self, estimator: Estimator, size: int, frames: int, room: int, past: torch.Tensor | None = None
    ) -> None:
        self.size, self.frames, self.room = size, frames, room
        self._estimator = estimator
        make, count, width, rows = estimator.input.weight.new_zeros, estimator.count, estimator.width, BRANCHES * size
        self.inputs = make(rows, frames, estimator.input.in_features)
        self.past = make(count, rows, 2, estimator.heads, room, estimator.size) if past is None else past[:, :rows]
        self._convs = make(count, rows, 2 * width, 2)
        self.seen = make(rows, 1, 1, frames + room).bool()
        self._modulations = make(count, 9, width), make(2, width)
        self._graphs: CudaGraphs[Interval, Results] | None = None  # with one of this computation

    def load(self, modulations: Sequence[torch.Tensor], states: Sequence[FlowState], interval: int) -> None:
        """Copy what the interval needs: what its time does, and the past of the utterances."""
        for own, modulation in zip(self._modulations, modulations, strict=True):
            own.copy_(modulation)
        rows = [slice(index, None, self.size) for index in range(len(states))]
        own_parts = [self._convs[:, row] for row in rows]
        own_parts += [self.past[:, row, :, :, : state.keys.shape[5]] for row, state in zip(rows, states, strict=True)]
        parts = [state.convs[interval] for state in states] + [state.keys[interval] for state in states]
        torch._foreach_copy_(own_parts, parts)

    def run(self) -> Results:
        """See `Estimator.forward`; the next run writes over the results."""
        return self._compute() if self._graphs is None else self._graphs.replay(self)

    def _compute(self, blocks: Iterable[Callable[..., Any]] | None = None) -> Results:
        slope, keys, convs = self._estimator(self.inputs, *self._modulations, self.past, self._convs, self.seen, blocks)
        return slope, keys, convs

    def capture(self, graphs: CudaGraphs[Interval, Results], blocks: Iterable[Callable[..., Any]]) -> None:
        """Capture the computation by these blocks. Needs CUDA."""
        self.seen.fill_(True)
        graphs.capture(self, partial(self._compute, blocks))
        self._graphs = graphs
