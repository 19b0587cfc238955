"""Qwen-Image's diffusion transformer: its network, the prefix that steps share, and its published weights.

A sequence is a prompt, the pictures that it refers to in the places where it does, and then the picture that is made;
guidance makes two sequences of one picture. All before the picture that is made, the prefix, sees only what comes
before it, and has one modulation at any moment. So its keys and values are the same in every step: they are computed
once per request, part by part, and a step computes the tokens of the pictures that are made, which see their whole
sequence. Torch only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.diffusers_layout import COMMON_NAMES, Names, PartConfig, fused
from omni_actors.engine.models.diffusion_layers import (
    LayerWeights,
    MomentEmbedding,
    add_and_norm,
    gate,
    grid,
    take_heads,
)
from omni_actors.engine.models.pictures.denoising import PackedNetwork, Packing, Size, pack
from omni_actors.engine.rows import moved
from omni_actors.errors import EngineError

NAMES = Names(
    parts={
        **fused(".qkv.", ".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
        **fused(".up.", ".img_mlp.gate_layer.", ".img_mlp.proj."),
    },
    patterns=(
        (r"^img_in\.", "embed."),
        (r"^modulation\.1\.", "modulation."),
        (r"^txt_in\.text_norm\.", "text_norm."),
        (r"^txt_in\.in_layer\.", "text_in."),
        (r"^txt_in\.out_layer\.", "text_out."),
        (r"\.img_mlp\.out\.", ".down."),
        *COMMON_NAMES,
    ),
)


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a condition that are of one kind.

    Args:
        begin: its first token.
        end: the token after its last.
        reach: the position of its first token along the first axis; a picture has all of its tokens there.
        text: whether it is a text; else it is a picture.
        given: the hidden states of a text [tokens, text_width], or the latents of a picture [channels, height, width].
    """

    begin: int
    end: int
    reach: int
    text: bool
    given: torch.Tensor

    def within(self, begin: int, end: int) -> Run:
        """The part of a text between two tokens of the condition."""
        if not self.text:
            return self
        first, last = max(begin, self.begin), min(end, self.end)
        own = self.given[first - self.begin : last - self.begin]
        return Run(first, last, self.reach + first - self.begin, True, own)


