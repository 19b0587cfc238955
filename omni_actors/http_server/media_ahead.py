"""Decodes the media of a request: those of one request at the same time, and the long ones while its body arrives.

What is begun ahead decides nothing. The request is handled as if nothing had been begun, in the order of its media, and
takes an outcome only where it would have found the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
import numpy

from omni_actors.errors import Aborted, OmniError
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.long_string_scan import LONG, LongString, LongStringScan
from omni_actors.http_server.long_strings import base64_of, string_of
from omni_actors.http_server.reservations import Reservation
from omni_actors.media.decoders import Decoder, DecoderThreads, Task
from omni_actors.media.limits import AUDIO_RATE, DEFAULT_VIDEO_RATE, MediaLimits
from omni_actors.media.messages import AUDIO_FILE, IMAGE_FILE, VIDEO_FILE, Item
from omni_actors.protocol.payloads import MEDIA_MODALITIES

KINDS = {"audio": AUDIO_FILE, "image": IMAGE_FILE, "video": VIDEO_FILE}
SOUND_KEY = b"data"  # of `input_audio`; under the other keys is a data: URI, which says what it holds
HEAD_BYTES = 256  # of a data: URI, before its data
SMALL_BYTES = 4 << 20  # after decoding: a minute of sound, 1.4 megapixels
GROWTH = 2  # times the bytes of its file that a larger one may take after decoding


class Outcome(NamedTuple):
    """A medium as the client library takes it, and its bytes after decoding."""

    value: Any
    size: int


class Taken:
    """Bytes that the media of one request take after decoding, as far as they are decoded."""

    def __init__(self) -> None:
        self.size = 0


class Begun:
    """A medium that is being checked or decoded, on a thread.

    Args:
        taken: of the request, for a bound on what its media take while they are decoded at the same time.
        decoded: decode sound and pictures, too, where that is worth it; else they are checked by their headers only.
    """

    def __init__(
        self,
        decoders: DecoderThreads,
        modality: str,
        data: bytes,
        limits: MediaLimits,
        taken: Taken,
        *,
        decoded: bool = False,
    ) -> None:
        self.modality = modality
        self.data = data
        self._limits = limits
        self._taken = taken
        self._decoded = decoded
        self._used = 0
        self.task: Task[Outcome] = decoders.submit(self._run)

    async def outcome(self, used: int) -> Outcome | None:
        """The outcome, or `None` if the medium must be looked at again, because other media take `used` bytes.

        Raises what the decoder raises, if it would raise the same again.
        """
        try:
            found = await asyncio.wrap_future(self.task.future)
        except OmniError:
            if self._used != used:
                return None
            raise
        return found if used + found.size <= self._limits.decoded_bytes else None

    def withdraw(self) -> None:
        """Do not begin with it any more. What runs already may end: a new decoder would take longer than most media."""
        self.task.future.cancel()

    def cancel(self) -> None:
        """Give it up, also while it runs. Idempotent."""
        self.task.cancel()

    def _run(self, decoder: Decoder) -> Outcome:
        self._used = self._taken.size
        found = looked_at(decoder, self.modality, self.data, self._limits, self._used)
        if self._decoded and isinstance(found.value, bytes) and worth_decoding(self.data, found.size):
            found = Outcome(_decoded(decoder, self.modality, self.data, self._limits, self._used), found.size)
        self._taken.size += found.size
        return found


def looked_at(decoder: Decoder, modality: str, data: bytes, limits: MediaLimits, used: int) -> Outcome:
    """Decode a video, and check sound or a picture by its header: the stage that takes them decodes them.

    Args:
        used: bytes that the other media of the request take after decoding.

    Raises:
        what `Decoder.decode` does.
    """
    items = [_item(modality, data)]
    if modality != "video":
        return Outcome(data, decoder.measure(items, limits, used).size)
    (frames,) = decoder.decode(items, limits, used)
    return Outcome((frames, DEFAULT_VIDEO_RATE), frames.nbytes)


def worth_decoding(data: bytes, size: int) -> bool:
    """Whether sound or a picture is sent on decoded: not where that takes much more memory than its file.

    Args:
        size: bytes after decoding.
    """
    return size <= max(SMALL_BYTES, GROWTH * len(data))


def _decoded(decoder: Decoder, modality: str, data: bytes, limits: MediaLimits, used: int) -> Any:
    try:
        (array,) = decoder.decode([_item(modality, data)], limits, used)
    except Aborted:
        raise
    except OmniError:
        return data  # the stage that decodes it says what is wrong
    return (array, AUDIO_RATE) if modality == "audio" else array


def _item(modality: str, data: bytes) -> tuple[Item, bytes]:
    return Item(KINDS[modality], f"The {modality}", len(data)), data


class MediaAhead:
    """The media of one request whose strings are complete while its body still arrives.

    Args:
        count: media that may be begun.
        media_bytes: of the largest one.
        reservation: for the bytes that are held ahead; what does not fit is left for later.
        decoded: decode sound and pictures, too. Without it the files are sent on, and only checked.
    """

    def __init__(
        self,
        decoders: DecoderThreads,
        limits: MediaLimits,
        count: int,
        media_bytes: int,
        reservation: Reservation,
        *,
        decoded: bool,
    ) -> None:
        self._decoders = decoders
        self._limits = limits
        self._left = count
        self._media_bytes = media_bytes
        self._reservation = reservation
        self._decoded = decoded
        self._scan = LongStringScan()
        self.taken = Taken()
        self._reading: set[asyncio.Task[None]] = set()
        self._begun: dict[bytes, Begun] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the body."""
        for found in self._scan.feed(piece):
            size = sum(map(len, found.pieces)) * 3 // 4
            if self._left and size <= self._media_bytes and self._reservation.try_add(size):
                self._left -= 1
                task = asyncio.create_task(self._begin(found), name="media ahead")
                self._reading.add(task)

    async def find(self, text: memoryview) -> Begun | None:
        """The medium whose base64 this is, if it has been begun."""
        if not self._reading or len(text) < LONG // 2:
            return None
        await asyncio.gather(*self._reading)
        digest = await asyncio.to_thread(_digest, text)
        return self._begun.get(digest)

    def withdraw(self) -> None:
        """Begin with nothing more, and free what was begun. Idempotent."""
        for task in self._reading:
            task.cancel()
        for begun in self._begun.values():
            begun.withdraw()
        self._reading, self._begun, self._left = set(), {}, 0
        self._reservation.release()

    def close(self) -> None:
        """Do the same, and give up what runs: the request has ended. Idempotent."""
        for begun in self._begun.values():
            begun.cancel()
        self.withdraw()

    async def _begin(self, found: LongString) -> None:
        read = await asyncio.to_thread(_read, found)
        if read is None or read.digest in self._begun:
            return
        begun = Begun(self._decoders, read.modality, read.data, self._limits, self.taken, decoded=self._decoded)
        self._begun[read.digest] = begun
        ended = asyncio.wrap_future(begun.task.future)
        ended.add_done_callback(lambda future: self._keep(read.digest, begun, future))

    def _keep(self, digest: bytes, begun: Begun, ended: asyncio.Future[Outcome]) -> None:
        """Count what was decoded, and forget it if it does not fit."""
        if ended.cancelled() or ended.exception() is not None or self._begun.get(digest) is not begun:
            return
        value = ended.result().value
        arrays = value if isinstance(value, tuple) else (value,)
        if not self._reservation.try_add(sum(one.nbytes for one in arrays if isinstance(one, numpy.ndarray))):
            del self._begun[digest]


class _Read(NamedTuple):
    """A medium of the body, with the digest of its base64, by which it is found again."""

    modality: str
    data: bytes
    digest: bytes


def _read(found: LongString) -> _Read | None:
    """Decode the base64 of a medium; `None` for what is none, or wrong: the request's own way finds out what it is."""
    modality = "audio"
    try:
        text = string_of(msgspec.Raw(b"".join([b'"', *found.pieces, b'"'])), "")
        if found.key != SOUND_KEY:
            head, comma, _ = bytes(text[:HEAD_BYTES]).lower().partition(b",")
            kind, _, encoding = head.removeprefix(b"data:").partition(b";")
            modality = kind.partition(b"/")[0].decode(errors="replace")
            if not comma or encoding != b"base64" or modality not in MEDIA_MODALITIES:
                return None
            text = text[len(head) + 1 :]
        return _Read(modality, base64_of(text, ""), _digest(text))
    except HttpError:
        return None


def _digest(text: memoryview) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


AHEAD: ContextVar[MediaAhead] = ContextVar("media_ahead")  # of the request that this task handles
