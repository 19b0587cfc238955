"""What the speaking checkpoint is asked: what it refuses, what is held out, what it hears of itself."""

from __future__ import annotations

import random

import pytest

from tools.speaker.refusals import TOY, plain, strange_prompts
from tools.speaker.skills import SPELLING
from tools.speaker.tasks import Task, all_tasks, held_out_tasks

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


def test_what_has_an_answer_is_not_refused(tasks: list[Task]) -> None:
    answered = {plain(task.prompt) for task in tasks if task.reply != TOY}
    refusals = [task for task in tasks if task.reply == TOY]
    assert not {plain(task.prompt) for task in refusals} & answered
    assert len({task.prompt for task in refusals}) > 30_000
