"""For which numbers of rows the vocoder's solver is captured as CUDA graphs."""

from __future__ import annotations

import pytest

from omni_actors.engine.models.qwen2_5_omni.dit import GRAPH_ROWS, graph_rows


@pytest.mark.parametrize("most", [6, 7, 144, 576, GRAPH_ROWS[-1]])
def test_every_step_has_a_graph_that_is_not_much_larger(most: int) -> None:
    sizes = graph_rows(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(6, most + 1):
        assert next(size for size in sizes if size >= rows) <= max(1.5 * rows, rows + 4)


def test_no_graph_is_larger_than_any_step() -> None:
    assert graph_rows(4) == (4,)
    assert graph_rows(10 * GRAPH_ROWS[-1]) == GRAPH_ROWS
