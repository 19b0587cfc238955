"""FLUX.2 klein: pictures from text and from other pictures, in four steps (the 4B weights are Apache-2.0).

Here its sizes, and the pictures that a prompt refers to as the model takes them.
"""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image

from omni_actors.config.checkpoint import INDEX_NAME, read_json_object
from omni_actors.errors import InvalidRequest

LATENT_PIXELS = 16  # along an edge of a latent pixel, which is four of the VAE's
MAX_TOKENS = 512  # of a prompt; all are filled up to it
LEAST_EDGE, LARGEST_AREA, LARGEST_RATIO = 64, 1024 * 1024, 8  # of a picture that a prompt refers to


def is_distilled(folder: Path) -> bool:
    """Whether a checkpoint was trained to make pictures without guidance. Raises `ConfigError` without its index."""
    return bool(read_json_object(folder / INDEX_NAME).get("is_distilled"))


def reference_picture(image: Image.Image) -> Image.Image:
    """The middle of a picture, opaque, with edges of whole latent pixels; a large one is made smaller before.

    Raises:
        InvalidRequest: it is too small, or too long.
    """
    width, height = image.size
    if min(width, height) < LEAST_EDGE or max(width, height) > LARGEST_RATIO * min(width, height):
        raise InvalidRequest(
            f"A picture of {width} x {height} pixels is not one to make another from.",
            hint=f"Both edges need {LEAST_EDGE} pixels; the longer one may be {LARGEST_RATIO} times the other.",
            field="image",
        )
    if width * height > LARGEST_AREA:
        scale = math.sqrt(LARGEST_AREA / (width * height))
        image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.LANCZOS)
    width, height = (edge // LATENT_PIXELS * LATENT_PIXELS for edge in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height)).convert("RGB")
