"""Training of the speaking checkpoint: layouts, guards, and a step of every part at toy size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.paths import REPOSITORY
from tools.speaker.codec import CODES, VOICES
from tools.speaker.corpus import Corpus
from tools.speaker.errors import SpeakerError
from tools.speaker.layout import CODEC, TOKENS, load_tokenizer, make_config, write_layout
from tools.speaker.parts import read_part, read_voices
from tools.speaker.spoken import SpokenText, jobs_of, spoken_codes
from tools.speaker.tasks import HELD_OUT, Task, all_tasks
from tools.speaker.training import train
from tools.speaker.training.dit import train_dit
from tools.speaker.training.loop import MAX_SKIPPED, RESUME_RATE, Clock, Options, Trainer
from tools.speaker.training.prompts import by_length, collate
from tools.speaker.training.talker import TalkerLoss, train_talker
from tools.speaker.training.talker import collate as collate_talker
from tools.speaker.training.thinker import train_thinker
from tools.speaker.training.vocoder import train_vocoder

CHECKPOINT = REPOSITORY / "examples" / "speaker"
SENTENCES = ["The sea is blue.", "A dog barked.", "Five, six."]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three sentences, spoken as noise, with the checkpoint's tokenizer."""
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
        texts = np.array(["one two.", "three."])
        speech = {"wave": sounds[:16000], "ends": np.array([0, 8000, 16000]), "texts": texts}
        np.savez(folder / "spoken" / f"digits_{number:04}.npz", voice=np.array(voice), **speech)
    return folder


def small_config() -> object:
    """The configuration with one layer where there are several, and a narrow BigVGAN."""
    config = make_config(296)
    config.thinker_config.text_config.num_hidden_layers = config.talker_config.num_hidden_layers = 1
    config.thinker_config.audio_config.encoder_layers = 1
    config.token2wav_config.bigvgan_config.upsample_initial_channel = 64
    return config


def options(work: Path, **given) -> Options:
    return Options(**({"work": work, "seconds": 60.0, "device": "cpu", "scale": 0.004, "steps": 2} | given))


def test_every_part_takes_a_step_and_continues_from_its_state(work: Path) -> None:
    config = small_config()
    for part, run in (
        ("thinker", train_thinker),
        ("talker", train_talker),
        ("dit", train_dit),
        ("vocoder", train_vocoder),
    ):
        run(options(work, steps=1), config)
        first = read_part(work / "parts", part)
        run(options(work), config)
        second = read_part(work / "parts", part)
        state = torch.load(work / "state" / f"{part}.pt", weights_only=True)
        assert state["updates"] == 3, part
        assert all(value.isfinite().all() for value in second.values()), part
        assert any(not torch.equal(value, second[name]) for name, value in first.items()), part
        assert {float(entry["step"]) for entry in state["optimizer"]["state"].values()} <= {1.0, 2.0, 3.0}
    assert "judges" in state["others"], "the vocoder's discriminators are kept, too"
    assert read_voices(work / "parts")["Ethan"]["cond"].shape == (1, 192)


def test_what_is_missing_is_named(work: Path, tmp_path: Path) -> None:
    with pytest.raises(SpeakerError, match="Unknown part 'singer'"):
        train("singer", options(work))
    with pytest.raises(SpeakerError, match="tokenizer"):
        train("dit", options(tmp_path))
    with pytest.raises(SpeakerError, match="holds no codes"):
        spoken_codes(tmp_path)
    with pytest.raises(SpeakerError, match="holds no corpus"):
        Corpus.load(tmp_path)


class TestGuards:
    """Of the trainer, with a module of one weight under the name of a part."""

    def trainer(self, folder: Path, **given) -> Trainer:
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        return Trainer("dit", module, options(folder, **given), peak=0.1)

    def test_a_step_that_is_not_finite_changes_nothing(self, tmp_path: Path) -> None:
        trainer = self.trainer(tmp_path)
        weight = trainer.module.weight
        assert not trainer.step((weight * float("nan")).sum())
        assert not trainer.step((weight.log() * 0 + (weight - 1).sqrt()).sum()), "the loss is finite, its slope is not"
        assert weight.item() == 1.0
        assert trainer.step(weight.sum())
        assert weight.item() < 1.0

    def test_a_loss_that_stays_broken_ends_the_training(self, tmp_path: Path) -> None:
        trainer = self.trainer(tmp_path)
        for _ in range(MAX_SKIPPED):
            trainer.step((trainer.module.weight * float("inf")).sum())
        with pytest.raises(SpeakerError, match="lower --rate"):
            trainer.step((trainer.module.weight * float("inf")).sum())

    def test_a_run_that_continues_has_the_optimiser_and_a_lower_rate(self, tmp_path: Path) -> None:
        first = self.trainer(tmp_path)
        first.step(first.module.weight.sum())
        first.save()
        second = self.trainer(tmp_path)
        assert second.clock.peak == pytest.approx(RESUME_RATE * first.clock.peak)
        assert second.module.weight.item() == first.module.weight.item()
        assert second.optimizer.state_dict()["state"][0]["step"] == 1
        assert self.trainer(tmp_path, rate=0.3).clock.peak == 0.3

    def test_the_average_follows_slowly_and_is_what_is_written(self, tmp_path: Path) -> None:
        trainer = self.trainer(tmp_path)
        for _ in range(300):
            trainer.step((trainer.module.weight - 3).square().sum())
        mean = float(trainer.averaged()["weight"])
        assert 1.0 < mean < trainer.module.weight.item()
        trainer.save()
        assert float(read_part(tmp_path / "parts", "dit")["weight"]) == pytest.approx(mean, abs=1e-3)


