"""Links to stages: a PUSH link to each replica's inbox, and the credit for what came from them."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.instructions import ToStage
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.errors import OmniError, StageLost
from omni_actors.protocol.codec import Frame, encode
from omni_actors.protocol.common import Abort, Credit
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.transport.credit import EdgeMetrics, ReceivedCredit, Traffic, Window, wire_size
from omni_actors.transport.disconnects import DisconnectDetector
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import Sockets


class StageLinks:
    """Belongs to the coordinator's loop.

    Args:
        fail: called, later on the loop, with the header of an attempt that could not be sent, and why.
        traffic: by receiver, for metrics; outlives the links.
        dropped: counts credit of replicas without a link.
    """

    def __init__(
        self,
        sockets: Sockets,
        pipeline: PipelineConfig,
        state: RequestMachine,
        fail: Callable[[Header, OmniError], None],
        traffic: dict[str, Traffic],
        dropped: collections.Counter[str],
    ) -> None:
        self._sockets = sockets
        self._flow = pipeline.flow
        self._limits = pipeline.limits
        self._state = state
        self._fail = fail
        self._traffic = traffic
        self._dropped = dropped
        self._links: dict[ReplicaId, Link] = {}
        self._congested: set[ReplicaId] = set()
        self._changes: dict[ReplicaId, bool] = {}
        self._disconnects: DisconnectDetector[ReplicaId] = DisconnectDetector()
        self._received: ReceivedCredit[ReplicaId] = ReceivedCredit(self._flow.edge_messages, self._flow.edge_bytes)

    def open(self, replica: Replica) -> None:
        """Connect to the inbox of a replica that has registered."""
        inbox = replica.inbox_for(0)  # the coordinator's node
        link = self._links[replica.replica_id] = Link(
            self._sockets.push(inbox),
            time.monotonic,
            window=Window(self._flow.edge_messages, self._flow.edge_bytes),
            traffic=self._traffic.setdefault(replica.name, Traffic()),
        )
        self._disconnects.watch(replica.replica_id, link.socket, inbox)
        # What waited for the connection or for a slow stage leaves at once, not on the next tick.
        asyncio.get_running_loop().add_reader(link.descriptor, link.wake)

    def close(self, replica_id: ReplicaId) -> None:
        """Disconnect from a replica. Idempotent."""
        link = self._links.pop(replica_id, None)
        self._congested.discard(replica_id)
        if link is not None:
            asyncio.get_running_loop().remove_reader(link.descriptor)
            self._disconnects.forget(replica_id)
            link.close()

    def close_all(self) -> None:
        """Close the links to all replicas."""
        for replica_id in list(self._links):
            self.close(replica_id)

    def find(self, replica_id: ReplicaId) -> Link | None:
        """The open link to a replica; None if there is none."""
        return self._links.get(replica_id)

    def metrics(self) -> dict[str, EdgeMetrics]:
        """Metrics of the open links, by receiver."""
        return {replica_id.name: link.metrics() for replica_id, link in self._links.items()}

    def send(self, message: ToStage) -> None:
        """Send to a replica; a message that cannot be sent fails its request."""
        replica_id = message.replica_id
        header = Header("", request_id=message.request_id, attempt=message.attempt, deadline=message.deadline)
        link = self._links.get(replica_id)
        try:
            frames = encode(header, message.body, message.buffers, self._limits)
        except OmniError as error:  # slightly larger than what the client sent, and so over the limit
            self._fail_later(header.request_id, replica_id, error, header.attempt)
            return
        if link is None:
            self._fail_later(header.request_id, replica_id, _takes_no_messages(replica_id), header.attempt)
            return
        if isinstance(message.body, Abort):  # must not wait, and what it overtakes is no longer wanted
            link.forget(header.request_id)
            link.send_urgent(header.request_id, frames)
        elif not link.send(header.request_id, frames):
            self._fail_later(header.request_id, replica_id, _takes_no_messages(replica_id), header.attempt)
        self._note_congestion(replica_id, link)

    def tick(self) -> None:
        """Send what waits; give up on what a replica has not taken for too long."""
        for replica_id, link in self._links.items():
            link.flush()
            if link.stalled():
                for request_id in link.give_up():
                    attempt = self._state.attempt_of(request_id, replica_id.stage)
                    self._fail_later(request_id, replica_id, _takes_no_messages(replica_id), attempt)

    def cut(self) -> list[ReplicaId]:
        """Replicas whose link over the network was cut since the last call."""
        cut = self._disconnects.found(time.monotonic())
        for replica_id in cut:
            self._disconnects.forget(replica_id)
        return cut

    def took(self, header: Header, frames: Sequence[Frame]) -> None:
        """Count a result that was taken: its stage may send another."""
        if not header.stage:
            return  # it names no sender
        if self._received.take(ReplicaId(header.stage, header.replica, header.epoch), wire_size(frames)):
            self.grant(everything=False)

    def grant(self, everything: bool) -> None:
        """Grant stages credit for what was taken; small amounts wait unless `everything`."""
        for replica_id, messages, size in self._received.collect(everything):
            link = self._links.get(replica_id)
            if link is not None:
                credit = Credit(messages=messages, bytes=size)
                link.send_urgent("", encode(Header(""), credit, limits=self._limits))

    def granted(self, replica_id: ReplicaId, credit: Credit) -> None:
        """Count what a replica has taken."""
        link = self._links.get(replica_id)
        if link is None:
            self._dropped["credit_of_unknown_replica"] += 1
            return
        link.granted(credit.messages, credit.bytes)
        self._note_congestion(replica_id, link)

    def _note_congestion(self, replica_id: ReplicaId, link: Link) -> None:
        """Note whether a stage takes no more input, for `changes`.

        A socket that refuses is not a slow stage, which holds us up by credit, but one that may be lost: the health
        policy will know soon, and what waits here is replayed then.
        """
        congested = link.congested and not link.refused
        if congested != (replica_id in self._congested):
            self._changes[replica_id] = congested
            (self._congested.add if congested else self._congested.discard)(replica_id)

    def changes(self) -> list[tuple[ReplicaId, bool]]:
        """The replicas of which it has changed since the last call whether they take more input: whether they don't."""
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def _fail_later(self, request_id: str, replica_id: ReplicaId, error: OmniError, attempt: int) -> None:
        """Fail an attempt later on the loop, outside of the instructions that are being carried out now."""
        header = Header(
            "",
            request_id=request_id,
            stage=replica_id.stage,
            replica=replica_id.replica,
            epoch=replica_id.epoch,
            attempt=attempt,
        )
        asyncio.get_running_loop().call_soon(self._fail, header, error)


def _takes_no_messages(replica_id: ReplicaId) -> StageLost:
    return StageLost(f"{replica_id.name} takes no messages.", stage=replica_id.stage)
