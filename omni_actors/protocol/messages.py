"""All messages, by channel: client, control, nodes, data between stages, results.

An agent's headers have no stage; `replica` is the node's rank. A `process` is a replica with the epoch that its process
was started with (`spawn_epoch`), under which it may register again and again.
"""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from omni_actors.errors import ERROR_CLASSES, ErrorCode, InvalidPayload, OmniError
from omni_actors.protocol.fields import (
    FLOATING,
    TOKEN_BYTES,
    TRACEPARENT,
    Attempt,
    Body,
    Count,
    DType,
    Endpoint,
    EndpointOrEmpty,
    Label,
    Moment,
    Name,
    Priority,
    ReplicaId,
    ReplicaIndex,
    RequestId,
    Seed,
    StageNameOrEmpty,
    Steps,
    TensorRef,
    TokenId,
    check_form,
    check_token_ids,
)
from omni_actors.protocol.payloads import (
    MAX_CALLS,
    NO_INFORMATION,
    AdditionalInformationPayload,
    EngineFacts,
    FrameRate,
    HearingAbility,
    Parameter,
    PositionLogprobs,
    Prompt,
    PromptEmbedsPayload,
    PromptPosition,
    SpeechAbility,
    StageParams,
    ToolCallPiece,
    WordTime,
)

MAX_MESSAGE, MAX_HINT, MAX_FIELD = 8192, 2048, 256  # characters


class Credit(Body, tag="credit", frozen=True):
    """Receiver -> sender of an edge: you may send this much more. Credit itself costs no credit.

    A sender starts with the window of the configuration (`flow`). `bytes` are of frames, without arena blocks.
    `released` are the tickets of arena blocks that the receiver no longer needs. `mapped` says that it can read the
    sender's arena, so that blocks may be sent to it.
    """

    messages: Count = 0
    bytes: Count = 0
    released: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()
    mapped: bool = False


MAX_TEXT_IN_PARTS = 100_000  # characters of a request


class MoreText(Body, tag="more_text", frozen=True):
    """Client -> coordinator -> entry stage: the text of a prompt goes on.

    Attributes:
        start: characters before `text`. A receiver drops what it already has.
        final: nothing follows.
    """

    text: Annotated[str, Meta(max_length=MAX_TEXT_IN_PARTS)] = ""
    start: Count = 0
    final: bool = False


class Abort(Body, tag="abort", frozen=True):
    """Client -> coordinator, coordinator -> stage: end the request named in the header. Idempotent."""


class Failed(Body, tag="failed", frozen=True):
    """Stage -> coordinator -> client, terminal: the request ended with an error.

    `retry_after` is in seconds; `field` names the field of the request that is wrong.
    """

    code: ErrorCode
    message: Annotated[str, Meta(max_length=MAX_MESSAGE)]
    hint: Annotated[str, Meta(max_length=MAX_HINT)] = ""
    stage: str | None = None
    retryable: bool = False
    retry_after: float | None = None
    field: Annotated[str, Meta(max_length=MAX_FIELD)] | None = None

    @classmethod
    def from_error(cls, error: OmniError, stage: str | None = None) -> Failed:
        """Describe an error; `stage` is used if the error names none. Long texts are cut."""
        return cls(
            code=error.code,
            message=error.message[:MAX_MESSAGE],
            hint=error.hint[:MAX_HINT],
            stage=error.stage or stage,
            retryable=error.retryable,
            retry_after=error.retry_after,
            field=error.field[:MAX_FIELD] if error.field is not None else None,
        )

    def to_error(self) -> OmniError:
        """Return the typed exception that this message stands for."""
        return ERROR_CLASSES[self.code](
            self.message, hint=self.hint, stage=self.stage, retry_after=self.retry_after, field=self.field
        )


class TransferTimeline(Struct, array_like=True):
    """What one replica (`source`, as "thinker/0") sent about one request to the one that reports it; grows with it.

    `bytes` are payload: tensors, token ids, text. The moments of sending are by the source's clock.
    """

    source: Annotated[str, Meta(max_length=80)]
    messages: Count = 0
    bytes: Count = 0
    first_sent: Moment = 0.0
    first_received: Moment = 0.0
    last_sent: Moment = 0.0
    last_received: Moment = 0.0

    def add(self, sent: float, received: float, size: int) -> None:
        """Count a message of `size` bytes; `sent` is 0 if its sender did not say when."""
        self.messages += 1
        self.bytes += size
        if sent:
            if not self.first_sent:
                self.first_sent, self.first_received = sent, received
            self.last_sent, self.last_received = sent, received


