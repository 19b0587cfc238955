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
from omni_actors.engine.tensors import to_host
from omni_actors.errors import InvalidPayload, InvalidRequest, OmniError, PromptTooLong, UnknownVoice
from omni_actors.protocol.results import FinishReason
from omni_actors.stage.engine_interface import StageInputs
from tests.support.code2wav import sound_of
from tests.support.nightly import nightly
from tests.support.penalties import draw_parameters, recorded_sampling
from tests.support.qwen3_reference import Qwen3Reference, Qwen3Result
from tests.support.stage_driver import Driver, count_preemptions, kv_cache, make_engine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RANDOM = np.random.default_rng(0)
SPEECH = (RANDOM.standard_normal(20_011) * 0.1).astype(np.float32)
PICTURE = Image.fromarray(RANDOM.integers(0, 256, (96, 128, 3), dtype=np.uint8))
CLIP = RANDOM.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
CODES = 24  # that the talker samples; the last has no frame
VOICES = ("ethan", "chelsie", "aiden")

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
def spoken(qwen3_reference: Qwen3Reference) -> dict[str, Spoken]:
    return {name: Spoken(qwen3_reference, name, VOICES[index % 3]) for index, name in enumerate(CASES)}


@pytest.fixture(scope="module", params=[nightly(False), True], ids=["sync", "async"])
def engine(request, tiny_qwen3_checkpoint):
    engine = make_engine(tiny_qwen3_checkpoint, "talker", asynchronous=request.param)
    yield engine
    engine.shutdown()


@pytest.fixture
def talker(engine):
    """Every test finds the engine idle and leaves it idle."""
    driver = Driver(engine)
    yield driver
    driver.assert_idle()


def frames(driver: Driver, name: str) -> torch.Tensor:
    """All codes [F, 16] of a request, checked to come in whole frames, without gap or overlap."""
    codes: list[int] = []
    for event in driver.streams(name):
        assert event.start == len(codes)
        codes += event.token_ids
    assert [event.final for event in driver.streams(name)] == [False] * (len(driver.streams(name)) - 1) + [True]
    return torch.tensor(codes).reshape(-1, 16)


def start(driver: Driver, name: str, case: Spoken, reply: Sequence[int] | None = None, **params) -> None:
    params = {"max_tokens": CODES, "temperature": 0.0, **params}
    driver.start(name, case.inputs(reply), voice=case.voice, **params)


@pytest.mark.parametrize("name", CASES)
def test_all_codes_equal_transformers(talker: Driver, spoken: dict[str, Spoken], name: str) -> None:
    case = spoken[name]
    start(talker, "r", case)
    talker.run()
    assert case.answer.codes.shape == (CODES - 1, 16)
    assert len(case.answer.codes.unique()) > 30
    assert torch.equal(frames(talker, "r"), case.answer.codes)
    assert talker.finished("r").reason is FinishReason.LENGTH
    assert talker.finished("r").output_tokens == CODES


def test_requests_that_join_and_leave_with_text_at_random_times_equal_transformers(
    talker: Driver, spoken: dict[str, Spoken]
) -> None:
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
        assert torch.equal(frames(talker, f"r{number}"), spoken[name].answer.codes[: CODES - number % 3 - 1])


def check_penalties(driver: Driver, cases: list[Spoken]) -> None:
    """Twelve requests with drawn parameters."""
    generator = random.Random(5)
    tokens = range(driver.engine.core.worker.model_runner.model.config.vocab_size)
    drawn = {f"p{number}": draw_parameters(generator, tokens, length=16) for number in range(12)}
    with recorded_sampling(driver.engine) as sampled:
        for number, (name, params) in enumerate(drawn.items()):
            start(driver, name, cases[number % len(cases)], seed=number, **params)
        driver.run()
    for name, params in drawn.items():
        sampled.check(name, params, [], frames(driver, name)[:, 0].tolist())


def test_penalties_count_first_codes_and_nothing_of_the_prompt(talker: Driver, spoken: dict[str, Spoken]) -> None:
    check_penalties(talker, [*spoken.values()])


def test_an_end_token_has_no_frame(talker: Driver, spoken: dict[str, Spoken]) -> None:
    case = spoken["text"]
    first = case.answer.talker_tokens
    end = next(index for index in range(5, CODES) if first[index] not in first[:index])
    start(talker, "r", case, stop_token_ids=(first[end],))
    talker.run()
    assert torch.equal(frames(talker, "r"), case.answer.codes[:end])
    assert talker.finished("r").reason is FinishReason.STOP
    start(talker, "at once", case, stop_token_ids=(first[0],))
    talker.run()
    assert frames(talker, "at once").shape == (0, 16)


