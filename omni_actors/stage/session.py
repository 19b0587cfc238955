"""A replica's registration with a coordinator: its sockets, its requests, its credit. All of it ends together.

The process and its engine outlive sessions. When the coordinator is gone, the process drops its requests and registers
again with the next epoch. Sockets, credit windows and shared memory are new, so nothing of the former epoch counts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping

import omni_actors
from omni_actors import logs
from omni_actors.config import PipelineConfig
from omni_actors.config.checks import with_defaults
from omni_actors.errors import ProtocolError, StartupError
from omni_actors.host.clocks import STEADY, AnchoredClock
from omni_actors.protocol.common import Credit
from omni_actors.protocol.control import Hello, Ready, Shutdown, Welcome
from omni_actors.protocol.header import PROTOCOL_VERSION, Body, ReplicaId
from omni_actors.stage.actor import StageActor
from omni_actors.stage.device_priority import DemandFlag, DevicePriority
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.stage.engine_loop import TICK_SECONDS, EngineLoop
from omni_actors.stage.events import Control, Lost, Stop
from omni_actors.stage.inbound import Inbound
from omni_actors.stage.inbox import Inbox
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.outbound import Outbound
from omni_actors.stage.processors import StreamProcessor
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.curve import load_keys
from omni_actors.transport.sockets import Sockets

logger = logs.get_logger(__name__)

CLOSE_SECONDS = 4.0


class Session:
    """One registration, from the hello to the closed sockets. Used on the main thread, with two threads of its own.

    Args:
        identity: stage, replica and the epoch of this session.
        spawn_epoch: the epoch of the process's first session.
        inbox_endpoint: where to bind the inbox.
        on_orphaned: called before the process ends because its launcher is gone and its main thread hangs.
        remote_endpoint: where to bind the inbox for other nodes, "" if there are none.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        identity: ReplicaId,
        spawn_epoch: int,
        control_endpoint: str,
        inbox_endpoint: str,
        launcher_pid: int,
        on_orphaned: Callable[[], None],
        remote_endpoint: str = "",
    ) -> None:
        self._pipeline = pipeline
        self._stage = pipeline.stage(identity.stage)
        self._identity = identity
        self._spawn_epoch = spawn_epoch
        self._inbox = Inbox()
        keys = load_keys(pipeline.coordinator.keys_dir)
        self._sockets = Sockets(max_message_bytes=pipeline.limits.message_bytes, keys=keys)
        flow = pipeline.flow
        sends = bool(pipeline.downstream(identity.stage)) and flow.arena_bytes > 0
        self._arena = Arena(flow.arena_bytes) if sends else None
        self._arenas = ArenaReader(self._on_release_due)
        clock = AnchoredClock()
        self._meter = StageMeter(identity.stage, identity.replica, identity.epoch, clock)
        self._inbound = Inbound(
            self._sockets,
            identity,
            control_endpoint,
            inbox_endpoint,
            self._hello,
            self._inbox,
            pipeline.limits,
            pipeline.coordinator.heartbeat_interval,
            launcher_pid,
            on_orphaned=on_orphaned,
            arenas=self._arenas,
            on_credit=self._on_credit,
            clock=clock,
            remote_endpoint=remote_endpoint,
        )
        self._outbound: Outbound | None = None
        self._actor: StageActor | None = None
        self._closed = False

    def tell(self, body: Body) -> None:
        """Send `body` to the coordinator on the control connection."""
        self._inbound.tell(body)

    def stop(self, reason: str) -> None:
        """End the session and the process. May be called in a signal handler."""
        self._inbox.put(Stop(reason))

    # -- start --------------------------------------------------------------------------------------------------------

    def open(self, seconds: float) -> Stop | Lost | None:
        """Say hello and wait to be welcomed; return why the session ended if it ended meanwhile.

        Raises:
            StartupError: the coordinator refused this replica, or did not answer within `seconds`.
        """
        self._inbound.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            event = next(iter(self._inbox.take(TICK_SECONDS, maximum=1)), None)
            if isinstance(event, Stop | Lost):
                return event
            if isinstance(event, Control) and isinstance(event.body, Shutdown):
                raise StartupError(f"The coordinator refused this stage: {event.body.reason}.")
            if isinstance(event, Control) and isinstance(event.body, Welcome):
                outbound = Outbound(
                    self._sockets,
                    self._identity,
                    event.body.results,
                    self._pipeline.limits,
                    self._pipeline.flow,
                    self._inbox.put,
                    self._arena,
                    self._arenas,
                )
                outbound.start()
                self._outbound = outbound
                return None
        raise StartupError(f"The coordinator did not answer within {seconds:g} s.")

    def _hello(self, inbox: str, remote: str) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            package=omni_actors.__version__,
            config=self._pipeline.digest(),
            pid=os.getpid(),
            inbox=inbox,
            arena=self._arena.address if self._arena is not None else None,
            spawn_epoch=self._spawn_epoch,
            remote=remote,
        )

    def _on_credit(self, receiver: ReplicaId | None, credit: Credit) -> None:
        """On the inbound thread."""
        if self._outbound is not None:
            self._outbound.granted(receiver, credit)

    def _on_release_due(self) -> None:
        """On any thread."""
        if self._outbound is not None:
            self._outbound.wake()

    # -- loop ---------------------------------------------------------------------------------------------------------

    def serve(
        self,
        engine: StageEngine,
        processor: type[StreamProcessor] | None,
        flag: DemandFlag,
        priority: DevicePriority,
        phases: Mapping[str, float],
    ) -> Stop | Lost:
        """Report that the engine is ready and serve requests until the session ends.

        Args:
            phases: seconds that the phases of the process's start took, by name.
        """
        if self._outbound is None:
            raise ProtocolError("The stage cannot serve: no coordinator has welcomed it.")
        self._actor = StageActor(self._pipeline, self._stage, self._identity, engine, processor, STEADY, self._meter)
        facts = engine.facts
        wants = (*facts.wants_information, *(processor.wants_information if processor is not None else ()))
        self.tell(
            Ready(
                seconds=sum(phases.values()),
                voices=facts.voices,
                sample_rate=facts.sample_rate,
                max_input_tokens=facts.max_input_tokens,
                wants_information=tuple(dict.fromkeys(wants)),
                phases=dict(phases),
                max_media=dict(facts.max_media),
                parameters=with_defaults(facts.parameters, self._stage.sampling),
                speech=facts.speech,
            )
        )
        loop = EngineLoop(
            self._pipeline, self._actor, engine, self._inbox, self._inbound, self._outbound, self._meter, flag, priority
        )
        return loop.run()

    # -- end ----------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop every request, in the engine too, and close: the coordinator that waited for answers is gone."""
        if self._actor is not None:
            self._actor.drop_all()
        self.close(last_messages=False)

    def close(self, last_messages: bool = True) -> None:
        """End the threads, then close the sockets. Idempotent. `last_messages`: first send what is queued."""
        if self._closed:
            return
        self._closed = True
        # Callbacks run in reverse order, and one that fails does not prevent the others.
        with contextlib.ExitStack() as last_first:
            if self._arena is not None:
                last_first.callback(self._arena.close)
            last_first.callback(self._sockets.context.destroy, linger=0)
            if self._inbound.is_alive():
                last_first.callback(self._inbound.join, CLOSE_SECONDS)
                last_first.callback(self._inbound.finish)
            if self._outbound is not None:
                last_first.callback(self._outbound.join, CLOSE_SECONDS)
                last_first.callback(self._outbound.finish, last_messages)
