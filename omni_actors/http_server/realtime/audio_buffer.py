"""The user's sound that is not part of an item yet."""

from __future__ import annotations

from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime.session_config import BYTES_PER_SECOND, RATE

SAMPLE_BYTES = 2
MIN_COMMIT = RATE // 10  # samples: OpenAI's bound of 100 ms


class AudioBuffer:
    """PCM with its place in all the sound of the session. Positions count samples from the session's first one.

    Args:
        limit_seconds: how much may wait for a commit.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._data = bytearray()
        self.start = 0

    @property
    def end(self) -> int:
        """Position behind the last sample."""
        return self.start + len(self._data) // SAMPLE_BYTES

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return len(self._data)

    def append(self, pcm: bytes) -> None:
        """Add sound. Raises `HttpError` 400 for half a sample, 413 if too much waits; then nothing was added."""
        if len(pcm) % SAMPLE_BYTES:
            raise bad_field("audio", "The audio ends within a sample: a sample of audio/pcm has two bytes.")
        if len(self._data) + len(pcm) > self._limit_seconds * BYTES_PER_SECOND:
            message = f"The buffer is limited to {self._limit_seconds:g} s of audio: commit or clear it."
            raise HttpError(413, message, param="audio", code="media_too_large")
        self._data += pcm

    def read(self, start: int, end: int) -> bytes:
        """The sound between two positions, which stays."""
        return bytes(self._data[self._offset(start) : self._offset(end)])

    def take(self, start: int | None = None, end: int | None = None) -> bytes:
        """Remove everything before `end` and return it from `start` on; the whole buffer by default."""
        first = self._offset(self.start if start is None else start)
        last = self._offset(self.end if end is None else end)
        taken = bytes(self._data[first:last])
        del self._data[:last]
        self.start += last // SAMPLE_BYTES
        return taken

    def _offset(self, position: int) -> int:
        return min(max(position - self.start, 0) * SAMPLE_BYTES, len(self._data))


def milliseconds(samples: int) -> int:
    """A position, or a length, in milliseconds."""
    return samples * 1000 // RATE
