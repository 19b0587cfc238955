"""Counts and times the messages from one source about one request as they arrive."""

from __future__ import annotations

from dataclasses import dataclass

from omni_actors.protocol.telemetry import TransferTimeline
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.meters import Histogram, Meters


@dataclass(slots=True)
class TransferTrack:
    """Grows with every message. `latency` is the edge's histogram, which all requests share."""

    latency: Histogram
    messages: int = 0
    bytes: int = 0
    first_sent: float = 0.0
    first_received: float = 0.0
    last_sent: float = 0.0
    last_received: float = 0.0

    def add(self, sent: float, received: float, size: int, offset: float = 0.0) -> None:
        """Count a message of `size` bytes. `offset` is added to the sender's moments to compare them with ours."""
        self.messages += 1
        self.bytes += size
        if not sent:
            return
        if not self.first_sent:
            self.first_sent, self.first_received = sent, received
        self.last_sent, self.last_received = sent, received
        self.latency.observe(received - sent - offset)

    def timeline(self, source: str) -> TransferTimeline:
        """What goes into a stage's timeline."""
        return TransferTimeline(
            source, self.messages, self.bytes, self.first_sent, self.first_received, self.last_sent, self.last_received
        )


def track_of(tracks: dict[str, TransferTrack], meters: Meters, source: str, target: str) -> TransferTrack:
    """The request's track for messages from `source`, created with the first of them."""
    found = tracks.get(source)
    if found is None:
        found = tracks[source] = TransferTrack(meters.histogram(table.EDGE_LATENCY, source, target))
    return found
