"""The checkpoints that tools.checkpoints writes: layout, ids, sizes, determinism and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools import checkpoints
from tools.checkpoints.__main__ import main
from tools.checkpoints.configuration import tiny_config
from tools.checkpoints.shards import draw, write_random_shards
from tools.checkpoints.weights import scale_of

pytestmark = pytest.mark.nightly

LAYOUT = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
    "spk_dict.pt",
}


@pytest.fixture(scope="module")
def full_checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "full"
    checkpoints.write_full(folder)
    return folder


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_tiny_layout(tiny_checkpoint):
    names = {path.name for path in tiny_checkpoint.iterdir()}
    assert names >= LAYOUT | {"model.safetensors"}


def test_full_layout_has_no_weights(full_checkpoint):
    names = {path.name for path in full_checkpoint.iterdir()}
    assert names >= LAYOUT
    assert not any(name.endswith((".safetensors", ".bin", ".index.json")) for name in names)


def test_same_seed_same_bytes(tiny_checkpoint, tmp_path):
    checkpoints.write_tiny(tmp_path / "same", seed=0, check=False)
    checkpoints.write_tiny(tmp_path / "other", seed=1, check=False)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "spk_dict.pt"):
        assert digest(tmp_path / "same" / name) == digest(tiny_checkpoint / name), name
    assert digest(tmp_path / "other" / "model.safetensors") != digest(tiny_checkpoint / "model.safetensors")


@pytest.mark.parametrize("kind", ["tiny", "full"])
def test_two_voices(kind, tiny_checkpoint, full_checkpoint):
    folder = tiny_checkpoint if kind == "tiny" else full_checkpoint
    voices = torch.load(folder / "spk_dict.pt", weights_only=True)
    assert set(voices) == {"Chelsie", "Ethan"}
    assert len({voice["bos_token"] for voice in voices.values()}) == 2
    assert len({voice["ref_mel"].shape[1] for voice in voices.values()}) == 2
    for voice in voices.values():
        assert voice["cond"].shape == (1, 192)
        assert voice["ref_mel"].shape[::2] == (1, 80)
    assert not torch.equal(voices["Chelsie"]["cond"], voices["Ethan"]["cond"])


@pytest.mark.parametrize("kind", ["tiny", "full"])
def test_config_agrees_with_the_tokenizer(kind, tiny_checkpoint, full_checkpoint):
    from transformers import AutoTokenizer

    folder = tiny_checkpoint if kind == "tiny" else full_checkpoint
    tokenizer, config = AutoTokenizer.from_pretrained(folder), read_config(folder)
    assert config["architectures"] == ["Qwen2_5OmniModel"]
    assert len(tokenizer) == config["thinker_config"]["text_config"]["vocab_size"]
    shared = {
        "audio_token_index": "<|AUDIO|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
    }
    speech = {
        "tts_text_pad_token_id": "<tts_pad>",
        "tts_text_start_token_id": "<tts_text_bos>",
        "tts_text_end_token_id": "<tts_text_eos>",
    }
    for part in ("thinker_config", "talker_config"):
        assert config[part]["position_id_per_seconds"] == 25
        assert config[part]["seconds_per_chunk"] == 2
        for name, token in (shared | (speech if part == "talker_config" else {})).items():
            assert config[part][name] == tokenizer.convert_tokens_to_ids(token), name
    assert config["thinker_config"]["user_token_id"] == tokenizer.convert_tokens_to_ids("user")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(list(range(len(tokenizer))))  # every id has a text
    for text in ("user said: hello, how is the weather?\n", "\u00e9\u4f60\u597d \U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_full_has_the_published_ids_and_sizes(full_checkpoint):
    config = read_config(full_checkpoint)
    thinker, talker, token2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "token2wav"))
    assert thinker["audio_token_index"] == 151646
    assert thinker["vision_start_token_id"] == 151652
    assert thinker["image_token_index"] == 151655
    assert thinker["user_token_id"] == 872
    assert thinker["text_config"]["hidden_size"] == 3584
    assert thinker["vision_config"]["hidden_size"] == 1280
    assert talker["tts_codec_start_token_id"] == 8293
    assert talker["hidden_size"] == 896
    assert talker["num_hidden_layers"] == 24
    assert talker["num_attention_heads"] == 12
    assert token2wav["dit_config"]["num_hidden_layers"] == 22
    assert token2wav["bigvgan_config"]["upsample_initial_channel"] == 1536


def test_tiny_keeps_what_matters(tiny_checkpoint):
    config = read_config(tiny_checkpoint)
    text, talker = config["thinker_config"]["text_config"], config["talker_config"]
    assert text["hidden_size"] // text["num_attention_heads"] >= 32
    assert talker["head_dim"] >= 32
    assert talker["head_dim"] != talker["hidden_size"] // talker["num_attention_heads"]
    assert talker["embedding_size"] == text["hidden_size"]
    dit = config["token2wav_config"]["dit_config"]
    assert dit["look_ahead_layers"]
    assert dit["look_backward_layers"]
    rates = config["token2wav_config"]["bigvgan_config"]["upsample_rates"]
    assert torch.tensor(rates).prod() * dit["repeats"] == 480


def test_chat_template(tiny_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    parts = [{"type": "image"}, {"type": "audio"}, {"type": "video"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>"
        "<|vision_bos|><|VIDEO|><|vision_eos|>What?<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_foreign_folder_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("precious")
    for kind in ("tiny", "full"):
        assert main([kind, str(tmp_path)]) == 2
        assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert main(["full", str(tmp_path / "thesis.txt")]) == 2


def test_full_over_tiny_leaves_no_weights(tmp_path):
    checkpoints.write_tiny(tmp_path, check=False)
    checkpoints.write_full(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_missed_figure_is_named():
    dull = checkpoints.Answer("hello", "Ethan", (5,) * 32, (7,) * 64, 1.0, 64 * 480, 0.1, 0.1)
    missed = "\n".join(checkpoints.failed_checks([dull]))
    assert "1 different thinker tokens" in missed
    assert "1 different codec tokens" in missed
    assert "peak 1.000" in missed


def test_every_parameter_needs_a_rule():
    with pytest.raises(checkpoints.CheckpointError, match="no rule"):
        scale_of("thinker.model.something_new")


def test_random_weights_of_any_size_are_those_of_the_model(tmp_path):
    """At toy size; with `full --weights` the same function writes 21.5 GB."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    config = tiny_config(5)
    total = write_random_shards(tmp_path, config, spoken_ids=[7, 9], sounds=256, shard_bytes=500_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert {path.name for path in files} == set(index["weight_map"].values())
    read = {name: value for path in files for name, value in load_file(path).items()}
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    assert {name: value.shape for name, value in read.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert total == index["metadata"]["total_size"] == sum(2 * value.numel() for value in read.values())
    assert all(value.dtype is torch.bfloat16 and value.isfinite().all() for value in read.values())
    head = read["thinker.lm_head.weight"].float()
    assert head.any(dim=1).nonzero().flatten().tolist() == [7, 9]
    assert not read["talker.codec_head.weight"][256:].any()
    assert head[7].std() == pytest.approx(3 / 128**0.5, rel=0.3)
    assert not torch.equal(head[7], head[9])


def test_a_parameter_larger_than_the_noise_repeats_it():
    noise = torch.arange(7.0)
    drawn = draw("talker.model.embed_tokens.weight", torch.Size([4, 5]), noise, 0, torch.float32).flatten()
    assert sorted(drawn[:7].tolist()) == noise.tolist()
    assert torch.equal(drawn[7:14], drawn[:7])
    assert torch.equal(drawn[14:], drawn[:6])
