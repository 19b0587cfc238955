"""What a stage sends: encoded, placed in shared memory, in order and with credit.

A message that can go at once goes in the call that sends it, on the engine's own thread: to hand it to another thread
costs more than to send it. `Outbound`'s thread takes what cannot: what is long, what a slow peer refuses, what waits.
All of it happens under one lock, so the sockets have one owner at a time (ADR 0012).
"""

from __future__ import annotations

import collections
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from omni_actors.config import FlowConfig
from omni_actors.errors import OmniError, StageLost
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import Frame, encode
from omni_actors.protocol.common import Credit
from omni_actors.protocol.control import Peers
from omni_actors.protocol.header import MAX_BLOCKS, Block, Header, Limits, ReplicaId
from omni_actors.stage.events import Event, Lost, Rejected, Stop, Undelivered
from omni_actors.stage.outgoing import Outgoing
from omni_actors.transport.arena import GRACE_SECONDS, Arena, ArenaReader
from omni_actors.transport.credit import EdgeMetrics, Traffic, Window
from omni_actors.transport.disconnects import DisconnectDetector
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import Sockets
from omni_actors.transport.wakeup import Wakeup

logger = get_logger(__name__)

# What is sent in the call itself, in messages and bytes; more is left to the thread. A busy engine pays for the
# text and the chunk of one request, an idle one has nothing better to do.
DIRECT_BUSY = (2, 64 << 10)
DIRECT_IDLE = (8, 8 << 20)
MAXIMUM_POLL_MS = 100
RELEASE_SECONDS = 0.1  # after which blocks are given back even if they are few
EARLY_SECONDS = 5.0  # how long a message waits for the address of a replica that has just been started
LAST_WORDS_SECONDS = 1.0
COORDINATOR = "coordinator"  # its name among the receivers
NO_DEADLINE_SECONDS = 600.0  # for which a block of a request without deadline is kept


class Prepared(NamedTuple):
    """A message that only has to be sent once its blocks are filled."""

    message: Outgoing
    frames: Sequence[Frame]
    blocks: Sequence[Block]
    unfilled: Sequence[tuple[Block, Frame]]


