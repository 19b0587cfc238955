"""PNG files of pictures, which any reader takes."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from omni_actors.http_server.images import png


def picture(height: int, width: int, channels: int) -> np.ndarray:
    """A gradient with noise, as a photograph has it."""
    steps = np.add.outer(np.arange(height), np.arange(width))[..., None] // 3
    return (steps + np.random.default_rng(0).integers(0, 24, (height, width, channels))).astype(np.uint8)


@pytest.mark.parametrize("size", [(1, 1, 3), (3, 5, 4), (64, 1, 4), (1, 700, 3), (512, 512, 4), (700, 900, 3)])
def test_a_file_has_the_pixels_of_its_picture(size: tuple[int, int, int]) -> None:
    pixels = picture(*size)
    with Image.open(io.BytesIO(png(pixels))) as opened:
        opened.load()
        assert opened.format == "PNG"
        assert np.array_equal(np.asarray(opened), pixels)


def test_pixels_that_are_not_contiguous_are_written_as_they_are_seen() -> None:
    pixels = picture(40, 60, 4)[::2, ::-1, :3]
    with Image.open(io.BytesIO(png(pixels))) as opened:
        assert np.array_equal(np.asarray(opened), pixels)


def test_every_checksum_is_right_whatever_the_number_of_strips() -> None:
    file = png(picture(512, 512, 4))
    at, streams = 8, []
    while at < len(file):
        length, name = struct.unpack_from(">I4s", file, at)
        data = file[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", file, at + 8 + length)[0] == zlib.crc32(name + data)
        streams += [data] if name == b"IDAT" else []
        at += 12 + length
    assert len(zlib.decompress(b"".join(streams))) == 512 * (512 * 4 + 1), "which checks the sum of all"
    assert len(file) < 512 * 512 * 4


def test_repetitions_are_looked_for_where_there_are_some() -> None:
    flat, noisy = np.full((512, 512, 4), 200, np.uint8), picture(512, 512, 4)
    assert len(png(flat)) < flat.nbytes / 100
    filtered = np.diff(noisy.reshape(512, -1), axis=0, prepend=np.uint8(0))
    assert len(png(noisy)) < 0.95 * len(zlib.compress(filtered.tobytes(), 1)), "without them it is smaller"
