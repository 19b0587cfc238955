"""benchmarks/playback_simulation.py tells orders and chunk policies apart, with the schedulers' own decisions."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from typing import Any

import pytest

from omni_actors.engine.models.qwen2_5_omni.code2wav import CHUNKS, SPEC
from omni_actors.engine.models.qwen2_5_omni.stream import LIGHT_BLOCKS
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly

POLICY = "1,1,2,4,8"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Those of two policies and both orders: thirty-two answers at a time, of which none waits and none is kept."""
    return run("--stagger", "6", "--send-at-once", "--pace", "0", "--concurrency", "32", "--policy", "1,2,6,16", POLICY)


def run(*options: str) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        importlib.import_module("playback_simulation").main(["--json", "--rounds", "1", "--stagger", "3", *options])
    return [json.loads(line) for line in out.getvalue().splitlines()]


def smooth_start(rows: list[dict[str, Any]], **wanted: str) -> float:
    """p95 in ms of the one row with these values."""
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return float(row["smooth_start_ms"].split(" / ")[1])


def test_every_answer_is_whole_and_smooth_no_earlier_than_its_first_sound(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 4
    for row in rows:
        first, smooth = (float(row[name].split(" / ")[0]) for name in ("ttfa_ms", "smooth_start_ms"))
        assert 0 < first <= smooth
        assert row["stalled"].split(" of ")[1] == row["load"].removeprefix("c=")


def test_deadlines_let_listeners_start_earlier_than_the_order_of_chunk_numbers(rows: list[dict[str, Any]]) -> None:
    numbers, deadlines = (
        smooth_start(rows, load="c=32", policy=POLICY, order=order) for order in ("number", "deadline")
    )
    assert deadlines < numbers


def test_first_sounds_that_are_kept_leave_hardly_a_gap(rows: list[dict[str, Any]]) -> None:
    (kept,) = run("--stagger", "6", "--concurrency", "32", "--order", "deadline")
    (at_once,) = (row for row in rows if (row["load"], row["policy"], row["order"]) == ("c=32", POLICY, "deadline"))
    stalled, stalled_at_once = (int(row["stalled"].split(" of ")[0]) for row in (kept, at_once))
    assert stalled < stalled_at_once / 2


def test_in_a_burst_hardly_an_answer_stalls_and_after_a_start_none_waits_for_long() -> None:
    """In neither was anything learnt of how long first sounds have to be kept."""
    (cold,) = run("--stagger", "0", "--concurrency", "32", "--order", "deadline", "--cold")
    (warm,) = run("--stagger", "0", "--concurrency", "64", "--order", "deadline")
    assert int(cold["stalled"].split(" of ")[0]) <= 2
    assert smooth_start([cold]) < 1500
    assert int(warm["stalled"].split(" of ")[0]) <= 2
    assert smooth_start([warm]) < 2800


def test_answers_of_any_length_that_come_at_any_time_are_simulated_to_their_end() -> None:
    (row,) = run("--lengths", "50", "512", "--rate", "6", "--rounds", "2", "--concurrency", "8", "--order", "deadline")
    assert row["stalled"].endswith(" of 16")
    assert smooth_start([row]) > 0


def test_the_simulation_knows_the_vocoders_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import simulated_stages

    assert simulated_stages.LIGHT_BLOCKS == LIGHT_BLOCKS
    assert SPEC.engine["max_num_seqs"] == simulated_stages.CHUNKS
    ends = [0]
    while len(ends) < 8:
        ends.append(CHUNKS.end(ends[-1]))
    assert simulated_stages.ends(simulated_stages.POLICY, 7) == ends[1:]


def test_with_few_answers_nothing_is_kept_also_after_a_start() -> None:
    """The first sound comes as soon as when none is kept, though the thinker makes the first steps slow."""
    for cold in ([], ["--cold"]):
        load = ["--stagger", "0", "--concurrency", "1", "8", "--order", "deadline", *cold]
        for kept, at_once in zip(run(*load), run(*load, "--send-at-once"), strict=True):
            assert smooth_start([kept]) < 1.15 * smooth_start([at_once])


def test_the_talker_leaves_the_device_to_the_vocoder_for_an_earlier_start() -> None:
    load = ["--stagger", "0", "--concurrency", "32", "--order", "deadline"]
    (yields,), (goes_on,) = run(*load), run(*load, "--talker-yields-to", "thinker")
    assert smooth_start([yields]) < smooth_start([goes_on])
