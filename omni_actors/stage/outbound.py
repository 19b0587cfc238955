"""What a stage sends: made of the engine's events, encoded, placed in shared memory, in order and with credit.

A sender of this stage gets the blocks of its arena back together with its credit.

A message that can leave at once is sent in the call itself, on the engine's own thread: to hand it to another thread
costs more than to send it. `Outbound`'s thread sends the rest: what is long, what a slow peer refuses, what waits. The
sockets and the arena are used under one lock, so each has one owner at a time (docs/decisions.md).
"""

from __future__ import annotations

import collections
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from omni_actors.config import FlowConfig
from omni_actors.errors import OmniError, StageLost
from omni_actors.host.processes import STEADY
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import BufferList, Frame, encode
from omni_actors.protocol.fields import MAX_BLOCKS, Block, Body, Header, Limits, ReplicaId, pack_token_ids
from omni_actors.protocol.messages import (
    LATENTS,
    PIXELS,
    SAMPLE_RATE,
    SAMPLES,
    TEXT,
    AudioChunk,
    Chunk,
    Credit,
    ImageChunk,
    LatentsChunk,
    Output,
    Peers,
    StepsDone,
    TextDelta,
    VideoChunk,
    WordsChunk,
)
from omni_actors.protocol.payloads import AdditionalInformationPayload
from omni_actors.stage.engine_interface import (
    AudioEvent,
    ImageEvent,
    LatentsEvent,
    OutputEvent,
    ProgressEvent,
    StreamEvent,
    TextEvent,
    VideoEvent,
    WordsEvent,
)
from omni_actors.stage.inbound import Event, Lost, Rejected, Stop, Undelivered
from omni_actors.telemetry.metrics import Meters, edge_metrics
from omni_actors.transport.arena import GRACE_SECONDS, Arena, ArenaReader
from omni_actors.transport.link import Link, Peer, PeerLinks, name_of, wire_size
from omni_actors.transport.sockets import Sockets, Wakeup

logger = get_logger(__name__)

ForClient = TextEvent | AudioEvent | ImageEvent | VideoEvent | LatentsEvent | WordsEvent | ProgressEvent


class Outgoing(Struct, frozen=True):
    """A message to send: to a downstream replica, or to the coordinator when `destination` is `None`."""

    destination: ReplicaId | None
    header: Header
    body: Body
    buffers: Sequence[Frame] = ()


def divide(
    event: OutputEvent, outputs: Collection[str], sent: int, *, sends_text: bool
) -> tuple[ForClient | None, StreamEvent | None, int]:
    """Return the part of an event that is for the client, the part for the stages after this one, and its length.

    Args:
        outputs: the modalities of this stage that go to the client.
        sent: characters, samples or tensors that the later stages have got so far; the length is in the same.
        sends_text: whether those take the text.
    """
    match event:
        case TextEvent() if sends_text:
            piece = StreamEvent(event.request_id, scalars={TEXT: event.text}, start=sent) if event.text else None
            return (event if "text" in outputs else None), piece, len(event.text)
        case StreamEvent():
            return None, event, 0
        case AudioEvent() if "audio" not in outputs:
            tensors, scalars = {SAMPLES: event.samples}, {SAMPLE_RATE: event.sample_rate}
            return None, StreamEvent(event.request_id, (), tensors, scalars, sent), event.samples.shape[0]
        case ImageEvent():
            picture = StreamEvent(event.request_id, tensors={PIXELS: event.pixels}, start=sent)
            return (event if "image" in outputs else None), (None if event.preview else picture), 1
        case LatentsEvent():
            latents = StreamEvent(
                event.request_id, tensors={LATENTS: event.latents}, start=sent, final=not event.preview
            )
            return (event if "latents" in outputs and not event.preview else None), latents, 1
        case TextEvent() | AudioEvent() | VideoEvent() | WordsEvent() | ProgressEvent():
            return event, None, 0


