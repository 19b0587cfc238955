"""M-RoPE positions of models whose prompt has those of another stage's prompt."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.interfaces import SupportsMRoPE


class ContinuedPositions(SupportsMRoPE):
    """Takes a request's positions from `next_positions`, because vLLM passes only token ids when it asks for them.

    Attributes:
        next_positions: i64 [3, P] of the request that is being added; `None` for text alone.
    """

    next_positions: torch.Tensor | None = None

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """M-RoPE positions i64 [3, len(input_tokens)], and by how much later positions exceed their index."""
        length = len(input_tokens)
        given = self.next_positions
        if given is None or not given.shape[1]:
            return torch.arange(length).expand(3, length), 0
        # The given positions, continued one by one (also over outputs computed again).
        following = int(given.max()) + 1
        tail = torch.arange(following, following + length - given.shape[1]).expand(3, -1)
        return torch.cat([given, tail], dim=1), following - given.shape[1]
