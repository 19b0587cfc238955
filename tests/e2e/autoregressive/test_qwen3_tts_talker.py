"""The talker of Qwen3-TTS in a real vLLM engine core, against Qwen's package: all codes of every frame."""

from __future__ import annotations

import functools
import itertools
import random
import re
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from omni_actors.engine.models import SpeechLimit
from omni_actors.engine.models.qwen3_tts.clip_encoder import ClipEncoder, Encoded
from omni_actors.engine.models.qwen3_tts.talker import SPEC
from omni_actors.errors import InvalidRequest, PromptTooLong, UnknownVoice
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import FinishedEvent, StageInputs, StageRequest
from omni_actors.stage.processors import ExtendText, Start, Text2Speech
from tests.support.code2wav import sound_of
from tests.support.nightly import nightly
from tests.support.penalties import draw_parameters, recorded_sampling
from tests.support.qwen3_tts_reference import Qwen3TtsReference, TtsResult
from tests.support.spoken_texts import RATE, clip_information, frames_of, speak, text_inputs
from tests.support.stage_driver import Driver

pytestmark = pytest.mark.e2e

FRAMES = 14
TEXTS = ("The tide is full.", "\n\nHello there: you are the one, they have it. \n And this is to be at one with it.")
CLIP = (0.1 * np.random.default_rng(0).standard_normal(30_001)).astype(np.float32)  # 16 frames
LONG_CLIP = (0.1 * np.random.default_rng(1).standard_normal(70_001)).astype(np.float32)  # 37 frames
LONG_TRANSCRIPT = "They have one of the " * 6


@dataclass(frozen=True)
class Case:
    """How a text is spoken, for us and for the reference."""

    asked: dict[str, Any]
    voice: str | None = None
    information: dict[str, Any] = field(default_factory=dict)


CASES = {
    "custom_voice": {
        "language": Case({"speaker": "vivian", "language": "english"}, "vivian", {"language": "English"}),
        "dialect": Case({"speaker": "eric"}, "eric"),
        "instructions": Case({"speaker": "ryan", "instruct": "Softly."}, "ryan", {"instructions": "Softly."}),
    },
    "voice_design": {
        "described": Case({"instruct": "A low voice."}, None, {"instructions": "A low voice.", "language": "auto"}),
        "language": Case(
            {"instruct": "A child.", "language": "french"}, None, {"instructions": "A child.", "language": "french"}
        ),
    },
    "base": {
        "voice": Case({"ref_audio": (CLIP, RATE), "x_vector_only_mode": True}, None, clip_information(CLIP)),
        "continued": Case(
            {"ref_audio": (CLIP, RATE), "ref_text": "One."}, None, clip_information(CLIP, transcript="One.")
        ),
        "continued, more text than frames": Case(
            {"ref_audio": (CLIP, RATE), "ref_text": LONG_TRANSCRIPT, "language": "korean"},
            None,
            {**clip_information(CLIP, transcript=LONG_TRANSCRIPT), "language": "korean"},
        ),
        "continued, more frames than text": Case(
            {"ref_audio": (LONG_CLIP, RATE), "ref_text": "One."}, None, clip_information(LONG_CLIP, transcript="One.")
        ),
    },
}