class StageTimeline(Struct, omit_defaults=True):
    """The moments of one attempt at a request in one replica, by its clock; 0 for what did not happen."""

    stage: StageNameOrEmpty
    replica: ReplicaIndex = 0
    epoch: Count = 0
    attempt: Attempt = 0
    outcome: Annotated[str, Meta(max_length=64)] = "done"  # or an error code, or "dropped": ended by the coordinator
    expected: Moment = 0.0  # the announcement came
    first_input: Moment = 0.0
    started: Moment = 0.0  # handed to the engine
    first_step: Moment = 0.0  # the engine took it into a step
    first_output: Moment = 0.0
    last_output: Moment = 0.0
    ended: Moment = 0.0
    input_tokens: Count = 0
    output_tokens: Count = 0
    transfers: Annotated[list[TransferTimeline], Meta(max_length=64)] = []


def transfer_from(transfers: list[TransferTimeline], source: str) -> TransferTimeline:
    """The transfer from a replica, added to `transfers` if it is not among them yet."""
    for transfer in transfers:
        if transfer.source == source:
            return transfer
    transfers.append(TransferTimeline(source))
    return transfers[-1]


class TimelineEvent(Struct, frozen=True, array_like=True):
    """Something that happened to the request as a whole."""

    name: Annotated[str, Meta(max_length=64)]
    time: Moment
    detail: Annotated[str, Meta(max_length=1024)] = ""


class RequestTimeline(Struct):
    """A request as the coordinator sees it, with what the stages reported.

    `outcome` is "running", "done" or an error code. `events` are `submitted`, `admitted`, `bound` for each attempt,
    `replayed`, `first_text`, `first_audio`, `first_image` and `ended`, by the coordinator's clock. `deliveries` are
    what stages sent for the client.
    """

    request_id: str
    trace_id: str
    outcome: str = "running"
    attempt: int = 0
    events: list[TimelineEvent] = []
    stages: list[StageTimeline] = []
    deliveries: list[TransferTimeline] = []


class Sample(Struct, frozen=True, array_like=True):
    """The value of one series of a metric in `telemetry/metrics.py`; `labels` are the values of its labels."""

    name: Name
    labels: Annotated[tuple[Label, ...], Meta(max_length=8)]
    value: float


class HistogramSample(Struct, frozen=True, array_like=True):
    """One series of a histogram: observations per bucket (not cumulated; the last is +Inf) and their sum."""

    name: Name
    labels: Annotated[tuple[Label, ...], Meta(max_length=8)]
    counts: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=64)]
    total: float


class EndedWork(Struct, frozen=True, array_like=True):
    """A stage's part of a request that did not end with `StageDone`: failed or aborted here."""

    request_id: RequestId
    timeline: StageTimeline


class Snapshot(Body, tag="snapshot", frozen=True):
    """Stage or HTTP server -> coordinator, about once a second: its metrics, counted since its session began.

    Only stages have `ended` work.
    """

    samples: Annotated[tuple[Sample, ...], Meta(max_length=4096)]
    histograms: Annotated[tuple[HistogramSample, ...], Meta(max_length=1024)] = ()
    ended: Annotated[tuple[EndedWork, ...], Meta(max_length=256)] = ()


ROWS = "rows"  # name of the streamed embeddings among an engine's tensors
SAMPLES = "samples"  # name of sound, f32 [samples], on its way from a stage to a later one
SAMPLE_RATE = "sample_rate"  # the scalar that goes with it, in Hz
PIXELS = "pixels"  # name of a picture, u8 [height, width, 3 or 4], on its way from a stage to a later one
TEXT = "text"  # the scalar with a piece of text, on its way from a stage to a later one
UNHEARD = "unheard"  # the scalar with the number of tokens, from the first, whose sound is not to be heard
LATENTS = "latents"  # the same of latents; those before a request's last are previews
PICTURE = "picture_"  # begin of the names of tensors with the pixels of pictures, u8 [height, width, 4]
MAX_ENDED = 4096
MAX_HELD = 4096


