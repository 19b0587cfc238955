"""What a chunk takes over from the one before it, and leaves for the next."""

from __future__ import annotations

import math

import torch


class Context:
    """The past of a batch during one pass: each layer that looks back takes its part, in the order of the layers.

    Args:
        position: i64 [batch], frames before the chunk.
        state: [batch, size], what the chunks before left; None if these are the first.
    """

    def __init__(self, position: torch.Tensor, state: torch.Tensor | None) -> None:
        self.position = position
        self._state = state
        self._taken = 0
        self._left: list[torch.Tensor] = []

    def join(self, chunk: torch.Tensor, length: int, *, dim: int = -1, zeros: bool = True) -> torch.Tensor:
        """Put the last `length` entries of the past before a chunk, and keep the last ones for the next.

        Args:
            chunk: [batch, ...].
            dim: the dimension of time.
            zeros: whether zeros stand for the past of a first chunk; if not, it has none.
        """
        shape = list(chunk.shape)
        shape[dim] = length
        if self._state is not None:
            begin, self._taken = self._taken, self._taken + math.prod(shape[1:])
            joined = torch.cat([self._state[:, begin : self._taken].view(shape), chunk], dim)
        elif zeros:
            joined = torch.cat([chunk.new_zeros(shape), chunk], dim)
        else:
            joined = chunk
        self._left.append(joined.narrow(dim, joined.shape[dim] - length, length).flatten(1))
        return joined

    def state(self) -> torch.Tensor:
        """[batch, size], what all layers left for the next chunk."""
        return torch.cat(self._left, dim=1)
