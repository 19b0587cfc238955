"""MiniCPM-o's thinker and talker in real vLLM engine cores, compared with transformers' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_actors.engine.rows import to_host
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import DType, TensorRef
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt
from omni_actors.stage.engine_interface import StageInputs
from tests.support.minicpm_reference import MiniCpmAnswer, MiniCpmReference
from tests.support.recordings import RecordingPrompts, noise
from tests.support.stage_driver import Driver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TEXTS = {
    "short": "the sea",
    "long": "what is it that you have with the tide and the sea on this day",
    "other": "you are",
}
ABOUT, SIZES = "what is it", {"max_model_len": 1024, "max_num_batched_tokens": 64}
SOUNDS = {  # the shortest, several, of unequal and odd lengths, one with silence at its end, the longest
    "short": [noise(0.0801)],
    "two": [noise(1.2507), noise(0.31)],
    "quiet": [np.concatenate([noise(2.0), np.zeros(3217, np.float32)])],
    "longest": [noise(30.0)],
}
REPLY, SPEECH = {"short": 5, "long": 17, "other": 1 + 9}, {"short": 30, "long": 12, "other": 21}


@pytest.fixture(scope="module")
def answers(tiny_minicpm_o: Path) -> dict[str, MiniCpmAnswer]:
    reference = MiniCpmReference(tiny_minicpm_o)
    return {name: reference.answer(text, REPLY[name], SPEECH[name]) for name, text in TEXTS.items()}


def recordings_prompt(sounds: list[np.ndarray]) -> Prompt:
    content = (*(ContentPart(media=index) for index in range(len(sounds))), ContentPart(text=ABOUT))
    media = [
        Media("audio", MediaEncoding.ARRAY, TensorRef(0, DType.F32, one.shape), sample_rate=16_000) for one in sounds
    ]
    return Prompt(messages=(ChatMessage("user", content),), media=tuple(media))


def prompt_of(answer: MiniCpmAnswer) -> list[int]:
    return answer.prompt[:-1]  # the thinker itself adds the token after which it speaks


def spoken(answer: MiniCpmAnswer) -> StageInputs:
    return StageInputs(tensors={"prompt_rows": to_host(answer.rows[:1]), "reply_rows": to_host(answer.rows[1:])})


def test_texts_and_rows_equal_transformers_in_one_batch_and_alone(driver: Any, tiny_minicpm_o: Path, answers):
    thinker: Driver = driver(tiny_minicpm_o, "thinker", asynchronous=True, max_num_batched_tokens=16)
    waiting = list(answers)

    def join(_step: int) -> None:
        if waiting:
            name = waiting.pop(0)
            thinker.start(
                name,
                StageInputs(token_ids=prompt_of(answers[name])),
                max_tokens=REPLY[name],
                temperature=0.0,
                repetition_penalty=1.0,
            )

    join(0)
    thinker.run(join)
    for name, answer in answers.items():
        thinker.start(
            f"{name}, alone",
            StageInputs(token_ids=prompt_of(answer)),
            max_tokens=REPLY[name],
            temperature=0.0,
            repetition_penalty=1.0,
        )
        thinker.run()
        for request in (name, f"{name}, alone"):
            assert thinker.written(request) == answer.answer, request
            assert torch.allclose(thinker.rows(request), answer.rows, atol=1e-4), request
            assert thinker.streams(request)[0].scalars == {"prompt_tokens": 0}


def test_sounds_are_heard_as_the_reference_hears_them_in_one_batch_and_alone(driver: Any, tiny_minicpm_o: Path):
    reference, prompts = MiniCpmReference(tiny_minicpm_o), RecordingPrompts(tiny_minicpm_o, SIZES)
    expected = {name: reference.answer(ABOUT, 9, 0, *sounds) for name, sounds in SOUNDS.items()}
    inputs = {name: prompts.made(recordings_prompt(sounds), sounds) for name, sounds in SOUNDS.items()}
    prompts.engine.shutdown()
    thinker: Driver = driver(tiny_minicpm_o, "thinker", asynchronous=True, **SIZES)
    greedy = {"max_tokens": 9, "temperature": 0.0, "repetition_penalty": 1.0}
    for name, made in inputs.items():
        thinker.start(name, made, **greedy)
    thinker.run()
    for name, made in inputs.items():
        thinker.start(f"{name}, alone", made, **greedy)
        thinker.run()
        thinker.start(f"{name}, not spoken", made, streams=False, **greedy)
        thinker.run()
    for name, answer in expected.items():
        assert list(inputs[name].token_ids) == prompt_of(answer), name
        for request in (name, f"{name}, alone", f"{name}, not spoken"):
            assert thinker.written(request) == answer.answer, request
        assert torch.allclose(thinker.rows(name), answer.rows, atol=1e-4), name
    assert len({tuple(answer.answer) for answer in expected.values()}) == len(SOUNDS)


def test_an_answer_that_is_not_spoken_has_neither_rows_nor_the_mark_of_speech(
    driver: Any, tiny_minicpm_o: Path, answers
):
    thinker: Driver = driver(tiny_minicpm_o, "thinker", asynchronous=True, max_num_batched_tokens=16)
    thinker.start("r", StageInputs(token_ids=prompt_of(answers["short"])), streams=False, max_tokens=3)
    thinker.run()
    assert not thinker.streams("r")
    assert thinker.finished("r").input_tokens == len(prompt_of(answers["short"]))


def test_speech_equals_transformers_in_one_batch_and_alone(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    for name, answer in answers.items():
        talker.start(name, spoken(answer), max_tokens=SPEECH[name], **greedy)
    talker.run()
    for name, answer in answers.items():
        talker.start(f"{name}, alone", spoken(answer), max_tokens=SPEECH[name], **greedy)
        talker.run()
        assert talker.tokens(name) == talker.tokens(f"{name}, alone") == answer.codes
    assert len({*answers["short"].codes}) > 5


def test_speech_that_ends_leaves_the_end_out(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    end = 60
    talker.start("r", spoken(answers["short"]), max_tokens=8, min_tokens=0, logit_bias={end: 100.0})
    talker.run()
    assert talker.tokens("r") == []
    assert talker.finished("r").output_tokens == 1


def test_parts_of_an_answer_are_refused(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    inputs = StageInputs(tensors={"prompt_rows": to_host(answers["short"].rows[:1])}, complete=False)
    with pytest.raises(InvalidPayload, match="once it is complete"):
        talker.start("r", inputs)
