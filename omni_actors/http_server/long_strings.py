"""Long strings of a JSON body, such as base64: read where they lie in the body, a piece at a time.

One call on 40 MB would hold the interpreter lock for a tenth of a second, in whatever thread it runs. The functions
here belong in a thread and let others run between the pieces.
"""

from __future__ import annotations

import binascii

import msgspec

from omni_actors.http_server.decoding import decode
from omni_actors.http_server.errors import bad_field

QUOTE = ord('"')
PIECE = 1 << 20  # characters; a multiple of 4, so that base64 can be decoded piece by piece


def string_of(value: msgspec.Raw, param: str) -> memoryview:
    """The UTF-8 of a JSON string, copied only if it holds escapes. Raises `HttpError` if it is not a string."""
    view = memoryview(value)
    if view[0] != QUOTE:
        raise bad_field(param, f"{param}: expected a string.")
    if any(b"\\" in bytes(view[start : start + PIECE]) for start in range(0, len(view), PIECE)):
        return memoryview(decode(value, str, param).encode())
    return view[1:-1]


def base64_of(text: memoryview, param: str) -> bytes:
    """Decode base64. Raises `HttpError` if it is not valid."""
    pieces = []
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE]
        try:
            pieces.append(binascii.a2b_base64(piece, strict_mode=True))
        except binascii.Error as error:
            raise bad_field(param, f"This is not valid base64: {error}.", "invalid_base64") from None
        if len(pieces[-1]) < PIECE * 3 // 4 and start + PIECE < len(text):
            raise bad_field(param, "This is not valid base64: its end is followed by more.", "invalid_base64")
    return b"".join(pieces)
