"""What the server keeps in memory between requests: uploaded files, and transcripts of spoken answers."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from omni_actors.http_server.errors import HttpError


@dataclass(frozen=True)
class UploadedFile:
    """A file of `/v1/files`; `created` and `expires` are Unix times to show, `kept_until` is a monotonic one."""

    id: str
    name: str
    purpose: str
    data: bytes
    created: int
    expires: int
    kept_until: float


class FileStore:
    """Uploaded files, bounded in number, bytes and time. The oldest are removed first.

    Args:
        limit: bytes of all files together.
        seconds: how long a file is kept.
    """

    FILES = 1000
    NAME_BYTES = 255

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._files: dict[str, UploadedFile] = {}

    def add(self, name: str, purpose: str, data: bytes) -> UploadedFile:
        """Keep a file, in place of the oldest ones if need be.

        Raises:
            HttpError: 413 if it alone is too large, 400 if its name is too long.
        """
        if len(data) > self._limit:
            message = f"All files together are limited to {self._limit} bytes."
            raise HttpError(413, message, param="file", code="media_too_large")
        if len(name.encode()) > self.NAME_BYTES:
            message = f"The file's name has more than {self.NAME_BYTES} bytes."
            raise HttpError(400, message, param="file", code="invalid_value")
        now = time.time()
        kept_until = time.monotonic() + self._seconds
        file = UploadedFile(
            f"file-{uuid.uuid4().hex}", name, purpose, data, int(now), int(now + self._seconds), kept_until
        )
        self._expire()
        self._files[file.id] = file
        while len(self._files) > self.FILES or sum(len(held.data) for held in self._files.values()) > self._limit:
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

    def _expire(self) -> None:
        now = time.monotonic()
        for file in [file for file in self._files.values() if file.kept_until < now]:
            del self._files[file.id]


class Transcripts:
    """Texts of spoken answers by audio id, so that a later turn can refer to them. The oldest are removed first."""

    SECONDS = 3600
    LIMIT = 10_000

    def __init__(self) -> None:
        self._texts: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def add(self, audio_id: str, text: str) -> int:
        """Keep a text; returns the Unix time until which its id is known."""
        now = time.monotonic()
        self._texts[audio_id] = (now + self.SECONDS, text)
        while len(self._texts) > self.LIMIT or next(iter(self._texts.values()))[0] < now:
            self._texts.popitem(last=False)
        return int(time.time() + self.SECONDS)

    def find(self, audio_id: str) -> str | None:
        """The text of a spoken answer, if it is still kept."""
        kept_until, text = self._texts.get(audio_id, (0.0, ""))
        return text if kept_until >= time.monotonic() else None


class KeptResponse(NamedTuple):
    """A response of `/v1/responses` as JSON, and the turns that another one continues with their bytes."""

    content: bytes
    conversation: list[dict[str, Any]]
    conversation_bytes: int
    kept_until: float

    @property
    def size(self) -> int:
        """Bytes of both."""
        return len(self.content) + self.conversation_bytes


class Responses:
    """Responses with their conversations, bounded in number, bytes and time. The oldest are removed first."""

    SECONDS = 3600.0
    LIMIT = 1000
    BYTES = 64 << 20  # of texts and media; each response counts all turns before it

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._bytes = 0

    def add(self, response_id: str, content: bytes, conversation: list[dict[str, Any]]) -> None:
        """Keep a response, unless it alone is too large: then it is not found later."""
        kept = KeptResponse(content, conversation, _size(conversation), time.monotonic() + self.SECONDS)
        if kept.size > self.BYTES:
            return
        self._kept[response_id] = kept
        self._bytes += kept.size
        while len(self._kept) > self.LIMIT or self._bytes > self.BYTES or self._oldest_has_expired():
            self.remove(next(iter(self._kept)))

    def find(self, response_id: str) -> KeptResponse:
        """The response with this id. Raises `HttpError` 404 if it is not kept, or no longer."""
        found = self._kept.get(response_id)
        if found is None or found.kept_until < time.monotonic():
            raise HttpError(
                404,
                f"There is no response {response_id[:100]!r}, or no longer: send its items again.",
                param="response_id",
                code="response_not_found",
            )
        return found

    def remove(self, response_id: str) -> None:
        """Forget a response."""
        self._bytes -= self._kept.pop(response_id).size

    def _oldest_has_expired(self) -> bool:
        return next(iter(self._kept.values())).kept_until < time.monotonic()


def _size(value: Any) -> int:
    """Bytes of the texts and media in nested lists and mappings, with something for each container."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(_size(item) for item in value.values())
    if isinstance(value, list | tuple):
        return 64 + sum(_size(item) for item in value)
    return int(getattr(value, "nbytes", 8))
