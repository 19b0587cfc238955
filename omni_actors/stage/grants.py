"""Credit that a stage gives to those that send to it, and the blocks of theirs that it returns with it."""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.protocol.codec import encode
from omni_actors.protocol.common import Credit
from omni_actors.protocol.header import Header, Limits, ReplicaId
from omni_actors.stage.links import Links
from omni_actors.transport.arena import ArenaReader


class Grants:
    """Not thread-safe: `Outbound` uses it under its lock."""

    def __init__(self, links: Links, arenas: ArenaReader, identity: ReplicaId, limits: Limits) -> None:
        self._links = links
        self._arenas = arenas
        self._header = Header("", "", identity.stage, identity.replica, identity.epoch)
        self._limits = limits

    def send(self, sender: ReplicaId | None, messages: int = 0, size: int = 0) -> None:
        """Grant `messages` and `size` bytes to a sender (`None`: the coordinator), and return all unused blocks."""
        released = self._arenas.take_released()
        self._send(sender, messages, size, released.pop(sender, []) if sender is not None else [])
        for owner, tickets in released.items():
            self._send(owner, 0, 0, tickets)

    def return_blocks(self) -> None:
        """Return the blocks that nothing refers to any more."""
        for owner, tickets in self._arenas.take_released().items():
            self._send(owner, 0, 0, tickets)

    def _send(self, sender: ReplicaId | None, messages: int, size: int, released: Sequence[int]) -> None:
        link = self._links.sender(sender)
        if link is None:  # the sender is gone, and its account with it
            return
        # Every time: a source may hear of this stage only after the first message.
        mapped = sender is not None and self._arenas.is_mapped(sender)
        credit = Credit(messages, size, tuple(released), mapped)
        link.send_urgent("", encode(self._header, credit, limits=self._limits))