class OpenRequest(Body, tag="open_request", frozen=True):
    """Coordinator -> every stage of the route: a request will come.

    The entry stage receives its `prompt` here, and every stage the `information` that it wants. `more_text` is that of
    `Submit`.
    """

    route: Annotated[tuple[ReplicaId, ...], Meta(min_length=1, max_length=64)]
    params: StageParams
    seed: Seed
    voice: str | None = None
    priority: int = 0
    prompt: Prompt | None = None
    information: AdditionalInformationPayload = NO_INFORMATION
    more_text: bool | None = None

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        prompt = self.prompt.tensor_refs() if self.prompt is not None else ()
        return (*prompt, *self.information.tensor_refs())


class Chunk(Body, tag="chunk", frozen=True):
    """Stage -> next stage: the next piece of its input.

    Attributes:
        token_ids: int32 bytes.
        tensors: by name; `ROWS` are embeddings that stand in for the receiver's tokens.
        start: position of the first row or token in the sender's whole sequence. A receiver drops what it already has,
            since a preempted sender computes rows again.
        final: ends the stream.
    """

    token_ids: bytes = b""
    tensors: Annotated[dict[Name, TensorRef], Meta(max_length=256)] = {}
    information: AdditionalInformationPayload = NO_INFORMATION
    start: Count = 0
    final: bool = False

    def __post_init__(self) -> None:
        check_token_ids(self.token_ids)
        if ROWS in self.tensors:
            PromptEmbedsPayload(self.tensors[ROWS])  # checks their form

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        return (*self.tensors.values(), *self.information.tensor_refs())


class Delivered(Struct):
    """What a client has of an answer, as `protocol/delivery.py` counts it: all that it takes to go on after it.

    Attributes:
        counts: by kind, such as "tokens" and "samples".
        checksum: of the tokens.
        calls: characters of the arguments of each call of a tool.
        steps: of each stage that reports progress.
    """

    counts: Annotated[dict[Annotated[str, Meta(max_length=32)], Count], Meta(max_length=16)] = {}
    checksum: Count = 0
    calls: Annotated[dict[Count, Count], Meta(max_length=1024)] = {}
    steps: Annotated[dict[Name, Count], Meta(max_length=64)] = {}


class Resend(Body, tag="resend", frozen=True):
    """Coordinator -> stage: `receiver` starts again with `attempt`; send it everything again, then continue.

    Without a receiver this is about the results, for a coordinator after the one that had them: those that its client
    does not have, as `delivered` says. They are numbered from `first_seq`, and so cannot be confused with those that
    were on their way to the coordinator before. The header's attempt is the sending stage's own. A stage that no longer
    holds everything answers `Failed` with `stage_lost`, and then starts again itself.
    """

    receiver: ReplicaId | None = None
    attempt: Attempt = 0
    delivered: Delivered | None = None
    first_seq: Count = 0


