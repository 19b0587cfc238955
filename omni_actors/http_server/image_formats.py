"""Pictures as the bytes of a file."""

from __future__ import annotations

import io
from typing import Literal

import numpy
from numpy.typing import NDArray

from omni_actors.http_server.png import png

ImageFormat = Literal["png", "jpeg", "webp"]
Background = Literal["transparent", "opaque"]
QUALITY = 95  # of jpeg and webp; more takes many more bytes and can hardly be seen
WHITE = 255


def background_of(pixels: NDArray[numpy.uint8]) -> Background:
    """Whether some of a picture can be seen through."""
    return "transparent" if pixels.shape[2] == 4 and pixels[:, :, 3].min() < WHITE else "opaque"


def encoded_image(pixels: NDArray[numpy.uint8], name: ImageFormat, quality: int | None = None) -> bytes:
    """Encode a picture, u8 [height, width, 3 or 4].

    Args:
        quality: of jpeg and webp, from 0 to 100.
    """
    if name == "png":
        return png(pixels)
    from PIL import Image  # takes a tenth of a second to import

    if name == "jpeg" and pixels.shape[2] == 4:
        pixels = flattened(pixels)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=name, quality=QUALITY if quality is None else quality)
    return file.getvalue()


def flattened(pixels: NDArray[numpy.uint8]) -> NDArray[numpy.uint8]:
    """Put a picture with an alpha channel on white."""
    if pixels.shape[2] == 3:
        return pixels
    alpha = pixels[:, :, 3:].astype(numpy.uint16)
    mixed: NDArray[numpy.uint8] = ((pixels[:, :, :3] * alpha + WHITE * (WHITE - alpha) + 127) // WHITE).astype("u1")
    return mixed
