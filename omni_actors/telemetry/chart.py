"""A request's timeline as bars: what the terminal, the picture, HTTP and OpenTelemetry show. Pure."""

from __future__ import annotations

from msgspec import Struct

from omni_actors.protocol.telemetry import HopTimeline, RequestTimeline, StageTimeline


class Phase(Struct, frozen=True):
    """A part of a stage's time; `at` counts in seconds from the chart's start."""

    name: str
    at: float
    seconds: float


class StageBar(Struct, frozen=True):
    """One attempt in one replica. Its phases follow one another without a gap."""

    stage: str
    replica: int
    attempt: int
    outcome: str
    at: float
    seconds: float
    input_tokens: int
    output_tokens: int
    phases: tuple[Phase, ...]


class HopBar(Struct, frozen=True):
    """From the sending of the first message to the receipt of the last. `first_latency` is that of the first one.

    `source` and `target` are replicas, as "thinker/0"; text and audio for the client go to "coordinator".
    """

    source: str
    target: str
    attempt: int
    at: float
    seconds: float
    messages: int
    bytes: int
    first_latency: float


class Mark(Struct, frozen=True):
    """Something that happened to the request as a whole."""

    name: str
    at: float
    detail: str


class Chart(Struct, frozen=True):
    """`started` is Unix time in seconds, every `at` counts from it. `outcome`: "running", "done", or an error code."""

    id: str
    trace_id: str
    outcome: str
    attempt: int
    started: float
    seconds: float
    events: tuple[Mark, ...]
    stages: tuple[StageBar, ...]
    hops: tuple[HopBar, ...]


# Name of a phase, and the moment with which it ends. It begins where the one before ended.
PHASES = (
    ("waiting", "first_input"),  # for the stage before
    ("gathering", "started"),  # until there is enough input to start
    ("queued", "first_step"),  # in the engine
    ("first output", "first_output"),  # from the first step on: prefill, or a chunk's steps
    ("output", "last_output"),
    ("ending", "ended"),
)


def chart(timeline: RequestTimeline) -> Chart:
    """The bars of a timeline, stages in order of their beginning."""
    moments = [event.time for event in timeline.events] + [stage.expected for stage in timeline.stages]
    started = min((moment for moment in moments if moment), default=0.0)
    ends = [event.time for event in timeline.events]
    ends += [max(stage.ended, stage.last_output) for stage in timeline.stages]
    ends += [hop.last_received for hop in timeline.deliveries]
    stages = [_stage(stage, started) for stage in timeline.stages]
    hops = [
        _hop(hop, f"{stage.stage}/{stage.replica}", stage.attempt, started)
        for stage in timeline.stages
        for hop in stage.hops
    ]
    hops += [_hop(hop, "coordinator", timeline.attempt, started) for hop in timeline.deliveries]
    order = {name: index for index, name in enumerate(_order(timeline))}
    return Chart(
        id=timeline.request_id,
        trace_id=timeline.trace_id,
        outcome=timeline.outcome,
        attempt=timeline.attempt,
        started=started,
        seconds=_round(max(ends, default=started) - started),
        events=tuple(Mark(event.name, _since(event.time, started), event.detail) for event in timeline.events),
        stages=tuple(sorted(stages, key=lambda bar: (bar.attempt, order.get(bar.stage, len(order))))),
        hops=tuple(sorted((hop for hop in hops if hop.messages), key=lambda bar: (bar.attempt, bar.at))),
    )


def _order(timeline: RequestTimeline) -> list[str]:
    """Stages in order of the route, as the last attempt was bound; else of their first input."""
    for event in reversed(timeline.events):
        if event.name == "bound":
            return [name.rpartition("/")[0] for name in event.detail.split()]
    return [stage.stage for stage in sorted(timeline.stages, key=lambda stage: stage.first_input or stage.expected)]


def _stage(stage: StageTimeline, started: float) -> StageBar:
    phases = []
    last = stage.expected
    for name, attribute in PHASES:
        moment = getattr(stage, attribute)
        if moment:
            moment = max(moment, last)  # an estimated clock may be off by a little
            phases.append(Phase(name, _since(last, started), _round(moment - last)))
            last = moment
    return StageBar(
        stage.stage,
        stage.replica,
        stage.attempt,
        stage.outcome,
        _since(stage.expected, started),
        _round(last - stage.expected),
        stage.input_tokens,
        stage.output_tokens,
        tuple(phases),
    )


def _hop(hop: HopTimeline, target: str, attempt: int, started: float) -> HopBar:
    latency = _round(hop.first_received - hop.first_sent) if hop.first_sent else 0.0
    begin = hop.first_sent or hop.first_received
    return HopBar(
        hop.source,
        target,
        attempt,
        _since(begin, started),
        _round(hop.last_received - begin),
        hop.messages,
        hop.bytes,
        latency,
    )


def _since(moment: float, started: float) -> float:
    return _round(moment - started)


def _round(seconds: float) -> float:
    """Microseconds are what the clocks are good for."""
    return max(0.0, round(seconds, 6))
