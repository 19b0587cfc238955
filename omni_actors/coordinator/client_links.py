"""Links to clients: one each on the coordinator's ROUTER. Clients that read too slowly lose their requests."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.instructions import Instruction, ToClient
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.errors import SlowClient
from omni_actors.host.clocks import STEADY
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import encode
from omni_actors.protocol.common import Credit
from omni_actors.protocol.header import Header
from omni_actors.transport.credit import Traffic, Window, wire_size
from omni_actors.transport.disconnects import PeerConnections
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import PeerGone, Socket

logger = get_logger(__name__)

SWEEP_SECONDS = 10.0
LOOK_SECONDS = 0.5  # how often connections are looked at


class ClientLinks:
    """Belongs to the coordinator's loop.

    Args:
        do: carries out the instructions that end a client's requests.
        traffic: of all clients together, for metrics.
        dropped: counts clients that were slow or lost.
    """

    def __init__(
        self,
        socket: Socket,
        pipeline: PipelineConfig,
        state: RequestMachine,
        do: Callable[[Iterable[Instruction]], None],
        traffic: Traffic,
        dropped: collections.Counter[str],
    ) -> None:
        self._socket = socket
        self._flow = pipeline.flow
        self._client_bytes = pipeline.client_bytes
        self._limits = pipeline.limits
        self._state = state
        self._do = do
        self._traffic = traffic
        self._dropped = dropped
        self._links: dict[bytes, Link] = {}
        self._connections = PeerConnections()
        self._next_look = 0.0
        self._next_sweep = 0.0

    def send(self, message: ToClient) -> None:
        """Send to a client. One that takes no more loses its requests, one that is gone is forgotten."""
        client = message.client
        header = Header("", request_id=message.request_id, seq=message.seq)
        frames = encode(header, message.body, message.buffers, self._limits)
        link = self._links.get(client)
        if link is None:
            link = self._links[client] = self._new_link()
        with self._reaching(client):
            if not link.send(message.request_id, [client, *frames], wire_size(frames)):
                self._end_slow(client, link, "too much waited for it")

    def _new_link(self) -> Link:
        flow = self._flow
        return Link(
            self._socket,
            time.monotonic,
            flow.client_stall_seconds,
            Window(flow.client_window_messages, flow.client_window_bytes),
            needs_credit=True,
            outbox_messages=flow.client_messages,
            outbox_bytes=self._client_bytes,
            traffic=self._traffic,
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
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for client in self._connections.gone(now):
            if self._state.requests_of(client):
                self._lose(client, "its connection was closed")
            self._links.pop(client, None)

    def sweep(self) -> None:
        """Forget clients that have nothing in flight and have read everything."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_SECONDS
        busy = self._state.clients()
        for client, link in list(self._links.items()):
            if client not in busy and link.settled:
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
        if not self._state.requests_of(client):  # it has not even taken the errors, or asks and does not read
            logger.warning("dropped messages for a client: %s", why)
            self._dropped["client_messages"] += 1
            return
        logger.warning("ended the requests of a slow client: %s", why)
        self._dropped["client_slow"] += 1
        error = SlowClient(f"The client reads too slowly: {why}.")
        self._do(self._state.end_client(client, error, STEADY()))

    def _lose(self, client: bytes, why: str) -> None:
        """Drop a client's messages and end its requests. If it comes back, the answer to its ping shows that."""
        logger.warning("lost a client: %s; its requests end", why)
        self._dropped["client_lost"] += 1
        self._links.pop(client, None)
        self._do(self._state.client_gone(client, STEADY()))