def test_frames_leave_as_they_are_made_first_one_by_one(talker: Driver, spoken: dict[str, Spoken]) -> None:
    start(talker, "r", spoken["text"])
    talker.run()
    sizes = [len(event.token_ids) // 16 for event in talker.streams("r")]
    assert sizes[:5] == [1, 1, 2, 4, 4]
    assert sum(sizes) == CODES - 1


def test_a_seed_repeats_itself_alone_and_in_a_batch(talker: Driver, spoken: dict[str, Spoken]) -> None:
    sampled = {"temperature": 0.9, "top_k": 50, "top_p": 1.0}
    case = spoken["audio"]
    start(talker, "alone", case, seed=7, **sampled)
    talker.run()
    for number, name in enumerate(CASES):
        start(talker, f"other{number}", spoken[name], seed=number, **(sampled if number % 2 else {}))
    start(talker, "together", case, seed=7, **sampled)
    start(talker, "another", case, seed=8, **sampled)
    talker.run()
    alone = frames(talker, "alone")
    assert torch.equal(frames(talker, "together"), alone)
    differing = (frames(talker, "another") != alone).float().mean(dim=0)
    assert differing.min() > 0.3, "every code hangs on the seed"
    assert torch.equal(frames(talker, "other0"), spoken["text"].answer.codes), "the greedy ones of the batch stay so"


def test_a_talker_that_does_not_stop_ends_where_its_text_allows(
    talker: Driver, spoken: dict[str, Spoken], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_preempted_requests_equal_transformers_and_repeat_their_seed_and_their_penalties(
    tiny_qwen3_checkpoint, spoken: dict[str, Spoken], engine
) -> None:
    sampled = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "seed": 3}
    unhurried = Driver(engine)
    start(unhurried, "sampled", spoken["text"], **sampled)
    unhurried.run()
    asynchronous = "Async" in type(engine.core.scheduler).__name__
    short = [name for name in CASES if name != "video"]
    small = make_engine(
        tiny_qwen3_checkpoint,
        "talker",
        asynchronous=asynchronous,
        **kv_cache(tiny_qwen3_checkpoint, "talker", blocks=12),  # not enough for all
        max_model_len=256,
        long_prefill_token_threshold=2,  # some prompts that are computed again end in a chunk of one position
    )
    try:
        preempted = count_preemptions(small)
        driver = Driver(small)
        for number in range(2):
            for name in short:
                start(driver, f"{name}{number}", spoken[name], spoken[name].reply[:2])
        start(driver, "sampled", spoken["text"], **sampled)
        driver.run()
        for number in range(2):
            for name in short:
                small.extend(f"{name}{number}", token_ids=spoken[name].reply[2:], complete=True)
        driver.run()
        assert preempted
        for number in range(2):
            for name in short:
                assert torch.equal(frames(driver, f"{name}{number}"), spoken[name].answer.codes)
        assert torch.equal(frames(driver, "sampled"), frames(unhurried, "sampled"))
        wanted = spoken["two turns"].answer.waveform
        sound = sound_of(tiny_qwen3_checkpoint, frames(driver, "two turns1").flatten().tolist(), {})
        assert wanted.abs().max() > 0.05, "a silent reference proves nothing"
        torch.testing.assert_close(sound, wanted, atol=1e-4, rtol=0)
        preempted.clear()
        check_penalties(driver, [spoken[name] for name in short])
        assert preempted
        driver.assert_idle()
    finally:
        small.shutdown()


def changed(case: Spoken, **changes) -> StageInputs:
    fields = {"token_ids": [*case.prompt, *case.reply], "tensors": case.tensors}
    scalars = {"prompt_tokens": changes.pop("prompt_tokens", len(case.prompt))}
    return StageInputs(**{**fields, "scalars": scalars, **changes})


def test_what_the_talker_cannot_take(talker: Driver, spoken: dict[str, Spoken]) -> None:
    case = spoken["two turns"]
    rows, positions = case.answer.media_rows, torch.zeros(3, len(case.prompt), dtype=torch.int64)
    long = [*spoken["text"].prompt * 30, *spoken["text"].reply[:1]]
    bad: list[tuple[type[OmniError], str, StageInputs]] = [
        (InvalidPayload, "prompt_tokens", changed(case, prompt_tokens=len(case.prompt) + len(case.reply))),
        (InvalidPayload, "prompt_tokens", changed(case, prompt_tokens=True)),
        (InvalidPayload, "vocabulary", changed(case, token_ids=[*case.prompt, 10**6])),
        (InvalidRequest, "no turn of the assistant", StageInputs([1, 2, 3, 4], scalars={"prompt_tokens": 3})),
        (InvalidPayload, "media_rows", changed(case, tensors={})),
        (InvalidPayload, "media_rows", changed(case, tensors={"media_rows": to_host(rows[1:])})),
        (InvalidPayload, "media_rows", changed(case, tensors={"media_rows": to_host(rows[:, 1:])})),
        (InvalidPayload, "mrope", changed(case, tensors={**case.tensors, "mrope_positions": to_host(positions[:2])})),
        (InvalidPayload, "mrope", changed(case, tensors={**case.tensors, "mrope_positions": to_host(positions - 1)})),
        (InvalidPayload, "with images or videos needs", changed(case, tensors={"media_rows": to_host(rows)})),
        (InvalidPayload, "named", changed(case, tensors={**case.tensors, "prompt_rows": to_host(rows)})),
        (PromptTooLong, "at most", changed(spoken["text"], token_ids=long, prompt_tokens=len(long) - 1)),
    ]
    for error, message, inputs in bad:
        with pytest.raises(error, match=message):
            talker.start("bad", inputs)
    with pytest.raises(UnknownVoice, match="ethan, aiden, chelsie"):
        talker.start("bad", case.inputs(), voice="nobody")
    start(talker, "r", case, case.reply[:2])
    with pytest.raises(InvalidPayload, match="no streamed rows"):
        talker.engine.extend("r", to_host(rows[:1]), complete=False)
    start(talker, "r", case, case.reply[:2])
    with pytest.raises(InvalidPayload, match="vocabulary"):
        talker.engine.extend("r", token_ids=[-1], complete=False)
    talker.run()
