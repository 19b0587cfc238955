"""The interface of a stage's engine, between the actor (sockets, requests) and the models (vLLM, torch).

Nothing here imports torch or vLLM; tensors cross as `HostTensor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from omni_actors.config import StageConfig
from omni_actors.errors import EngineError, InvalidRequest, OmniError
from omni_actors.protocol.fields import HostTensor, Scalar
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import EngineFacts as EngineFacts  # what `StageEngine.facts` returns
from omni_actors.protocol.payloads import (
    InformationValue,
    PositionLogprobs,
    Prompt,
    PromptPosition,
    StageParams,
    ToolCallPiece,
    WordTime,
)
from omni_actors.telemetry.metrics import Metric


class StageRequest(Struct, frozen=True):
    """A request as a stage knows it before any input has come.

    Args:
        params: the stage's defaults with the request's own values over them.
        seed: seed of this request; `params.seed` wins where it is set.
        priority: of requests that wait for a place in the engine, those with a lower value go first.
        streams: whether a later stage takes this stage's rows or tokens (false for text-only requests, and for a later
            stage that takes the text).
        information: additional information of the client, by name: scalars, lists and tensors. Only names that the
            engine (`EngineFacts.wants_information`) or the input processor wants.
    """

    request_id: str
    params: StageParams
    seed: int
    voice: str | None = None
    priority: int = 0
    streams: bool = True
    information: Mapping[str, InformationValue] = {}

    @property
    def effective_seed(self) -> int:
        """The seed to sample with."""
        return self.params.seed if self.params.seed is not None else self.seed


class StageInputs(Struct, frozen=True):
    """The input with which a request starts in an engine.

    `prompt` is set for the entry stage, whose `tensors` hold the prompt's embeddings, if it has any (`PROMPT_EMBEDS`),
    and for a stage whose prompt is another's text. Other stages get `token_ids`, `tensors`, `scalars` and `lists` from
    their input processor.
    `complete` says that no `extend` will follow. `in_parts`: the prompt is the beginning of a text whose rest
    `extend_text` brings, or could have brought.
    """

    token_ids: Sequence[int] = ()
    tensors: Mapping[str, HostTensor] = {}
    scalars: Mapping[str, Scalar] = {}
    prompt: Prompt | None = None
    media: Sequence[HostTensor] = ()  # one per prompt.media, in order
    complete: bool = True
    in_parts: bool = False
    lists: Mapping[str, Sequence[Scalar]] = {}


class TextEvent(Struct, frozen=True):
    """More text of a request whose stage has `text` among its outputs, and pieces of the tool calls in it.

    `logprobs` has an entry for each token if the request asks for them, `prompt_logprobs` the next positions of the
    prompt, from the second on.
    """

    request_id: str
    text: str
    token_ids: Sequence[int]
    tool_calls: tuple[ToolCallPiece, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptPosition, ...] = ()


class AudioEvent(Struct, frozen=True):
    """The next samples: f32 [samples] at `sample_rate` Hz.

    They go to the client, or, where the stage has no `audio` among its outputs, to the stages after it.
    """

    request_id: str
    samples: HostTensor
    sample_rate: int


class ImageEvent(Struct, frozen=True):
    """A whole picture: u8 [height, width, channels], 3 channels for RGB or 4 for RGBA.

    It goes to the client, if the stage has `image` among its outputs, and to the stages after it. A `preview` shows a
    picture that is not done; it goes to the client alone.
    """

    request_id: str
    pixels: HostTensor
    preview: bool = False


class VideoEvent(Struct, frozen=True):
    """The next frames of a video, for the client: u8 [frames, height, width, 3].

    A video's sound comes before its frames, and the same video is always cut in the same way.
    """

    request_id: str
    frames: HostTensor
    frames_per_second: float


class LatentsEvent(Struct, frozen=True):
    """Latents of the request's picture: finite floating-point numbers of any shape.

    They go to the client, if the stage has `latents` among its outputs, and to the stages after it. Those of a
    `preview` go to the latter alone, and are followed by others; the rest are the request's last.
    """

    request_id: str
    latents: HostTensor
    preview: bool = False


class WordsEvent(Struct, frozen=True):
    """All words of what is said, in order, with their times, for the client."""

    request_id: str
    words: tuple[WordTime, ...]


class ProgressEvent(Struct, frozen=True):
    """`step` of `steps` are done, for the client. A request's steps rise."""

    request_id: str
    step: int
    steps: int