class Ended(Body, tag="ended", frozen=True):
    """Coordinator -> stage: these requests are done; their output need no longer be kept for a `Resend`."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_ENDED)]


# A failing stage does not tell the stages after it: the coordinator aborts them, so that there is one way to end.
IntoStage = OpenRequest | MoreText | Chunk | Abort | Credit | Resend | Ended


CHANNELS = (3, 4)  # of a picture: RGB or RGBA


class TextDelta(Body, tag="text", frozen=True):
    """Stage -> coordinator -> client: more text. `text` is empty within a character; `token_ids` are int32 bytes.

    `tool_calls` are the pieces of calls that the tokens make, besides the text. `logprobs` has an entry for each token,
    or none at all. `prompt_logprobs` are the next positions of the prompt, from the second on.
    """

    modality: ClassVar[str] = "text"

    text: str
    token_ids: bytes = b""
    tool_calls: Annotated[tuple[ToolCallPiece, ...], Meta(max_length=MAX_CALLS)] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptPosition, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) * TOKEN_BYTES != len(self.token_ids):
            raise InvalidPayload(
                f"A text delta has {len(self.token_ids)} bytes of token ids, but log probabilities of "
                f"{len(self.logprobs)} tokens."
            )


class TensorChunk(Body, frozen=True):
    """Base of outputs that hold one tensor, in their first field."""

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """The reference to it."""
        return (getattr(self, self.__struct_fields__[0]),)


class AudioChunk(TensorChunk, tag="audio", frozen=True):
    """Stage -> coordinator -> client: the next samples, f32 [samples] in [-1, 1], at `sample_rate` Hz."""

    modality: ClassVar[str] = "audio"

    samples: TensorRef
    sample_rate: Annotated[int, Meta(ge=1, le=768_000)]

    def __post_init__(self) -> None:
        fits = len(self.samples.shape) == 1 and self.samples.dtype is DType.F32
        check_form(fits, self.samples, "Audio must be f32 of shape [samples]")


class ImageChunk(TensorChunk, tag="image", frozen=True):
    """Stage -> coordinator -> client: a whole picture, u8 [height, width, channels], 3 channels for RGB or 4 for RGBA.

    A `preview` shows the picture while it is made; it is not part of the answer.
    """

    modality: ClassVar[str] = "image"

    pixels: TensorRef
    preview: bool = False

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        fits = self.pixels.dtype is DType.U8 and len(shape) == 3 and shape[2] in CHANNELS and 0 not in shape
        check_form(fits, self.pixels, "A picture must be u8 of shape [height, width, 3 or 4]")


class VideoChunk(TensorChunk, tag="video", frozen=True):
    """Stage -> coordinator -> client: the next frames of a video, u8 [frames, height, width, 3].

    A stage always cuts a video in the same way, so that chunks can be counted.
    """

    modality: ClassVar[str] = "video"

    frames: TensorRef
    frames_per_second: FrameRate

    def __post_init__(self) -> None:
        shape = self.frames.shape
        fits = self.frames.dtype is DType.U8 and len(shape) == 4 and shape[3] == 3 and 0 not in shape
        check_form(fits, self.frames, "A video must be u8 of shape [frames, height, width, 3]")


class LatentsChunk(TensorChunk, tag="latents", frozen=True):
    """Stage -> coordinator -> client: the latents of a picture, floating-point numbers of any shape."""

    modality: ClassVar[str] = "latents"

    latents: TensorRef

    def __post_init__(self) -> None:
        fits = self.latents.dtype in FLOATING and bool(self.latents.shape) and 0 not in self.latents.shape
        check_form(fits, self.latents, "Latents must be floating-point numbers, and not none")


class WordsChunk(Body, tag="words", frozen=True):
    """Stage -> coordinator -> client: all words of what is said, in order, and when."""

    modality: ClassVar[str] = "words"

    words: Annotated[tuple[WordTime, ...], Meta(max_length=65536)]


class StepsDone(Body, tag="progress", frozen=True):
    """Stage -> coordinator -> client: `step` of `steps` are done. The coordinator fills in the `stage` that sent it."""

    modality: ClassVar[str] = ""  # for every client

    step: Steps
    steps: Steps
    stage: StageNameOrEmpty = ""

    def __post_init__(self) -> None:
        if self.step > self.steps:
            raise InvalidPayload(f"Progress cannot be {self.step} of {self.steps} steps.")


# What goes on to the client.
Output = TextDelta | AudioChunk | ImageChunk | VideoChunk | LatentsChunk | WordsChunk | StepsDone


class FinishReason(enum.StrEnum):
    """Why a stage ended a request: the model's own end, or the limit of tokens."""

    STOP = "stop"
    LENGTH = "length"


class StageUsage(Struct, frozen=True, omit_defaults=True):
    """What a stage did for one request. `first_output` and `finished` are seconds since `OpenRequest` arrived.

    `stop_reason` is the stop string or stop token that ended a text, `None` if the model did. `picture_tokens` says how
    many of an encoder's input tokens stand for pictures, `language` what a model that writes down what it hears calls
    the language of it.
    """

    finish_reason: FinishReason
    input_tokens: Count = 0
    output_tokens: Count = 0
    first_output: float = 0.0
    finished: float = 0.0
    stop_reason: TokenId | Annotated[str, Meta(max_length=4096)] | None = None
    picture_tokens: Count = 0
    language: Annotated[str, Meta(max_length=256)] = ""


class StageDone(Body, tag="stage_done", frozen=True):
    """Stage -> coordinator: this stage has finished the request and sent all of its output."""

    usage: StageUsage
    timeline: StageTimeline | None = None


class Unreachable(Body, tag="unreachable", frozen=True):
    """Stage -> coordinator: `receiver` gets no messages of its `attempt`; they are kept for a `Resend`."""

    receiver: ReplicaId
    attempt: Attempt


FromStage = Output | StageDone | Failed | Unreachable | Credit


