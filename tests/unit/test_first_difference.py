"""benchmarks/first_difference.py counts what two ways to compute have in common until they part."""

from __future__ import annotations

import pytest
import torch

from benchmarks import first_difference as benchmark

pytestmark = pytest.mark.nightly


def test_what_comes_after_the_first_difference_does_not_count() -> None:
    """Frames of two codes: one answer parts in its first code, one in its second, and one does not."""
    logits = [torch.tensor([0.0, 2.0, 1.5, -torch.inf])] * 3
    nearly = [logits[0] + torch.tensor([0.25, 0.0, 0.0, 0.0])] * 2 + [logits[0] + 9]
    wanted = [benchmark.Answer([(1, 5), (1, 6), (1, 7)], logits) for _ in range(3)]
    given = [
        benchmark.Answer([(1, 5), (2, 6), (0, 0)], nearly),
        benchmark.Answer([(1, 5), (1, 0), (0, 0)], nearly),
        benchmark.Answer([(1, 5), (1, 6), (1, 7)], logits),
    ]
    row = benchmark.compare(given, wanted)
    assert row["first"] == "6 of 7 (0.8571)"
    assert row["frames"] == "5 of 7 (0.7143)"
    assert row["books"] == "0:1 1:1"
    assert row["answers"] == "1 of 3"
    assert row["apart"].startswith("0.2500 ("), "the last step of an answer that has parted has another past"
    assert row["gaps"] == "0.5000"
    assert benchmark.compare(wanted, wanted)["gaps"] == "-"
