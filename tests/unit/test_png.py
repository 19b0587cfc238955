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


def test_pixels_that_are_not_contiguous_are_written_as_they_are_seen() -> None:
    pixels = picture(40, 60, 4)[::2, ::-1, :3]
    with Image.open(io.BytesIO(encoded_image(pixels, "png"))) as opened:
        assert np.array_equal(np.asarray(opened), pixels)


def test_a_flat_picture_becomes_a_small_file() -> None:
    flat, noisy = np.full((512, 512, 4), 200, np.uint8), picture(512, 512, 4)
    assert len(encoded_image(flat, "png")) < flat.nbytes / 100
    assert len(encoded_image(noisy, "png")) < 0.9 * noisy.nbytes
