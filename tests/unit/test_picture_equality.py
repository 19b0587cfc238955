"""benchmarks/picture_equality.py sees whether pictures are those of diffusers, and in a batch those made alone."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from omni_actors.engine.models.pictures.packing import attend_each, pack
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly

WANTED = 35.0  # decibels; of a batch 40
TOGETHER = 40.0


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("picture_equality")


def measured(benchmark: ModuleType, *options: str) -> dict[str, Any]:
    """The row for a model at toy size and few steps."""
    torch.set_num_threads(1)
    (row,) = benchmark.main(["--device", "cpu", "--steps", "2", *options])
    assert 20 < row["contrast"] < 90
    return dict(row)


@pytest.mark.parametrize("model", ["z-image", "qwen-image"])
def test_pictures_in_bfloat16_are_those_of_diffusers_alone_and_together(benchmark: ModuleType, model: str) -> None:
    row = measured(benchmark, "--model", model, "--float32")
    assert row["ours"] >= WANTED
    assert row["batch"] >= TOGETHER
    assert row.get("decoder", TOGETHER) >= TOGETHER
    assert abs(row["truth"] - row["theirs"]) < 3, "ours is as far from float32 as diffusers'"


def test_a_wrong_weight_shows_in_the_distance_from_diffusers_alone(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = benchmark.z_weights.load

    def wrong(network: Any, weights: Any) -> None:
        load(network, weights)
        network.layers[1].down.weight.neg_()

    monkeypatch.setattr(benchmark.z_weights, "load", wrong)
    row = measured(benchmark, "--model", "z-image")
    assert row["ours"] < WANTED
    assert row["batch"] >= TOGETHER


def test_attention_that_looks_into_other_pictures_shows_in_batches_alone(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Any, keys: Any = None) -> Any:
        whole = pack([sum(packing.lengths)], query.device)
        return attend_each(query, key, value, whole, pack([len(key)], query.device))

    monkeypatch.setattr(benchmark, "fastest_attention", lambda device, dtype: across)
    row = measured(benchmark, "--model", "qwen-image")
    assert row["ours"] >= WANTED
    assert row["batch"] < TOGETHER


@pytest.mark.usefixtures("benchmark")  # which makes the folder importable
def test_diffusers_pictures_are_timed_at_the_sizes_that_are_asked_for() -> None:
    timing = importlib.import_module("vs_diffusers")
    options = ["--size", "tiny", "--device", "cpu", "--steps", "2", "--rounds", "1", "--sizes", "64x64", "96x64"]
    rows = timing.main(["--model", "qwen-image", *options])
    assert [(row["size"], row["steps"]) for row in rows] == [("64x64", 2), ("96x64", 2)]
    for row in rows:
        assert 1000 * row["picture_s"] == pytest.approx(2 * row["step_ms"] + row["after_ms"], abs=2)
