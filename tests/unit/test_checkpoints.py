"""The checkpoints that tools.checkpoints writes: layout, ids, sizes, determinism and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tools.checkpoints.__main__ import main
from tools.checkpoints.families import Family
from tools.checkpoints.omni import QWEN2_5_OMNI, QWEN3_OMNI, make_config, write_tiny
from tools.checkpoints.weights import write_random_shards

pytestmark = pytest.mark.nightly

OMNI = pytest.mark.parametrize("family", [QWEN2_5_OMNI, QWEN3_OMNI], ids=["qwen2.5", "qwen3"])
MARKS = {QWEN2_5_OMNI: "", QWEN3_OMNI: "-qwen3"}
TTS_WEIGHTS = ("model.safetensors", "speech_tokenizer/model.safetensors")

Folders = dict[tuple[Family, str], Path]


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Path, tiny_qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The omni checkpoints, tiny and full."""
    found = {(QWEN2_5_OMNI, "tiny"): tiny_checkpoint, (QWEN3_OMNI, "tiny"): tiny_qwen3_checkpoint}
    for family, mark in MARKS.items():
        found[family, "full"] = tmp_path_factory.mktemp("checkpoint") / "full"
        assert main([f"full{mark}", str(found[family, "full"])]) == 0
    return found


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


@OMNI
def test_the_bytes_depend_only_on_the_seed(family: Family, folders: Folders, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        write_tiny(tmp_path / name, seed, family=family, check=False)
    for path in folders[family, "tiny"].iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tmp_path / "same" / weights).read_bytes()


@pytest.mark.parametrize("size", ["tiny", "full"])
@OMNI
def test_the_configuration_agrees_with_the_tokenizer(family: Family, size: str, folders: Folders) -> None:
    from transformers import AutoTokenizer

    folder = folders[family, size]
    tokenizer, config, named = AutoTokenizer.from_pretrained(folder), read(folder), family.tokens["named"]
    end = "index" if family is QWEN2_5_OMNI else "id"
    assert len(tokenizer) == config["thinker_config"]["text_config"]["vocab_size"]
    for part in ("thinker_config", "talker_config"):
        assert config[part]["position_id_per_seconds"] == (25 if family is QWEN2_5_OMNI else 13)
        for media in ("audio", "image", "video"):
            assert config[part][f"{media}_token_{end}"] == tokenizer.convert_tokens_to_ids(named[f"{media}_token"])
        for media in ("audio", "vision"):
            assert config[part][f"{media}_start_token_id"] == tokenizer.convert_tokens_to_ids(
                named[f"{media}_bos_token"]
            )
    assert config["thinker_config"]["user_token_id"] == tokenizer.convert_tokens_to_ids("user")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(list(range(len(tokenizer))))  # every id has a text
    for text in ("user said: hello, how is the weather?\n", "\u00e9\u4f60\u597d \U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_full_qwen2_5_has_the_published_ids_and_sizes(folders: Folders) -> None:
    config = read(folders[QWEN2_5_OMNI, "full"])
    assert config["architectures"] == ["Qwen2_5OmniModel"]
    thinker, talker, token2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "token2wav"))
    ids = ("audio_token_index", "vision_start_token_id", "image_token_index", "user_token_id")
    assert [thinker[name] for name in ids] == [151646, 151652, 151655, 872]
    assert [talker[f"tts_text_{name}_token_id"] for name in ("pad", "start", "end")] == [151859, 151860, 151861]
    assert [thinker[f"{part}_config"]["hidden_size"] for part in ("text", "vision")] == [3584, 1280]
    sizes = ("tts_codec_start_token_id", "hidden_size", "num_hidden_layers", "num_attention_heads")
    assert [talker[name] for name in sizes] == [8293, 896, 24, 12]
    assert token2wav["dit_config"]["num_hidden_layers"] == 22
    assert token2wav["bigvgan_config"]["upsample_initial_channel"] == 1536


def test_the_full_qwen3_has_the_published_ids_and_sizes(folders: Folders) -> None:
    config = read(folders[QWEN3_OMNI, "full"])
    thinker, talker, code2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "code2wav"))
    assert [config[f"{role}_token_id"] for role in ("system", "user", "assistant")] == [8948, 872, 77091]
    assert [config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos")] == [151671, 151672, 151673]
    assert [thinker[name] for name in ("audio_start_token_id", "audio_token_id")] == [151669, 151675]
    assert thinker["vision_config"]["deepstack_visual_indexes"] == [8, 16, 24]
    text, speech = thinker["text_config"], talker["text_config"]
    assert [text[name] for name in ("num_hidden_layers", "num_experts", "num_experts_per_tok")] == [48, 128, 8]
    assert [speech[name] for name in ("num_hidden_layers", "num_experts_per_tok", "vocab_size")] == [20, 6, 3072]
    assert speech["norm_topk_prob"]
    assert [talker[name] for name in ("accept_hidden_layer", "codec_eos_token_id")] == [24, 2150]
    assert talker["speaker_id"] == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert code2wav["sliding_window"] == 72


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


def test_the_bytes_of_a_speech_model_depend_only_on_seed_and_kind(tiny_qwen3_tts: Path, tmp_path: Path) -> None:
    assert main(["tiny-qwen3-tts", str(tmp_path / "same")]) == 0
    assert main(["tiny-qwen3-tts", str(tmp_path / "other"), "--seed", "1"]) == 0
    for name in TTS_WEIGHTS:
        wanted = (tiny_qwen3_tts / name).read_bytes()
        assert (tmp_path / "same" / name).read_bytes() == wanted
        assert (tmp_path / "other" / name).read_bytes() != wanted
