"""A link: one PUSH to one replica's inbox with a bounded outbox, and the credit of an edge.

The sender's `Window` shrinks with every message and grows with every `Credit`; when it is used up, messages wait at the
sender, where they are counted and can hold up their source. The receiver's `ReceivedCredit` collects what was taken
until it is worth a message: a quarter of the window at a time, the rest on the owner's tick.

`send` hands a message to zmq, or keeps it while the peer is slow or has granted no credit; `flush` tries again. A link
whose socket has taken nothing for `stall_seconds` is broken: its peer is stuck or gone, and the owner must give its
messages up.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import zmq
from msgspec import Struct

from omni_actors.config import FlowConfig
from omni_actors.host.addresses import is_tcp
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import ReplicaId
from omni_actors.transport.sockets import GRACE_SECONDS, ZERO_COPY_BYTES, Socket, Sockets, descriptor, drain, try_send

Key = TypeVar("Key")
GRANTS_PER_WINDOW = 4


def wire_size(frames: Sequence[Frame]) -> int:
    """Bytes of a message as both sides of its edge count them."""
    return sum(len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames)


class Traffic(Struct):
    """Totals of one receiver since the process began, over all links to it. Other threads may read them."""

    messages: int = 0
    bytes: int = 0  # of all frames
    shared_bytes: int = 0  # of blocks in shared memory


class Window(Struct):
    """The sender's side of one edge: how much may be sent without more credit, in messages and bytes."""

    messages: int
    size: int
    messages_out: int = 0  # sent, without credit for them yet
    bytes_out: int = 0

    def admits(self, size: int) -> bool:
        """Whether a message of `size` bytes may be sent now. When nothing else is out, any size may."""
        fits = self.messages_out < self.messages and self.bytes_out + size <= self.size
        return fits or not self.messages_out

    @property
    def credit(self) -> int:
        """Messages that may be sent without more credit."""
        return max(0, self.messages - self.messages_out)

    @property
    def exhausted(self) -> bool:
        """Whether nothing more may be sent before credit comes."""
        return self.messages_out >= self.messages or self.bytes_out >= self.size

    def sent(self, size: int) -> None:
        """Count a message of `size` bytes as out."""
        self.messages_out += 1
        self.bytes_out += size

    def granted(self, messages: int, size: int) -> None:
        """Add credit. Credit for more than was sent is ignored."""
        self.messages_out = max(0, self.messages_out - messages)
        self.bytes_out = max(0, self.bytes_out - size)


