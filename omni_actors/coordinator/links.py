"""Links to stages, to clients, and over the control connection: a bounded outbox each, so that nobody holds up others.

A replica's inbox has a PUSH, and the replica gets credit for what came from it. A client has a link on the
coordinator's ROUTER, and loses its requests if it reads too slowly.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.instructions import Instruction, ToClient, ToStage
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import OmniError, SlowClient, StageLost
from omni_actors.host.processes import STEADY
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import Frame, encode
from omni_actors.protocol.fields import Body, ControlPeer, Header, Limits, ReplicaId, identity_of
from omni_actors.protocol.messages import Abort, Credit
from omni_actors.transport.link import Link, PeerLinks, ReceivedCredit, Traffic, Window, wire_size
from omni_actors.transport.sockets import PeerConnections, PeerGone, Socket, Sockets

logger = get_logger(__name__)


@dataclass(eq=False)
class StageLinks:
    """Belongs to the coordinator's loop.

    Args:
        fail: called, later on the loop, with the header of an attempt that could not be sent, and why.
        dropped: counts credit of replicas without a link.
    """

    sockets: Sockets
    state: RequestMachine
    fail: Callable[[Header, OmniError], None]
    traffic: dict[str, Traffic]
    dropped: collections.Counter[str]

    def __post_init__(self) -> None:
        flow = self.state.pipeline.flow
        self.peers = PeerLinks(self.sockets, flow, self.traffic)
        self._used: set[ReplicaId] = set()  # links with traffic since the last look at their congestion
        self._received: ReceivedCredit[ReplicaId] = ReceivedCredit(flow.edge_messages, flow.edge_bytes)

    def open(self, replica: Replica) -> None:
        """Connect to the inbox of a replica that has registered."""
        link = self.peers.open(replica.replica_id, replica.inbox_for(0))  # the coordinator's node
        # What waited for the connection or for a slow stage leaves at once, not on the next tick.
        asyncio.get_running_loop().add_reader(link.descriptor, link.wake)

    def close(self, replica_id: ReplicaId) -> None:
        """Disconnect from a replica. Idempotent."""
        if (link := self.peers.links.get(replica_id)) is not None:
            asyncio.get_running_loop().remove_reader(link.descriptor)
            self.peers.close(replica_id)

    def close_all(self) -> None:
        """Close the links to all replicas."""
        for replica_id in list(self.peers.links):
            if replica_id is not None:
                self.close(replica_id)

    def send(self, message: ToStage) -> None:
        """Send to a replica; a message that cannot be sent fails its request."""
        replica_id = message.replica_id
        header = Header("", request_id=message.request_id, attempt=message.attempt, deadline=message.deadline)
        link = self.peers.links.get(replica_id)
        self._used.add(replica_id)
        try:  # slightly larger than what the client sent, it may be over the limit
            frames = encode(header, message.body, message.buffers, self.state.pipeline.limits)
            if link is not None and isinstance(message.body, Abort):
                link.forget(header.request_id)  # an abort must not wait, and what it overtakes is not wanted
                link.send_urgent(header.request_id, frames)
            elif link is None or not link.send(header.request_id, frames):
                raise _takes_no_messages(replica_id)
        except OmniError as error:
            self._fail_later(header.request_id, replica_id, error, header.attempt)

    def tick(self) -> None:
        """Send what waits; give up on what a replica has not taken for too long."""
        for replica_id, request_id in self.peers.flush():
            attempt = self.state.attempt_of(request_id, replica_id.stage)
            self._fail_later(request_id, replica_id, _takes_no_messages(replica_id), attempt)

    def took(self, header: Header, frames: Sequence[Frame]) -> None:
        """Count a result that was taken: its stage may send another."""
        if header.sender is not None and self._received.take(header.sender, wire_size(frames)):
            self.grant(everything=False)

    def grant(self, everything: bool) -> None:
        """Grant stages credit for what was taken; small amounts wait unless `everything`."""
        for replica_id, messages, size in self._received.collect(everything):
            link = self.peers.links.get(replica_id)
            if link is not None:
                credit = Credit(messages=messages, bytes=size)
                link.send_urgent("", encode(Header(""), credit, limits=self.state.pipeline.limits))

    def granted(self, replica_id: ReplicaId | None, credit: Credit) -> None:
        """Count what a replica has taken."""
        link = self.peers.links.get(replica_id)
        if link is None or replica_id is None:
            self.dropped["credit_of_unknown_replica"] += 1
            return
        link.granted(credit.messages, credit.bytes)
        self._used.add(replica_id)

    def congestion(self) -> list[tuple[ReplicaId, bool]]:
        """Say of replicas whose links had traffic since the last call whether they take no more input.

        A socket that refuses is not a slow stage, which holds us up by credit, but one that may be lost: the health
        policy will know soon, and what waits here is replayed then.
        """
        used, self._used = self._used & self.peers.links.keys(), set()
        links = ((replica_id, self.peers.links[replica_id]) for replica_id in used)
        return [(replica_id, link.congested and not link.refused) for replica_id, link in links]

    def _fail_later(self, request_id: str, replica_id: ReplicaId, error: OmniError, attempt: int) -> None:
        """Fail an attempt later on the loop, outside of the instructions that are being carried out now."""
        header = Header.of(replica_id, request_id, attempt)
        asyncio.get_running_loop().call_soon(self.fail, header, error)


def _takes_no_messages(replica_id: ReplicaId) -> StageLost:
    return StageLost(f"{replica_id.name} takes no messages.", stage=replica_id.stage)


FEW_REQUESTS = 10  # of a client, for which `client_messages` may wait; for more requests more


@dataclass(eq=False)
class ClientLinks:
    """Belongs to the coordinator's loop.

    Args:
        do: carries out the instructions that end a client's requests.
        on_gone: called with a client whose connection was closed.
        traffic: of all clients together, for metrics.
        dropped: counts clients that were slow or lost.
    """

    socket: Socket
    pipeline: PipelineConfig
    state: RequestMachine
    do: Callable[[Iterable[Instruction]], None]
    on_gone: Callable[[bytes], None]
    traffic: Traffic
    dropped: collections.Counter[str]

    def __post_init__(self) -> None:
        self._client_bytes = self.pipeline.client_bytes  # found once: by the modalities of all stages
        self._links: dict[bytes, Link] = {}
        self._connections = PeerConnections()

    def send(self, message: ToClient) -> None:
        """Send to a client. One that takes no more loses its requests, one that is gone is forgotten."""
        client = message.client
        header = Header("", request_id=message.request_id, seq=message.seq)
        frames = encode(header, message.body, message.buffers, self.pipeline.limits)
        link = self._links.get(client)
        if link is None:
            link = self._links[client] = self._new_link()
        waiting = message.request_id, [client, *frames], wire_size(frames)
        with self._reaching(client):
            if not link.send(*waiting) and not (self._widen(client, link) and link.send(*waiting)):
                self._end_slow(client, link, "too much waited for it")

    def _widen(self, client: bytes, link: Link) -> bool:
        """Let more messages wait for a client with many requests, if not so many may by now.

        After the loss of a coordinator it gets at once what was made meanwhile for all of them.
        """
        allowed = self.pipeline.flow.client_messages * len(self.state.requests_of(client)) // FEW_REQUESTS
        wider = allowed > link.outbox_messages
        link.outbox_messages = max(allowed, link.outbox_messages)
        return wider

    def _new_link(self) -> Link:
        flow = self.pipeline.flow
        return Link(
            self.socket,
            time.monotonic,
            flow.client_stall_seconds,
            Window(flow.client_window_messages, flow.client_window_bytes),
            needs_credit=True,
            outbox_messages=flow.client_messages,
            outbox_bytes=self._client_bytes,
            traffic=self.traffic,
        )

    def granted(self, client: bytes, credit: Credit) -> None:
        """Count what a client has read."""
        link = self._links.get(client)
        if link is not None:
            with self._reaching(client):
                link.granted(credit.messages, credit.bytes)

    def flush(self) -> None:
        """Send what waits, as far as possible, and give up on clients that have taken nothing for too long."""
        for client, link in list(self._links.items()):
            if not link.backlog:
                continue
            with self._reaching(client):
                link.flush()
                if link.stalled():
                    self._end_slow(client, link, "it took nothing for too long")

    def heard(self, client: bytes, descriptor: bytes) -> None:
        """Note which connection a message of a client came over."""
        link = self._links.get(client)
        if self._connections.heard(client, descriptor) and link is not None and link.window is not None:
            # What was on its way over the one before is lost, and so is the credit for it.
            self.granted(client, Credit(messages=link.window.messages_out, bytes=link.window.bytes_out))

    def end_gone(self) -> None:
        """End the requests of clients whose connection was closed, also if nothing is being sent to them."""
        for client in self._connections.gone(time.monotonic()):
            if self.state.requests_of(client):
                self._lose(client, "its connection was closed")
            self._links.pop(client, None)
            self.on_gone(client)

    def sweep(self) -> None:
        """Forget clients that have nothing in flight and have read everything."""
        waiting = {request.client for request in self.state.active.values()}
        for client, link in list(self._links.items()):
            if link.settled and client not in waiting:
                del self._links[client]

    @contextlib.contextmanager
    def _reaching(self, client: bytes) -> Iterator[None]:
        """Give up on a client that can no longer be reached."""
        try:
            yield
        except PeerGone:
            self._lose(client, "it is not connected")

    def _end_slow(self, client: bytes, link: Link, why: str) -> None:
        """Drop what waits for a client and end its requests; it gets the errors when it reads again."""
        link.give_up()
        link.moved = time.monotonic()
        if not self.state.requests_of(client):  # it has not even taken the errors, or asks and does not read
            logger.warning("dropped messages for a client: %s", why)
            self.dropped["client_messages"] += 1
            return
        logger.warning("ended the requests of a slow client: %s", why)
        self.dropped["client_slow"] += 1
        error = SlowClient(f"The client reads too slowly: {why}.")
        self.do(self.state.end_client(client, error, STEADY()))

    def _lose(self, client: bytes, why: str) -> None:
        """Drop a client's messages and end its requests. If it comes back, the answer to its ping shows that."""
        logger.warning("lost a client: %s; its requests end", why)
        self.dropped["client_lost"] += 1
        self._links.pop(client, None)
        self.do(self.state.client_gone(client, STEADY()))


