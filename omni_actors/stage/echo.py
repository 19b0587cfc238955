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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy
import psutil
from msgspec import Meta, Struct
from numpy.typing import NDArray

from omni_actors.config import StageConfig, check_parameters
from omni_actors.config.loading import explain
from omni_actors.errors import ConfigError, EngineError, InvalidPayload, InvalidRequest, PromptTooLong
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


class Drawing:
    """One request for a picture.

    Args:
        media: reference pictures, which change the colours.
        outputs: what to make of the latents: `image`, `latents` or both, or `video`, perhaps with `audio`.

    Raises:
        InvalidRequest: a parameter is not what an echo stage takes.
    """

    def __init__(
        self,
        stage: str,
        request: StageRequest,
        tokens: Sequence[int],
        media: Sequence[HostTensor],
        outputs: Collection[str],
    ) -> None:
        params = request.params
        extra = params.extra_args or {}
        check_parameters(stage, VIDEO_PARAMETERS if "video" in outputs else PARAMETERS, params)
        self._request_id = request.request_id
        self._outputs = outputs
        self._steps = params.num_steps or STEPS
        self._step = 0
        self._preview_steps = preview_steps(self._steps, params.previews or 0)
        self._opaque = extra.get("background") != TRANSPARENT
        self._seconds = float(extra.get("seconds", 1))
        shape = (CHANNELS, (params.height or SIZE) // SCALE, (params.width or SIZE) // SCALE)
        self.size = shape[1] * shape[2]
        about = (params.guidance_scale, params.negative_prompt, request.effective_seed, extra.get("mask"))
        source = zlib.crc32(pack_token_ids(tokens), zlib.crc32(msgspec.json.encode(about)))
        for picture in media:
            source = zlib.crc32(picture.data, source)
        generator = numpy.random.default_rng(source)
        self._noise = generator.uniform(-1, 1, shape).astype(numpy.float32)
        self._pattern = _pattern(generator, shape)

    @property
    def done(self) -> bool:
        """Whether the picture is complete."""
        return self._step == self._steps

    def advance(self) -> list[EngineEvent]:
        """Do the next step."""
        self._step += 1
        events: list[EngineEvent] = [ProgressEvent(self._request_id, self._step, self._steps)]
        if self.done or self._step in self._preview_steps:
            part = numpy.float32(self._step / self._steps)
            latents = part * self._pattern + (1 - part) * self._noise
            if self._opaque:
                latents[3] = 1
            tensor = HostTensor(DType.F32, latents.shape, latents.tobytes())
            preview = not self.done
            if "image" in self._outputs:
                events.append(ImageEvent(self._request_id, decoded(tensor), preview))
            if "latents" in self._outputs:
                events.append(LatentsEvent(self._request_id, tensor, preview))
            if "video" in self._outputs and not preview:
                events += self._video(decoded(tensor))
        return events

    def _video(self, picture: HostTensor) -> list[EngineEvent]:
        """A picture that moves to the right, in two parts, after its tone."""
        pixels = numpy.frombuffer(picture.data, numpy.uint8).reshape(picture.shape)
        count = round(self._seconds * VIDEO_RATE) + 1
        frames = numpy.stack([numpy.roll(pixels, index, axis=1) for index in range(count)])
        parts = [part for part in numpy.array_split(frames, 2) if len(part)]
        tone = numpy.sin(numpy.arange(SAMPLE_RATE * count // VIDEO_RATE, dtype=numpy.float32) / 8) / 4
        sound = AudioEvent(self._request_id, HostTensor(DType.F32, tone.shape, tone.tobytes()), SAMPLE_RATE)
        return [
            *([sound] if "audio" in self._outputs else []),
            *(
                VideoEvent(self._request_id, HostTensor(DType.U8, one.shape, one.tobytes()), VIDEO_RATE)
                for one in parts
            ),
        ]


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


def preview_steps(steps: int, previews: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which a picture of `steps` steps is shown `previews` times.

    They are spread evenly. The last step is not among them, so there may be fewer than asked for.
    """
    places = (round(number * steps / (previews + 1)) for number in range(1, previews + 1))
    return frozenset(place for place in places if 0 < place < steps)


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

    @classmethod
    def of(cls, stage: StageConfig) -> EchoOptions:
        """Read a stage's options. Raises `ConfigError` for an unknown one or a wrong type."""
        where = f"stages.{stage.name}.engine"
        try:
            return msgspec.convert(stage.engine, cls, strict=True)
        except msgspec.ValidationError as error:
            place, problem = explain(error, cls)
            raise ConfigError(f"{'.'.join(map(str, (where, *place)))}: {problem}") from error


@dataclass
class _Echo:
    """A request. `drawing` is the picture that it makes of tokens, `pictures` are those that it has from latents."""

    request: StageRequest
    tokens: list[int]
    sent: int = 0
    complete: bool = True  # no more text comes
    drawing: Drawing | None = None
    pictures: deque[tuple[HostTensor, bool]] | None = None  # with whether they are previews

    @property
    def waits(self) -> bool:
        """Whether it needs more latents, or more text: the last character is the one that ends it."""
        if self.pictures is not None:
            return not self.pictures
        return not self.complete and self.sent + 1 >= len(self.tokens)


class EchoEngine(StageEngine):
    """The engine that this module describes."""

    def __init__(self, stage: StageConfig) -> None:
        self._options = EchoOptions.of(stage)
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
        EchoOptions.of(stage)
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
        if (latents := inputs.tensors.get(LATENTS)) is not None:
            check_parameters(self._name, self.facts.parameters, request.params)
            waiting = deque([(decoded(latents), not inputs.complete)])
            self._active[request.request_id] = _Echo(request, [0], pictures=waiting)
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
        drawing = None
        if self._draws:
            drawing = Drawing(self._name, request, tokens, inputs.media, {*self._draws, *self._outputs})
        self._active[request.request_id] = _Echo(request, tokens, complete=inputs.complete, drawing=drawing)

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
        if not echo.tokens:  # only the prompt was asked for
            del self._active[request_id]
            return [FinishedEvent(request_id, FinishReason.LENGTH, 0, 0)]
        token = echo.tokens[echo.sent % len(echo.tokens)]
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
        if echo.drawing is not None:
            return self._draw(echo, echo.drawing)
        if echo.pictures is not None:
            picture, preview = echo.pictures.popleft()
            shown: list[EngineEvent] = [ImageEvent(request_id, picture, preview)]
            return shown if preview else shown + self._drawn(echo, picture.shape[0] * picture.shape[1] // SCALE**2)
        final = echo.complete and echo.sent + 1 == len(echo.tokens)
        events: list[EngineEvent] = []
        if "text" in self._outputs:
            events.append(TextEvent(request_id, chr(token) if token < 0xD800 else "?", [token]))
        if self._sounds:
            count = self._options.samples_per_token
            samples = array.array("f", [(token % 256) / 256.0]) * count
            events.append(AudioEvent(request_id, HostTensor(DType.F32, (count,), samples.tobytes()), SAMPLE_RATE))
        if echo.request.streams and not self._options.sound:
            width = self._options.row_width
            row = {"rows": HostTensor(DType.BF16, (1, width), _row(token, width))} if width else {}
            events.append(StreamEvent(request_id, [token], row, {}, echo.sent, final))
        echo.sent += 1
        if final:
            del self._active[request_id]
            events.append(FinishedEvent(request_id, FinishReason.STOP, len(echo.tokens), len(echo.tokens)))
        return events

    def _draw(self, echo: _Echo, drawing: Drawing) -> list[EngineEvent]:
        """Do a step of a picture."""
        echo.sent += 1
        events = drawing.advance()
        return events + self._drawn(echo, drawing.size) if drawing.done else events

    def _drawn(self, echo: _Echo, size: int) -> list[EngineEvent]:
        request_id = echo.request.request_id
        del self._active[request_id]
        return [FinishedEvent(request_id, FinishReason.STOP, len(echo.tokens), size)]

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
