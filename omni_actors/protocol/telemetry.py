"""Metrics, and timelines of requests."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import Attempt, Count, Label, Moment, Name, ReplicaIndex, RequestId, StageNameOrEmpty
from omni_actors.protocol.header import Body


class TransferTimeline(Struct, frozen=True, array_like=True):
    """What one replica (`source`, as "thinker/0") sent about one request to the one that reports it.

    `bytes` are payload: tensors, token ids, text. The moments of sending are by the source's clock.
    """

    source: Annotated[str, Meta(max_length=80)]
    messages: Count
    bytes: Count
    first_sent: Moment
    first_received: Moment
    last_sent: Moment
    last_received: Moment


class StageTimeline(Struct, frozen=True, omit_defaults=True):
    """The moments of one attempt at a request in one replica; 0 for what did not happen."""

    stage: StageNameOrEmpty
    replica: ReplicaIndex = 0
    epoch: Count = 0
    attempt: Attempt = 0
    outcome: Annotated[str, Meta(max_length=64)] = "done"  # or an error code, or "dropped": ended by the coordinator
    expected: Moment = 0.0  # the announcement came
    first_input: Moment = 0.0
    started: Moment = 0.0  # handed to the engine
    first_step: Moment = 0.0  # the engine took it into a step
    first_output: Moment = 0.0
    last_output: Moment = 0.0
    ended: Moment = 0.0
    input_tokens: Count = 0
    output_tokens: Count = 0
    transfers: Annotated[tuple[TransferTimeline, ...], Meta(max_length=64)] = ()


class TimelineEvent(Struct, frozen=True, array_like=True):
    """Something that happened to the request as a whole."""

    name: Annotated[str, Meta(max_length=64)]
    time: Moment
    detail: Annotated[str, Meta(max_length=1024)] = ""


class RequestTimeline(Struct, frozen=True):
    """A request as the coordinator saw it, with what the stages reported; all moments by the coordinator's clock.

    `outcome` is "running", "done" or an error code. `events` are `submitted`, `admitted`, `bound` for each attempt,
    `replayed`, `first_text`, `first_audio`, `first_image` and `ended`. `deliveries` are what stages sent for the
    client.
    """

    request_id: str
    trace_id: str
    outcome: str
    attempt: int
    events: tuple[TimelineEvent, ...]
    stages: tuple[StageTimeline, ...]
    deliveries: tuple[TransferTimeline, ...]


class Sample(Struct, frozen=True, array_like=True):
    """The value of one series of a metric in `telemetry/metric_table.py`; `labels` are the values of its labels."""

    name: Name
    labels: Annotated[tuple[Label, ...], Meta(max_length=8)]
    value: float


class HistogramSample(Struct, frozen=True, array_like=True):
    """One series of a histogram: observations per bucket (not cumulated; the last is +Inf) and their sum."""

    name: Name
    labels: Annotated[tuple[Label, ...], Meta(max_length=8)]
    counts: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=64)]
    total: float


class EndedWork(Struct, frozen=True, array_like=True):
    """A stage's part of a request that did not end with `StageDone`: failed or aborted here."""

    request_id: RequestId
    timeline: StageTimeline


class Snapshot(Body, tag="snapshot", frozen=True):
    """Stage -> coordinator, once per heartbeat interval: its metrics, counted since its session began."""

    samples: Annotated[tuple[Sample, ...], Meta(max_length=4096)]
    histograms: Annotated[tuple[HistogramSample, ...], Meta(max_length=1024)] = ()
    ended: Annotated[tuple[EndedWork, ...], Meta(max_length=256)] = ()
