"""Files of given samples and pixels."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from PIL import Image


def wav(samples: np.ndarray, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of samples."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def png(array: np.ndarray, kind: str = "PNG") -> bytes:
    """A file of a picture."""
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format=kind)
    return buffer.getvalue()
