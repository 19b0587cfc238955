"""The agent of a node: obeys the coordinator about the processes of this host, and reports. It decides nothing.

It says hello with all that runs here whenever it connects, and so also after the coordinator, or the link to it, was
lost; the processes work on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

import omni_actors
from omni_actors import logs
from omni_actors.config import PipelineConfig
from omni_actors.errors import OmniError
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.logs import say
from omni_actors.protocol.codec import BadBody, BadHeader, Decoder, encode
from omni_actors.protocol.control import Reregister, Shutdown
from omni_actors.protocol.header import PROTOCOL_VERSION, Body, Header, ReplicaId
from omni_actors.protocol.nodes import (
    CoordinatorToNode,
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeWelcome,
    ReplicaEnded,
    RunningReplica,
    StartReplica,
)
from omni_actors.transport.curve import load_keys
from omni_actors.transport.reader import SocketReader
from omni_actors.transport.sockets import Sockets, try_send

logger = logs.get_logger(__name__)

SILENCE_SECONDS = 5.0  # after which a coordinator that should answer is taken for lost
LATE_SECONDS = 1.0  # of the agent's own clock: it was stopped, what came meanwhile is not read yet
REPORT_SECONDS = 5.0
LOG_CHARACTERS = 16_000


class NodeAgent:
    """Belongs to the event loop in which it was made.

    Args:
        rank: of this node.
        endpoint: the coordinator's control endpoint.
        on_shutdown: called with the reason, and whether the launch has failed, when the coordinator ends the pipeline.
        on_silence: called again and again while nothing is heard of the coordinator.
        patient: whether to wait for ever for a coordinator that is away, as somebody else starts it again.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        rank: int,
        endpoint: str,
        node: ReplicaProcesses,
        on_shutdown: Callable[[str, bool], None],
        on_silence: Callable[[], None] = lambda: None,
        patient: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._rank = rank
        self._endpoint = endpoint
        self._node = node
        self._on_shutdown = on_shutdown
        self._on_silence = on_silence
        self._patient = patient
        self.launched = asyncio.Event()
        self._next_report = time.monotonic() + REPORT_SECONDS
        self.left_alone = time.monotonic()  # since when no coordinator was heard of
        self._welcomed = self._ever_welcomed = False
        self._ended = False  # the coordinator has ended the pipeline
        self._decoder: Decoder[CoordinatorToNode] = Decoder(CoordinatorToNode, pipeline.limits)
        self._starts: asyncio.Queue[ReplicaId | None] = asyncio.Queue()
        self._starting: set[ReplicaId] = set()
        keys = load_keys(pipeline.coordinator.keys_dir)
        self._sockets = Sockets(max_message_bytes=pipeline.limits.message_bytes, keys=keys)
        node.on_exit = self._on_exit
        self._connect()
        self._starter = asyncio.create_task(self._start_all(), name="starter")
        self._beater = asyncio.create_task(self._beat(), name="node heartbeat")

    async def close(self, reason: str) -> None:
        """Say good-bye, start nothing more and disconnect. Idempotent."""
        if self._beater.cancelled():
            return
        self._beater.cancel()
        await asyncio.gather(self._beater, return_exceptions=True)
        if self._welcomed:
            self._send(NodeLeaving(reason=reason[:16000]))
        if self._starting:
            self._node.abandon_starts()
        else:
            self._node.refuse_starts()
        self._starts.put_nowait(None)
        await self._starter
        self._node.on_exit = lambda identity, how: None  # there is nobody to tell any more
        self._disconnect()
        await asyncio.get_running_loop().run_in_executor(None, self._sockets.context.term)

    # -- connection ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """With a socket of its own for each hello: what an older one still holds must not follow it."""
        self._socket, self._handshake = self._sockets.dealer(self._endpoint, f"node/{self._rank}".encode())
        self._reader = SocketReader(self._socket, self._on_message)
        self._handshake_reader = SocketReader(self._handshake.socket, self._on_connection)
        self._welcomed = False
        hello = NodeHello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self._pipeline.digest(),
            replicas=self._running(),
            launched=self.launched.is_set(),
        )
        self._send(hello)

    def _disconnect(self) -> None:
        self._handshake_reader.close()
        self._reader.close()
        self._handshake.close()
        self._socket.close()

    def _on_connection(self, frames: Sequence[bytes]) -> None:
        """The connection came up, was refused, or was lost."""
        self._handshake.on(frames)
        refusal = self._handshake.verdict.refusal
        if refusal is not None and (self._handshake.verdict.final or not self._ever_welcomed):
            if not self._ended:
                self._ended = True
                self._on_shutdown(str(refusal), True)
        elif self._handshake.verdict.disconnected:
            self._reader.drain()  # its last words may be that this node is to stop
            self._reconnect("it is gone")

    def _reconnect(self, why: str) -> None:
        if self._ended or self._beater.done():
            return
        logger.warning("the connection to the coordinator is renewed: %s", why)
        self._next_report = time.monotonic() + REPORT_SECONDS
        self._disconnect()
        self._connect()

    def _running(self) -> tuple[RunningReplica, ...]:
        processes = {**dict.fromkeys(self._starting, 0), **self._node.running()}
        return tuple(
            RunningReplica(replica_id.stage, replica_id.replica, replica_id.epoch, pid)
            for replica_id, pid in processes.items()
        )

    def _send(self, body: Body) -> None:
        if not try_send(self._socket, encode(Header("", replica=self._rank), body, limits=self._pipeline.limits)):
            logger.warning("the coordinator takes no messages; dropped a %s", type(body).__name__)
        self._reader.poke()

    async def _beat(self) -> None:
        interval = self._pipeline.coordinator.heartbeat_interval
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now > before + interval + LATE_SECONDS:
                self.left_alone = now
            if now > self.left_alone + max(SILENCE_SECONDS, 3 * interval):
                self._on_silence()
            if not self._welcomed:
                self._wait_for_coordinator(now)
                continue
            self._send(NodeBeat())
            if now > self.left_alone + max(SILENCE_SECONDS, 3 * interval):
                self._reconnect(f"it has said nothing for {now - self.left_alone:.1f} s")

    def _wait_for_coordinator(self, now: float) -> None:
        """Say so now and then; give up after a while."""
        settings = self._pipeline.coordinator
        limit = settings.reconnect_timeout if self.launched.is_set() else settings.startup_timeout
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            say(f"node {self._rank} waits for the coordinator at {self._endpoint}")
        if now > self.left_alone + limit and not (self._patient or self._ended):
            self._ended = True
            self._on_shutdown(f"No coordinator was heard of at {self._endpoint} for {limit:g} s.", True)

    def _on_message(self, frames: Sequence[bytes]) -> None:
        try:
            body = self._decoder.decode(frames).body
        except (BadHeader, BadBody) as error:
            logger.error("dropped a control message: %s", error)
            return
        self.left_alone = time.monotonic()
        if isinstance(body, NodeWelcome):
            self._welcomed = self._ever_welcomed = True
            if not self._patient:
                say(f"node {self._rank} is connected to the coordinator at {self._endpoint}")
        elif isinstance(body, Reregister):
            # Not from within the reader of the socket that is closed by it.
            asyncio.get_running_loop().call_soon(self._reconnect, "it does not know this node")
        elif isinstance(body, Launched):
            self.launched.set()
        elif isinstance(body, StartReplica):
            replica_id = ReplicaId(body.stage, body.replica, body.spawn_epoch)
            self._starting.add(replica_id)
            self._starts.put_nowait(replica_id)
        elif isinstance(body, KillReplica):
            self._node.kill_replica(ReplicaId(body.stage, body.replica, body.spawn_epoch))
        elif isinstance(body, Shutdown):
            self._ended = True
            self._on_shutdown(body.reason, body.failed)

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        """One after the other. Never cancelled: a process that nobody knows of would be left."""
        while (replica_id := await self._starts.get()) is not None:
            await self._node.kill_former(replica_id)
            try:
                await self._node.start(replica_id)
            except (OSError, EOFError, OmniError) as error:  # EOFError: the fork server has ended
                self._starting.discard(replica_id)
                self._report(replica_id, f"cannot start a process: {error}", "")
            self._starting.discard(replica_id)

    def _on_exit(self, replica_id: ReplicaId, how: str) -> None:
        self._report(replica_id, how, self._node.log_tail(replica_id))

    def _report(self, replica_id: ReplicaId, how: str, log: str) -> None:
        """Its last lines are told if they fit."""
        ended = ReplicaEnded(
            stage=replica_id.stage,
            replica=replica_id.replica,
            spawn_epoch=replica_id.epoch,
            how=how[:1000],
            log=log[-LOG_CHARACTERS:],
        )
        try:
            self._send(ended)
        except OmniError:
            self._send(msgspec.structs.replace(ended, log=""))
