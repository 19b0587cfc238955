"""What the speaking checkpoint is asked: what it refuses, what is held out, what it hears of itself."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.speaker.__main__ import main
from tools.speaker.corpus import Corpus
from tools.speaker.files import files_of
from tools.speaker.heard import spoken_line
from tools.speaker.own import say_own, together
from tools.speaker.refusals import FORMS, TOY, Fillers, as_typed, plain, refused, strange_prompts
from tools.speaker.skills import SPELLING
from tools.speaker.tasks import Task, all_tasks, held_out_tasks
from tools.speaker.training.prepare import Examples

pytestmark = pytest.mark.nightly

STATEMENTS = ("The sea is blue.", "Dogs bark!", "I like tea.")
WORDS = ("sea", "dog", "house", "run", "blue", "walking", "stone", "river")


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    words = [*WORDS, *SPELLING.read_text(encoding="utf-8").split()]
    return all_tasks(random.Random(0), words, {"dog": "an animal that barks"}, STATEMENTS)


def test_nothing_that_the_evaluation_asks_is_a_task_of_the_training(tasks: list[Task]) -> None:
    prompts = {task.prompt for task in tasks}
    assert not prompts & {prompt for prompt, _ in held_out_tasks()}
    assert not {plain(prompt) for prompt in prompts} & {plain(prompt) for prompt in strange_prompts()}
    assert len(set(strange_prompts())) == len(strange_prompts()) >= 100


def test_what_the_evaluation_wants_to_be_answered_is_taught_in_other_words(tasks: list[Task]) -> None:
    taught = {task.reply for task in tasks}
    assert [prompt for prompt, reply in held_out_tasks() if reply not in taught] == []
    assert len(held_out_tasks()) == 40


def test_what_has_an_answer_is_not_refused(tasks: list[Task]) -> None:
    answered = {plain(task.prompt) for task in tasks if task.reply != TOY}
    refusals = [task for task in tasks if task.reply == TOY]
    assert not {plain(task.prompt) for task in refusals} & answered
    assert len({task.prompt for task in refusals}) > 30_000


def test_forms_of_refusals_are_filled_and_none_is_left_out() -> None:
    forms = FORMS.read_text(encoding="utf-8").splitlines()
    assert len(set(forms)) > 400
    fillers = Fillers(random.Random(1), WORDS, STATEMENTS)
    for blank in {blank for form in forms for blank in re.findall(r"{(\w+)}", form)}:
        assert fillers.fill(blank), blank
    prompts = list(refused(random.Random(2), WORDS, STATEMENTS, known=("Really?",), count=6000))
    assert not any("{" in prompt for prompt in prompts)
    assert not any(plain(prompt) == "really" for prompt in prompts)
    openings = {re.split(r"[ .!?,]", form)[0].lower() for form in forms if "{" not in form.split()[0]}
    assert openings - {re.split(r"[ .!?,]", prompt)[0].lower() for prompt in prompts} <= {"really"}


def test_people_type_with_and_without_capitals_and_full_stops() -> None:
    rng = random.Random(0)
    assert {as_typed(rng, "Who is Anna?") for _ in range(200)} == {"Who is Anna?", "who is anna?", "Who is Anna"}


def test_words_to_spell_are_mixed_with_made_up_ones_and_never_held_out() -> None:
    source = Examples(Corpus(list(STATEMENTS), [*WORDS, "garden"], []))
    drawn = {source.word() for _ in range(2000)}
    assert set(WORDS) - {"walking"} < drawn, "walking is asked by the evaluation"
    assert not drawn & {"walking", "garden"}
    assert all(2 <= len(word) <= 10 for word in drawn)
    assert any(word not in WORDS for word in drawn)


def test_lists_are_said_with_and_without_pauses_in_both_voices() -> None:
    lines = [spoken_line(["red", "two"], number) for number in range(4)]
    assert lines == ["red two.", "red two.", "red, two.", "red, two."]


def test_lists_that_are_said_together_are_cut_where_their_codes_end() -> None:
    codes = [np.full(length, number + 1) for number, length in enumerate((40, 30, 2960, 1500, 6))]
    assert [[len(one) for one in group] for group in together(codes, 3000)] == [[40, 30], [2960], [1500, 6]]
    asked = []

    def vocoder(codes: torch.Tensor, conditioning: torch.Tensor, reference_mel: torch.Tensor) -> torch.Tensor:
        """Gives each code a tone of its own loudness."""
        asked.append(codes.shape)
        tone = torch.sin(torch.arange(codes.shape[1] * 480) * 0.1)
        return tone * codes[0].repeat_interleave(480) * 0.1

    fields = {"cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 150, 80)}
    waves = list(say_own(vocoder, codes, fields, "cpu"))
    assert asked == [(1, 70), (1, 2960), (1, 1506)]
    assert [len(wave) for wave in waves] == [320 * len(one) for one in codes]
    for number, wave in enumerate(waves, 1):
        assert np.abs(wave.astype(float)).max() / 32767 == pytest.approx(0.1 * number, rel=0.1)


def test_kinds_of_files_that_do_not_exist_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speak", str(tmp_path), "--kinds", "heard,whispered"]) == 1
    assert "unknown kind 'whispered'; there are heard, sounds, codes" in capsys.readouterr().err
    assert files_of(tmp_path, "own", needed=False) == []
