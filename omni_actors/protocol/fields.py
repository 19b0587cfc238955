"""Field types and their bounds, shared by all messages."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from omni_actors.errors import InvalidPayload

MAX_ATTEMPT = 255
TOKEN_BYTES = 4  # token ids travel as int32
TRACEPARENT = r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$"

Scalar = int | float | str | bool
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=128)]
StageName = Annotated[str, Meta(min_length=1, max_length=64)]
StageNameOrEmpty = Annotated[str, Meta(max_length=64)]
ReplicaIndex = Annotated[int, Meta(ge=0, le=65535)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=256)]
EndpointOrEmpty = Annotated[str, Meta(max_length=256)]
Moment = Annotated[float, Meta(ge=0.0, le=1e11)]  # Unix time in seconds by the sender's clock; 0: it did not happen
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]  # lower values come first
Count = Annotated[int, Meta(ge=0, le=2**53)]
PositiveInt = Annotated[int, Meta(ge=1, le=1_000_000)]
Dimension = Annotated[int, Meta(ge=0, le=2**40)]
Steps = Annotated[int, Meta(ge=1, le=1_000_000)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as they travel: int32, little-endian."""
    return array.array("i", token_ids).tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """Decode what `pack_token_ids` encoded. Raises `InvalidPayload` if the length is not a multiple of 4."""
    check_token_ids(data)
    return array.array("i", data).tolist()


def check_token_ids(data: bytes) -> None:
    """Raise `InvalidPayload` unless the length is a multiple of 4."""
    if len(data) % 4:
        raise InvalidPayload(f"token_ids are int32, so their length must be a multiple of 4 bytes; got {len(data)}.")
