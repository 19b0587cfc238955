"""What a stage sends: encoded, placed in shared memory, in order and with credit.

A message that can leave at once is sent in the call itself, on the engine's own thread: to hand it to another thread
costs more than to send it. `Outbound`'s thread sends the rest: what is long, what a slow peer refuses, what waits. All
parts are used under one lock, so a socket has one owner at a time (docs/decisions.md):

* `sender.py`: the steps that a message takes;
* `links.py`: the sockets, the traffic on them, and the credit and blocks that go back to senders;
* `publications.py`: this stage's arena, with the large buffers of its messages.
"""

from __future__ import annotations

import collections
import select
import threading
import time
from collections.abc import Callable, Sequence

from omni_actors.config import FlowConfig
from omni_actors.logs import get_logger
from omni_actors.protocol.common import Credit
from omni_actors.protocol.control import Peers
from omni_actors.protocol.header import Block, Header, Limits, ReplicaId
from omni_actors.stage.events import Event, Lost, Stop
from omni_actors.stage.links import Links
from omni_actors.stage.outgoing import Outgoing
from omni_actors.stage.publications import Publications, length
from omni_actors.stage.sender import Sender
from omni_actors.transport.arena import Arena, ArenaReader
from omni_actors.transport.credit import EdgeMetrics
from omni_actors.transport.sockets import Sockets
from omni_actors.transport.wakeup import Wakeup

logger = get_logger(__name__)

# What is sent in the call itself, in messages and bytes; more is left to the thread. A busy engine pays for the
# text and the chunk of one request, an idle one has nothing better to do.
DIRECT_BUSY = (2, 64 << 10)
DIRECT_IDLE = (8, 8 << 20)
MAXIMUM_POLL_MS = 100
RELEASE_SECONDS = 0.1  # after which blocks are returned even if they are few
LAST_MESSAGES_SECONDS = 1.0


