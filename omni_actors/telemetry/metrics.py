"""Every metric, and the counters, gauges and histograms that hold their values.

There is no lock: one thread counts, and others may read, as every change assigns one number.

`scripts/reference_docs.py` writes the table of `docs/observability.md`.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from omni_actors.protocol.messages import HistogramSample, Sample, Snapshot
from omni_actors.transport.link import PeerLinks, name_of

Labels = tuple[str, ...]


class Histogram:
    """Observations per bucket, not cumulated, and their sum. The last bucket is +Inf."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value. A negative one, from clocks that differ, counts as zero."""
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Meters:
    """The values of one process by metric and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, Labels], float] = {}
        self.histograms: dict[tuple[str, Labels], Histogram] = {}

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Increase a value."""
        key = (metric.name, labels)
        self.values[key] = self.values.get(key, 0) + by

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        """Set a gauge, or a counter that is kept elsewhere."""
        self.values[(metric.name, labels)] = to

    def set_all(self, metric: Metric, labels: Labels, values: Mapping[str, float]) -> None:
        """Set a metric for each value of its last label; the mapping's keys are these values."""
        for name, value in values.items():
            self.values[(metric.name, (*labels, name))] = value

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram of these labels. Keep it if you observe often."""
        key = (metric.name, labels)
        found = self.histograms.get(key)
        if found is None:
            found = self.histograms[key] = Histogram(metric.bounds)
        return found

    def forget(self, metric: Metric) -> None:
        """Drop all series of a gauge whose labels come and go, before setting those that exist."""
        for key in [key for key in self.values if key[0] == metric.name]:
            del self.values[key]

    def snapshot(self) -> Snapshot:
        """All values as a message."""
        samples = [Sample(name, labels, float(value)) for (name, labels), value in self.values.items()]
        histograms = [
            HistogramSample(name, labels, tuple(histogram.counts), histogram.total)
            for (name, labels), histogram in self.histograms.items()
        ]
        return Snapshot(samples=tuple(samples), histograms=tuple(histograms))

    def add(self, snapshot: Snapshot, counters_only: bool = False) -> None:
        """Add the values of a snapshot that fits the table; `counters_only` leaves out its gauges."""
        for sample in snapshot.samples:
            metric = TABLE[sample.name]
            if not counters_only or metric.kind is Kind.COUNTER:
                self.count(metric, *sample.labels, by=sample.value)
        for histogram in snapshot.histograms:
            into = self.histogram(TABLE[histogram.name], *histogram.labels)
            for index, count in enumerate(histogram.counts):
                into.counts[index] += count
            into.total += histogram.total


def edge_metrics(meters: Meters, source: str, peers: PeerLinks) -> None:
    """Set the sender's metrics of its edges. An edge that is gone keeps its counters and loses its gauges."""
    for target, traffic in peers.traffic.items():
        meters.set(EDGE_MESSAGES, source, target, to=traffic.messages)
        meters.set(EDGE_BYTES, source, target, to=traffic.bytes)
        meters.set(EDGE_SHARED, source, target, to=traffic.shared_bytes)
    for gauge in (EDGE_OUT, EDGE_OUT_BYTES, EDGE_CREDIT, EDGE_WAITING):
        meters.forget(gauge)
    for peer, link in peers.links.items():
        if (window := link.window) is not None:
            labels = source, name_of(peer)
            meters.set(EDGE_OUT, *labels, to=window.messages_out)
            meters.set(EDGE_OUT_BYTES, *labels, to=window.bytes_out)
            meters.set(EDGE_CREDIT, *labels, to=window.credit)
            meters.set(EDGE_WAITING, *labels, to=link.backlog)


class Kind(enum.StrEnum):
    """How the values of a metric are merged and exposed."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """`bounds` are the upper bounds of a histogram's buckets without +Inf, rising, in the unit of the name."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()


TABLE: dict[str, Metric] = {}
COORDINATOR = ("coordinator", "0")  # its values of the labels stage and replica


_LATENCIES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUESTS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FACTORS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)

_REPLICA = ("stage", "replica")
_EDGE = ("source", "target")


def _counter(name: str, help: str, labels: Labels = ()) -> Metric:
    return TABLE.setdefault(name, Metric(name, Kind.COUNTER, labels, help))


def _gauge(name: str, help: str, labels: Labels = ()) -> Metric:
    return TABLE.setdefault(name, Metric(name, Kind.GAUGE, labels, help))


def _histogram(name: str, help: str, labels: Labels = (), bounds: tuple[float, ...] = _WAITS) -> Metric:
    return TABLE.setdefault(name, Metric(name, Kind.HISTOGRAM, labels, help, bounds))


