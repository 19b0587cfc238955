"""The two threads that own a stage's sockets, so that its main thread only computes.

`Inbound` owns the inbox (PULL) and the control connection (DEALER): it decodes and checks, beats the heart, and
notices when the launcher dies. `Outbound` owns one PUSH per downstream replica and one to the coordinator: it encodes
and sends.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omni_actors.codec import BadBody, BadHeader, Decoder, Envelope, encode
from omni_actors.errors import OmniError, StageLost
from omni_actors.logs import get_logger
from omni_actors.messages import (
    Body,
    CoordinatorToStage,
    Header,
    Heartbeat,
    Hello,
    Hop,
    IntoStage,
    Limits,
    Peer,
)
from omni_actors.stage.actor import Outgoing
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import READABLE, WRITABLE, Poller, Socket, Sockets, drain, try_send
from omni_actors.transport.wake import WakeableQueue

logger = get_logger(__name__)

INBOX_LIMIT = 4096  # decoded messages that may wait for the engine; further ones wait in zmq and at the sender
MAXIMUM_POLL_MS = 200
ORPHAN_SECONDS = 3.0  # how long the main thread may take to end once the launcher is gone


@dataclass(frozen=True, slots=True)
class Received:
    envelope: Envelope[IntoStage]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message about a request that did not decode."""

    header: Header
    error: OmniError


