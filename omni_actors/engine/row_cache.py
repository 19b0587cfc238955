"""Rows of positions whose keys and values are in vLLM's prefix cache, so that a later turn need not compute them again.

A position that comes from the prefix cache is not computed and gives no row, but the next stage needs one for every
position. So rows are kept by the hash of their block of the KV cache, and a request takes from the prefix cache only
what there are rows for. While a request computes blocks, others that begin with them wait for its rows: answers to one
prompt that come at a time would else compute it several times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from omni_actors.errors import EngineError


class Hashed(Protocol):
    """A request of vLLM: the hashes of its full blocks, each of which stands for all tokens up to the block's end."""

    request_id: str
    num_prompt_tokens: int

    @property
    def block_hashes(self) -> Sequence[Hashable]:
        """By block; grows with the answer."""


class RowCache:
    """Rows [block_size, width] on the CPU by block, the least recently used of which make room. Not thread-safe.

    Args:
        limit_bytes: of all rows together; 0 keeps none.
        block_size: positions of a block.
    """

    def __init__(self, limit_bytes: int, block_size: int) -> None:
        self.limit_bytes = limit_bytes
        self.block_size = block_size
        self.held_bytes = 0
        self._blocks: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._promises: dict[str, set[Hashable]] = {}  # blocks that requests compute, by request

    def __len__(self) -> int:
        return len(self._blocks)

    def covers(self, blocks: Sequence[Hashable]) -> int:
        """How many of the first blocks have rows."""
        for index, block in enumerate(blocks):
            if block not in self._blocks:
                return index
        return len(blocks)

    def take(self, blocks: Sequence[Hashable]) -> list[torch.Tensor]:
        """The rows of the first blocks, as far as there are any. Of a prefix, the first block is removed last."""
        found = blocks[: self.covers(blocks)]
        for block in reversed(found):
            self._blocks.move_to_end(block)
        return [self._blocks[block] for block in found]

    def keep(self, block: Hashable, rows: torch.Tensor) -> None:
        """Keep a copy of a block's rows."""
        for promised in self._promises.values():
            promised.discard(block)
        if block in self._blocks or rows.nbytes > self.limit_bytes:
            return
        self._blocks[block] = rows.clone()  # it is a part of a whole step's
        self.held_bytes += rows.nbytes
        while self.held_bytes > self.limit_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.held_bytes -= oldest.nbytes

    def promise(self, request_id: str, blocks: Sequence[Hashable]) -> None:
        """Note that a request will compute blocks."""
        self._promises[request_id] = set(blocks)

    def release(self, request_id: str) -> None:
        """Forget what a request was to compute. Idempotent."""
        self._promises.pop(request_id, None)

    def promising(self) -> list[str]:
        """The requests that compute blocks."""
        return list(self._promises)

    def promised(self, blocks: Sequence[Hashable], request_id: str) -> bool:
        """Whether another request computes the first of the blocks that has no rows."""
        missing = self.covers(blocks)
        if missing == len(blocks) or not self.limit_bytes:
            return False
        return any(blocks[missing] in own for owner, own in self._promises.items() if owner != request_id)


class FollowedRows:
    """The rows of one request from its first position on, those of its prefix included."""

    def __init__(self, cache: RowCache, request: Hashed) -> None:
        self.request_id = request.request_id
        self._cache = cache
        self._request = request
        self._prefix: list[torch.Tensor] = []
        self._end = 0  # positions whose rows have come
        self._unkept: list[torch.Tensor] = []  # rows of a block that is not full yet

    def _prompt_blocks(self) -> Sequence[Hashable]:
        """The blocks of the prompt that may come from the prefix cache: vLLM computes the last position anyway."""
        size = self._cache.block_size
        return self._request.block_hashes[: (self._request.num_prompt_tokens - 1) // size]

    def waits(self) -> bool:
        """Whether rows of its prefix are on their way, from a request that computes them."""
        return self._cache.promised(self._prompt_blocks(), self.request_id)

    def use(self, cached_tokens: int) -> int:
        """How many of the positions in the prefix cache it can use, whole blocks of them; takes their rows."""
        size = self._cache.block_size
        self._prefix = self._cache.take(self._request.block_hashes[: cached_tokens // size])
        covered = len(self._prefix)
        self._cache.promise(self.request_id, self._prompt_blocks()[covered:])
        return covered * size

    def close(self) -> None:
        """Note the end of the request: its rows have just been used."""
        self._cache.release(self.request_id)
        self._cache.take(self._request.block_hashes)

    def complete(self, emitted: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the worker gave the request in a step, with the rows of its prefix before the first one.

        Raises:
            EngineError: rows are missing.
        """
        start, rows = emitted["start"], emitted["rows"]
        if start > self._end:
            prefix = torch.cat([*self._prefix, rows[:0]])
            if len(prefix) < start:
                raise EngineError(f"Rows {len(prefix)} to {start} of request {self.request_id!r} are missing.")
            rows = torch.cat([prefix[self._end : start], rows])
            emitted = {**emitted, "start": self._end, "rows": rows}
            self._end, self._unkept = start, []
        if start == len(self._prefix) * self._cache.block_size:
            self._prefix = []
        self._keep(emitted["rows"][max(0, self._end - emitted["start"]) :])
        return emitted

    def _keep(self, rows: torch.Tensor) -> None:
        """Keep the blocks that are full with new rows."""
        size = self._cache.block_size
        self._unkept.append(rows)
        self._end += len(rows)
        if self._end // size == (self._end - len(rows)) // size:
            return
        joined = torch.cat(self._unkept)
        first = (self._end - len(joined)) // size
        for index, block in enumerate(self._request.block_hashes[first : self._end // size]):
            self._cache.keep(block, joined[index * size : (index + 1) * size])
        self._unkept = [joined[(self._end // size - first) * size :].clone()]