class Outbound(threading.Thread):
    """Sends `Outgoing` messages. One that may not be sent comes back as `Rejected`: the actor ends its request.

    One that a later stage does not take comes back as `Undelivered`. Messages to one receiver keep the order in which
    they were given. The methods may be called from any thread.

    Args:
        on_event: tells the main thread; called on any thread, under the lock.
        arena: this process's own, for large buffers; `None` sends all of them as frames.
        arenas: those of the sources, whose blocks are returned with the credit.
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
        self._flow = flow
        self._on_event = on_event
        self._arenas = arenas
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        header = Header("", "", identity.stage, identity.replica, identity.epoch)
        self._links = Links(sockets, results_endpoint, header, limits, flow, arenas)
        self.publications = Publications(arena, identity, flow.inline_bytes)
        self._sender = Sender(self._links, self.publications, limits, on_event)
        # Left to the thread, in order. While anything is here, nothing may be sent directly: it would overtake.
        self._queue: collections.deque[Sequence[Outgoing] | Peers] = collections.deque()
        self._queued, self._queued_bytes = 0, 0  # messages and bytes of it; read without the lock
        self._finishing = False
        self._may_linger = True
        self._closed = False
        self._next_release = 0.0
        self._unknown_peers = 0

    # -- called by the other threads ----------------------------------------------------------------------------------

    def send(self, messages: Sequence[Outgoing], idle: bool = False) -> None:
        """Send now what can leave now. `idle`: the caller has nothing else to do."""
        if not messages:
            return
        size = sum(_payload(message) for message in messages)
        most_messages, most_bytes = DIRECT_IDLE if idle else DIRECT_BUSY
        with self._lock:
            if self._closed:  # the thread has failed or the session is over, and the main thread knows
                return
            if self._queue or len(messages) > most_messages or size > most_bytes:
                self._queued += len(messages)
                self._queued_bytes += size
                self._queue.append(messages)
                wake = True
            else:
                placed: dict[int, Block] = {}
                for message in messages:
                    self._sender.send(message, placed)
                self.publications.release_batch(placed)
                wake = self._links.account()
        if wake:
            self._wakeup.set()

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
            link = self._links.receiver(receiver)
            if link is None:
                self._unknown_peers += 1
                return
            link.granted(credit.messages, credit.bytes)
            if receiver is not None:
                self.publications.credited(receiver, credit)
            wake = self._links.account()
        if wake:
            self._wakeup.set()

    def grant(self, sender: ReplicaId | None, messages: int, size: int) -> None:
        """Give credit to the sender of an edge (`None`: the coordinator)."""
        with self._lock:
            if self._closed:
                return
            self._links.grant(sender, messages, size)
            wake = self._links.account()
        if wake:
            self._wakeup.set()

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
        return self._queued + self._links.waiting

    @property
    def congested(self) -> bool:
        """Whether so much waits for its receivers that no more may be made."""
        if self.waiting > self._flow.outbox_messages:
            return True
        return self._queued_bytes + self._links.waiting_bytes > self._flow.outbox_bytes

    def counts(self) -> dict[str, int]:
        """Messages, blocks and connections held, and totals of what was dropped."""
        unknown = {"dropped_credit_of_unknown_peer": self._unknown_peers} if self._unknown_peers else {}
        return {"outbox": self.waiting, **self.publications.counts(), **unknown, **self._arenas.counts()}

    def edges(self) -> dict[str, EdgeMetrics]:
        """What has left and what waits, by receiver, as "talker/0" or "coordinator"."""
        with self._lock:
            return self._links.metrics()

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
            self._on_event(Stop(f"outbound thread: {type(error).__name__}: {error}", failed=True))
        finally:
            with self._lock:
                self._closed = True
                self._links.close()

    def _wait(self) -> None:
        """Wait until there is something to do, or a peer that refused takes more."""
        poller = select.poll()
        poller.register(self._wakeup.fileno(), select.POLLIN)
        with self._lock:
            for link in self._links.poll_refusing():
                poller.register(link.descriptor, select.POLLIN)
        poller.poll(MAXIMUM_POLL_MS)
        self._wakeup.clear()
        with self._lock:
            for link in self._links.polled:
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
                    prepared = self._sender.prepare(message, placed)
                if prepared is not None:
                    self.publications.fill(prepared.unfilled)  # may take long, and others go on meanwhile
                with self._lock:
                    if prepared is not None:
                        self._sender.deliver(prepared)
                    self._links.account()  # first: a message may be counted twice for a moment, but not never
                    self._queued -= 1
                    self._queued_bytes -= _payload(message)
            with self._lock:
                self.publications.release_batch(placed)
                self._queue.popleft()

    def _maintain(self, now: float) -> None:
        """Do what becomes due with time, not with a message."""
        if now >= self._next_release:
            self._next_release = now + RELEASE_SECONDS
            self._links.return_blocks()
            self.publications.expire()
            self._sender.expire_unaddressed(now)
            for name in self._links.cut(now):
                self._on_event(Lost(f"the link to {name} was cut"))
        for receiver, request_id in self._links.flush():
            self._sender.lose(request_id, receiver, "takes no messages")
        self._links.account()

    def _linger(self) -> None:
        """Wait a little for a coordinator that has not taken the last messages yet."""
        deadline = time.monotonic() + (LAST_MESSAGES_SECONDS if self._may_linger else 0.0)
        link = self._links.receiver(None)
        while link is not None and link.backlog and time.monotonic() < deadline:
            poller = select.poll()
            poller.register(link.descriptor, select.POLLIN)
            poller.poll(50)
            with self._lock:
                link.wake()

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _connect(self, peers: Peers) -> None:
        for receiver in self._links.connect(peers):
            self.publications.forget(receiver)
        self._sender.retry_unaddressed()
        self._links.account()


def _payload(message: Outgoing) -> int:
    return sum(length(buffer) for buffer in message.buffers)
