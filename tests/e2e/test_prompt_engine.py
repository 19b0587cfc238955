"""The prompt stage compared with transformers' processor, for every modality, and what it refuses."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from PIL import Image

from omni_actors.engine.platform import prepare

prepare()

from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.serial_utils import MsgpackDecoder  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.models.qwen2_5_omni.thinker import MIN_AUDIO_SAMPLES  # noqa: E402
from omni_actors.engine.prompt import PromptEngine  # noqa: E402
from omni_actors.engine.prompt_processing import seconds_per_patch  # noqa: E402
from omni_actors.engine.tensors import FRAME_PREFIX  # noqa: E402
from omni_actors.errors import (  # noqa: E402
    EngineError,
    InvalidPayload,
    InvalidRequest,
    MalformedMedia,
    OmniError,
    PromptTooLong,
    UnknownModality,
)
from omni_actors.media.limits import MediaLimits  # noqa: E402
from omni_actors.protocol.fields import pack_token_ids  # noqa: E402
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams  # noqa: E402
from omni_actors.protocol.tensors import DType, HostTensor, TensorRef  # noqa: E402
from omni_actors.stage.engine_interface import ErrorEvent, FinishedEvent, StageInputs, StageRequest, StreamEvent  # noqa: E402
from tests.support.media_files import png, wav  # noqa: E402
from tests.support.reference import Reference  # noqa: E402

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

Item = tuple[Media, HostTensor]


def host(array: np.ndarray) -> HostTensor:
    return HostTensor(DTYPES[array.dtype], array.shape, np.ascontiguousarray(array).tobytes())


def item(modality: str, array: np.ndarray, encoding: MediaEncoding = MediaEncoding.ARRAY, **rates: Any) -> Item:
    tensor = host(array)
    return Media(modality, encoding, TensorRef(tensor.dtype, tensor.shape, 0), **rates), tensor


def file(modality: str, data: bytes, **rates: Any) -> Item:
    return item(modality, np.frombuffer(data, np.uint8), MediaEncoding.FILE, **rates)


def audio(samples: np.ndarray = SPEECH, rate: int | None = 16_000) -> Item:
    return item("audio", samples, sample_rate=rate)


def chat(*parts: str | int, media: tuple[Item, ...] = (), role: str = "user") -> tuple[Prompt, list[HostTensor]]:
    """A message of texts and indices of media."""
    content = tuple(ContentPart(text=part) if isinstance(part, str) else ContentPart(media=part) for part in parts)
    prompt = Prompt(messages=(ChatMessage(role, content),), media=tuple(media for media, _ in media))
    return prompt, [tensor for _, tensor in media]


def arguments(checkpoint: Path, kind: str) -> OmniEngineArgs:
    options = {"max_model_len": MAX_MODEL_LEN, "dtype": "float32"}
    if kind == "autoregressive":
        options |= {
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 32 << 20,
            "enforce_eager": True,
            "skip_mm_profiling": True,
        }
    return OmniEngineArgs(OmniModelConfig(str(checkpoint), "thinker"), kind, engine=options)


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint: Path) -> Iterator[PromptEngine]:
    engine = PromptEngine(arguments(tiny_checkpoint, "prompt"), LIMITS)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(shared_engine: PromptEngine) -> Iterator[PromptEngine]:
    yield shared_engine
    assert shared_engine.counts() == {"requests": 0}
    assert not shared_engine.runnable()


def start(engine: PromptEngine, prompt: Prompt, media: list[HostTensor], name: str = "r") -> None:
    engine.start(StageRequest(name, StageParams(), 0), StageInputs(prompt=prompt, media=media))


def process(engine: PromptEngine, prompt: Prompt, media: list[HostTensor]) -> StreamEvent:
    start(engine, prompt, media)
    stream, finished = engine.step()
    assert isinstance(stream, StreamEvent)
    assert stream.start == 0
    assert stream.final
    assert isinstance(finished, FinishedEvent)
    assert finished.input_tokens == 0
    assert finished.output_tokens == len(stream.token_ids)
    return stream


def failure(engine: PromptEngine, prompt: Prompt, media: list[HostTensor]) -> OmniError:
    """The error of a request, whether it was refused at its start or in its step."""
    try:
        start(engine, prompt, media)
    except OmniError as error:
        return error
    (event,) = engine.step()
    assert isinstance(event, ErrorEvent), event
    return event.error


def decode(stream: StreamEvent) -> EngineCoreRequest:
    assert list(stream.tensors) == [f"{FRAME_PREFIX}{index}" for index in range(len(stream.tensors))]
    assert all(tensor.dtype is DType.U8 for tensor in stream.tensors.values())
    frames = [bytearray(tensor.validate().data) for tensor in stream.tensors.values()]
    return MsgpackDecoder(EngineCoreRequest).decode(frames)


def features(stream: StreamEvent) -> list[tuple[str, dict[str, torch.Tensor]]]:
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


def by_transformers(reference: Reference, parts: tuple[str | int, ...], media: tuple[Item, ...]) -> dict[str, Any]:
    content: list[dict[str, str]] = []
    data: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        medium, tensor = media[part]
        array = (
            np.frombuffer(tensor.data, np.float32 if tensor.dtype is DType.F32 else np.uint8)
            .reshape(tensor.shape)
            .copy()
        )
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
def test_equal_to_transformers_processor(engine: PromptEngine, reference: Reference, case: str):
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


@pytest.mark.parametrize("case", ["text", "audio at 44.1 kHz", "video", "all"])
def test_thinker_answers_as_transformers_does(
    engine: PromptEngine, reference: Reference, tiny_checkpoint: Path, thinker: Any, case: str
):
    parts, media = CASES[case]
    want = reference.generate(
        by_transformers(reference, parts, media), thinker_max_tokens=8, talker_max_tokens=2, num_steps=2, thinker_eos=[]
    )
    stream = process(engine, *chat(*parts, media=media))
    assert answer_of(thinker, stream) == want.thinker_tokens


def answer_of(thinker: Any, stream: StreamEvent) -> list[int]:
    params = StageParams(max_tokens=8, ignore_eos=True)
    thinker.start(
        StageRequest("r", params, 0, streams=False), StageInputs(token_ids=stream.token_ids, tensors=stream.tensors)
    )
    tokens: list[int] = []
    while thinker.runnable():
        for event in thinker.step():
            tokens += getattr(event, "token_ids", ())
    return tokens


def test_the_sounds_of_two_videos_are_heard_as_transformers_hears_them(
    engine: PromptEngine, reference: Reference, thinker: Any
):
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
    limits = {"thinker_max_tokens": 8, "talker_max_tokens": 2, "num_steps": 2, "thinker_eos": []}
    assert answer_of(thinker, stream) == reference.generate(inputs, **limits, **together).thinker_tokens


@pytest.fixture(scope="module")
def thinker(tiny_checkpoint: Path) -> Iterator[Any]:
    from omni_actors.engine.autoregressive import AutoregressiveEngine

    engine = AutoregressiveEngine(arguments(tiny_checkpoint, "autoregressive"))
    yield engine
    engine.shutdown()


def test_several_messages_and_a_system_prompt(engine: PromptEngine, reference: Reference):
    messages = tuple(
        ChatMessage(role, (ContentPart(text=text),))
        for role, text in (("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Again"))
    )
    stream = process(engine, Prompt(messages=messages), [])
    conversation = [{"role": message.role, "content": message.content[0].text} for message in messages]
    assert list(stream.token_ids) == reference.inputs(conversation)["input_ids"][0].tolist()


def test_token_ids_are_taken_as_they_are(engine: PromptEngine):
    stream = process(engine, Prompt(token_ids=pack_token_ids([1, 2, 3, 200])), [])
    assert list(stream.token_ids) == [1, 2, 3, 200]
    assert stream.tensors == {}


def test_token_ids_with_placeholders_take_media(engine: PromptEngine):
    media = (item("image", PICTURE), audio())
    placeholders = engine.prompts.placeholders
    ids = [5, placeholders["audio"], 6, placeholders["image"], 7]
    prompt = Prompt(token_ids=pack_token_ids(ids), media=tuple(media for media, _ in media))
    stream = process(engine, prompt, [tensor for _, tensor in media])
    assert [modality for modality, _ in features(stream)] == ["audio", "image"]
    assert len(stream.token_ids) > len(ids)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_audio_files(engine: PromptEngine, kind: str):
    stereo = np.stack([MUSIC, -0.5 * MUSIC], axis=1)
    data = wav(stereo, 44_100, kind, "FLOAT" if kind == "WAV" else None)
    got = features(process(engine, *chat(0, media=(file("audio", data),))))[0][1]["input_audio_features"]
    mono, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    want = process(engine, *chat(0, media=(audio(mono.mean(axis=1), rate),)))
    assert torch.equal(got, features(want)[0][1]["input_audio_features"])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_image_files(engine: PromptEngine, kind: str):
    data = png(PICTURE, kind)
    got = features(process(engine, *chat(0, media=(file("image", data),))))[0][1]
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    want = features(process(engine, *chat(0, media=(item("image", pixels),))))[0][1]
    assert torch.equal(got["pixel_values"], want["pixel_values"])


def test_each_video_keeps_its_own_rate(engine: PromptEngine):
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


def test_requests_are_processed_in_order_and_can_be_aborted(engine: PromptEngine):
    for name in ("a", "b", "c"):
        start(engine, *chat(f"this is {name}"), name=name)
    assert engine.counts() == {"requests": 3}
    engine.abort("b")
    engine.abort("b")
    engine.abort("unknown")
    order = []
    while engine.runnable():
        order.append(engine.step()[0].request_id)
    assert order == ["a", "c"]
    assert list(engine.step()) == []


def test_facts(engine: PromptEngine):
    assert engine.facts.max_input_tokens == MAX_MODEL_LEN - 1
    assert engine.limits.audio_seconds == 30.0, "what the feature extractor takes, which would cut the rest silently"


def nan_audio() -> np.ndarray:
    samples = SPEECH.copy()
    samples[7] = np.nan
    return samples


BAD = {
    "empty text": (chat("  \n"), InvalidRequest, "empty"),
    "no content": (chat(), InvalidRequest, "empty"),
    "unknown modality": (chat(0, media=(item("smell", SPEECH),)), UnknownModality, "smell"),
    "unused medium": (chat("hi", media=(audio(),)), InvalidRequest, r"\[0\]"),
    "audio NaN": (chat(0, media=(audio(nan_audio()),)), MalformedMedia, "NaN"),
    "audio infinite": (chat(0, media=(audio(SPEECH * np.float32(np.inf)),)), MalformedMedia, "infinite"),
    "audio empty": (chat(0, media=(audio(SPEECH[:0]),)), MalformedMedia, "empty"),
    "audio dtype": (chat(0, media=(audio((SPEECH * 99).astype(np.int64)),)), InvalidPayload, "f32"),
    "audio rank": (chat(0, media=(audio(SPEECH[None]),)), InvalidPayload, r"\[samples\]"),
    "audio rate missing": (chat(0, media=(audio(SPEECH, None),)), InvalidRequest, "sample_rate"),
    "audio too long": (chat(0, media=(audio(np.zeros(31 * 16_000, np.float32)),)), InvalidRequest, "31.0 s.*30 s"),
    "audio too short": (chat(0, media=(audio(SPEECH[: MIN_AUDIO_SAMPLES - 1]),)), InvalidRequest, "shorter"),
    "audio file broken": (chat(0, media=(file("audio", b"RIFF" + b"x" * 99),)), MalformedMedia, "cannot be read"),
    "audio file cut": (chat(0, media=(file("audio", wav(SPEECH, 16_000)[:44]),)), MalformedMedia, "no samples"),
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
    "audio file with rate": (
        chat(0, media=(file("audio", wav(SPEECH, 16_000), sample_rate=16_000),)),
        InvalidRequest,
        "sample_rate",
    ),
    "image dtype": (chat(0, media=(item("image", SPEECH.reshape(80, 100, 3)),)), InvalidPayload, "u8"),
    "image channels": (chat(0, media=(item("image", PICTURE[:, :, :1]),)), InvalidPayload, "height, width, 3"),
    "image too large": (
        chat(0, media=(item("image", np.zeros((301, 300, 3), np.uint8)),)),
        InvalidRequest,
        "300 x 301.*90000",
    ),
    "image too small": (chat(0, media=(item("image", PICTURE[:3]),)), InvalidRequest, "130 x 3"),
    "image file broken": (chat(0, media=(file("image", b"no picture"),)), MalformedMedia, "PNG, JPEG, WEBP or GIF"),
    "image file cut": (chat(0, media=(file("image", png(PICTURE)[:2000]),)), MalformedMedia, "cannot be read"),
    "image file format": (
        chat(0, media=(file("image", png(PICTURE, "BMP")),)),
        MalformedMedia,
        "PNG, JPEG, WEBP or GIF",
    ),
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
    "token id negative": ((Prompt(token_ids=pack_token_ids([1, -2])), []), InvalidPayload, "-2"),
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
def test_bad_input_gets_a_typed_error(engine: PromptEngine, case: str):
    (prompt, media), error_class, text = BAD[case]
    error = failure(engine, prompt, media)
    assert error.code is error_class.code, error
    assert re.search(text, error.message), error.message
    assert "Traceback" not in str(error)
    # The next request is served as if nothing had been.
    process(engine, *chat("still there?"))


def test_lengths_and_bytes_of_arrays_must_agree(engine: PromptEngine):
    prompt, (tensor,) = chat(0, media=(audio(),))
    error = failure(engine, prompt, [tensor._replace(data=tensor.data[:-4])])
    assert isinstance(error, InvalidPayload)


def test_unexpected_failures_are_engine_errors(engine: PromptEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.prompts.processor, "apply_chat_template", lambda *_, **__: 1 / 0)
    error = failure(engine, *chat("hi"))
    assert isinstance(error, EngineError)
    assert "ZeroDivisionError: division by zero" in error.message


def test_refusal_by_the_processor_is_the_requests_fault(engine: PromptEngine, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("aspect ratio too large")

    monkeypatch.setattr(engine.prompts.renderer, "render_cmpl", refuse)
    error = failure(engine, *chat(0, media=(audio(),)))
    assert isinstance(error, InvalidRequest)
    assert "aspect ratio" in error.message


def test_a_request_is_whole_and_its_id_free(engine: PromptEngine):
    with pytest.raises(InvalidRequest, match="needs a prompt"):
        engine.start(StageRequest("r", StageParams(), 0), StageInputs())
    start(engine, *chat("hi"))
    with pytest.raises(InvalidRequest, match="already"):
        start(engine, *chat("hi"))
    engine.extend("r", None, complete=True)
    with pytest.raises(InvalidRequest, match="as a whole"):
        engine.extend("r", None, complete=False)
    engine.step()


def test_limits_can_only_be_lowered_below_the_extractors(shared_engine: PromptEngine):
    assert replace(LIMITS, audio_seconds=30.0) == shared_engine.limits
