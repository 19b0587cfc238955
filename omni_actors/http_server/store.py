"""What a server keeps for later requests: uploaded files, responses, transcripts. Its processes share it.

Each kind is a SQLite database in the folder that the processes have in common, or in memory where there is only one. A
database is consistent whenever a process dies, and what it holds outlives that process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy
from msgspec import Struct

from omni_actors.logs import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

MAX_FILES = 1000
MAX_TRANSCRIPTS = 10_000
MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20  # of all transcripts, and of all responses; each response counts all turns before it
KEPT_SECONDS = 3600.0  # the same

BUSY_SECONDS = 10.0  # for which a process waits while another one writes
SECRET_BYTES = 32
PIECE_BYTES = 256 << 10  # of data that are read at once for a client
FRAMES = 1  # code of an array u8 in msgpack

TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS kept (
    number INTEGER PRIMARY KEY, key TEXT UNIQUE, until REAL, size INTEGER, value BLOB, data BLOB
);
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY, count INTEGER, bytes INTEGER);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
CREATE INDEX IF NOT EXISTS ends ON kept (until);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON kept BEGIN
    UPDATE totals SET count = count + 1, bytes = bytes + NEW.size;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON kept BEGIN
    UPDATE totals SET count = count - 1, bytes = bytes - OLD.size;
END;
"""
FIND = "SELECT number FROM kept WHERE key = ? AND until >= ?"
IS_FULL = "SELECT 1 FROM totals WHERE count > ? OR bytes > ?"


class UploadedFile(Struct, frozen=True):
    """A file of `/v1/files` without its content; `created` and `expires` are Unix times to show."""

    id: str
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int


class KeptResponse(Struct, frozen=True):
    """The turns that a further response continues, with their bytes. The data is the response as JSON."""

    size: int
    conversation: list[dict[str, Any]]
    conversation_bytes: int


class Store(Generic[T]):
    """Values by id, bounded in number, bytes and time. The oldest are removed first.

    Its methods may use a file: call those on threads whose values are large.

    Args:
        folder: where the database `name` is; `None` for one that only this process has.
        kind: type of the values, as msgspec decodes them.
        most, most_bytes, seconds: how many are kept, their bytes, and for how long.
    """

    def __init__(
        self, folder: str | None, name: str, kind: type[T], most: int, most_bytes: int, seconds: float
    ) -> None:
        self._most, self._most_bytes, self._seconds = most, most_bytes, seconds
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=_unpacked)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            ":memory:" if folder is None else os.path.join(folder, f"{name}.db"),
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.executescript(TABLES)

    def add(self, key: str, value: T, size: int, data: bytes = b"") -> int:
        """Keep a value and its data, which count `size` bytes, unless they alone are too large.

        Returns the Unix time until which they are kept; 0 if they cannot be written: the log says why.
        """
        if size <= self._most_bytes:
            now, run = time.monotonic(), self._database.execute
            row = (key, now + self._seconds, size, self._encoder.encode(value), data)
            try:
                with self._lock, self._database:
                    run("BEGIN IMMEDIATE")
                    run("DELETE FROM kept WHERE until < ? OR key = ?", (now, key))
                    run("INSERT INTO kept (key, until, size, value, data) VALUES (?, ?, ?, ?, ?)", row)
                    while run(IS_FULL, (self._most, self._most_bytes)).fetchone():
                        run("DELETE FROM kept WHERE number = (SELECT min(number) FROM kept)")
            except sqlite3.OperationalError as error:
                logger.error("cannot keep %s: %s", key, error)
                return 0
        return int(time.time() + self._seconds)

    def find(self, key: str) -> T | None:
        """The value with this id, if it is still kept."""
        found = self._rows("SELECT value FROM kept WHERE key = ? AND until >= ?", key, time.monotonic())
        return self._decoder.decode(found[0][0]) if found else None

    def data(self, key: str, start: int = 0, size: int = -1) -> bytes:
        """The data of a value from `start` on, `size` bytes or all; none if it is not kept any more."""
        with self._lock:
            found = self._database.execute(FIND, (key, time.monotonic())).fetchone()
            if found is None:
                return b""
            with self._database.blobopen("kept", "data", found[0], readonly=True) as blob:  # reads what is asked for
                blob.seek(start)
                return blob.read(size)

    async def pieces(self, key: str, size: int) -> AsyncIterator[bytes]:
        """The `size` bytes of a value's data, of which no more are in memory than a client has room for.

        Raises:
            LookupError: it is not kept any more.
        """
        for start in range(0, size, PIECE_BYTES):
            piece = await asyncio.to_thread(self.data, key, start, PIECE_BYTES)
            if not piece:
                raise LookupError(f"{key} has been removed while it was read.")
            yield piece

    def remove(self, key: str) -> bool:
        """Remove a value; false if there is none with this id."""
        return bool(self._rows("DELETE FROM kept WHERE key = ? AND until >= ? RETURNING 1", key, time.monotonic()))

    def values(self) -> Sequence[T]:
        """All values, the oldest first."""
        found = self._rows("SELECT value FROM kept WHERE until >= ? ORDER BY number", time.monotonic())
        return [self._decoder.decode(value) for (value,) in found]

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(statement, parameters).fetchall()


def secret_of(folder: str | None) -> bytes:
    """A secret of this server, which its processes share and nobody else can read.

    Args:
        folder: which only this user can read; `None` for a secret of this process alone.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    if folder is None:
        return secret
    draft = Path(folder) / f"secret.{os.getpid()}"
    draft.write_bytes(secret)
    try:
        os.link(draft, Path(folder) / "secret")  # whole or not at all; the first process makes it
    except FileExistsError:
        return (Path(folder) / "secret").read_bytes()
    finally:
        draft.unlink()
    return secret


def _packed(value: Any) -> msgspec.msgpack.Ext:
    """Encode the frames of a video, u8."""
    if not isinstance(value, numpy.ndarray) or value.dtype != numpy.uint8:
        raise NotImplementedError(f"{type(value).__name__} cannot be kept")
    return msgspec.msgpack.Ext(FRAMES, msgspec.msgpack.encode((value.shape, value.tobytes())))


def _unpacked(code: int, data: memoryview) -> numpy.ndarray:
    shape, pixels = msgspec.msgpack.decode(data, type=tuple[tuple[int, ...], bytes])
    return numpy.frombuffer(pixels, numpy.uint8).reshape(shape)