def result_of(event: ForClient) -> tuple[Output, Sequence[Frame]]:
    """Make the message to the coordinator, and its buffers."""
    buffers = BufferList()
    body: Output
    match event:
        case TextEvent():
            token_ids = pack_token_ids(event.token_ids)
            body = TextDelta(event.text, token_ids, event.tool_calls, event.logprobs, event.prompt_logprobs)
        case AudioEvent():
            body = AudioChunk(samples=buffers.add(event.samples), sample_rate=event.sample_rate)
        case ImageEvent():
            body = ImageChunk(pixels=buffers.add(event.pixels), preview=event.preview)
        case VideoEvent():
            body = VideoChunk(frames=buffers.add(event.frames), frames_per_second=event.frames_per_second)
        case LatentsEvent():
            body = LatentsChunk(latents=buffers.add(event.latents))
        case WordsEvent():
            body = WordsChunk(words=event.words)
        case ProgressEvent():
            body = StepsDone(step=event.step, steps=event.steps)
    return body, buffers.buffers


def chunk_of(event: StreamEvent) -> tuple[Chunk, Sequence[Frame]]:
    """Make the message to the stages after this one, and its buffers."""
    buffers = BufferList()
    chunk = Chunk(
        token_ids=pack_token_ids(event.token_ids),
        tensors={name: buffers.add(tensor) for name, tensor in event.tensors.items()},
        information=AdditionalInformationPayload.of({**event.scalars, **event.lists}, buffers.add),
        start=event.start,
        final=event.final,
    )
    return chunk, buffers.buffers


class Prepared(NamedTuple):
    """A message that only has to be delivered once its blocks are filled."""

    message: Outgoing
    frames: Sequence[Frame]
    blocks: Sequence[Block]
    unfilled: Sequence[tuple[Block, Frame]]  # blocks, and what is to be copied into them


# What is sent in the call itself, in messages and bytes; more is left to the thread. A busy engine pays for the
# text and the chunk of one request, an idle one has nothing better to do.
DIRECT_BUSY = (2, 64 << 10)
DIRECT_IDLE = (8, 8 << 20)
MAXIMUM_POLL_MS = 100
RELEASE_SECONDS = 0.1  # after which blocks are returned even if they are few
LAST_MESSAGES_SECONDS = 1.0
ADDRESS_SECONDS = 5.0  # how long a message waits for the address of a replica that has just been started
NO_DEADLINE_SECONDS = 600.0  # for which a block of a request without deadline is kept


