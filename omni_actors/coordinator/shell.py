"""The coordinator: sockets around `core.coordination`. One asyncio loop, no tensor is ever looked at.

Three bound sockets: clients (ROUTER), control (ROUTER, to every stage process and node agent) and results (PULL, from
every stage process); one PUSH link to each replica's inbox. Which processes there are is `supervisor.py`'s affair.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

import omni_actors
from omni_actors.config import PipelineConfig
from omni_actors.coordinator.admin import AdminCommands
from omni_actors.coordinator.client_links import ClientLinks
from omni_actors.coordinator.core.health import HealthPolicy
from omni_actors.coordinator.core.lifecycle import Instruction, RequestMachine, ToClient
from omni_actors.coordinator.core.nodes import Greeting, greeting
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.coordinator.core.states import ReplicaEvent, ReplicaState
from omni_actors.coordinator.stage_links import StageLinks
from omni_actors.errors import OmniError, Unauthorized
from omni_actors.logs import get_logger, is_worth_a_line
from omni_actors.protocol.client import (
    ClientToCoordinator,
    Describe,
    Description,
    Observation,
    Observe,
    Operate,
    Subject,
    Submit,
)
from omni_actors.protocol.codec import BadBody, BadHeader, Decoder, encode
from omni_actors.protocol.common import Abort, Credit, Failed
from omni_actors.protocol.control import (
    Fatal,
    Heartbeat,
    Hello,
    Loading,
    Peers,
    Ready,
    Reregister,
    Shutdown,
    StageToCoordinator,
    Welcome,
)
from omni_actors.protocol.header import PROTOCOL_VERSION, Body, Header, ReplicaId
from omni_actors.protocol.nodes import NodeBeat, NodeHello, NodeLeaving, NodeToCoordinator, ReplicaEnded
from omni_actors.protocol.results import FromStage
from omni_actors.protocol.telemetry import Snapshot
from omni_actors.telemetry.collector import Exporter, TelemetryCollector
from omni_actors.telemetry.meters import Meters
from omni_actors.telemetry.prometheus import render
from omni_actors.transport.credit import EdgeMetrics, Traffic
from omni_actors.transport.curve import load_keys
from omni_actors.transport.reader import SocketReader
from omni_actors.transport.sockets import PeerGone, Sockets, receive_with_key, try_send
from omni_actors.transport.zap import EVERYONE, KeyOwners

logger = get_logger(__name__)

TICK_SECONDS = 0.1
CLIENTS = "clients"  # all of them together, as the receiver of an edge
OF_NODES = (NodeHello, NodeBeat, NodeLeaving, ReplicaEnded)


class Endpoints(NamedTuple):
    """Where to bind."""

    client: str
    control: str
    results: str


class Coordinator:
    """Binds its sockets when made; needs a running event loop.

    Args:
        on_change: called after a replica's state or phase changed, for start-up progress and supervision.
        on_node: called with a node's rank and its message.
        on_shutdown: called when an operator asks for the end.
        exporter: gets the timelines of requests that have ended.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        endpoints: Endpoints,
        on_change: Callable[[Replica], None],
        on_node: Callable[[int, NodeToCoordinator], None],
        on_shutdown: Callable[[], None],
        exporter: Exporter | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._watch = TelemetryCollector(exporter)
        self._traffic: dict[str, Traffic] = {}  # of the edges to stages, as "talker/0", and to all clients
        self.state = RequestMachine(pipeline, new_seed=lambda: secrets.randbits(63), observer=self._watch.requests)
        self.supervision = HealthPolicy(pipeline, self.state.replicas)
        self.idle = asyncio.Event()  # nothing is in flight
        self.idle.set()
        self.fatal: dict[ReplicaId, str] = {}  # last words of replicas
        self._dropped: collections.Counter[str] = collections.Counter()
        self._on_change = on_change
        self._on_node = on_node
        self._early: dict[tuple[str, int], tuple[ReplicaId, Hello]] = {}  # whose nodes have not come yet
        self._closing = False
        limits = pipeline.limits
        keys = load_keys(pipeline.coordinator.keys_dir)
        self._key_owners = KeyOwners(keys)
        self._sockets = Sockets(max_message_bytes=limits.message_bytes, keys=keys)
        self._clients, self.client_endpoint = self._sockets.router(endpoints.client, EVERYONE)
        self._control, self.control_endpoint = self._sockets.router(endpoints.control)
        self._results, self.results_endpoint = self._sockets.pull(endpoints.results)
        self._client_decoder: Decoder[ClientToCoordinator] = Decoder(ClientToCoordinator, limits)
        self._control_decoder: Decoder[StageToCoordinator | NodeToCoordinator] = Decoder(
            StageToCoordinator | NodeToCoordinator, limits
        )
        self._results_decoder: Decoder[FromStage] = Decoder(FromStage, limits)
        self._client_links = ClientLinks(
            self._clients, pipeline, self.state, self._do, self._traffic.setdefault(CLIENTS, Traffic()), self._dropped
        )
        self._stages = StageLinks(self._sockets, pipeline, self.state, self._fail, self._traffic, self._dropped)
        self._orders = AdminCommands(pipeline, self.state, self.supervision, self._stages, on_change, on_shutdown)
        self._client_reader = SocketReader(self._clients, self._on_client, self._client_links.flush, receive_with_key)
        self._control_reader = SocketReader(self._control, self._on_control)
        self._results_reader = SocketReader(self._results, self._on_result)
        self._ticker = asyncio.create_task(self._tick(), name="coordinator tick")

    # -- called by the supervisor --------------------------------------------------------------------------------------

    def expect_replica(self, stage: str, index: int, spawn_epoch: int) -> Replica:
        """A process for this replica is about to be started, or runs and will register; 0: nobody knows of one yet."""
        replica = self.state.replicas.add(stage, index, spawn_epoch, node=self.pipeline.stage(stage).node_of(index))
        self._watch.spawned(stage, index, spawn_epoch)
        self.supervision.spawned(replica, time.monotonic())
        early = self._early.get((stage, index))
        if spawn_epoch and early is not None:
            del self._early[(stage, index)]
            self._on_hello(*early)
        return replica

    def tell_node(self, rank: int, body: Body) -> None:
        """Send `body` to a node's agent. One that cannot be reached says hello again when it is back."""
        self._send_control(f"node/{rank}", body)

    def replica_died(self, replica: Replica, why: str) -> None:
        """Its process has ended: what it held runs again or fails, the others learn that it is gone."""
        quiet = self._closing or replica.restart_wanted
        logger.log(logging.DEBUG if quiet else logging.ERROR, "ended: %s", why, extra=_about(replica))
        self._lose(replica, why, not self._closing and self.supervision.plan(replica, time.monotonic()))

    def replica_away(self, replica: Replica, why: str) -> None:
        """Its node is away: what it held runs again elsewhere or fails. It comes back with its node."""
        replica.blameless = replica.left_with_node = True
        logger.error("its node is away: %s", why, extra=_about(replica))
        self._lose(replica, why, restart=False)

    def _lose(self, replica: Replica, why: str, restart: bool) -> None:
        self._stages.close(replica.replica_id)
        self._watch.gone(replica.stage, replica.index)
        self._do(self.state.replica_lost(replica, time.time(), why, restart))
        if not self._closing:
            self._announce_peers()
        self._on_change(replica)

    def refuse_new(self) -> None:
        """Drain: what is in flight goes on."""
        self.state.refuse_new()

    def end_requests(self) -> None:
        """End every request with an answer to its client, and admit none any more."""
        self._closing = True
        self._do(self.state.shut_down(time.time()))

    def tell_shutdown(self, reason: str) -> None:
        """End every request with an answer to its client and ask every stage to stop."""
        self.end_requests()
        for replica in self.state.replicas:
            self._tell_if_known(replica, Shutdown(reason=reason))

    def tell_stop(self, replica: Replica) -> None:
        """Ask one stage process to stop."""
        replica.stopping = True
        self._tell_if_known(replica, Shutdown(reason="it is restarted"))

    def _tell_if_known(self, replica: Replica, body: Body) -> None:
        if replica.alive and replica.state is not ReplicaState.STARTING:
            self._tell(replica, body)

    async def close(self) -> None:
        """Close all sockets; what is queued for clients gets a moment to leave."""
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        for reader in (self._client_reader, self._control_reader, self._results_reader):
            reader.close()
        self._stages.close_all()
        for socket in (self._clients, self._control, self._results):
            socket.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._sockets.context.term)
        await loop.run_in_executor(None, self._watch.close)

    # -- inbound ------------------------------------------------------------------------------------------------------

    def _on_client(self, frames: Sequence[bytes]) -> None:
        key, client, *rest = frames
        now = time.time()
        try:
            envelope = self._client_decoder.decode(rest)
        except BadHeader as error:
            logger.warning("dropped a client message with a bad header: %s", error.reason)
            return
        except BadBody as error:
            self._do(self.state.reject(client, error.header, error.error, now))
            return
        header, body = envelope.header, envelope.body
        owner = self._key_owners.of(key)
        if owner is None:
            self._lock_out(client, header, body, now)
        elif isinstance(body, Submit):
            self._do(self.state.submit(client, header, body, envelope.buffers, now))
        elif isinstance(body, Abort):
            self._do(self.state.abort(client, header.request_id, now))
        elif isinstance(body, Credit):
            self._client_links.granted(client, body)
            self._client_reader.poke()
        elif isinstance(body, Describe):
            self._do([ToClient(client, header.request_id, 0, self.describe(client))])
        elif isinstance(body, Operate):
            answer = self._orders.answer(owner, body, lambda: self.describe(client))
            self._do([ToClient(client, header.request_id, 0, answer)])
        elif isinstance(body, Observe):
            self._do([ToClient(client, header.request_id, 0, self._observe(body))])

    def _lock_out(self, client: bytes, header: Header, body: Body, now: float) -> None:
        """Its key was taken from the allowed ones while it was connected: it gets nothing more than this answer."""
        self._dropped["client_locked_out"] = count = self._dropped["client_locked_out"] + 1
        if is_worth_a_line(count):
            logger.warning("refused a client that is connected: its key is not allowed any more (%d so far)", count)
        error = Unauthorized("This key is not allowed any more.", hint="Ask the pipeline's operator for another.")
        self._do(self.state.end_client(client, error, now))
        if not isinstance(body, Credit):  # which nobody answers
            self._do(self.state.reject(client, header, error, now))

    # -- observers ----------------------------------------------------------------------------------------------------

    def _observe(self, question: Observe) -> Observation | Failed:
        try:
            if question.subject is Subject.METRICS:
                observation = Observation(text=render(self.gather()))
            else:
                observation = self._watch.answer(question)
            encode(Header(""), observation, limits=self.pipeline.limits)  # a pipeline of very many replicas
        except OmniError as error:
            return Failed.from_error(error)
        return observation

    def gather(self) -> Meters:
        """All metrics of the pipeline."""
        rejected = {
            "client": self._client_decoder.rejected,
            "control": self._control_decoder.rejected,
            "results": self._results_decoder.rejected,
        }
        return self._watch.gather(
            self.state.in_flight,
            self.state.retained_bytes,
            {
                (replica.stage, replica.index): (replica.state is ReplicaState.READY, len(replica.requests))
                for replica in self.state.replicas
            },
            self._edge_metrics(),
            rejected,
            self.state.dropped + self._dropped,
        )

    def _edge_metrics(self) -> dict[str, EdgeMetrics]:
        return {target: traffic.metrics() for target, traffic in self._traffic.items()} | self._stages.figures()

    def _on_result(self, frames: Sequence[bytes]) -> None:
        now = time.time()
        try:
            envelope = self._results_decoder.decode(frames)
        except BadHeader as error:
            logger.warning("dropped a result with a bad header: %s", error.reason)
        except BadBody as error:
            self._stages.took(error.header, frames)
            self._do(self.state.reject_from_stage(error.header, error.error, now))
        else:
            header, body = envelope.header, envelope.body
            if isinstance(body, Credit):
                self._stages.granted(ReplicaId(header.stage, header.replica, header.epoch), body)
                return
            self._stages.took(header, frames)
            self._do(self.state.from_stage(header, body, envelope.buffers, now))

    def _on_control(self, frames: Sequence[bytes]) -> None:
        identity, *rest = frames
        try:
            envelope = self._control_decoder.decode(rest)
        except (BadHeader, BadBody) as error:
            logger.warning("dropped a control message: %s", error)
            return
        header, body = envelope.header, envelope.body
        if isinstance(body, OF_NODES):
            self._on_node(header.replica, body)
            return
        if not header.stage:
            self._drop_control(identity, header.kind)
            return
        replica_id = ReplicaId(header.stage, header.replica, header.epoch)
        if isinstance(body, Hello):
            self._on_hello(replica_id, body)
            return
        replica = self.state.replicas.find(*msgspec.structs.astuple(replica_id))
        if replica is None or not replica.alive:
            self._drop_control(identity, header.kind)
            if (
                isinstance(body, Heartbeat)
                and self.state.replicas.current(replica_id.stage, replica_id.replica) is not None
            ):
                self._send_control(_identity(replica_id), Reregister())  # it does not know that it counts as lost
        elif replica.state is ReplicaState.STARTING:  # it speaks of a registration that does not count any more
            self._send_control(_identity(replica_id), Reregister())
        elif isinstance(body, Ready) and replica.state is not ReplicaState.LOADING:
            self._drop_disorder(replica, header.kind)
        else:
            self._on_stage(replica, body)

    def _drop_control(self, identity: bytes, kind: str) -> None:
        logger.warning("dropped a %s of the unknown replica %s", kind, identity.decode(errors="replace"))
        self._dropped["control_of_unknown_replica"] += 1

    def _drop_disorder(self, replica: Replica, kind: str) -> None:
        logger.warning("said %s while %s", kind, replica.state, extra=_about(replica))
        self._dropped["control_out_of_order"] += 1

    def _on_hello(self, replica_id: ReplicaId, hello: Hello) -> None:
        """A process registers, for the first time or again."""
        current = self.state.replicas.current(replica_id.stage, replica_id.replica)
        kind = greeting(current, replica_id.epoch, hello.spawn_epoch or replica_id.epoch)
        if current is None or kind is Greeting.FOREIGN:
            self._drop_control(_identity(replica_id), "hello")
            self._send_control(_identity(replica_id), Shutdown(reason="nobody waits for this process"))
        elif kind is Greeting.EARLY:
            self._early[(replica_id.stage, replica_id.replica)] = replica_id, hello
        elif kind is Greeting.REPEATED:
            self._drop_disorder(current, "hello")
        else:
            if kind is Greeting.RENEWED:
                if current.alive and current.state is not ReplicaState.STARTING:
                    current.blameless = True
                    self._lose(current, "it has registered again", restart=True)
                current = self.state.replicas.add(
                    replica_id.stage, replica_id.replica, replica_id.epoch, current.spawn_epoch, current.node
                )
                current.phase = "registering again"
                self.supervision.spawned(current, time.monotonic())
            self._welcome(current, hello)
            self._on_change(current)

    def _on_stage(self, replica: Replica, body: StageToCoordinator) -> None:
        if isinstance(body, Heartbeat):
            self.supervision.beat(replica, body.progress, time.monotonic())
            replica.counts = body.counts
            self._watch.requests.heard(replica.name, body.sent)
            return
        if isinstance(body, Snapshot):
            self._watch.took(replica.stage, replica.index, body)
            return
        if isinstance(body, Loading):
            replica.phase = body.phase
        elif isinstance(body, Ready):
            replica.on(ReplicaEvent.READY)
            if replica.drain_wanted:  # before it registered again
                replica.on(ReplicaEvent.DRAIN)
            self.supervision.ready(replica, time.monotonic())
            replica.phase, replica.seconds = "ready", body.seconds
            replica.voices, replica.sample_rate = body.voices, body.sample_rate
            replica.max_input_tokens = body.max_input_tokens
            self._do(self.state.reopen(time.time()))
        elif isinstance(body, Fatal):
            self.fatal[replica.replica_id] = body.message
        self._on_change(replica)

    def _welcome(self, replica: Replica, hello: Hello) -> None:
        difference = self.difference(hello)
        if difference:
            self.fatal[replica.replica_id] = f"{replica.name}: {difference}."
            self._tell(replica, Shutdown(reason=difference))
            return
        replica.on(ReplicaEvent.HELLO)
        replica.pid, replica.inbox = hello.pid, hello.inbox
        replica.arena = hello.arena
        self._stages.open(replica)
        self._tell(replica, Welcome(results=self.results_endpoint))
        self._announce_peers()

    def difference(self, hello: Hello | NodeHello) -> str:
        """What keeps a process from working with this one, "" for nothing."""
        ours = (PROTOCOL_VERSION, omni_actors.__version__, self.pipeline.digest())
        theirs = (hello.protocol, hello.package, hello.config)
        return "" if ours == theirs else f"protocol, package and configuration are {theirs} there and {ours} here"

    def _announce_peers(self) -> None:
        """Every stage learns the addresses of the stages after and before it."""
        pipeline, find = self.pipeline, self.state.replicas.peers
        for replica in self.state.replicas:
            if replica.alive and replica.state is not ReplicaState.STARTING:
                peers = Peers(
                    peers=find(pipeline.downstream(replica.stage), replica.node),
                    sources=find(pipeline.stage(replica.stage).source_names, replica.node),
                )
                self._tell(replica, peers)

    # -- outbound -----------------------------------------------------------------------------------------------------

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ToClient):
                self._client_links.send(instruction)
            else:
                self._stages.send(instruction)
        self._client_reader.poke()  # sending may have swallowed the descriptor's edge
        if self.state.in_flight:
            self.idle.clear()
        else:
            self.idle.set()

    def _fail(self, header: Header, error: OmniError) -> None:
        """An attempt did not reach its stage."""
        self._do(self.state.reject_from_stage(header, error, time.time()))

    def _tell(self, replica: Replica, body: Body) -> None:
        self._send_control(_identity(replica.replica_id), body)

    def _send_control(self, identity: str | bytes, body: Body) -> None:
        name = identity.encode() if isinstance(identity, str) else identity
        with contextlib.suppress(PeerGone):  # the supervisor says so, too
            if not try_send(self._control, [name, *encode(Header(""), body, limits=self.pipeline.limits)]):
                logger.warning("%s takes no control messages; dropped %s", name, type(body).__name__)
        self._control_reader.poke()

    # -- time ---------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._on_tick()
            except Exception:  # deadlines are kept by this task alone: it has to go on
                logger.exception("a tick of the coordinator failed")
                self._dropped["failed_tick"] += 1

    def _on_tick(self) -> None:
        self._do(self.state.tick(time.time()))
        self._client_links.flush()
        self._client_links.sweep()
        self._watch.tick()
        self._stages.grant(everything=True)
        for replica_id in self._stages.cut():
            logger.warning("the link to %s was cut: it is to register again", replica_id.name)
            self._send_control(_identity(replica_id), Reregister())
        self._stages.tick()

    def _counts(self) -> dict[str, int]:
        counts = {"replays": self.state.replays, "retained_bytes": self.state.retained_bytes}
        counts |= {f"dropped_{reason}": count for reason, count in (self.state.dropped + self._dropped).items()}
        for channel, decoder in (
            ("client", self._client_decoder),
            ("control", self._control_decoder),
            ("results", self._results_decoder),
        ):
            counts |= {f"rejected_{channel}_{reason}": count for reason, count in decoder.rejected.items()}
        return counts

    def describe(self, client: bytes) -> Description:
        """What a client may know of the pipeline and of its own requests."""
        state = self.state
        return Description(
            pipeline=self.pipeline.name,
            model=self.pipeline.model,
            modalities=tuple(self.pipeline.modalities),
            voices=state.voices,
            sample_rate=state.sample_rate,
            healthy=not state.replicas.missing(),
            in_flight=state.in_flight,
            max_in_flight=self.pipeline.coordinator.max_in_flight,
            stages=tuple(replica.status() for replica in state.replicas),
            requests=state.requests_of(client),
            counts=self._counts(),
            outputs={modality: stage.name for stage in self.pipeline.stages for modality in stage.outputs},
        )


def _identity(replica_id: ReplicaId) -> bytes:
    """The name of a stage's control connection."""
    return f"{replica_id.stage}/{replica_id.replica}/{replica_id.epoch}".encode()


def _about(replica: Replica) -> dict[str, str]:
    """For a log line."""
    return {"stage": replica.name}
