"""Training of the speaking checkpoint: layouts, guards, and a step of every part at toy size."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.paths import REPOSITORY
from tools.speaker.codec import CODES, VOICES
from tools.speaker.corpus import Corpus
from tools.speaker.layout import load_tokenizer, speaker_config, write_layout
from tools.speaker.parts import read_part, read_voices
from tools.speaker.tasks import Task
from tools.speaker.training import train
from tools.speaker.training.dit import train_dit
from tools.speaker.training.loop import Options
from tools.speaker.training.prepare import Prompts, write_texts
from tools.speaker.training.vocoder import train_vocoder

pytestmark = pytest.mark.nightly

CHECKPOINT = REPOSITORY / "examples" / "speaker"
SENTENCES = ["The sea is blue.", "A dog barked.", "Five, six."]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three sentences, spoken as noise and prepared, with the checkpoint's tokenizer."""
    folder = tmp_path_factory.mktemp("speaker")
    Corpus(SENTENCES, ["sea", "dog"], [Task("fact", "What color is the sea?", "The sea is blue.")]).save(folder)
    (folder / "model").mkdir()
    write_layout(folder / "model", load_tokenizer(CHECKPOINT))
    (folder / "spoken").mkdir()
    rng = np.random.default_rng(0)
    for number, voice in enumerate(VOICES):
        codes, ends = rng.integers(1, CODES, 60).astype(np.uint16), np.array([0, 20, 40, 60])
        sounds = rng.normal(0, 3000, 60 * 480).astype(np.int16)
        save = {"voice": np.array(voice), "ends": ends}
        np.savez(folder / "spoken" / f"codes_{number:04}.npz", codes=codes, first=np.array(0), **save)
        np.savez(folder / "spoken" / f"sounds_{number:04}.npz", codes=codes, wave=sounds, **save)
        speech = {"wave": np.tile(sounds, 3)[:70_000], "ends": np.array([0, 20_000, 40_000, 70_000])}
        for kind in ("heard", "own"):
            np.savez(folder / "spoken" / f"{kind}_{number:04}.npz", voice=np.array(voice), first=np.array(38), **speech)
    write_texts(folder, examples=200)
    shrink(folder / "prepared" / "recipe.json")
    asked, reply = Prompts(folder).encode([Prompts(folder).wrap("Say: The sea."), "The sea."])
    ids = {"asked": asked.tolist(), "reply": reply.tolist()}
    held_out = {
        "thinker": [{"group": "say", **ids}],
        "talker": [{"group": "say", "voice": voice, "codes": codes.tolist(), **ids} for voice in VOICES],
    }
    with gzip.open(folder / "prepared" / "held_out.json.gz", "wt") as file:
        json.dump(held_out, file)
    return folder


def shrink(recipe: Path) -> None:
    """Gives thinker and talker fewer layers."""
    fields = json.loads(recipe.read_text())
    fields["sizes"]["text"]["num_hidden_layers"] = fields["sizes"]["audio"]["encoder_layers"] = 1
    fields["sizes"]["talker"]["num_hidden_layers"] = 3
    recipe.write_text(json.dumps(fields))


def small_config() -> object:
    """The configuration with a narrow BigVGAN."""
    config = speaker_config(296)
    config.token2wav_config.bigvgan_config.upsample_initial_channel = 64
    return config


def options(work: Path, **given) -> Options:
    return Options(**({"work": work, "seconds": 60.0, "device": "cpu", "scale": 0.004, "steps": 2} | given))


@pytest.mark.parametrize(("part", "run"), [("dit", train_dit), ("vocoder", train_vocoder)])
def test_dit_and_vocoder_take_steps_and_continue_from_their_state(work: Path, part: str, run: Callable) -> None:
    config = small_config()
    run(options(work, steps=1), config)
    first = read_part(work / "parts", part)
    run(options(work), config)
    second = read_part(work / "parts", part)
    state = torch.load(work / "state" / f"{part}.pt", weights_only=True)
    assert state["updates"] == 3
    assert all(value.isfinite().all() for value in second.values())
    assert any(not torch.equal(value, second[name]) for name, value in first.items())
    assert {float(entry["step"]) for entry in state["optimizer"]["state"].values()} <= {1.0, 2.0, 3.0}
    if part == "vocoder":
        assert "judges" in state["others"], "its discriminators are kept, too"
    else:
        assert read_voices(work / "parts")["Ethan"]["cond"].shape == (1, 192)


def test_thinker_and_talker_take_steps_and_continue_from_their_state(work: Path) -> None:
    for part in ("thinker", "talker"):
        train(part, options(work, scale=0.0005, save_every=0.0))
        first = read_part(work / "parts", part)
        train(part, options(work, scale=0.0005, steps=1))
        second = read_part(work / "parts", part)
        state = torch.load(work / "state" / f"{part}.pt", weights_only=True)["flat"]
        assert state["steps"].item() == 3, part
        assert all(value.isfinite().all() for value in second.values()), part
        changed = {name for name, value in first.items() if not torch.equal(value, second[name])}
        assert {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"} <= changed, part
        if part == "thinker":
            assert {"audio_tower.conv1.weight", "visual.blocks.0.attn.q.weight"} <= set(first)
