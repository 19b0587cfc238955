"""The talker of Qwen3-Omni in a real vLLM engine core, against transformers: all codes of every frame."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from omni_actors.engine.models import SpeechLimit
from omni_actors.engine.models.qwen3_omni.talker import SPEC
from omni_actors.engine.rows import to_host
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong, UnknownVoice
from omni_actors.protocol.messages import FinishReason
from omni_actors.stage.engine_interface import StageInputs
from tests.support.code2wav import sound_of
from tests.support.qwen3_reference import Qwen3Reference, Qwen3Result
from tests.support.spoken_texts import frames_of
from tests.support.stage_driver import Driver

pytestmark = pytest.mark.e2e

RANDOM = np.random.default_rng(0)
SPEECH = (RANDOM.standard_normal(20_011) * 0.1).astype(np.float32)
PICTURE = Image.fromarray(RANDOM.integers(0, 256, (96, 128, 3), dtype=np.uint8))
CLIP = RANDOM.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
CODES = 16  # that the talker samples; the last has no frame
VOICES = ("ethan", "chelsie", "aiden")
SHORT = ("text", "audio", "two turns")
# Some prompts that are computed again end in a chunk of one position.
TIGHT = {"blocks": 12, "long_prefill_token_threshold": 2}

SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
EARLIER = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A picture of noise."}]},
]
CASES = {
    "text": ([], {}),
    "audio": ([], {"audios": [SPEECH]}),
    "video": ([SYSTEM], {"videos": [CLIP]}),
    "two turns": ([SYSTEM, *EARLIER], {"images": [PICTURE], "audios": [SPEECH]}),
}


class Spoken:
    """A prompt and its reply as the talker gets them, and what transformers' talker says."""

    def __init__(self, reference: Qwen3Reference, name: str, voice: str) -> None:
        earlier, media = CASES[name]
        kinds = [kind.removesuffix("s") for kind in media if kind != "images"]
        parts = [*({"type": kind} for kind in kinds), {"type": "text", "text": f"Say something about {name}."}]
        inputs = reference.inputs([*earlier, {"role": "user", "content": parts}], **media)
        self.voice = voice
        self.answer: Qwen3Result = reference.generate(
            inputs, voice=voice, thinker_max_tokens=12, thinker_eos=[], talker_max_tokens=CODES, talker_eos=[]
        )
        self.prompt = self.answer.prompt_token_ids
        self.reply = self.answer.thinker_tokens[:-1]
        self.tensors = {}
        if len(self.answer.media_rows):
            self.tensors = {
                "media_rows": to_host(self.answer.media_rows),
                "mrope_positions": to_host(reference.positions(inputs)),
            }

    def inputs(self, reply: Sequence[int] | None = None) -> StageInputs:
        known = self.reply if reply is None else reply
        return StageInputs(
            [*self.prompt, *known], self.tensors, {"prompt_tokens": len(self.prompt)}, complete=reply is None
        )


@pytest.fixture(scope="module")
def spoken(qwen3_reference):
    return {name: Spoken(qwen3_reference, name, VOICES[index % 3]) for index, name in enumerate(CASES)}


@pytest.fixture
def talker(driver, tiny_qwen3_checkpoint, asynchronous):
    return driver(tiny_qwen3_checkpoint, "talker", asynchronous=asynchronous)


def start(driver: Driver, name: str, case: Spoken, reply: Sequence[int] | None = None, **params) -> None:
    params = {"max_tokens": CODES, "temperature": 0.0, **params}
    driver.start(name, case.inputs(reply), voice=case.voice, **params)


