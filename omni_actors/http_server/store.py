"""What a server keeps for later requests: uploaded files, responses, transcripts. Its processes share it.

Each kind is a SQLite database in the folder that the processes have in common, or in memory where there is only one. A
database is consistent whenever a process dies, and what it holds outlives that process. What changes often, while a
response or a session lasts, is in a journal instead, so that another process can go on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy
from msgspec import Struct

from omni_actors.errors import ErrorCode
from omni_actors.http_server.errors import HttpError
from omni_actors.logs import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

MAX_FILES = 1000
MAX_TRANSCRIPTS = 10_000
MAX_RESPONSES = 1000
MAX_VIDEOS = 1000
MAX_BYTES = 64 << 20  # of all transcripts, and of all responses; each response counts all turns before it
KEPT_SECONDS = 3600.0  # the same

BUSY_SECONDS = 10.0  # for which a process waits while another one writes
SECRET_BYTES = 32
PIECE_BYTES = 256 << 10  # of data that are read at once for a client
FRAMES = 1  # code of an array u8 in msgpack

FAST = "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;"  # survives a process, not the host
DURABLE = "PRAGMA journal_mode = DELETE; PRAGMA synchronous = FULL;"  # survives both, and may be on another host
TABLES = """
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


class VideoJob(Struct, frozen=True, omit_defaults=True):
    """A job of `/v1/videos`, whose data is the file; `process` makes it. Times are Unix times."""

    id: str
    created: float
    model: str
    prompt: str
    seconds: str
    size: str
    process: int
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = 0
    completed_at: int | None = None
    expires_at: int | None = None
    error: dict[str, str] | None = None
    bytes: int = 0


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
        durable: what is kept must survive the host.
    """

    def __init__(
        self,
        folder: str | None,
        name: str,
        kind: type[T],
        most: int,
        most_bytes: int,
        seconds: float,
        *,
        durable: bool = False,
    ) -> None:
        self._kind, self._most, self._most_bytes, self._seconds = name.removesuffix("s"), most, most_bytes, seconds
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_packed)
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=_unpacked)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            ":memory:" if folder is None else os.path.join(folder, f"{name}.db"),
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.executescript((DURABLE if durable else FAST) + TABLES)

    def add(self, key: str, value: T, size: int, data: bytes = b"", *, there: bool | None = None) -> int:
        """Keep a value and its data, which count `size` bytes, unless they alone are too large.

        Returns the Unix time until which they are kept; 0 if they cannot be written: the log says why. Also 0 unless
        there is a value with this id, whose place they take, or is none, as `there` says.
        """
        if size <= self._most_bytes:
            now, run = time.monotonic(), self._database.execute
            row = (key, now + self._seconds, size, self._encoder.encode(value), data)
            try:
                with self._lock, self._database:
                    run("BEGIN IMMEDIATE")
                    if there is not None and there != (run(FIND, (key, now)).fetchone() is not None):
                        return 0
                    run("DELETE FROM kept WHERE until < ? OR key = ?", (now, key))
                    run("INSERT INTO kept (key, until, size, value, data) VALUES (?, ?, ?, ?, ?)", row)
                    while run(IS_FULL, (self._most, self._most_bytes)).fetchone():
                        run("DELETE FROM kept WHERE number = (SELECT min(number) FROM kept)")
            except sqlite3.OperationalError as error:
                logger.error("cannot keep %s: %s", key, error)
                return 0
        return int(time.time() + self._seconds)

    async def keep(self, key: str, value: T, size: int, data: bytes = b"") -> None:
        """The same as `add`, on a thread. Raises `HttpError` 507 if it cannot be written."""
        if not await asyncio.to_thread(self.add, key, value, size, data):
            message = f"The server cannot write the {self._kind}: its operator must make room."
            raise HttpError(507, message, code="internal_error")

    async def get(self, key: str) -> T:
        """The value with this id. Raises `HttpError` 404 if it is not kept, or no longer."""
        if (found := await asyncio.to_thread(self.find, key)) is None:
            raise self.unknown(key)
        return found

    async def delete(self, key: str) -> dict[str, Any]:
        """Remove a value; returns what to answer. Raises `HttpError` 404 if there is none with this id."""
        if not await asyncio.to_thread(self.remove, key):
            raise self.unknown(key)
        return {"id": key, "object": self._kind, "deleted": True}

    def unknown(self, key: str) -> HttpError:
        """The refusal of an id."""
        message = f"There is no {self._kind} {key[:100]!r}, or no longer."
        return HttpError(404, message, param=f"{self._kind}_id", code=f"{self._kind}_not_found")

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
        """The `size` bytes of a value's data; in memory are no more than a client has room for.

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


# ---------------------------------------------------------------------------------------------------------------------
# Journals: what another process goes on with when the one of a client has died

LOST_SECONDS = 60.0  # for which a client may come back
SWEEP_SECONDS = 5.0
FOLLOW_SECONDS = 0.05  # between two looks at what another process writes
MAX_JOURNAL_BYTES = 32 << 20  # of one response or session
MAX_JOURNALS_BYTES = 256 << 20  # of all
JOURNAL_KEY = re.compile(r"[a-z]+_[0-9a-f]+")


