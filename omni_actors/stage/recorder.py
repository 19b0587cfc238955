"""Records the messages of a stage in a file, for replay into that stage alone (`omni-actors replay`).

The file is a sequence of records, each a length (4 bytes, little-endian) and a msgpack array. The first is the
`RecordingHeader`, the others are `Entry`s: the frames of a message as `codec` makes them, with all of its buffers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from omni_actors.config import PipelineConfig
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import Envelope, encode
from omni_actors.protocol.header import Body, Header, ReplicaId
from omni_actors.stage.outgoing import Outgoing

logger = get_logger(__name__)

FORMAT = 1
LENGTH = struct.Struct("<I")
INBOUND = "in"


class RecordingHeader(Struct, frozen=True, array_like=True):
    """Which stage of which pipeline was recorded."""

    format: int
    pipeline_json: bytes
    stage: ReplicaId


class Entry(Struct, frozen=True, array_like=True):
    """`direction` is "in", or the name of the stage that a message went to; empty for the coordinator."""

    direction: Annotated[str, Meta(max_length=64)]
    frames: list[bytes]


class Recorder:
    """Writes one stage's messages, all on disk after `close`. A full disk ends the recording, not the stage."""

    def __init__(self, folder: str, pipeline: PipelineConfig, identity: ReplicaId) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        path = Path(folder) / f"{identity.stage}-{identity.replica}-{identity.epoch}.omnirec"
        self._file = open(path, "wb", opener=_private)  # noqa: SIM115 - until close
        self._limits = pipeline.limits
        self._broken = False
        # Without the folder: a replay records nothing.
        coordinator = msgspec.structs.replace(pipeline.coordinator, record_dir=None)
        own = msgspec.structs.replace(pipeline, coordinator=coordinator)
        self._write(RecordingHeader(FORMAT, msgspec.json.encode(own), identity))

    def received(self, envelope: Envelope[Any]) -> None:
        """Write a message that came in."""
        self._message(INBOUND, envelope.header, envelope.body, envelope.buffers)

    def sent(self, messages: Iterable[Outgoing]) -> None:
        """Write messages that go out, under the stage that they go to."""
        for message in messages:
            stage = message.destination.stage if message.destination is not None else ""
            self._message(stage, message.header, message.body, message.buffers)

    def close(self) -> None:
        """Write what is left to disk."""
        try:
            self._file.close()
        except OSError as error:  # the last records did not fit on the disk
            self._end(error)

    def _message(self, direction: str, header: Header, body: Body, buffers: Any) -> None:
        try:
            frames = encode(header, body, buffers, self._limits)
        except OmniError:  # it will not be sent either: the request fails, and that is recorded
            return
        self._write(Entry(direction, [bytes(frame) for frame in frames]))

    def _write(self, record: Struct) -> None:
        if self._broken:
            return
        data = msgspec.msgpack.encode(record)
        try:
            self._file.write(LENGTH.pack(len(data)) + data)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._broken = True
        logger.warning("the recording ends here: %s: %s", self._file.name, error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read(path: Path) -> tuple[RecordingHeader, Iterator[Entry]]:
    """Read a recording. One that was cut off ends with its last complete record.

    Raises:
        InvalidRequest: the file is no recording, or has another format.
    """
    records = _records(path)
    try:
        origin = msgspec.msgpack.decode(next(records), type=RecordingHeader)
    except (StopIteration, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{path} is not a recording.") from error
    if origin.format != FORMAT:
        raise InvalidRequest(f"{path} has the format {origin.format}, this version reads {FORMAT}.")
    return origin, (msgspec.msgpack.decode(data, type=Entry) for data in records)


def _records(path: Path) -> Iterator[bytes]:
    if path.is_fifo():
        raise InvalidRequest(f"Cannot read {path}: it is not a regular file.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"Cannot read {path}: {error.strerror}.") from error
    with file:
        while len(prefix := file.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(prefix)
            data = file.read(length)
            if len(data) < length:
                return
            yield data
