"""One request between admission and its one terminal message: what the coordinator knows of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
from msgspec import Struct

from omni_actors.coordinator.core.replicas import REQUEST_TRANSITIONS, Evidence, RequestEvent, RequestState
from omni_actors.errors import advance
from omni_actors.protocol.codec import BufferList, Frame
from omni_actors.protocol.delivery import Delivery
from omni_actors.protocol.fields import ATTEMPTS, HostTensor, ReplicaId
from omni_actors.protocol.messages import RequestStatus, StageUsage
from omni_actors.protocol.payloads import NO_INFORMATION, AdditionalInformationPayload, Prompt, StageParams, text_prompt
from omni_actors.sharing import Ticket

LISTED_LOSSES = 8  # the newest ones, for operators


class Loss(Struct, frozen=True):
    """A replica that died while it held a request.

    `evidence` is what that says against the request, `alone` whether the replica computed no other one, and `seconds`
    how long it had held the request.
    """

    replica_id: ReplicaId
    why: str
    evidence: Evidence
    alone: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.replica_id.name} (epoch {self.replica_id.epoch}): {self.why}"


class Retained(Struct, frozen=True):
    """What the client sent for the stages, kept to run a request again."""

    prompt: Prompt
    buffers: Sequence[Frame]  # those of the prompt, then those of the information
    size: int  # bytes that count for the budget
    information: AdditionalInformationPayload = NO_INFORMATION

    @property
    def prompt_buffers(self) -> Sequence[Frame]:
        """The prompt's own buffers, without those of the information."""
        return self.buffers[: len(self.buffers) - len(self.information.tensor_refs())]

    def with_text(self, text: str) -> Retained:
        """The same with more text, of a prompt that is a text."""
        prompt = text_prompt((self.prompt.only_text or "") + text)
        return msgspec.structs.replace(self, prompt=prompt, size=self.size + len(text))

    def select_information(self, names: Collection[str], buffers: BufferList) -> AdditionalInformationPayload:
        """Return the information with these names, whose tensors become buffers of a message."""
        chosen = {name: entry for name, entry in self.information.entries.items() if name in names}
        values = AdditionalInformationPayload(chosen).values(
            lambda ref: HostTensor(ref.dtype, ref.shape, self.buffers[ref.buffer])
        )
        return AdditionalInformationPayload.of(values, buffers.add)


class ActiveRequest(Struct):
    """A request between admission and its terminal message.

    `attempt` is the number of the newest attempt, `attempts` the one that each bound stage works on: when a replica is
    lost, only its stage and those after it run again. `losses_made_up` counts what `max_attempts` bounds.
    """

    request_id: str
    client: bytes
    stages: tuple[str, ...]
    modalities: frozenset[str]
    deadline: float
    params: dict[str, StageParams]
    seed: int
    voice: str | None = None
    priority: int = 0
    retained: Retained | None = None
    parts: tuple[bytes, ...] = ()  # hashes by which its conversation is recognized
    information: frozenset[str] = frozenset()  # names of what the client sent, also when it is no longer kept
    more_text: bool | None = None  # that of `Submit`; false once the text is complete
    text_length: int = 0  # characters of a text that comes in parts
    state: RequestState = RequestState.QUEUED
    bound: dict[str, ReplicaId] = {}  # by stage; not all of them while it waits
    attempt: int = 0
    attempts: dict[str, int] = {}
    opened_at: dict[str, float] = {}  # when each bound stage was
    losses_made_up: int = 0
    client_seq: int = 0
    next_seq: dict[str, int] = {}
    usage: dict[str, StageUsage] = {}
    delivery: Delivery = msgspec.field(default_factory=Delivery)
    losses: list[Loss] = []
    ticket: Ticket | None = None  # with which it got its slot
    suspected_by: str | None = None  # the stage in which it runs apart from others, to see if it crashes it again

    def on(self, event: RequestEvent) -> None:
        """Enter the state that follows."""
        self.state = advance(REQUEST_TRANSITIONS, self.state, event)

    @property
    def route(self) -> tuple[ReplicaId, ...]:
        """The replicas that it is bound to, in order of the pipeline."""
        return tuple(self.bound[stage] for stage in self.stages if stage in self.bound)

    @property
    def missing(self) -> list[str]:
        """Its stages that are bound to no replica, in order of the pipeline."""
        return [stage for stage in self.stages if stage not in self.bound]

    def evidence(self, stage: str, alone: bool = False) -> int:
        """Sum of what counts against this request in a stage; `alone`: of losses when no other was computed."""
        losses = [loss for loss in self.losses if loss.replica_id.stage == stage and (loss.alone or not alone)]
        return sum(loss.evidence for loss in losses)

    def forgive(self, excused: Callable[[ReplicaId], bool]) -> None:
        """Stop counting the losses of some replicas against this request."""
        self.losses = [
            msgspec.structs.replace(loss, evidence=Evidence.NONE) if excused(loss.replica_id) else loss
            for loss in self.losses
        ]

    def history(self) -> str:
        """All losses in one line, for errors and operators."""
        return "; ".join(str(loss) for loss in self.losses)

    def lost_before(self) -> str:
        """A sentence about earlier losses to append to an error, "" if there were none."""
        return f" It was lost before: {self.history()}." if self.losses else ""

    def status(self, now: float) -> RequestStatus:
        """What operators see of it."""
        return RequestStatus(
            self.request_id,
            self.state,
            self.attempt % ATTEMPTS,
            tuple(replica_id.name for replica_id in self.route),
            tuple(self.usage),
            self.deadline - now,
            tuple(str(loss) for loss in self.losses[-LISTED_LOSSES:]),
        )
