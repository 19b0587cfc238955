"""The sockets on which a stage sends: to the coordinator, the stages after it and, for credit, those before it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from omni_actors.config import FlowConfig
from omni_actors.protocol.control import Peers
from omni_actors.protocol.header import ReplicaId
from omni_actors.transport.credit import EdgeMetrics, Traffic, Window
from omni_actors.transport.disconnects import DisconnectDetector
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import Sockets

COORDINATOR = "coordinator"  # its name among the receivers


class Links:
    """Not thread-safe: `Outbound` uses it under its lock, except for `waiting` and `waiting_bytes`."""

    def __init__(self, sockets: Sockets, results_endpoint: str, flow: FlowConfig) -> None:
        self._sockets = sockets
        self._flow = flow
        self._traffic: dict[str, Traffic] = {}  # by receiver, as "talker/0"; outlives its links
        self._disconnects: DisconnectDetector[ReplicaId | None] = DisconnectDetector()
        self._coordinator = self._open(None, results_endpoint)
        self._receivers: dict[ReplicaId, Link] = {}
        self._sources: dict[ReplicaId, Link] = {}
        self._newest: dict[tuple[str, int], int] = {}  # the last epoch that was announced, by stage and replica
        self.polled: frozenset[Link] = frozenset()  # those on whose sockets the outbound thread waits
        self.waiting, self.waiting_bytes = 0, 0  # messages that wait for their receivers, as of the last `account`

    def receiver(self, replica_id: ReplicaId | None) -> Link | None:
        """The link to a later stage, or to the coordinator for `None`; `None` if there is none."""
        return self._coordinator if replica_id is None else self._receivers.get(replica_id)

    def sender(self, replica_id: ReplicaId | None) -> Link | None:
        """The link back to a stage before this one, or to the coordinator for `None`; `None` if there is none."""
        return self._coordinator if replica_id is None else self._sources.get(replica_id)

    def is_expected(self, replica_id: ReplicaId) -> bool:
        """Whether a replica's address will still be announced, because it is newer than the one known here."""
        return replica_id.epoch > self._newest.get((replica_id.stage, replica_id.replica), 0)

    def connect(self, peers: Peers) -> tuple[list[ReplicaId], list[ReplicaId]]:
        """Open links to new replicas and close those to replicas that are gone.

        Returns:
            The receivers that are gone, and the sources that are new.
        """
        receivers = {peer.replica_id: peer.inbox for peer in peers.peers}
        sources = {peer.replica_id: peer.inbox for peer in peers.sources}
        gone = [replica_id for replica_id in self._receivers if replica_id not in receivers]
        new = [replica_id for replica_id in sources if replica_id not in self._sources]
        for replica_id in gone:
            self._close(replica_id, self._receivers.pop(replica_id))
        for replica_id in [replica_id for replica_id in self._sources if replica_id not in sources]:
            self._close(replica_id, self._sources.pop(replica_id))
        for replica_id, inbox in receivers.items():
            if replica_id not in self._receivers:
                self._receivers[replica_id] = self._open(replica_id, inbox)
                self._newest[(replica_id.stage, replica_id.replica)] = replica_id.epoch
        for replica_id in new:
            link = self._sources[replica_id] = Link(self._sockets.push(sources[replica_id]), time.monotonic)
            self._disconnects.watch(replica_id, link.socket, sources[replica_id])
        return gone, new

    def account(self) -> bool:
        """Note what waits; whether a link waits for its socket that the outbound thread does not poll yet."""
        waiting = size = 0
        unpolled = False
        for link in (self._coordinator, *self._receivers.values()):
            backlog = link.backlog
            if backlog:
                waiting += backlog
                size += link.backlog_bytes
                unpolled = unpolled or (link.refused and link not in self.polled)
        self.waiting, self.waiting_bytes = waiting, size
        return unpolled or any(
            link.refused and link.backlog and link not in self.polled for link in self._sources.values()
        )

    def poll_refusing(self) -> Iterable[Link]:
        """Take as `polled` the links that wait for their socket. One that waits for credit hears of it elsewhere."""
        self.polled = frozenset(link for link in self._all() if link.backlog and link.refused)
        return self.polled

    def flush(self) -> list[tuple[ReplicaId, str]]:
        """Send what the peers take now; return receivers that took nothing for too long, and the requests lost."""
        for link in self._all():
            link.flush()
        stalled = [(replica_id, link) for replica_id, link in self._receivers.items() if link.stalled()]
        return [(replica_id, request_id) for replica_id, link in stalled for request_id in link.give_up()]

    def cut(self, now: float) -> list[str]:
        """Names of peers whose TCP link was cut although they are said to live, each once."""
        found = self._disconnects.found(now)
        for replica_id in found:
            self._disconnects.forget(replica_id)
        return [f"the {COORDINATOR}" if replica_id is None else replica_id.name for replica_id in found]

    def metrics(self) -> dict[str, EdgeMetrics]:
        """What has left and what waits, by receiver, as "talker/0" or "coordinator"."""
        closed = {name: traffic.metrics() for name, traffic in self._traffic.items()}
        links = {replica_id.name: link for replica_id, link in self._receivers.items()}
        return closed | {name: link.metrics() for name, link in {COORDINATOR: self._coordinator, **links}.items()}

    def close(self) -> None:
        self._disconnects.close()
        for link in self._all():
            link.close()

    def _all(self) -> tuple[Link, ...]:
        return (self._coordinator, *self._receivers.values(), *self._sources.values())

    def _open(self, replica_id: ReplicaId | None, endpoint: str) -> Link:
        window = Window(self._flow.edge_messages, self._flow.edge_bytes)
        traffic = self._traffic.setdefault(replica_id.name if replica_id is not None else COORDINATOR, Traffic())
        link = Link(self._sockets.push(endpoint), time.monotonic, window=window, traffic=traffic)
        self._disconnects.watch(replica_id, link.socket, endpoint)
        return link

    def _close(self, replica_id: ReplicaId, link: Link) -> None:
        self._disconnects.forget(replica_id)
        self.polled -= {link}
        link.close()