class Prefix:
    """A prompt with the pictures it refers to, and the keys and values that it contributes to every step.

    Args:
        states: hidden states of its text [tokens, text_width], on the CPU.
        lengths: tokens of the text before each picture, and after the last one; without pictures, all of it.
        references: latents of the pictures, f32 [channels, height, width] each, on the CPU.

    Attributes:
        done: how many of its tokens are computed.
        kept: their keys and values, [layers, 2, tokens, heads, head_width] on the device; None before the first.
    """

    def __init__(
        self, states: torch.Tensor, lengths: Sequence[int] = (), references: Sequence[torch.Tensor] = ()
    ) -> None:
        self.states, self.references = states, tuple(references)
        self.lengths = tuple(lengths) or (len(states),)
        self.done = 0
        self.kept: torch.Tensor | None = None

    def __len__(self) -> int:
        """Tokens of the whole prefix."""
        return len(self.states) + sum(one[0].numel() for one in self.references)

    @property
    def reach(self) -> int:
        """Positions along the first axis that it takes: a picture as many as its longer edge."""
        return len(self.states) + sum(max(one.shape[1:]) for one in self.references)

    def runs(self) -> Iterator[Run]:
        """Its texts, where they are not empty, and its pictures, in their order."""
        begin = reach = 0
        for index, text in enumerate(self.states.split(self.lengths)):
            if len(text):
                yield Run(begin, begin + len(text), reach, True, text)
                begin, reach = begin + len(text), reach + len(text)
            if index < len(self.references):
                latents = self.references[index]
                yield Run(begin, begin + latents[0].numel(), reach, False, latents)
                begin, reach = begin + latents[0].numel(), reach + max(latents.shape[1:])

    def until(self, end: int) -> list[Run]:
        """The runs, or parts of them, from the first token that is not computed to this one."""
        return [run.within(self.done, end) for run in self.runs() if run.begin < end and run.end > self.done]

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [tokens, heads, head_width]. The prefix has been computed."""
        if self.kept is None:
            raise EngineError("A prefix was used before it was computed.")
        keys, values = self.kept[layer]
        return keys, values

    def free(self) -> None:
        """Free what is kept; it would have to be computed again."""
        self.done, self.kept = 0, None


Part: TypeAlias = Sequence[tuple[Prefix, int]]
"""What is computed at a time: prefixes, each with the token up to which it is computed then."""


def parts(prefixes: Sequence[Prefix], most: int) -> list[tuple[Part, int]]:
    """Cut prefixes into parts, and count the tokens of each.

    A token of a picture sees all of it, so no picture is cut; a text is cut anywhere.

    Args:
        most: tokens of a part, except for one of a single larger picture.
    """
    found: list[tuple[dict[Prefix, int], int]] = [({}, 0)]
    for prefix in prefixes:
        for run in prefix.runs():
            longest = most if run.text else run.end - run.begin
            for begin in range(run.begin, run.end, longest):
                end = min(begin + longest, run.end)
                ends, tokens = found[-1]
                if tokens and tokens + end - begin > most:
                    ends, tokens = {}, 0
                    found.append((ends, 0))
                ends[prefix] = end
                found[-1] = ends, tokens + end - begin
    return [(tuple(ends.items()), tokens) for ends, tokens in found]


TIME_SCALE = 1000.0


@dataclass(frozen=True)
class QwenImageBatch:
    """Where everything lies in a batch of sequences; the same for as long as the sequences are the same.

    Args:
        prefixes: of the sequences.
        pictures: packing of the pictures.
        sequences: packing of prefixes and pictures.
        rotation: f32 [tokens of the pictures, 2, head_width].
        slots: i64 [tokens of the pictures]; their places in the sequences.
        keys: of whole sequences, [tokens, heads, head_width], of one layer after the other; so are `values`.
    """

    prefixes: Sequence[Prefix]
    pictures: Packing
    sequences: Packing
    rotation: torch.Tensor
    slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def take_prefixes(self, layer: int) -> None:
        """Put the prefixes' keys and values of a layer before those of their pictures."""
        places, kept = [], []
        for prefix, own, end in zip(
            self.prefixes, self.pictures.lengths, itertools.accumulate(self.sequences.lengths), strict=True
        ):
            for whole, part in zip((self.keys, self.values), prefix.of_layer(layer), strict=True):
                places.append(whole[end - own - len(prefix) : end - own])
                kept.append(part)
        torch._foreach_copy_(places, kept)  # one launch for all


