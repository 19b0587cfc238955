"""Every struct that crosses a socket, in one file. `codec.py` turns them into frames and back.

msgspec checks types and `Meta` constraints only when it decodes, so structs whose fields depend on one another also
check themselves in `__post_init__`; the same check then runs on the sender's side, before anything is sent.
"""

from __future__ import annotations

import array
import enum
import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from omni_actors.errors import ERROR_CLASSES, ErrorCode, InvalidPayload, OmniError

PROTOCOL_VERSION = 1

# ---------------------------------------------------------------------------------------------------------------------
# Tensors


class DType(enum.StrEnum):
    """Element types that may cross the wire."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {DType.BF16: 2, DType.F16: 2, DType.F32: 4, DType.I32: 4, DType.I64: 8, DType.U8: 1}


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Largest message that is sent or accepted.

    Args:
        header_bytes: bytes of a message's header.
        body_bytes: bytes of its body: everything but tensors and media.
        buffers: tensors and media of one message.
        buffer_bytes: bytes of one of them.
        message_bytes: bytes of the whole message.
    """

    header_bytes: int = 2048
    body_bytes: int = 4 << 20
    buffers: int = 256
    buffer_bytes: int = 256 << 20
    message_bytes: int = 512 << 20


MAX_RANK = 8
Scalar = int | float | str | bool
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=128)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Dimension = Annotated[int, Meta(ge=0, le=2**40)]
Moment = Annotated[float, Meta(ge=0.0, le=1e11)]  # Unix time in seconds by the sender's clock; 0: it did not happen
TRACEPARENT = r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$"


def check_extent(dtype: DType, shape: tuple[int, ...], n_bytes: int, what: str) -> None:
    """Raise `InvalidPayload` unless `n_bytes` bytes hold exactly `shape` elements of `dtype`."""
    if len(shape) > MAX_RANK:
        raise InvalidPayload(f"{what}: rank {len(shape)} exceeds the maximum of {MAX_RANK}.")
    if any(dimension < 0 for dimension in shape):
        raise InvalidPayload(f"{what}: shape {shape} has a negative dimension.")
    expected = math.prod(shape) * dtype.itemsize
    if expected != n_bytes:
        raise InvalidPayload(f"{what}: shape {shape} of {dtype} needs {expected} bytes, got {n_bytes}.")


class HostTensor(NamedTuple):
    """A tensor in host memory, without torch: C-contiguous little-endian `data` of `shape` elements of `dtype`."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def validate(self, what: str = "tensor") -> HostTensor:
        """Return self, or raise `InvalidPayload` if shape, dtype and length disagree."""
        check_extent(self.dtype, self.shape, memoryview(self.data).nbytes, what)
        return self


class TensorRef(Struct, frozen=True, array_like=True):
    """Describes the buffer frame number `buffer` of the same message."""

    dtype: DType
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=MAX_RANK)]
    buffer: Annotated[int, Meta(ge=0, le=4096)]


# ---------------------------------------------------------------------------------------------------------------------
# Payloads of a stage's input


class AdditionalInformationEntry(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One named value: exactly one of a tensor, a list of numbers or strings, or a scalar."""

    tensor: TensorRef | None = None
    list: Annotated[tuple[Scalar, ...], Meta(max_length=65536)] | None = None
    scalar: Scalar | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("tensor", "list", "scalar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidPayload(
                f"An additional-information entry holds exactly one of tensor, list and scalar; got {given or 'none'}."
            )
        if isinstance(self.scalar, str) and len(self.scalar) > 65536:
            raise InvalidPayload("A scalar string is limited to 65536 characters.")