class ReceivedCredit(Generic[Key]):
    """The receiver's side of all its edges: what it has taken from each sender and not granted yet."""

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self._messages = max(1, window_messages // GRANTS_PER_WINDOW)
        self._bytes = max(1, window_bytes // GRANTS_PER_WINDOW)
        self._taken: dict[Key, tuple[int, int]] = {}

    def take(self, sender: Key, size: int) -> bool:
        """Count a message that was taken. True when the sender's share is worth a grant."""
        messages, total = self._taken.get(sender, (0, 0))
        self._taken[sender] = (messages + 1, total + size)
        return self._is_due(messages + 1, total + size)

    def collect(self, everything: bool) -> list[tuple[Key, int, int]]:
        """Return (sender, messages, bytes) to grant now: the shares that are large enough, or all of them."""
        due = [(sender, *taken) for sender, taken in self._taken.items() if everything or self._is_due(*taken)]
        for sender, _, _ in due:
            del self._taken[sender]
        return due

    def _is_due(self, messages: int, size: int) -> bool:
        return messages >= self._messages or size >= self._bytes


STALL_SECONDS = 5.0
OUTBOX_BYTES = 256 << 20
OUTBOX_MESSAGES = 10_000


class Waiting(NamedTuple):
    """A message in the outbox."""

    request_id: str
    frames: Sequence[Frame]
    size: int


@dataclass(eq=False)
class Link:
    """Not thread-safe: it belongs to one thread, or to the threads that share one lock.

    A peer of a ROUTER can have a link too, if every message begins with the peer's identity; its methods then raise
    `PeerGone`.

    Args:
        window: the edge's credit; without it only the socket holds messages back.
        needs_credit: whether a peer that grants nothing for `stall_seconds` also counts as broken.
        traffic: counts what is sent.
    """

    socket: Socket
    clock: Callable[[], float]
    stall_seconds: float = STALL_SECONDS
    window: Window | None = None
    needs_credit: bool = False
    outbox_messages: int = OUTBOX_MESSAGES
    outbox_bytes: int = OUTBOX_BYTES
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.moved = self.clock()  # when a message last left, or began to wait in an empty outbox
        self.refused = False  # the socket took no more at the last attempt
        self.backlog_bytes = 0
        self._outbox: collections.deque[Waiting] = collections.deque()
        self._urgent: collections.deque[Waiting] = collections.deque()

    @property
    def backlog(self) -> int:
        """Messages that wait for the peer."""
        return len(self._outbox) + len(self._urgent)

    @property
    def settled(self) -> bool:
        """Whether nothing waits and the peer has granted credit for everything that was sent."""
        return not self.backlog and (self.window is None or not self.window.messages_out)

    @property
    def congested(self) -> bool:
        """Whether a message sent now would wait."""
        return bool(self._outbox) or (self.window is not None and self.window.exhausted)

    @property
    def descriptor(self) -> int:
        """File descriptor that is readable when the socket's state has changed; then call `wake`."""
        return descriptor(self.socket)

    def send(self, request_id: str, frames: Sequence[Frame], size: int | None = None) -> bool:
        """Send or keep a message, in order. False: the outbox is full, and the message was not taken.

        `size` is what the peer will count for the message, by default all of its frames.
        """
        size = wire_size(frames) if size is None else size
        if not self.backlog:
            self.moved = self.clock()
            if self._try_with_credit(frames, size):
                return True
        full = len(self._outbox) >= self.outbox_messages or self.backlog_bytes + size > self.outbox_bytes
        if full and self._outbox:  # a single message may be larger than the bound; the codec limits it
            return False
        self._outbox.append(Waiting(request_id, frames, size))
        self.backlog_bytes += size
        return True

    def send_urgent(self, request_id: str, frames: Sequence[Frame]) -> None:
        """Send or keep a small message that needs no credit and may overtake others: credit itself, and aborts.

        If credit had to wait for credit, two stages could wait for each other forever.
        """
        size = wire_size(frames)
        if self._urgent or not self._try(frames, size):
            if not self.backlog:
                self.moved = self.clock()
            self._urgent.append(Waiting(request_id, frames, size))
            self.backlog_bytes += size
        elif self._outbox:  # the socket takes messages again, and trying it used up the signal that says so
            self.flush()

    def flush(self) -> None:
        """Send what the peer takes now."""
        while self._urgent and self._try(self._urgent[0].frames, self._urgent[0].size):
            self._left(self._urgent.popleft())
        while not self._urgent and self._outbox and self._try_with_credit(self._outbox[0].frames, self._outbox[0].size):
            self._left(self._outbox.popleft())

    def granted(self, messages: int, size: int) -> None:
        """Add credit for this many messages and bytes, and send what it allows."""
        if self.window is not None:
            self.window.granted(messages, size)
        self.flush()

    def wake(self) -> None:
        """Read the socket's state, which makes its descriptor quiet again, then `flush`."""
        self.socket.getsockopt(zmq.EVENTS)
        self.flush()

    def forget(self, request_id: str) -> None:
        """Drop the waiting messages of a request that has ended."""
        if any(waiting.request_id == request_id for waiting in self._outbox):
            self.backlog_bytes -= sum(item.size for item in self._outbox if item.request_id == request_id)
            self._outbox = collections.deque(item for item in self._outbox if item.request_id != request_id)

    def stalled(self) -> bool:
        """Whether the peer has taken nothing for too long. Between stages, granting no credit is not a stall."""
        waits = bool(self.backlog) and (self.refused or self.needs_credit)
        return waits and self.moved + self.stall_seconds < self.clock()

    def give_up(self) -> list[str]:
        """Empty the outbox and return the ids of the requests whose messages are lost, each once."""
        lost = list(dict.fromkeys(waiting.request_id for waiting in self._outbox))
        self._outbox.clear()
        self._urgent.clear()
        self.backlog_bytes = 0
        return lost

    def close(self) -> None:
        """Close the socket. What waits in the link is lost."""
        self.socket.close()

    def _left(self, waiting: Waiting) -> None:
        self.backlog_bytes -= waiting.size
        self.moved = self.clock()

    def _try_with_credit(self, frames: Sequence[Frame], size: int) -> bool:
        if self.window is not None and not self.window.admits(size):
            self.refused = False
            return False
        sent = self._try(frames, size)
        if sent and self.window is not None:
            self.window.sent(size)
        return sent

    def _try(self, frames: Sequence[Frame], size: int) -> bool:
        large = size >= ZERO_COPY_BYTES and any(memoryview(frame).nbytes >= ZERO_COPY_BYTES for frame in frames)
        sent = try_send(self.socket, frames, copy=not large)
        if sent:
            self.traffic.messages += 1
            self.traffic.bytes += size
        self.refused = not sent
        return sent


COORDINATOR = "coordinator"  # its name among the receivers
Peer = ReplicaId | None  # a replica, or the coordinator


def name_of(peer: Peer) -> str:
    """The name of a peer in logs and metrics, such as "talker/0"."""
    return peer.name if peer is not None else COORDINATOR


@dataclass(eq=False)
class PeerLinks:
    """Links to the inboxes of replicas, and of a stage to the coordinator. Not thread-safe.

    Args:
        traffic: by receiver, for metrics; outlives the links.
    """

    sockets: Sockets
    flow: FlowConfig
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._monitors: dict[Peer, Socket] = {}  # of TCP links: those of this host cannot be cut
        self._lost: dict[Peer, float] = {}  # since when a link is cut
        self.links: dict[Peer, Link] = {}  # those that are open

    def open(self, peer: Peer, endpoint: str, only_credit: bool = False) -> Link:
        """Connect to a peer. A link that carries only credit has no window, and is not counted."""
        link = self.links[peer] = Link(self.sockets.push(endpoint), time.monotonic)
        if not only_credit:
            link.window = Window(self.flow.edge_messages, self.flow.edge_bytes)
            link.traffic = self.traffic.setdefault(name_of(peer), link.traffic)
        if is_tcp(endpoint):
            self._monitors[peer] = link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return link

    def close(self, peer: Peer) -> None:
        """Disconnect from a peer."""
        self._stop_watching(peer)
        self.links.pop(peer).close()

    def _stop_watching(self, peer: Peer) -> None:
        self._lost.pop(peer, None)
        if (monitor := self._monitors.pop(peer, None)) is not None:
            self.links[peer].socket.disable_monitor()
            monitor.close(linger=0)

    def flush(self) -> list[tuple[ReplicaId, str]]:
        """Send what the peers take now; return replicas that took nothing for too long, and the requests lost."""
        lost = []
        for peer, link in self.links.items():
            link.flush()
            if peer is not None and link.window is not None and link.stalled():
                lost += [(peer, request_id) for request_id in link.give_up()]
        return lost

    def cut(self, now: float) -> list[Peer]:
        """Peers whose link was cut `GRACE_SECONDS` ago or earlier although they are said to live, each once.

        A link is cut when its peer closes it or dies, and when the peer's host or the network is silent for longer than
        the socket's heartbeat allows.
        """
        for peer, monitor in self._monitors.items():
            if drain(monitor):
                self._lost.setdefault(peer, now)
        found = [peer for peer, since in self._lost.items() if since + GRACE_SECONDS <= now]
        for peer in found:
            self._stop_watching(peer)
        return found
