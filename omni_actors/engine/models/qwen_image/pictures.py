"""What the stages of Qwen-Image agree on about pictures that a prompt refers to. Without torch or vLLM."""

from __future__ import annotations

import math

from omni_actors.protocol.stage import PICTURE

LATENT_PIXELS = 16  # along an edge of a latent pixel
MULTIPLE = 32  # pixels; the text encoder has one token where the diffusion transformer has 2 x 2
MAX_REFERENCES = 10
REFERENCE_SIZE = 1024  # edge of the square whose area a picture is scaled to, as the model was trained


def picture(index: int) -> str:
    """The name of a picture's pixels, u8 [height, width, 4], from the prompt stage to the VAE encoder."""
    return f"{PICTURE}{index}"


def reference(index: int) -> str:
    """The name of its latents, f32 [channels, height, width], from there to the denoising stage."""
    return f"reference_{index}"


def scaled_size(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height that a picture is scaled to: its own proportions, the area of a square of edge `size`."""
    ratio = width / height
    new_width = math.sqrt(size * size * ratio)
    return tuple(max(1, round(edge / MULTIPLE)) * MULTIPLE for edge in (new_width, new_width / ratio))  # type: ignore[return-value]