class ArenaAddress(Struct, frozen=True, array_like=True):
    """The shared memory of process `pid`: its file `descriptor`, of `size` bytes, the first 16 being `token`."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    descriptor: Annotated[int, Meta(ge=0, le=2**31)]
    size: Annotated[int, Meta(ge=1, le=2**46)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(Body, tag="hello", frozen=True):
    """Stage -> coordinator, first message: registers a replica, whose id is in the header.

    A mismatch of protocol version, package version or configuration hash fails the start. A process that has lost its
    coordinator says hello `again`, to the next one; if it has to register anew, it does so with the next epoch, and
    `spawn_epoch` stays the epoch that it was started with. `remote` is the inbox for other nodes, "" if none can reach
    it.
    """

    protocol: int
    package: str
    config: str
    pid: int
    inbox: Endpoint
    arena: ArenaAddress | None = None
    spawn_epoch: Count = 0
    remote: EndpointOrEmpty = ""
    again: bool = False


class Welcome(Body, tag="welcome", frozen=True):
    """Coordinator -> stage: accepted; send results to this endpoint."""

    results: Endpoint


class Loading(Body, tag="loading", frozen=True):
    """Stage -> coordinator: what the start-up is doing now, for people to read."""

    phase: Annotated[str, Meta(max_length=256)]


class HeldRequest(Struct, frozen=True, array_like=True):
    """What a stage has of a request when a new coordinator comes.

    `receivers` are the replicas after it that get what it makes, with the attempt that each works on.
    """

    request_id: RequestId
    attempt: Attempt
    seed: Seed
    receivers: Annotated[tuple[tuple[ReplicaId, Attempt], ...], Meta(max_length=64)] = ()


class Ready(Body, tag="ready", frozen=True):
    """Stage -> coordinator: the engine takes requests, `seconds` after its process was ordered.

    `held` are the former coordinator's requests whose results it still has, to be fetched by `Resend`.
    """

    seconds: float
    facts: EngineFacts = EngineFacts()
    held: Annotated[tuple[HeldRequest, ...], Meta(max_length=MAX_HELD)] = ()


class Peer(Struct, frozen=True, array_like=True):
    """A neighbour of a replica in the stage graph: its inbox, and its arena if it is on the same host."""

    replica_id: ReplicaId
    inbox: str
    arena: ArenaAddress | None = None


class Peers(Body, tag="peers", frozen=True):
    """Coordinator -> stage: all replicas after it (`peers`) and before it (`sources`) that are up now."""

    peers: tuple[Peer, ...]
    sources: tuple[Peer, ...] = ()


class Heartbeat(Body, tag="heartbeat", frozen=True):
    """Stage -> coordinator: alive. `progress` counts iterations of the engine loop, `counts` what the stage holds."""

    progress: Count
    counts: dict[str, int] = {}


class Shutdown(Body, tag="shutdown", frozen=True):
    """Coordinator -> stage or node: end, and abort what is in flight. `failed`: the launch failed, for `reason`."""

    reason: str = ""
    failed: bool = False


class Reregister(Body, tag="reregister", frozen=True):
    """Coordinator -> stage or node: unknown sender; say hello again."""


class Fatal(Body, tag="fatal", frozen=True):
    """Stage -> coordinator: this process is about to end, for the reason in `message`, which may be its `device`."""

    message: Annotated[str, Meta(max_length=16384)]
    device: bool = False


StageToCoordinator = Hello | Loading | Ready | Heartbeat | Snapshot | Fatal
CoordinatorToStage = Welcome | Peers | Shutdown | Reregister


class NodeHello(Body, tag="node_hello", frozen=True):
    """Node -> coordinator, first message: the processes that run here. `launched`: every replica was ready before.

    `devices` is the number of GPUs of this host. A mismatch of protocol version, package version or configuration hash
    fails the start.
    """

    protocol: int
    package: str
    config: str
    processes: Annotated[tuple[ReplicaId, ...], Meta(max_length=4096)] = ()
    launched: bool = False
    devices: Count = 0


class NodeWelcome(Body, tag="node_welcome", frozen=True):
    """Coordinator -> node: accepted."""


class NodeBeat(Body, tag="node_beat", frozen=True):
    """Node -> coordinator, and back as the answer: alive."""


class NodeLeaving(Body, tag="node_leaving", frozen=True):
    """Node -> coordinator: this node and its processes end.

    With `drains` they end once its replicas have finished what they hold: the coordinator then answers with `Shutdown`.
    """

    reason: Annotated[str, Meta(max_length=16384)] = ""
    drains: bool = False


class StartReplica(Body, tag="start_replica", frozen=True):
    """Coordinator -> node: start a process. `slot` says which of the stage's GPUs it takes there."""

    process: ReplicaId
    slot: ReplicaIndex = 0


