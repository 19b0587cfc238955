"""Published weights of Qwen-Image's transformer, as `QwenImageNetwork` keeps them: some are parts of one matrix."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from omni_actors.engine.models.pictures import weights
from omni_actors.engine.models.qwen_image.dit import QwenImageNetwork

NAMES = weights.Names(
    model="Qwen-Image",
    parts={
        ".attn.to_q.": (".qkv.", 0, 3),
        ".attn.to_k.": (".qkv.", 1, 3),
        ".attn.to_v.": (".qkv.", 2, 3),
        ".img_mlp.gate_layer.": (".up.", 0, 2),
        ".img_mlp.proj.": (".up.", 1, 2),
    },
    patterns=(
        (r"^transformer_blocks\.", "layers."),
        (r"^img_in\.", "embed."),
        (r"^time_text_embed\.timestep_embedder\.linear_1\.", "moment_in."),
        (r"^time_text_embed\.timestep_embedder\.linear_2\.", "moment_out."),
        (r"^modulation\.1\.", "modulation."),
        (r"^txt_in\.text_norm\.", "text_norm."),
        (r"^txt_in\.in_layer\.", "text_in."),
        (r"^txt_in\.out_layer\.", "text_out."),
        (r"^norm_out\.linear\.", "final_modulation."),
        (r"^proj_out\.", "final."),
        (r"\.attn\.to_out\.0\.", ".out."),
        (r"\.attn\.(norm_[qk])\.", r".\1."),
        (r"\.img_mlp\.out\.", ".down."),
    ),
)


def load(model: QwenImageNetwork, published: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy published weights into `model`. Raises `ConfigError` if they do not fit it."""
    weights.load(model, published, NAMES)
