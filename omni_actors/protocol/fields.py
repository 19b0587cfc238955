"""Field types and bounds shared by all messages."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from omni_actors.errors import InvalidPayload

Scalar = int | float | str | bool
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=128)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Dimension = Annotated[int, Meta(ge=0, le=2**40)]
Moment = Annotated[float, Meta(ge=0.0, le=1e11)]  # Unix time in seconds by the sender's clock; 0: it did not happen
TRACEPARENT = r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$"
PositiveInt = Annotated[int, Meta(ge=1, le=1_000_000)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian bytes, the form in which they travel."""
    packed = array.array("i", token_ids)
    return packed.tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """Inverse of `pack_token_ids`; raises `InvalidPayload` if the length is no multiple of 4."""
    if len(data) % 4:
        raise InvalidPayload(f"token ids are int32: {len(data)} bytes is no multiple of 4.")
    unpacked = array.array("i")
    unpacked.frombytes(data)
    return unpacked.tolist()


MAX_ATTEMPT = 255
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
