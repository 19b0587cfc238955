"""What came from one source about one request, while it comes."""

from __future__ import annotations

from dataclasses import dataclass

from omni_actors.protocol.telemetry import HopTimeline
from omni_actors.telemetry import metric_table as table
from omni_actors.telemetry.meters import Histogram, Meters


@dataclass(slots=True)
class HopTrack:
    """Grows with every message. `latency` is the histogram of the edge, which all requests share."""

    latency: Histogram
    messages: int = 0
    bytes: int = 0
    first_sent: float = 0.0
    first_received: float = 0.0
    last_sent: float = 0.0
    last_received: float = 0.0

    def add(self, sent: float, received: float, size: int, offset: float = 0.0) -> None:
        """A message of `size` bytes. `offset` is what brings the sender's moments to the receiver's clock."""
        self.messages += 1
        self.bytes += size
        if not sent:
            return
        if not self.first_sent:
            self.first_sent, self.first_received = sent, received
        self.last_sent, self.last_received = sent, received
        self.latency.observe(received - sent - offset)

    def timeline(self, source: str) -> HopTimeline:
        return HopTimeline(
            source, self.messages, self.bytes, self.first_sent, self.first_received, self.last_sent, self.last_received
        )


def track_of(tracks: dict[str, HopTrack], meters: Meters, source: str, target: str) -> HopTrack:
    """The one of a request's `tracks` for messages from `source`; made with the first of them."""
    found = tracks.get(source)
    if found is None:
        found = tracks[source] = HopTrack(meters.histogram(table.EDGE_LATENCY, source, target))
    return found