@dataclass(eq=False, repr=False)
class Outbound(threading.Thread):
    """Sends `Outgoing` messages. One that may not be sent comes back as `Rejected`: the actor ends its request.

    One that a later stage does not take comes back as `Undelivered`. Messages to one receiver keep the order in which
    they were given. The methods may be called from any thread.

    Args:
        on_event: tells the main thread; called on any thread, under the lock.
        arena: this process's own, for large buffers; `None` sends all of them as frames.
        arenas: those of the sources, whose blocks are returned with the credit.
    """

    sockets: Sockets
    identity: ReplicaId  # it holds a block until its message is sent
    limits: Limits
    flow: FlowConfig
    on_event: Callable[[Event], None]
    arena: Arena | None
    arenas: ArenaReader

    def __post_init__(self) -> None:
        super().__init__(name="outbound", daemon=True)
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._header = Header.of(self.identity)  # of credit
        self._peers = PeerLinks(self.sockets, self.flow)
        self._newest: dict[tuple[str, int], int] = {}  # the last epoch that was announced, by stage and replica
        self._polled: frozenset[Link] = frozenset()  # those on whose sockets the thread waits
        self._waiting, self._waiting_bytes = 0, 0  # messages that wait for their receivers, as of the last `_account`
        self.readers: set[ReplicaId] = set()  # those that have mapped the arena
        self._unaddressed: list[tuple[float, Outgoing]] = []  # since when, and what waits for an address
        # Left to the thread, in order. While anything is here, nothing may be sent directly: it would overtake.
        self._queue: collections.deque[Sequence[Outgoing] | Peers] = collections.deque()
        self._queued, self._queued_bytes = 0, 0  # messages and bytes of it; read without the lock
        self._finishing = False
        self._may_linger = True
        self._closed = False
        self._next_release = 0.0
        self._unknown_peers = 0
        self._detached_results = 0  # made before it was known that the coordinator is gone

    # -- called by the other threads ----------------------------------------------------------------------------------

    def attach(self, results: str) -> None:
        """Send results to this endpoint of a coordinator."""
        with self._lock:
            if not self._closed:
                self._peers.open(None, results)

    def detach(self) -> None:
        """Send no more results: the coordinator is gone, and the actor keeps them for the next one."""
        with self._lock:
            if None in self._peers.links:
                self._polled -= {self._peers.links[None]}
                self._peers.close(None)

    def send(self, messages: Sequence[Outgoing], idle: bool = False) -> None:
        """Send now what can leave now. `idle`: the caller has nothing else to do."""
        if not messages:
            return
        size = sum(wire_size(message.buffers) for message in messages)
        most_messages, most_bytes = DIRECT_IDLE if idle else DIRECT_BUSY
        with self._lock:
            if self._closed:  # the thread has failed or the session is over, and the main thread knows
                return
            if self._queue or len(messages) > most_messages or size > most_bytes:
                self._queued += len(messages)
                self._queued_bytes += size
                self._queue.append(messages)
                self._wakeup.set()
            else:
                placed: dict[int, Block] = {}
                for message in messages:
                    self._send(message, placed)
                self._release_batch(placed)
                self._account()

    def set_peers(self, peers: Peers) -> None:
        """Connect to new replicas and drop the links to those that are gone."""
        with self._lock:
            if self._queue:
                self._queue.append(peers)
            elif not self._closed:
                self._connect(peers)
        self._wakeup.set()

    def granted(self, receiver: ReplicaId | None, credit: Credit) -> None:
        """Take credit from the receiver of an edge (`None`: the coordinator)."""
        with self._lock:
            if self._closed:
                return
            link = self._peers.links.get(receiver)
            if link is None:
                self._unknown_peers += 1
                return
            link.granted(credit.messages, credit.bytes)
            if receiver is not None and self.arena is not None:
                if credit.mapped:
                    self.readers.add(receiver)
                for ticket in credit.released:
                    self.arena.release(receiver, ticket)
            self._account()

    def grant(self, sender: ReplicaId | None, messages: int, size: int) -> None:
        """Give credit to the sender of an edge (`None`: the coordinator), and return all unused blocks."""
        with self._lock:
            if not self._closed:
                self._credit({sender: (messages, size)})
                self._account()

    def wake(self) -> None:
        """Return unused blocks soon. Takes no lock: it is called on whichever thread drops a block's last view."""
        self._next_release = 0.0
        self._wakeup.set()

    def finish(self, last_messages: bool = True) -> None:
        """Send what is queued, then end; without `last_messages` do not wait for a coordinator that takes nothing."""
        with self._lock:
            self._finishing = True
            self._may_linger = last_messages
        self._wakeup.set()

    @property
    def waiting(self) -> int:
        """Messages that have not left: their receivers are slow."""
        return self._queued + self._waiting

    @property
    def congested(self) -> bool:
        """Whether so much waits for its receivers that no more may be made."""
        if self.waiting > self.flow.outbox_messages:
            return True
        return self._queued_bytes + self._waiting_bytes > self.flow.outbox_bytes

    def counts(self) -> dict[str, int]:
        """Messages, blocks and connections held, and totals of what was dropped."""
        unknown = {"dropped_credit_of_unknown_peer": self._unknown_peers} if self._unknown_peers else {}
        if self._detached_results:
            unknown["dropped_results_of_lost_coordinator"] = self._detached_results
        own = self.arena.counts() if self.arena is not None else {}
        return {"outbox": self.waiting, **own, **unknown, **self.arenas.counts()}

    def measure(self, meters: Meters) -> None:
        """Set the metrics of its edges: what has left and what waits, by receiver, as "talker/0" or "coordinator"."""
        with self._lock:
            edge_metrics(meters, self.identity.name, self._peers)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Send until `finish` and the queue is empty. A failure ends the process."""
        try:
            while not self._finishing or self._queue:
                self._wait()
                self._work_off()
                with self._lock:
                    self._maintain(time.monotonic())
            self._linger()
        except Exception as error:  # this thread must not end unnoticed: the main thread ends the process
            logger.exception("the outbound thread failed")
            self.on_event(Stop(f"outbound thread: {type(error).__name__}: {error}", failed=True))
        finally:
            with self._lock:
                self._closed = True
                for peer in list(self._peers.links):
                    self._peers.close(peer)

    def _wait(self) -> None:
        """Wait until there is something to do, or a peer that refused takes more."""
        poller = select.poll()
        poller.register(self._wakeup.fileno(), select.POLLIN)
        with self._lock:
            # One that waits for credit hears of it elsewhere.
            self._polled = frozenset(link for link in self._peers.links.values() if link.backlog and link.refused)
            for link in self._polled:
                poller.register(link.descriptor, select.POLLIN)
        poller.poll(MAXIMUM_POLL_MS)
        self._wakeup.clear()
        with self._lock:
            for link in self._polled:
                link.wake()

    def _work_off(self) -> None:
        while self._queue:  # only this thread takes from it
            first = self._queue[0]
            if isinstance(first, Peers):
                with self._lock:
                    self._connect(first)
                    self._queue.popleft()
                continue
            placed: dict[int, Block] = {}
            for message in first:
                with self._lock:
                    prepared = self._prepare(message, placed)
                if prepared is not None:
                    self._fill(prepared)  # may take long, and others go on meanwhile
                with self._lock:
                    if prepared is not None:
                        self._deliver(prepared)
                    self._account()  # first: a message may be counted twice for a moment, but not never
                    self._queued -= 1
                    self._queued_bytes -= wire_size(message.buffers)
            with self._lock:
                self._release_batch(placed)
                self._queue.popleft()

    def _maintain(self, now: float) -> None:
        """Do what becomes due with time, not with a message."""
        if now >= self._next_release:
            self._next_release = now + RELEASE_SECONDS
            self._credit({})
            if self.arena is not None:
                self.arena.expire(STEADY())
            while self._unaddressed and self._unaddressed[0][0] + ADDRESS_SECONDS < now:  # the oldest come first
                _, message = self._unaddressed.pop(0)
                self._lose(message, "was never announced")
            for peer in self._peers.cut(now):
                self.on_event(Lost(f"the link to {name_of(peer)} was cut"))
        for receiver, request_id in self._peers.flush():
            self.on_event(Undelivered(request_id, receiver, StageLost(f"{receiver.name} takes no messages.")))
        self._account()

    def _linger(self) -> None:
        """Wait a little for a coordinator that has not taken the last messages yet."""
        deadline = time.monotonic() + (LAST_MESSAGES_SECONDS if self._may_linger else 0.0)
        link = self._peers.links.get(None)
        while link is not None and link.backlog and time.monotonic() < deadline:
            poller = select.poll()
            poller.register(link.descriptor, select.POLLIN)
            poller.poll(50)
            with self._lock:
                link.wake()

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _connect(self, peers: Peers) -> None:
        """Open links to new replicas, and close those to replicas that are gone."""
        receivers = {peer.replica_id: peer.inbox for peer in peers.peers}
        sources = {peer.replica_id: peer.inbox for peer in peers.sources}
        for peer, link in list(self._peers.links.items()):
            if peer is not None and peer not in receivers and peer not in sources:
                self._polled -= {link}
                self._peers.close(peer)
                self.readers.discard(peer)
                if self.arena is not None:
                    self.arena.forget(peer)
        for replica_id, inbox in receivers.items():
            if replica_id not in self._peers.links:
                self._peers.open(replica_id, inbox)
                self._newest[(replica_id.stage, replica_id.replica)] = replica_id.epoch
        for replica_id, inbox in sources.items():
            if replica_id not in self._peers.links:
                self._peers.open(replica_id, inbox, only_credit=True)
                self._credit({replica_id: (0, 0)})  # tells whether its arena is mapped
        addressed = [message for _, message in self._unaddressed if not self._is_expected(message.destination)]
        self._unaddressed = [waiting for waiting in self._unaddressed if self._is_expected(waiting[1].destination)]
        for message in addressed:
            self._send(message, {})
        self._account()

    def _credit(self, grants: Mapping[Peer, tuple[int, int]]) -> None:
        """Grant credit to senders, in messages and bytes, and return all unused blocks."""
        released = self.arenas.take_released()
        for sender in {*grants, *released}:
            if (link := self._peers.links.get(sender)) is not None:  # else it is gone, and its account with it
                tickets = released.get(sender, ()) if sender is not None else ()
                # Every time: a source may hear of this stage only after the first message.
                mapped = sender is not None and self.arenas.is_mapped(sender)
                credit = Credit(*grants.get(sender, (0, 0)), tuple(tickets), mapped)
                link.send_urgent("", encode(self._header, credit, limits=self.limits))

    def _account(self) -> None:
        """Note what waits, and wake the thread for a link that waits for its socket and is not polled yet."""
        links = [link for link in self._peers.links.values() if link.backlog]
        self._waiting = sum(link.backlog for link in links if link.window is not None)
        self._waiting_bytes = sum(link.backlog_bytes for link in links if link.window is not None)
        if any(link.refused and link not in self._polled for link in links):
            self._wakeup.set()

    def _send(self, message: Outgoing, placed: dict[int, Block]) -> None:
        """Do all steps at once."""
        prepared = self._prepare(message, placed)
        if prepared is not None:
            self._fill(prepared)
            self._deliver(prepared)

    def _prepare(self, message: Outgoing, placed: dict[int, Block]) -> Prepared | None:
        """Do everything before the copy; `None` if there is nothing to send now.

        Args:
            placed: blocks of the same batch, by identity of the buffer; new ones are added.
        """
        if self._is_expected(message.destination):
            self._unaddressed.append((time.monotonic(), message))
            return None
        blocks, unfilled = self._place(message, placed)
        try:  # before the copy, which drives what this needs out of the processor's cache
            frames = encode(message.header, message.body, message.buffers, self.limits, blocks)
        except OmniError as error:  # larger than the limits
            self.on_event(Rejected(message.header, error))
            return None
        return Prepared(message, frames, blocks, unfilled)

    def _is_expected(self, target: Peer) -> bool:
        """Whether a replica's address will still be announced, because it is newer than the one known here."""
        return target is not None and target.epoch > self._newest.get((target.stage, target.replica), 0)

    def _place(
        self, message: Outgoing, placed: dict[int, Block]
    ) -> tuple[tuple[Block, ...], Sequence[tuple[Block, Frame]]]:
        """Reserve blocks for large buffers, as far as there is room: the blocks, and which of them are to be filled."""
        arena = self.arena
        if arena is None or message.destination not in self.readers:
            return (), ()
        blocks: list[Block] = []
        unfilled: list[tuple[Block, Frame]] = []
        for index, buffer in enumerate(message.buffers):
            size = wire_size([buffer])
            if size <= self.flow.inline_bytes or len(blocks) == MAX_BLOCKS:
                continue
            block = placed.get(id(buffer))
            if block is None:
                expires = (message.header.deadline or STEADY() + NO_DEADLINE_SECONDS) + GRACE_SECONDS
                block = arena.reserve(size, self.identity, expires)
                if block is None:
                    continue
                unfilled.append((block, buffer))
                placed[id(buffer)] = block
            blocks.append(Block(index, block.offset, block.length, block.ticket))
        return tuple(blocks), unfilled

    def _fill(self, prepared: Prepared) -> None:
        """Copy the buffers, which may take milliseconds. Needs no lock: only the outbound thread expires blocks."""
        if self.arena is not None:
            for block, buffer in prepared.unfilled:
                self.arena.write(block, buffer)

    def _deliver(self, prepared: Prepared) -> None:
        """Hand a message whose blocks are filled to its link."""
        message, target = prepared.message, prepared.message.destination
        link = self._peers.links.get(target)
        if link is None and target is None:
            self._detached_results += 1
        elif link is None:
            self._lose(message, "has no link")
        elif not link.send(message.header.request_id, prepared.frames):
            self._lose(message, "has taken no messages for so long that its outbox is full")
        elif self.arena is not None and target is not None:
            for block in prepared.blocks:
                self.arena.share(block, target)
                link.traffic.shared_bytes += block.length

    def _lose(self, message: Outgoing, what: str) -> None:
        """Report that a message did not leave, and why."""
        header, target = message.header, message.destination
        if target is None:
            self.on_event(Rejected(header, StageLost(f"The coordinator {what}.")))
        else:
            self.on_event(Undelivered(header.request_id, target, StageLost(f"{target.name} {what}.")))

    def _release_batch(self, placed: dict[int, Block]) -> None:
        """Leave a batch's blocks to their receivers. Those without any become free."""
        if self.arena is not None:
            for block in placed.values():
                self.arena.release(self.identity, block.ticket)
