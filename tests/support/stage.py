"""A stage actor under test: an engine that records what it is asked, a clock set by hand, short ways to speak to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from omni_actors.config import FlowConfig, PipelineConfig, StageConfig
from omni_actors.protocol.codec import BufferList, Envelope
from omni_actors.protocol.fields import Header, HostTensor, Limits, ReplicaId, pack_token_ids
from omni_actors.protocol.messages import Abort, Chunk, Ended, Failed, Hello, OpenRequest
from omni_actors.protocol.payloads import Prompt, StageParams
from omni_actors.stage.actor import StageActor
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, StageEngine, StageInputs, StageRequest
from omni_actors.stage.inbound import Inbound, Inbox
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.outbound import Outgoing
from omni_actors.stage.processors import PROCESSORS
from omni_actors.transport.arena import ArenaReader
from omni_actors.transport.sockets import Sockets
from tests.support.builders import pipeline
from tests.support.clock import Clock

STAGES = ("prompt", "thinker", "talker", "code2wav")
ROUTE = tuple(ReplicaId(stage, 0, 5) for stage in STAGES)
EMPTY = {
    "requests": 0,
    "early_requests": 0,
    "early_chunk_bytes": 0,
    "retained": 0,
    "retained_bytes": 0,
    "engine_requests": 0,
}


class RecordingEngine(StageEngine):
    """Does what a test puts into `events` and `refuse`."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.held: set[str] = set()
        self.events: list[EngineEvent] = []
        self.refuse: Exception | None = None

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts()

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        self.calls.append(("start", request, inputs))
        if self.refuse is not None:
            raise self.refuse
        self.held.add(request.request_id)

    def extend(self, request_id: str, rows: HostTensor | None = None, *, token_ids=(), complete: bool) -> None:
        self.calls.append(("extend", request_id, rows, *([tuple(token_ids)] if token_ids else []), complete))
        if self.refuse is not None:
            raise self.refuse

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))
        self.held.discard(request_id)

    def runnable(self) -> bool:
        return bool(self.events)

    def step(self) -> Sequence[EngineEvent]:
        events, self.events = self.events, []
        return events

    def counts(self) -> dict[str, int]:
        return {"requests": len(self.held)}

    def shutdown(self) -> None: ...

    def started(self) -> list[StageInputs]:
        return [call[2] for call in self.calls if call[0] == "start"]


class StageUnderTest:
    """An actor with its engine and clock, and short ways to speak to it."""

    def __init__(
        self,
        name: str,
        engine: StageEngine | None = None,
        processor: str = "passthrough",
        flow: FlowConfig | None = None,
        stage: StageConfig | None = None,
        meter: StageMeter | None = None,
        **coordinator: object,
    ) -> None:
        config: PipelineConfig = msgspec.structs.replace(pipeline(**coordinator), flow=flow or FlowConfig())
        self.name = name
        self.engine = engine or RecordingEngine()
        self.clock = Clock(1000.0)
        self.identity = ReplicaId(name, 0, 5)
        stage = stage or config.stage(name)
        self.stage = stage
        of_input = PROCESSORS[processor] if stage.inputs else None
        self.actor = StageActor(config, stage, self.identity, self.engine, of_input, self.clock, meter)

    def expect(
        self,
        request_id: str = "r1",
        prompt: str = "",
        route: tuple[ReplicaId, ...] = ROUTE,
        deadline: float = 0.0,
        attempt: int = 0,
        **fields: object,
    ) -> list[Outgoing]:
        given = Prompt(token_ids=pack_token_ids(list(prompt.encode()))) if prompt else None
        body = OpenRequest(route=route, params=StageParams(), seed=3, prompt=given, **fields)
        return self.actor.receive(Envelope(Header("expect", request_id, attempt=attempt, deadline=deadline), body))

    def chunk(
        self,
        request_id: str = "r1",
        seq: int = 0,
        source: ReplicaId | None = None,
        attempt: int = 0,
        tensors: dict[str, HostTensor] | None = None,
        **fields: object,
    ) -> list[Outgoing]:
        replica_id = source or ROUTE[STAGES.index(self.name) - 1]
        buffers = BufferList()
        refs = {name: buffers.add(tensor) for name, tensor in (tensors or {}).items()}
        header = Header("chunk", request_id, replica_id.stage, replica_id.replica, replica_id.epoch, attempt, seq)
        return self.actor.receive(Envelope(header, Chunk(tensors=refs, **fields), tuple(buffers.buffers)))

    def tokens(
        self, text: str, seq: int = 0, request_id: str = "r1", final: bool = True, start: int = 0, attempt: int = 0
    ) -> list[Outgoing]:
        token_ids = pack_token_ids(list(text.encode()))
        return self.chunk(request_id, seq, attempt=attempt, token_ids=token_ids, start=start, final=final)

    def abort(self, request_id: str = "r1", attempt: int = 0) -> list[Outgoing]:
        return self.actor.receive(Envelope(Header("abort", request_id, attempt=attempt), Abort()))

    def ended(self, *request_ids: str) -> None:
        """The coordinator says that these are over everywhere."""
        assert self.actor.receive(Envelope(Header("ended"), Ended(request_ids=request_ids or ("r1",)))) == []

    def held(self) -> dict[str, int]:
        counts = self.actor.counts()
        return {name: count for name, count in counts.items() if not name.startswith(("total_", "dropped_"))}

    def do(self, *events: EngineEvent) -> list[Outgoing]:
        self.engine.events += events
        return self.actor.step()


def failed(messages: list[Outgoing]) -> Failed:
    (message,) = messages
    assert isinstance(message.body, Failed)
    assert message.destination is None
    return message.body


def inbound_of(
    sockets: Sockets, identity: ReplicaId, control: str, endpoint: str, inbox: Inbox, **changes: Any
) -> Inbound:
    """The thread that receives for a stage, not started, of a launcher that is this process."""
    given: dict[str, Any] = {
        "hello": lambda inbox, remote: Hello(1, "p", "c", 1, inbox, remote=remote),
        "limits": Limits(),
        "heartbeat_interval": 0.05,
        "launcher_pid": os.getpid(),
        "on_orphaned": lambda: None,
        "arenas": ArenaReader(lambda: None),
        "on_credit": lambda receiver, credit: None,
    }
    return Inbound(sockets, identity, control, endpoint, inbox=inbox, **{**given, **changes})
