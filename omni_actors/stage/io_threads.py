"""The two threads that own a stage's sockets, so that its main thread only computes.

`Inbound` owns the inbox (PULL) and the control connection (DEALER): it decodes and checks, beats the heart, and
notices when the launcher dies or the coordinator is lost. `Outbound` owns one PUSH per downstream replica, one to the
coordinator and, for credit, one per source replica: it encodes and sends.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omni_actors.codec import BadBody, BadHeader, Decoder, Envelope, Frame, encode
from omni_actors.config import FlowConfig
from omni_actors.errors import OmniError, StageLost
from omni_actors.logs import get_logger
from omni_actors.messages import (
    MAX_BLOCKS,
    Block,
    Body,
    CoordinatorToStage,
    Credit,
    Header,
    Heartbeat,
    Hello,
    Hop,
    IntoStage,
    Limits,
    Peer,
    Peers,
    Renew,
    Welcome,
)
from omni_actors.stage.outgoing import Outgoing
from omni_actors.transport.arena import GRACE_SECONDS, Arena, ArenaReader
from omni_actors.transport.credit import Window, wire_size
from omni_actors.transport.link import Link
from omni_actors.transport.monitor import Departures
from omni_actors.transport.sockets import READABLE, WRITABLE, Poller, Socket, Sockets, arrivals, drain, try_send
from omni_actors.transport.wake import WakeableQueue

logger = get_logger(__name__)

INBOX_LIMIT = 4096  # decoded messages that may wait for the engine; further ones wait in zmq and at the sender
MAXIMUM_POLL_MS = 100
RELEASE_SECONDS = 0.1  # after which blocks are given back even if they are few
EARLY_SECONDS = 5.0  # how long a message waits for the address of a replica that has just been started
LAST_WORDS_SECONDS = 1.0
ORPHAN_SECONDS = 3.0  # how long the main thread may take to end once the launcher is gone


def sender_of(header: Header) -> Hop | None:
    """The replica that sent a message; `None` for the coordinator."""
    return Hop(header.stage, header.replica, header.epoch) if header.stage else None


@dataclass(frozen=True, slots=True)
class Received:
    """A checked message; `size` counts for the credit of its edge."""

    envelope: Envelope[IntoStage]
    size: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message about a request that did not decode (`size` as above), or could not be sent (`size` 0)."""

    header: Header
    error: OmniError
    size: int = 0


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A later stage takes no messages; one or more of this request are lost."""

    request_id: str
    receiver: Hop
    error: OmniError


@dataclass(frozen=True, slots=True)
class Control:
    body: CoordinatorToStage


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process: signal, launcher gone, or the thread itself failed (`failed`)."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The coordinator is gone, or does not know this replica any more: what is in flight is void; register again."""

    reason: str


Event = Received | Rejected | Undelivered | Control | Stop | Lost


