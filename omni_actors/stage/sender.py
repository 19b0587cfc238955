"""A message's way out of a stage: wait for an address, place large buffers, encode, copy, hand to a link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from omni_actors.errors import OmniError, StageLost
from omni_actors.protocol.codec import Frame, encode
from omni_actors.protocol.header import Block, Limits, ReplicaId
from omni_actors.stage.events import Event, Rejected, Undelivered
from omni_actors.stage.links import Links
from omni_actors.stage.outgoing import Outgoing
from omni_actors.stage.publications import Publications, Unfilled

ADDRESS_SECONDS = 5.0  # how long a message waits for the address of a replica that has just been started


class Prepared(NamedTuple):
    """A message that only has to be delivered once its blocks are filled."""

    message: Outgoing
    frames: Sequence[Frame]
    blocks: Sequence[Block]
    unfilled: Unfilled


class Sender:
    """Not thread-safe: `Outbound` uses it under its lock.

    Args:
        on_event: gets `Rejected` for a message that may not be sent, `Undelivered` for one that a later stage does not
            take.
    """

    def __init__(
        self, links: Links, publications: Publications, limits: Limits, on_event: Callable[[Event], None]
    ) -> None:
        self._links = links
        self._publications = publications
        self._limits = limits
        self._on_event = on_event
        self._unaddressed: list[tuple[float, Outgoing]] = []  # since when, and what waits for an address

    def send(self, message: Outgoing, placed: dict[int, Block], since: float | None = None) -> None:
        """Do all steps at once. `placed` holds the blocks of the same batch, by identity of the buffer."""
        prepared = self.prepare(message, placed, since)
        if prepared is not None:
            self._publications.fill(prepared.unfilled)
            self.deliver(prepared)

    def prepare(self, message: Outgoing, placed: dict[int, Block], since: float | None = None) -> Prepared | None:
        """Do everything before the copy; `None` if there is nothing to send now."""
        target = message.destination
        if target is not None and self._links.receiver(target) is None and self._links.is_expected(target):
            self._unaddressed.append((time.monotonic() if since is None else since, message))
            return None
        blocks, unfilled = self._publications.place(message, placed)
        try:  # before the copy, which drives what this needs out of the processor's cache
            frames = encode(message.header, message.body, message.buffers, self._limits, blocks)
        except OmniError as error:  # larger than the limits
            self._on_event(Rejected(message.header, error))
            return None
        return Prepared(message, frames, blocks, unfilled)

    def deliver(self, prepared: Prepared) -> None:
        """Hand a message whose blocks are filled to its link."""
        header, target = prepared.message.header, prepared.message.destination
        link = self._links.receiver(target)
        if link is None or not link.send(header.request_id, prepared.frames):
            what = "has no link" if link is None else "has taken no messages for so long that its outbox is full"
            if target is None:
                self._on_event(Rejected(header, StageLost(f"The coordinator {what}.")))
            else:
                self.lose(header.request_id, target, what)
        elif target is not None and prepared.blocks:
            link.traffic.shared_bytes += self._publications.share(prepared.blocks, target)

    def lose(self, request_id: str, receiver: ReplicaId, what: str) -> None:
        """Report that a later stage did not get a message, and why, as "takes no messages"."""
        self._on_event(Undelivered(request_id, receiver, StageLost(f"{receiver.name} {what}.")))

    def retry_unaddressed(self) -> None:
        """Send what has an address now."""
        waiting, self._unaddressed = self._unaddressed, []
        for since, message in waiting:
            self.send(message, {}, since)

    def expire_unaddressed(self, now: float) -> None:
        """Report messages whose receiver was never announced."""
        while self._unaddressed and self._unaddressed[0][0] + ADDRESS_SECONDS < now:  # the oldest come first
            _, message = self._unaddressed.pop(0)
            if message.destination is not None:
                self.lose(message.header.request_id, message.destination, "was never announced")