class _TextNorm(nn.Module):
    """A norm whose weight is kept less one. In bfloat16 one more than it could not be kept exactly."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(tokens.float(), self.weight.shape, self.weight.float() + 1.0, self.eps).to(tokens.dtype)


class _Factors(NamedTuple):
    """How all layers scale normed tokens and gate what they add to them; each [sequences, width].

    Args:
        scale: before attention, as `gate` is after it.
        scale_up: before the wider layer, as `gate_up` is after it.
    """

    scale: torch.Tensor
    gate: torch.Tensor
    scale_up: torch.Tensor
    gate_up: torch.Tensor


class QwenImageNetwork(PackedNetwork):
    """The network: predicts the velocity of latents, from noise at moment 1 to a picture at moment 0."""

    model, names = "Qwen-Image", NAMES

    def __init__(self, given: Mapping[str, Any]) -> None:
        config = PartConfig("transformer", given, "QwenImage21Transformer2DModel")
        config.expect(patch_size=1, causal_condition=True, out_channels=config["in_channels"])
        heads = config["num_attention_heads"], config["attention_head_dim"]
        width = heads[0] * heads[1]
        turns = {"axes": config["axes_dims_rope"], "theta": 10_000.0, "dtype": torch.float32}
        super().__init__(config["in_channels"], width, config["context_in_dim"], turns)
        self.heads: tuple[int, int] = heads  # how many, and the width of each
        self.eps = config["eps"]
        self.fused = False
        self.embed = nn.Linear(self.channels, width, bias=False)
        self.layers = nn.ModuleList(
            LayerWeights(width, self.heads[0], config["mlp_ratio"] * width, self.eps)
            for _ in range(config["num_layers"])
        )
        self.moment = MomentEmbedding(width, width, TIME_SCALE, bias=False)
        self.modulation = nn.Linear(width, 4 * width, bias=False)
        self.text_norm = _TextNorm(self.text_width, self.eps)
        self.text_in = nn.Linear(self.text_width, width, bias=False)
        self.text_out = nn.Linear(width, width, bias=False)
        self.final_modulation = nn.Linear(width, width, bias=False)
        self.final = nn.Linear(width, self.channels, bias=False)

    @property
    def prefix_width(self) -> int:
        """Values that are kept of a token of a prefix: its keys and values in every layer."""
        return 2 * len(self.layers) * self.width

    def compile(self, **options: Any) -> None:
        """Compute what is between the products in few kernels, which take heads of a power of two."""
        super().compile(**options)
        self.fused = self.heads[1].bit_count() == 1

    @torch.inference_mode()
    def condition(self, given: Sequence[Prefix]) -> list[Prefix]:
        """Compute what is left of the prefixes."""
        for prefix in given:
            self.extend(prefix, len(prefix))
        return list(given)

    @torch.inference_mode()
    def extend(self, prefix: Prefix, end: int) -> None:
        """Compute the tokens of a prefix up to this one. If it fails, as many of them are done as before."""
        runs = prefix.until(end)
        if not runs:
            return
        if prefix.kept is None:
            shape = (len(self.layers), 2, len(prefix), *self.heads)
            prefix.kept = torch.empty(shape, dtype=self.dtype, device=self.device)
        tokens = torch.cat([self._embedded(run) for run in runs])
        rotation = self.rotation(torch.cat([_positions(run) for run in runs]))
        owner = torch.zeros(len(tokens), dtype=torch.int64, device=self.device)
        slots = torch.arange(prefix.done, end, device=self.device)
        factors = self._factors(self._moment(torch.zeros(1, device=self.device)))
        tokens, normed = self._normed(tokens, None, factors.scale, factors.scale, owner)
        for layer, block in enumerate(self.layers):
            keys, values = prefix.of_layer(layer)
            query = self._heads(block, normed, rotation, slots, keys, values)
            if layer < len(self.layers) - 1:  # nothing reads what the last layer makes of a prefix
                attended = _attend_backwards(query, keys, values, runs)
                tokens, normed = self._after(block, tokens, attended, factors, factors.scale, owner)
        prefix.done = end

    def _embedded(self, run: Run) -> torch.Tensor:
        """The tokens of a run, [tokens, width]."""
        own = run.given if run.text else self.patches_of(run.given)
        own = moved(own, self.device).to(self.dtype)
        embedded: torch.Tensor = (
            self.text_out(F.gelu(self.text_in(self.text_norm(own)), approximate="tanh"))
            if run.text
            else self.embed(own)
        )
        return embedded

    def lay_out(self, pictures: Sequence[Size], conditions: Sequence[Prefix]) -> QwenImageBatch:
        """The batch of sequences with these pictures and these prefixes."""
        lengths = [height * width for height, width in pictures]
        positions = [_grid(*size, prefix.reach) for size, prefix in zip(pictures, conditions, strict=True)]
        whole = [len(prefix) + length for prefix, length in zip(conditions, lengths, strict=True)]
        slots = [
            torch.arange(end - length, end) for length, end in zip(lengths, itertools.accumulate(whole), strict=True)
        ]
        shape = (sum(whole), *self.heads)
        return QwenImageBatch(
            prefixes=tuple(conditions),
            pictures=pack(lengths, self.device),
            sequences=pack(whole, self.device),
            rotation=self.rotation(torch.cat(positions)),
            slots=moved(torch.cat(slots), self.device),
            keys=torch.empty(shape, dtype=self.dtype, device=self.device),
            values=torch.empty(shape, dtype=self.dtype, device=self.device),
        )

    def forward(self, patches: torch.Tensor, moments: torch.Tensor, batch: QwenImageBatch) -> torch.Tensor:
        """The velocity towards the picture.

        Args:
            patches: [tokens, channels], the sequences' pictures one after the other.
            moments: f32 [sequences], the shares of noise.
            batch: of these sequences.

        Returns:
            [tokens, channels]
        """
        moment = self._moment(moments)
        factors, owner = self._factors(moment), batch.pictures.owner
        last = 1.0 + self.final_modulation(F.silu(moment))
        tokens = self.embed(patches.to(self.dtype))
        tokens, normed = self._normed(tokens, None, factors.scale, factors.scale, owner)
        for layer, block in enumerate(self.layers, 1):
            batch.take_prefixes(layer - 1)
            query = self._heads(block, normed, batch.rotation, batch.slots, batch.keys, batch.values)
            attended = self.attend(query, batch.keys, batch.values, batch.pictures, batch.sequences)
            following = factors.scale if layer < len(self.layers) else last
            tokens, normed = self._after(block, tokens, attended, factors, following, owner)
        velocity: torch.Tensor = -self.final(normed)
        return velocity

    def _heads(self, block: Any, normed: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        """A layer's queries; its keys and values go to their slots. For the places see `take_heads`."""
        return take_heads(block.qkv(normed), block.norm_q, block.norm_k, *where, fused=self.fused)

    def _normed(
        self, tokens: torch.Tensor, branch: torch.Tensor | None, *factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `add_and_norm`; the factors are gates, scales and the sequences that they are of."""
        return add_and_norm(tokens, branch, *factors, eps=self.eps, fused=self.fused)

    def _after(
        self,
        block: Any,
        tokens: torch.Tensor,
        attended: torch.Tensor,
        factors: _Factors,
        following: torch.Tensor,
        owner: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's output from what attention gave, and its norm scaled by `following`, with which the next begins."""
        tokens, normed = self._normed(tokens, block.out(attended.flatten(1)), factors.gate, factors.scale_up, owner)
        branch = block.down(gate(block.up(normed), fused=self.fused))
        return self._normed(tokens, branch, factors.gate_up, following, owner)

    def _moment(self, moments: torch.Tensor) -> torch.Tensor:
        """[n, width]. The moments are rounded as diffusers rounds them, in the type of the weights."""
        rounded = (moments * TIME_SCALE).to(self.dtype) / TIME_SCALE
        moment: torch.Tensor = self.moment(rounded.float())
        return moment

    def _factors(self, moment: torch.Tensor) -> _Factors:
        scale, gates, scale_up, gates_up = self.modulation(F.silu(moment)).chunk(4, -1)
        return _Factors(1.0 + scale, gates.tanh(), 1.0 + scale_up, gates_up.tanh())


def _grid(height: int, width: int, frame: int) -> torch.Tensor:
    """Positions i64 [tokens, 3] of a picture: all at one point of time, and around the middle of the picture."""
    middle = torch.tensor([0, height - height // 2, width - width // 2])
    return grid(height, width, frame) - middle


def _positions(run: Run) -> torch.Tensor:
    """Positions i64 [tokens, 3] of a run."""
    if not run.text:
        _, height, width = run.given.shape
        return _grid(height, width, run.reach)
    return torch.arange(run.reach, run.reach + run.end - run.begin)[:, None].expand(-1, 3)


def _attend_backwards(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """Attention of the last runs of a prefix: a token sees all before it, and in a picture the whole picture.

    Args:
        query: of these runs, [tokens, heads, head_width].
        key: of the whole prefix, so is `value`; of those after the runs nothing is read.
    """
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    parts, first = [], runs[0].begin
    for run in runs:
        mask = None
        if run.text and run.begin:
            mask = torch.ones(run.end - run.begin, run.end, dtype=torch.bool, device=query.device).tril(run.begin)
        own = query[:, :, run.begin - first : run.end - first]
        parts.append(
            F.scaled_dot_product_attention(
                own, key[:, :, : run.end], value[:, :, : run.end], attn_mask=mask, is_causal=run.text and not run.begin
            )
        )
    return torch.cat(parts, 2)[0].transpose(0, 1)
