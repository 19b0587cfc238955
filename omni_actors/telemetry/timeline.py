"""A request's timeline in the forms that people and tools read: phases, transfers and JSON.

Moments are Unix time in seconds by the coordinator's clock, as in `protocol/messages.py`. Pure functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from omni_actors.protocol.messages import RequestTimeline, StageTimeline

# The phases of a stage, each with the moment that ends it. A phase begins where the one before it ended.
PHASES = (
    ("waiting", "first_input"),  # for the previous stage
    ("gathering", "started"),  # until there is enough input to start
    ("queued", "first_step"),  # in the engine
    ("first output", "first_output"),  # from the first step on: prefill, or the steps of a chunk
    ("output", "last_output"),
    ("ending", "ended"),
)


class Phase(NamedTuple):
    """A part of a stage's time."""

    name: str
    begin: float
    end: float


class Transfer(NamedTuple):
    """The messages about one request from one replica to another, from the first sent to the last received.

    `source` and `target` are replicas such as "thinker/0". Text and audio for the client go to "coordinator".
    """

    source: str
    target: str
    attempt: int
    begin: float
    end: float
    messages: int
    bytes: int
    first_latency: float


def extent(timeline: RequestTimeline) -> tuple[float, float]:
    """The first and the last moment of a timeline; (0, 0) for an empty one."""
    moments = [event.time for event in timeline.events]
    begins = [*moments, *(stage.expected for stage in timeline.stages)]
    begin = min(filter(None, begins), default=0.0)
    ends = [max(stage.ended, stage.last_output) for stage in timeline.stages]
    ends += [transfer.last_received for transfer in timeline.deliveries]
    return begin, max([*moments, *ends], default=begin)


def phases(stage: StageTimeline) -> list[Phase]:
    """The phases that happened, without gaps between them."""
    found = []
    last = stage.expected
    for name, attribute in PHASES:
        moment = getattr(stage, attribute)
        if moment:
            moment = max(moment, last)  # an estimated clock may be off by a little
            found.append(Phase(name, last, moment))
            last = moment
    return found


def end_of(stage: StageTimeline) -> float:
    """The moment at which a stage's last phase ended."""
    found = phases(stage)
    return found[-1].end if found else stage.expected


def stages(timeline: RequestTimeline) -> list[StageTimeline]:
    """Attempts in order, each in order of the route."""
    route = [stage.stage for stage in sorted(timeline.stages, key=lambda stage: stage.first_input or stage.expected)]
    for event in timeline.events:
        if event.name == "bound":  # the last one counts
            route = [name.rpartition("/")[0] for name in event.detail.split()]
    order = {name: index for index, name in enumerate(route)}
    return sorted(timeline.stages, key=lambda stage: (stage.attempt, order.get(stage.stage, len(order))))


def transfers(timeline: RequestTimeline) -> list[Transfer]:
    """Transfers that happened, by attempt and beginning."""
    ends = [(transfer, replica_name(stage), stage.attempt) for stage in timeline.stages for transfer in stage.transfers]
    ends += [(transfer, "coordinator", timeline.attempt) for transfer in timeline.deliveries]
    found = []
    for transfer, target, attempt in ends:
        if transfer.messages:
            begin = transfer.first_sent or transfer.first_received
            end = max(begin, transfer.last_received)
            latency = _rounded(transfer.first_received - begin)
            found.append(
                Transfer(transfer.source, target, attempt, begin, end, transfer.messages, transfer.bytes, latency)
            )
    return sorted(found, key=lambda transfer: (transfer.attempt, transfer.begin))


def replica_name(stage: StageTimeline) -> str:
    """The replica that made a stage's attempt, as "thinker/0"."""
    return f"{stage.stage}/{stage.replica}"


def stage_facts(stage: StageTimeline) -> dict[str, Any]:
    """What is known of a stage's attempt besides its moments."""
    names = ("stage", "replica", "attempt", "outcome", "input_tokens", "output_tokens")
    return {name: getattr(stage, name) for name in names}


def transfer_facts(transfer: Transfer) -> dict[str, Any]:
    """What is known of a transfer besides its moments; `first_latency` in seconds."""
    return {name: fact for name, fact in transfer._asdict().items() if name not in ("begin", "end")}


def as_json(timeline: RequestTimeline) -> dict[str, Any]:
    """The object that HTTP clients get (docs/observability.md). `at` counts in seconds from `started`, Unix time."""
    started, ended = extent(timeline)

    def between(begin: float, end: float) -> dict[str, float]:
        return {"at": _rounded(begin - started), "seconds": _rounded(end - begin)}

    def stage_json(stage: StageTimeline) -> dict[str, Any]:
        parts = [{"name": phase.name, **between(phase.begin, phase.end)} for phase in phases(stage)]
        return {**stage_facts(stage), **between(stage.expected, end_of(stage)), "phases": parts}

    return {
        "id": timeline.request_id,
        "trace_id": timeline.trace_id,
        "outcome": timeline.outcome,
        "attempt": timeline.attempt,
        "started": started,
        "seconds": _rounded(ended - started),
        "events": [
            {"name": event.name, "at": _rounded(event.time - started), "detail": event.detail}
            for event in timeline.events
        ],
        "stages": [stage_json(stage) for stage in stages(timeline)],
        "transfers": [{**transfer_facts(sent), **between(sent.begin, sent.end)} for sent in transfers(timeline)],
    }


def _rounded(seconds: float) -> float:
    """To microseconds: the clocks are not more exact."""
    return max(0.0, round(seconds, 6))
