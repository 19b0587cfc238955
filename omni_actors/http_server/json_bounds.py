"""Bounds of a JSON body, checked before it is decoded.

The decoder holds the interpreter lock until it is done, and it counts the items of a list only when it has made them.
The walk here goes from quotation mark to quotation mark, and other threads can run in between.
"""

from __future__ import annotations

from omni_actors.http_server.errors import HttpError

MAX_VALUES = 100_000  # members of objects and items of lists, after the first one of each
MAX_TOKEN_VALUES = 1_100_000  # the same where a list of token ids may be among them
MAX_CONTAINERS = 20_000  # lists and objects
MAX_TEXT_BYTES = 16 << 20  # all but media
MAX_QUOTES = 1_000_000  # around strings and in them
SHORT = 32_768  # bytes of a body that cannot exceed any of these

SEPARATORS = (b",", b":")
MEDIA_KEYS = frozenset({b"data", b"url", b"file_data", b"image_url"})  # whose strings are not decoded with the rest
MEDIA_BYTES = 1024  # a shorter string counts as text under any key


def check_bounds(body: bytes, max_values: int) -> None:
    """Raise `HttpError` 413 if decoding this JSON would take long. Whether it is valid is not looked at."""
    if len(body) <= SHORT:
        return
    values = containers = text = position = begin = 0
    inside = is_medium = False
    key = b""
    for _ in range(MAX_QUOTES):
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        if not inside:
            between = body[position:end] if end - position <= MAX_TEXT_BYTES else b""
            text += end - position
            values += between.count(b",")
            if between not in SEPARATORS:
                containers += between.count(b"[") + between.count(b"{")
            is_medium = key in MEDIA_KEYS and between.strip() == b":"
            inside, begin = True, end + 1
        elif quote < 0 or not _escaped(body, position, quote):
            length = end - begin
            text += 0 if is_medium and length > MEDIA_BYTES else length
            key = body[begin:end] if length < MEDIA_BYTES else b""
            inside = False
        if text > MAX_TEXT_BYTES:
            raise _too_large(f"{MAX_TEXT_BYTES} bytes without its media")
        if values > max_values:
            raise _too_large(f"{max_values} members of objects and items of lists")
        if containers > MAX_CONTAINERS:
            raise _too_large(f"{MAX_CONTAINERS} lists and objects")
        if quote < 0:
            return
        position = quote + 1
    raise _too_large(f"{MAX_QUOTES} quotation marks")


def _escaped(body: bytes, start: int, quote: int) -> bool:
    """Whether an odd number of backslashes, back to `start` at most, precedes the quotation mark."""
    if body[quote - 1 : quote] != b"\\":
        return False
    before = body[start:quote]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _too_large(what: str) -> HttpError:
    return HttpError(413, f"The body has more than {what}; send less in one request.", code="body_too_large")
