"""MiniCPM-o's thinker and talker in real vLLM engine cores, compared with transformers' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omni_actors.engine.rows import to_host
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import DType, TensorRef
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt
from omni_actors.stage.engine_interface import StageInputs
from tests.support.minicpm_reference import MiniCpmAnswer, MiniCpmReference, SlicedPicture
from tests.support.recordings import RANDOM, RecordingPrompts, noise
from tests.support.stage_driver import Driver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TEXTS = {
    "short": "the sea",
    "long": "what is it that you have with the tide and the sea on this day",
    "other": "you are",
}
ABOUT, SIZES = "what is it", {"max_model_len": 2048, "max_num_batched_tokens": 64}


def noisy(width: int, height: int) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


PICTURES = {  # sizes as the model's own code makes them
    "small": SlicedPicture(noisy(175, 287), (350, 574)),  # 25 columns, some of which lie between two positions
    "wide": SlicedPicture(noisy(1000, 700), (532, 378), 2, 2, (532, 378)),
    "tall": SlicedPicture(noisy(500, 3000), (182, 1092), 1, 7, (476, 420)),
}
MEDIA: dict[str, list[np.ndarray | SlicedPicture]] = {
    "shortest sound": [noise(0.0801)],
    "two sounds": [noise(1.2507), noise(0.31)],
    "silence at the end": [np.concatenate([noise(2.0), np.zeros(3217, np.float32)])],
    "longest sound": [noise(30.0)],
    "one picture": [PICTURES["wide"]],
    "pictures, one of them again": [PICTURES["small"], PICTURES["tall"], PICTURES["wide"]],
    "a picture and a sound": [PICTURES["small"], noise(0.7)],
}
REPLY, SPEECH = {"short": 5, "long": 17, "other": 1 + 9}, {"short": 30, "long": 12, "other": 21}


@pytest.fixture(scope="module")
def answers(tiny_minicpm_o: Path) -> dict[str, MiniCpmAnswer]:
    reference = MiniCpmReference(tiny_minicpm_o)
    return {name: reference.answer(text, REPLY[name], SPEECH[name]) for name, text in TEXTS.items()}


def media_prompt(media: list[np.ndarray | SlicedPicture]) -> tuple[Prompt, list[np.ndarray]]:
    content = (*(ContentPart(media=index) for index in range(len(media))), ContentPart(text=ABOUT))
    arrays, entries = [], []
    for medium in media:
        seen = isinstance(medium, SlicedPicture)
        arrays.append(np.array(medium.picture) if seen else medium)
        ref = TensorRef(DType.U8 if seen else DType.F32, arrays[-1].shape, 0)
        sort = {"modality": "image"} if seen else {"modality": "audio", "sample_rate": 16_000}
        entries.append(Media(encoding=MediaEncoding.ARRAY, tensor=ref, **sort))
    return Prompt(messages=(ChatMessage("user", content),), media=tuple(entries)), arrays


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


def test_media_are_perceived_as_by_the_reference_in_one_batch_and_alone(driver: Any, tiny_minicpm_o: Path):
    reference, prompts = MiniCpmReference(tiny_minicpm_o), RecordingPrompts(tiny_minicpm_o, SIZES)
    expected = {name: reference.answer(ABOUT, 9, 0, *media) for name, media in MEDIA.items()}
    inputs = {name: prompts.made(*media_prompt(media)) for name, media in MEDIA.items()}
    prompts.engine.shutdown()
    thinker: Driver = driver(tiny_minicpm_o, "thinker", asynchronous=True, **SIZES)
    greedy = {"max_tokens": 9, "temperature": 0.0, "repetition_penalty": 1.0}
    for name, made in inputs.items():
        thinker.start(name, made, **greedy)
    thinker.run()
    for name, made in inputs.items():
        thinker.start(f"{name}, alone", made, **greedy)
        thinker.run()
    for name, answer in expected.items():
        assert list(inputs[name].token_ids) == prompt_of(answer), name
        for request in (name, f"{name}, alone"):
            assert thinker.written(request) == answer.answer, request
            assert torch.allclose(thinker.rows(request), answer.rows, atol=1e-4), request
    assert len({tuple(answer.answer) for answer in expected.values()}) == len(MEDIA)
    for name, spoken in {"two sounds": True, "one picture": False}.items():  # a sound alone has speech answer it
        thinker.start(f"{name}, in text", inputs[name], streams=False, **greedy)
        thinker.run()
        assert (thinker.written(f"{name}, in text") == expected[name].answer) is spoken


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
