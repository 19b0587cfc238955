"""The answer to a request: text, audio and pictures in order, then usage by stage or a typed error."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy
from numpy.typing import NDArray

from omni_actors.errors import OmniError
from omni_actors.protocol.fields import HostTensor, Scalar, TensorRef, unpack_token_ids
from omni_actors.protocol.messages import (
    AudioChunk,
    Done,
    ImageChunk,
    LatentsChunk,
    Output,
    StageUsage,
    StepsDone,
    TextDelta,
    VideoChunk,
    WordsChunk,
)
from omni_actors.protocol.payloads import (
    CollectedCalls,
    PositionLogprobs,
    PromptPosition,
    ToolCall,
    ToolCallPiece,
    WordTime,
)


class Text(msgspec.Struct, frozen=True):
    """The next piece of text with the thinker's `token_ids`. The text is empty if they end inside a character.

    `tool_calls` are the next pieces of calls of tools, which are not part of the text. `logprobs` has an entry for each
    token if the request asks for them, and `prompt_logprobs` the next positions of the prompt, from the second on.
    """

    text: str
    token_ids: list[int]
    tool_calls: tuple[ToolCallPiece, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptPosition, ...] = ()


class Audio(msgspec.Struct, frozen=True):
    """The next piece of audio: f32 [samples] in [-1, 1] at `sample_rate` Hz."""

    samples: NDArray[numpy.float32]
    sample_rate: int


class Image(msgspec.Struct, frozen=True):
    """A whole picture: u8 [height, width, channels], 3 channels for RGB or 4 for RGBA.

    A `preview` shows how far it is; the picture itself follows.
    """

    pixels: NDArray[numpy.uint8]
    preview: bool = False


class Video(msgspec.Struct, frozen=True):
    """The next frames of a video: u8 [frames, height, width, 3]. The sound that goes with it has come before."""

    frames: NDArray[numpy.uint8]
    frames_per_second: float


class Latents(msgspec.Struct, frozen=True):
    """The latents of a picture, as its model makes them."""

    tensor: HostTensor


class WordTimes(msgspec.Struct, frozen=True):
    """All words of what is said, in order, and when they are."""

    words: tuple[WordTime, ...]


class Progress(msgspec.Struct, frozen=True):
    """`step` of `steps` are done in a stage. Within a stage the steps of a request rise."""

    stage: str
    step: int
    steps: int


StreamItem = Text | Audio | Image | Video | Latents | WordTimes | Progress


class CollectedItems:
    """The items of one answer.

    Attributes:
        output: the answer so far, but for what `joined` adds.
    """

    def __init__(self, request_id: str) -> None:
        self.output = OmniRequestOutput(request_id)
        self._texts: list[str] = []
        self._pieces: list[NDArray[numpy.float32]] = []
        self._frames: list[NDArray[numpy.uint8]] = []
        self._calls = CollectedCalls()

    def add(self, item: StreamItem) -> None:
        """Add the next item; previews and progress leave nothing behind."""
        output = self.output
        match item:
            case Text():
                self._texts.append(item.text)
                self._calls.add(item.tool_calls)
                output.token_ids.extend(item.token_ids)
                output.logprobs.extend(item.logprobs)
                output.prompt_logprobs.extend(item.prompt_logprobs)
            case Audio():
                self._pieces.append(item.samples)
                output.sample_rate = item.sample_rate
            case Image(preview=False):
                output.images.append(item.pixels)
            case Video():
                self._frames.append(item.frames)
                output.frames_per_second = item.frames_per_second
            case Latents():
                output.latents.append(item.tensor)
            case WordTimes():
                output.words = item.words
            case Image() | Progress():
                pass

    def joined(self) -> OmniRequestOutput:
        """The answer, with its pieces joined."""
        output = self.output
        output.text = "".join(self._texts)
        output.tool_calls = self._calls.whole()
        if self._pieces:
            output.audio = numpy.concatenate(self._pieces)
        if self._frames:
            output.video = numpy.concatenate(self._frames)
        return output


class RequestStream:
    """The answer to one request: iterate for its `StreamItem`s in order, then read `usage`.

    Iteration raises the `OmniError` with which the request failed. As an async context manager it ends the request, if
    that has not ended by then.
    """

    def __init__(
        self, request_id: str, abort: Callable[[str], None], add_text: Callable[[str, str, bool], None]
    ) -> None:
        self.request_id = request_id
        self._add_text = add_text
        self.usage: dict[str, StageUsage] = {}
        self._abort = abort
        self._items: asyncio.Queue[StreamItem | Done | OmniError] = asyncio.Queue()
        self._ended = False
        self.on_delivery: Callable[[], None] | None = None  # is called for each item that arrives

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()

    def __aiter__(self) -> AsyncIterator[StreamItem]:
        return self

    async def __anext__(self) -> StreamItem:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, StreamItem):
            return item
        self._ended = True
        if isinstance(item, OmniError):
            raise item
        self.usage = item.usage
        raise StopAsyncIteration

    @property
    def unread(self) -> int:
        """Items, and the end, that have arrived and were not read."""
        return self._items.qsize()

    async def abort(self) -> None:
        """End the request in all stages. Idempotent. Iteration then raises `Aborted`, unless it was over already."""
        if not self._ended:
            self._abort(self.request_id)

    async def append_text(self, text: str) -> None:
        """Send what follows in the text of a request with `more_text`. Does nothing once the answer has ended.

        Raises:
            InvalidRequest: the text is complete, or gets longer than 100,000 characters.
        """
        if not self._ended:
            self._add_text(self.request_id, text, False)

    async def end_text(self) -> None:
        """Say that the text of a request with `more_text` is complete. Raises `InvalidRequest` if it was before."""
        if not self._ended:
            self._add_text(self.request_id, "", True)

    async def result(self) -> OmniRequestOutput:
        """Wait for the answer, or for what was not read of it before. Raises the `OmniError` with which it failed."""
        collected = CollectedItems(self.request_id)
        async for item in self:
            collected.add(item)
        output = collected.joined()
        output.usage = self.usage
        output.finish_reasons = {stage: usage.finish_reason.value for stage, usage in self.usage.items()}
        return output

    def deliver(self, item: StreamItem | Done | OmniError) -> None:
        """Append an item. The client calls this for each message of the request."""
        self._items.put_nowait(item)
        if self.on_delivery is not None:
            self.on_delivery()


def item_of(body: Output, tensor: Callable[[TensorRef], HostTensor]) -> StreamItem:
    """Make the item of a message; `tensor` finds a tensor's data in it. The item keeps its own copy."""
    match body:
        case TextDelta():
            token_ids = unpack_token_ids(body.token_ids)
            return Text(body.text, token_ids, body.tool_calls, body.logprobs, body.prompt_logprobs)
        case AudioChunk():
            samples = numpy.frombuffer(tensor(body.samples).data, "<f4").astype(numpy.float32)
            return Audio(samples, body.sample_rate)
        case ImageChunk():
            pixels = numpy.frombuffer(tensor(body.pixels).data, numpy.uint8).reshape(body.pixels.shape)
            return Image(pixels.copy(), body.preview)
        case VideoChunk():
            frames = numpy.frombuffer(tensor(body.frames).data, numpy.uint8).reshape(body.frames.shape)
            return Video(frames.copy(), body.frames_per_second)
        case LatentsChunk():
            latents = tensor(body.latents)
            return Latents(latents._replace(data=bytes(latents.data)))
        case WordsChunk():
            return WordTimes(body.words)
        case StepsDone():
            return Progress(body.stage, body.step, body.steps)


