"""FLUX.2's diffusion transformer, and its published weights.

A sequence is a prompt, the picture that is made, and the pictures that the prompt refers to; guidance makes two
sequences of one picture. The first layers have weights of their own for prompts, which the others do not: until then
prompts and pictures lie apart, and meet for attention only. Torch only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.diffusers_layout import COMMON_NAMES, Names, PartConfig, fused
from omni_actors.engine.models.diffusion_layers import AdaptedLinear, LayerWeights, MomentEmbedding, gate, grid, turned
from omni_actors.engine.models.pictures.denoising import PackedNetwork, Packing, Size, interleaved, pack
from omni_actors.engine.rows import moved

NAMES = Names(
    parts={
        **fused(".picture.qkv.", ".attn.to_q.", ".attn.to_k.", ".attn.to_v."),
        **fused(".text.qkv.", ".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."),
    },
    patterns=(
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj\.", r"single_layers.\1.qkv_up."),
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_out\.", r"single_layers.\1.out_down."),
        (r"^single_transformer_blocks\.(\d+)\.attn\.", r"single_layers.\1."),
        (r"\.attn\.to_out\.0\.", ".picture.out."),
        (r"\.attn\.to_add_out\.", ".text.out."),
        (r"\.attn\.(norm_[qk])\.", r".picture.\1."),
        (r"\.attn\.norm_added_([qk])\.", r".text.norm_\1."),
        (r"\.ff\.linear_in\.", ".picture.up."),
        (r"\.ff\.linear_out\.", ".picture.down."),
        (r"\.ff_context\.linear_in\.", ".text.up."),
        (r"\.ff_context\.linear_out\.", ".text.down."),
        (r"^double_stream_modulation_img\.linear\.", "picture_modulation."),
        (r"^double_stream_modulation_txt\.linear\.", "text_modulation."),
        (r"^single_stream_modulation\.linear\.", "single_modulation."),
        (r"^x_embedder\.", "embed."),
        (r"^context_embedder\.", "text_in."),
        *COMMON_NAMES,
    ),
)
TIME_SCALE = 1000.0
REFERENCE_DISTANCE = 10  # positions along the first axis from one picture of a sequence to the next


@dataclass(frozen=True)
class Flux2Condition:
    """The states f32 [tokens, text_width] of a prompt, and latents of pictures that it refers to, on the CPU."""

    states: torch.Tensor
    references: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        """Tokens of a sequence, besides those of the picture that is made."""
        return len(self.states) + sum(one[0].numel() for one in self.references)


@dataclass(frozen=True)
class EncodedCondition:
    """What a condition contributes to every step of its request.

    Args:
        text: [tokens, width]; so are `references`.
        text_rotation: f32 [tokens, 2, head_dim]; so is `reference_rotation`.
    """

    text: torch.Tensor
    text_rotation: torch.Tensor
    references: torch.Tensor
    reference_rotation: torch.Tensor


class Where(NamedTuple):
    """Where tokens are, and what else of each a layer has to know.

    Args:
        rotation: f32 [tokens, 2, head_dim].
        owner: i64 [tokens]; the sequence of each.
        chosen: its adapters, as `AdaptedLinear` takes them.
    """

    rotation: torch.Tensor
    owner: torch.Tensor
    chosen: torch.Tensor | None = None

    def adapted(self, chosen: torch.Tensor | None) -> Where:
        """With the adapters of the sequences."""
        return self if chosen is None else self._replace(chosen=chosen[self.owner])


@dataclass(frozen=True)
class Flux2Batch:
    """Where everything lies in a batch of sequences; the same for as long as the sequences are the same.

    Apart, there are the prompts, and then the pictures that are made with those that they are made from behind them.

    Args:
        texts: [tokens of prompts, width].
        references: [tokens, width].
        of_texts: where the tokens of prompts are; `of_pictures` likewise.
        sequences: packing of the sequences of prompt, picture and references.
        of_all: where their tokens are.
        order: i64 [tokens of sequences]; the place of each while they lie apart. `apart` is the inverse.
        made: tokens of the pictures that are made.
    """

    texts: torch.Tensor
    references: torch.Tensor
    of_texts: Where
    of_pictures: Where
    sequences: Packing
    of_all: Where
    order: torch.Tensor
    apart: torch.Tensor
    made: int


def modulated(
    tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, owner: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normed tokens [tokens, width], scaled and shifted by their sequences' rows [sequences, width]."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=eps) * (1.0 + scale)[owner] + shift[owner]


class Flux2Stream(LayerWeights):
    """What a layer computes of prompts, or of pictures; `factors` [sequences, 6 * width] are those of its layers."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float) -> None:
        super().__init__(width, heads, hidden, eps)
        self.eps = eps

    def before(
        self, tokens: torch.Tensor, factors: torch.Tensor, where: Where
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [tokens, heads, head_dim]."""
        shift, scale = factors.chunk(6, -1)[:2]
        return self.turned(modulated(tokens, shift, scale, where.owner, self.eps), where.rotation, where.chosen)

    def after(self, tokens: torch.Tensor, attended: torch.Tensor, factors: torch.Tensor, where: Where) -> torch.Tensor:
        """The layer's output from what attention gave, [tokens, heads, head_dim]."""
        _, _, gates, shift, scale, gates_up = factors.chunk(6, -1)
        tokens = tokens + gates[where.owner] * self.out(attended.flatten(1), where.chosen)
        inner = modulated(tokens, shift, scale, where.owner, self.eps)
        return tokens + gates_up[where.owner] * self.gated(inner, where.chosen)


class Flux2DoubleBlock(nn.Module):
    """The two streams of a layer."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__()
        self.text, self.picture = Flux2Stream(*sizes), Flux2Stream(*sizes)


class Flux2SingleBlock(nn.Module):
    """A layer of whole sequences, with attention beside the gated layer; `factors` are [sequences, 3 * width]."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.qkv_up = AdaptedLinear(width, 3 * width + 2 * hidden)
        self.norm_q, self.norm_k = (nn.RMSNorm(width // heads, eps) for _ in range(2))
        self.out_down = AdaptedLinear(width + hidden, width)

    def before(
        self, tokens: torch.Tensor, factors: torch.Tensor, where: Where
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [tokens, heads, head_dim], and the inside of the gated layer."""
        shift, scale, _ = factors.chunk(3, -1)
        product = self.qkv_up(modulated(tokens, shift, scale, where.owner, self.eps), where.chosen)
        qkv, inner = product[:, : 3 * tokens.shape[-1]], product[:, 3 * tokens.shape[-1] :]
        return *turned(qkv, self.heads, self.norm_q, self.norm_k, where.rotation), gate(inner)

    def after(
        self, tokens: torch.Tensor, attended: torch.Tensor, inner: torch.Tensor, factors: torch.Tensor, where: Where
    ) -> torch.Tensor:
        """The layer's output from what attention gave, [tokens, heads, head_dim], and the inside."""
        gates = factors.chunk(3, -1)[2]
        branch: torch.Tensor = self.out_down(torch.cat((attended.flatten(1), inner), -1), where.chosen)
        return tokens + gates[where.owner] * branch


class Flux2Network(PackedNetwork):
    """The network: predicts the velocity of latents, from noise at moment 1 to a picture at moment 0."""

    model, names = "FLUX.2", NAMES

    def __init__(self, given: Mapping[str, Any]) -> None:
        config = PartConfig("transformer", given, "Flux2Transformer2DModel")
        config.expect(patch_size=1, guidance_embeds=False, timestep_guidance_channels=256, out_channels=None)
        axes, heads = config["axes_dims_rope"], config["num_attention_heads"]
        config.expect(attention_head_dim=sum(axes))
        width = heads * sum(axes)
        turns = {"axes": axes, "theta": config["rope_theta"], "rounded": False}
        super().__init__(config["in_channels"], width, config["joint_attention_dim"], turns)
        self.eps = config["eps"]
        sizes = width, heads, int(width * config["mlp_ratio"]), self.eps
        self.embed = nn.Linear(self.channels, width, bias=False)
        self.text_in = nn.Linear(self.text_width, width, bias=False)
        self.layers: Any = nn.ModuleList(Flux2DoubleBlock(*sizes) for _ in range(config["num_layers"]))
        self.single_layers: Any = nn.ModuleList(Flux2SingleBlock(*sizes) for _ in range(config["num_single_layers"]))
        self.moment = MomentEmbedding(width, width, 1.0, bias=False)
        self.picture_modulation = nn.Linear(width, 6 * width, bias=False)
        self.text_modulation = nn.Linear(width, 6 * width, bias=False)
        self.single_modulation = nn.Linear(width, 3 * width, bias=False)
        self.final_modulation = nn.Linear(width, 2 * width, bias=False)
        self.final = nn.Linear(width, self.channels, bias=False)

    def condition(self, given: Sequence[Flux2Condition]) -> list[EncodedCondition]:
        """Embed prompts and the pictures that they refer to."""
        return [self._encoded(one) for one in given]

    def _encoded(self, given: Flux2Condition) -> EncodedCondition:
        line = F.pad(torch.arange(len(given.states))[:, None], (3, 0))
        latents, places = [torch.zeros(0, self.channels)], [line[:0]]
        for number, one in enumerate(given.references, 1):
            _, height, width = one.shape
            latents.append(self.patches_of(one))
            places.append(_grid(height, width, number * REFERENCE_DISTANCE))
        return EncodedCondition(
            self.text_in(moved(given.states, self.device).to(self.dtype)),
            self.rotation(line),
            self.embed(moved(torch.cat(latents), self.device).to(self.dtype)),
            self.rotation(torch.cat(places)),
        )

    def lay_out(self, pictures: Sequence[Size], conditions: Sequence[EncodedCondition]) -> Flux2Batch:
        """The batch of sequences with these pictures and conditions."""
        lengths = [height * width for height, width in pictures]
        texts, references = (
            [len(tokens) for tokens in each]
            for each in zip(*((one.text, one.references) for one in conditions), strict=True)
        )
        order = interleaved(texts, lengths, references)
        text_rotation = torch.cat([one.text_rotation for one in conditions])
        made = [self.rotation(_grid(*size, 0)) for size in pictures]
        picture_rotation = torch.cat([*made, *(one.reference_rotation for one in conditions)])
        owners = [pack(each, self.device).owner for each in (lengths, references)]
        sequences = pack([sum(own) for own in zip(texts, lengths, references, strict=True)], self.device)
        placed = moved(order, self.device)
        return Flux2Batch(
            texts=torch.cat([one.text for one in conditions]),
            references=torch.cat([one.references for one in conditions]),
            of_texts=Where(text_rotation, pack(texts, self.device).owner),
            of_pictures=Where(picture_rotation, torch.cat(owners)),
            sequences=sequences,
            of_all=Where(torch.cat((text_rotation, picture_rotation))[placed], sequences.owner),
            order=placed,
            apart=moved(order.argsort(), self.device),
            made=sum(lengths),
        )

    def forward(
        self, patches: torch.Tensor, moments: torch.Tensor, batch: Flux2Batch, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The velocity towards the picture.

        Args:
            patches: [tokens, channels], the sequences' pictures one after the other.
            moments: f32 [sequences], the shares of noise.
            batch: of these sequences.
            chosen: their adapters, as `choose` gives them.

        Returns:
            [tokens, channels]
        """
        # Rounded as diffusers rounds them, in the type of the weights.
        moment = F.silu(self.moment(((moments * TIME_SCALE).to(self.dtype) / TIME_SCALE * TIME_SCALE).float()))
        of_texts, of_pictures, of_all = (
            where.adapted(chosen) for where in (batch.of_texts, batch.of_pictures, batch.of_all)
        )
        texts = batch.texts
        pictures = torch.cat((self.embed(patches.to(self.dtype)), batch.references))
        text_factors, picture_factors = self.text_modulation(moment), self.picture_modulation(moment)
        for block in self.layers:
            ours = block.text.before(texts, text_factors, of_texts)
            theirs = block.picture.before(pictures, picture_factors, of_pictures)
            query, key, value = (torch.cat(pair)[batch.order] for pair in zip(ours, theirs, strict=True))
            attended = self.attend(query, key, value, batch.sequences)[batch.apart]
            by_texts, by_pictures = attended.split([len(texts), len(pictures)])
            texts = block.text.after(texts, by_texts, text_factors, of_texts)
            pictures = block.picture.after(pictures, by_pictures, picture_factors, of_pictures)
        tokens, factors = torch.cat((texts, pictures))[batch.order], self.single_modulation(moment)
        for block in self.single_layers:
            query, key, value, inner = block.before(tokens, factors, of_all)
            attended = self.attend(query, key, value, batch.sequences)
            tokens = block.after(tokens, attended, inner, factors, of_all)
        scale, shift = self.final_modulation(moment).chunk(2, -1)
        tokens = tokens[batch.apart[len(texts) : len(texts) + batch.made]]
        owner = batch.of_pictures.owner[: batch.made]
        velocity: torch.Tensor = -self.final(modulated(tokens, shift, scale, owner, self.eps))
        return velocity


def _grid(height: int, width: int, place: int) -> torch.Tensor:
    """Positions i64 [tokens, 4] of a picture, whose own place is along the first axis."""
    return F.pad(grid(height, width, place), (0, 1))
