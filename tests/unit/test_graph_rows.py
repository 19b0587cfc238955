"""For which numbers of rows the vocoder's solver is captured as CUDA graphs."""

from __future__ import annotations

import pytest

from omni_actors.engine.models.chunks import ChunkPolicy
from omni_actors.engine.models.qwen2_5_omni.code2wav import CHUNKS, SPEC, most_rows
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


def test_the_largest_step_is_full_of_the_longest_chunks() -> None:
    assert most_rows(SPEC.engine["max_num_seqs"], CHUNKS) == 32 * (8 + 1) * 2
    assert most_rows(4, ChunkPolicy(first=1, largest=16, look_ahead=2)) == 4 * (16 + 2) * 2
    assert most_rows(4, None) == most_rows(32, None) == 544, "whole utterances have any length"
    assert most_rows(16, None) in GRAPH_ROWS