class KillReplica(Body, tag="kill_replica", frozen=True):
    """Coordinator -> node: send SIGKILL to a process. Its end is reported like any other."""

    process: ReplicaId


class ReplicaEnded(Body, tag="replica_ended", frozen=True):
    """Node -> coordinator: a process ended or could not be started, as `how` says. `log` is the end of its log.

    `exit_code` is negative for a signal, and `None` if there was no process.
    """

    process: ReplicaId
    how: Annotated[str, Meta(max_length=4096)]
    log: Annotated[str, Meta(max_length=65536)] = ""
    exit_code: int | None = None


class Launched(Body, tag="launched", frozen=True):
    """Coordinator -> node: every replica is ready."""


NodeToCoordinator = NodeHello | NodeBeat | NodeLeaving | ReplicaEnded
CoordinatorToNode = NodeWelcome | NodeBeat | StartReplica | KillReplica | Launched | Shutdown | Reregister


class Submit(Body, tag="submit", frozen=True):
    """Client -> coordinator: run this request, whose id and deadline are in the header.

    Attributes:
        params: parameters by stage name.
        priority: for the engines' schedulers; lower values come first.
        traceparent: the caller's span (W3C Trace Context).
        information: for the stages that want it, by name. Its tensors are in the buffers after those of the prompt.
        tenant: the part of the client's share of slots that the request counts for.
        delivered: what the client has got from a coordinator before this one; `None` at first.
        more_text: whether `MoreText` follows for a text that comes in parts; `None` for a prompt that is whole.
    """

    prompt: Prompt
    modalities: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("text", "audio")
    voice: str | None = None
    params: Annotated[dict[Name, StageParams], Meta(max_length=64)] = {}
    seed: Seed = 0
    priority: Priority = 0
    traceparent: Annotated[str, Meta(pattern=TRACEPARENT)] | None = None
    information: AdditionalInformationPayload = NO_INFORMATION
    tenant: Annotated[str, Meta(max_length=64)] = ""
    delivered: Delivered | None = None
    more_text: bool | None = None

    def __post_init__(self) -> None:
        if self.more_text is not None and self.prompt.only_text is None:
            raise InvalidPayload("Only a prompt that is one text can come in parts.", field="more_text")
        of_prompt = len(self.prompt.tensor_refs())
        if any(ref.buffer < of_prompt for ref in self.information.tensor_refs()):
            raise InvalidPayload("The tensors of additional information come after those of the prompt.")

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        return (*self.prompt.tensor_refs(), *self.information.tensor_refs())


class Done(Body, tag="done", frozen=True):
    """Coordinator -> client, terminal: everything was delivered. `usage` is by stage name."""

    usage: dict[str, StageUsage]


class Describe(Body, tag="describe", frozen=True):
    """Client -> coordinator: describe the pipeline and its state."""


class StageStatus(Struct, frozen=True):
    """State of one replica as the coordinator sees it. A `spare` takes requests only in the place of another.

    `start` are the seconds that its process took to be ready, 0 until then. `node` is the rank of its node. It is
    `joining` from a `scale` until it is first ready, and `leaving` from one until it is gone.
    """

    stage: str
    replica: int
    epoch: int
    state: str
    pid: int
    in_flight: int
    counts: dict[str, int] = {}
    spare: bool = False
    start: float = 0.0
    node: int = 0
    joining: bool = False
    leaving: bool = False


