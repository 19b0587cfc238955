"""An engine without a model: repeats its input, one token per step. Everything around it is real.

A stage with `image` among its outputs draws a picture from tokens, or decodes the latents of a stage before it; one
with the option `latents` makes those. Latents are f32 [4, height / 8, width / 8], of colours and opacity from -1 to 1.
With `video` the picture moves, to a tone if there is `audio`, too.

It lets tests and benchmarks load sockets, coordinator and actors with thousands of requests in seconds. Its `outputs`
decide what it makes: one character per token for `text`, `samples_per_token` samples per token for `audio`. It streams
every token to the next stage, with a row of `row_width` values whose bytes repeat the token; the next stage checks
those of the last row. With `speech` it is a stage that speaks its prompt, after the additional information of the
request, as `name=value`.
"""

from __future__ import annotations

import array
import ctypes
import os
import resource
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy
import psutil
from msgspec import Meta, Struct
from numpy.typing import NDArray

from omni_actors.config import StageConfig, check_parameters
from omni_actors.config.loading import engine_options
from omni_actors.errors import EngineError, InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.protocol.fields import DType, HostTensor, Name, pack_token_ids, unpack_token_ids
from omni_actors.protocol.messages import LATENTS, FinishReason
from omni_actors.protocol.payloads import SPEECH_INFORMATION, Parameter, SpeechAbility
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    EngineFacts,
    ErrorEvent,
    FinishedEvent,
    ImageEvent,
    LatentsEvent,
    ProgressEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
    VideoEvent,
    preview_steps,
)

SCALE = 8  # pixels of a latent's side
CHANNELS = 4
SIZE, STEPS = 64, 4  # by default
TRANSPARENT = "transparent"


def _sides(most: int) -> list[Parameter]:
    names = ("width", "height")
    return [Parameter(one, "int", SCALE, most, multiple_of=SCALE, default=SIZE, about="pixels") for one in names]


DRAWN = (
    Parameter("num_steps", "int", least=1, most=1000, default=STEPS, about="steps from noise to the picture"),
    Parameter("guidance_scale", "float", least=0, most=100, default=1.0, about="changes the colours"),
    Parameter("negative_prompt", "text", most=4096, about="changes the colours"),
)
PARAMETERS = (
    *_sides(4096),
    *DRAWN,
    Parameter("previews", "int", least=0, most=16, default=0, about="pictures of the way there"),
    Parameter("background", "text", choices=("auto", "opaque", TRANSPARENT), default="auto", about="of the picture"),
    Parameter("mask", "bool", about="changes the colours"),
)
VIDEO_PARAMETERS = (
    *_sides(1024),
    *DRAWN,
    Parameter("seconds", "float", least=0, most=10, default=1.0, about="length of the video"),
)
VIDEO_RATE = 8  # frames per second

Latents = NDArray[numpy.float32]


