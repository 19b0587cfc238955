"""Pictures as the bytes of a file.

PNG files are compressed in strips at the same time: alone, 1024 x 1024 pixels take Pillow a tenth of a second.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy
from numpy.typing import NDArray

ImageFormat = Literal["png", "jpeg", "webp"]
Background = Literal["transparent", "opaque"]
QUALITY = 95  # of jpeg and webp; more takes many more bytes and can hardly be seen
WHITE = 255

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOR_TYPES = {3: 2, 4: 6}  # by channels: RGB, RGBA
BITS = 8  # of a value
UP = 2  # the filter: each row as its difference from the one above it
LEVEL = 1  # zlib's: a fifth of the time of its default, for files that are a little larger
WINDOW = 15  # of zlib, as the base-2 logarithm of its bytes
HEADER = b"\x78\x01"  # of a zlib stream with this window and level
# If a larger share of a strip's bytes equals the pixel before, its compressor searches for repetitions. In photographs
# the search finds little: without it, compression takes a third of the time, and files are a little smaller.
ALIKE = 0.6
SAMPLED = 8  # every 8th row is sampled for that
STRIP_BYTES = 1 << 18  # less is not worth a thread
MOST_STRIPS = 8


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


def png(pixels: NDArray[numpy.uint8]) -> bytes:
    """A PNG file of a picture, u8 [height, width, 3 or 4]."""
    height, width, channels = pixels.shape
    flat = pixels.reshape(height, -1)
    rows = numpy.empty((height, 1 + width * channels), numpy.uint8)
    rows[:, 0] = UP
    rows[0, 1:] = flat[0]
    numpy.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
    count = max(1, min(MOST_STRIPS, os.cpu_count() or 1, rows.nbytes // STRIP_BYTES, height))
    *others, last = numpy.array_split(rows, count)
    with ThreadPoolExecutor(count) as threads:
        deflated = threads.map(lambda strip: _deflated(strip, channels, zlib.Z_SYNC_FLUSH), others)
        strips = [*deflated, _deflated(last, channels, zlib.Z_FINISH)]
    strips[0] = HEADER + strips[0]
    strips[-1] += struct.pack(">I", zlib.adler32(rows.data))
    header = struct.pack(">IIBBBBB", width, height, BITS, COLOR_TYPES[channels], 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), *(_chunk(b"IDAT", strip) for strip in strips), _chunk(b"IEND", b"")]
    return b"".join((SIGNATURE, *chunks))


def _deflated(rows: NDArray[numpy.uint8], channels: int, end: int) -> bytes:
    """A part of a zlib stream, without the stream's header and checksum; the lock of Python is free meanwhile."""
    sample = rows[::SAMPLED]
    alike = numpy.mean(sample[:, channels:] == sample[:, :-channels])
    strategy = zlib.Z_DEFAULT_STRATEGY if alike > ALIKE else zlib.Z_HUFFMAN_ONLY
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -WINDOW, zlib.DEF_MEM_LEVEL, strategy)
    return compressor.compress(rows.data) + compressor.flush(end)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(name)))
