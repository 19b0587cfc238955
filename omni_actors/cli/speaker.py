"""Plays sound as it comes, where the package `sounddevice` and a device are there."""

from __future__ import annotations

import importlib
import queue
import threading
from typing import Any

import numpy
from numpy.typing import NDArray

from omni_actors.logs import get_logger

logger = get_logger(__name__)

PIECES_PER_SECOND = 10


class Speaker:
    """Plays in a thread of its own, so that text need not wait for sound.

    Args:
        device: the module `sounddevice`.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pieces: queue.SimpleQueue[tuple[int, NDArray[numpy.float32], int]] = queue.SimpleQueue()
        self._answer = 0  # pieces of earlier answers are not played any more
        threading.Thread(target=self._play_all, name="speaker", daemon=True).start()

    def play(self, samples: NDArray[numpy.float32], rate: int) -> None:
        """Play after all that was given since the last `stop`."""
        self._pieces.put((self._answer, samples, rate))

    def stop(self) -> None:
        """Be silent within a tenth of a second, and forget what has not been played."""
        self._answer += 1

    def _play_all(self) -> None:
        stream, of_rate = None, 0
        while True:
            answer, samples, rate = self._pieces.get()
            step = max(1, rate // PIECES_PER_SECOND)
            try:
                for begin in range(0, len(samples), step):
                    if answer != self._answer:
                        break
                    if stream is None or rate != of_rate:
                        stream, of_rate = self._device.OutputStream(samplerate=rate, channels=1, dtype="float32"), rate
                        stream.start()
                    stream.write(samples[begin : begin + step].reshape(-1, 1))
            except self._device.PortAudioError as error:  # unplugged, for instance; the text goes on
                logger.warning("cannot play: %s", error)
                stream = None


def find_speaker() -> Speaker | None:
    """Return the speaker of this host; `None` where there is none, or `sounddevice` is not installed."""
    try:
        device = importlib.import_module("sounddevice")
    except (ImportError, OSError):  # not installed, or without PortAudio
        return None
    try:
        device.query_devices(kind="output")
    except device.PortAudioError:
        return None
    return Speaker(device)
