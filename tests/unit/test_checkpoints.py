"""The checkpoints that tools.checkpoints writes: layout, ids, sizes, determinism and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tools.checkpoints import CheckpointError
from tools.checkpoints.__main__ import main
from tools.checkpoints.families import Family
from tools.checkpoints.measure import Answer, failed_checks
from tools.checkpoints.omni import QWEN2_5_OMNI, QWEN3_OMNI, make_config, write_tiny
from tools.checkpoints.tts import FAMILY, write_full
from tools.checkpoints.weights import draw, fan_in, scale_of, write_random_shards

pytestmark = pytest.mark.nightly

OMNI = pytest.mark.parametrize("family", [QWEN2_5_OMNI, QWEN3_OMNI], ids=["qwen2.5", "qwen3"])
MARKS = {QWEN2_5_OMNI: "", QWEN3_OMNI: "-qwen3"}
TOKENIZER = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
LAYOUT = TOKENIZER | {"chat_template.jinja", "processor_config.json"}
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
def test_the_tiny_one_has_weights_and_the_full_one_none(family: Family, folders: Folders) -> None:
    tiny, full = ({path.name for path in folders[family, size].iterdir()} for size in ("tiny", "full"))
    layout = LAYOUT | ({"spk_dict.pt"} if family is QWEN2_5_OMNI else set())
    assert tiny >= layout | {"model.safetensors"}
    assert full >= layout
    assert not any(name.endswith((".safetensors", ".bin", ".index.json")) for name in full)


@OMNI
def test_the_bytes_depend_only_on_the_seed(family: Family, folders: Folders, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        write_tiny(tmp_path / name, seed, family=family, check=False)
    for path in folders[family, "tiny"].iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tmp_path / "same" / weights).read_bytes()


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_two_voices(size: str, folders: Folders) -> None:
    voices = torch.load(folders[QWEN2_5_OMNI, size] / "spk_dict.pt", weights_only=True)
    assert set(voices) == {"Chelsie", "Ethan"}
    assert len({voice["bos_token"] for voice in voices.values()}) == 2
    assert len({voice["ref_mel"].shape[1] for voice in voices.values()}) == 2
    for voice in voices.values():
        assert voice["cond"].shape == (1, 192)
        assert voice["ref_mel"].shape[::2] == (1, 80)
    assert not torch.equal(voices["Chelsie"]["cond"], voices["Ethan"]["cond"])


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


def test_roles_are_one_token_each(folders: Folders) -> None:
    """Qwen3-Omni's talker takes three rows for a header, and the role's token says whose segment it is."""
    from transformers import AutoTokenizer

    for size in ("tiny", "full"):
        folder = folders[QWEN3_OMNI, size]
        tokenizer, config = AutoTokenizer.from_pretrained(folder), read(folder)
        assert config["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]
        ids = tokenizer.encode("<|im_start|>assistant\n")
        assert ids[:2] == [config["im_start_token_id"], config["assistant_token_id"]]
        assert len(ids) == 3
        for role in ("system", "user", "assistant"):
            assert tokenizer.encode(role) == [config[f"{role}_token_id"]]


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


def test_the_tiny_ones_keep_what_matters(folders: Folders) -> None:
    config = read(folders[QWEN2_5_OMNI, "tiny"])
    text, talker = config["thinker_config"]["text_config"], config["talker_config"]
    assert text["hidden_size"] // text["num_attention_heads"] >= 32
    assert talker["head_dim"] >= 32
    assert talker["head_dim"] != talker["hidden_size"] // talker["num_attention_heads"]
    dit = config["token2wav_config"]["dit_config"]
    assert dit["look_ahead_layers"]
    assert dit["look_backward_layers"]
    assert math.prod(config["token2wav_config"]["bigvgan_config"]["upsample_rates"]) * dit["repeats"] == 480

    config = read(folders[QWEN3_OMNI, "tiny"])
    thinker, talker, code2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "code2wav"))
    speech = talker["text_config"]
    assert speech["head_dim"] != speech["hidden_size"] // speech["num_attention_heads"]
    assert talker["num_code_groups"] == code2wav["num_quantizers"] == 16
    levels = len(thinker["vision_config"]["deepstack_visual_indexes"])
    assert levels < talker["accept_hidden_layer"] < thinker["text_config"]["num_hidden_layers"]
    assert all(part["text_config"]["rope_parameters"]["mrope_interleaved"] for part in (thinker, talker))
    assert math.prod((*code2wav["upsample_rates"], *code2wav["upsampling_ratios"])) == 1920


def test_chat_templates(folders: Folders) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[QWEN2_5_OMNI, "tiny"])
    parts = [{"type": "image"}, {"type": "audio"}, {"type": "video"}, {"type": "text", "text": "What?"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>"
        "<|vision_bos|><|VIDEO|><|vision_eos|>What?<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    told = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == told
    other = AutoTokenizer.from_pretrained(folders[QWEN3_OMNI, "tiny"])
    assert other.apply_chat_template(messages, tokenize=False) == told
    assert other.apply_chat_template(messages[1:], tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_foreign_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for kind in ("tiny", "full", "tiny-qwen3", "full-qwen3", "tiny-qwen3-tts", "tiny-z-image"):
        assert main([kind, str(tmp_path)]) == 2
        assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert main(["full", str(tmp_path / "thesis.txt")]) == 2


def test_full_over_tiny_leaves_neither_weights_nor_voices(tmp_path: Path) -> None:
    write_tiny(tmp_path, check=False)
    assert main(["full-qwen3", str(tmp_path)]) == 0
    assert not [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.pt")]


def test_a_missed_figure_is_named() -> None:
    missed = "\n".join(failed_checks([Answer("hello", "Ethan", (5,) * 32, (7,) * 64, 1.0, 64 * 480, 0.1, 0.1)]))
    assert "1 different thinker tokens" in missed
    assert "1 different codec tokens" in missed
    assert "peak 1.000" in missed


def test_every_parameter_needs_a_rule() -> None:
    with pytest.raises(CheckpointError, match="no rule"):
        scale_of("thinker.model.something_new")


@pytest.mark.parametrize(
    ("name", "shape", "inputs"),
    [
        ("talker.model.layers.0.mlp.experts.gate_up_proj", (8, 64, 32), 32),
        ("code2wav.decoder.1.block.1.conv.weight", (64, 32, 16), 128),
        ("code2wav.upsample.0.0.conv.weight", (64, 64, 2), 64),
        ("thinker.lm_head.weight", (512, 128), 128),
    ],
)
def test_a_layer_of_gain_one_counts_the_inputs_that_meet_in_an_output(
    name: str, shape: tuple[int, ...], inputs: int
) -> None:
    assert fan_in(name, torch.Size(shape)) == inputs


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


def test_a_parameter_larger_than_the_noise_repeats_it() -> None:
    noise = torch.arange(7.0)
    drawn = draw("talker.model.embed_tokens.weight", torch.Size([4, 5]), noise, 0, torch.float32).flatten()
    assert sorted(drawn[:7].tolist()) == noise.tolist()
    assert torch.equal(drawn[7:14], drawn[:7])
    assert torch.equal(drawn[14:], drawn[:6])


def test_the_bytes_of_a_speech_model_depend_only_on_seed_and_kind(tiny_qwen3_tts: Path, tmp_path: Path) -> None:
    assert main(["tiny-qwen3-tts", str(tmp_path / "same")]) == 0
    assert main(["tiny-qwen3-tts", str(tmp_path / "other"), "--seed", "1"]) == 0
    for name in TTS_WEIGHTS:
        wanted = (tiny_qwen3_tts / name).read_bytes()
        assert (tmp_path / "same" / name).read_bytes() == wanted
        assert (tmp_path / "other" / name).read_bytes() != wanted


def test_only_the_kind_that_clones_has_a_speaker_encoder(tiny_qwen3_tts_kinds: dict[str, Path]) -> None:
    for kind, folder in tiny_qwen3_tts_kinds.items():
        assert read(folder)["tts_model_type"] == kind
        assert {path.name for path in folder.iterdir()} >= TOKENIZER
        assert bool(read(folder)["talker_config"]["spk_id"]) == (kind == "custom_voice")
        with safe_open(folder / TTS_WEIGHTS[0], framework="pt") as file:
            assert any(name.startswith("speaker_encoder.") for name in file.keys()) == (kind == "base")  # noqa: SIM118


@pytest.mark.parametrize(("size", "width"), [("1b7", 2048), ("0b6", 1024)])
def test_a_full_speech_model_has_the_published_sizes_and_no_weights(tmp_path: Path, size: str, width: int) -> None:
    write_full(tmp_path / "full", "base", size)
    config, codec = read(tmp_path / "full"), read(tmp_path / "full", "speech_tokenizer/config.json")
    assert config["talker_config"]["hidden_size"] == config["speaker_encoder_config"]["enc_dim"] == width
    assert config["talker_config"]["num_hidden_layers"] == FAMILY.published["layers"] == 28
    assert codec["decoder_config"]["decoder_dim"] == 1536
    assert not list((tmp_path / "full").rglob("*.safetensors"))
