"""What goes to stages: a PUSH link to each replica's inbox, and the credit for what came from them."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence

from omni_actors.codec import Frame, encode
from omni_actors.config import PipelineConfig
from omni_actors.core.coordination import Coordination, ToStage
from omni_actors.core.replicas import Replica
from omni_actors.errors import OmniError, StageLost
from omni_actors.messages import Abort, Credit, Header, Hop
from omni_actors.transport.credit import EdgeFigures, Tally, Traffic, Window, wire_size
from omni_actors.transport.cuts import Cuts
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import Sockets


class StageLinks:
    """Belongs to the coordinator's loop.

    Args:
        fail: called, on a later turn of the loop, with the header of an attempt that could not be sent, and why.
        traffic: by receiver, for metrics; outlives the links.
        dropped: counts credit of replicas without a link.
    """

    def __init__(
        self,
        sockets: Sockets,
        pipeline: PipelineConfig,
        state: Coordination,
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
        self._links: dict[Hop, Link] = {}
        self._cuts: Cuts[Hop] = Cuts()
        self._tally: Tally[Hop] = Tally(self._flow.edge_messages, self._flow.edge_bytes)

    def open(self, replica: Replica) -> None:
        """Connect to the inbox of a replica that has registered."""
        link = self._links[replica.hop] = Link(
            self._sockets.push(replica.inbox),
            time.monotonic,
            window=Window(self._flow.edge_messages, self._flow.edge_bytes),
            traffic=self._traffic.setdefault(replica.name, Traffic()),
        )
        self._cuts.watch(replica.hop, link.socket, replica.inbox)
        # What waited for the connection or for a slow stage leaves at once, not on the next tick.
        asyncio.get_running_loop().add_reader(link.descriptor, link.wake)

    def close(self, hop: Hop) -> None:
        """Idempotent."""
        link = self._links.pop(hop, None)
        if link is not None:
            asyncio.get_running_loop().remove_reader(link.descriptor)
            self._cuts.forget(hop)
            link.close()

    def close_all(self) -> None:
        for hop in list(self._links):
            self.close(hop)

    def find(self, hop: Hop) -> Link | None:
        return self._links.get(hop)

    def figures(self) -> dict[str, EdgeFigures]:
        """Of the links that are open, by receiver."""
        return {hop.name: link.figures() for hop, link in self._links.items()}

    def send(self, message: ToStage) -> None:
        """What cannot be sent fails its request."""
        hop = message.hop
        header = Header("", request_id=message.request_id, attempt=message.attempt, deadline=message.deadline)
        link = self._links.get(hop)
        try:
            frames = encode(header, message.body, message.buffers, self._limits)
        except OmniError as error:  # a hair larger than what the client sent, and so over the limit
            self._fail_later(header.request_id, hop, error, header.attempt)
            return
        if link is None:
            self._fail_later(header.request_id, hop, _takes_no_messages(hop), header.attempt)
            return
        if isinstance(message.body, Abort):  # must not wait, and what it overtakes is not wanted any more
            link.forget(header.request_id)
            link.send_urgent(header.request_id, frames)
        elif not link.send(header.request_id, frames):
            self._fail_later(header.request_id, hop, _takes_no_messages(hop), header.attempt)
        self._note_congestion(hop, link)

    def tick(self) -> None:
        """Send what waits; give up what a replica has not taken for too long."""
        for hop, link in self._links.items():
            link.flush()
            if link.stalled():
                for request_id in link.give_up():
                    attempt = self._state.attempt_of(request_id, hop.stage)
                    self._fail_later(request_id, hop, _takes_no_messages(hop), attempt)

    def cut(self) -> list[Hop]:
        """Replicas whose link over the network was cut since the last call."""
        cut = self._cuts.found(time.monotonic())
        for hop in cut:
            self._cuts.forget(hop)
        return cut

    def took(self, header: Header, frames: Sequence[Frame]) -> None:
        """A result was taken; its stage may send another."""
        if not header.stage:
            return  # of nobody
        if self._tally.take(Hop(header.stage, header.replica, header.epoch), wire_size(frames)):
            self.grant(everything=False)

    def grant(self, everything: bool) -> None:
        """Tell stages how much was taken of them; small amounts wait unless `everything`."""
        for hop, messages, size in self._tally.collect(everything):
            link = self._links.get(hop)
            if link is not None:
                credit = Credit(messages=messages, bytes=size)
                link.send_urgent("", encode(Header(""), credit, limits=self._limits))

    def granted(self, hop: Hop, credit: Credit) -> None:
        """A replica has taken that much."""
        link = self._links.get(hop)
        if link is None:
            self._dropped["credit_of_unknown_replica"] += 1
            return
        link.granted(credit.messages, credit.bytes)
        self._note_congestion(hop, link)

    def _note_congestion(self, hop: Hop, link: Link) -> None:
        """Admission looks at it.

        A socket that refuses is no sign of a slow stage, which holds us up by credit, but of one that may be lost: the
        supervision will know soon, and what waits here is replayed then.
        """
        replica = self._state.replicas.find(hop.stage, hop.replica, hop.epoch)
        if replica is not None:
            replica.congested = link.congested and not link.refused

    def _fail_later(self, request_id: str, hop: Hop, error: OmniError, attempt: int) -> None:
        """On the next turn of the loop, outside of the instructions that are being done now."""
        header = Header(
            "", request_id=request_id, stage=hop.stage, replica=hop.replica, epoch=hop.epoch, attempt=attempt
        )
        asyncio.get_running_loop().call_soon(self._fail, header, error)


def _takes_no_messages(hop: Hop) -> StageLost:
    return StageLost(f"{hop.name} takes no messages.", stage=hop.stage)