class Kind:
    """A checkpoint's talker, and what the reference says with it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.cases = name, folder, CASES[name]
        self.reference = Qwen3TtsReference(folder)

    @functools.cache  # noqa: B019 - as long as the fixture lives
    def answer(self, case: str, text: int) -> TtsResult:
        return self.reference.speak(TEXTS[text], frames=FRAMES, **self.cases[case].asked)


@pytest.fixture(scope="module", params=["custom_voice", *map(nightly, ("voice_design", "base"))])
def kind(request, tiny_qwen3_tts_kinds):
    return Kind(request.param, tiny_qwen3_tts_kinds[request.param])


@pytest.fixture
def talker(driver, kind):
    return driver(kind.folder, "talker", asynchronous=kind.name != "custom_voice")


def start(kind: Kind, talker: Driver, name: str, case: str, text: int, **params: Any) -> None:
    chosen = kind.cases[case]
    given = {"max_tokens": FRAMES + 1, "temperature": 0.0, **params}
    speak(talker, name, TEXTS[text], voice=chosen.voice, information=chosen.information, **given)


def test_requests_that_join_and_leave_get_the_codes_of_the_reference(kind, talker):
    """The first is alone, each other one joins while the ones before it run; they end at different times."""
    wanted = [(case, number % len(TEXTS)) for number, case in enumerate(kind.cases)] + [(next(iter(kind.cases)), 1)]
    waiting = list(enumerate(wanted))

    def join(step: int) -> None:
        if waiting and (step % 3 == 2 or not talker.engine.runnable()):
            number, (case, text) = waiting.pop(0)
            start(kind, talker, f"r{number}", case, text, max_tokens=FRAMES + 1 - number % 3)

    while waiting:
        join(2)
        talker.run(join)
    for number, (case, text) in enumerate(wanted):
        answer = kind.answer(case, text).codes
        assert answer.shape == (FRAMES, 16)
        assert len(answer.unique()) > 60
        assert frames_of(talker, f"r{number}").equal(answer[: FRAMES - number % 3]), (case, text)
        assert talker.finished(f"r{number}").reason is FinishReason.LENGTH


IN_PARTS = {"custom_voice": ("language", "instructions"), "voice_design": ("described",), "base": ("voice",)}
WRITTEN = "Hello there: you're the one, they have 35 of it.  \n And caf\u00e9, 你好，世界。"


def part(talker: Driver, name: str, parts: Text2Speech, given: tuple[str, int, bool], **start: Any) -> None:
    """Give a request more of its text, as a stage does."""
    for action in parts.add(*given):
        match action:
            case Start(inputs=inputs):
                talker.engine.start(StageRequest(name, **start), inputs)
            case ExtendText(text=text, complete=complete):
                talker.engine.extend_text(name, text, complete=complete)


def test_a_text_that_comes_in_parts_is_spoken_as_the_reference_speaks_it_whenever_they_come(kind, talker):
    """The reference has all of the text, and reads it while it speaks. The end comes last of all."""
    generator = random.Random(3)
    given: list[tuple[str, Text2Speech, dict[str, Any], list[tuple[str, int, bool]]]] = []
    for case in IN_PARTS[kind.name]:
        chosen = kind.cases[case]
        params = StageParams(max_tokens=FRAMES + 1, temperature=0.0)
        start = {"params": params, "seed": 0, "voice": chosen.voice, "information": chosen.information}
        cuts = sorted(generator.sample(range(len(WRITTEN)), 12))
        parts = [(WRITTEN[a:b], a, False) for a, b in itertools.pairwise([0, *cuts, len(WRITTEN)])]
        given.append((case, Text2Speech(0, ("",)), start, [*parts, ("", len(WRITTEN), True)]))
    while any(parts for *_, parts in given):
        case, processor, start, parts = generator.choice([one for one in given if one[3]])
        part(talker, case, processor, parts.pop(0), **start)
        for _ in range(generator.randrange(6)):
            if talker.engine.runnable():
                talker.step()
    talker.run()
    for case, *_ in given:
        asked = {**kind.cases[case].asked, "non_streaming_mode": False}
        answer = kind.reference.speak(WRITTEN, frames=FRAMES, **asked).codes
        assert frames_of(talker, case).equal(answer), case


@pytest.mark.nightly
def test_a_talker_that_does_not_stop_ends_where_its_text_allows(kind, talker, monkeypatch):
    """In all kinds of prompts, with one text of a few tokens."""
    scheduler = talker.engine.core.scheduler
    assert scheduler.speech_limit == SPEC.speech_limit
    monkeypatch.setattr(scheduler, "speech_limit", SpeechLimit(10, 2))
    tokenizer = AutoTokenizer.from_pretrained(talker.engine.adapter.model_config.model)
    count = 10 + 2 * len(tokenizer("Hi.")["input_ids"])
    end = talker.engine.core.worker.model_runner.model.config.codec_end
    for name, case in kind.cases.items():
        unending = {"temperature": 0.0, "max_tokens": 400, "logit_bias": {end: -100.0}}
        speak(talker, name, "Hi.", voice=case.voice, information=case.information, **unending)
    talker.run()
    for name in kind.cases:
        assert talker.finished(name).reason is FinishReason.LENGTH
        assert talker.finished(name).output_tokens == count, name


def check_penalties(kind, talker, cases, length):
    """Six requests with drawn parameters: first codes count, and nothing of the prompt."""
    generator = random.Random(6)
    tokens = range(talker.engine.core.worker.model_runner.model.config.vocab_size)
    drawn = {f"p{number}": draw_parameters(generator, tokens, length) for number in range(6)}
    with recorded_sampling(talker.engine) as sampled:
        for number, (name, params) in enumerate(drawn.items()):
            start(kind, talker, name, cases[number % len(cases)], number % len(TEXTS), seed=number, **params)
        talker.run()
    for name, params in drawn.items():
        sampled.check(name, params, [], frames_of(talker, name)[:, 0].tolist())


REFUSALS = {
    "custom_voice": [
        ({"voice": "nobody"}, UnknownVoice, "voice", "vivian, ryan, eric"),
        ({"language": "klingon"}, InvalidRequest, "language", "english"),
        ({"language": 7}, InvalidRequest, "language", "text"),
        ({"instructions": " "}, InvalidRequest, "instructions", "empty"),
        (clip_information(CLIP), InvalidRequest, "clip", "Base"),
        ({"text": " \n"}, InvalidRequest, "input", "empty"),
        ({"text": "one " * 600}, PromptTooLong, None, "512"),
        ({"text": "one " * 6000}, PromptTooLong, "input", "512"),
    ],
    "voice_design": [
        ({}, InvalidRequest, "instructions", "description of the voice"),
        ({"instructions": "A child.", "voice": "vivian"}, UnknownVoice, "voice", "none"),
    ],
    "base": [
        ({}, InvalidRequest, "clip", "none was sent"),
        ({"voice": "vivian", **clip_information(CLIP)}, UnknownVoice, "voice", "clip"),
        ({"instructions": "A child.", **clip_information(CLIP)}, InvalidRequest, "instructions", "none"),
        (clip_information(CLIP[:11_000]), InvalidRequest, "clip", "0.5 s"),
        (clip_information(np.tile(CLIP, 25)), InvalidRequest, "clip", "30 s"),
        (clip_information(CLIP * 100), InvalidRequest, "clip", "-1..1"),
        (clip_information(CLIP * np.float32("nan")), InvalidRequest, "clip", "finite"),
        (clip_information(CLIP * 0), InvalidRequest, "clip", "silent"),
        (clip_information(CLIP[None]), InvalidRequest, "clip", "f32"),
        (clip_information(CLIP, rate=0), InvalidRequest, "clip_rate", "8000"),
    ],
}


def test_what_a_checkpoint_cannot_speak_is_refused_by_the_name_of_the_field(kind, talker):
    for given, error, name, words in REFUSALS[kind.name]:
        information = {key: value for key, value in given.items() if key not in ("text", "voice")}
        with pytest.raises(error, match=re.escape(words)) as caught:
            speak(talker, "r", given.get("text", "Hello."), voice=given.get("voice"), information=information)
        assert caught.value.field == name
        assert caught.value.hint


ONE_KIND = pytest.mark.parametrize("kind", ["custom_voice"], indirect=True)


@ONE_KIND
def test_an_end_has_no_frame_none_comes_before_two_codes_and_the_checkpoint_says_how_long(kind, talker):
    first = kind.answer("dialect", 0).codes[:, 0].tolist()
    assert first[6] not in first[:6]
    start(kind, talker, "ended", "dialect", 0, stop_token_ids=[first[6]])
    start(kind, talker, "early", "dialect", 0, stop_token_ids=[first[0]], max_tokens=4)
    speak(talker, "long", TEXTS[0], voice=kind.cases["dialect"].voice, information={}, temperature=0.0)
    talker.run()
    assert frames_of(talker, "ended").equal(kind.answer("dialect", 0).codes[:6])
    assert talker.finished("ended").reason is FinishReason.STOP
    assert frames_of(talker, "early")[0, 0] != first[0]
    assert talker.finished("long").output_tokens == 64, "max_new_tokens of generation_config.json"


@pytest.mark.nightly
@ONE_KIND
def test_preempted_requests_go_on_with_the_same_codes_and_penalties(kind, tight):
    small = tight("talker", kind.folder, blocks=10)
    for number in range(6):
        start(kind, small, f"r{number}", "language", number % 2)
    small.run()
    for number in range(6):
        assert frames_of(small, f"r{number}").equal(kind.answer("language", number % 2).codes)
    assert small.preempted
    small.preempted.clear()
    check_penalties(kind, small, ["language"], length=FRAMES + 1)
    assert small.preempted


@ONE_KIND
def test_messages_tokens_and_media_are_no_text_to_speak(talker):
    prompt = text_inputs("Hello.").prompt
    for wrong in (type(prompt)(messages=prompt.messages * 2), type(prompt)(token_ids=b"\x01\x00\x00\x00")):
        with pytest.raises(InvalidRequest, match="one message"):
            talker.start("r", StageInputs(prompt=wrong))


@pytest.mark.parametrize("kind", ["base"], indirect=True)
def test_others_go_on_while_a_clip_is_encoded_and_a_failure_is_that_requests_own(kind, talker, monkeypatch):
    encode, may_go_on = ClipEncoder.__call__, threading.Event()

    def slowly(encoder: ClipEncoder, samples: np.ndarray, rate: int) -> Encoded:
        if not may_go_on.wait(60):
            raise TimeoutError
        if len(samples) < len(CLIP):
            raise MemoryError("no room for a clip")
        return encode(encoder, samples, rate)

    start(kind, talker, "first", "continued", 0)
    talker.step()
    monkeypatch.setattr(ClipEncoder, "__call__", slowly)
    start(kind, talker, "second", "voice", 0)
    start(kind, talker, "dropped", "voice", 1)
    speak(talker, "broken", TEXTS[0], information=clip_information(CLIP[:-1]))
    while not any(isinstance(event, FinishedEvent) for event in talker.events["first"]):
        talker.step()
    assert talker.engine.busy()
    talker.engine.abort("dropped")
    may_go_on.set()
    talker.run()
    assert frames_of(talker, "first").equal(kind.answer("continued", 0).codes)
    assert frames_of(talker, "second").equal(kind.answer("voice", 0).codes)
    assert not talker.events["dropped"]
    assert "no room for a clip" in str(talker.error("broken"))


def test_without_weights_dummy_ones_speak_with_a_voice_of_a_clip(driver, tiny_qwen3_tts_kinds, tmp_path):
    """All parts: the clip's encoders, talker and codec."""
    folder = shutil.copytree(tiny_qwen3_tts_kinds["base"], tmp_path / "dummy")
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    talker = driver(folder, "talker", load_format="dummy")
    speak(talker, "r", TEXTS[0], information=clip_information(CLIP, transcript="One."), max_tokens=5)
    talker.run()
    assert frames_of(talker, "r").shape == (4, 16)
    sound = sound_of(folder, talker.tokens("r"), talker.streams("r")[0].scalars, load_format="dummy")
    assert len(sound) == 4 * 1920
    assert sound.isfinite().all()
    assert sound.abs().max() > 0
