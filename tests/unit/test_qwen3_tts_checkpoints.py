"""The Qwen3-TTS checkpoints that tools.checkpoints writes: layout, determinism, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.checkpoints import qwen3_tts
from tools.checkpoints.__main__ import main

pytestmark = pytest.mark.nightly

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
WEIGHTS = ("model.safetensors", "speech_tokenizer/model.safetensors")


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_the_bytes_depend_only_on_seed_and_kind(tiny_qwen3_tts: Path, tmp_path: Path) -> None:
    assert main(["tiny-qwen3-tts", str(tmp_path / "same")]) == 0
    assert main(["tiny-qwen3-tts", str(tmp_path / "other"), "--seed", "1"]) == 0
    for name in WEIGHTS:
        wanted = (tiny_qwen3_tts / name).read_bytes()
        assert (tmp_path / "same" / name).read_bytes() == wanted
        assert (tmp_path / "other" / name).read_bytes() != wanted


def test_only_the_kind_that_clones_has_a_speaker_encoder(tiny_qwen3_tts_kinds: dict[str, Path]) -> None:
    from safetensors import safe_open

    for kind, folder in tiny_qwen3_tts_kinds.items():
        assert read(folder)["tts_model_type"] == kind
        assert {path.name for path in folder.iterdir()} >= FILES
        assert bool(read(folder)["talker_config"]["spk_id"]) == (kind == "custom_voice")
        with safe_open(folder / WEIGHTS[0], framework="pt") as file:
            assert any(name.startswith("speaker_encoder.") for name in file.keys()) == (kind == "base")  # noqa: SIM118


@pytest.mark.parametrize(("size", "width"), [("1b7", 2048), ("0b6", 1024)])
def test_a_full_one_has_the_published_sizes_and_no_weights(tmp_path: Path, size: str, width: int) -> None:
    qwen3_tts.write_full(tmp_path / "full", "base", size)
    config, codec = read(tmp_path / "full"), read(tmp_path / "full", "speech_tokenizer/config.json")
    assert config["talker_config"]["hidden_size"] == config["speaker_encoder_config"]["enc_dim"] == width
    assert config["talker_config"]["num_hidden_layers"] == 28
    assert codec["decoder_config"]["decoder_dim"] == 1536
    assert not list((tmp_path / "full").rglob("*.safetensors"))
