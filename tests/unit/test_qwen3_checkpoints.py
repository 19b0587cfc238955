"""The Qwen3-Omni checkpoints that tools.checkpoints writes: layout, ids, sizes, determinism."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tools.checkpoints import qwen3_omni
from tools.checkpoints.__main__ import main
from tools.checkpoints.weights import fan_in

pytestmark = pytest.mark.nightly

LAYOUT = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
}


@pytest.fixture(scope="module")
def full_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "full"
    assert main(["full-qwen3", str(folder)]) == 0
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_tiny_one_has_weights_and_the_full_one_none(tiny_qwen3_checkpoint, full_checkpoint):
    tiny, full = ({path.name for path in folder.iterdir()} for folder in (tiny_qwen3_checkpoint, full_checkpoint))
    assert tiny >= LAYOUT | {"model.safetensors"}
    assert full >= LAYOUT
    assert not any(name.endswith((".safetensors", ".bin", ".index.json", ".pt")) for name in full)


def test_the_bytes_depend_only_on_the_seed(tiny_qwen3_checkpoint, tmp_path):
    for name, seed in (("same", 0), ("other", 1)):
        qwen3_omni.write_tiny(tmp_path / name, seed, check=False)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert digest(tmp_path / "same" / file) == digest(tiny_qwen3_checkpoint / file), file
    assert digest(tmp_path / "other" / "model.safetensors") != digest(tiny_qwen3_checkpoint / "model.safetensors")


@pytest.mark.parametrize("kind", ["tiny", "full"])
def test_the_configuration_agrees_with_the_tokenizer(kind, tiny_qwen3_checkpoint, full_checkpoint):
    from transformers import AutoTokenizer

    folder = tiny_qwen3_checkpoint if kind == "tiny" else full_checkpoint
    tokenizer, config = AutoTokenizer.from_pretrained(folder), read_config(folder)
    assert config["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]
    assert len(tokenizer) == config["thinker_config"]["text_config"]["vocab_size"]
    media = {
        "audio_token_id": "<|audio_pad|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "audio_start_token_id": "<|audio_start|>",
        "vision_start_token_id": "<|vision_start|>",
    }
    for part in ("thinker_config", "talker_config"):
        assert config[part]["position_id_per_seconds"] == 13
        for name, token in media.items():
            assert config[part][name] == tokenizer.convert_tokens_to_ids(token), name
    for name in ("im_start", "im_end"):
        assert config[f"{name}_token_id"] == tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    header = "<|im_start|>assistant\n"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n" + header
    # The talker takes three rows for the header, and the role's token says whose segment it is.
    ids = tokenizer.encode(header)
    assert ids[:2] == [config["im_start_token_id"], config["assistant_token_id"]]
    assert len(ids) == 3
    for role in ("system", "user", "assistant"):
        assert tokenizer.encode(role) == [config[f"{role}_token_id"]]


def test_the_full_one_has_the_published_ids_and_sizes(full_checkpoint):
    config = read_config(full_checkpoint)
    thinker, talker, code2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "code2wav"))
    assert [config[f"{role}_token_id"] for role in ("system", "user", "assistant")] == [8948, 872, 77091]
    assert [config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos")] == [151671, 151672, 151673]
    assert thinker["audio_start_token_id"] == 151669
    assert thinker["audio_token_id"] == 151675
    assert thinker["vision_config"]["deepstack_visual_indexes"] == [8, 16, 24]
    text, speech = thinker["text_config"], talker["text_config"]
    assert [text[name] for name in ("num_hidden_layers", "num_experts", "num_experts_per_tok")] == [48, 128, 8]
    assert [speech[name] for name in ("num_hidden_layers", "num_experts_per_tok", "vocab_size")] == [20, 6, 3072]
    assert speech["norm_topk_prob"]
    assert talker["accept_hidden_layer"] == 24
    assert talker["speaker_id"] == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert talker["codec_eos_token_id"] == 2150
    assert code2wav["sliding_window"] == 72


def test_the_tiny_one_keeps_what_matters(tiny_qwen3_checkpoint):
    config = read_config(tiny_qwen3_checkpoint)
    thinker, talker, code2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "code2wav"))
    speech = talker["text_config"]
    assert speech["head_dim"] != speech["hidden_size"] // speech["num_attention_heads"]
    assert talker["num_code_groups"] == code2wav["num_quantizers"] == 16
    levels = len(thinker["vision_config"]["deepstack_visual_indexes"])
    assert levels < talker["accept_hidden_layer"] < thinker["text_config"]["num_hidden_layers"]
    for part in (thinker, talker):
        assert part["text_config"]["rope_parameters"]["mrope_interleaved"]
    samples = 1
    for rate in (*code2wav["upsample_rates"], *code2wav["upsampling_ratios"]):
        samples *= rate
    assert samples == 1920


def test_a_foreign_folder_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("precious")
    for kind in ("tiny-qwen3", "full-qwen3"):
        assert main([kind, str(tmp_path)]) == 2
        assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "shape", "inputs"),
    [
        ("talker.model.layers.0.mlp.experts.gate_up_proj", (8, 64, 32), 32),
        ("code2wav.decoder.1.block.1.conv.weight", (64, 32, 16), 128),
        ("code2wav.upsample.0.0.conv.weight", (64, 64, 2), 64),
        ("thinker.lm_head.weight", (512, 128), 128),
    ],
)
def test_a_layer_of_gain_one_counts_the_inputs_that_meet_in_an_output(name, shape, inputs):
    import torch

    assert fan_in(name, torch.Size(shape)) == inputs
