"""What a process and its decoder say to each other, over a socket pair: msgpack, followed by raw data.

Each message is the length of its head (8 bytes), the head, and the bytes that the head announces.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from omni_actors.media.limits import MediaLimits

AUDIO_ARRAY: Final = "audio array"
AUDIO_FILE: Final = "audio file"
IMAGE_FILE: Final = "image file"
LAYERED_FILE: Final = "image file with alpha"
VIDEO_FILE: Final = "video file"
UNKNOWN_FILE: Final = "unknown file"
IMAGE_MODES: Final = {IMAGE_FILE: "RGB", LAYERED_FILE: "RGBA"}  # of what images become

_LENGTH: Final = struct.Struct(">Q")
_HEAD_BYTES: Final = 1 << 20
Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class Item(Struct, frozen=True):
    """A medium to decode.

    Args:
        what: its name in error messages.
        size: bytes of its data, which follow the head.
        rate: of an array of samples, in Hz.
    """

    kind: str
    what: str
    size: int
    rate: int = 0


class Job(Struct, frozen=True):
    """Measure all items; then decode them, unless `measure` says that this is all. An unknown file is only named.

    Other media of the request have `used` bytes of what the limits allow.
    """

    items: tuple[Item, ...]
    limits: MediaLimits
    used: int = 0
    measure: bool = False


class Started(Struct, frozen=True, tag="started"):
    """The decoder is there, with its limits in force."""


class Measured(Struct, frozen=True, tag="measured"):
    """What all headers say: the bytes after decoding, and the length of all sounds, 0 if one does not say its own.

    Decoding follows, unless only this was asked.
    """

    size: int
    seconds: float = 0.0
    modality: str = ""  # of an unknown file


class Decoded(Struct, frozen=True, tag="decoded"):
    """The next item; its data follow: f32 for one dimension, u8 for more."""

    shape: tuple[int, ...]


class Refused(Struct, frozen=True, tag="refused"):
    """The job ends with an error, which has the name of its class."""

    error: str
    message: str
    hint: str


Reply = Started | Measured | Decoded | Refused


class Channel:
    """One end of the socket pair.

    Every call raises `EOFError` or `OSError` when the other end is gone, and `TimeoutError` after `deadline`, a point
    in time of the monotonic clock.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.deadline: float | None = None

    def send(self, head: Any, data: Sequence[Buffer] = ()) -> None:
        """Send a message."""
        packed = msgspec.msgpack.encode(head)
        self._limit()
        self._socket.sendall(_LENGTH.pack(len(packed)) + packed)
        for buffer in data:
            self._limit()
            self._socket.sendall(buffer)

    def receive(self, kind: type[T] | Any) -> T:
        """Receive the head of a message. Raises `msgspec.MsgspecError` for one of another form."""
        (length,) = _LENGTH.unpack(self.data(bytearray(_LENGTH.size)))
        if length > _HEAD_BYTES:
            raise EOFError(f"a head of {length} bytes")
        decoded: T = msgspec.msgpack.decode(self.data(bytearray(length)), type=kind)
        return decoded

    def data(self, into: bytearray | memoryview) -> bytearray | memoryview:
        """Fill a buffer with what follows a head."""
        view = memoryview(into)
        while view.nbytes:
            self._limit()
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other end is closed")
            view = view[count:]
        return into

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def _limit(self) -> None:
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