class Outbound(threading.Thread):
    """Sends `Outgoing` messages. One that may not be sent comes back as `Rejected`: the actor ends its request.

    One that a later stage does not take comes back as `Undelivered`.

    Its methods may be called from any thread. Messages to one receiver keep the order in which they were given.

    Args:
        on_event: tells the main thread; from any thread, and under the lock.
        arena: this process's own, for large buffers; `None` sends all of them as frames.
        arenas: those of the sources, whose blocks are given back with the credit.
    """

    def __init__(
        self,
        sockets: Sockets,
        identity: ReplicaId,
        results_endpoint: str,
        limits: Limits,
        flow: FlowConfig,
        on_event: Callable[[Event], None],
        arena: Arena | None,
        arenas: ArenaReader,
    ) -> None:
        super().__init__(name="outbound", daemon=True)
        self._sockets = sockets
        self._identity = identity
        self._limits = limits
        self._flow = flow
        self._on_event = on_event
        self._arena = arena
        self._arenas = arenas
        self._wakeup = Wakeup()
        self._lock = threading.Lock()  # around all that follows, except for what is said to be read without it
        self._traffic: dict[str, Traffic] = {}  # by receiver, as "talker/0"; outlives its links,
        self._edges: dict[str, Link] = {}  # which are these
        self._coordinator = self._link(results_endpoint, COORDINATOR)
        self._cuts: DisconnectDetector[ReplicaId | None] = DisconnectDetector()
        self._cuts.watch(None, self._coordinator.socket, results_endpoint)
        self._links: dict[ReplicaId, Link] = {}
        self._sources: dict[ReplicaId, Link] = {}
        self._newest: dict[tuple[str, int], int] = {}  # the last epoch that was announced, by stage and replica
        self._mapped: set[ReplicaId] = set()  # downstream replicas that have mapped our arena
        self._early: list[tuple[float, Outgoing]] = []
        # Left to the thread, in order. While anything is here, nothing may be sent directly: it would overtake.
        self._left: collections.deque[Sequence[Outgoing] | Peers] = collections.deque()
        self._watched: set[Link] = set()  # those on whose sockets the thread waits
        self._finishing = False
        self._may_linger = True
        self._closed = False
        self._next_release = 0.0
        self._unknown_peers = 0
        # Read without the lock: what has not left, in messages and bytes; with the thread, and at links.
        self._waiting_here, self._bytes_here = 0, 0
        self._waiting_at_links, self._bytes_at_links = 0, 0

    # -- called by the other threads ----------------------------------------------------------------------------------

    def send(self, messages: Sequence[Outgoing], idle: bool = False) -> None:
        """Send now what can be sent now. `idle`: the caller has nothing else to do."""
        if not messages:
            return
        size = sum(_payload(message) for message in messages)
        most_messages, most_bytes = DIRECT_IDLE if idle else DIRECT_BUSY
        with self._lock:
            if self._closed:  # the thread has failed or the session is over; whoever has to know has been told
                return
            if self._left or len(messages) > most_messages or size > most_bytes:
                self._waiting_here += len(messages)
                self._bytes_here += size
                self._left.append(messages)
                wake = True
            else:
                placed: dict[int, Block] = {}
                for message in messages:
                    self._send(message, placed)
                self._release_request(placed)
                wake = self._account()
        if wake:
            self._wakeup.set()

    def set_peers(self, peers: Peers) -> None:
        """Connect to new replicas and drop the links to those that are gone."""
        with self._lock:
            if self._left:
                self._left.append(peers)
            elif not self._closed:
                self._connect(peers)
        self._wakeup.set()

    def granted(self, receiver: ReplicaId | None, credit: Credit) -> None:
        """Credit came from the receiver of an edge (`None`: the coordinator)."""
        with self._lock:
            if self._closed:
                return
            link = self._coordinator if receiver is None else self._links.get(receiver)
            if link is None:
                self._unknown_peers += 1
                return
            link.granted(credit.messages, credit.bytes)
            if receiver is not None and self._arena is not None:
                if credit.mapped:
                    self._mapped.add(receiver)
                for ticket in credit.released:
                    self._arena.release(receiver, ticket)
            wake = self._account()
        if wake:
            self._wakeup.set()

    def grant(self, sender: ReplicaId | None, messages: int, size: int) -> None:
        """Give credit to the sender of an edge (`None`: the coordinator)."""
        with self._lock:
            if self._closed:
                return
            released = self._arenas.take_released()
            self._tell(sender, messages, size, released.pop(sender, []) if sender is not None else [])
            self._give_back(released)
            wake = self._account()
        if wake:
            self._wakeup.set()

    def wake(self) -> None:
        """Blocks of arenas wait to be given back. Takes no lock: whoever drops the last view of a block calls this."""
        self._next_release = 0.0
        self._wakeup.set()

    def finish(self, last_words: bool = True) -> None:
        """Send what is queued, then end; without `last_words` do not wait for who takes nothing."""
        with self._lock:
            self._finishing = True
            self._may_linger = last_words
        self._wakeup.set()

    @property
    def waiting(self) -> int:
        """Messages that have not left: their receivers are slow."""
        return self._waiting_here + self._waiting_at_links

    @property
    def congested(self) -> bool:
        """Whether so much waits for its receivers that no more may be made."""
        if self.waiting > self._flow.outbox_messages:
            return True
        return self._bytes_here + self._bytes_at_links > self._flow.outbox_bytes

    def counts(self) -> dict[str, int]:
        own = self._arena.counts() if self._arena is not None else {}
        if self._unknown_peers:
            own["dropped_credit_of_unknown_peer"] = self._unknown_peers
        if self._arena is not None:
            own |= {"total_blocks": self._arena.publications, "dropped_arena_full": self._arena.fallbacks}
        return {"outbox": self.waiting, **own, **self._arenas.counts()}

    def edges(self) -> dict[str, EdgeMetrics]:
        """What has left and what waits, by receiver, as "talker/0" or "coordinator"."""
        with self._lock:
            closed = {target: traffic.metrics() for target, traffic in self._traffic.items()}
            return closed | {target: link.metrics() for target, link in self._edges.items()}

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            logger.exception("the outbound thread failed")
            self._on_event(Stop(f"outbound thread: {type(error).__name__}: {error}", failed=True))

    def _run(self) -> None:
        try:
            while not self._finishing or self._left:
                self._wait()
                self._work_off()
                with self._lock:
                    self._maintain(time.monotonic())
            self._last_words()
        finally:
            with self._lock:
                self._closed = True
                self._cuts.close()
                for link in self._all_links():
                    link.close()

    def _wait(self) -> None:
        """Until there is something to do, or a peer that refused takes more."""
        poller = select.poll()
        poller.register(self._wakeup.fileno(), select.POLLIN)
        with self._lock:
            self._watched = self._refusing()
            for link in self._watched:
                poller.register(link.descriptor, select.POLLIN)
        poller.poll(MAXIMUM_POLL_MS)
        self._wakeup.clear()
        with self._lock:
            for link in self._watched:
                link.wake()

    def _work_off(self) -> None:
        while self._left:  # only this thread takes from it
            first = self._left[0]
            if isinstance(first, Peers):
                with self._lock:
                    self._connect(first)
                    self._left.popleft()
                continue
            placed: dict[int, Block] = {}
            for message in first:
                with self._lock:
                    prepared = self._prepare(message, placed)
                if prepared is not None:
                    self._fill(prepared)  # may take milliseconds, in which others go on
                with self._lock:
                    if prepared is not None:
                        self._deliver(prepared)
                    self._account()  # first: a message may be counted twice for a moment, but not never
                    self._waiting_here -= 1
                    self._bytes_here -= _payload(message)
            with self._lock:
                self._release_request(placed)
                self._left.popleft()

    def _fill(self, prepared: Prepared) -> None:
        if self._arena is not None:
            for block, buffer in prepared.unfilled:
                self._arena.write(block, buffer)

    def _maintain(self, now: float) -> None:
        """What takes time, not messages, to become due."""
        if now >= self._next_release:
            self._next_release = now + RELEASE_SECONDS
            self._give_back(self._arenas.take_released())
            if self._arena is not None:
                self._arena.expire(time.time())
            self._expire_early(now)
            self._look_for_cuts(now)
        for replica_id, link in self._links.items():
            link.flush()
            if link.stalled():
                for request_id in link.give_up():
                    self._lose(request_id, replica_id, "takes no messages")
        for link in (self._coordinator, *self._sources.values()):
            link.flush()
        self._account()

    def _look_for_cuts(self, now: float) -> None:
        for receiver in self._cuts.found(now):
            self._cuts.forget(receiver)
            name = receiver.name if receiver is not None else "the coordinator"
            self._on_event(Lost(f"the link to {name} was cut"))

    def _last_words(self) -> None:
        deadline = time.monotonic() + (LAST_WORDS_SECONDS if self._may_linger else 0.0)
        while self._coordinator.backlog and time.monotonic() < deadline:
            poller = select.poll()
            poller.register(self._coordinator.descriptor, select.POLLIN)
            poller.poll(50)
            with self._lock:
                self._coordinator.wake()

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _link(self, endpoint: str, target: str) -> Link:
        window = Window(self._flow.edge_messages, self._flow.edge_bytes)
        traffic = self._traffic.setdefault(target, Traffic())
        link = self._edges[target] = Link(self._sockets.push(endpoint), time.monotonic, window=window, traffic=traffic)
        return link

    def _refusing(self) -> set[Link]:
        """Links that wait for their socket; one that waits for credit hears of it from `granted`."""
        return {link for link in self._all_links() if link.backlog and link.refused}

    def _all_links(self) -> tuple[Link, ...]:
        return (self._coordinator, *self._links.values(), *self._sources.values())

    def _account(self) -> bool:
        """Note what waits at the links. Whether to wake the thread: it does not wait yet for one that refuses."""
        waiting = size = 0
        for link in (self._coordinator, *self._links.values()):
            waiting += link.backlog
            size += link.backlog_bytes
        self._waiting_at_links, self._bytes_at_links = waiting, size
        return any(link.refused and link.backlog and link not in self._watched for link in self._all_links())

    def _connect(self, new: Peers) -> None:
        wanted = {peer.replica_id: peer.inbox for peer in new.peers}
        for replica_id in [replica_id for replica_id in self._links if replica_id not in wanted]:
            self._cuts.forget(replica_id)
            self._drop(self._links.pop(replica_id))
            del self._edges[replica_id.name]
            self._mapped.discard(replica_id)
            if self._arena is not None:
                self._arena.forget(replica_id)
        for replica_id, inbox in wanted.items():
            if replica_id not in self._links:
                self._links[replica_id] = self._link(inbox, replica_id.name)
                self._cuts.watch(replica_id, self._links[replica_id].socket, inbox)
                self._newest[(replica_id.stage, replica_id.replica)] = replica_id.epoch
        early, self._early = self._early, []
        for since, message in early:
            self._send(message, {}, since)
        self._connect_back(new)
        self._account()

    def _connect_back(self, new: Peers) -> None:
        """Links against the stream, for credit."""
        sources = {peer.replica_id: peer.inbox for peer in new.sources}
        for replica_id in [replica_id for replica_id in self._sources if replica_id not in sources]:
            self._cuts.forget(replica_id)
            self._drop(self._sources.pop(replica_id))
        for replica_id, inbox in sources.items():
            if replica_id not in self._sources:
                self._sources[replica_id] = Link(self._sockets.push(inbox), time.monotonic)
                self._cuts.watch(replica_id, self._sources[replica_id].socket, inbox)
                self._tell(replica_id, 0, 0, [])

    def _drop(self, link: Link) -> None:
        self._watched.discard(link)
        link.close()

    def _plan(
        self, message: Outgoing, placed: dict[int, Block]
    ) -> tuple[tuple[Block, ...], Sequence[tuple[Block, Frame]]]:
        """Blocks for the message's large buffers, and those of them that are not filled yet.

        Where there is no room buffers travel as frames. `placed` holds what has been placed before for the same batch,
        by identity of the buffer: a fan-out copies it once.
        """
        arena, target = self._arena, message.destination
        blocks: list[Block] = []
        unfilled: list[tuple[Block, Frame]] = []
        if arena is None or target is None or target not in self._mapped:
            return (), ()
        for index, buffer in enumerate(message.buffers):
            size = _length(buffer)
            if size <= self._flow.inline_bytes or len(blocks) == MAX_BLOCKS:
                continue
            block = placed.get(id(buffer))
            if block is None:
                expires = (message.header.deadline or time.time() + NO_DEADLINE_SECONDS) + GRACE_SECONDS
                block = arena.reserve(size, self._identity, expires)
                if block is None:
                    continue
                unfilled.append((block, buffer))
                placed[id(buffer)] = block
            blocks.append(Block(index, block.offset, block.length, block.ticket))
        return tuple(blocks), unfilled

    def _release_request(self, placed: dict[int, Block]) -> None:
        """From now on the consumers alone hold these blocks; without any they are free."""
        for block in placed.values():
            if self._arena is not None:
                self._arena.release(self._identity, block.ticket)

    def _send(self, message: Outgoing, placed: dict[int, Block], since: float | None = None) -> None:
        prepared = self._prepare(message, placed, since)
        if prepared is not None:
            self._fill(prepared)
            self._deliver(prepared)

    def _prepare(self, message: Outgoing, placed: dict[int, Block], since: float | None = None) -> Prepared | None:
        """Everything but copying and sending; `None` if there is nothing to send now."""
        target = message.destination
        if target is not None and target not in self._links and self._is_coming(target):
            self._early.append((time.monotonic() if since is None else since, message))
            return None
        blocks, unfilled = self._plan(message, placed)
        try:  # before the copy, which drives what this needs out of the processor's cache
            frames = encode(message.header, message.body, message.buffers, self._limits, blocks)
        except OmniError as error:  # larger than the limits
            self._on_event(Rejected(message.header, error))
            return None
        return Prepared(message, frames, blocks, unfilled)

    def _deliver(self, prepared: Prepared) -> None:
        header, target = prepared.message.header, prepared.message.destination
        link = self._coordinator if target is None else self._links.get(target)
        if link is None or not link.send(header.request_id, prepared.frames):
            what = "has no link" if link is None else "has taken no messages for so long that its outbox is full"
            if target is None:
                self._on_event(Rejected(header, StageLost(f"The coordinator {what}.")))
            else:
                self._lose(header.request_id, target, what)
            return
        if self._arena is not None and target is not None:
            for block in prepared.blocks:
                self._arena.share(block, target)
                link.traffic.shared_bytes += block.length

    def _lose(self, request_id: str, receiver: ReplicaId, what: str) -> None:
        error = StageLost(f"{receiver.name} {what}.")
        self._on_event(Undelivered(request_id, receiver, error))

    def _is_coming(self, replica_id: ReplicaId) -> bool:
        """Whether a replica is newer than all that we know: requests and addresses come over different sockets."""
        return replica_id.epoch > self._newest.get((replica_id.stage, replica_id.replica), 0)

    def _expire_early(self, now: float) -> None:
        expired = [message for since, message in self._early if since + EARLY_SECONDS < now]
        if expired:
            self._early = [(since, message) for since, message in self._early if since + EARLY_SECONDS >= now]
        for message in expired:
            if message.destination is not None:
                self._lose(message.header.request_id, message.destination, "was never announced")

    def _tell(self, sender: ReplicaId | None, messages: int, size: int, released: Sequence[int]) -> None:
        link = self._coordinator if sender is None else self._sources.get(sender)
        if link is None:  # gone in the meantime, and its account with it
            return
        # Every time: a source may hear of us only after it was told the first time.
        mapped = sender is not None and self._arenas.is_mapped(sender)
        credit = Credit(messages, size, tuple(released), mapped)
        header = Header("", stage=self._identity.stage, replica=self._identity.replica, epoch=self._identity.epoch)
        link.send_urgent("", encode(header, credit, limits=self._limits))

    def _give_back(self, released: Mapping[ReplicaId, Sequence[int]]) -> None:
        for owner, tickets in released.items():
            self._tell(owner, 0, 0, tickets)


def _payload(message: Outgoing) -> int:
    return sum(_length(buffer) for buffer in message.buffers)


def _length(buffer: Frame) -> int:
    return len(buffer) if isinstance(buffer, bytes) else memoryview(buffer).nbytes
