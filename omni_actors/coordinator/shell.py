"""The coordinator's shell: sockets and timers around two pure machines. It carries out what they decide.

What a restarted coordinator must know is in a file. Without it, which is until an operator changes something, the
pipeline is as configured. The next launch removes it.

`core.requests` decides about requests, `core.fleet` about processes. Three bound sockets: clients (ROUTER), control
(ROUTER, to every stage process and node agent) and results (PULL, from every stage process); one PUSH link to each
replica's inbox. One asyncio loop; no tensor is ever looked at.
"""

from __future__ import annotations

import asyncio
import collections
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_actors.coordinator import CoordinatorSpec
from omni_actors.coordinator.core.fleet import TICK_SECONDS as FLEET_TICK_SECONDS
from omni_actors.coordinator.core.fleet import Fleet
from omni_actors.coordinator.core.hosts import from_node
from omni_actors.coordinator.core.instructions import (
    Announce,
    FleetInstruction,
    GiveUp,
    Instruction,
    Log,
    Measured,
    Remember,
    RememberedReplica,
    ReplicaHolds,
    ReplicaLost,
    ReplicaReady,
    ReplicaRegistered,
    ServeClients,
    ShowProgress,
    TellNode,
    TellReplica,
    ToClient,
)
from omni_actors.coordinator.core.operations import operate
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.coordinator.links import ClientLinks, ControlLinks, StageLinks
from omni_actors.coordinator.reports import Reports, check_operator
from omni_actors.errors import OmniError, StartupError, Unauthorized
from omni_actors.host.processes import STEADY, at_most, end_tasks
from omni_actors.host.run_directory import FLEET
from omni_actors.logs import get_logger, redraw, say
from omni_actors.protocol.codec import BadBody, BadHeader, Decoder
from omni_actors.protocol.fields import Body, Header, identity_of
from omni_actors.protocol.messages import (
    Abort,
    ClientToCoordinator,
    Credit,
    Describe,
    Failed,
    FromStage,
    MoreText,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeToCoordinator,
    Observe,
    Operate,
    Operation,
    ReplicaEnded,
    Report,
    Snapshot,
    StageToCoordinator,
    Submit,
)
from omni_actors.telemetry.collector import TelemetryCollector
from omni_actors.transport.curve import EVERYONE, KeyOwner, KeyOwners, load_keys
from omni_actors.transport.link import Traffic
from omni_actors.transport.sockets import SocketReader, Sockets

if TYPE_CHECKING:
    from omni_actors.telemetry.otlp import OtlpExporter

logger = get_logger(__name__)