@dataclass(frozen=True, slots=True)
class Control:
    body: CoordinatorToStage


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process: signal, launcher gone, or the thread itself failed (`failed`)."""

    reason: str
    failed: bool = False


Event = Received | Rejected | Control | Stop


@dataclass
class Pulse:
    """What the engine loop tells the heartbeat: written by one thread, read by another, one assignment each."""

    progress: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class Inbound(threading.Thread):
    """Feeds `events`. `hello` makes the first message once the inbox is bound.

    `on_orphaned` is called before this thread ends a process whose launcher is gone and whose main thread hangs.
    """

    def __init__(
        self,
        sockets: Sockets,
        identity: Hop,
        control_endpoint: str,
        inbox_endpoint: str,
        hello: Callable[[str], Hello],
        events: queue.SimpleQueue[Event],
        limits: Limits,
        heartbeat_interval: float,
        launcher_pid: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        super().__init__(name="inbound", daemon=True)
        self._sockets = sockets
        self._identity = identity
        self._control_endpoint = control_endpoint
        self._inbox_endpoint = inbox_endpoint
        self._hello = hello
        self._events = events
        self._limits = limits
        self._heartbeat_interval = heartbeat_interval
        self._launcher_pid = launcher_pid
        self._on_orphaned = on_orphaned
        self._outbox: WakeableQueue[Body | None] = WakeableQueue()
        self._decoder: Decoder[IntoStage] = Decoder(IntoStage, limits)
        self._control_decoder: Decoder[CoordinatorToStage] = Decoder(CoordinatorToStage, limits)
        self.pulse = Pulse()

    def tell(self, body: Body) -> None:
        """Send `body` to the coordinator on the control connection; from any thread."""
        self._outbox.put(body)

    def finish(self) -> None:
        """Send what is queued, close the sockets and end the thread."""
        self._outbox.put(None)

    def rejected(self) -> dict[str, int]:
        return {f"rejected_{reason}": count for reason, count in self._decoder.rejected.items()}

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            # Nobody would hear of a silent end of this thread: the main thread ends the process.
            logger.exception("the inbound thread failed")
            self._events.put(Stop(f"inbound thread: {type(error).__name__}: {error}", failed=True))

    def _run(self) -> None:
        name = f"{self._identity.stage}/{self._identity.replica}/{self._identity.epoch}"
        control = self._sockets.dealer(self._control_endpoint, name.encode())
        inbox, endpoint = self._sockets.pull(self._inbox_endpoint)
        launcher = os.pidfd_open(self._launcher_pid)
        try:
            self._send(control, self._hello(endpoint))
            self._loop(control, inbox, launcher)
        finally:
            os.close(launcher)
            inbox.close()
            control.close()

    def _loop(self, control: Socket, inbox: Socket, launcher: int) -> None:
        poller = Poller()
        poller.register(control, READABLE)
        poller.register(launcher, READABLE)
        poller.register(self._outbox.fileno(), READABLE)
        poller.register(inbox, READABLE)
        next_beat = 0.0
        orphaned_at: float | None = None
        while True:
            # A full inbox stops the reading: zmq's own queue fills, then the sender's outbox.
            poller.modify(inbox, READABLE if self._events.qsize() < INBOX_LIMIT else 0)
            ready = dict(poller.poll(MAXIMUM_POLL_MS))
            if launcher in ready:
                self._events.put(Stop("the launcher is gone"))
                poller.unregister(launcher)
                orphaned_at = time.monotonic()
            if orphaned_at is not None and time.monotonic() > orphaned_at + ORPHAN_SECONDS:
                self._on_orphaned()
                os._exit(1)  # the main thread loads or hangs; an orphan may not keep its GPU memory
            for body in self._outbox.drain():
                if body is None:
                    return
                self._send(control, body)
            if control in ready:
                self._receive_control(control)
            if inbox in ready:
                self._receive(inbox)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._heartbeat_interval
                counts = {**self.pulse.counts, **self.rejected()}
                self._send(control, Heartbeat(progress=self.pulse.progress, counts=counts))

    def _send(self, control: Socket, body: Body) -> None:
        header = Header("", stage=self._identity.stage, replica=self._identity.replica, epoch=self._identity.epoch)
        if not try_send(control, encode(header, body, limits=self._limits)):
            logger.warning("the coordinator takes no control messages; dropped a %s", type(body).__name__)

    def _receive_control(self, control: Socket) -> None:
        for frames in drain(control):
            try:
                self._events.put(Control(self._control_decoder.decode(frames).body))
            except (BadHeader, BadBody) as error:
                logger.error("dropped a control message: %s", error)

    def _receive(self, inbox: Socket) -> None:
        for frames in drain(inbox):
            try:
                self._events.put(Received(self._decoder.decode(frames)))
            except BadHeader as error:
                logger.warning("dropped a message with a bad header: %s", error.reason)
            except BadBody as error:
                self._events.put(Rejected(error.header, error.error))


@dataclass(frozen=True, slots=True)
class NewPeers:
    """The downstream replicas that are up now."""

    peers: tuple[Peer, ...]


class Outbound(threading.Thread):
    """Sends `Outgoing` messages. One that cannot be sent comes back as `Rejected`: the actor ends its request."""

    def __init__(
        self, sockets: Sockets, results_endpoint: str, limits: Limits, events: queue.SimpleQueue[Event]
    ) -> None:
        super().__init__(name="outbound", daemon=True)
        self._sockets = sockets
        self._results_endpoint = results_endpoint
        self._limits = limits
        self._events = events
        self._queue: WakeableQueue[Sequence[Outgoing] | NewPeers | None] = WakeableQueue()
        self._links: dict[Hop, Link] = {}

    def send(self, messages: Sequence[Outgoing]) -> None:
        if messages:
            self._queue.put(messages)

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Connect to new downstream replicas and drop the links to those that are gone."""
        self._queue.put(NewPeers(peers))

    def finish(self) -> None:
        """Send what is queued, then end."""
        self._queue.put(None)

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("the outbound thread failed")
            self._events.put(Stop(f"outbound thread: {type(error).__name__}: {error}", failed=True))

    def _run(self) -> None:
        coordinator = Link(self._sockets.push(self._results_endpoint), time.monotonic)
        try:
            while True:
                self._wait(coordinator)
                for item in self._queue.drain():
                    if item is None:
                        self._last_words(coordinator)
                        return
                    if isinstance(item, NewPeers):
                        self._connect(item.peers)
                    else:
                        for message in item:
                            self._send(message, coordinator)
                self._flush(coordinator)
        finally:
            for link in (coordinator, *self._links.values()):
                link.close()

    def _wait(self, coordinator: Link) -> None:
        """Until there is something to send or a slow peer takes more."""
        poller = Poller()
        poller.register(self._queue.fileno(), READABLE)
        for link in (coordinator, *self._links.values()):
            if link.backlog:
                poller.register(link.socket, WRITABLE)
        poller.poll(MAXIMUM_POLL_MS)

    def _connect(self, peers: Sequence[Peer]) -> None:
        wanted = {Hop(peer.stage, peer.replica, peer.epoch): peer.inbox for peer in peers}
        for hop in [hop for hop in self._links if hop not in wanted]:
            self._links.pop(hop).close()
        for hop, inbox in wanted.items():
            if hop not in self._links:
                self._links[hop] = Link(self._sockets.push(inbox), time.monotonic)

    def _send(self, message: Outgoing, coordinator: Link) -> None:
        try:
            frames = encode(message.header, message.body, message.buffers, self._limits)
        except OmniError as error:  # larger than the limits
            self._events.put(Rejected(message.header, error))
            return
        target = message.destination
        link = coordinator if target is None else self._links.get(target)
        if link is None or not link.send(message.header.request_id, frames):
            what = "has no link" if link is None else "has taken no messages for so long that its outbox is full"
            self._events.put(Rejected(message.header, StageLost(f"The receiver {target or 'coordinator'} {what}.")))

    def _flush(self, coordinator: Link) -> None:
        for hop, link in self._links.items():
            link.flush()
            if link.stalled():
                for request_id in link.give_up():
                    error = StageLost(f"{hop.stage}/{hop.replica} takes no messages.")
                    self._events.put(Rejected(Header("", request_id=request_id), error))
        coordinator.flush()

    def _last_words(self, coordinator: Link) -> None:
        deadline = time.monotonic() + 1.0
        while coordinator.backlog and time.monotonic() < deadline:
            coordinator.socket.poll(50, WRITABLE)
            coordinator.flush()