# Counted by the coordinator.
REQUESTS = _counter(
    "omni_requests_total",
    "Requests that ended: done, failed or refused (never admitted); code of the error, or ok.",
    ("outcome", "code"),
)
IN_FLIGHT = _gauge("omni_requests_in_flight", "Requests that have a slot.")
QUEUED = _gauge("omni_requests_queued", "Requests that wait for a slot.")
REQUEST_SECONDS = _histogram("omni_request_seconds", "Time of a done request from arrival to end.", bounds=_REQUESTS)
FIRST_TEXT = _histogram("omni_time_to_first_text_seconds", "Time from a request's arrival to its first text (TTFT).")
FIRST_AUDIO = _histogram(
    "omni_time_to_first_audio_seconds", "Time from a request's arrival to its first samples (TTFA)."
)
SMOOTH_START = _histogram(
    "omni_smooth_start_seconds", "From a done request's arrival until its audio can be played without a gap."
)
AUDIO_GAPS = _histogram(
    "omni_audio_gaps_seconds", "All gaps in the audio of a done request, played from its first samples on."
)
REALTIME_FACTOR = _histogram(
    "omni_realtime_factor",
    "Time of a done request by the length of its audio; below 1 is faster than playback.",
    bounds=_FACTORS,
)
FIRST_PICTURE = _histogram(
    "omni_time_to_first_picture_seconds", "Time from a request's arrival to its first picture or preview."
)
AUDIO_SECONDS = _counter("omni_audio_seconds_total", "Length of all audio sent to clients.")
PICTURES = _counter("omni_pictures_total", "Pictures sent to clients, without previews.")
TEXT_TOKENS = _counter("omni_text_tokens_total", "Text tokens sent to clients.")
ROUTED = _counter(
    "omni_routed_total",
    "Choices of a replica, by what decided: load, its prefix cache (prefix), or the same host.",
    ("by",),
)
REPLAYS = _counter("omni_replays_total", "Attempts made after the loss of a replica.")
RETAINED = _gauge("omni_retained_bytes", "Prompts and media kept to run requests again.")
READY = _gauge("omni_replica_ready", "1 while a replica takes requests, else 0.", _REPLICA)
SPARE = _gauge("omni_replica_spare", "1 while a spare is ready to take the place of a replica, else 0.", _REPLICA)
RESTARTS = _counter("omni_replica_restarts_total", "Restarts of a replica, for any reason.", _REPLICA)
BOUND = _gauge("omni_replica_requests", "Requests bound to a replica.", _REPLICA)

# Counted by the receiver or the sender.
REJECTED = _counter(
    "omni_frames_rejected_total",
    "Messages that failed validation, by receiver (the coordinator's by channel) and reason.",
    (*_REPLICA, "channel", "reason"),
)
DROPPED = _counter(
    "omni_messages_dropped_total",
    "Valid messages dropped as late, of an earlier epoch or of unknown requests.",
    (*_REPLICA, "reason"),
)
EDGE_MESSAGES = _counter("omni_edge_messages_total", "Messages sent on an edge.", _EDGE)
EDGE_BYTES = _counter("omni_edge_bytes_total", "Bytes of all frames sent on an edge, headers included.", _EDGE)
EDGE_SHARED = _counter("omni_edge_shared_bytes_total", "Bytes of tensors sent through shared memory instead.", _EDGE)
EDGE_OUT = _gauge("omni_edge_unacknowledged_messages", "Messages sent for which no credit has come back yet.", _EDGE)
EDGE_OUT_BYTES = _gauge("omni_edge_unacknowledged_bytes", "Bytes sent for which no credit has come back yet.", _EDGE)
EDGE_CREDIT = _gauge("omni_edge_credit_messages", "Messages that may be sent before more credit arrives.", _EDGE)
EDGE_WAITING = _gauge(
    "omni_edge_waiting_messages", "Messages waiting at the sender for credit or for the socket.", _EDGE
)
EDGE_LATENCY = _histogram(
    "omni_edge_latency_seconds",
    "From when output is made (or sent again) until its receiver takes it, by the clocks of their hosts.",
    _EDGE,
    bounds=_LATENCIES,
)

