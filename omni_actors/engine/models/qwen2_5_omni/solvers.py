"""The explicit Runge-Kutta methods by which the vocoder's flow is solved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Solver:
    """A method by its Butcher tableau, in parts of an interval.

    Args:
        nodes: where in the interval each slope is evaluated.
        stages: for each evaluation, the weights of the slopes before it.
        weights: of all slopes in the result.
    """

    nodes: tuple[float, ...]
    stages: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]

    @property
    def evaluations(self) -> int:
        """Evaluations of the network per interval."""
        return len(self.nodes)

    def times(self, start: float, end: float) -> list[float]:
        """The points in time of an interval's evaluations, with float32 arithmetic as in transformers."""
        step = np.float32(end) - np.float32(start)
        return [end if node == 1 else float(start + step * np.float32(node)) for node in self.nodes]

    def advance(
        self, state: torch.Tensor, step: torch.Tensor, slope: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The state after an interval of width `step`; `slope` takes the evaluation's number and its state."""
        slopes: list[torch.Tensor] = []
        for number, weights in enumerate(self.stages):
            slopes.append(slope(number, state + step * _sum(weights, slopes) if weights else state))
        return state + step * _sum(self.weights, slopes)


def _sum(weights: Sequence[float], slopes: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = zip(weights, slopes, strict=True)
    first, *rest = [slope if weight == 1 else weight * slope for weight, slope in pairs if weight]
    return sum(rest, start=first)


SOLVERS = {
    # The 3/8 rule, which is transformers' "RungeKutta4ODESolver".
    "rk4": Solver((0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
    "midpoint": Solver((0, 1 / 2), ((), (1 / 2,)), (0, 1)),
    "euler": Solver((0,), ((),), (1,)),
}