@dataclass
class Pulse:
    """What the engine loop tells the heartbeat: written by one thread, read by another, one assignment each."""

    progress: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class Inbound(threading.Thread):
    """Feeds `events`. `hello` makes the first message once the inbox is bound.

    Credit goes to `on_credit` at once, not through the queue: the main thread may be in a long step.
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
        arenas: ArenaReader,
        on_credit: Callable[[Hop | None, Credit], None],
    ) -> None:
        super().__init__(name="inbound", daemon=True)
        self._arenas = arenas
        self._on_credit = on_credit
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
        self._decoder: Decoder[IntoStage] = Decoder(IntoStage, limits, arenas.open)
        self._control_decoder: Decoder[CoordinatorToStage] = Decoder(CoordinatorToStage, limits)
        self._received = 0  # messages at the inbox, of any kind
        self._welcomed = False
        self.pulse = Pulse()

    def tell(self, body: Body) -> None:
        """Send `body` to the coordinator on the control connection; from any thread."""
        self._outbox.put(body)

    def finish(self) -> None:
        """Send what is queued, close the sockets and end the thread."""
        self._outbox.put(None)

    def rejected(self) -> dict[str, int]:
        return {f"rejected_{reason}": count for reason, count in self._decoder.rejected.items()} | {
            "total_received": self._received
        }

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
        departures = Departures(control)
        inbox, endpoint = self._sockets.pull(self._inbox_endpoint)
        launcher = os.pidfd_open(self._launcher_pid)
        try:
            self._send(control, self._hello(endpoint))
            self._loop(control, departures, inbox, launcher)
        finally:
            os.close(launcher)
            inbox.close()
            departures.close()
            control.close()

    def _loop(self, control: Socket, departures: Departures, inbox: Socket, launcher: int) -> None:
        poller = Poller()
        poller.register(control, READABLE)
        poller.register(departures.socket, READABLE)
        poller.register(launcher, READABLE)
        poller.register(self._outbox.fileno(), READABLE)
        poller.register(inbox, READABLE)
        next_beat = 0.0
        reading = True
        orphaned_at: float | None = None
        while True:
            # A full inbox stops the reading: zmq's own queue fills, then the sender's outbox.
            full = self._events.qsize() >= INBOX_LIMIT
            if full is reading:
                reading = not full
                poller.modify(inbox, READABLE if reading else 0)
            ready = dict(poller.poll(MAXIMUM_POLL_MS))
            if inbox in ready:  # first: the engine may be waiting for it
                self._receive(inbox)
            if launcher in ready:
                self._events.put(Stop("the launcher is gone"))
                poller.unregister(launcher)
                orphaned_at = time.monotonic()
            if orphaned_at is not None and time.monotonic() > orphaned_at + ORPHAN_SECONDS:
                self._on_orphaned()
                os._exit(1)  # the main thread loads or hangs; an orphan may not keep its GPU memory
            for body in self._outbox.drain() if self._outbox.fileno() in ready else ():
                if body is None:
                    return
                self._send(control, body)
            if control in ready:
                self._receive_control(control)
            if departures.socket in ready and departures.seen():  # after the last words of the control connection
                self._events.put(Lost("the coordinator is not connected any more"))
            if self._welcomed and time.monotonic() >= next_beat:
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
                body = self._control_decoder.decode(frames).body
            except (BadHeader, BadBody) as error:
                logger.error("dropped a control message: %s", error)
                continue
            if isinstance(body, Renew):
                self._events.put(Lost("the coordinator does not know this replica"))
                continue
            if isinstance(body, Welcome):
                self._welcomed = True
            if isinstance(body, Peers):
                self._arenas.attach({peer.hop: peer.arena for peer in body.sources})
            self._events.put(Control(body))

    def _receive(self, inbox: Socket) -> None:
        for frames in arrivals(inbox):
            self._received += 1
            try:
                envelope = self._decoder.decode(frames)
            except BadHeader as error:
                count = self._decoder.rejected[error.reason]
                if count & (count - 1) == 0:  # the 1st, 2nd, 4th, ...: a flood must not fill the disk
                    logger.warning("dropped a message with a bad header: %s (%d so far)", error.reason, count)
            except BadBody as error:
                self._events.put(Rejected(error.header, error.error, wire_size(frames)))
            else:
                if isinstance(envelope.body, Credit):
                    self._on_credit(sender_of(envelope.header), envelope.body)
                else:
                    self._events.put(Received(envelope, wire_size(frames)))


@dataclass(frozen=True, slots=True)
class NewPeers:
    """The replicas after and before this one that are up now."""

    peers: tuple[Peer, ...]
    sources: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """Credit came from the receiver of an edge (`None`: the coordinator)."""

    receiver: Hop | None
    credit: Credit


@dataclass(frozen=True, slots=True)
class Grant:
    """Credit to give to the sender of an edge (`None`: the coordinator)."""

    sender: Hop | None
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Blocks of arenas wait to be given back."""