# Counted by stages.
STAGE_REQUESTS = _counter(
    "omni_stage_requests_total",
    "Attempts that ended: done, an error code, or dropped (ended by the coordinator).",
    (*_REPLICA, "outcome"),
)
STAGE_HELD = _gauge("omni_stage_requests_held", "Requests that a stage knows.", _REPLICA)
STEP_SECONDS = _histogram(
    "omni_stage_step_seconds",
    "Time of an engine step: up to `steps_per_schedule` of the model.",
    _REPLICA,
    bounds=_STEPS,
)
HELD_BACK = _counter(
    "omni_stage_held_back_seconds_total",
    "Time with work but without a step, because later stages were behind.",
    _REPLICA,
)
QUEUE_SECONDS = _histogram(
    "omni_stage_queue_seconds", "From handing a request to the engine until it is first scheduled.", _REPLICA
)
OUTPUT_SECONDS = _histogram(
    "omni_stage_first_output_seconds", "From handing a request to the engine until its first output.", _REPLICA
)
INPUT_TOKENS = _counter("omni_stage_input_tokens_total", "Input tokens of done requests.", _REPLICA)
OUTPUT_TOKENS = _counter(
    "omni_stage_output_tokens_total",
    "Tokens generated, counted as they are made; a frame of several codes is one token.",
    _REPLICA,
)
STAGE_AUDIO = _counter("omni_stage_audio_seconds_total", "Length of the audio made.", _REPLICA)
STAGE_PICTURES = _counter("omni_stage_pictures_total", "Pictures made, without previews.", _REPLICA)
EARLY_CHUNKS = _gauge("omni_stage_early_chunk_bytes", "Input that arrived before its announcement.", _REPLICA)
ARENA = _gauge("omni_stage_arena_bytes", "Shared memory in use for output.", _REPLICA)
ARENA_FULL = _counter(
    "omni_stage_arena_full_total", "Buffers sent as frames because shared memory had no room.", _REPLICA
)
RESIDENT = _gauge("omni_process_resident_bytes", "Resident memory of a process.", _REPLICA)
CPU_SECONDS = _counter("omni_process_cpu_seconds_total", "Processor time of a process.", _REPLICA)
DEVICE_BYTES = _gauge("omni_device_memory_bytes", "Device memory reserved by a stage's allocator.", _REPLICA)

# Reported by stages that account for the memory of their requests.
BUDGET_BYTES = _gauge("omni_stage_budget_bytes", "The stage's `budget_bytes`.", _REPLICA)
BUDGET_HELD = _gauge(
    "omni_stage_budget_held_bytes",
    "What the budget counts for requests, in a diffusion stage from admission, in others from the first rows on.",
    _REPLICA,
)
BUDGET_STEP = _gauge(
    "omni_stage_budget_step_bytes", "What the budget counts for the latest step in addition.", _REPLICA
)
BUDGET_WAITING = _gauge(
    "omni_stage_budget_waiting",
    "Requests, or chunks of sound, that the latest step left out for lack of budget.",
    _REPLICA,
)
BUDGET_DEFERRALS = _counter(
    "omni_stage_budget_deferrals_total", "How often work was left out of a step for lack of budget.", _REPLICA
)

# Reported by vLLM.
VLLM_RUNNING = _gauge("omni_vllm_running_requests", "Requests in vLLM's batch.", _REPLICA)
VLLM_WAITING = _gauge("omni_vllm_waiting_requests", "Requests in vLLM's queue.", _REPLICA)
VLLM_KV = _gauge("omni_vllm_kv_cache_usage_ratio", "Share of KV cache blocks in use, 0 to 1.", _REPLICA)
VLLM_PREEMPTIONS = _counter(
    "omni_vllm_preemptions_total", "Requests put back into the queue for lack of KV cache blocks.", _REPLICA
)
VLLM_QUERIES = _counter(
    "omni_vllm_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", _REPLICA
)
VLLM_HITS = _counter("omni_vllm_prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", _REPLICA)

# Counted by the processes of the HTTP server, and added up.
REALTIME_SESSIONS = _gauge("omni_realtime_sessions", "Open sessions of /v1/realtime and of texts being written.")
REALTIME_RESPONSES = _counter(
    "omni_realtime_responses_total",
    "Answers in sessions that ended: completed, cancelled, incomplete or failed.",
    ("status",),
)
REALTIME_INTERRUPTIONS = _counter(
    "omni_realtime_interruptions_total",
    "Answers cut short by speech (turn_detected) or by the client (client_cancelled).",
    ("reason",),
)
REALTIME_LAG = _histogram(
    "omni_realtime_detection_lag_seconds",
    "How late the server looked for turns in sound; over 0.2 s in the mean it refuses new sessions.",
)
REALTIME_FIRST_AUDIO = _histogram(
    "omni_realtime_first_audio_seconds",
    "From the end of speech (without detection, from the request for an answer) to the answer's first samples.",
)
REALTIME_SMOOTH_START = _histogram(
    "omni_realtime_smooth_start_seconds", "From there until the audio of a complete answer can be played without a gap."
)

HTTP_METRICS = frozenset(name for name in TABLE if name.startswith("omni_realtime_"))