@dataclass(eq=False)
class ControlLinks:
    """Belongs to the coordinator's loop. A link exists while something waits for its peer."""

    socket: Socket
    limits: Limits
    clock: Callable[[], float] = time.monotonic
    _links: dict[ControlPeer, Link] = field(default_factory=dict)

    def send(self, peer: ControlPeer, body: Body) -> None:
        """Send to a peer, or keep what it does not take now. One that is not connected says hello when it is back.

        Raises:
            OmniError: the message is over a limit, or too much waits for the peer.
        """
        frames = encode(Header(""), body, limits=self.limits)
        link = self._links.get(peer) or Link(self.socket, self.clock)
        try:
            if not link.send("", [identity_of(peer), *frames]):
                raise StageLost("It takes no control messages.")
        except PeerGone:
            self._links.pop(peer, None)
            return
        if link.backlog:
            self._links[peer] = link

    def flush(self) -> list[ControlPeer]:
        """Send what waits, as far as possible. Returns the peers that have taken nothing for too long, each once."""
        stalled = []
        for peer, link in list(self._links.items()):
            try:
                link.flush()
            except PeerGone:
                link.give_up()
            if link.stalled():
                link.give_up()
                stalled.append(peer)
            if not link.backlog:
                del self._links[peer]
        return stalled
