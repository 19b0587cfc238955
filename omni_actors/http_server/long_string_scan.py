"""Finds the long strings of a JSON body while it arrives.

A walk from quotation mark to quotation mark, as in `json_bounds.py`: nothing is copied or decoded, and whether the body
is valid JSON is found out later, by the decoder. What is found here is a guess that may save time and decides nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from omni_actors.http_server.json_bounds import MEDIA_KEYS

LONG = 65_536  # characters of a string that is worth a head start
MAX_QUOTES = 20_000  # of a body; a chat with media has hundreds
MAX_KEY = 64  # bytes
MAX_BETWEEN = 16  # bytes from a key to its value

Pieces = list[memoryview]


class LongString(NamedTuple):
    """A string that is complete: its key, and its characters as they lie in the pieces of the body."""

    key: bytes
    pieces: Pieces


class LongStringScan:
    """Takes the pieces of a body in order."""

    def __init__(self) -> None:
        self._quotes = 0
        self._key = b""  # the last short string
        self._between = b""  # what has followed it
        self._inside = False
        self._is_medium = False
        self._string: Pieces = []
        self._length = 0
        self._backslashes = 0  # directly before the next character

    def feed(self, piece: bytes) -> list[LongString]:
        """The long strings of media that end in this piece. It must not change afterwards."""
        found: list[LongString] = []
        view, position = memoryview(piece), 0
        while self._quotes < MAX_QUOTES:
            quote = piece.find(b'"', position)
            end = quote if quote >= 0 else len(piece)
            if self._inside:
                self._add(view[position:end])
            elif len(self._between) <= MAX_BETWEEN:
                self._between += piece[position : min(end, position + MAX_BETWEEN + 1)]
            if quote < 0:
                return found
            self._quotes += 1
            if self._inside and self._backslashes % 2:
                self._add(view[quote : quote + 1])
            elif self._inside:
                found += self._end()
            else:
                self._begin()
            position = quote + 1
        self._string = []
        return found

    def _begin(self) -> None:
        self._is_medium = self._key in MEDIA_KEYS and self._between.strip() == b":"
        self._inside, self._string, self._length, self._backslashes = True, [], 0, 0

    def _add(self, part: memoryview) -> None:
        """Add characters to the string."""
        if not part:
            return
        self._length += len(part)
        if self._is_medium or self._length <= MAX_KEY:
            self._string.append(part)
        plain = len(bytes(part).rstrip(b"\\")) if part[-1] == ord("\\") else len(part)
        run = len(part) - plain
        self._backslashes = run + (self._backslashes if run == len(part) else 0)

    def _end(self) -> list[LongString]:
        found = [LongString(self._key, self._string)] if self._is_medium and self._length >= LONG else []
        self._key = b"".join(self._string) if self._length <= MAX_KEY else b""
        self._inside, self._string, self._between = False, [], b""
        return found
