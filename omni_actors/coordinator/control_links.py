"""Links to stage processes and node agents: messages over the control connection wait, in order, while one is slow."""

from __future__ import annotations

import time
from collections.abc import Callable

from omni_actors.errors import StageLost
from omni_actors.protocol.codec import encode
from omni_actors.protocol.header import Body, Header, Limits
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import PeerGone, Socket


class ControlLinks:
    """Belongs to the coordinator's loop. A link exists while something waits for its peer."""

    def __init__(self, socket: Socket, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._socket = socket
        self._limits = limits
        self._links: dict[str, Link] = {}

    def send(self, identity: str, body: Body) -> None:
        """Send to a peer, or keep what it does not take now. One that is not connected says hello when it is back.

        Raises:
            OmniError: the message is over a limit, or too much waits for the peer.
        """
        frames = encode(Header(""), body, limits=self._limits)
        link = self._links.get(identity) or Link(self._socket, self._clock)
        try:
            if not link.send("", [identity.encode(), *frames]):
                raise StageLost(f"{identity} takes no control messages.")
        except PeerGone:
            self._links.pop(identity, None)
            return
        if link.backlog:
            self._links[identity] = link

    def flush(self) -> list[str]:
        """Send what waits, as far as possible. Returns the peers that have taken nothing for too long, each once."""
        stalled = []
        for identity, link in list(self._links.items()):
            try:
                link.flush()
            except PeerGone:
                link.give_up()
            if link.stalled():
                link.give_up()
                stalled.append(identity)
            if not link.backlog:
                del self._links[identity]
        return stalled
