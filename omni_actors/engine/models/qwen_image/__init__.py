"""Qwen-Image-2.1: pictures from text, and from up to ten pictures (its weights must not be used commercially).

Here its sizes, and the template of its prompts.
"""

from __future__ import annotations

import math

LATENT_PIXELS = 16  # along an edge of a latent pixel
MULTIPLE = 32  # pixels; the text encoder has one token where the diffusion transformer has 2 x 2
REFERENCE_SIZE = 1024  # edge of the square whose area a picture is scaled to, as the model was trained


def scaled_size(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height that a picture is scaled to: its own proportions, the area of a square of edge `size`."""
    ratio = width / height
    new_width = math.sqrt(size * size * ratio)
    return tuple(max(1, round(edge / MULTIPLE)) * MULTIPLE for edge in (new_width, new_width / ratio))  # type: ignore[return-value]


PICTURE_TOKEN = "<|image_pad|>"
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"


def written(text: str, pictures: int) -> str:
    """The text of a prompt that refers to n pictures, each with one placeholder. A space stands for no text."""
    shown = " ".join(
        f"<image{number}><|vision_start|>{PICTURE_TOKEN}<|vision_end|>" for number in range(1, pictures + 1)
    )
    return f"{SYSTEM}<|im_start|>user\n{shown}{text or ' '}<|im_end|>\n<|im_start|>assistant\n"
