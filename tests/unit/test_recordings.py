"""Where long recordings are cut."""

from __future__ import annotations

import numpy as np
import pytest

from omni_actors.http_server.recordings import SEARCH_SECONDS, quiet_cuts
from omni_actors.http_server.transcriptions import gap

RATE = 1000
LOUD = np.random.default_rng(0).uniform(0.5, 1, 100 * RATE).astype(np.float32)


@pytest.mark.parametrize(
    ("pauses", "wanted"),
    [
        ({28: 0.1, 33: 0.01, 62: 0.1}, [33, 62]),  # the quieter of two
        ({24.8: 0.01, 27: 0.1, 55: 0.1}, [27, 55]),  # what is further away is not looked at
    ],
)
def test_a_cut_is_in_the_quietest_tenth_of_a_second_around(pauses: dict[float, float], wanted: list[float]) -> None:
    samples = LOUD[: 75 * RATE].copy()
    for start, loudness in pauses.items():
        samples[round(start * RATE) : round(start * RATE) + 150] *= loudness
    cuts = quiet_cuts(samples, RATE, 30)
    assert [pause <= cut / RATE < pause + 0.15 for cut, pause in zip(cuts, wanted, strict=True)] == [True, True]
    assert all(samples[cut] <= samples[cut - 5 : cut + 5].min() for cut in cuts)


def test_every_part_but_the_last_is_about_as_long_as_asked_for_and_none_is_lost() -> None:
    places = [0, *quiet_cuts(LOUD, RATE, 12), len(LOUD)]
    lengths = np.diff(places) / RATE
    assert quiet_cuts(LOUD, RATE, 100) == []
    assert all(12 - SEARCH_SECONDS <= length <= 12 + SEARCH_SECONDS for length in lengths[:-1])
    assert 0 <= lengths[-1] <= 12


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [
        ("The tide.", "It is full.", " "),
        ("潮。", "满了。", ""),
        ("The tide. ", "It", ""),
        ("", "It", ""),
        ("It", "", ""),
    ],
)
def test_parts_of_a_text_are_parted_as_its_script_parts_words(before: str, after: str, between: str) -> None:
    assert gap(before, after) == between
