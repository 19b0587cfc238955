"""Published weights of Z-Image's diffusion transformer, as `Dit` keeps them: three matrices for attention are one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from omni_actors.engine.models.z_image.dit import Dit
from omni_actors.errors import ConfigError

_NAMES = (
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
)
# Published name -> ours, the part that it is, the number of parts.
_PARTS: Mapping[str, tuple[str, int, int]] = {
    ".attention.to_q.": (".qkv.", 0, 3),
    ".attention.to_k.": (".qkv.", 1, 3),
    ".attention.to_v.": (".qkv.", 2, 3),
    ".feed_forward.w1.": (".up.", 0, 2),
    ".feed_forward.w3.": (".up.", 1, 2),
}


def _place(name: str) -> tuple[str, int, int]:
    """Our name of a published parameter, which part of that it is, and of how many."""
    for published, (ours, part, parts) in _PARTS.items():
        if published in name:
            return name.replace(published, ours), part, parts
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name, 0, 1


@torch.no_grad()
def load(model: Dit, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy published weights into `model`.

    Raises:
        ConfigError: a parameter is missing, unknown, or of another shape than the configuration says.
    """
    parameters = dict(model.named_parameters())
    missing = {(name, part) for name in parameters for part in range(_parts_of(name))}
    for published, value in weights:
        name, part, parts = _place(published)
        if (name, part) not in missing:
            raise ConfigError(
                f"The checkpoint's transformer has a parameter {published!r} that Z-Image has not, or has it twice."
            )
        target = parameters[name].chunk(parts)[part]
        if target.shape != value.shape:
            raise ConfigError(
                f"The checkpoint's parameter {published!r} has the shape {list(value.shape)}; its config.json says "
                f"{list(target.shape)}."
            )
        target.copy_(value)
        missing.remove((name, part))
    if missing:
        names = sorted(f"{name} (part {part})" for name, part in missing)
        raise ConfigError(
            f"The checkpoint's transformer lacks {len(names)} parameters, the first is {names[0]}.",
            hint="Download it again: a part of its files is missing.",
        )


def _parts_of(name: str) -> int:
    return 3 if ".qkv." in name else 2 if ".up." in name else 1