class AdditionalInformationPayload(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Named values that travel with a stage's input, at most 64."""

    entries: Annotated[dict[Name, AdditionalInformationEntry], Meta(max_length=64)] = {}

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return tuple(entry.tensor for entry in self.entries.values() if entry.tensor is not None)

    def scalar(self, name: str) -> Scalar:
        """The scalar called `name`; raises `InvalidPayload` when it is missing or of another form."""
        entry = self.entries.get(name)
        if entry is None or entry.scalar is None:
            raise InvalidPayload(f"Additional information lacks the scalar {name!r}; it has {sorted(self.entries)}.")
        return entry.scalar


class PromptEmbedsPayload(Struct, frozen=True, forbid_unknown_fields=True):
    """Embeddings that stand in for prompt tokens: a floating-point tensor [positions >= 1, width >= 1]."""

    tensor: TensorRef

    def __post_init__(self) -> None:
        if len(self.tensor.shape) != 2 or 0 in self.tensor.shape:
            raise InvalidPayload(f"Prompt embeddings need the shape [positions, width]; got {list(self.tensor.shape)}.")
        if self.tensor.dtype not in (DType.BF16, DType.F16, DType.F32):
            raise InvalidPayload(f"Prompt embeddings need a floating dtype; got {self.tensor.dtype}.")


# ---------------------------------------------------------------------------------------------------------------------
# What a request asks for

PositiveInt = Annotated[int, Meta(ge=1, le=1_000_000)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class StageParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Per-request parameters of one stage; `None` means the stage's own default from the YAML.

    The first block belongs to autoregressive stages, the second to diffusion stages; `seed` belongs to both.

    Args:
        max_tokens: most tokens to make.
        min_tokens: tokens before which the model may not end.
        temperature: 0 takes the likeliest token; higher is more varied.
        top_p: sample among the likeliest tokens that together have this probability.
        top_k: sample among so many of the likeliest tokens; 0 or -1 for all.
        min_p: leave out tokens less likely than this share of the likeliest one's probability.
        repetition_penalty: above 1, tokens that have occurred become less likely.
        stop_token_ids: tokens at which the answer ends, beside the model's own.
        ignore_eos: go on at the model's own end tokens.
        seed: makes the stage's chance repeatable; default: the request's seed.
        num_steps: denoise steps.
        guidance_scale: how strongly the vocoder follows its conditions; 0 for no guidance.
        sway_coefficient: how far the steps lean towards the beginning of the denoising.
    """

    max_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None

    num_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    sway_coefficient: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None

    def merged_over(self, defaults: StageParams) -> StageParams:
        """These values, with `defaults` where they are `None`."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **given)

    def given(self) -> dict[str, Any]:
        """Only the fields that are set."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


AUTOREGRESSIVE_PARAMS = frozenset(StageParams.__struct_fields__[:10])
DIFFUSION_PARAMS = frozenset({"num_steps", "guidance_scale", "sway_coefficient", "seed"})


class MediaEncoding(enum.StrEnum):
    ARRAY = "array"  # audio f32 [samples]; image u8 [height, width, 3]; video u8 [frames, height, width, 3]
    FILE = "file"  # u8 [bytes] of a WAV/FLAC/OGG/MP3 or PNG/JPEG/WEBP file


MEDIA_MODALITIES = ("audio", "image", "video")


class Media(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One audio, image or video that a prompt refers to."""

    modality: str
    encoding: MediaEncoding
    tensor: TensorRef
    sample_rate: Annotated[int, Meta(ge=1000, le=768_000)] | None = None  # Hz, audio arrays only
    frames_per_second: Annotated[float, Meta(gt=0, le=1000)] | None = None  # video arrays only


class ContentPart(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A piece of a chat message: text, or the index of one of the request's media."""

    text: str | None = None
    media: Annotated[int, Meta(ge=0, le=255)] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.media is None):
            raise InvalidPayload("A content part holds exactly one of text and media.")


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: Annotated[tuple[ContentPart, ...], Meta(max_length=256)]


class Prompt(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of chat `messages` (the chat template is applied) and `token_ids` (int32 little-endian, as is)."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=1024)] = ()
    token_ids: bytes = b""
    media: Annotated[tuple[Media, ...], Meta(max_length=256)] = ()

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.token_ids):
            raise InvalidPayload("A prompt needs exactly one of messages and token_ids, and neither may be empty.")
        if len(self.token_ids) % 4:
            raise InvalidPayload(f"token_ids are int32: {len(self.token_ids)} bytes is no multiple of 4.")
        for message in self.messages:
            for part in message.content:
                if part.media is not None and part.media >= len(self.media):
                    raise InvalidPayload(f"A content part names media {part.media}; only {len(self.media)} were sent.")

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return tuple(item.tensor for item in self.media)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian bytes, the form in which they travel."""
    packed = array.array("i", token_ids)
    return packed.tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    """Inverse of `pack_token_ids`; raises `InvalidPayload` if the length is no multiple of 4."""
    if len(data) % 4:
        raise InvalidPayload(f"token ids are int32: {len(data)} bytes is no multiple of 4.")
    unpacked = array.array("i")
    unpacked.frombytes(data)
    return unpacked.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Header, shared by all channels


class Hop(Struct, frozen=True, array_like=True):
    """The replica of one stage that a request is bound to."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    epoch: Count

    @property
    def name(self) -> str:
        """As "talker/0"."""
        return f"{self.stage}/{self.replica}"


MAX_BLOCKS = 16  # per message; further buffers travel as frames
MAX_ATTEMPT = 255
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]


class Origin(Struct, frozen=True, array_like=True):
    """Whose arena a forwarded block lies in, and the ticket that stands in it there."""

    owner: Hop
    ticket: Annotated[int, Meta(ge=1, le=2**53)]


class Block(Struct, frozen=True, array_like=True):
    """Says that buffer number `buffer` is no frame, but lies in the sender's arena (`transport/arena.py`).

    `ticket` numbers the sender's publications and is written in the block, too: one that was freed meanwhile is
    noticed. The receiver gives the ticket back in a `Credit`. With `origin` the sender only passes on what it was sent
    itself; the ticket is its own all the same, but another one stands in the block.
    """

    buffer: Annotated[int, Meta(ge=0, le=4096)]
    offset: Count
    length: Count
    ticket: Annotated[int, Meta(ge=1, le=2**53)]
    origin: Origin | None = None


class Header(Struct, frozen=True, array_like=True):
    """Who sends what about which request.

    `stage`, `replica` and `epoch` name the sending process (empty for clients and the coordinator). `attempt` is the
    one that a stage works on: of a result its sender, of everything else the receiver. `seq` counts the messages of one
    sender about one attempt of a request, from 0. `deadline` is Unix time in seconds, 0 for none. `blocks` are those of
    the `n_buffers` buffers that are no frames of this message.
    """

    kind: Annotated[str, Meta(max_length=32)]
    request_id: Annotated[str, Meta(max_length=128)] = ""
    stage: Annotated[str, Meta(max_length=64)] = ""
    replica: Annotated[int, Meta(ge=0, le=65535)] = 0
    epoch: Count = 0
    attempt: Attempt = 0
    seq: Count = 0
    deadline: float = 0.0
    n_buffers: Annotated[int, Meta(ge=0, le=4096)] = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)] = ()


