"""Published weights of Z-Image's transformer, as `ZImageNetwork` keeps them: three matrices for attention are one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from omni_actors.engine.models.pictures import weights
from omni_actors.engine.models.z_image.dit import ZImageNetwork

NAMES = weights.Names(
    model="Z-Image",
    parts={
        ".attention.to_q.": (".qkv.", 0, 3),
        ".attention.to_k.": (".qkv.", 1, 3),
        ".attention.to_v.": (".qkv.", 2, 3),
        ".feed_forward.w1.": (".up.", 0, 2),
        ".feed_forward.w3.": (".up.", 1, 2),
    },
    patterns=(
        (r"^all_x_embedder\.2-1\.", "embed."),
        (r"^all_final_layer\.2-1\.linear\.", "final."),
        (r"^all_final_layer\.2-1\.adaLN_modulation\.1\.", "final_modulation."),
        (r"^t_embedder\.mlp\.0\.", "moment_in."),
        (r"^t_embedder\.mlp\.2\.", "moment_out."),
        (r"^cap_embedder\.0\.", "text_norm."),
        (r"^cap_embedder\.1\.", "text_in."),
        (r"^x_pad_token$", "picture_filler"),
        (r"^cap_pad_token$", "text_filler"),
        (r"\.attention\.to_out\.0\.", ".out."),
        (r"\.attention\.(norm_[qk])\.", r".\1."),
        (r"\.feed_forward\.w2\.", ".down."),
        (r"\.adaLN_modulation\.0\.", ".modulation."),
    ),
)


def load(model: ZImageNetwork, published: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy published weights into `model`. Raises `ConfigError` if they do not fit it."""
    weights.load(model, published, NAMES)
