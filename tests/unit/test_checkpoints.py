"""The checkpoints that tools.checkpoints writes: layout, ids, sizes, determinism and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.checkpoints.__main__ import main
from tools.checkpoints.families import Family
from tools.checkpoints.omni import QWEN2_5_OMNI, QWEN3_OMNI, write_tiny

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