class OmniTokensPrompt(TypedDict, total=False):
    """A tokenised prompt. An unknown key is an error that names the nearest known one.

    Args:
        prompt_token_ids: the tokens, with one placeholder for each medium.
        multi_modal_data: by modality ("audio", "image", "video") one medium or a list of them, in the forms that
            `AsyncOmniClient.submit` takes.
        mm_processor_kwargs: `{"use_audio_in_video": True}` makes the audios the sound tracks of the videos, in order.
        prompt_embeds: an array [positions, width] that stands in for the tokens' embeddings. Without
            `prompt_token_ids`, sampling that looks at the prompt's tokens (`repetition_penalty`) sees none.
        additional_information: values by name for the stages that want them.
        tensors: for `StageLLM` only: tensors of a single stage's input by name, such as the talker's "prompt_rows".
        scalars: for `StageLLM` only, likewise.
        lists: for `StageLLM` only, likewise.
    """

    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    prompt_embeds: Any
    additional_information: Mapping[str, Any]
    tensors: Mapping[str, HostTensor]
    scalars: Mapping[str, Scalar]
    lists: Mapping[str, Sequence[Scalar]]


@dataclass(slots=True)
class OmniRequestOutput:
    """The whole result of one request.

    Args:
        text: the answer, without special tokens.
        token_ids: tokens of the text, or of the only stage that ran.
        audio: f32 [samples] in [-1, 1] at `sample_rate` Hz; `None` if there is none.
        images: pictures, each u8 [height, width, 3 or 4], without previews.
        latents: those of the pictures.
        video: u8 [frames, height, width, 3] at `frames_per_second`; `None` if there is none.
        words: those of what is said, with their times.
        finish_reasons: stage name -> "stop" or "length".
        usage: stage name -> counts and times.
        tensors: tensors that a single stage streamed, by name, joined along the first dimension.
        tool_calls: calls of tools, with the JSON of their arguments.
        logprobs: of each token of the text, if `logprobs` is among the parameters of its stage.
        prompt_logprobs: of each token of the prompt but the first, if `prompt_logprobs` is.
        error: why the request failed, in calls that answer many prompts at once; other calls raise it.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    audio: NDArray[numpy.float32] | None = None
    sample_rate: int = 0
    finish_reasons: dict[str, str] = field(default_factory=dict)
    usage: dict[str, StageUsage] = field(default_factory=dict)
    tensors: dict[str, HostTensor] = field(default_factory=dict)
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptPosition] = field(default_factory=list)
    error: OmniError | None = None
    images: list[NDArray[numpy.uint8]] = field(default_factory=list)
    latents: list[HostTensor] = field(default_factory=list)
    video: NDArray[numpy.uint8] | None = None
    frames_per_second: float = 0.0
    words: tuple[WordTime, ...] = ()


class ChoiceItem(NamedTuple):
    """The next item of one answer; the item is `None` once the answer is complete."""

    choice: int
    item: StreamItem | None


class ChoiceStreams:
    """The answers to one prompt: iterate for `ChoiceItem`s in the order in which they arrive, then read `usages`.

    Iteration raises the `OmniError` of the first answer that fails; the others then end, too.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = tuple(streams)
        self._left = len(streams)  # answers that are not complete
        self._arrived: asyncio.Queue[int] = asyncio.Queue()  # the answer of each item that was not read yet
        for choice, stream in enumerate(streams):
            for _ in range(stream.unread):
                self._arrived.put_nowait(choice)
            stream.on_delivery = functools.partial(self._arrived.put_nowait, choice)

    def __aiter__(self) -> AsyncIterator[ChoiceItem]:
        return self

    async def __anext__(self) -> ChoiceItem:
        if not self._left:
            raise StopAsyncIteration
        choice = await self._arrived.get()
        try:
            return ChoiceItem(choice, await anext(self.streams[choice]))
        except StopAsyncIteration:
            self._left -= 1
            return ChoiceItem(choice, None)
        except OmniError:
            self._left = 0
            await self.abort()
            raise

    @property
    def ready(self) -> bool:
        """Whether the next step of the iteration need not wait."""
        return not self._left or not self._arrived.empty()

    @property
    def usages(self) -> list[dict[str, StageUsage]]:
        """The usage of each answer by stage; complete once the iteration has ended."""
        return [stream.usage for stream in self.streams]

    async def abort(self) -> None:
        """End those answers in all stages that have not ended. Idempotent."""
        for stream in self.streams:
            await stream.abort()

    async def results(self) -> list[OmniRequestOutput]:
        """Wait for all answers. Raises the `OmniError` of the first one that fails; the others then end, too."""
        waiting = [asyncio.ensure_future(stream.result()) for stream in self.streams]
        try:
            return await asyncio.gather(*waiting)
        except BaseException:  # a cancelled task's, too: the other answers must not go on unread
            await self.abort()
            await asyncio.gather(*waiting, return_exceptions=True)
            raise
