"""What the families of picture models share: denoising, the stages around it, and here the pictures of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from omni_actors.errors import InvalidRequest
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import LAYERED_FILE, Item, MediaLimits
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import Media, MediaEncoding

Given = tuple[Media, HostTensor, str]  # a picture of a prompt, and what to call it


def layered_pictures(given: Sequence[Given], decoder: MediaDecoder, limits: MediaLimits) -> list[Image.Image]:
    """Return the pictures of a prompt with an alpha channel; files are decoded. Raises `OmniError`."""
    files = [(Item(LAYERED_FILE, name, _size(tensor)), tensor.data) for media, tensor, name in given if _is_file(media)]
    used = sum(_size(tensor) for media, tensor, _ in given if not _is_file(media))
    decoded = iter(decoder.decode(files, limits, used) if files else ())
    return [Image.fromarray(next(decoded), "RGBA") if _is_file(media) else _array(tensor) for media, tensor, _ in given]


def on_white(image: Image.Image) -> Image.Image:
    """Return an opaque picture, as most models see them."""
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _size(tensor: HostTensor) -> int:
    return memoryview(tensor.data).nbytes


def _is_file(media: Media) -> bool:
    return media.encoding is MediaEncoding.FILE


def _array(tensor: HostTensor) -> Image.Image:
    """A picture u8 [height, width, 3], which is opaque."""
    if tensor.dtype is not DType.U8 or len(tensor.shape) != 3 or tensor.shape[2] != 3:
        raise InvalidRequest(f"A picture needs u8 [height, width, 3]; got {tensor.dtype} {list(tensor.shape)}.")
    pixels = np.frombuffer(tensor.data, dtype=np.uint8).reshape(tensor.shape)
    return Image.fromarray(pixels, "RGB").convert("RGBA")
