"""Qwen3-ASR in a real vLLM engine core, behind its prompt stage, against transformers: what it writes of recordings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from omni_actors.errors import InvalidPayload, InvalidRequest, OmniError
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StructuredOutputs
from omni_actors.stage.engine_interface import StageInputs, TextEvent
from tests.support import drawn_sizes
from tests.support.drawn_sizes import DRAWS
from tests.support.qwen3_asr_reference import Qwen3AsrReference
from tests.support.recordings import RANDOM, RecordingPrompts, noise, recording_prompt
from tests.support.stage_driver import Driver, encode_media_prompt, make_engine
from tools.checkpoints import asr

pytestmark = pytest.mark.e2e

REPLY, SIZES = 20, {"max_model_len": 1024, "max_num_batched_tokens": 64}


# A recording, what it may be about, its language as it is asked for and as the model names it. One has several windows
# of the encoder and a prompt of several chunks, others no whole number of frames.
CASES: dict[str, tuple[np.ndarray, str, str | None, str | None]] = {
    "short": (noise(0.5), "", None, None),
    "odd": (noise(1.2507), "", "en", "English"),
    "long": (noise(8.513), "Dr Zhivago and the sea", None, None),
    "longer than the encoder holds": (noise(31), "", None, None),
    "named": (noise(2.0), "the tide", "gERMAN", "German"),
}


@pytest.fixture(scope="module")
def prompts(tiny_qwen3_asr: Path) -> Iterator[RecordingPrompts]:
    made = RecordingPrompts(tiny_qwen3_asr, SIZES)
    yield made
    made.engine.shutdown()


@pytest.fixture
def thinker(driver: Any, tiny_qwen3_asr: Path) -> Driver:
    made: Driver = driver(tiny_qwen3_asr, "thinker", asynchronous=True, **SIZES)
    return made


def check(driver: Driver, prompts: RecordingPrompts, reference: Qwen3AsrReference) -> None:
    """Each case, as others join and leave and then alone, has the prompt and the answer of transformers."""
    made = {name: prompts.of(sound, about, language) for name, (sound, about, language, _) in CASES.items()}
    names = list(CASES)

    def join(_step: int) -> None:
        if names:
            name = names.pop(0)
            driver.start(name, made[name], max_tokens=REPLY)

    join(0)
    driver.run(join)
    for name, (sound, about, _, named) in CASES.items():
        token_ids, reply = reference.write(sound, reference.prompt(about, named), REPLY)
        assert list(made[name].token_ids) == token_ids, name
        assert driver.written(name) == reply, name
        driver.start(f"{name}, alone", made[name], max_tokens=REPLY)
        driver.run()
        assert driver.written(f"{name}, alone") == reply, name


def test_recordings_in_one_batch_and_alone_equal_transformers(
    thinker: Driver, prompts: RecordingPrompts, tiny_qwen3_asr: Path
) -> None:
    check(thinker, prompts, Qwen3AsrReference(tiny_qwen3_asr))


def test_recordings_that_come_while_others_are_written_down_are_begun_together(
    driver: Any, prompts: RecordingPrompts, tiny_qwen3_asr: Path
) -> None:
    """Each would cost the others a long step; the first waits for nobody."""
    options = {**SIZES, "max_num_batched_tokens": 256, "prefill_schedule_interval": 6}
    thinker = driver(tiny_qwen3_asr, "thinker", asynchronous=True, **options)
    begun: dict[str, int] = {}
    sound, about, language, named = CASES["odd"]
    made = prompts.of(sound, about, language)

    def join(step: int) -> None:
        for name in thinker.events:
            begun.setdefault(name, step)
        if step in (3, 5, 6):
            thinker.start(f"{step}", made, max_tokens=REPLY)

    thinker.start("first", made, max_tokens=REPLY)
    thinker.run(join)
    assert begun["first"] <= 1
    assert begun["3"] == begun["5"], "both came before the sixth step after that of the first"
    assert begun["6"] - begun["5"] == 6
    reference = Qwen3AsrReference(tiny_qwen3_asr)
    _, reply = reference.write(sound, reference.prompt(about, named), REPLY)
    for name in begun:
        assert thinker.written(name) == reply


@DRAWS
def test_drawn_models_equal_transformers(draw: str, tmp_path: Path) -> None:
    generator = Random(f"qwen3-asr {draw}")
    sizes, seed = drawn_sizes.qwen3_asr_sizes(generator), generator.randrange(1 << 31)
    print(f"seed {seed}, {sizes}")
    asr.write_tiny(tmp_path, seed, sizes=sizes)
    prompts = RecordingPrompts(tmp_path, SIZES)
    driver = Driver(make_engine(tmp_path, "thinker", **SIZES))
    try:
        check(driver, prompts, Qwen3AsrReference(tmp_path))
    finally:
        prompts.engine.shutdown()
        driver.engine.shutdown()


@pytest.mark.parametrize(
    ("form", "language", "start"),
    [
        ("language English<asr_text>[a-z ]{4,9}", "English", ""),
        ("language None<asr_text>[a-z ]{4,9}", "", ""),
        ("language [a-z]{5,9}\\.", "", "language "),  # no mark follows
        ("languid [a-z]{5,9}", "", "languid "),
        ("language [a-z]{70,80}<asr_text>", "", "language "),
    ],
)
def test_the_language_of_an_answer_is_told_apart_from_its_text(
    thinker: Driver, prompts: RecordingPrompts, form: str, language: str, start: str
) -> None:
    inputs = prompts.of(CASES["odd"][0])
    thinker.start("a", inputs, max_tokens=100, structured_outputs=StructuredOutputs(regex=form))
    thinker.run()
    text = thinker.text("a")
    assert text.startswith(start)
    assert len(text) > 3
    assert ("<asr_text>" in text) == form.endswith("<asr_text>")
    assert thinker.finished("a").language == language
    deltas = [event.text for event in thinker.events["a"] if isinstance(event, TextEvent)]
    assert len([delta for delta in deltas if delta]) > 1 or form.endswith("\\."), "it comes as it is written"


@pytest.mark.parametrize("begun", ["", "The tide"])
def test_what_follows_a_language_that_was_asked_for_is_text_as_it_stands(
    thinker: Driver, prompts: RecordingPrompts, begun: str
) -> None:
    said = [ChatMessage("assistant", (ContentPart(text=begun),))] if begun else []
    inputs = prompts.made(recording_prompt(SOUND, "", *said), [SOUND], language="en")
    form = "language None<asr_text>[a-z ]{4,9}"
    thinker.start("a", inputs, max_tokens=100, structured_outputs=StructuredOutputs(regex=form))
    thinker.run()
    assert thinker.text("a").startswith("language None<asr_text>")


@pytest.mark.parametrize(("name", "about", "language"), [("odd", "the sea", "en"), ("long", "", None)])
def test_a_text_that_was_begun_goes_on_as_in_transformers(
    thinker: Driver, prompts: RecordingPrompts, tiny_qwen3_asr: Path, name: str, about: str, language: str | None
) -> None:
    reference, sound = Qwen3AsrReference(tiny_qwen3_asr), CASES[name][0]
    head = f"{reference.prompt(about)}language {'English' if language else 'None'}<asr_text>"
    for begun in ("The", "The tide is full. language", ""):
        token_ids, reply = reference.write(sound, head + begun, REPLY)
        said = ChatMessage("assistant", (ContentPart(text=begun),))
        inputs = prompts.made(
            recording_prompt(sound, about, said), [sound], **({"language": language} if language else {})
        )
        assert list(inputs.token_ids) == token_ids
        thinker.start(begun, inputs, max_tokens=REPLY)
        thinker.run()
        assert thinker.written(begun) == reply
        assert thinker.text(begun) == reference.processor.tokenizer.decode(reply, skip_special_tokens=True)


def test_the_stage_says_what_it_hears(prompts: RecordingPrompts) -> None:
    facts = prompts.engine.facts
    assert facts.hearing.languages == ("Chinese", "English", "German", "Japanese")
    assert facts.hearing.max_seconds == SIZES["max_model_len"] / 20, "and the text fits, too"
    assert facts.max_media == {"audio": 1, "image": 0, "video": 0}


SOUND = CASES["odd"][0]
USER = ChatMessage("user", (ContentPart(text="What is this?"),))
ANSWER = ChatMessage("assistant", USER.content)
UNHEARD = Prompt(messages=(ChatMessage("system", (ContentPart(text="the sea"),)),))


@pytest.mark.parametrize(
    ("prompt", "sounds", "information", "field", "words"),
    [
        (recording_prompt(SOUND, "", USER), [SOUND], {}, "messages", "reads nothing besides"),
        (recording_prompt(SOUND, "", ANSWER, ANSWER), [SOUND], {}, "messages", "reads nothing besides"),
        (UNHEARD, [], {}, "prompt", "no recording"),
        (recording_prompt(SOUND), [SOUND], {"language": "Englsh"}, "language", "Did you mean 'English'"),
        (recording_prompt(SOUND), [SOUND], {"language": "fr"}, "language", "must be one of Chinese"),
        (recording_prompt(noise(52)), [noise(52)], {}, None, "at most 51.2 s"),
    ],
)
def test_what_it_cannot_write_down_is_refused(
    prompts: RecordingPrompts,
    prompt: Prompt,
    sounds: list[np.ndarray],
    information: dict[str, str],
    field: str,
    words: str,
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        prompts.made(prompt, sounds, **information)
    assert refused.value.field == field
    assert prompts.engine.counts() == {"requests": 0}


def test_a_recording_has_no_more_windows_than_a_message(tiny_qwen3_asr: Path) -> None:
    """They are of 2 s here, and of 8 s in the published models."""
    prompts = RecordingPrompts(tiny_qwen3_asr, {**SIZES, "max_model_len": 32_768})
    hearing = prompts.engine.facts.hearing
    prompts.engine.shutdown()
    assert hearing.max_seconds == 508


def test_features_of_a_picture_are_refused_before_they_reach_the_model(
    thinker: Driver, tiny_qwen3_checkpoint: Path
) -> None:
    picture = RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    inputs = encode_media_prompt(tiny_qwen3_checkpoint, seen, {"image": picture})
    with pytest.raises(OmniError) as refused:
        thinker.start("picture", inputs)
    assert isinstance(refused.value, InvalidPayload)
    with pytest.raises(InvalidRequest, match="empty"):
        thinker.start("nothing", StageInputs())