def read_memory(file: Path) -> list[RememberedReplica]:
    """What the coordinator before this one has written; nothing if it had nothing to remember.

    Raises:
        StartupError: the file is broken.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[RememberedReplica])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise StartupError(
            f"Cannot read {file}, by which the coordinator remembers how stages were scaled and what was drained: "
            f"{error}.",
            hint="Put the file back as it was; or remove it, and the pipeline goes on with the replicas of its "
            "configuration.",
        ) from error


def write_memory(file: Path, replicas: Sequence[RememberedReplica]) -> None:
    """Replace the file. If that fails, the log says what a restarted coordinator would not know."""
    new = file.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(replicas))
        os.replace(new, file)
    except OSError as error:
        logger.error(
            "a restarted coordinator would not know of the last scaling or drain: cannot write %s: %s; make room, and "
            "give the command again",
            file,
            error,
        )


TICK_SECONDS = 0.1
LOOK_SECONDS = 1.0  # between two looks at the socket files
GONE_SECONDS = 0.5  # between two looks for clients whose connection was closed
SWEEP_SECONDS = 10.0  # until what is known of a client that has nothing in flight is forgotten
CLIENTS = "clients"  # all of them together, as the receiver of an edge
FROM_NODES = (NodeHello, NodeBeat, NodeLeaving, ReplicaEnded)


class Coordinator:
    """Binds its sockets when created; needs a running event loop.

    Args:
        exporter: receives the timelines of requests that have ended.

    Raises:
        StartupError: what was kept by the coordinator before cannot be read.
    """

    def __init__(self, spec: CoordinatorSpec, exporter: OtlpExporter | None = None) -> None:
        self._pipeline = pipeline = spec.pipeline
        self._memory = Path(spec.run_dir) / FLEET
        remembered = read_memory(self._memory)
        limits = pipeline.limits
        keys = load_keys(pipeline.coordinator.keys_dir)
        self._key_owners = KeyOwners(keys)
        self._sockets = Sockets(max_message_bytes=limits.message_bytes, keys=keys)
        self._clients, self.client_endpoint = self._sockets.router(spec.client, EVERYONE)
        self._control, self.control_endpoint = self._sockets.router(spec.control)
        self._results, results_endpoint = self._sockets.pull(spec.results)
        self._client_decoder: Decoder[ClientToCoordinator] = Decoder(ClientToCoordinator, limits)
        self._control_decoder: Decoder[StageToCoordinator | NodeToCoordinator] = Decoder(
            StageToCoordinator | NodeToCoordinator, limits
        )
        self._results_decoder: Decoder[FromStage] = Decoder(FromStage, limits)

        self._collector = TelemetryCollector(exporter)
        traffic = {CLIENTS: Traffic()}  # and of edges to stages, as "talker/0"
        self._dropped: collections.Counter[str] = collections.Counter()
        self._broken: Exception | None = None  # why this coordinator cannot go on
        self._idle = asyncio.Event()  # nothing is in flight
        self._idle.set()
        self._stopping = asyncio.Event()
        self._requests = RequestMachine(pipeline, self._collector.requests, spec.generation)
        self.fleet = Fleet(
            pipeline,
            self._requests.replicas,
            client=self.client_endpoint,
            results=results_endpoint,
            new_epoch=lambda: time.time_ns() // 1_000_000,
            began=spec.began,
            now=time.monotonic(),
            started=spec.started,
            memory=remembered,
        )
        self._client_links = ClientLinks(
            self._clients,
            pipeline,
            self._requests,
            self._do,
            self._collector.client_gone,
            traffic[CLIENTS],
            self._dropped,
        )
        self._stages = StageLinks(self._sockets, self._requests, self._fail, traffic, self._dropped)
        decoders: dict[str, Decoder[Any]] = {
            "client": self._client_decoder,
            "control": self._control_decoder,
            "results": self._results_decoder,
        }
        self._reports = Reports(
            self._requests, self.fleet, self._stages.peers, self._collector, decoders, self._dropped, spec.name
        )
        self._client_reader = SocketReader(
            self._clients, self._on_client, self._client_links.flush, self._sockets.receive_from_client, paused=True
        )
        self._control_links = ControlLinks(self._control, pipeline.limits)
        self._control_reader = SocketReader(self._control, self._on_control, self._flush_control)
        self._results_reader = SocketReader(self._results, self._on_result)
        self._obey(self.fleet.start(time.monotonic()))
        self._restoring = asyncio.create_task(self._repeat(LOOK_SECONDS, self._restore_files), name="socket files")
        self._tickers = [
            asyncio.create_task(self._repeat(TICK_SECONDS, self._on_tick), name="coordinator tick"),
            asyncio.create_task(self._repeat(FLEET_TICK_SECONDS, self._on_fleet_tick), name="fleet tick"),
            asyncio.create_task(self._repeat(GONE_SECONDS, self._client_links.end_gone), name="clients that are gone"),
            asyncio.create_task(self._repeat(SWEEP_SECONDS, self._client_links.sweep), name="idle clients"),
            self._restoring,
        ]

    # -- from the start to the end ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until `stop` or a launch that fails. Then let requests finish, tell everyone, and close.

        Raises:
            Exception: what was decided could not be carried out, so that this coordinator no longer knows what is true.
                Stages and nodes go on and wait for the next one.
        """
        try:
            await self._stopping.wait()
            if self._broken is not None:
                raise self._broken
            await self._drain()
        finally:
            if self._broken is None:
                self._do(self._requests.shut_down(STEADY()))
                self._obey(self.fleet.shut_down())
            await self._close()

    def stop(self) -> None:
        """End the pipeline in order; `run` returns when that is done."""
        self.fleet.stop()
        self._stopping.set()

    def give_up(self, error: Exception) -> None:
        """Have `run` end with an error: the launcher starts another coordinator."""
        self._broken = self._broken or error
        self._stopping.set()

    def _on_shutdown(self) -> None:
        say("stopping: an operator asked for it")
        self.stop()

    async def _drain(self) -> None:
        """Admit nothing, and let requests in flight finish until the drain timeout."""
        self._requests.refuse_new()
        if self.fleet.launch.serving and not self._idle.is_set():
            say(f"no request is taken any more; {self._requests.in_flight} are in flight")
            await at_most(self._pipeline.coordinator.drain_timeout, self._idle.wait())

    def abandon(self) -> None:
        """Answer every client at once, as the launcher is dead. Other nodes wait for the next coordinator."""
        self._restoring.cancel()  # stages remove the files from now on
        self.fleet.end()
        self._do(self._requests.shut_down(STEADY()))

    async def _close(self) -> None:
        """Close all sockets; what is queued for clients gets a moment to leave."""
        await end_tasks(*self._tickers)
        for reader in (self._client_reader, self._control_reader, self._results_reader):
            reader.close()
        self._stages.close_all()
        for socket in (self._clients, self._control, self._results):
            socket.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._sockets.context.term)
        await loop.run_in_executor(None, self._collector.close)

    # -- inbound ------------------------------------------------------------------------------------------------------

    def _on_client(self, frames: Sequence[bytes]) -> None:
        key, descriptor, client, *rest = frames
        self._client_links.heard(client, descriptor)
        now = STEADY()
        try:
            envelope = self._client_decoder.decode(rest)
        except BadHeader as error:
            logger.warning("dropped a client message with a bad header: %s", error.reason)
            return
        except BadBody as error:
            self._do(self._requests.reject(client, error.header, error.error, now))
            return
        header, body = envelope.header, envelope.body
        owner = self._key_owners.of(key)
        if owner is None:
            self._lock_out(client, header, body, now)
            return
        match body:
            case Submit():
                self._do(self._requests.submit(client, header, body, envelope.buffers, now, key))
            case MoreText():
                self._do(self._requests.more_text(client, header.request_id, body, now))
            case Abort():
                self._do(self._requests.abort(client, header.request_id, now))
            case Credit():
                self._client_links.granted(client, body)
                self._client_reader.poke()
            case Describe():
                self._answer(client, header, self._reports.describe(client))
            case Operate():
                self._answer(client, header, self._operate(client, owner, body))
            case Observe():
                self._answer(client, header, self._reports.observe(body))
            case Snapshot():
                self._collector.take_clients(client, body)

    def _answer(self, client: bytes, header: Header, body: Body) -> None:
        self._do([ToClient(client, header.request_id, 0, body)])

    def _operate(self, client: bytes, owner: KeyOwner, order: Operate) -> Report | Failed:
        """Carry out an operator's order and report the state of the pipeline after it."""
        text = ""
        try:
            if order.operation is not Operation.STATUS:
                check_operator(owner, order.operation)
            if order.operation is Operation.SHUTDOWN:
                asyncio.get_running_loop().call_soon(self._on_shutdown)  # after the answer
                text = "The pipeline shuts down."
            elif order.operation is not Operation.STATUS:
                text, instructions = operate(self.fleet, order, time.monotonic())
                self._obey(instructions)
        except OmniError as error:
            return Failed.from_error(error)
        return self._reports.report(client, text)

    def _lock_out(self, client: bytes, header: Header, body: Body, now: float) -> None:
        """Refuse a connected client whose key is no longer allowed; it gets nothing more than this answer."""
        self._dropped["client_locked_out"] += 1
        logger.warning("refused a connected client: its key is not allowed any more")
        error = Unauthorized("This key is not allowed any more.", hint="Ask the pipeline's operator for another.")
        self._do(self._requests.end_client(client, error, now))
        if not isinstance(body, Credit):  # credit has no answer
            self._do(self._requests.reject(client, header, error, now))

    def _on_result(self, frames: Sequence[bytes]) -> None:
        now = STEADY()
        try:
            envelope = self._results_decoder.decode(frames)
        except BadHeader as error:
            logger.warning("dropped a result with a bad header: %s", error.reason)
        except BadBody as error:
            self._stages.took(error.header, frames)
            self._do(self._requests.reject_from_stage(error.header, error.error, now))
        else:
            header, body = envelope.header, envelope.body
            if isinstance(body, Credit):
                self._stages.granted(header.sender, body)
                self._do(())  # requests may have waited for it
                return
            self._stages.took(header, frames)
            self._do(self._requests.from_stage(header, body, envelope.buffers, now))

    def _on_control(self, frames: Sequence[bytes]) -> None:
        identity, *rest = frames
        try:
            envelope = self._control_decoder.decode(rest)
        except (BadHeader, BadBody) as error:
            logger.warning("dropped a control message: %s", error)
            return
        header, body = envelope.header, envelope.body
        if isinstance(body, FROM_NODES):
            self.from_node(header.replica, body)
        elif header.sender is not None:
            self._obey(self.fleet.from_stage(header.sender, body, time.monotonic()))
        else:
            logger.warning("dropped a %s without a stage from %s", header.kind, identity.decode(errors="replace"))
            self._dropped["control_of_unknown_replica"] += 1

    def from_node(self, rank: int, body: NodeToCoordinator) -> None:
        """Take a message of a node's agent."""
        self._obey(from_node(self.fleet, rank, body, time.monotonic()))

    # -- outbound -----------------------------------------------------------------------------------------------------

    def _do(self, instructions: Iterable[Instruction]) -> None:
        """Carry out what was decided about requests."""
        self._send(instructions)
        while links := self._stages.congestion():
            for replica_id, congested in links:
                self._send(self._requests.note_congestion(replica_id, congested, STEADY()))
        self._client_reader.poke()  # sending may have swallowed the descriptor's edge
        if self._requests.in_flight or self._requests.queued:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ToClient):
                self._client_links.send(instruction)
            else:
                self._stages.send(instruction)

    def _obey(self, instructions: Iterable[FleetInstruction]) -> None:
        """Carry out what was decided about processes.

        That a process cannot be reached is an event. After any other failure the core believes what has not happened.
        """
        for instruction in instructions:
            try:
                self._carry_out(instruction)
            except Exception as error:
                self.give_up(error)
                raise

    def _carry_out(self, instruction: FleetInstruction) -> None:
        match instruction:
            case Announce(text):
                say(text)
            case ShowProgress(text, is_line):
                redraw(text, is_line)
            case Log(level, text, stage):
                logger.log(level, "%s", text, extra={"stage": stage})
            case TellNode(peer, body) | TellReplica(peer, body):
                try:
                    self._control_links.send(peer, body)
                except OmniError as error:
                    self._obey(self.fleet.unreachable(peer, str(error), time.monotonic()))
                self._control_reader.poke()
            case ReplicaRegistered(replica):
                try:
                    self._stages.open(replica)
                except OmniError as error:
                    self._obey(self.fleet.unreachable(replica.replica_id, str(error), time.monotonic()))
            case ReplicaReady():
                self._do(self._requests.reopen(STEADY()))
            case ReplicaHolds(replica, held):
                self._requests.replica_holds(replica, held)
            case ServeClients():
                self._requests.serve_clients(STEADY())
                self._client_reader.resume()
            case ReplicaLost(replica, why, evidence):
                self._stages.close(replica.replica_id)
                self._collector.process_ended(replica.name)
                self._do(self._requests.replica_lost(replica, STEADY(), why, evidence))
            case Remember(replicas):
                write_memory(self._memory, replicas)
            case Measured(replica, snapshot):
                self._collector.take_snapshot(replica.stage, replica.index, snapshot)
            case GiveUp():
                self._stopping.set()

    def _fail(self, header: Header, error: OmniError) -> None:
        """An attempt did not reach its stage."""
        self._do(self._requests.reject_from_stage(header, error, STEADY()))

    def _flush_control(self) -> None:
        for peer in self._control_links.flush():
            logger.error("%s has taken no control message for too long", identity_of(peer).decode())
            self._obey(self.fleet.unreachable(peer, "it takes no control messages", time.monotonic()))

    # -- time ---------------------------------------------------------------------------------------------------------

    async def _repeat(self, seconds: float, work: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                work()
            except Exception as error:  # nothing else keeps deadlines or restarts processes
                self.give_up(error)
                raise

    def _on_tick(self) -> None:
        self._do(self._requests.tick(STEADY()))
        self._flush_control()
        self._client_links.flush()
        self._collector.requests.tick()
        self._stages.grant(everything=True)
        for replica_id in self._stages.peers.cut(time.monotonic()):
            if replica_id is not None:
                self._obey(self.fleet.link_cut(replica_id))
        self._stages.tick()

    def _restore_files(self) -> None:
        for path in self._sockets.restore_files():
            logger.warning("%s was removed; bound it again", path)
            for reader in (self._client_reader, self._control_reader, self._results_reader):
                reader.poke()  # binding may have consumed the descriptor's edge

    def _on_fleet_tick(self) -> None:
        self._obey(self.fleet.tick(time.monotonic(), self._requests.in_flight + self._requests.queued))
