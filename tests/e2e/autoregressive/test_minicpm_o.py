"""MiniCPM-o's thinker and talker in real vLLM engine cores, compared with transformers' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from omni_actors.engine.rows import to_host
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import DType, TensorRef
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt
from omni_actors.stage.engine_interface import StageInputs
from tests.support.minicpm_reference import ENDING, MiniCpmAnswer, MiniCpmReference, ReferenceFilm, SlicedPicture
from tests.support.recordings import RANDOM, RecordingPrompts, noise
from tests.support.stage_driver import Driver

pytestmark = pytest.mark.e2e

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


class Film(NamedTuple):
    """Frames as they are sent, two a second, and the sound; and what the model's own package makes of them."""

    frames: np.ndarray
    sound: np.ndarray | None
    reference: ReferenceFilm


def film(frames: int, sound: np.ndarray | None, sounds: list[np.ndarray]) -> Film:
    shown = RANDOM.integers(0, 256, (frames, 287, 175, 3), dtype=np.uint8)
    kept = [SlicedPicture(Image.fromarray(frame), PICTURES["small"].whole) for frame in shown[::2]]
    return Film(shown, sound, ReferenceFilm(kept, sounds))


HEARD = noise(3.0)
MEDIA: dict[str, list[np.ndarray | SlicedPicture | Film]] = {
    "shortest sound": [noise(0.0801)],
    "two sounds": [noise(1.2507), noise(0.31)],
    "silence at the end": [np.concatenate([noise(2.0), np.zeros(3217, np.float32)])],
    "long sound": [noise(31.7)],
    "one picture": [PICTURES["wide"]],
    "pictures, one of them again": [PICTURES["small"], PICTURES["tall"], PICTURES["wide"]],
    "a picture and a sound": [PICTURES["small"], noise(0.7)],
    "a silent video": [film(4, None, [])],
    "a video, and its sound goes on": [film(5, HEARD, [HEARD[:16000], HEARD[16000:32000], HEARD[32000:40000]])],
    "videos, one with a short sound": [
        film(2, HEARD[:16000], [HEARD[:16000]]),
        film(3, HEARD[:16100], [HEARD[:16000], np.pad(HEARD[16000:16100], (0, 1500))]),
    ],
}
REPLY, SPEECH = {"short": 5, "long": 31, "other": 1 + 10}, {"short": 30, "long": 70, "other": 21}
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "logit_bias": ENDING}


@pytest.fixture(scope="module")
def answers(tiny_minicpm_o: Path) -> dict[str, MiniCpmAnswer]:
    reference = MiniCpmReference(tiny_minicpm_o)
    return {name: reference.answer(text, REPLY[name], SPEECH[name]) for name, text in TEXTS.items()}


def media_prompt(media: list[np.ndarray | SlicedPicture | Film]) -> tuple[Prompt, list[np.ndarray]]:
    content, arrays, entries = [], [], []

    def add(array: np.ndarray, modality: str, **more: Any) -> int:
        ref = TensorRef(DType.F32 if modality == "audio" else DType.U8, array.shape, 0)
        rate = {"sample_rate": 16_000} if modality == "audio" else {}
        arrays.append(array)
        entries.append(Media(encoding=MediaEncoding.ARRAY, tensor=ref, modality=modality, **rate, **more))
        return len(arrays) - 1

    for medium in media:
        match medium:
            case SlicedPicture():
                index = add(np.array(medium.picture), "image")
            case Film():
                sound = None if medium.sound is None else add(medium.sound, "audio")
                index = add(medium.frames, "video", frames_per_second=2.0, sound=sound)
            case _:
                index = add(medium, "audio")
        content.append(ContentPart(media=index))
    message = ChatMessage("user", (*content, ContentPart(text=ABOUT)))
    return Prompt(messages=(message,), media=tuple(entries)), arrays


def known(media: list[np.ndarray | SlicedPicture | Film]) -> list[np.ndarray | SlicedPicture | ReferenceFilm]:
    return [medium.reference if isinstance(medium, Film) else medium for medium in media]


def prompt_of(answer: MiniCpmAnswer) -> list[int]:
    return answer.prompt[:-1]  # the thinker itself adds the token after which it speaks


