"""The agent of a node: starts and kills processes of this host as the coordinator commands, and reports their ends.

It decides nothing itself. Whenever it connects, also after the coordinator or the link to it was lost, it says hello
with a list of all that runs here; the processes keep working meanwhile.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

import omni_actors
from omni_actors import logs
from omni_actors.config import PipelineConfig, host_devices
from omni_actors.errors import OmniError
from omni_actors.host.processes import at_most, end_tasks
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.logs import say
from omni_actors.protocol.codec import BadBody, BadHeader, Decoder, encode
from omni_actors.protocol.fields import PROTOCOL_VERSION, Body, Header, ReplicaId, identity_of
from omni_actors.protocol.messages import (
    CoordinatorToNode,
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeWelcome,
    ReplicaEnded,
    Reregister,
    Shutdown,
    StartReplica,
)
from omni_actors.transport.curve import load_keys
from omni_actors.transport.sockets import SocketReader, Sockets, drop_queued, try_send

logger = logs.get_logger(__name__)

SILENCE_SECONDS = 5.0  # after which a coordinator that should answer counts as lost
LATE_SECONDS = 1.0  # a heartbeat this late means that the agent itself was stopped, with messages still unread
REPORT_SECONDS = 5.0  # between two reports of waiting for the coordinator
LOG_CHARACTERS = 16_000


@dataclass(eq=False)
class NodeAgent:
    """One node's connection to the coordinator. Belongs to the event loop in which it was made.

    Args:
        on_shutdown: called with the reason, and whether the launch has failed, when the coordinator ends the pipeline
            or cannot be reached.
        on_silence: called repeatedly, with seconds, while nothing is heard from the coordinator. The agent then waits
            for as long as it takes, as this makes sure that the coordinator is restarted; without it, it gives up.
    """

    pipeline: PipelineConfig
    endpoint: str
    processes: ReplicaProcesses
    on_shutdown: Callable[[str, bool], None]
    on_silence: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        self._rank = self.pipeline.cluster.node_rank
        self.launched = asyncio.Event()  # set once the coordinator says that the pipeline is ready
        self._next_report = time.monotonic() + REPORT_SECONDS
        self._last_heard = time.monotonic()
        self._welcomed = self._ever_welcomed = False
        self._ended = asyncio.Event()  # the pipeline or this node's part in it has, or this agent has given up
        self._drains = False
        self._decoder: Decoder[CoordinatorToNode] = Decoder(CoordinatorToNode, self.pipeline.limits)
        self._starts: asyncio.Queue[tuple[ReplicaId, int] | None] = asyncio.Queue()
        self._starting: set[ReplicaId] = set()
        keys = load_keys(self.pipeline.coordinator.keys_dir)
        self._sockets = Sockets(max_message_bytes=self.pipeline.limits.message_bytes, keys=keys)
        self.processes.on_exit = self._on_exit
        self._connect()
        self._starter = asyncio.create_task(self._start_replicas(), name="starter")
        self._beater = asyncio.create_task(self._beat(), name="node heartbeat")

    async def drain(self, seconds: float) -> None:
        """Wait until the replicas of this node have finished what they hold, at most `seconds`; they get no more."""
        if not seconds or not self.launched.is_set() or not self._welcomed or self._ended.is_set():
            return
        say(f"node {self._rank} leaves; its requests have {seconds:g} s to finish")
        self._drains = True
        self._send(NodeLeaving(drains=True))
        await at_most(seconds, self._ended.wait())

    async def close(self, reason: str) -> None:
        """Tell the coordinator, start nothing more and disconnect. Idempotent."""
        if self._beater.cancelled():
            return
        await end_tasks(self._beater)
        if self._welcomed:
            self._send(NodeLeaving(reason=reason[:16000]))
        self.processes.refuse_starts(interrupt=bool(self._starting))
        self._starts.put_nowait(None)
        await self._starter
        self.processes.on_exit = lambda identity, how, code: None  # the coordinator is no longer there to read it
        self._disconnect()
        await asyncio.get_running_loop().run_in_executor(None, self._sockets.context.term)

    # -- connection ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Open a new socket and say hello. A new one each time: what is still queued in the old one must not follow."""
        self._socket, self._handshake = self._sockets.dealer(self.endpoint, identity_of(self._rank))
        self._reader = SocketReader(self._socket, self._on_message)
        self.monitor = SocketReader(self._handshake.socket, self._on_connection)
        self._welcomed = False
        hello = NodeHello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self.pipeline.digest(),
            processes=tuple(self._starting | self.processes.running().keys()),
            launched=self.launched.is_set(),
            devices=host_devices(),
        )
        self._send(hello)

    def _disconnect(self) -> None:
        self.monitor.close()
        self._reader.close()
        self._handshake.close()
        self._socket.close()

    def _on_connection(self, frames: Sequence[bytes]) -> None:
        """Handle an event of the connection: it was established, refused or lost."""
        self._handshake.on(frames)
        if self._handshake.refusal is not None and (self._handshake.final or not self._ever_welcomed):
            self._give_up(str(self._handshake.refusal))
        elif self._handshake.disconnected:
            self._reader.drain()  # the coordinator's last message may be that this node is to stop
            self._reconnect("the coordinator has disconnected")

    def _reconnect(self, why: str) -> None:
        if self._ended.is_set() or self._beater.done():
            return
        logger.warning("reconnecting to the coordinator: %s", why)
        self._next_report = time.monotonic() + REPORT_SECONDS
        drop_queued(self._socket)  # it would connect once more to send that, with the same identity as the next one
        self._disconnect()
        self._connect()

    def _give_up(self, why: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self.on_shutdown(why, True)

    def _send(self, body: Body) -> None:
        if not try_send(self._socket, encode(Header("", replica=self._rank), body, limits=self.pipeline.limits)):
            logger.warning("the coordinator accepts no messages; dropped a %s", type(body).__name__)
        self._reader.poke()

    async def _beat(self) -> None:
        """Send heartbeats and watch for the coordinator's silence."""
        interval = self.pipeline.coordinator.heartbeat_interval
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now > before + interval + LATE_SECONDS:
                self._last_heard = now
            silent = now > self._last_heard + max(SILENCE_SECONDS, 3 * interval)
            if silent and self.on_silence is not None:
                self.on_silence(now - self._last_heard)
            if not self._welcomed:
                self._wait_for_coordinator(now)
                continue
            self._send(NodeBeat())
            if silent:
                self._reconnect(f"no message from it for {now - self._last_heard:.1f} s")

    def _wait_for_coordinator(self, now: float) -> None:
        """Report the wait every few seconds; give up in time."""
        settings = self.pipeline.coordinator
        limit = settings.reconnect_timeout if self.launched.is_set() else settings.startup_timeout
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            say(f"node {self._rank} waits for the coordinator at {self.endpoint}")
        if now > self._last_heard + limit and self.on_silence is None:
            self._give_up(f"The coordinator at {self.endpoint} was not heard from for {limit:g} s.")

    def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            body = self._decoder.decode(frames).body
        except (BadHeader, BadBody) as error:
            logger.error("dropped a control message: %s", error)
            return
        self._last_heard = time.monotonic()
        match body:
            case NodeWelcome():
                self._welcomed = self._ever_welcomed = True
                if self._drains:  # another coordinator does not know
                    self._send(NodeLeaving(drains=True))
                elif self.on_silence is None:
                    say(f"node {self._rank} is connected to the coordinator at {self.endpoint}")
            case Reregister():
                # Later: reconnecting closes the socket whose reader has called us.
                asyncio.get_running_loop().call_soon(self._reconnect, "it does not know this node")
            case Launched():
                self.launched.set()
            case StartReplica(process=process, slot=slot):
                self._starting.add(process)
                self._starts.put_nowait((process, slot))
            case KillReplica(process=process):
                self.processes.kill_replica(process)
            case Shutdown():
                self._ended.set()
                self.on_shutdown(body.reason, body.failed)
            case NodeBeat():  # that it was heard is all that it says
                pass

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _start_replicas(self) -> None:
        """Start replicas one after the other. Never cancelled: that could leave a process that no one owns."""
        while (start := await self._starts.get()) is not None:
            replica_id, slot = start
            try:
                await self.processes.kill_former(replica_id)
                await self.processes.start(replica_id, slot)
            except (OSError, EOFError, OmniError) as error:  # EOFError: the fork server has ended
                self._report(replica_id, f"cannot start a process: {error}", "")
            except Exception as error:  # an error in our code: nothing else would tell the coordinator, which waits
                logger.exception("cannot start %s", replica_id.name)
                self._report(replica_id, f"cannot start a process: {error!r}", traceback.format_exc())
            self._starting.discard(replica_id)

    def _on_exit(self, replica_id: ReplicaId, how: str, code: int | None) -> None:
        self._report(replica_id, how, self.processes.log_tail(replica_id), code)

    def _report(self, replica_id: ReplicaId, how: str, log: str, code: int | None = None) -> None:
        """Report the end of a replica, with the last lines of its log if they fit into a message."""
        ended = ReplicaEnded(replica_id, how[:1000], log[-LOG_CHARACTERS:], code)
        try:
            self._send(ended)
        except OmniError:
            self._send(msgspec.structs.replace(ended, log=""))