class Body(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of all bodies. A body that carries tensors names them in `tensor_refs`."""

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return ()


class Credit(Body, tag="credit", frozen=True):
    """Receiver -> sender of an edge: you may send this much more. Itself it costs no credit.

    The sender starts with the window of the configuration (`flow`). `released` are tickets of arena blocks that the
    receiver needs no more; `mapped` says that it can read the sender's arena, so that blocks may be sent to it, and
    `origins` whose else it reads, so that blocks there may be forwarded to it.

    With `through`, from a stage further on to the owner of an arena: that replica, which has forwarded blocks, is gone.
    `held` are the owner's own tickets that came through it and are still in use; those `released` are of them.
    """

    messages: Count = 0
    bytes: Count = 0
    released: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()
    mapped: bool = False
    origins: Annotated[tuple[Hop, ...], Meta(max_length=1024)] = ()
    through: Hop | None = None
    held: Annotated[tuple[Count, ...], Meta(max_length=65536)] | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Client channel


class Submit(Body, tag="submit", frozen=True):
    """Client -> coordinator: run this request; its id is in the header. `sent` is the client's time."""

    prompt: Prompt
    modalities: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("text", "audio")
    voice: str | None = None
    params: Annotated[dict[Name, StageParams], Meta(max_length=64)] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    traceparent: Annotated[str, Meta(pattern=TRACEPARENT)] | None = None  # the caller's span (W3C Trace Context)
    sent: Moment = 0.0

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return self.prompt.tensor_refs()


class Abort(Body, tag="abort", frozen=True):
    """Client -> coordinator, and coordinator -> stage: end the request named in the header. Idempotent."""


class Describe(Body, tag="describe", frozen=True):
    """Client -> coordinator: which pipeline is this, and how is it?"""


class StageStatus(Struct, frozen=True):
    """State of one replica as the coordinator sees it."""

    stage: str
    replica: int
    epoch: int
    state: str
    pid: int
    in_flight: int
    counts: dict[str, int] = {}


class Operation(enum.StrEnum):
    STATUS = "status"
    DRAIN = "drain"  # the replica takes nothing new and works off what it holds
    RESTART = "restart"  # drain it, then start it anew
    SHUTDOWN = "shutdown"  # as SIGTERM to the launcher


class Operate(Body, tag="operate", frozen=True):
    """Client -> coordinator: an operator's wish; `stage` and `replica` say of which replica."""

    operation: Operation
    stage: Annotated[str, Meta(max_length=64)] = ""
    replica: Annotated[int, Meta(ge=0, le=65535)] = 0

    def __post_init__(self) -> None:
        needs_stage = self.operation in (Operation.DRAIN, Operation.RESTART)
        if needs_stage != bool(self.stage):
            raise InvalidPayload(f"The operation {self.operation} {'needs a' if needs_stage else 'has no'} stage.")


class EdgeStatus(Struct, frozen=True):
    """The coordinator's link to a replica, and what supervision knows of the replica. Times in seconds.

    `phase` is what its start-up does, for people to read.
    """

    stage: str
    replica: int
    epoch: int
    messages_out: int  # sent, without credit for them yet
    bytes_out: int
    waiting: int  # not sent yet
    restarts: int  # within the restart window
    silent: float  # since it was last heard of
    idle: float  # since its engine loop was last seen to turn
    phase: str = ""


class RequestStatus(Struct, frozen=True):
    """One request in flight. `remaining` is the time to its deadline in seconds."""

    request_id: str
    state: str
    attempt: int
    route: tuple[str, ...]
    stages_done: tuple[str, ...]
    remaining: float
    losses: tuple[str, ...] = ()


class Description(Body, tag="description", frozen=True):
    """Coordinator -> client: the answer to `Describe`.

    `requests` are the asking client's own requests in flight: one that it waits for and does not find here is lost.
    `counts` says what the coordinator refused or dropped, by reason, `outputs` which stage answers in a modality.
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


class Report(Body, tag="report", frozen=True):
    """Coordinator -> client: the answer to `Operate`. At most 1000 requests are listed, the oldest first."""

    text: str
    description: Description
    edges: tuple[EdgeStatus, ...] = ()
    requests: tuple[RequestStatus, ...] = ()


class TextDelta(Body, tag="text", frozen=True):
    """Stage -> coordinator -> client: more text. `text` is empty inside a character; `token_ids` are int32 bytes."""

    text: str
    token_ids: bytes = b""
    sent: Moment = 0.0


class AudioChunk(Body, tag="audio", frozen=True):
    """Stage -> coordinator -> client: the next samples, f32 [samples] in [-1, 1]."""

    samples: TensorRef
    sample_rate: Annotated[int, Meta(ge=1, le=768_000)]
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        if len(self.samples.shape) != 1 or self.samples.dtype is not DType.F32:
            raise InvalidPayload(
                f"Audio is f32 with the shape [samples]; got {self.samples.dtype} {list(self.samples.shape)}."
            )

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return (self.samples,)


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"


class StageUsage(Struct, frozen=True, omit_defaults=True):
    """What a stage did for one request. Times are seconds since the stage was told of the request."""

    finish_reason: FinishReason
    input_tokens: Count = 0
    output_tokens: Count = 0
    first_output: float = 0.0
    finished: float = 0.0


class Done(Body, tag="done", frozen=True):
    """Coordinator -> client, terminal: everything was delivered. `usage` is by stage name."""

    usage: dict[str, StageUsage]


class Failed(Body, tag="failed", frozen=True):
    """Terminal, on every channel: the request ended with an error."""

    code: ErrorCode
    message: Annotated[str, Meta(max_length=8192)]
    hint: Annotated[str, Meta(max_length=2048)] = ""
    stage: str | None = None
    retryable: bool = False
    retry_after: float | None = None

    @classmethod
    def from_error(cls, error: OmniError, stage: str | None = None) -> Failed:
        return cls(
            code=error.code,
            message=error.message[:8192],
            hint=error.hint[:2048],
            stage=error.stage or stage,
            retryable=error.retryable,
            retry_after=error.retry_after,
        )

    def to_error(self) -> OmniError:
        """The typed exception that this message stands for."""
        return ERROR_CLASSES[self.code](self.message, hint=self.hint, stage=self.stage, retry_after=self.retry_after)


class HopTimeline(Struct, frozen=True, array_like=True):
    """What one replica (`source`, as "thinker/0") sent about one request to the one that reports it.

    `bytes` are payload: tensors, token ids, text. The moments of sending are those of the source's clock.
    """

    source: Annotated[str, Meta(max_length=80)]
    messages: Count
    bytes: Count
    first_sent: Moment
    first_received: Moment
    last_sent: Moment
    last_received: Moment


class StageTimeline(Struct, frozen=True, omit_defaults=True):
    """When what happened to one attempt at a request in one replica."""

    stage: Annotated[str, Meta(max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)] = 0
    epoch: Count = 0
    attempt: Annotated[int, Meta(ge=0, le=255)] = 0
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
    hops: Annotated[tuple[HopTimeline, ...], Meta(max_length=64)] = ()


class TimelineEvent(Struct, frozen=True, array_like=True):
    name: Annotated[str, Meta(max_length=64)]
    time: Moment
    detail: Annotated[str, Meta(max_length=1024)] = ""


class RequestTimeline(Struct, frozen=True):
    """A request as the coordinator saw it, with what the stages said; all moments by the coordinator's clock.

    `outcome` is "running", "done" or an error code. `events` are `submitted`, `received`, `admitted`, and for each
    attempt `bound`; then `first_text`, `first_audio`, `replayed`, `ended`. `deliveries` are what came for the client.
    """

    request_id: str
    trace_id: str
    outcome: str
    attempt: int
    events: tuple[TimelineEvent, ...]
    stages: tuple[StageTimeline, ...]
    deliveries: tuple[HopTimeline, ...]


class Subject(enum.StrEnum):
    METRICS = "metrics"  # Prometheus text
    TIMELINE = "timeline"  # of the request that is named
    RECENT = "recent"  # timelines of the requests that ended last, the newest first


class Observe(Body, tag="observe", frozen=True):
    """Client -> coordinator: let me look."""

    subject: Subject
    request_id: Annotated[str, Meta(max_length=128)] = ""
    count: Annotated[int, Meta(ge=1, le=200)] = 20


class Observation(Body, tag="observation", frozen=True):
    """Coordinator -> client: the answer to `Observe`."""

    text: str = ""
    timelines: tuple[RequestTimeline, ...] = ()


ClientToCoordinator = Submit | Abort | Describe | Credit | Operate | Observe
CoordinatorToClient = TextDelta | AudioChunk | Done | Failed | Description | Report | Observation


# ---------------------------------------------------------------------------------------------------------------------
# Data channel: into a stage's inbox


class Expect(Body, tag="expect", frozen=True):
    """Coordinator -> every stage of the route: this request will come (to the entry stage: with its `prompt`)."""

    route: Annotated[tuple[Hop, ...], Meta(min_length=1, max_length=64)]
    params: StageParams
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    voice: str | None = None
    priority: int = 0
    prompt: Prompt | None = None

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        return self.prompt.tensor_refs() if self.prompt is not None else ()


ROWS = "rows"  # name of the streamed embeddings among an engine's tensors
SAMPLES = "samples"  # name of sound, f32 [samples], on its way from a stage to a later one
SAMPLE_RATE = "sample_rate"  # the scalar that goes with it, in Hz


class Chunk(Body, tag="chunk", frozen=True):
    """Stage -> next stage: the next piece of its input.

    `rows` are embeddings that stand in for the receiver's tokens. `start` is the absolute position of the first row or
    token in the sender's own sequence; a receiver drops what it already has (a preempted sender computes rows again).
    `final` ends the stream.
    """

    token_ids: bytes = b""
    rows: PromptEmbedsPayload | None = None
    tensors: Annotated[dict[Name, TensorRef], Meta(max_length=256)] = {}
    information: AdditionalInformationPayload | None = None
    start: Count = 0
    final: bool = False
    sent: Moment = 0.0

    def __post_init__(self) -> None:
        if len(self.token_ids) % 4:
            raise InvalidPayload(f"token_ids are int32: {len(self.token_ids)} bytes is no multiple of 4.")
        if ROWS in self.tensors:
            raise InvalidPayload(f"{ROWS!r} is a field of its own, not one of the tensors.")

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        rows = (self.rows.tensor,) if self.rows is not None else ()
        more = self.information.tensor_refs() if self.information is not None else ()
        return (*rows, *self.tensors.values(), *more)


class Resend(Body, tag="resend", frozen=True):
    """Coordinator -> stage: `receiver` begins anew with `attempt`; give it all that was sent before, and go on with it.

    The header's attempt is that of the stage which sends again. If it does not hold all of it any more it answers
    `Failed` with `stage_lost`, and begins anew itself.
    """

    receiver: Hop
    attempt: Attempt


MAX_ENDED = 4096


class Ended(Body, tag="ended", frozen=True):
    """Coordinator -> stage: these requests are done; what was kept to be sent again may go."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_ENDED)]


# A failing stage tells its downstream neighbours nothing: the coordinator aborts them, so that there is one way to end.
IntoStage = Expect | Chunk | Abort | Credit | Resend | Ended


# ---------------------------------------------------------------------------------------------------------------------
# Results channel: stage -> coordinator


class StageDone(Body, tag="stage_done", frozen=True):
    """Stage -> coordinator: this stage has finished the request and sent all of its output."""

    usage: StageUsage
    timeline: StageTimeline | None = None


class Unreachable(Body, tag="unreachable", frozen=True):
    """Stage -> coordinator: `receiver` takes no messages of its `attempt`; what is made for it is kept meanwhile."""

    receiver: Hop
    attempt: Attempt


FromStage = TextDelta | AudioChunk | StageDone | Failed | Unreachable | Credit


# ---------------------------------------------------------------------------------------------------------------------
# Control channel


class ArenaAddress(Struct, frozen=True, array_like=True):
    """Where a process's shared memory is: a file of the process itself. `token` (in its first bytes) proves it."""

    pid: Annotated[int, Meta(ge=1, le=2**31)]
    descriptor: Annotated[int, Meta(ge=0, le=2**31)]
    size: Annotated[int, Meta(ge=1, le=2**46)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(Body, tag="hello", frozen=True):
    """Stage -> coordinator, first message: who I am. A mismatch of the three versions fails the start.

    A process says hello again, with the next epoch, when it has lost its coordinator: `born` is its first epoch.
    """

    protocol: int
    package: str
    config: str
    pid: int
    inbox: Annotated[str, Meta(min_length=1, max_length=256)]
    arena: ArenaAddress | None = None
    born: Count = 0


class Welcome(Body, tag="welcome", frozen=True):
    """Coordinator -> stage: accepted; send results to this endpoint."""

    results: Annotated[str, Meta(min_length=1, max_length=256)]


class Loading(Body, tag="loading", frozen=True):
    """Stage -> coordinator: what the start-up is doing now, for people to read."""

    phase: Annotated[str, Meta(max_length=256)]


class Ready(Body, tag="ready", frozen=True):
    """Stage -> coordinator: the engine takes requests. `facts` are what the model says of itself (voices, rates)."""

    seconds: float
    voices: tuple[str, ...] = ()
    sample_rate: int = 0
    max_input_tokens: int = 0


class Peer(Struct, frozen=True, array_like=True):
    stage: str
    replica: int
    epoch: int
    inbox: str
    arena: ArenaAddress | None = None

    @property
    def hop(self) -> Hop:
        return Hop(self.stage, self.replica, self.epoch)


class Peers(Body, tag="peers", frozen=True):
    """Coordinator -> stage: the replicas after it and before it (`sources`) that are up now; a missing one is gone.

    `origins` are those before the sources, `readers` those after the peers: a block may be forwarded from one of the
    former, or to one of the latter.
    """

    peers: tuple[Peer, ...]
    sources: tuple[Peer, ...] = ()
    origins: tuple[Peer, ...] = ()
    readers: tuple[Hop, ...] = ()


class Heartbeat(Body, tag="heartbeat", frozen=True):
    """Stage -> coordinator: alive. `progress` counts turns of the engine loop, `counts` what the stage holds.

    `sent` lets the coordinator compare the clocks.
    """

    progress: Count
    counts: dict[str, int] = {}
    sent: Moment = 0.0


class Sample(Struct, frozen=True, array_like=True):
    """The value of one series: `name` is a row of `observe/table.py`, `labels` are the values of its labels."""

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
    """Stage -> coordinator, once per heartbeat interval: its metrics, counted since its session began."""

    samples: Annotated[tuple[Sample, ...], Meta(max_length=4096)]
    histograms: Annotated[tuple[HistogramSample, ...], Meta(max_length=1024)] = ()
    ended: Annotated[tuple[EndedWork, ...], Meta(max_length=256)] = ()


class Shutdown(Body, tag="shutdown", frozen=True):
    """Coordinator -> stage or node: end; what is in flight is aborted. `failed`: the launch failed for `reason`."""

    reason: str = ""
    failed: bool = False


class Renew(Body, tag="renew", frozen=True):
    """Coordinator -> stage or node: I do not know you (any more); say hello again."""


class Fatal(Body, tag="fatal", frozen=True):
    """Stage -> coordinator: this process is about to end, and why."""

    message: Annotated[str, Meta(max_length=16384)]


StageToCoordinator = Hello | Loading | Ready | Heartbeat | Snapshot | Fatal
CoordinatorToStage = Welcome | Peers | Shutdown | Renew


# ---------------------------------------------------------------------------------------------------------------------
# Control channel, node agents. Their header has no stage; `replica` is the rank of the node.


class RunningReplica(Struct, frozen=True, array_like=True):
    """A process of a node. `born` is the epoch with which it was started."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    born: Count
    pid: int


class NodeHello(Body, tag="node_hello", frozen=True):
    """Node -> coordinator, first message: which processes run here. `launched`: the node served before."""

    protocol: int
    package: str
    config: str
    replicas: Annotated[tuple[RunningReplica, ...], Meta(max_length=4096)] = ()
    launched: bool = False


class NodeWelcome(Body, tag="node_welcome", frozen=True):
    """Coordinator -> node: accepted."""


class NodeBeat(Body, tag="node_beat", frozen=True):
    """Node -> coordinator, and back as the answer: alive."""


class NodeLeaving(Body, tag="node_leaving", frozen=True):
    """Node -> coordinator: this node ends, and its processes with it."""

    reason: Annotated[str, Meta(max_length=16384)] = ""


class StartReplica(Body, tag="start_replica", frozen=True):
    """Coordinator -> node: start a process, with `born` as its first epoch."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    born: Annotated[int, Meta(ge=1)]


class KillReplica(Body, tag="kill_replica", frozen=True):
    """Coordinator -> node: SIGKILL to a process; its end is reported as any other."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    born: Count


class ReplicaEnded(Body, tag="replica_ended", frozen=True):
    """Node -> coordinator: a process has ended, or could not be started. `log` is the end of its log."""

    stage: Annotated[str, Meta(min_length=1, max_length=64)]
    replica: Annotated[int, Meta(ge=0, le=65535)]
    born: Count
    how: Annotated[str, Meta(max_length=4096)]
    log: Annotated[str, Meta(max_length=65536)] = ""


class Launched(Body, tag="launched", frozen=True):
    """Coordinator -> node: every replica is ready."""


NodeToCoordinator = NodeHello | NodeBeat | NodeLeaving | ReplicaEnded
CoordinatorToNode = NodeWelcome | NodeBeat | StartReplica | KillReplica | Launched | Shutdown | Renew