def drawn(
    request: StageRequest, tokens: Sequence[int], media: Sequence[HostTensor], outputs: Collection[str]
) -> Iterator[list[EngineEvent]]:
    """Draw for one request, a step at a time.

    Args:
        media: reference pictures, which change the colours.
        outputs: what to make of the latents: `image`, `latents` or both, or `video`, perhaps with `audio`.
    """
    request_id, params, extra = request.request_id, request.params, request.params.extra_args or {}
    steps = params.num_steps or STEPS
    shape = (CHANNELS, (params.height or SIZE) // SCALE, (params.width or SIZE) // SCALE)
    about = (params.guidance_scale, params.negative_prompt, request.effective_seed, extra.get("mask"))
    source = zlib.crc32(pack_token_ids(tokens), zlib.crc32(msgspec.json.encode(about)))
    for picture in media:
        source = zlib.crc32(picture.data, source)
    generator = numpy.random.default_rng(source)
    noise = generator.uniform(-1, 1, shape).astype(numpy.float32)
    pattern = _pattern(generator, shape)
    shown = {steps, *preview_steps(steps, params.previews or 0)}
    for step in range(1, steps + 1):
        events: list[EngineEvent] = [ProgressEvent(request_id, step, steps)]
        preview = step < steps
        if step in shown:
            latents = numpy.float32(step / steps) * pattern + (1 - numpy.float32(step / steps)) * noise
            if extra.get("background") != TRANSPARENT:
                latents[3] = 1
            tensor = HostTensor(DType.F32, latents.shape, latents.tobytes())
            if "image" in outputs:
                events.append(ImageEvent(request_id, decoded(tensor), preview))
            if "latents" in outputs:
                events.append(LatentsEvent(request_id, tensor, preview))
            if "video" in outputs and not preview:
                events += _moving(request_id, decoded(tensor), float(extra.get("seconds", 1)), "audio" in outputs)
        if not preview:
            events.append(FinishedEvent(request_id, FinishReason.STOP, len(tokens), shape[1] * shape[2]))
        yield events


def _moving(request_id: str, picture: HostTensor, seconds: float, sounds: bool) -> Iterator[EngineEvent]:
    """A picture that moves to the right, in two parts, after its tone."""
    pixels = numpy.frombuffer(picture.data, numpy.uint8).reshape(picture.shape)
    count = round(seconds * VIDEO_RATE) + 1
    if sounds:
        tone = numpy.sin(numpy.arange(SAMPLE_RATE * count // VIDEO_RATE, dtype=numpy.float32) / 8) / 4
        yield AudioEvent(request_id, HostTensor(DType.F32, tone.shape, tone.tobytes()), SAMPLE_RATE)
    frames = numpy.stack([numpy.roll(pixels, index, axis=1) for index in range(count)])
    for part in numpy.array_split(frames, 2):
        if len(part):
            yield VideoEvent(request_id, HostTensor(DType.U8, part.shape, part.tobytes()), VIDEO_RATE)


def _pattern(generator: numpy.random.Generator, shape: tuple[int, int, int]) -> Latents:
    """Colours that change from each corner to the others."""
    channels, height, width = shape
    corners = generator.uniform(-1, 1, (2, 2, channels))
    sides = numpy.linspace(corners[0], corners[1], num=height)
    return numpy.linspace(sides[:, 0], sides[:, 1], num=width).transpose(2, 1, 0).astype(numpy.float32)


def decoded(tensor: HostTensor) -> HostTensor:
    """Return the picture of latents: RGB, or RGBA if some of it is not opaque. Raises `InvalidPayload`."""
    if tensor.dtype is not DType.F32 or len(tensor.shape) != 3 or tensor.shape[0] != CHANNELS:
        raise InvalidPayload(f"An echo stage decodes f32 [{CHANNELS}, height, width]; got {list(tensor.shape)}.")
    latents: Latents = numpy.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    colours = numpy.clip((latents + 1) * 127.5, 0, 255).round().astype(numpy.uint8)
    channels = CHANNELS if colours[3].min() < 255 else CHANNELS - 1
    pixels = colours[:channels].repeat(SCALE, 1).repeat(SCALE, 2).transpose(1, 2, 0)
    return HostTensor(DType.U8, pixels.shape, pixels.tobytes())


SAMPLE_RATE = 24_000
CRASH_TOKEN = 0x7FFF0001  # a prompt with this token ends the process: tests of supervision
FAIL_TOKEN = 0x7FFF0002  # a prompt with this token fails alone
HANG_TOKEN = 0x7FFF0003  # the engine's step never returns
GRAB_TOKEN = 0x7FFF0004  # the same, holding the interpreter's lock, so that no thread runs
HOG_TOKEN = 0x7FFF0005  # allocates memory until there is none, in a stage with `memory_bytes`
HOG_BYTES = 64 << 20  # at a time
HANG_SECONDS = 3600
Text = Annotated[str, Meta(max_length=4096)]


class EchoOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options in the YAML's `engine` mapping of an echo stage."""

    max_input_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 4096
    step_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0  # time that each step takes
    max_num_seqs: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # requests per step, by priority and arrival; 0 for all
    start_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0  # time that loading takes
    row_width: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    samples_per_token: Annotated[int, Meta(ge=0, le=10_000_000)] = 480
    voices: Annotated[tuple[Name, ...], Meta(max_length=1024)] = ("Chelsie", "Ethan")
    latents: bool = False  # make those of a picture, for the stages after it
    speech: SpeechAbility | None = None  # that it declares
    max_media: dict[Name, Annotated[int, Meta(ge=0, le=1_000)]] = {}  # likewise
    sound: bool = False  # make audio although the stage does not output it; it then goes to the stages after it
    fail_start: Text = ""  # with which loading fails
    fail_start_if: Text = ""  # a file: while it exists loading fails
    fail_shutdown: Text = ""  # with which the end of the engine fails
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 0  # that the process may add to its address space; 0: any


@dataclass
class _Echo:
    """A request: `events` are those of each step, `pictures` those that it has from latents."""

    request: StageRequest
    tokens: list[int]
    sent: int = 0
    complete: bool = True  # no more text comes
    pictures: deque[tuple[HostTensor, bool]] | None = None  # with whether they are previews
    events: Iterator[list[EngineEvent]] = field(init=False)

    @property
    def waits(self) -> bool:
        """Whether it needs more latents, or more text: the last character is the one that ends it."""
        if self.pictures is not None:
            return not self.pictures
        return not self.complete and self.sent + 1 >= len(self.tokens)


class EchoEngine(StageEngine):
    """The engine that this module describes."""

    def __init__(self, stage: StageConfig) -> None:
        self._options = engine_options(stage, EchoOptions)
        self._outputs = frozenset(stage.outputs)
        self._name = stage.name
        self._sounds = "audio" in self._outputs or self._options.sound
        self._draws = {"image", "latents", "video"} & {*self._outputs, *(["latents"] if self._options.latents else [])}
        self._active: dict[str, _Echo] = {}
        if self._options.memory_bytes:
            limit = psutil.Process().memory_info().vms + self._options.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        time.sleep(self._options.start_seconds)
        if self._options.fail_start:
            raise EngineError(self._options.fail_start)
        if self._options.fail_start_if and os.path.exists(self._options.fail_start_if):
            raise EngineError("A test made the start fail.")

    @classmethod
    def check_options(cls, stage: StageConfig) -> bool:
        """See `StageEngine.check_options`."""
        engine_options(stage, EchoOptions)
        return True

    @property
    def facts(self) -> EngineFacts:
        """Voices and sample rate if the stage makes sound, and the limit of the options."""
        return EngineFacts(
            voices=tuple(self._options.voices) if self._sounds or self._options.speech else (),
            sample_rate=SAMPLE_RATE if self._sounds else 0,
            max_input_tokens=self._options.max_input_tokens,
            parameters=(VIDEO_PARAMETERS if "video" in self._draws else PARAMETERS) if self._draws else None,
            max_media=self._options.max_media,
            wants_information=SPEECH_INFORMATION if self._options.speech else (),
            speech=self._options.speech,
        )

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Take tokens, a prompt's text as bytes, or latents. Raises `InvalidRequest` if there are none."""
        if self._draws:
            check_parameters(self._name, self.facts.parameters, request.params)
        if (latents := inputs.tensors.get(LATENTS)) is not None:
            pictures = deque([(decoded(latents), not inputs.complete)])
            echo = self._active[request.request_id] = _Echo(request, [0], pictures=pictures)
            echo.events = self._shown(request.request_id, pictures)
            return
        tokens = list(inputs.token_ids)
        if inputs.prompt is not None:
            if inputs.prompt.tools is not None:
                raise InvalidRequest("tools: an echo stage calls none.", field="tools")
            told = _told(request) if self._options.speech is not None else b""
            tokens = [*told, *unpack_token_ids(inputs.prompt.token_ids)]
            for message in inputs.prompt.messages:
                for part in message.content:
                    tokens += (part.text or "").encode()
        if not tokens:
            raise InvalidRequest("The prompt is empty.", field="prompt")
        if min(tokens) < 0:
            raise InvalidPayload(f"The prompt has the negative token id {min(tokens)}.")
        limit = self._options.max_input_tokens
        if len(tokens) > limit:
            raise PromptTooLong(f"The prompt has {len(tokens)} tokens, at most {limit} are possible.")
        _check_row(inputs.tensors.get("rows"), tokens[-1])
        if request.params.max_tokens is not None:
            tokens = tokens[: request.params.max_tokens]
        echo = self._active[request.request_id] = _Echo(request, tokens, complete=inputs.complete)
        outputs = {*self._draws, *self._outputs}
        echo.events = drawn(request, tokens, inputs.media, outputs) if self._draws else self._spoken(echo)

    def extend_text(self, request_id: str, text: str, *, complete: bool) -> None:
        """Take more of a text that is spoken."""
        if (echo := self._active.get(request_id)) is not None:
            echo.tokens += text.encode()
            echo.complete = complete

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """Take the next latents of a picture. Raises `InvalidRequest`: all other input comes with `start`."""
        echo = self._active.get(request_id)
        if echo is None or echo.pictures is None or rows is None:
            raise InvalidRequest("An echo stage takes its input at once.")
        echo.pictures.append((decoded(rows), not complete))

    def abort(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._active.pop(request_id, None)

    def runnable(self) -> bool:
        """Whether a request is left that need not wait for input."""
        return not all(echo.waits for echo in self._active.values())

    def waits_for_input(self, request_id: str) -> bool:
        """Whether a request needs more latents or text."""
        return request_id in self._active and self._active[request_id].waits

    def step(self) -> Sequence[EngineEvent]:
        """Advance the oldest requests, up to `max_num_seqs`, by one token each."""
        events: list[EngineEvent] = []
        chosen = [echo for echo in self._active.values() if not echo.waits]
        if limit := self._options.max_num_seqs:
            chosen = sorted(chosen, key=lambda echo: echo.request.priority)[:limit]
        time.sleep(self._options.step_seconds)
        for echo in chosen:
            events += self._advance(echo)
        return events

    def _advance(self, echo: _Echo) -> list[EngineEvent]:
        request_id = echo.request.request_id
        token = echo.tokens[echo.sent % len(echo.tokens)] if echo.tokens else 0
        if token == CRASH_TOKEN:
            raise EngineError("A test asked this stage to end.")
        if token == HANG_TOKEN:
            time.sleep(HANG_SECONDS)
        if token == GRAB_TOKEN:
            ctypes.PyDLL(None).sleep(HANG_SECONDS)
        if token == HOG_TOKEN and self._options.memory_bytes:  # only where a limit protects the other processes
            hoard = []
            while True:
                hoard.append(bytearray(HOG_BYTES))
        if token == FAIL_TOKEN:
            del self._active[request_id]
            return [ErrorEvent(request_id, EngineError("A test asked this request to fail."))]
        events = next(echo.events)
        echo.sent += 1
        if isinstance(events[-1], FinishedEvent):
            del self._active[request_id]
        return events

    def _spoken(self, echo: _Echo) -> Iterator[list[EngineEvent]]:
        """A token in each step, as text, as sound, and for the next stage."""
        request_id, width, count = echo.request.request_id, self._options.row_width, self._options.samples_per_token
        if not echo.tokens:  # only the prompt was asked for
            yield [FinishedEvent(request_id, FinishReason.LENGTH, 0, 0)]
        final = False
        while not final:
            token, final = echo.tokens[echo.sent], echo.complete and echo.sent + 1 == len(echo.tokens)
            events: list[EngineEvent] = []
            if "text" in self._outputs:
                events.append(TextEvent(request_id, chr(token) if token < 0xD800 else "?", [token]))
            if self._sounds:
                samples = array.array("f", [(token % 256) / 256.0]) * count
                events.append(AudioEvent(request_id, HostTensor(DType.F32, (count,), samples.tobytes()), SAMPLE_RATE))
            if echo.request.streams and not self._options.sound:
                row = {"rows": HostTensor(DType.BF16, (1, width), _row(token, width))} if width else {}
                events.append(StreamEvent(request_id, [token], row, {}, echo.sent, final))
            if final:
                events.append(FinishedEvent(request_id, FinishReason.STOP, len(echo.tokens), len(echo.tokens)))
            yield events

    def _shown(self, request_id: str, pictures: deque[tuple[HostTensor, bool]]) -> Iterator[list[EngineEvent]]:
        """The pictures of latents, in each step one."""
        preview = True
        while preview:
            picture, preview = pictures.popleft()
            events: list[EngineEvent] = [ImageEvent(request_id, picture, preview)]
            if not preview:
                size = picture.shape[0] * picture.shape[1] // SCALE**2
                events.append(FinishedEvent(request_id, FinishReason.STOP, 1, size))
            yield events

    def counts(self) -> dict[str, int]:
        """Requests that have not ended."""
        return {"requests": len(self._active)}

    def shutdown(self) -> None:
        """Forget all requests. Raises `EngineError` if the options ask for a failure."""
        self._active.clear()
        if self._options.fail_shutdown:
            raise EngineError(self._options.fail_shutdown)


def _told(request: StageRequest) -> bytes:
    """What a stage with `speech` says first: voice, additional information; of a tensor its size and highest value."""
    told = ""
    for name, value in sorted({**request.information, **({"voice": request.voice} if request.voice else {})}.items()):
        if isinstance(value, HostTensor):
            value = f"{value.shape[0]}@{max(memoryview(value.data).cast('f')):.2f}"
        told += f"{name}={value} "
    return told.encode()


def _row(token: int, width: int) -> bytes:
    return bytes([token % 256]) * (2 * width)


def _check_row(row: HostTensor | None, token: int) -> None:
    if row is not None and row.data != _row(token, row.shape[1]):
        raise InvalidPayload(f"The row of token {token} does not hold it.")
