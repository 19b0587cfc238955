"""PNG files of pictures, which any reader takes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from omni_actors.http_server.images import encoded_image


def picture(height: int, width: int, channels: int) -> np.ndarray:
    """A gradient with noise, as a photograph has it."""
    steps = np.add.outer(np.arange(height), np.arange(width))[..., None] // 3
    return (steps + np.random.default_rng(0).integers(0, 24, (height, width, channels))).astype(np.uint8)


@pytest.mark.parametrize("size", [(1, 1, 3), (3, 5, 4), (64, 1, 4), (1, 700, 3), (512, 512, 4), (700, 900, 3)])
def test_a_file_has_the_pixels_of_its_picture(size: tuple[int, int, int]) -> None:
    pixels = picture(*size)
    with Image.open(io.BytesIO(encoded_image(pixels, "png"))) as opened:
        opened.load()
        assert opened.format == "PNG"
        assert np.array_equal(np.asarray(opened), pixels)
