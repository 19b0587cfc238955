"""Client channel: between a client and the coordinator."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.common import Abort, Credit, Failed
from omni_actors.protocol.fields import TRACEPARENT, Moment, Name, Priority, ReplicaIndex, Seed, StageNameOrEmpty
from omni_actors.protocol.header import Body
from omni_actors.protocol.payloads import AdditionalInformationPayload, Parameter, Prompt, SpeechAbility, StageParams
from omni_actors.protocol.results import AudioChunk, ImageChunk, LatentsChunk, StageUsage, StepsDone, TextDelta
from omni_actors.protocol.telemetry import RequestTimeline
from omni_actors.protocol.tensors import TensorRef


class Submit(Body, tag="submit", frozen=True):
    """Client -> coordinator: run this request, whose id and deadline are in the header.

    Attributes:
        params: parameters by stage name.
        seed: chosen at random if `None`.
        priority: for the engines' schedulers; lower values come first.
        traceparent: the caller's span (W3C Trace Context).
        information: for the stages that want it, by name. Its tensors are in the buffers after those of the prompt.
        tenant: the part of the client's share of slots that the request counts for.
    """

    prompt: Prompt
    modalities: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("text", "audio")
    voice: str | None = None
    params: Annotated[dict[Name, StageParams], Meta(max_length=64)] = {}
    seed: Seed | None = None
    priority: Priority = 0
    traceparent: Annotated[str, Meta(pattern=TRACEPARENT)] | None = None
    sent: Moment = 0.0
    information: AdditionalInformationPayload | None = None
    tenant: Annotated[str, Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        of_prompt = len(self.prompt.tensor_refs())
        information = self.information.tensor_refs() if self.information is not None else ()
        if any(ref.buffer < of_prompt for ref in information):
            raise InvalidPayload("The tensors of additional information come after those of the prompt.")

    def tensor_refs(self) -> tuple[TensorRef, ...]:
        """References to the tensors whose bytes travel as buffers of the message."""
        information = self.information.tensor_refs() if self.information is not None else ()
        return (*self.prompt.tensor_refs(), *information)


class Done(Body, tag="done", frozen=True):
    """Coordinator -> client, terminal: everything was delivered. `usage` is by stage name."""

    usage: dict[str, StageUsage]


class Describe(Body, tag="describe", frozen=True):
    """Client -> coordinator: describe the pipeline and its state."""


class StageStatus(Struct, frozen=True):
    """State of one replica as the coordinator sees it. A `spare` takes requests only in the place of another.

    `start` are the seconds that the phases of its process's start took, empty until it is ready. `node` is the rank of
    its node. It is `joining` from a `scale` until it is first ready, and `leaving` from one until it is gone.
    """

    stage: str
    replica: int
    epoch: int
    state: str
    pid: int
    in_flight: int
    counts: dict[str, int] = {}
    spare: bool = False
    start: dict[str, float] = {}
    node: int = 0
    joining: bool = False
    leaving: bool = False


class Description(Body, tag="description", frozen=True):
    """Coordinator -> client: the answer to `Describe`.

    Attributes:
        sample_rate: of the audio, in Hz; 0 without audio.
        in_flight: requests of all clients that have a slot, at most `max_in_flight`.
        queued: those that wait for one.
        speech_waiting: answers whose speech waits until it can be made in time.
        speech_running: those whose speech is made.
        speech_places: how many may be spoken at a time, as far as was measured; 0 if none has to wait.
        requests: the asking client's own requests in flight; one that it waits for and does not find here is lost.
        counts: what the coordinator refused or dropped, by reason.
        outputs: the stage that produces each modality.
        sampling_stages: stages for which a request may set parameters, in the pipeline's order.
        adapters: names of LoRA adapters; each is also the name of a model.
        max_media: how many media a prompt may have, by modality; no limit for those that are missing.
        parameters: those that a stage's model declares, by stage; stages whose model declares none are missing.
        speech: what the pipeline can do if it speaks the text that it is given; `None` if it answers.
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
    speech_waiting: int = 0
    speech_running: int = 0
    speech_places: int = 0
    parameters: dict[str, tuple[Parameter, ...]] = {}
    speech: SpeechAbility | None = None


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
        if needs_stage != bool(self.stage):
            raise InvalidPayload(
                f"The operation {self.operation} {'needs a' if needs_stage else 'does not take a'} stage."
            )
        if scales != (self.count is not None):
            raise InvalidPayload(
                f"The operation {self.operation} {'needs a' if scales else 'does not take a'} count.", field="count"
            )
        if self.node is not None and not scales:
            raise InvalidPayload(f"The operation {self.operation} does not take a node.", field="node")


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


class Subject(enum.StrEnum):
    """What a client can ask about."""

    METRICS = "metrics"  # Prometheus text
    TIMELINE = "timeline"  # of the request `request_id`
    RECENT = "recent"  # timelines of the last `count` requests that ended, the newest first


class Observe(Body, tag="observe", frozen=True):
    """Client -> coordinator: send metrics or timelines."""

    subject: Subject
    request_id: Annotated[str, Meta(max_length=128)] = ""
    count: Annotated[int, Meta(ge=1, le=200)] = 20


class Observation(Body, tag="observation", frozen=True):
    """Coordinator -> client: the answer to `Observe`."""

    text: str = ""
    timelines: tuple[RequestTimeline, ...] = ()


ClientToCoordinator = Submit | Abort | Describe | Credit | Operate | Observe
CoordinatorToClient = (
    TextDelta | AudioChunk | ImageChunk | LatentsChunk | StepsDone | Done | Failed | Description | Report | Observation
)
