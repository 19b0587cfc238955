"""What the server keeps in memory between requests: uploaded files, and transcripts of spoken answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from omni_actors.http_server.errors import HttpError


@dataclass(frozen=True)
class UploadedFile:
    """A file of `/v1/files`."""

    id: str
    name: str
    purpose: str
    data: bytes
    created: float


class FileStore:
    """Uploaded files, bounded in bytes and in time. The oldest are removed first.

    Args:
        limit: bytes of all files together.
        seconds: how long a file is kept.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._files: dict[str, UploadedFile] = {}

    def add(self, name: str, purpose: str, data: bytes) -> UploadedFile:
        """Keep a file, in place of the oldest ones if need be. Raises `HttpError` 413 if it alone is too large."""
        if len(data) > self._limit:
            raise HttpError(413, f"All files together are limited to {self._limit} bytes.", param="file")
        file = UploadedFile(f"file-{uuid.uuid4().hex}", name, purpose, data, time.time())
        self._files[file.id] = file
        self._expire()
        while sum(len(held.data) for held in self._files.values()) > self._limit:
            del self._files[next(iter(self._files))]
        return file

    def find(self, file_id: str) -> UploadedFile | None:
        """The file with this id, if it is still kept."""
        self._expire()
        return self._files.get(file_id)

    def remove(self, file_id: str) -> bool:
        """Remove a file; false if there is none with this id."""
        return self._files.pop(file_id, None) is not None

    def list(self) -> Sequence[UploadedFile]:
        """All files, the oldest first."""
        self._expire()
        return tuple(self._files.values())

    def expires(self, file: UploadedFile) -> int:
        """Unix time at which a file is removed."""
        return int(file.created + self._seconds)

    def _expire(self) -> None:
        oldest = time.time() - self._seconds
        for file in [file for file in self._files.values() if file.created < oldest]:
            del self._files[file.id]


class Transcripts:
    """Texts of spoken answers by audio id, so that a later turn can refer to them. The oldest are removed first."""

    SECONDS = 3600
    LIMIT = 10_000

    def __init__(self) -> None:
        self._texts: dict[str, tuple[float, str]] = {}

    def add(self, audio_id: str, text: str) -> int:
        """Keep a text; returns the Unix time until which its id is known."""
        now = time.time()
        self._texts[audio_id] = (now + self.SECONDS, text)
        while len(self._texts) > self.LIMIT or next(iter(self._texts.values()))[0] < now:
            del self._texts[next(iter(self._texts))]
        return int(now + self.SECONDS)

    def find(self, audio_id: str) -> str | None:
        """The text of a spoken answer, if it is still kept."""
        expires, text = self._texts.get(audio_id, (0.0, ""))
        return text if expires >= time.time() else None