@pytest.mark.parametrize("name", CASES)
def test_all_codes_equal_transformers(talker, spoken, name):
    case = spoken[name]
    start(talker, "r", case)
    talker.run()
    assert case.answer.codes.shape == (CODES - 1, 16)
    assert len(case.answer.codes.unique()) > 30
    assert torch.equal(frames_of(talker, "r"), case.answer.codes)
    sizes = [len(event.token_ids) // 16 for event in talker.streams("r")]
    assert sizes[:5] == [1, 1, 2, 4, 4], "frames leave as they are made, first one by one"
    assert talker.finished("r").reason is FinishReason.LENGTH
    assert talker.finished("r").output_tokens == CODES


def test_requests_that_join_and_leave_with_text_at_random_times_equal_transformers(talker, spoken):
    generator = random.Random(1)
    names = [*CASES] * 2
    waiting = list(enumerate(names))
    missing: dict[str, list[int]] = {}

    def feed(step: int = 0) -> None:
        if waiting and step % 3 == 0:
            number, name = waiting.pop(0)
            known = None if number % 3 == 2 else spoken[name].reply[: 1 + number % 4]
            start(talker, f"r{number}", spoken[name], known, max_tokens=CODES - number % 3)
            if known is not None:
                missing[f"r{number}"] = list(spoken[name].reply[len(known) :])
        for request_id, text in list(missing.items()):
            if generator.random() < 0.6:
                count = min(generator.randrange(3), len(text))
                news, text[:count] = text[:count], []
                talker.engine.extend(request_id, token_ids=news, complete=not text)
                if not text:
                    del missing[request_id]

    while waiting or missing:
        feed()
        talker.run(feed)
    talker.run()
    for number, name in enumerate(names):
        assert torch.equal(frames_of(talker, f"r{number}"), spoken[name].answer.codes[: CODES - number % 3 - 1])


def test_an_end_at_once_has_no_frame(talker, spoken):
    start(talker, "r", spoken["text"], stop_token_ids=(int(spoken["text"].answer.codes[0, 0]),))
    talker.run()
    assert frames_of(talker, "r").shape == (0, 16)
    assert talker.finished("r").reason is FinishReason.STOP


def test_a_seed_repeats_itself_alone_and_in_a_batch(talker, spoken):
    sampled = {"temperature": 0.9, "top_k": 50, "top_p": 1.0}
    case = spoken["audio"]
    start(talker, "alone", case, seed=7, **sampled)
    talker.run()
    for number, name in enumerate(CASES):
        start(talker, f"other{number}", spoken[name], seed=number, **(sampled if number % 2 else {}))
    start(talker, "together", case, seed=7, **sampled)
    start(talker, "another", case, seed=8, **sampled)
    talker.run()
    alone = frames_of(talker, "alone")
    assert torch.equal(frames_of(talker, "together"), alone)
    differing = (frames_of(talker, "another") != alone).float().mean(dim=0)
    assert differing.min() > 0.3, "every code hangs on the seed"
    assert torch.equal(frames_of(talker, "other0"), spoken["text"].answer.codes), "the greedy ones of the batch stay so"


@pytest.mark.nightly
def test_a_talker_that_does_not_stop_ends_where_its_text_allows(talker, spoken, monkeypatch):
    case, scheduler = spoken["text"], talker.engine.core.scheduler
    assert scheduler.speech_limit == SPEC.speech_limit
    monkeypatch.setattr(scheduler, "speech_limit", SpeechLimit(10, 5))
    unending = {"logit_bias": {talker.engine.core.worker.model_runner.model.config.codec_end: -100.0}}
    start(talker, "late", case, case.reply[:1], max_tokens=400, **unending)
    talker.run()
    talker.engine.extend("late", token_ids=case.reply[1:3], complete=True)
    start(talker, "asked for more", case, case.reply[:1], max_tokens=40, min_tokens=40)
    talker.engine.extend("asked for more", complete=True)
    talker.run()
    for name, count in {"late": 10 + 3 * 5, "asked for more": 40}.items():
        assert talker.finished(name).reason is FinishReason.LENGTH
        assert talker.finished(name).output_tokens == count


@pytest.mark.nightly
def test_preempted_requests_equal_transformers_and_repeat_their_seed(talker, tight, tiny_qwen3_checkpoint, spoken):
    sampled = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "seed": 3}
    start(talker, "sampled", spoken["text"], **sampled)
    talker.run()
    small = tight("talker", tiny_qwen3_checkpoint, **TIGHT | {"blocks": 9})
    cases = {name: spoken[name] for name in SHORT}
    for name, case in cases.items():
        start(small, name, case, case.reply[:2])
    start(small, "sampled", spoken["text"], **sampled)
    small.run()
    for name, case in cases.items():
        small.engine.extend(name, token_ids=case.reply[2:], complete=True)
    small.run()
    assert small.preempted
    for name, case in cases.items():
        assert torch.equal(frames_of(small, name), case.answer.codes)
    assert torch.equal(frames_of(small, "sampled"), frames_of(talker, "sampled"))
    wanted = spoken["two turns"].answer.waveform
    sound = sound_of(tiny_qwen3_checkpoint, frames_of(small, "two turns").flatten().tolist(), {})
    assert wanted.abs().max() > 0.05, "a silent reference proves nothing"
    torch.testing.assert_close(sound, wanted, atol=1e-4, rtol=0)


def test_what_the_talker_cannot_take(talker, spoken):
    case = spoken["two turns"]
    prompt, reply, rows = case.prompt, case.reply, case.answer.media_rows
    positions = torch.zeros(3, len(prompt), dtype=torch.int64)
    long = [*spoken["text"].prompt * 30, *spoken["text"].reply[:1]]
    bad = [
        (InvalidPayload, "prompt_tokens", {"prompt_tokens": len(prompt) + len(reply)}),
        (InvalidPayload, "prompt_tokens", {"prompt_tokens": True}),
        (InvalidPayload, "vocabulary", {"token_ids": [*prompt, 10**6]}),
        (InvalidRequest, "no turn of the assistant", {"token_ids": [1, 2, 3, 4], "tensors": {}, "prompt_tokens": 3}),
        (InvalidPayload, "media_rows", {"tensors": {}}),
        (InvalidPayload, "media_rows", {"tensors": {"media_rows": to_host(rows[1:])}}),
        (InvalidPayload, "media_rows", {"tensors": {"media_rows": to_host(rows[:, 1:])}}),
        (InvalidPayload, "mrope", {"tensors": {**case.tensors, "mrope_positions": to_host(positions[:2])}}),
        (InvalidPayload, "mrope", {"tensors": {**case.tensors, "mrope_positions": to_host(positions - 1)}}),
        (InvalidPayload, "with images or videos needs", {"tensors": {"media_rows": to_host(rows)}}),
        (InvalidPayload, "named", {"tensors": {**case.tensors, "prompt_rows": to_host(rows)}}),
        (PromptTooLong, "at most", {"token_ids": long, "tensors": {}, "prompt_tokens": len(long) - 1}),
    ]
    for error, message, changes in bad:
        fields = {"token_ids": [*prompt, *reply], "tensors": case.tensors, "prompt_tokens": len(prompt), **changes}
        scalars = {"prompt_tokens": fields.pop("prompt_tokens")}
        with pytest.raises(error, match=message):
            talker.start("bad", StageInputs(**fields, scalars=scalars))
    with pytest.raises(UnknownVoice, match="ethan, aiden, chelsie"):
        talker.start("bad", case.inputs(), voice="nobody")
    for given, message in (({"rows": to_host(rows[:1])}, "no streamed rows"), ({"token_ids": [-1]}, "vocabulary")):
        start(talker, "r", case, reply[:2])
        with pytest.raises(InvalidPayload, match=message):
            talker.engine.extend("r", **given, complete=False)
    talker.run()