def spoken(answer: MiniCpmAnswer, rows: int | None = None) -> StageInputs:
    given = answer.rows[:rows]
    tensors = {"prompt_rows": to_host(given[:1])} | ({"reply_rows": to_host(given[1:])} if len(given) > 1 else {})
    return StageInputs(tensors=tensors, complete=len(given) == len(answer.rows))


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
    expected = {name: reference.answer(ABOUT, 9, 0, *known(media)) for name, media in MEDIA.items()}
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
    for name, spoken in {
        "two sounds": True,
        "one picture": False,
        "a silent video": False,
        "a video, and its sound goes on": True,
    }.items():  # a sound alone has speech answer it
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
    for name, answer in answers.items():
        talker.start(name, spoken(answer), max_tokens=SPEECH[name], min_tokens=SPEECH[name], **GREEDY)
    talker.run()
    for name, answer in answers.items():
        count = SPEECH[name]
        talker.start(f"{name}, alone", spoken(answer), max_tokens=count, min_tokens=count, **GREEDY)
        talker.run()
        assert talker.tokens(name) == talker.tokens(f"{name}, alone") == answer.codes
    assert len({*answers["short"].codes}) > 5
    ends = talker.finished("long").output_tokens - SPEECH["long"]
    assert ends == 2  # of the three parts


@pytest.mark.parametrize("each", [1, 11])
def test_speech_begins_with_the_eleventh_token_of_the_text_and_is_the_same_whenever_the_others_come(
    driver: Any, tiny_minicpm_o: Path, answers, each: int
):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    answer, given, heard = answers["long"], 11, []

    def extend(step: int) -> None:
        nonlocal given
        heard.append((given, len(talker.tokens("r"))))
        if step % 5 == 0 and given < len(answer.rows):
            rows = answer.rows[given : given + each]
            given += len(rows)
            talker.engine.extend("r", to_host(rows), complete=False)

    talker.start("r", spoken(answer, given), max_tokens=SPEECH["long"], min_tokens=SPEECH["long"], **GREEDY)
    while given < len(answer.rows):
        talker.run(extend)
        extend(0)
    talker.run()
    assert talker.engine.waits_for_input("r"), "ten rows: they may be the last"
    talker.engine.extend("r", None, complete=True)
    talker.run()
    assert talker.tokens("r") == answer.codes
    assert any(rows < len(answer.rows) and codes for rows, codes in heard)


def test_a_random_draw_is_the_same_for_rows_that_come_late(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    answer, params = answers["long"], {"max_tokens": 60, "temperature": 0.9, "logit_bias": ENDING, "seed": 7}
    talker.start("at once", spoken(answer), **params)
    talker.start("late", spoken(answer, 11), **params)
    talker.run()
    assert talker.engine.waits_for_input("late")
    talker.engine.extend("late", to_host(answer.rows[11:]), complete=True)
    talker.run()
    assert talker.tokens("late") == talker.tokens("at once")
    assert talker.finished("late") == msgspec.structs.replace(talker.finished("at once"), request_id="late")


def test_a_speech_that_is_given_up_between_two_parts_leaves_nothing(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    talker.start("r", spoken(answers["long"], 11), max_tokens=70, **GREEDY)
    talker.run()
    talker.engine.extend("r", to_host(answers["long"].rows[11:21]), complete=False)
    talker.step()
    talker.engine.abort("r")
    talker.run(limit=3)


def test_speech_that_ends_leaves_the_end_out(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    talker.start("r", spoken(answers["short"]), max_tokens=8, logit_bias={60: 100.0})
    talker.run()
    assert talker.tokens("r") == []
    assert talker.finished("r").output_tokens == 1


def test_speech_ends_where_its_positions_do(driver: Any, tiny_minicpm_o: Path, answers):
    """As at `max_tokens`, also if the last part that fits has been spoken."""
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True, max_model_len=32)
    for name, bias in {"within a part": -100.0, "between two": 100.0}.items():
        talker.start(name, spoken(answers["long"]), max_tokens=500, **GREEDY | {"logit_bias": {60: bias}})
        talker.run()
        assert talker.finished(name).reason is FinishReason.LENGTH
        assert len(talker.tokens(name)) == (21 if bias < 0 else 0)


def test_a_part_that_does_not_end_is_followed_by_the_next(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    talker.start("r", spoken(answers["long"]), max_tokens=600, **GREEDY | {"logit_bias": {60: -100.0}})
    talker.run()
    first = 75 + 10 * 40
    assert len(talker.tokens("r")) == first + 512 - (11 + first + 11), "and what the positions leave for the second"


def test_a_start_with_fewer_rows_is_refused(driver: Any, tiny_minicpm_o: Path, answers):
    talker: Driver = driver(tiny_minicpm_o, "talker", asynchronous=True)
    with pytest.raises(InvalidPayload, match="more than 10 rows"):
        talker.start("r", spoken(answers["long"], 10))
