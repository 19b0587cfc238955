"""The checkpoints that tools.checkpoints writes: layout, ids, sizes, determinism and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.checkpoints.__main__ import main
from tools.checkpoints.families import Family
from tools.checkpoints.omni import QWEN2_5_OMNI, QWEN3_OMNI, make_config, write_tiny
from tools.checkpoints.weights import write_random_shards

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("family", [QWEN2_5_OMNI, QWEN3_OMNI], ids=["qwen2.5", "qwen3"])
def test_the_bytes_depend_only_on_the_seed(family: Family, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_tiny(tmp_path / name, seed, family=family, check=False)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tmp_path / "same" / weights).read_bytes()


def test_a_foreign_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for kind in ("tiny", "full", "tiny-qwen3", "full-qwen3", "tiny-qwen3-tts", "tiny-z-image"):
        assert main([kind, str(tmp_path)]) == 2
        assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert main(["full", str(tmp_path / "thesis.txt")]) == 2


def test_random_weights_of_any_size_are_those_of_the_model(tmp_path: Path) -> None:
    """At toy size; with `full --weights` the same function writes 21.5 GB."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    config = make_config(QWEN2_5_OMNI, QWEN2_5_OMNI.tiny_sizes(), {"user": 5})
    total = write_random_shards(tmp_path, config, spoken_ids=[7, 9], sounds=256, shard_bytes=500_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert {path.name for path in files} == set(index["weight_map"].values())
    found = {name: value for path in files for name, value in load_file(path).items()}
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert total == index["metadata"]["total_size"] == sum(2 * value.numel() for value in found.values())
    assert all(value.dtype is torch.bfloat16 and value.isfinite().all() for value in found.values())
    head = found["thinker.lm_head.weight"].float()
    assert head.any(dim=1).nonzero().flatten().tolist() == [7, 9]
    assert not found["talker.codec_head.weight"][256:].any()
    assert head[7].std() == pytest.approx(3 / 128**0.5, rel=0.3)
    assert not torch.equal(head[7], head[9])
