"""Training of the speaking checkpoint: layouts, guards, and a step of every part at toy size."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.paths import REPOSITORY
from tools.speaker.codec import CODES, VOICES
from tools.speaker.corpus import Corpus
from tools.speaker.errors import SpeakerError
from tools.speaker.files import files_of
from tools.speaker.heard import LISTS, listed, said_texts, sum_of
from tools.speaker.layout import CODEC, TOKENS, load_tokenizer, make_config, write_layout
from tools.speaker.parts import read_part, read_voices
from tools.speaker.spoken import jobs_of
from tools.speaker.tasks import Task, all_tasks, held_out_tasks
from tools.speaker.training import train
from tools.speaker.training.decoder import Talker
from tools.speaker.training.dit import train_dit
from tools.speaker.training.flat import Flat
from tools.speaker.training.hearing import Hearing, embeds_with_sound
from tools.speaker.training.learner import Learner
from tools.speaker.training.loop import MAX_SKIPPED, RESUME_RATE, Clock, Options, Trainer
from tools.speaker.training.prepare import words_of_tokens, write_texts
from tools.speaker.training.prompts import Prompts
from tools.speaker.training.seeing import Seeing, embeds_with_picture
from tools.speaker.training.senses import Thinker
from tools.speaker.training.stored import Order, Stored, with_reply
from tools.speaker.training.talker import grown, guide_loss
from tools.speaker.training.thinker import Texts
from tools.speaker.training.utterances import Utterances, sources_of, words_of
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
    config = make_config(296)
    config.token2wav_config.bigvgan_config.upsample_initial_channel = 64
    return config


def options(work: Path, **given) -> Options:
    return Options(**({"work": work, "seconds": 60.0, "device": "cpu", "scale": 0.004, "steps": 2} | given))


@pytest.fixture(scope="module")
def stored(work: Path) -> Stored:
    return Stored(work, "cpu")


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


def test_thinker_and_talker_begin_from_a_checkpoint_that_fits(work: Path, tmp_path: Path) -> None:
    whole = Stored(work, "cpu").recipe
    config = make_config(296)
    whole["sizes"]["text"]["num_hidden_layers"] = config.thinker_config.text_config.num_hidden_layers
    whole["sizes"]["audio"]["encoder_layers"] = config.thinker_config.audio_config.encoder_layers
    whole["sizes"]["talker"]["num_hidden_layers"] = config.talker_config.num_hidden_layers
    namespaces = {name: SimpleNamespace(**fields) for name, fields in whole["sizes"].items()}
    modules = {"thinker": Thinker(namespaces), "talker": Talker(namespaces["talker"])}
    for part in modules:
        learner = Learner(part, modules[part], options(tmp_path, start=CHECKPOINT), peak=1e-3, decay=0.0, average=0.9)
        given = read_part(CHECKPOINT, part)
        means = learner.flat.averaged()
        assert set(means) == set(given), part
        assert all(torch.equal(value, means[name]) for name, value in given.items()), part
    with pytest.raises(SpeakerError, match="do not fit"):
        Learner(
            "talker",
            Talker(SimpleNamespace(**(whole["sizes"]["talker"] | {"hidden_size": 64}))),
            options(tmp_path, start=CHECKPOINT),
            peak=1e-3,
            decay=0.0,
            average=0.9,
        )


def test_what_is_missing_is_named(work: Path, tmp_path: Path) -> None:
    with pytest.raises(SpeakerError, match="Unknown part 'singer'"):
        train("singer", options(work))
    with pytest.raises(SpeakerError, match="tokenizer"):
        train("dit", options(tmp_path))
    with pytest.raises(SpeakerError, match=r"lacks text\.npz; run .* prepare"):
        train("talker", options(tmp_path))
    with pytest.raises(SpeakerError, match="holds no codes"):
        files_of(tmp_path, "codes")
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
    ids, place = (
        torch.tensor([[1, 2, 3, 0, 0, 0], [4, 0, 0, 0, 0, 0]]),
        torch.arange(6)[None] - torch.tensor([[3], [1]]),
    )
    reply = torch.tensor([[0, 0, 0, 7, 8, 0], [0, 9, 0, 0, 0, 0]])
    ids, targets = with_reply(ids, place, reply, torch.tensor([[2], [1]]), end=5)
    assert ids.tolist() == [[1, 2, 3, 7, 8, 5], [4, 9, 5, 0, 0, 0]]
    assert targets.tolist() == [[-100, -100, 7, 8, 5, -100], [9, 5, -100, -100, -100, -100]]


def test_examples_of_texts_are_prompts_with_their_replies(work: Path, stored: Stored) -> None:
    texts, prompts = Texts(stored, 0.01, random.Random(0)), Prompts(work)
    length, index = texts.order.draw()
    ids, targets = texts.batch(length, index)
    assert ids.shape == targets.shape == (len(index), length)
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        whole, reply = prompts.tokenizer.decode(row), prompts.tokenizer.decode([t for t in target if t >= 0])
        asked, _, answer = whole.partition("<|im_start|>assistant\n")
        assert asked.startswith("<|im_start|>system\nYou are")
        assert answer.startswith(reply)
        assert reply.endswith("<|im_end|>")


def test_what_is_drawn_stays_where_graphs_read_it_and_comes_round() -> None:
    order = Order("cpu", random.Random(0))
    order.put(1, np.arange(6), 2)
    drawn = [(index.data_ptr(), index.tolist()) for _, index in (order.draw() for _ in range(3))]
    assert len({place for place, _ in drawn}) == 1
    assert sorted(number for _, numbers in drawn for number in numbers) == list(range(6))
    few = Order("cpu", random.Random(0))
    few.put(2, np.array([7]), 3)
    assert few.draw()[1].tolist() == [7, 7, 7], "of fewer examples than a batch some are drawn again"


def test_the_talkers_places_read_what_its_description_says() -> None:
    rows, voice, end, pad = 4, 4, 5, 6  # prompt of two, reply of one, its end
    source = sources_of(torch.arange(8)[None], torch.tensor([[2]]), torch.tensor([[1]]), rows)
    assert source.tolist() == [[0, 1, voice, 2, end, pad, pad, pad]]


def test_a_lesson_of_the_talker_is_laid_out_as_described(work: Path, stored: Stored) -> None:
    feed = Utterances(stored, work, 2000, random.Random(0))
    assert len(feed.codes) == 6
    bucket, index = feed.order.draw()
    lesson = feed.batch(bucket, index)
    decode = Prompts(work).tokenizer.decode
    for row, utterance in enumerate(index.tolist()):
        begin, codes = int(lesson.prompt[row]), feed.codes.values[20 * utterance : 20 * utterance + 20].tolist()
        text = said_texts(Corpus.load(work))[0][utterance % 3]
        assert decode(lesson.ids[row, begin:].tolist()).startswith(f"{text}<|im_end|>")
        assert lesson.code[row, begin : begin + 2].tolist() == [CODEC.pad, CODEC.start]
        assert lesson.has_code[row].tolist() == [begin <= place < begin + 22 for place in range(bucket)]
        assert lesson.target[row, begin + 1 : begin + 22].tolist() == [*codes, CODEC.end]
        assert (lesson.target[row] >= 0).sum() == 21
        assert lesson.voice[row] == TOKENS.voices[list(VOICES)[utterance // 3]]
    assert lesson.key.shape == lesson.code.shape
    assert lesson.want.shape == (len(index), 2, bucket)


def test_words_are_counted_where_they_begin() -> None:
    phone, start = np.array([0, 1, 1, 2, 3]), np.array([False, True, False, True, False])
    codes = np.array([0, 1, 1, 2, 3, 4, 0, 3, 3, 4])  # silence, a word, another; then in the next utterance one
    words, counts = words_of(codes, np.array([0, 7, 10]), phone, start)
    assert words.tolist() == [-1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert counts.tolist() == [2, 1]
    which, count = words_of_tokens("The sea's blue.", [(0, 3), (3, 7), (7, 9), (9, 14), (14, 15)])
    assert which == [0, 1, 1, 2, -1]
    assert count == 3


def test_attention_is_led_to_the_words_that_are_said() -> None:
    key, want = torch.tensor([[0, 1, -1]]), torch.tensor([[[-1, -1, 1], [-1, -1, 2]]])
    keys = torch.eye(3)[None, None].expand(1, 3, -1, -1)
    queries = torch.zeros(1, 3, 3, 3)
    queries[:, (0, 2), :, 1] = queries[:, 1, :, 0] = 30.0  # the head between the guided ones looks elsewhere
    right = guide_loss([(queries, keys)], key, want)
    wrong = guide_loss([(queries.roll(1, -1), keys)], key, want)
    assert right < 1e-3
    assert wrong > 10


def test_a_talker_that_grows_says_at_first_what_it_said() -> None:
    sizes = make_config(296).talker_config
    small, large = (SimpleNamespace(**(sizes.to_dict() | {"num_hidden_layers": count})) for count in (5, 8))
    torch.manual_seed(0)
    before, after = Talker(small).eval(), Talker(large).eval()
    after.load_state_dict(grown(before.state_dict(), after))
    inputs = torch.randn(1, 4, sizes.embedding_size), torch.tensor([[3, 5, 7, 9]]), torch.ones(1, 4)
    with torch.no_grad():
        torch.testing.assert_close(after.hidden(*inputs), before.hidden(*inputs))


def test_what_is_heard_and_seen_has_the_shapes_that_the_thinker_reads(work: Path, stored: Stored) -> None:
    hearing, seeing = Hearing(stored, work, 0.05, random.Random(0)), Seeing(stored)
    assert sorted(hearing.order.members) == [1, 2]
    held_out = {kind: members.tolist() for kind, members in hearing.held_out.items()}
    assert held_out == {"heard": [1, 4], "own": [7, 10]}, "list 39 of each file, of its own voices apart"
    chunks, index = hearing.order.draw()
    heard, seen = hearing.batch(chunks, index), seeing.batch(3, 4, 2)
    assert heard.mel.shape == (len(index), 128, 200 * chunks)
    decode = Prompts(work).tokenizer.decode
    sounds = (heard.ids == stored.recipe["audio"]).sum(1)
    assert sounds.tolist() == heard.tokens[:, 0].tolist()
    assert seen.pictures.shape == (2, 3, 84, 112)
    assert seen.places.shape == (3, *seen.ids.shape)
    assert decode([token for token in seen.targets[0].tolist() if token >= 0]).endswith(".<|im_end|>")
    thinker, head = Thinker(stored.sizes), len(seeing.head)
    assert embeds_with_sound(thinker, heard, len(hearing.head)).shape == (*heard.ids.shape, 192)
    embeds = embeds_with_picture(thinker, seen, head)
    assert embeds.shape == (*seen.ids.shape, 192)
    torch.testing.assert_close(embeds[:, head : head + 12], thinker.visual(seen.pictures))


def test_the_decoders_ear_and_eye_are_those_of_the_published_model(work: Path) -> None:
    """On the checkpoint's weights: a text, a sound of two lengths, a picture that is not square."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    config = make_config(296).thinker_config
    theirs = Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
    ours = Thinker({"text": config.text_config, "audio": config.audio_config, "vision": config.vision_config}).eval()
    weights = read_part(CHECKPOINT, "thinker")
    theirs.load_state_dict(weights)
    ours.load_state_dict(weights)
    ids, frames = torch.randint(0, 900, (2, 9)), torch.tensor([190, 123])
    mel, picture = torch.randn(2, 128, 200), torch.randn(1, 3, 84, 140)
    mask = torch.arange(200)[None] < frames[:, None]
    patches = picture.view(3, 3, 2, 14, 5, 2, 14).permute(1, 4, 2, 5, 0, 3, 6).reshape(60, 3, 1, 14, 14)
    patches = patches.expand(-1, -1, 2, -1, -1).reshape(60, -1)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.lm_head(ours.hidden(ours.model.embed_tokens(ids))), theirs(input_ids=ids).logits
        )
        sounds = theirs.get_audio_features(mel * mask[:, None], feature_attention_mask=mask.long()).last_hidden_state
        made, tokens = ours.audio_tower(mel, frames), ((frames - 1) // 2 + 1 - 2) // 2 + 1
        made = torch.cat([row[:count] for row, count in zip(made, tokens.tolist(), strict=True)])
        torch.testing.assert_close(made, sounds, atol=1e-4, rtol=1e-4)
        seen = theirs.visual(patches, grid_thw=torch.tensor([[1, 6, 10]])).pooler_output
        torch.testing.assert_close(ours.visual(picture)[0], seen, atol=1e-4, rtol=1e-4)


def test_a_step_that_is_not_finite_changes_no_weight_of_a_flat_module() -> None:
    module = nn.Linear(2, 1, bias=False)
    flat = Flat(module, torch.float32, decay=0.0, average=0.5)
    flat.rate.fill_(0.1)
    new = module.weight.detach().clone()
    flat.grads[0].fill_(1.0)
    flat.step()
    moved = module.weight.detach().clone()
    assert (moved < new).all()
    assert not flat.grads[0].any()
    flat.grads[0].fill_(float("nan"))
    flat.step()
    torch.testing.assert_close(module.weight.detach(), moved, msg="not even the momentum moves it")
    assert flat.bad == 1


def test_tasks_leave_out_what_is_held_out() -> None:
    tasks = all_tasks(random.Random(0), ["garden", "sea", "dog"], {"dog": "an animal that barks"})
    assert not {task.prompt for task in tasks} & {prompt for prompt, _ in held_out_tasks()}
    replies = {task.prompt: task.reply for task in tasks}
    assert replies["What is 8 plus 7?"] == "Eight plus seven is fifteen."
    assert replies["Count from 9 to 3."] == "Nine, eight, seven, six, five, four, three."
    assert replies["How do you spell sea?"] == "S, E, A."
    assert replies["Explain dog."] == "A dog is an animal that barks."


def test_every_text_is_spoken_in_both_voices(tmp_path: Path) -> None:
    corpus = Corpus(SENTENCES, [], [])
    jobs = [job for job in jobs_of(corpus, tmp_path, texts=3) if job.kind == "codes"]
    assert [job.voice for job in jobs] == list(VOICES)
    assert all(sorted(job.lines) == sorted(SENTENCES) for job in jobs)
    assert len({job.path for job in jobs_of(corpus, tmp_path, texts=3)}) == 5
    heard = [job for job in jobs_of(corpus, tmp_path) if job.kind == "heard"]
    assert [job.first for job in heard] == list(range(0, LISTS, 50))
    assert {job.voice for job in heard} == set(VOICES)


def test_sums_are_asked_of_two_digits_only() -> None:
    assert sum_of(["seven", "eight"]) == "Seven plus eight is fifteen."
    assert sum_of(["seven"]) == sum_of(["seven", "red"]) == ""
    assert listed(["red", "two"]) == "Red, two."
