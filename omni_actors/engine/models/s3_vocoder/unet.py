"""The flow of CosyVoice 2: the same tokens and conformer, solved by a network of one level with a transformer.

An utterance is computed again from its beginning with every chunk, the recording before it, so its state is its tokens.
While there are more to come, a frame sees to the end of its second; in the last chunk it sees all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.s3_vocoder.flow import (
    BRANCHES,
    FRAMES,
    GUIDANCE,
    INTERVALS,
    LONGEST,
    TIME_PERIOD,
    TIME_SCALE,
    Flow,
    FlowChunk,
    empty_state,
    visible,
)
from omni_actors.engine.models.s3_vocoder.weights import Weights

HEAD_SIZE = 64
SECOND = 25  # tokens


class Tokens(NamedTuple):
    """What an utterance leaves for its next chunk: i64 [n], those of the recording and of all chunks."""

    tokens: torch.Tensor


class _Resnet(nn.Module):
    """Two convolutions, between which the time is added."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.first, self.second = (weights.conv(f"{name}.block{part}.block.0") for part in (1, 2))
        self.norm_first, self.norm_second = (weights.norm(f"{name}.block{part}.block.2") for part in (1, 2))
        self.time, self.around = weights.linear(f"{name}.mlp.1"), weights.conv(f"{name}.res_conv")

    def forward(self, inputs: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = F.mish(self.norm_first(_causal(self.first, inputs))) + self.time(F.mish(time))
        hidden = F.mish(self.norm_second(_causal(self.second, hidden)))
        return hidden + _causal(self.around, inputs)


def _causal(conv: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """As many positions [rows, time, width] as the inputs have; zeros stand for the past."""
    padded = F.pad(inputs.transpose(1, 2), (cast("nn.Conv1d", conv).kernel_size[0] - 1, 0))
    output: torch.Tensor = conv(padded).transpose(1, 2)
    return output


class _UnetLayer(nn.Module):
    """Attention and linear layers."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.norm, self.norm_mlp = weights.norm(f"{name}.norm1"), weights.norm(f"{name}.norm3")
        self.query, self.key, self.value = (weights.linear(f"{name}.attn1.to_{part}") for part in "qkv")
        self.out = weights.linear(f"{name}.attn1.to_out.0")
        self.up, self.down = weights.linear(f"{name}.ff.net.0.proj"), weights.linear(f"{name}.ff.net.2")

    def forward(self, hidden: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        inputs = self.norm(hidden)
        query, key, value = (
            part(inputs).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        output: torch.Tensor = hidden + self.down(F.gelu(self.up(self.norm_mlp(hidden))))
        return output


class _UnetStage(nn.Module):
    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.resnet = _Resnet(weights, f"{name}.0")
        self.layers = nn.ModuleList(
            _UnetLayer(weights, f"{name}.1.{index}") for index in range(weights.count(f"{name}.1."))
        )

    def forward(self, hidden: torch.Tensor, time: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        hidden = self.resnet(hidden, time)
        for layer in self.layers:
            hidden = layer(hidden, seen)
        return hidden


class Unet(nn.Module):
    """The flow's slope at a moment."""

    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.time_in, self.time_out = (weights.linear(f"{name}.time_mlp.linear_{part}") for part in (1, 2))
        self.width = self.time_in.out_features
        middle = range(weights.count(f"{name}.mid_blocks."))
        self.before, self.after = (_UnetStage(weights, f"{name}.{part}_blocks.0") for part in ("down", "up"))
        self.join, self.leave = (weights.conv(f"{name}.{part}_blocks.0.2") for part in ("down", "up"))
        self.middle = nn.ModuleList(_UnetStage(weights, f"{name}.mid_blocks.{index}") for index in middle)
        self.last, self.norm = weights.conv(f"{name}.final_block.block.0"), weights.norm(f"{name}.final_block.block.2")
        self.output = weights.conv(f"{name}.final_proj")

    def time(self, time: float) -> torch.Tensor:
        """[4 width], of a moment."""
        half = self.time_in.in_features // 2
        rates = torch.exp(-math.log(TIME_PERIOD) / (half - 1) * torch.arange(half, device=self.time_in.weight.device))
        angles = time * TIME_SCALE * rates
        moment: torch.Tensor = self.time_out(
            F.silu(self.time_in(torch.cat([angles.sin(), angles.cos()]).to(self.time_in.weight)))
        )
        return moment

    def forward(self, inputs: torch.Tensor, time: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The slope of rows [rows, frames, mels].

        Args:
            inputs: [rows, frames, 4 mels]: state, mean, speaker and what is given.
            seen: bool [rows, 1, frames or 1, frames].
        """
        beside = self.before(inputs, time, seen)
        hidden = _causal(self.join, beside)
        for stage in self.middle:
            hidden = stage(hidden, time, seen)
        hidden = self.after(torch.cat([hidden, beside], 2), time, seen)
        hidden = F.mish(self.norm(_causal(self.last, _causal(self.leave, hidden))))
        return _causal(self.output, hidden)


class UnetFlow(Flow):
    """Tokens to mel frames; see `Flow`.

    Chunks may be of unequal lengths. `FlowChunk.given` are the frames of the recording, and returned are the new ones.
    """

    recomputes = True
    estimator_class = Unet

    def begin(self) -> None:
        """See `Flow`."""
        self._moments = [self.estimator.time(time) for time in self.times[:-1]]
        self._empty = empty_state(self.encoder)
        self.begun = Tokens(torch.zeros(0, dtype=torch.int64, device=self.noise.device))

    def state_bytes(self, state: Tokens, frames: int) -> int:
        """See `Flow`."""
        return LONGEST // FRAMES * state.tokens.itemsize

    def forward(self, chunks: Sequence[FlowChunk], *, last: bool) -> tuple[list[torch.Tensor], list[Tokens]]:
        """See `Flow`."""
        ahead = 0 if last else self.encoder.look_ahead
        joined = [torch.cat([chunk.state[0], chunk.tokens[: chunk.count]]) for chunk in chunks]
        longest, within = max(map(len, joined)), 0 if last else SECOND
        read = [
            replace(
                chunk,
                tokens=F.pad(tokens, (0, longest - len(tokens))),
                count=len(tokens) - ahead,
                ahead=ahead,
                state=self._empty,
            )
            for chunk, tokens in zip(chunks, joined, strict=True)
        ]
        means, _ = self.encoder(read, last=True, within=within)
        batch, frames, _ = means.shape
        ends = [FRAMES * chunk.count for chunk in read]
        valid = torch.arange(frames, device=means.device) < torch.tensor(ends, device=means.device)[:, None]
        seen = visible(valid, FRAMES * within)[:, None].repeat(BRANCHES, 1, 1, 1)
        given = [F.pad(cast("torch.Tensor", chunk.given), (0, 0, 0, frames))[:frames] for chunk in chunks]
        speakers = torch.stack([chunk.speaker for chunk in chunks])[:, None].expand(-1, frames, -1)
        fixed = torch.cat([means, speakers, torch.stack(given).to(means)], 2)
        fixed = torch.cat([fixed, torch.zeros_like(fixed)])
        state = self.noise[:frames].expand(batch, -1, -1)
        for interval in range(INTERVALS):
            inputs = torch.cat([state.to(fixed).repeat(BRANCHES, 1, 1), fixed], 2)
            with_condition, without = self.estimator(inputs, self._moments[interval], seen).float().split(batch)
            slope = (1 + GUIDANCE) * with_condition - GUIDANCE * without
            state = state + (self.times[interval + 1] - self.times[interval]) * slope
        begins = [FRAMES * len(chunk.state[0]) for chunk in chunks]
        mels = [mel[begin:end] for mel, begin, end in zip(state, begins, ends, strict=True)]
        return mels, [Tokens(tokens[: len(tokens) - ahead]) for tokens in joined]

    def capture(self, sizes: Sequence[int], lengths: Sequence[int], room: int) -> None:
        """Nothing: utterances of all lengths would need graphs of their own."""
