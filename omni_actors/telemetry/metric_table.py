"""Every metric: name, kind, labels, help. What is not in this table is neither counted nor rendered.

`docs/observability.md` shows it, written by `python -m omni_actors.telemetry.metric_table`; a test compares the two.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.StrEnum):
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


_HOPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUESTS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FACTORS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)

_REPLICA = ("stage", "replica")
_EDGE = ("source", "target")

# Counted by the coordinator.
REQUESTS = Metric(
    "omni_requests_total",
    Kind.COUNTER,
    ("outcome", "code"),
    "Requests that ended: outcome done, failed or refused (never admitted), with the error code, ok for done.",
)
IN_FLIGHT = Metric("omni_requests_in_flight", Kind.GAUGE, (), "Requests that are admitted and have not ended.")
REQUEST_SECONDS = Metric(
    "omni_request_seconds", Kind.HISTOGRAM, (), "Time of a done request from its arrival to its end.", _REQUESTS
)
FIRST_TEXT = Metric(
    "omni_time_to_first_text_seconds",
    Kind.HISTOGRAM,
    (),
    "Time from a request's arrival to its first text for the client (TTFT).",
    _WAITS,
)
FIRST_AUDIO = Metric(
    "omni_time_to_first_audio_seconds",
    Kind.HISTOGRAM,
    (),
    "Time from a request's arrival to its first samples for the client (TTFA).",
    _WAITS,
)
REALTIME_FACTOR = Metric(
    "omni_realtime_factor",
    Kind.HISTOGRAM,
    (),
    "Time of a done request divided by the length of its audio; under 1 it was made faster than it plays.",
    _FACTORS,
)
AUDIO_SECONDS = Metric("omni_audio_seconds_total", Kind.COUNTER, (), "Length of all audio sent to clients.")
TEXT_TOKENS = Metric("omni_text_tokens_total", Kind.COUNTER, (), "Text tokens sent to clients.")
REPLAYS = Metric("omni_replays_total", Kind.COUNTER, (), "Attempts that followed the loss of a replica.")
RETAINED = Metric("omni_retained_bytes", Kind.GAUGE, (), "Prompts and media kept to run requests again.")
READY = Metric("omni_replica_ready", Kind.GAUGE, _REPLICA, "1 while a replica takes requests, else 0.")
RESTARTS = Metric(
    "omni_replica_restarts_total", Kind.COUNTER, _REPLICA, "How often a replica was started again, for any reason."
)
BOUND = Metric("omni_replica_requests", Kind.GAUGE, _REPLICA, "Requests that are bound to a replica.")

# Counted by whoever receives or sends.
REJECTED = Metric(
    "omni_frames_rejected_total",
    Kind.COUNTER,
    ("stage", "replica", "channel", "reason"),
    "Messages that failed a check of the wire, by receiver (stage coordinator: by its channel) and reason.",
)
DROPPED = Metric(
    "omni_messages_dropped_total",
    Kind.COUNTER,
    ("stage", "replica", "reason"),
    "Sound messages that were of no use: late, of a former life, of unknown requests, by receiver and reason.",
)
EDGE_MESSAGES = Metric("omni_edge_messages_total", Kind.COUNTER, _EDGE, "Messages that left on an edge.")
EDGE_BYTES = Metric(
    "omni_edge_bytes_total", Kind.COUNTER, _EDGE, "Bytes of all frames that left on an edge, headers included."
)
EDGE_SHARED = Metric(
    "omni_edge_shared_bytes_total", Kind.COUNTER, _EDGE, "Bytes of tensors that went through shared memory instead."
)
EDGE_OUT = Metric(
    "omni_edge_unacknowledged_messages", Kind.GAUGE, _EDGE, "Messages sent for which no credit has come back yet."
)
EDGE_OUT_BYTES = Metric("omni_edge_unacknowledged_bytes", Kind.GAUGE, _EDGE, "Their bytes.")
EDGE_CREDIT = Metric(
    "omni_edge_credit_messages", Kind.GAUGE, _EDGE, "Messages that may still be sent before more credit comes."
)
EDGE_WAITING = Metric(
    "omni_edge_waiting_messages", Kind.GAUGE, _EDGE, "Messages that wait with the sender for credit or for the socket."
)
EDGE_LATENCY = Metric(
    "omni_edge_latency_seconds",
    Kind.HISTOGRAM,
    _EDGE,
    "Time from when a chunk, text or audio is made, or sent again, until its receiver takes it, waiting for "
    "credit included. Between stages of two hosts the difference of their clocks is in it.",
    _HOPS,
)

# Counted by stages.
STAGE_REQUESTS = Metric(
    "omni_stage_requests_total",
    Kind.COUNTER,
    (*_REPLICA, "outcome"),
    "Attempts at requests that ended in a stage: done, an error code, or dropped (ended by the coordinator).",
)
STAGE_HELD = Metric("omni_stage_requests_held", Kind.GAUGE, _REPLICA, "Requests that a stage knows.")
STEP_SECONDS = Metric("omni_stage_step_seconds", Kind.HISTOGRAM, _REPLICA, "Time of an engine step.", _STEPS)
HELD_BACK = Metric(
    "omni_stage_held_back_seconds_total",
    Kind.COUNTER,
    (*_REPLICA, "reason"),
    "Time in which a stage had something to compute and did not: another one's turn on a shared device (turn), or "
    "stages after it that are behind (credit).",
)
QUEUE_SECONDS = Metric(
    "omni_stage_queue_seconds",
    Kind.HISTOGRAM,
    _REPLICA,
    "Time from handing a request to the engine until the engine takes it into a step.",
    _WAITS,
)
OUTPUT_SECONDS = Metric(
    "omni_stage_first_output_seconds",
    Kind.HISTOGRAM,
    _REPLICA,
    "Time from handing a request to the engine until its first output.",
    _WAITS,
)
INPUT_TOKENS = Metric("omni_stage_input_tokens_total", Kind.COUNTER, _REPLICA, "Input tokens of requests done.")
OUTPUT_TOKENS = Metric("omni_stage_output_tokens_total", Kind.COUNTER, _REPLICA, "Tokens made, as they are made.")
STAGE_AUDIO = Metric("omni_stage_audio_seconds_total", Kind.COUNTER, _REPLICA, "Length of the audio made.")
PARKED = Metric("omni_stage_parked_bytes", Kind.GAUGE, _REPLICA, "Input that came before its announcement.")
ARENA = Metric("omni_stage_arena_bytes", Kind.GAUGE, _REPLICA, "Shared memory in use for output.")
ARENA_FULL = Metric(
    "omni_stage_arena_full_total", Kind.COUNTER, _REPLICA, "Buffers that found no room there and became frames."
)
RESIDENT = Metric("omni_process_resident_bytes", Kind.GAUGE, _REPLICA, "Main memory of a process.")
CPU_SECONDS = Metric("omni_process_cpu_seconds_total", Kind.COUNTER, _REPLICA, "Processor time of a process.")
DEVICE_BYTES = Metric(
    "omni_device_memory_bytes", Kind.GAUGE, _REPLICA, "Device memory that a stage's allocator has reserved."
)

# vLLM's own, of its SchedulerStats and events.
VLLM_RUNNING = Metric("omni_vllm_running_requests", Kind.GAUGE, _REPLICA, "Requests in vLLM's batch.")
VLLM_WAITING = Metric("omni_vllm_waiting_requests", Kind.GAUGE, _REPLICA, "Requests in vLLM's queue.")
VLLM_KV = Metric("omni_vllm_kv_cache_usage_ratio", Kind.GAUGE, _REPLICA, "Share of KV cache blocks in use, 0 to 1.")
VLLM_PREEMPTIONS = Metric(
    "omni_vllm_preemptions_total", Kind.COUNTER, _REPLICA, "Requests put back into the queue for want of KV blocks."
)
VLLM_QUERIES = Metric(
    "omni_vllm_prefix_cache_queries_total", Kind.COUNTER, _REPLICA, "Prompt tokens looked up in the prefix cache."
)
VLLM_HITS = Metric("omni_vllm_prefix_cache_hits_total", Kind.COUNTER, _REPLICA, "Prompt tokens found there.")

TABLE: dict[str, Metric] = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)}
COORDINATOR = ("coordinator", "0")  # its stage and replica in labels


def markdown() -> str:
    """The table for people."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in TABLE.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
