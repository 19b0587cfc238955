"""Tests of how what a picture is made from is cut into parts."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.engine.models.qwen_image.dit import Condition, Prefix, parts

conditions = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=4).map(
    lambda given: Condition(
        torch.zeros(sum(length for length, _, _ in given), 2),
        tuple(length for length, _, _ in given),
        tuple(torch.zeros(3, height, width) for _, height, width in given[:-1]),
    )
)


@given(given=st.lists(conditions, min_size=1, max_size=2), most=st.integers(1, 60))
def test_parts_are_as_large_as_a_step_allows_and_cut_no_picture(given, most):
    prefixes = [Prefix(each) for each in given]
    cut = parts(prefixes, most)
    for part, tokens in cut:
        found = 0
        for prefix, end in part:
            runs = prefix.until(end)
            assert [run.end for run in runs] == [*(run.begin for run in runs[1:]), end], "without a gap"
            for run in runs:
                assert run.text or run.end - run.begin == run.given[0].numel(), "pictures are whole"
                assert not run.text or len(run.given) == run.end - run.begin
            found += end - prefix.done
            prefix.done = end
        assert found == tokens
        assert tokens <= most or (len(part) == 1 and not runs[-1].text and len(runs) == 1)
    assert [prefix.done for prefix in prefixes] == [prefix.tokens for prefix in prefixes]
    assert all(one + other > most for (_, one), (_, other) in itertools.pairwise(cut)), "no more than are needed"


def test_parts_of_a_text_keep_their_places():
    prefix = Prefix(Condition(torch.arange(9.0)[:, None], (4, 5), (torch.zeros(3, 2, 6),)))
    prefix.done = 2
    first, picture, last = prefix.until(18)
    assert (first.begin, first.end, first.reach, first.given.flatten().tolist()) == (2, 4, 2, [2.0, 3.0])
    assert (picture.begin, picture.end, picture.reach) == (4, 16, 4)
    assert (last.begin, last.end, last.reach, last.given.flatten().tolist()) == (16, 18, 10, [4.0, 5.0])
