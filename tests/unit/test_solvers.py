"""The vocoder's solvers against a curve that is known, and against transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from omni_actors.engine.models.qwen2_5_omni.dit import SOLVERS, solver_times

Slope = Callable[[float, torch.Tensor], torch.Tensor]


def solve(name: str, slope: Slope, times: list[float]) -> tuple[float, int]:
    """y at the last time, for y(0) = 1 and the `slope` at a time and a state, and the number of evaluations."""
    solver, state, calls = SOLVERS[name], torch.ones(1, dtype=torch.float64), 0
    for start, end in itertools.pairwise(times):
        at = solver.times(start, end)

        def here(number: int, y: torch.Tensor, at: list[float] = at) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return slope(at[number], y)

        state = solver.advance(state, torch.tensor(end - start, dtype=torch.float64), here)
    return float(state), calls


def test_rk4_is_the_method_of_transformers():
    def slope(time: float | torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * torch.cos(torch.as_tensor(time, dtype=torch.float64))

    times = solver_times(10, -1.0)
    reference = RungeKutta4ODESolver(slope, torch.ones(1, dtype=torch.float64))
    expected = float(reference.integrate(times.double())[-1])
    assert solve("rk4", slope, times.tolist())[0] == pytest.approx(expected, rel=1e-7)