class Outbound(threading.Thread):
    """Sends `Outgoing` messages. One that may not be sent comes back as `Rejected`: the actor ends its request.

    One that a later stage does not take comes back as `Undelivered`.

    Args:
        arena: this process's own, for large buffers; `None` sends all of them as frames.
        arenas: those of the sources, whose blocks are given back with the credit.
    """

    def __init__(
        self,
        sockets: Sockets,
        identity: Hop,
        results_endpoint: str,
        limits: Limits,
        flow: FlowConfig,
        events: queue.SimpleQueue[Event],
        arena: Arena | None,
        arenas: ArenaReader,
    ) -> None:
        super().__init__(name="outbound", daemon=True)
        self._sockets = sockets
        self._identity = identity
        self._results_endpoint = results_endpoint
        self._limits = limits
        self._flow = flow
        self._events = events
        self._arena = arena
        self._arenas = arenas
        self._queue: WakeableQueue[Sequence[Outgoing] | NewPeers | Granted | Grant | Wake | None] = WakeableQueue()
        self._poller = Poller()
        self._poller.register(self._queue.fileno(), READABLE)
        self._refusing: list[Socket] = []  # those in the poller
        self._links: dict[Hop, Link] = {}
        self._sources: dict[Hop, Link] = {}
        self._newest: dict[tuple[str, int], int] = {}  # the last epoch that was announced, by stage and replica
        self._early: list[tuple[float, Outgoing]] = []
        self._readers: set[Hop] = set()  # downstream replicas that have mapped our arena
        self._next_release = 0.0
        self._unknown_peers = 0
        self._may_linger = True
        # What was handed over, and what has left or was lost: each written by one thread only.
        self._handed, self._handed_bytes = 0, 0
        self._taken, self._taken_bytes = 0, 0
        self._held, self._held_bytes = 0, 0

    # -- called by the other threads ----------------------------------------------------------------------------------

    def send(self, messages: Sequence[Outgoing]) -> None:
        if messages:
            self._handed += len(messages)
            self._handed_bytes += sum(_payload(message) for message in messages)
            self._queue.put(messages)

    def set_peers(self, peers: Peers) -> None:
        """Connect to new replicas and drop the links to those that are gone."""
        self._queue.put(NewPeers(peers.peers, peers.sources))

    def granted(self, receiver: Hop | None, credit: Credit) -> None:
        self._queue.put(Granted(receiver, credit))

    def grant(self, sender: Hop | None, messages: int, size: int) -> None:
        self._queue.put(Grant(sender, messages, size))

    def wake(self) -> None:
        self._queue.put(Wake())

    def finish(self, last_words: bool = True) -> None:
        """Send what is queued, then end; without `last_words` end at once."""
        self._may_linger = last_words
        self._queue.put(None)

    @property
    def waiting(self) -> int:
        """Messages that have not left: their receivers are slow."""
        return self._handed - self._taken + self._held

    @property
    def congested(self) -> bool:
        """Whether so much waits for its receivers that no more may be made."""
        if self.waiting > self._flow.outbox_messages:
            return True
        return self._handed_bytes - self._taken_bytes + self._held_bytes > self._flow.outbox_bytes

    def counts(self) -> dict[str, int]:
        own = self._arena.counts() if self._arena is not None else {}
        if self._unknown_peers:
            own["dropped_credit_of_unknown_peer"] = self._unknown_peers
        if self._arena is not None:
            own |= {"total_blocks": self._arena.publications, "dropped_arena_full": self._arena.fallbacks}
        return {"outbox": self.waiting, **own, **self._arenas.counts()}

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("the outbound thread failed")
            self._events.put(Stop(f"outbound thread: {type(error).__name__}: {error}", failed=True))

    def _run(self) -> None:
        coordinator = self._coordinator = self._link(self._results_endpoint)
        try:
            while True:
                self._wait(coordinator)
                for item in self._queue.drain():
                    if item is None:
                        self._last_words(coordinator)
                        return
                    self._on_item(item)
                self._flush(coordinator)
        finally:
            for link in (coordinator, *self._links.values(), *self._sources.values()):
                link.close()

    def _link(self, endpoint: str) -> Link:
        window = Window(self._flow.edge_messages, self._flow.edge_bytes)
        return Link(self._sockets.push(endpoint), time.monotonic, window=window)

    def _on_item(self, item: Sequence[Outgoing] | NewPeers | Granted | Grant | Wake) -> None:
        if isinstance(item, NewPeers):
            self._connect(item)
        elif isinstance(item, Granted):
            self._on_granted(item)
        elif isinstance(item, Grant):
            self._grant(item.sender, item.messages, item.bytes, self._arenas.take_released())
        elif isinstance(item, Wake):
            self._next_release = 0.0
        else:
            placed: dict[int, Block] = {}  # by identity of the buffer: a fan-out publishes it once
            for message in item:
                self._send(message, placed)
            self._held = self._backlog()  # first: a message may be counted twice for a moment, but not never
            self._taken += len(item)
            self._taken_bytes += sum(_payload(message) for message in item)

    def _wait(self, coordinator: Link) -> None:
        """Until there is something to send or a slow peer takes more."""
        # One that waits for credit hears of it through the queue.
        links = (coordinator, *self._links.values(), *self._sources.values())
        refusing = [link.socket for link in links if link.backlog and link.refused]
        if refusing or self._refusing:
            for socket in self._refusing:
                self._poller.unregister(socket)
            for socket in refusing:
                self._poller.register(socket, WRITABLE)
            self._refusing = refusing
        self._poller.poll(MAXIMUM_POLL_MS)

    def _connect(self, new: NewPeers) -> None:
        wanted = {peer.hop: peer.inbox for peer in new.peers}
        for hop in [hop for hop in self._links if hop not in wanted]:
            self._links.pop(hop).close()
            self._readers.discard(hop)
            if self._arena is not None:
                self._arena.forget(hop)
        for hop, inbox in wanted.items():
            if hop not in self._links:
                self._links[hop] = self._link(inbox)
                self._newest[(hop.stage, hop.replica)] = hop.epoch
        early, self._early = self._early, []
        for since, message in early:
            self._send(message, {}, since)
        sources = {peer.hop: peer.inbox for peer in new.sources}
        for hop in [hop for hop in self._sources if hop not in sources]:
            self._sources.pop(hop).close()
        for hop, inbox in sources.items():
            if hop not in self._sources:
                self._sources[hop] = Link(self._sockets.push(inbox), time.monotonic)
                self._tell(hop, 0, 0, [])

    def _send(self, message: Outgoing, placed: dict[int, Block], since: float | None = None) -> None:
        target = message.destination
        if target is not None and target not in self._links and self._is_coming(target):
            self._early.append((time.monotonic() if since is None else since, message))
            return
        blocks = self._place(message, target, placed) if target in self._readers else ()
        try:
            frames = encode(message.header, message.body, message.buffers, self._limits, blocks)
        except OmniError as error:  # larger than the limits
            self._events.put(Rejected(message.header, error))
            return
        link = self._coordinator if target is None else self._links.get(target)
        if link is not None and link.send(message.header.request_id, frames):
            return
        what = "has no link" if link is None else "has taken no messages for so long that its outbox is full"
        if target is None:
            self._events.put(Rejected(message.header, StageLost(f"The coordinator {what}.")))
        else:
            self._lose(message.header.request_id, target, what)

    def _lose(self, request_id: str, receiver: Hop, what: str) -> None:
        error = StageLost(f"{receiver.stage}/{receiver.replica} {what}.")
        self._events.put(Undelivered(request_id, receiver, error))

    def _is_coming(self, hop: Hop) -> bool:
        """Whether a replica is newer than all that we know: requests and addresses come over different sockets."""
        return hop.epoch > self._newest.get((hop.stage, hop.replica), 0)

    def _expire_early(self, now: float) -> None:
        expired = [message for since, message in self._early if since + EARLY_SECONDS < now]
        if expired:
            self._early = [(since, message) for since, message in self._early if since + EARLY_SECONDS >= now]
        for message in expired:
            if message.destination is not None:
                self._lose(message.header.request_id, message.destination, "was never announced")

    def _place(self, message: Outgoing, target: Hop | None, placed: dict[int, Block]) -> tuple[Block, ...]:
        """Put the message's large buffers into the arena; where there is no room they travel as frames."""
        arena = self._arena
        blocks: list[Block] = []
        if arena is None or target is None:
            return ()
        for index, buffer in enumerate(message.buffers):
            if memoryview(buffer).nbytes <= self._flow.inline_bytes or len(blocks) == MAX_BLOCKS:
                continue
            block = placed.get(id(buffer))
            if block is not None:
                arena.share(block, target)
            else:
                block = arena.publish(buffer, target, (message.header.deadline or time.time() + 600) + GRACE_SECONDS)
                if block is None:
                    continue
                placed[id(buffer)] = block
            blocks.append(Block(index, block.offset, block.length, block.ticket))
        return tuple(blocks)

    # -- credit -------------------------------------------------------------------------------------------------------

    def _on_granted(self, item: Granted) -> None:
        link = self._coordinator if item.receiver is None else self._links.get(item.receiver)
        if link is None:
            self._unknown_peers += 1
            return
        link.granted(item.credit.messages, item.credit.bytes)
        if item.receiver is None or self._arena is None:
            return
        if item.credit.mapped:
            self._readers.add(item.receiver)
        for ticket in item.credit.released:
            self._arena.release(item.receiver, ticket)

    def _grant(self, sender: Hop | None, messages: int, size: int, released: dict[Hop, list[int]]) -> None:
        self._tell(sender, messages, size, released.pop(sender, []) if sender is not None else [])
        for owner, tickets in released.items():
            self._tell(owner, 0, 0, tickets)

    def _tell(self, sender: Hop | None, messages: int, size: int, released: Sequence[int]) -> None:
        link = self._coordinator if sender is None else self._sources.get(sender)
        if link is None:  # gone in the meantime, and its account with it
            return
        # Every time: a source may hear of us only after it was told the first time.
        mapped = sender is not None and self._arenas.is_mapped(sender)
        credit = Credit(messages=messages, bytes=size, released=tuple(released), mapped=mapped)
        header = Header("", stage=self._identity.stage, replica=self._identity.replica, epoch=self._identity.epoch)
        link.send_urgent("", encode(header, credit, limits=self._limits))

    def _flush(self, coordinator: Link) -> None:
        now = time.monotonic()
        if now >= self._next_release:
            self._next_release = now + RELEASE_SECONDS
            for owner, tickets in self._arenas.take_released().items():
                self._tell(owner, 0, 0, tickets)
            if self._arena is not None:
                self._arena.expire(time.time())
            self._expire_early(now)
        for hop, link in self._links.items():
            link.flush()
            if link.stalled():
                for request_id in link.give_up():
                    self._lose(request_id, hop, "takes no messages")
        for link in self._sources.values():
            link.flush()
        coordinator.flush()
        self._held = self._backlog()

    def _backlog(self) -> int:
        links = (self._coordinator, *self._links.values())
        self._held_bytes = sum(link.backlog_bytes for link in links)
        return sum(link.backlog for link in links)

    def _last_words(self, coordinator: Link) -> None:
        deadline = time.monotonic() + (LAST_WORDS_SECONDS if self._may_linger else 0.0)
        while coordinator.backlog and time.monotonic() < deadline:
            coordinator.socket.poll(50, WRITABLE)
            coordinator.flush()


def _payload(message: Outgoing) -> int:
    return sum(_length(buffer) for buffer in message.buffers)


def _length(buffer: Frame) -> int:
    return memoryview(buffer).nbytes