def test_the_rate_rises_and_falls_with_the_time() -> None:
    now = [0.0]
    clock = Clock(100.0, 1.0, now=lambda: now[0])
    rates = [clock.next_rate() for _ in range(200)]
    assert rates[0] == pytest.approx(1 / 200)
    assert rates[-1] == pytest.approx(1.0)
    now[0] = 100.0
    assert clock.next_rate() == pytest.approx(0.02)
    assert clock.done() == 1.0


def test_only_replies_are_learned() -> None:
    ids, targets = collate([(np.array([1, 2, 3]), np.array([7, 8])), (np.array([4]), np.array([9]))], end=5)
    assert ids.tolist() == [[1, 2, 3, 7, 8, 5], [4, 9, 5, 0, 0, 0]]
    assert targets.tolist() == [[-100, -100, 7, 8, 5, -100], [9, 5, -100, -100, -100, -100]]


def test_batches_hold_examples_of_similar_length_within_the_room() -> None:
    sizes = [5, 50, 6, 40, 7, 200]
    batches = by_length(sizes, 100)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert [2, 0] not in batches
    assert batches == [[0, 2, 4], [3, 1], [5]], "the last one is longer than the room and alone"


def test_the_talkers_sequence_is_that_of_its_description() -> None:
    codes = np.array([11, 12, 13, 14])
    batch = collate_talker([(np.array([1, 2]), np.array([7]), SpokenText(0, "Ethan", codes))], end=5)
    voice, end, pad = 4, 5, 6  # after the four rows of prompt, reply and end
    assert batch.ids.tolist() == [[1, 2, 7, 5]]
    assert batch.voice.tolist() == [TOKENS.voices["Ethan"]]
    assert batch.source.tolist() == [[0, 1, voice, 2, end, pad, pad, pad]]
    assert batch.code.tolist() == [[0, 0, CODEC.pad, CODEC.start, 11, 12, 13, 14]]
    assert batch.has_code.tolist() == [[0, 0, 1, 1, 1, 1, 1, 1]]
    assert batch.target.tolist() == [[-100, -100, -100, 11, 12, 13, 14, CODEC.end]]


def test_scheduled_sampling_replaces_codes_and_nothing_else() -> None:
    codes = np.array([11, 12, 13, 14])
    batch = collate_talker([(np.array([1, 2]), np.array([7]), SpokenText(0, "Ethan", codes))], end=5)

    class Says21(TalkerLoss):
        def __init__(self) -> None: ...

        def logits(self, text: torch.Tensor, code: torch.Tensor, has_code: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.full(code.shape, 21), CODEC.vocab_size).float()

    replaced = Says21().with_own_codes(batch, torch.zeros(1, 8, 192), own=1.0)
    assert replaced.tolist() == [[0, 0, CODEC.pad, CODEC.start, 21, 21, 21, 21]]
    assert torch.equal(Says21().with_own_codes(batch, torch.zeros(1, 8, 192), own=0.0), batch.code)


def test_tasks_leave_out_what_is_held_out_and_say_that_it_is_a_toy() -> None:
    tasks = all_tasks(random.Random(0), ["garden", "sea", "dog"], {"dog": "an animal that barks"})
    assert not {task.prompt for task in tasks} & HELD_OUT
    replies = {task.prompt: task.reply for task in tasks}
    assert replies["What is 8 plus 7?"] == "Eight plus seven is fifteen."
    assert replies["Count from 9 to 3."] == "Nine, eight, seven, six, five, four, three."
    assert replies["How do you spell sea?"] == "S, E, A."
    assert replies["Explain dog."] == "A dog is an animal that barks."
    assert any("toy" in task.reply for task in tasks)


def test_every_text_is_spoken_in_both_voices(tmp_path: Path) -> None:
    corpus = Corpus(SENTENCES, [], [])
    jobs = [job for job in jobs_of(corpus, tmp_path) if job.kind == "codes"]
    assert [job.voice for job in jobs] == list(VOICES)
    assert all(sorted(job.lines) == sorted(SENTENCES) for job in jobs)
    assert len({job.path for job in jobs_of(corpus, tmp_path)}) == 6
