"""Tensors as they cross a socket, and as they lie in host memory."""

from __future__ import annotations

import enum
import math
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import Dimension

MAX_RANK = 8
BufferIndex = Annotated[int, Meta(ge=0, le=4096)]


class DType(enum.StrEnum):
    """Element types that may cross the wire."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


FLOATING = (DType.BF16, DType.F16, DType.F32)
_ITEMSIZE = {DType.BF16: 2, DType.F16: 2, DType.F32: 4, DType.I32: 4, DType.I64: 8, DType.U8: 1}


def check_extent(dtype: DType, shape: tuple[int, ...], n_bytes: int, what: str) -> None:
    """Raise `InvalidPayload` unless `n_bytes` bytes hold exactly `shape` elements of `dtype`."""
    if len(shape) > MAX_RANK:
        raise InvalidPayload(f"{what}: rank {len(shape)} exceeds the maximum of {MAX_RANK}.")
    if any(dimension < 0 for dimension in shape):
        raise InvalidPayload(f"{what}: shape {shape} has a negative dimension.")
    expected = math.prod(shape) * dtype.itemsize
    if expected != n_bytes:
        raise InvalidPayload(f"{what}: shape {shape} of {dtype} needs {expected} bytes, got {n_bytes}.")


class HostTensor(NamedTuple):
    """A tensor in host memory, without torch: C-contiguous little-endian `data` of `shape` elements of `dtype`."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def validate(self, what: str = "tensor") -> HostTensor:
        """Return self, or raise `InvalidPayload` if shape, dtype and length disagree."""
        check_extent(self.dtype, self.shape, memoryview(self.data).nbytes, what)
        return self


class TensorRef(Struct, frozen=True, array_like=True):
    """Describes the tensor in buffer number `buffer` of the same message."""

    dtype: DType
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=MAX_RANK)]
    buffer: BufferIndex
