"""The prompt stage compared with transformers' processor, what it refuses, which request it takes next, its log."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest
import soundfile
import soxr
import torch
from PIL import Image
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig, build_engine
from omni_actors.engine.encoded_requests import RequestReader, merged_patches
from omni_actors.engine.models.qwen2_5_omni.thinker import MIN_AUDIO_SAMPLES
from omni_actors.engine.prompt import PromptEngine
from omni_actors.engine.prompt_processors import seconds_per_patch
from omni_actors.engine.rows import FRAME_PREFIX
from omni_actors.errors import (
    EngineError,
    InvalidPayload,
    InvalidRequest,
    MalformedMedia,
    OmniError,
    PromptTooLong,
    UnknownModality,
)
from omni_actors.media import decoders
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import DType, HostTensor, TensorRef, pack_token_ids
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.stage.engine_interface import FinishedEvent, StageInputs, StageRequest
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 1024
VOCABULARY = 512
LIMITS = MediaLimits(image_pixels=300 * 300, video_frames=16, video_pixels=200 * 200)
DTYPES = {np.dtype(np.float32): DType.F32, np.dtype(np.uint8): DType.U8, np.dtype(np.int64): DType.I64}

RANDOM = np.random.default_rng(0)
SPEECH = (RANDOM.standard_normal(24_000) * 0.1).astype(np.float32)  # 1.5 s at 16 kHz
LONG = np.tile(SPEECH, 4)[:90_000]  # 5.6 s
MUSIC = (RANDOM.standard_normal(30_000) * 0.1).astype(np.float32)  # 0.68 s at 44.1 kHz
PICTURE = RANDOM.integers(0, 256, (90, 130, 3), dtype=np.uint8)
CLIP = RANDOM.integers(0, 256, (5, 60, 84, 3), dtype=np.uint8)


def host(array):
    return HostTensor(DTYPES[array.dtype], array.shape, np.ascontiguousarray(array).tobytes())


def item(modality, array, encoding=MediaEncoding.ARRAY, **rates):
    tensor = host(array)
    return Media(modality, encoding, TensorRef(tensor.dtype, tensor.shape, 0), **rates), tensor


def file(modality, data, **rates):
    return item(modality, np.frombuffer(data, np.uint8), MediaEncoding.FILE, **rates)


def wav(samples, rate, kind="WAV", subtype=None):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def png(array, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format=kind)
    return buffer.getvalue()


def audio(samples=SPEECH, rate=16_000):
    return item("audio", samples, sample_rate=rate)


def chat(*parts, media=(), role="user"):
    """A message of texts and indices of media."""
    content = tuple(ContentPart(text=part) if isinstance(part, str) else ContentPart(media=part) for part in parts)
    prompt = Prompt(messages=(ChatMessage(role, content),), media=tuple(media for media, _ in media))
    return prompt, [tensor for _, tensor in media]


def prompt_engine(checkpoint, limits=None, **options):
    model, given = OmniModelConfig(str(checkpoint), "thinker"), {"max_model_len": MAX_MODEL_LEN, "dtype": "float32"}
    return PromptEngine(OmniEngineArgs(model, "prompt", engine=given | options), *([limits] if limits else []))


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint):
    engine = prompt_engine(tiny_checkpoint, LIMITS)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    assert shared_engine.counts() == {"requests": 0}
    assert not shared_engine.runnable()


def start(engine, prompt, media=(), name="r", priority=0):
    engine.start(StageRequest(name, StageParams(), 0, priority=priority), StageInputs(prompt=prompt, media=media))


def process(engine, prompt, media=()):
    start(engine, prompt, media)
    stream, finished = engine.step()
    assert (stream.start, stream.final) == (0, True)
    assert isinstance(finished, FinishedEvent)
    assert (finished.input_tokens, finished.output_tokens) == (0, len(stream.token_ids))
    return stream


def failure(engine, prompt, media):
    """The error of a request, whether it was refused at its start or in its step."""
    try:
        start(engine, prompt, media)
    except OmniError as error:
        return error
    (event,) = engine.step()
    return event.error


def decode(stream):
    assert list(stream.tensors) == [f"{FRAME_PREFIX}{index}" for index in range(len(stream.tensors))]
    frames = [bytearray(tensor.validate().data) for tensor in stream.tensors.values()]
    return MsgpackDecoder(EngineCoreRequest).decode(frames)


def features(stream):
    return [
        (feature.modality, {name: field.data for name, field in feature.data.items()})
        for feature in decode(stream).mm_features
    ]


CASES = {
    "text": (("hello there",), ()),
    "audio": ((0, "what is said?"), (audio(),)),
    "audio at 44.1 kHz": (("listen: ", 0), (audio(MUSIC, 44_100),)),
    "image": ((0, "what is this?"), (item("image", PICTURE),)),
    "video": ((0, "what happens?"), (item("video", CLIP, frames_per_second=4.0),)),
    "video without rate": ((0,), (item("video", CLIP),)),
    "audio and image": (("look: ", 1, " and hear: ", 0), (audio(), item("image", PICTURE))),
    "all": ((0, "a", 1, "b", 2, "c", 3), (item("image", PICTURE), audio(MUSIC, 44_100), item("video", CLIP), audio())),
}


def by_transformers(reference, parts, media):
    content, data = [], {}
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        medium, tensor = media[part]
        dtype = np.float32 if tensor.dtype is DType.F32 else np.uint8
        array = np.frombuffer(tensor.data, dtype).reshape(tensor.shape).copy()
        if medium.modality == "audio" and medium.sample_rate != 16_000:
            array = soxr.resample(array, medium.sample_rate, 16_000)
        if medium.frames_per_second is not None:
            data["fps"] = medium.frames_per_second
        name = {"audio": "audio", "image": "images", "video": "videos"}[medium.modality]
        data.setdefault(name, []).append(Image.fromarray(array) if name == "images" else array)
        content.append({"type": medium.modality})
    text = reference.prompt([{"role": "user", "content": content}])
    return dict(reference.processor(text=text, return_tensors="pt", **data))


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers_processor(engine, reference, case):
    parts, media = CASES[case]
    want = by_transformers(reference, parts, media)
    stream = process(engine, *chat(*parts, media=media))
    assert list(stream.token_ids) == want["input_ids"][0].tolist()
    if not media:
        assert stream.tensors == {}
        return
    request = decode(stream)
    assert request.prompt_token_ids == list(stream.token_ids)
    order = [media[part][0].modality for part in parts if isinstance(part, int)]
    got = features(stream)
    assert [modality for modality, _ in got] == order
    audios = iter(zip(want.get("input_features", ()), want.get("feature_attention_mask", ()), strict=True))
    images = iter(want.get("image_grid_thw", ()))
    videos = iter(zip(want.get("video_grid_thw", ()), want.get("video_second_per_grid", ()), strict=True))
    n_patches = 0
    for modality, data in got:
        if modality == "audio":
            values, mask = next(audios)
            assert torch.equal(data["input_audio_features"], values[:, mask.bool()])
            assert data["audio_feature_lengths"] == mask.sum()
        elif modality == "image":
            grid = next(images)
            assert torch.equal(data["image_grid_thw"], grid)
            assert torch.equal(data["pixel_values"], want["pixel_values"][n_patches : n_patches + grid.prod()])
            n_patches += int(grid.prod())
        else:
            grid, seconds = next(videos)
            assert torch.equal(data["video_grid_thw"], grid)
            assert torch.equal(data["pixel_values_videos"], want["pixel_values_videos"])
            assert data["second_per_grid_ts"].item() == pytest.approx(float(seconds), rel=1e-6)
            assert not data["use_audio_in_video"]
    for position, modality in zip((feature.mm_position for feature in request.mm_features), order, strict=True):
        place = stream.token_ids[position.offset : position.offset + position.length]
        assert set(place) == {engine.prompts.placeholders[modality]}


def test_the_sounds_of_two_videos_are_heard_as_transformers_hears_them(engine, reference, driver, tiny_checkpoint):
    """The first is shorter than its video, the second longer; a picture is between them."""
    clips = [CLIP, CLIP[:3]]
    films = [item("video", clip, frames_per_second=1.0, sound=index) for index, clip in enumerate(clips)]
    media = (audio(SPEECH), audio(LONG), *films, item("image", PICTURE))
    stream = process(engine, *chat(2, "a", 4, 3, "b", media=media))
    kinds = [{"type": "video"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}]
    together = {"use_audio_in_video": True}
    inputs = reference.inputs(
        [{"role": "user", "content": [*kinds, {"type": "text", "text": "b"}]}],
        audios=[(SPEECH, 16_000), (LONG, 16_000)],
        images=[Image.fromarray(PICTURE)],
        videos=clips,
        fps=1.0,
        **together,
    )
    assert list(stream.token_ids) == inputs["input_ids"][0].tolist()
    thinker = driver(tiny_checkpoint, "thinker", max_model_len=MAX_MODEL_LEN)
    given = StageInputs(token_ids=stream.token_ids, tensors=stream.tensors)
    thinker.start("r", given, max_tokens=8, ignore_eos=True, streams=False)
    thinker.run()
    wanted = reference.generate(inputs, thinker_max_tokens=8, thinker_eos=[], speaks=False, **together)
    assert thinker.tokens("r") == wanted.thinker_tokens


def test_several_messages_and_a_system_prompt(engine, reference):
    messages = tuple(
        ChatMessage(role, (ContentPart(text=text),))
        for role, text in (("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Again"))
    )
    stream = process(engine, Prompt(messages=messages), [])
    conversation = [{"role": message.role, "content": message.content[0].text} for message in messages]
    assert list(stream.token_ids) == reference.inputs(conversation)["input_ids"][0].tolist()


def test_the_sound_of_earlier_turns_is_not_computed_again(engine, reference, monkeypatch):
    kind, computed = type(engine.prompts.processor.feature_extractor), []
    extract = kind.__call__
    monkeypatch.setattr(
        kind,
        "__call__",
        lambda self, sounds, **options: computed.append(len(sounds)) or extract(self, sounds, **options),
    )
    sounds = [audio((RANDOM.standard_normal(16_000 + 1000 * turn) * 0.1).astype(np.float32)) for turn in range(3)]
    for turns in (1, 2, 3):
        parts = tuple(range(turns))
        got = features(process(engine, *chat(*parts, media=sounds[:turns])))
        mine = len(computed)
        want = by_transformers(reference, parts, sounds[:turns])
        del computed[mine:]
        for (_, data), values, mask in zip(got, want["input_features"], want["feature_attention_mask"], strict=True):
            assert torch.equal(data["input_audio_features"], values[:, mask.bool()])
    assert computed == [1, 1, 1]


def test_token_ids_are_taken_as_they_are_and_their_placeholders_take_media(engine):
    stream = process(engine, Prompt(token_ids=pack_token_ids([1, 2, 3, 200])))
    assert list(stream.token_ids) == [1, 2, 3, 200]
    assert stream.tensors == {}
    media, placeholders = (item("image", PICTURE), audio()), engine.prompts.placeholders
    ids = [5, placeholders["audio"], 6, placeholders["image"], 7]
    prompt = Prompt(token_ids=pack_token_ids(ids), media=tuple(media for media, _ in media))
    stream = process(engine, prompt, [tensor for _, tensor in media])
    assert [modality for modality, _ in features(stream)] == ["audio", "image"]
    assert len(stream.token_ids) > len(ids)


def test_each_video_keeps_its_own_rate(engine):
    media = tuple(item("video", CLIP, frames_per_second=rate) for rate in (5.0, 1.0))
    got = features(process(engine, *chat(1, 0, media=media)))
    assert [data["second_per_grid_ts"].item() for _, data in got] == pytest.approx([2.0, 0.4], rel=1e-6)


def test_video_positions_are_those_of_transformers():
    index = torch.arange(100)
    for rate in (1, 2, 3, 4, 5, 8, 10, 12, 15, 20, 24, 29.97, 30, 60):
        wanted = (index * torch.tensor(2 / rate).float() * 25).long()  # transformers' expression
        seconds = seconds_per_patch(2 / rate, len(index), 25)
        assert (np.arange(100) * (seconds * 25)).astype(np.int64).tolist() == wanted.tolist(), rate  # vLLM's expression
    # At 25 frames per second transformers' own rounding wavers (0, 2, 4, 6, 8, 9, 12, ...), which no value gives.
    seconds = seconds_per_patch(2 / 25, len(index), 25)
    assert (np.arange(100) * (seconds * 25)).astype(np.int64).tolist() == list(range(0, 200, 2))


NAN = np.where(np.arange(len(SPEECH)) == 7, np.float32("nan"), SPEECH)
BAD = {
    "empty text": (chat("  \n"), InvalidRequest, "empty"),
    "no content": (chat(), InvalidRequest, "empty"),
    "unknown modality": (chat(0, media=(item("smell", SPEECH),)), UnknownModality, "smell"),
    "unused medium": (chat("hi", media=(audio(),)), InvalidRequest, r"\[0\]"),
    "audio NaN": (chat(0, media=(audio(NAN),)), MalformedMedia, "NaN"),
    "audio empty": (chat(0, media=(audio(SPEECH[:0]),)), MalformedMedia, "empty"),
    "audio dtype": (chat(0, media=(audio((SPEECH * 99).astype(np.int64)),)), InvalidPayload, "f32"),
    "audio rate missing": (chat(0, media=(audio(SPEECH, None),)), InvalidRequest, "sample_rate"),
    "audio too long": (chat(0, media=(audio(np.zeros(31 * 16_000, np.float32)),)), InvalidRequest, "31.0 s.*30 s"),
    "audio too short": (chat(0, media=(audio(SPEECH[: MIN_AUDIO_SAMPLES - 1]),)), InvalidRequest, "shorter"),
    "audio file too long": (
        chat(0, media=(file("audio", wav(np.zeros(31 * 16_000), 16_000)),)),
        InvalidRequest,
        "30 s",
    ),
    "audio file channels": (
        chat(0, media=(file("audio", wav(np.zeros((99, 17)), 16_000)),)),
        InvalidRequest,
        "17 channels",
    ),
    "image channels": (chat(0, media=(item("image", PICTURE[:, :, :1]),)), InvalidPayload, "height, width, 3"),
    "image too large": (
        chat(0, media=(item("image", np.zeros((301, 300, 3), np.uint8)),)),
        InvalidRequest,
        "300 x 301.*90000",
    ),
    "image too small": (chat(0, media=(item("image", PICTURE[:3]),)), InvalidRequest, "130 x 3"),
    "image file too large": (
        chat(0, media=(file("image", png(np.zeros((2000, 2000, 3), np.uint8))),)),
        InvalidRequest,
        "2000 x 2000",
    ),
    "video file": (chat(0, media=(file("video", b"mp4"),)), InvalidRequest, "video files"),
    "video frames": (
        chat(0, media=(item("video", np.zeros((17, 8, 8, 3), np.uint8)),)),
        InvalidRequest,
        "17 frames.*16",
    ),
    "video rank": (chat(0, media=(item("video", PICTURE),)), InvalidPayload, "frames"),
    "placeholder in text": (chat("<|IMAGE|> ", 0, media=(item("image", PICTURE),)), InvalidRequest, "IMAGE"),
    "placeholder without medium": (chat("hear <|AUDIO|>"), InvalidRequest, "0 audio"),
    "text too long": (chat("x " * MAX_MODEL_LEN), PromptTooLong, f"at most {MAX_MODEL_LEN - 1}"),
    "media too long": (
        chat(*range(4), media=(audio(np.zeros(16_000 * 15, np.float32)),) * 4),
        PromptTooLong,
        "tokens; at most",
    ),
    "token id too large": ((Prompt(token_ids=pack_token_ids([1, VOCABULARY])), []), InvalidPayload, str(VOCABULARY)),
    "token ids too long": ((Prompt(token_ids=pack_token_ids([1] * MAX_MODEL_LEN)), []), PromptTooLong, "1024 tokens"),
    "videos with sound at two rates": (
        chat(
            2, 3, media=(audio(), audio(), *(item("video", CLIP, frames_per_second=1.0 + i, sound=i) for i in (0, 1)))
        ),
        InvalidRequest,
        "2 rates",
    ),
    "media missing": ((chat(0, media=(audio(),))[0], []), InvalidPayload, "1 media, but has 0 tensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_typed_error(engine, case):
    (prompt, media), error_class, text = BAD[case]
    error = failure(engine, prompt, media)
    assert error.code is error_class.code, error
    assert re.search(text, error.message), error.message
    assert "Traceback" not in str(error)
    # The next request is served as if nothing had been.
    process(engine, *chat("still there?"))


def test_a_failure_of_the_template_is_the_engines_and_a_refusal_by_the_processor_the_requests(engine, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("aspect ratio too large")

    monkeypatch.setattr(engine.prompts.renderer, "render_cmpl", refuse)
    error = failure(engine, *chat(0, media=(audio(),)))
    assert isinstance(error, InvalidRequest)
    assert "aspect ratio" in error.message
    monkeypatch.setattr(engine.prompts.processor, "apply_chat_template", lambda *_, **__: 1 / 0)
    error = failure(engine, *chat("hi"))
    assert isinstance(error, EngineError)
    assert "ZeroDivisionError: division by zero" in error.message


@pytest.mark.parametrize("fails", ["raise_exception(text)", "undefined_function(text)", "text / 2"])
def test_a_failing_prompt_is_not_quoted_in_the_log(engine, monkeypatch, caplog, fails):
    """A chat template is part of the checkpoint, and may fail in any way."""
    template = "{% set text = messages[0]['content'][0]['text'] %}{{ " + fails + " }}"
    monkeypatch.setattr(engine.prompts.processor, "chat_template", template)
    with caplog.at_level(logging.DEBUG):
        assert failure(engine, *chat("my bank account is 4711"))
    assert "in process" in caplog.text, "it says where it failed"
    assert "4711" not in caplog.text


def test_a_request_is_whole_and_its_id_free(engine):
    with pytest.raises(InvalidRequest, match="needs a prompt"):
        engine.start(StageRequest("r", StageParams(), 0), StageInputs())
    start(engine, *chat("hi"))
    with pytest.raises(InvalidRequest, match="already"):
        start(engine, *chat("hi"))
    engine.extend("r", None, complete=True)
    with pytest.raises(InvalidRequest, match="as a whole"):
        engine.extend("r", None, complete=False)
    engine.step()
    assert engine.facts.max_input_tokens == MAX_MODEL_LEN - 1
    assert replace(LIMITS, audio_seconds=30.0) == engine.prompts.limits, (
        "what the extractor takes, which would cut the rest"
    )


# -- which request is next --------------------------------------------------------------------------------------------


def ends(engine):
    """The requests in the order in which they are finished."""
    found = []
    while engine.runnable():
        found += [event.request_id for event in engine.step() if isinstance(event, FinishedEvent)]
    return found


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_prompts_are_processed_by_priority_unless_the_yaml_says_otherwise(engine, tiny_checkpoint, policy):
    engine = engine if policy == "priority" else prompt_engine(tiny_checkpoint, scheduling_policy=policy)
    for name, priority in {"first": 0, "gone": -2, "second": 0, "later": 1, "urgent": -1}.items():
        start(engine, *chat("hello"), name=name, priority=priority)
    engine.abort("gone")
    engine.abort("unknown")
    assert engine.counts() == {"requests": 4}
    by_arrival = ["first", "second", "later", "urgent"]
    assert ends(engine) == (by_arrival if policy == "fcfs" else ["urgent", "first", "second", "later"])
    if policy == "fcfs":
        engine.shutdown()


@pytest.fixture(scope="module")
def media_engine(tiny_checkpoint):
    engine = prompt_engine(tiny_checkpoint, limit_mm_per_prompt={"image": 1, "audio": 2, "video": 0})
    yield engine
    engine.shutdown()


def start_with_sound(engine, name, priority=0, count=1):
    """A request whose audio a decoder has to resample."""
    start(engine, *chat(*range(count), media=(audio(np.zeros(8000, np.float32), 8000),) * count), name, priority)


def next_end(engine):
    """The next request that is finished, waiting for it if need be."""
    events = until(engine.step, 60.0)
    assert isinstance(events[-1], FinishedEvent), events
    return events[-1].request_id


@pytest.fixture
def stopped(media_engine, monkeypatch):
    """The decoder that the next media come to, stopped, as if it were busy with a file for ever."""
    monkeypatch.setattr(decoders, "RESUME_SECONDS", 600.0)
    start_with_sound(media_engine, "first")
    assert next_end(media_engine) == "first"
    assert not media_engine.busy()
    process = psutil.Process(media_engine.decoder_pids[-1])
    process.suspend()
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):  # an abort ends it
        process.resume()
    while media_engine.busy() or media_engine.runnable():
        media_engine.step()


def test_the_decoders_of_a_stage_run_before_the_first_sound_comes(tiny_checkpoint):
    engine = build_engine(
        OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "thinker"), "prompt", {"max_model_len": 512})
    )
    try:
        until(lambda: len(engine.decoder_pids) == decoders.THREADS, 10, "the decoders to be used")
        before = set(engine.decoder_pids)
        for name in ("a", "b"):
            start_with_sound(engine, name)
        assert {next_end(engine), next_end(engine)} == {"a", "b"}
        assert set(engine.decoder_pids) == before
        assert engine.counts() == {"requests": 0}
    finally:
        engine.shutdown()


def test_media_that_are_decoded_do_not_stop_the_stage(media_engine, stopped):
    woken = threading.Event()
    media_engine.on_progress(woken.set)
    start_with_sound(media_engine, "sound", priority=-1)
    for name in ("text", "another text"):
        start(media_engine, *chat("hello"), name=name)
    start_with_sound(media_engine, "another sound")  # on the other thread
    assert sorted(next_end(media_engine) for _ in range(3)) == ["another sound", "another text", "text"]
    assert media_engine.counts() == {"requests": 1}
    assert media_engine.busy()
    assert not media_engine.runnable()
    woken.clear()
    stopped.resume()
    assert woken.wait(60), "the loop is woken when it can go on"
    assert next_end(media_engine) == "sound"


def test_an_abort_ends_what_decodes_its_media(media_engine, stopped):
    start_with_sound(media_engine, "sound")
    media_engine.abort("sound")
    assert media_engine.counts() == {"requests": 0}
    until(lambda: not stopped.is_running(), what="the decoder has ended")
    until(media_engine.runnable, what="the thread is free")
    assert list(media_engine.step()) == []
    start_with_sound(media_engine, "sound")
    assert next_end(media_engine) == "sound"


def test_media_wait_for_a_thread_by_priority_and_are_not_decoded_if_they_are_too_many(media_engine, stopped):
    start_with_sound(media_engine, "hanging")
    for name, priority in {"running": 0, "last": 1, "urgent": -1, "second": 0}.items():
        start_with_sound(media_engine, name, priority)
    assert [next_end(media_engine) for _ in range(4)] == ["running", "urgent", "second", "last"]
    assert media_engine.facts.max_media == {"image": 1, "audio": 2, "video": 0}
    with pytest.raises(InvalidRequest, match="3 media of the kind audio; at most 2"):
        start_with_sound(media_engine, "many", count=3)
    media_engine.abort("hanging")


def test_a_picture_that_comes_again_has_its_features_again(tiny_qwen_image):
    """As after a loss: the stage that had them may be another process by now."""
    model = OmniModelConfig(str(tiny_qwen_image), "text_encoder")
    given = {"max_model_len": 2048, "dtype": "float32"}
    engine = PromptEngine(OmniEngineArgs(model, "prompt", engine=given), LIMITS)
    media = [file("image", png(PICTURE))]
    try:
        first, again = (process(engine, *chat("A blue ship", 0, media=media)) for _ in range(2))
    finally:
        engine.shutdown()
    for stream in (first, again):
        frames = {name: tensor for name, tensor in stream.tensors.items() if name.startswith(FRAME_PREFIX)}
        token_ids, (feature,) = RequestReader(merged_patches(2), lambda _: -1).read(frames, list(stream.token_ids))
        assert token_ids == list(first.token_ids)
        assert feature.mm_position.length > 1