class StreamEvent(Struct, frozen=True):
    """Output for the next stage. `start` is the position of the first row or token; `final` ends the stream.

    `generated` counts the tokens that were generated for it, as in `FinishedEvent.output_tokens`; by default each of
    `token_ids` is one.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    tensors: Mapping[str, HostTensor] = {}
    scalars: Mapping[str, Scalar] = {}
    start: int = 0
    final: bool = False
    lists: Mapping[str, Sequence[Scalar]] = {}
    generated: int | None = None


class FinishedEvent(Struct, frozen=True):
    """The engine is done with the request; nothing follows.

    Args:
        stop_reason: the stop string, or the stop token other than the model's own end, that ended a text.
        picture_tokens: of the input tokens, those that stand for pictures, as far as the engine tells them apart.
        language: of what was heard, as the model names it; "" if it does not.
    """

    request_id: str
    reason: FinishReason
    input_tokens: int
    output_tokens: int
    stop_reason: int | str | None = None
    picture_tokens: int = 0
    language: str = ""


class ErrorEvent(Struct, frozen=True):
    """The request failed in the engine and is gone from it."""

    request_id: str
    error: OmniError


OutputEvent = TextEvent | AudioEvent | ImageEvent | VideoEvent | LatentsEvent | WordsEvent | ProgressEvent | StreamEvent
EngineEvent = OutputEvent | FinishedEvent | ErrorEvent


class EngineLost(EngineError):
    """The device is in an undefined state; only a new process can continue."""

    default_hint = "The stage restarts by itself; see its log for the device error."


def preview_steps(steps: int, previews: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which a picture of `steps` steps is shown `previews` times.

    They are spread evenly. The last step is not among them, so there may be fewer than asked for.
    """
    return frozenset(round(number * steps / (previews + 1)) for number in range(1, previews + 1)) - {0, steps}


class StageEngine(ABC):
    """Computes one stage. Single-threaded: all calls come from the stage's main thread.

    The YAML names your own engine (`kind: custom`, `engine_class: module.Class`). `Class(pipeline, stage)` makes it
    from the checked configuration and raises `ConfigError` for options that it does not know.

    `start` and `extend` raise `OmniError` for a bad request and keep nothing of it. `step` raises only when the whole
    engine is lost; for a single request it reports an `ErrorEvent`.
    """

    wake: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def check_options(cls, stage: StageConfig) -> bool:
        """Check the stage's `engine` mapping without making an engine; `omni-actors check` calls this.

        Returns:
            Whether the options were checked.

        Raises:
            ConfigError: an option is unknown or wrong; the message has its dotted path.
        """
        return False

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""

    def warm_up(self) -> None:  # noqa: B027 - not every engine has something to warm up
        """Do what would delay the first requests; called once after the engine of a model was made.

        Raises `EngineError` if it fails, as all requests would.
        """

    @abstractmethod
    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Start a request. Raises `OmniError` for input that this model cannot take."""

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """Append streamed input of a started request: tokens or rows, whichever the stage takes; by default neither.

        Rows are a tensor [n, width], or the next one of those that the stage before streams, such as latents.
        `complete` says that no more follows. Raises `OmniError`, also for rows where it takes tokens and vice versa.
        """
        if rows is not None or token_ids or not complete:
            raise InvalidRequest(f"Request {request_id!r} got more input; this stage takes it as a whole.")

    def extend_text(self, request_id: str, text: str, *, complete: bool) -> None:
        """Append text to the prompt of a started request, of an engine whose facts say `text_in_parts`.

        Raises `OmniError`.
        """
        raise InvalidRequest("This stage takes no text in parts.")

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request and free all it holds. Idempotent; unknown ids are ignored."""

    @abstractmethod
    def runnable(self) -> bool:
        """Whether `step` would do something now. If not, the loop sleeps until the next input."""

    def busy(self) -> bool:
        """Whether work goes on outside `step`, after which the engine is runnable without further input."""
        return False

    def on_progress(self, wake: Callable[[], None]) -> None:
        """Take a function that ends the loop's sleep, for work outside `step`: `wake`. Any thread may call it."""
        self.wake = wake

    def waits_for_input(self, request_id: str) -> bool:
        """Whether a started request goes on only when `extend` brings more of its input."""
        return False

    @abstractmethod
    def step(self) -> Sequence[EngineEvent]:
        """Do one step of work for all requests that can go on."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """What the engine holds now, by name; all zero when it is idle, which leak checks rely on."""

    def take_scheduled(self) -> Sequence[tuple[str, float]] | None:
        """Return requests first scheduled since the last call, with the time (monotonic clock, seconds).

        `None`: this engine works on every request in every step.
        """
        return None

    def statistics(self) -> Mapping[Metric, float]:
        """Return values of metrics of a replica, once per heartbeat interval; counters since the engine was made."""
        return {}

    def over_budget(self) -> bool:
        """Whether the requests, admitted or not, hold more than the stage's budget; more input should then wait."""
        return False

    def device_bytes(self) -> int:
        """Bytes of device memory that the engine's allocator has reserved; 0 without a device."""
        return 0

    @property
    def ends_with_process(self) -> bool:
        """Whether the end of its process frees all that it holds; `shutdown` is then not called before that end."""
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything. The engine is not used afterwards."""
