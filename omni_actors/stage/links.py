"""The sockets on which a stage sends: to the coordinator, the stages after it and, for credit, those before it.

A sender of this stage gets the blocks of its arena back together with its credit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from omni_actors.config import FlowConfig
from omni_actors.protocol.codec import encode
from omni_actors.protocol.common import Credit
from omni_actors.protocol.control import Peers
from omni_actors.protocol.header import Header, Limits, ReplicaId
from omni_actors.transport.arena import ArenaReader
from omni_actors.transport.credit import EdgeMetrics, Traffic, Window
from omni_actors.transport.disconnects import DisconnectDetector
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import Sockets

COORDINATOR = "coordinator"  # its name among the receivers


class Links:
    """Not thread-safe: `Outbound` uses it under its lock, except for `waiting` and `waiting_bytes`.

    Args:
        header: of the credit that is sent.
        arenas: those of the sources.
    """

    def __init__(
        self,
        sockets: Sockets,
        results_endpoint: str,
        header: Header,
        limits: Limits,
        flow: FlowConfig,
        arenas: ArenaReader,
    ) -> None:
        self._sockets = sockets
        self._header = header
        self._limits = limits
        self._arenas = arenas
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

    def is_expected(self, replica_id: ReplicaId) -> bool:
        """Whether a replica's address will still be announced, because it is newer than the one known here."""
        return replica_id.epoch > self._newest.get((replica_id.stage, replica_id.replica), 0)

    def connect(self, peers: Peers) -> list[ReplicaId]:
        """Open links to new replicas and close those to replicas that are gone; return the receivers that are gone."""
        receivers = {peer.replica_id: peer.inbox for peer in peers.peers}
        sources = {peer.replica_id: peer.inbox for peer in peers.sources}
        gone = [replica_id for replica_id in self._receivers if replica_id not in receivers]
        for replica_id in gone:
            self._close(replica_id, self._receivers.pop(replica_id))
        for replica_id in [replica_id for replica_id in self._sources if replica_id not in sources]:
            self._close(replica_id, self._sources.pop(replica_id))
        for replica_id, inbox in receivers.items():
            if replica_id not in self._receivers:
                self._receivers[replica_id] = self._open(replica_id, inbox)
                self._newest[(replica_id.stage, replica_id.replica)] = replica_id.epoch
        for replica_id, inbox in sources.items():
            if replica_id not in self._sources:
                link = self._sources[replica_id] = Link(self._sockets.push(inbox), time.monotonic)
                self._disconnects.watch(replica_id, link.socket, inbox)
                self.grant(replica_id)  # tells whether its arena is mapped
        return gone

    def grant(self, sender: ReplicaId | None, messages: int = 0, size: int = 0) -> None:
        """Grant `messages` and `size` bytes to a sender (`None`: the coordinator), and return all unused blocks."""
        released = self._arenas.take_released()
        self._credit(sender, messages, size, released.pop(sender, []) if sender is not None else [])
        for owner, tickets in released.items():
            self._credit(owner, 0, 0, tickets)

    def return_blocks(self) -> None:
        """Return the blocks that nothing refers to any more."""
        for owner, tickets in self._arenas.take_released().items():
            self._credit(owner, 0, 0, tickets)

    def _credit(self, sender: ReplicaId | None, messages: int, size: int, released: Sequence[int]) -> None:
        link = self._coordinator if sender is None else self._sources.get(sender)
        if link is None:  # the sender is gone, and its account with it
            return
        # Every time: a source may hear of this stage only after the first message.
        mapped = sender is not None and self._arenas.is_mapped(sender)
        credit = Credit(messages, size, tuple(released), mapped)
        link.send_urgent("", encode(self._header, credit, limits=self._limits))

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
        """Close the sockets to the coordinator, to receivers and to sources."""
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
