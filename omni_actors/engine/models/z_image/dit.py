"""Z-Image's diffusion transformer, and its published weights.

A sequence is a picture's tokens and then a prompt's; guidance makes two sequences of one picture. Sequences lie one
after the other (`Packing`) without padding between them. Only attention looks beyond a token, and only within its
sequence; everything else is computed for all tokens together, with the modulation of the sequence's moment.

What a prompt contributes does not depend on the moment: `condition` computes it once per request.

Within a sequence, picture and prompt are each filled up to a multiple of 32 tokens with learned tokens that attention
sees: the model was trained like this. Torch only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.diffusers_layout import COMMON_NAMES, Names, PartConfig, fused
from omni_actors.engine.models.diffusion_layers import MOMENT_WAVES, LayerWeights, MomentEmbedding, grid
from omni_actors.engine.models.pictures.denoising import Attention, PackedNetwork, Packing, Size, interleaved, pack
from omni_actors.engine.rows import moved

NAMES = Names(
    parts={
        **fused(".qkv.", ".attention.to_q.", ".attention.to_k.", ".attention.to_v."),
        **fused(".up.", ".feed_forward.w1.", ".feed_forward.w3."),
    },
    patterns=(
        (r"^all_x_embedder\.2-1\.", "embed."),
        (r"^all_final_layer\.2-1\.linear\.", "final."),
        (r"^all_final_layer\.2-1\.adaLN_modulation\.1\.", "final_modulation."),
        (r"^t_embedder\.mlp\.0\.", "moment.inner."),
        (r"^t_embedder\.mlp\.2\.", "moment.outer."),
        (r"^cap_embedder\.0\.", "text_norm."),
        (r"^cap_embedder\.1\.", "text_in."),
        (r"^x_pad_token$", "picture_filler"),
        (r"^cap_pad_token$", "text_filler"),
        (r"\.feed_forward\.w2\.", ".down."),
        (r"\.adaLN_modulation\.0\.", ".modulation."),
        *COMMON_NAMES,
    ),
)


MULTIPLE = 32  # tokens; pictures and prompts are filled up to a multiple of it
PATCH = 2  # latent pixels along an edge of a token
MOMENT_HIDDEN = 1024


def filled(tokens: int) -> int:
    """`tokens`, rounded up to what the model takes."""
    return -(-tokens // MULTIPLE) * MULTIPLE


class ZImageBlock(LayerWeights):
    """A transformer layer. With `modulated` it scales and gates by the moment of each token's sequence."""

    def __init__(self, width: int, heads: int, eps: float, *, modulated: bool) -> None:
        super().__init__(width, heads, int(width / 3 * 8), 1e-5)
        self.attention_norm1, self.attention_norm2 = (nn.RMSNorm(width, eps) for _ in range(2))
        self.ffn_norm1, self.ffn_norm2 = (nn.RMSNorm(width, eps) for _ in range(2))
        self.modulation = nn.Linear(min(width, MOMENT_WAVES), 4 * width) if modulated else None

    def forward(
        self,
        tokens: torch.Tensor,
        moments: torch.Tensor | None,
        rotation: torch.Tensor,
        packing: Packing,
        attend: Attention,
    ) -> torch.Tensor:
        """Tokens [tokens, width] after this layer.

        Args:
            moments: [sequences, width of a moment]; None if the layer is not modulated.
        """
        # Attention is a call of its own between the two halves, so that either may be compiled, with any kernel.
        factors = None if self.modulation is None or moments is None else self.modulation(moments)
        query, key, value = self.before(tokens, factors, rotation, packing.owner)
        return self.after(tokens, attend(query, key, value, packing), factors, packing.owner)

    def before(
        self, tokens: torch.Tensor, factors: torch.Tensor | None, rotation: torch.Tensor, owner: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [tokens, heads, head_dim]; `factors` is [sequences, 4 * width]."""
        normed = self.attention_norm1(tokens)
        if factors is not None:
            normed = normed * (1.0 + factors.chunk(4, -1)[0])[owner]
        return self.turned(normed, rotation)

    def after(
        self, tokens: torch.Tensor, attended: torch.Tensor, factors: torch.Tensor | None, owner: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output from what attention gave, [tokens, heads, head_dim]."""
        attended = self.attention_norm2(self.out(attended.flatten(1)))
        if factors is None:
            tokens = tokens + attended
            changed: torch.Tensor = self.ffn_norm2(self.gated(self.ffn_norm1(tokens)))
            return tokens + changed
        _, gate, scale, gate_ffn = factors.chunk(4, -1)
        tokens = tokens + gate.tanh()[owner] * attended
        hidden = self.gated(self.ffn_norm1(tokens) * (1.0 + scale)[owner])
        changed = self.ffn_norm2(hidden)
        return tokens + gate_ffn.tanh()[owner] * changed


@dataclass(frozen=True)
class EncodedPrompt:
    """What a prompt contributes to every step of its request.

    Args:
        tokens: [filled length, width], refined.
        rotation: f32 [filled length, 2, head_dim].
    """

    tokens: torch.Tensor
    rotation: torch.Tensor


@dataclass(frozen=True)
class ZImageBatch:
    """Where everything lies in a batch of sequences; the same for as long as the sequences are the same.

    Tokens of pictures are counted without filling (`own`) and with it (`filled`).

    Args:
        pictures: packing of the filled pictures.
        picture_rotation: f32 [filled, 2, head_dim].
        slots: i64 [own]; the place of each own token among the filled ones. None if they are the same.
        prompts: [tokens, width]; all refined prompts.
        sequences: packing of the sequences of picture and prompt.
        rotation: f32 [tokens of sequences, 2, head_dim].
        order: i64 [tokens of sequences]; the place of each among the filled pictures and then the prompts.
        outputs: i64 [own]; the place of each own token in the sequences.
    """

    pictures: Packing
    picture_rotation: torch.Tensor
    slots: torch.Tensor | None
    prompts: torch.Tensor
    sequences: Packing
    rotation: torch.Tensor
    order: torch.Tensor
    outputs: torch.Tensor


class ZImageNetwork(PackedNetwork):
    """The network: predicts the velocity of latents, from noise at moment 0 to a picture at moment 1.

    Its parameters are named as in published checkpoints, but for matrices that are kept as one (`NAMES`).

    Attributes:
        lengths: the number of positions along each axis.
    """

    model, names = "Z-Image", NAMES

    def __init__(self, given: Mapping[str, Any]) -> None:
        config = PartConfig("transformer", given, "ZImageTransformer2DModel")
        config.expect(all_patch_size=[PATCH], all_f_patch_size=[1], qk_norm=True, siglip_feat_dim=None)
        config.expect(n_kv_heads=config["n_heads"])
        width, eps, text_width = config["dim"], config["norm_eps"], config["cap_feat_dim"]
        turns = {"axes": config["axes_dims"], "theta": config["rope_theta"]}
        super().__init__(config["in_channels"], width, text_width, turns, PATCH)
        self.lengths = tuple(config["axes_lens"])
        patch_width = PATCH * PATCH * self.channels

        def layers(count: int, *, modulated: bool) -> nn.ModuleList:
            return nn.ModuleList(ZImageBlock(width, config["n_heads"], eps, modulated=modulated) for _ in range(count))

        self.embed = nn.Linear(patch_width, width)
        self.noise_refiner = layers(config["n_refiner_layers"], modulated=True)
        self.context_refiner = layers(config["n_refiner_layers"], modulated=False)
        self.layers = layers(config["n_layers"], modulated=True)
        self.moment = MomentEmbedding(MOMENT_HIDDEN, min(width, MOMENT_WAVES), config["t_scale"], bias=True)
        self.text_norm = nn.RMSNorm(text_width, eps)
        self.text_in = nn.Linear(text_width, width)
        self.picture_filler = nn.Parameter(torch.zeros(1, width))
        self.text_filler = nn.Parameter(torch.zeros(1, width))
        self.final_modulation = nn.Linear(self.moment.outer.out_features, width)
        self.final = nn.Linear(width, patch_width)

    def condition(self, given: Sequence[torch.Tensor]) -> list[EncodedPrompt]:
        """The contributions of prompts, from the text encoder's hidden states, each [length, text_width]."""
        lengths = [filled(len(each)) for each in given]
        packing = pack(lengths, self.device)
        own = moved(_places(lengths, [len(each) for each in given]), self.device)
        embedded = self.text_in(self.text_norm(moved(torch.cat(list(given)), self.device).to(self.dtype)))
        tokens = self.text_filler.expand(sum(lengths), -1).index_copy(0, own, embedded)
        lines = (F.pad(torch.arange(1, length + 1)[:, None], (0, 2)) for length in lengths)  # along the first axis
        rotations = [self.rotation(positions) for positions in lines]
        rotation = torch.cat(rotations)
        for block in self.context_refiner:
            tokens = block(tokens, None, rotation, packing, self.attend)
        return [EncodedPrompt(part, turn) for part, turn in zip(tokens.split(lengths), rotations, strict=True)]

    def lay_out(self, pictures: Sequence[Size], conditions: Sequence[EncodedPrompt]) -> ZImageBatch:
        """The batch of sequences with these pictures and these prompts."""
        own, prompts = [height * width for height, width in pictures], conditions
        lengths, texts = [filled(tokens) for tokens in own], [len(prompt.tokens) for prompt in prompts]
        order, slots = interleaved(lengths, texts), _places(lengths, own)
        turns = [
            self.rotation(_grid(height, width, after=len(prompt.tokens)))
            for (height, width), prompt in zip(pictures, prompts, strict=True)
        ]
        parts = [part for turn, prompt in zip(turns, prompts, strict=True) for part in (turn, prompt.rotation)]
        return ZImageBatch(
            pictures=pack(lengths, self.device),
            picture_rotation=torch.cat(turns),
            slots=None if own == lengths else moved(slots, self.device),
            prompts=torch.cat([prompt.tokens for prompt in prompts]),
            sequences=pack([sum(pair) for pair in zip(lengths, texts, strict=True)], self.device),
            rotation=torch.cat(parts),
            order=moved(order, self.device),
            outputs=moved(order.argsort()[slots], self.device),
        )

    def forward(self, patches: torch.Tensor, moments: torch.Tensor, batch: ZImageBatch) -> torch.Tensor:
        """The velocity of packed latents.

        Args:
            patches: [own tokens, patch_width], the sequences' pictures one after the other.
            moments: f32 [sequences], in [0, 1].
            batch: of these sequences.

        Returns:
            [own tokens, patch_width]
        """
        moment = self.moment(moments)
        tokens = self.embed(patches.to(self.dtype))
        if batch.slots is not None:
            tokens = self.picture_filler.expand(len(batch.picture_rotation), -1).index_copy(0, batch.slots, tokens)
        for block in self.noise_refiner:
            tokens = block(tokens, moment, batch.picture_rotation, batch.pictures, self.attend)
        tokens = torch.cat((tokens, batch.prompts))[batch.order]
        for block in self.layers:
            tokens = block(tokens, moment, batch.rotation, batch.sequences, self.attend)
        tokens = F.layer_norm(tokens[batch.outputs], (self.width,), eps=1e-6)
        scale = 1.0 + self.final_modulation(F.silu(moment))
        velocity: torch.Tensor = self.final(tokens * scale[batch.sequences.owner[batch.outputs]])
        return velocity


def _places(lengths: Sequence[int], own: Sequence[int]) -> torch.Tensor:
    """Places i64 of the first `own` tokens of each of the sequences of these lengths."""
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    return torch.cat([torch.arange(begin, begin + count) for begin, count in zip(begins, own, strict=True)])


def _grid(height: int, width: int, *, after: int) -> torch.Tensor:
    """Positions i64 [filled length, 3] of a picture behind `after` tokens of a prompt; those that fill it are at 0."""
    positions = grid(height, width, after + 1)
    return F.pad(positions, (0, 0, 0, filled(len(positions)) - len(positions)))