class Journal:
    """A file that one process writes: the one that has locked it, which the system undoes when that process dies.

    What was written outlives the process, if not the host: no disk is waited for, so a write takes microseconds.
    """

    def __init__(self, path: str, flags: int = 0) -> None:
        self._path, self._given_up = path, False
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o600), "ab+")
        self.size = self._status.st_size

    def lock(self) -> bool:
        """Become the process that writes, if there is none; says whether this one is."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def append(self, data: bytes) -> None:
        """Write. What cannot be written is given up as a whole: the log says why."""
        if self._given_up:
            return
        try:
            if self.size + len(data) > MAX_JOURNAL_BYTES:
                raise OSError(errno.EFBIG, f"it has more than {MAX_JOURNAL_BYTES} bytes")
            while data:
                written = self._file.write(data)
                self.size, data = self.size + written, data[written:]
        except OSError as error:
            logger.warning("%s cannot be resumed: %s", os.path.basename(self._path), error)
            self._given_up = True
            self.remove()

    @property
    def is_replaced(self) -> bool:
        """Whether another journal has taken the place of this one."""
        return not self._status.st_nlink and os.path.exists(self._path)

    def read(self) -> bytes:
        """All that was written."""
        return os.pread(self._file.fileno(), self._status.st_size, 0)

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield what was written and is being written, in parts that end with an empty line, until no process writes.

        This one then writes: what the last one did not write to its end is removed.

        Raises:
            HttpError: 503 if nothing was written for a minute.
        """
        start, rest, heard = 0, b"", time.monotonic()
        while True:
            is_mine = self.lock()
            while data := await asyncio.to_thread(os.pread, self._file.fileno(), PIECE_BYTES, start):
                start, heard = start + len(data), time.monotonic()
                *parts, rest = (rest + data).split(b"\n\n")
                for part in parts:
                    yield part + b"\n\n"
            if is_mine:
                self._file.truncate(start - len(rest))
                self.size = start - len(rest)
                return
            if time.monotonic() - heard > LOST_SECONDS:
                message = f"Nothing of this response has come for {LOST_SECONDS:g} s: send the request again."
                raise HttpError(503, message, code=ErrorCode.TIMEOUT)
            await asyncio.sleep(FOLLOW_SECONDS)

    def rename(self, path: str) -> None:
        """Take the place of another journal, or of none; a journal that was given up takes none."""
        if self._status.st_nlink:
            os.rename(self._path, path)
        self._path = path

    def remove(self) -> None:
        """Give up what is written: nobody goes on with it. Idempotent, and another journal in its place stays."""
        if self._status.st_nlink:
            Path(self._path).unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes write. Idempotent."""
        self._file.close()

    @property
    def _status(self) -> os.stat_result:
        return os.fstat(self._file.fileno())


class Journals:
    """Journals by key, bounded in bytes and time. Its methods use files: call them on threads.

    Args:
        folder: where the folder `name` is; `None` for one that only this process has.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        temporary = tempfile.mkdtemp(prefix="omni-http-") if folder is None else None
        self._removal = weakref.finalize(self, shutil.rmtree, temporary, True) if temporary is not None else None
        self._folder = os.path.join(temporary or str(folder), name)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)

    def begin(self, key: str, data: bytes) -> Journal | None:
        """A journal that begins with `data` and that this process writes, in place of one with the same key.

        Returns `None` if it cannot be written: the log says why.
        """
        path = os.path.join(self._folder, key)
        try:
            journal = Journal(f"{path}.{secrets.token_hex(8)}", os.O_CREAT | os.O_EXCL)
        except OSError as error:
            logger.warning("%s cannot be resumed: %s", key, error)
            return None
        journal.lock()
        journal.append(data)
        journal.rename(path)
        return journal

    def find(self, key: str) -> Journal | None:
        """The journal with this key, if it is there, for this process to read; close it."""
        if JOURNAL_KEY.fullmatch(key):
            with contextlib.suppress(FileNotFoundError):
                return Journal(os.path.join(self._folder, key))
        return None

    def sweep(self) -> None:
        """Remove journals that nobody has written for `LOST_SECONDS`, and the oldest beyond `MAX_JOURNALS_BYTES`."""
        now, found = time.time(), []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = entry.stat()
                written = status.st_mtime
                if now - written > 2 * SWEEP_SECONDS:
                    with contextlib.closing(Journal(entry.path)) as journal:
                        if not journal.lock():  # a process writes it
                            os.utime(entry.path, (now, written := now))
                found.append((written, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for written, size, path in sorted(found):
            if now - written > LOST_SECONDS + 3 * SWEEP_SECONDS or total > MAX_JOURNALS_BYTES:
                Path(path).unlink(missing_ok=True)
                total -= size

    def close(self) -> None:
        """Remove the folder, if only this process has it."""
        if self._removal is not None:
            self._removal()