class Description(Body, tag="description", frozen=True):
    """Coordinator -> client: the answer to `Describe`.

    Attributes:
        coordinator: tells this coordinator from others that were here before.
        sample_rate: of the audio, in Hz; 0 without audio.
        in_flight: requests of all clients that have a slot, at most `max_in_flight`.
        queued: those that wait for one.
        requests: the asking client's own requests in flight; one that it waits for and does not find here is lost.
        counts: what the coordinator refused or dropped, by reason.
        outputs: the stage that produces each modality.
        sampling_stages: stages for which a request may set parameters, in the pipeline's order.
        adapters: names of LoRA adapters; each is also the name of a model.
        max_media: how many media a prompt may have, by modality; no limit for those that are missing.
        parameters: those that a stage's model declares, by stage; stages whose model declares none are missing.
        speech: what the pipeline can do if it speaks the text that it is given; `None` if it answers.
        hearing: what it can do if it writes down what it hears; `None` likewise.
        aligning: the recordings for whose words it knows the times; `None` for none.
        on_cpu: whether no host has a GPU, and a stage would take one.
        calls_tools: whether a prompt may have tools.
    """

    pipeline: str
    model: str
    modalities: tuple[str, ...]
    voices: tuple[str, ...]
    sample_rate: int
    healthy: bool
    in_flight: int
    max_in_flight: int
    stages: tuple[StageStatus, ...]
    requests: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    outputs: dict[str, str] = {}
    sampling_stages: tuple[str, ...] = ()
    queued: int = 0
    max_media: dict[str, int] = {}
    adapters: tuple[str, ...] = ()
    parameters: dict[str, tuple[Parameter, ...]] = {}
    speech: SpeechAbility | None = None
    hearing: HearingAbility | None = None
    aligning: HearingAbility | None = None
    coordinator: str = ""
    on_cpu: bool = False
    calls_tools: bool = False


class Operation(enum.StrEnum):
    """What an operator can ask for."""

    STATUS = "status"
    DRAIN = "drain"  # the replica takes no new requests and finishes those it holds
    RESTART = "restart"  # drain it, then start it again
    SCALE = "scale"  # give a stage another number of replicas; those that are too many drain first
    SHUTDOWN = "shutdown"  # like SIGTERM to the launcher


class Operate(Body, tag="operate", frozen=True):
    """Client -> coordinator: an operator's command, to a replica if it is `drain` or `restart`, to a stage if `scale`.

    Attributes:
        count: the replicas that the stage is to have, without its spares.
        node: rank of the node on which to add or remove them; the coordinator's choice if `None`.
    """

    operation: Operation
    stage: StageNameOrEmpty = ""
    replica: ReplicaIndex = 0
    count: ReplicaIndex | None = None
    node: ReplicaIndex | None = None

    def __post_init__(self) -> None:
        scales = self.operation is Operation.SCALE
        needs_stage = scales or self.operation in (Operation.DRAIN, Operation.RESTART)
        for field, needed, given in (
            ("stage", needs_stage, bool(self.stage)),
            ("count", scales, self.count is not None),
            ("node", scales and self.node is not None, self.node is not None),
        ):
            if needed != given:
                verb = "needs" if needed else "does not take"
                raise InvalidPayload(f"The operation {self.operation} {verb} a {field}.", field=field)


class EdgeStatus(Struct, frozen=True):
    """The coordinator's link to a replica, and the replica's health. Times are in seconds."""

    stage: str
    replica: int
    epoch: int
    messages_out: int  # sent, without credit for them yet
    bytes_out: int
    waiting: int  # messages not sent yet
    restarts: int  # within the restart window
    silent: float  # since it was last heard from
    idle: float  # since its engine loop last made progress
    phase: str = ""  # of its start-up, for people to read


class RequestStatus(Struct, frozen=True):
    """One request in flight. `remaining` is the time to its deadline in seconds."""

    request_id: str
    state: str
    attempt: int
    route: tuple[str, ...]
    stages_done: tuple[str, ...]
    remaining: float
    losses: tuple[str, ...] = ()


class Report(Body, tag="report", frozen=True):
    """Coordinator -> client: the answer to `Operate`. At most 1000 requests are listed, the oldest first."""

    text: str
    description: Description
    edges: tuple[EdgeStatus, ...] = ()
    requests: tuple[RequestStatus, ...] = ()


class Observe(Body, tag="observe", frozen=True):
    """Client -> coordinator: send metrics or timelines.

    `metrics` are Prometheus text, `timeline` is of the request `request_id`, `recent` are the timelines of the last
    `count` requests that ended, the newest first.
    """

    subject: Literal["metrics", "timeline", "recent"]
    request_id: Annotated[str, Meta(max_length=128)] = ""
    count: Annotated[int, Meta(ge=1, le=200)] = 20


class Observation(Body, tag="observation", frozen=True):
    """Coordinator -> client: the answer to `Observe`."""

    text: str = ""
    timelines: tuple[RequestTimeline, ...] = ()


ClientToCoordinator = Submit | MoreText | Abort | Describe | Credit | Operate | Observe | Snapshot
CoordinatorToClient = Output | Done | Failed | Description | Report | Observation
