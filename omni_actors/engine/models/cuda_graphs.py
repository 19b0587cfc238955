"""CUDA graphs of what is computed again and again, in a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Tensors = TypeVar("Tensors")


class CudaGraphs(Generic[Key, Tensors]):
    """Graphs that share memory. Capture the largest first: the others find room in what it takes.

    Args:
        cuda: whether to capture. If not, a replay calls the computation, with the same inputs.

    Attributes:
        tensors: by key, what the captured call returned; each replay of any graph may overwrite it.
    """

    def __init__(self, *, cuda: bool = True) -> None:
        self.tensors: dict[Key, Tensors] = {}
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._calls: dict[Key, Callable[[], Tensors]] | None = None if cuda else {}

    def capture(self, key: Key, compute: Callable[[], Tensors]) -> None:
        """Capture a computation, whose inputs have to stay where they are."""
        if self._calls is not None:
            self._calls[key], self.tensors[key] = compute, compute()
            return
        compute()  # kernels are compiled, chosen and loaded outside of the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self.tensors[key] = compute()
        self._graphs[key] = graph

    def replay(self, key: Key) -> Tensors:
        """Compute again, with what the inputs hold now."""
        if self._calls is not None:
            self.tensors[key] = self._calls[key]()
        else:
            self._graphs[key].replay()
        return self.tensors[key]
