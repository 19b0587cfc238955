"""What a reference computes for each token that it chooses, and how far an engine agrees with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.penalties import Sampled

TIE = 1e-3  # logits that are closer may be ordered either way by rounding


class Scores:
    """A logits processor of transformers that keeps what it gets: logits after all penalties.

    Args:
        excluded: tokens that are not to be sampled, as a vocoder has no sound for them.
    """

    def __init__(self, excluded: Sequence[int] = ()) -> None:
        self.excluded = list(excluded)
        self.rows: list[torch.Tensor] = []

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.excluded] = -torch.inf
        self.rows.append(scores[0].clone())
        return scores


@contextmanager
def residual_scores(predictor: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collects the logits of all codes but the first of each frame, while the block runs: frame after frame."""
    rows: list[torch.Tensor] = []
    with ExitStack() as stack:
        for head in predictor.lm_head:
            hook = head.register_forward_hook(lambda _module, _args, logits: rows.append(logits[0, -1].clone()))
            stack.callback(hook.remove)
        yield rows


def agreed(
    sampled: Sampled,
    name: str,
    tokens: Any,
    wanted: Any,
    scores: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor] = (),
) -> int:
    """Compare a greedy request with the reference: logits after penalties, then what was chosen.

    Where two candidates tie but for rounding, the engine may choose the other one; nothing after it is compared.

    Args:
        tokens: the engine's, [n], or frames [n, codes].
        wanted: the reference's.
        scores: of the tokens, or of the first codes of the frames.
        residuals: of the other codes.

    Returns:
        How many of `tokens` are equal.
    """
    made, given = (torch.as_tensor(each).reshape(len(each), -1) for each in (tokens, wanted))
    assert made.shape == given.shape
    differing = (made != given).nonzero().tolist()
    equal, group = differing[0] if differing else (len(made), 0)
    for number, step in enumerate(sampled.steps(name, len(made))[: equal + 1]):
        if number < len(scores):
            where = partial("{}, token {}: {}".format, name, number)
            torch.testing.assert_close(step.processed, scores[number], atol=TIE / 2, rtol=0, msg=where)
    if differing:
        row = residuals[equal * (made.shape[1] - 1) + group - 1] if group else scores[equal]
        assert row[given[equal, group]] - row[made[equal, group]] < TIE, f"{name}, token {equal}, code {group}"
    return equal
