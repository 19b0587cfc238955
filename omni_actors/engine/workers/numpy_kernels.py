"""Runs vLLM's Triton kernels with numpy where there is no GPU.

The kernels of vLLM's V2 runner prepare a step and its sampling: a few numbers of each request at a time. Triton's
interpreter takes 4 to 20 ms for each of them, six parts of seven of a step of a small model. The same Python functions
take little if the language that they name computes with numpy. A kernel that uses more of the language than is here is
left to the interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import triton.language
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpretedFunction

PACKAGE = "vllm.v1.worker.gpu."
ANYTHING = 1 << 40  # bytes behind an address of which nothing else is known
DTYPES = {
    "int1": np.bool_, "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64, "uint8": np.uint8,
    "float32": np.float32, "float64": np.float64,
}  # fmt: skip
TYPED = {torch.bool: np.bool_} | {getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)}


class Value(np.ndarray):
    """A tensor of Triton: never changed in place."""

    def to(self, dtype: Any) -> Value:
        """The values as another type."""
        return cast("Value", self.astype(dtype))

    def __iadd__(self, other: Any) -> Value:  # type: ignore[misc]
        return cast("Value", self + other)

    def __isub__(self, other: Any) -> Value:  # type: ignore[misc, override]
        return cast("Value", self - other)

    def __imul__(self, other: Any) -> Value:  # type: ignore[misc]
        return cast("Value", self * other)

    def __iand__(self, other: Any) -> Value:  # type: ignore[misc]
        return cast("Value", self & other)

    def __ior__(self, other: Any) -> Value:  # type: ignore[misc]
        return cast("Value", self | other)


def value(numbers: Any) -> Value:
    """Numbers of any kind as a tensor."""
    return np.asarray(numbers).view(Value)


class Pointer:
    """Places in memory: `memory` is what begins at some address, `place` one or many indices into it."""

    __slots__ = ("memory", "place")

    def __init__(self, memory: NDArray[Any], place: Any = 0) -> None:
        self.memory, self.place = memory, place

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor) -> Pointer:
        """The first number of a tensor on the CPU."""
        storage, dtype = tensor.untyped_storage(), TYPED[tensor.dtype]
        return cls(memory_at(storage.data_ptr(), storage.nbytes(), dtype), tensor.storage_offset())

    def __add__(self, distance: Any) -> Pointer:
        return Pointer(self.memory, self.place + distance)

    __radd__ = __add__

    def __sub__(self, distance: Any) -> Pointer:
        return Pointer(self.memory, self.place - distance)


def memory_at(address: int, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """The memory of `size` bytes at an address."""
    if not size:
        return np.zeros(0, dtype)
    return np.frombuffer(cast("Any", (ctypes.c_char * size).from_address(address)), dtype)


class Language:
    """What stands for `triton.language` in a kernel: names and arguments are Triton's."""

    def __init__(self) -> None:
        self.index = self.grid = tuple[int, ...]()
        vars(self).update(DTYPES)

    constexpr = staticmethod(lambda given: given)
    debug_barrier = static_assert = staticmethod(lambda *_: None)
    range = static_range = staticmethod(lambda *ends, **_: range(*ends))
    cdiv = staticmethod(lambda number, divisor: -(-number // divisor))
    multiple_of = staticmethod(lambda given, _: given)
    arange = staticmethod(lambda first, end: value(np.arange(first, end, dtype=np.int32)))
    full = staticmethod(lambda shape, number, dtype: value(np.full(shape, number, dtype)))
    zeros = staticmethod(lambda shape, dtype: value(np.zeros(shape, dtype)))
    where = staticmethod(lambda condition, one, other: value(np.where(condition, one, other)))
    maximum = staticmethod(lambda one, other: value(np.maximum(one, other)))
    minimum = staticmethod(lambda one, other: value(np.minimum(one, other)))
    max = staticmethod(lambda given, axis=None: value(np.max(given, axis)))
    min = staticmethod(lambda given, axis=None: value(np.min(given, axis)))
    sum = staticmethod(lambda given, axis=None: value(np.sum(given, axis, dtype=given.dtype)))
    reshape = staticmethod(lambda given, *shape: given.reshape(*shape))
    log = staticmethod(lambda given: value(np.log(given)))
    exp = staticmethod(lambda given: value(np.exp(given)))
    pointer_type = staticmethod(lambda dtype: (Pointer, dtype))

    def program_id(self, axis: int) -> Value:
        """Which program runs."""
        return value(np.int32(self.index[axis]))

    def num_programs(self, axis: int) -> Value:
        """How many programs run."""
        return value(np.int32(self.grid[axis]))

    @staticmethod
    def cast(given: Any, dtype: Any) -> Any:
        """Another type, or what lies at an address."""
        if isinstance(dtype, tuple):
            return Pointer(memory_at(int(given), ANYTHING, dtype[1]))
        return given.to(dtype)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
        """What lies there; `other` where the mask is false."""
        if mask is None:
            return value(pointer.memory[pointer.place])
        place, inside = np.broadcast_arrays(pointer.place, mask)
        loaded = np.full(place.shape, 0 if other is None else other, pointer.memory.dtype)
        loaded[inside] = pointer.memory[place[inside]]
        return value(loaded)

    @staticmethod
    def _change(write: Callable[..., Any], pointer: Pointer, given: Any, mask: Any) -> None:
        place, numbers, inside = np.broadcast_arrays(pointer.place, given, True if mask is None else mask)
        write(pointer.memory, place[inside], numbers[inside].astype(pointer.memory.dtype))

    def store(self, pointer: Pointer, given: Any, mask: Any = None) -> None:
        """Put numbers there."""
        self._change(np.ndarray.__setitem__, pointer, given, mask)

    def atomic_add(self, pointer: Pointer, given: Any, mask: Any = None) -> None:
        """Add to what lies there, also where places are equal."""
        self._change(np.add.at, pointer, given, mask)

    def atomic_or(self, pointer: Pointer, given: Any, mask: Any = None) -> None:
        """Set bits of what lies there, also where places are equal."""
        self._change(np.bitwise_or.at, pointer, given, mask)


@functools.cache
def translated(kernel: InterpretedFunction[Any]) -> tuple[Callable[..., None], Language, frozenset[str]] | None:
    """The kernel's function in the language above, that, and its constants; `None` if it uses more than is there."""
    language = Language()
    function = translate(kernel, language)
    constants = frozenset(name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind))
    return None if function is None else (function, language, constants)


def translate(kernel: InterpretedFunction[Any], language: Language) -> Callable[..., None] | None:
    """The function of a kernel, or of one that it calls, with `language` for what it names; `None` if that has less."""
    original = kernel.fn
    named = dict(original.__globals__)
    for name in original.__code__.co_names:
        if hasattr(triton.language, name) and not hasattr(language, name):
            return None
        meant = named.get(name)
        if meant is triton.language:
            named[name] = language
        elif isinstance(meant, triton.language.constexpr):
            named[name] = meant.value
        elif isinstance(meant, InterpretedFunction):
            named[name] = translate(meant, language)
            if named[name] is None:
                return None
    return types.FunctionType(original.__code__, named, original.__name__, original.__defaults__)


def argument(given: Any) -> Any:
    """An argument of a kernel that is not a constant of it."""
    if isinstance(given, torch.Tensor):
        return Pointer.to_tensor(given)
    return value(given) if isinstance(given, (int, float)) else given


def run(kernel: InterpretedFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """As `InterpretedFunction.run`, which runs all kernels but those of vLLM's runner."""
    found = translated(kernel) if kernel.fn.__module__.startswith(PACKAGE) and not warmup else None
    tensors = (each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor))
    if found is None or any(tensor.dtype not in TYPED for tensor in tensors):
        interpreted(kernel, *arguments, grid=grid, warmup=warmup, **options)
        return
    function, language, constants = found
    named = dict(zip(kernel.arg_names, arguments, strict=False))
    named |= {name: given for name, given in options.items() if name in kernel.arg_names}
    programs = (*(grid(named) if callable(grid) else grid), 1, 1)[:3]
    named = {name: given if name in constants else argument(given) for name, given in named.items()}
    language.grid = programs
    for index in itertools.product(*map(range, programs)):
        language.index = index
        function(**named)


interpreted = InterpretedFunction.run


def enable() -> None:
    """Have `run` run all kernels of this process."""
    InterpretedFunction.run = run
