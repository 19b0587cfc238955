"""Models as their training runs them: in few large steps, as a GPU takes longer to start small ones than to run them.

The towers attend to all sounds, or pictures, of a batch at once instead of to each alone, the workers compute what
depends on their sizes, and on a GPU the layers are one CUDA graph for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTENTION = "padded_flash"  # transformers gives one with "flash" in its name all pieces at once
LENGTHS = 64  # texts are padded to a multiple of it, so that there are few graphs


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **sizes: Any
) -> tuple[Tensor, None]:
    """Returns the attention [1, tokens, heads, size] within each of the pieces that lie one behind the other.

    Args:
        query, key, value: [1, heads, tokens, size].
        sizes: `cu_seq_lens_q`, where the pieces begin and the last one ends, `max_length_q` and `scaling`.
    """
    begins, longest, tokens = sizes["cu_seq_lens_q"], sizes["max_length_q"], query.shape[2]
    lengths = begins.diff()
    which = torch.repeat_interleave(torch.arange(len(lengths), device=begins.device), lengths, output_size=tokens)
    place = which * longest + torch.arange(tokens, device=begins.device) - begins[which]

    def padded(rows: Tensor) -> Tensor:
        whole = rows.new_zeros(len(lengths) * longest, *rows.shape[1::2])
        whole = whole.index_copy(0, place, rows[0].transpose(0, 1))
        return whole.view(len(lengths), longest, *rows.shape[1::2]).transpose(1, 2)

    real = torch.arange(longest, device=begins.device) < lengths[:, None]
    made = functional.scaled_dot_product_attention(
        padded(query), padded(key), padded(value), real[:, None, None], scale=sizes["scaling"]
    )
    attended: Tensor = made.transpose(1, 2).flatten(0, 1).index_select(0, place)[None]
    return attended, None


def attend_at_once(thinker: Any) -> None:
    """Lets the towers attend to all sounds, or all pictures, of a batch at once."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, padded_attention)
    for tower in (thinker.audio_tower, thinker.visual):
        tower.config._attn_implementation = ATTENTION


def sizes_of(thinker: Any, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the towers need of a batch's sounds and pictures, names with `audio_` or `image_` before them."""
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
    from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids, get_vision_window_index

    found = dict[str, Tensor]()
    if "input_features" in made:
        mask, tower = made.pop("feature_attention_mask"), thinker.audio_tower
        lengths = mask.sum(1)
        sounds = made.pop("input_features").transpose(1, 2)[mask.bool()].T
        padded, chunks = omni.chunk_and_pad_features(sounds, lengths, tower.n_window)
        begins = omni.get_audio_cu_seqlens(chunks)
        found |= {"audio_padded_feature": padded, "audio_chunk_lengths": chunks, "audio_cu_seqlens": begins}
        found |= {"audio_valid_indices": omni.get_valid_indices(chunks), "audio_max_seqlen": begins.diff().max()}
        found |= {"audio_pool_indices": omni.get_pool_indices(lengths)}
    if "image_grid_thw" in made:
        grid, tower = made["image_grid_thw"], thinker.visual
        size = tower.spatial_merge_size
        begins = get_vision_attention_seqlens(grid, tower.config)[0]
        index, windows = get_vision_window_index(grid, size, tower.window_size, tower.patch_size)
        found |= {"image_cu_seqlens": begins, "image_max_seqlen": begins.diff().max(), "image_window_index": index}
        found |= {"image_cu_window_seqlens": windows, "image_max_window_seqlen": windows.diff().max()}
        found |= {"image_position_ids": get_vision_position_ids(grid, size)}
    return found


def embedded(thinker: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns [B, L, 192], what the thinker's layers read: texts, and what the towers make of sounds and pictures."""
    ids, config = batch["input_ids"], thinker.config
    rows: Tensor = thinker.get_input_embeddings()(ids)
    for kind, token in (("audio", config.audio_token_id), ("image", config.image_token_id)):
        if sizes := {name.removeprefix(f"{kind}_"): of for name, of in batch.items() if name.startswith(f"{kind}_")}:
            if kind == "audio":
                seen = thinker.audio_tower(**sizes).last_hidden_state
            else:
                seen = thinker.visual(batch["pixel_values"].float(), **sizes).pooler_output
            rows = rows.masked_scatter((ids == token)[..., None], seen)
    return rows


class Layers(nn.Module):
    """The layers of a text model, and the attention of those that are guided."""

    def __init__(self, model: Any, guided: Sequence[int] = ()) -> None:
        super().__init__()
        self.layers, self.norm, self.rotary = model.layers, model.norm, model.rotary_emb
        self.guided = [model.layers[number].self_attn for number in guided]
        for attention in self.guided:
            attention.config = copy(attention.config)
            attention.config._attn_implementation = "eager"  # the one that returns it

    def forward(self, rows: Tensor, positions: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the last hidden states [B, L, width], and [B, heads, L, L] of each guided layer.

        Args:
            rows: [B, L, width].
            positions: [3, B, L].
            real: [B, L], whether a token is not padding; None if padding stands behind all tokens.
        """
        size, seen = rows.shape[1], list[Tensor]()
        order = torch.ones(size, size, dtype=torch.bool, device=rows.device).tril()
        if real is not None:  # what is padding sees itself: softmax needs something
            order = order & (real[:, None, None] | torch.eye(size, dtype=torch.bool, device=rows.device))
        order = order.expand(len(rows), 1, -1, -1)
        lowest = torch.finfo(torch.bfloat16).min
        with ExitStack() as stack:
            stack.enter_context(
                torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda, cache_enabled=False)
            )
            for attention in self.guided:
                hook = attention.register_forward_hook(lambda module, given, made: seen.append(made[1]))
                stack.callback(hook.remove)
            places = self.rotary(rows, positions)
            for layer in self.layers:
                mask = None if real is None else order  # None: causal
                if layer.self_attn in self.guided:
                    mask = torch.zeros(order.shape, device=rows.device).masked_fill(~order, lowest)
                rows = layer(rows, attention_mask=mask, position_embeddings=places)
            return self.norm(rows), *seen


class Graphs:
    """Calls the module that a function makes; on a GPU as a CUDA graph, with its backward pass, for each shape."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make, self.plain = make, make()
        self.made = dict[object, Callable[..., Any]]()
        self.pool: Any = None  # of memory: no two of them run at once

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return what it returns; the tensors hold until the next call."""
        if not given[0].is_cuda:
            made: tuple[Tensor, ...] = self.plain(*given)
            return made
        shape = torch.is_grad_enabled(), *(one.shape for one in given)
        if shape not in self.made:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            like = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in given)
            self.made[shape] = torch.cuda.make_graphed_callables(self.make(), like, pool=self.pool)
        graphed: tuple[Tensor, ...] = self.made[shape](*given)
        return graphed
