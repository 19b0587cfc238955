"""Scale stages by their load: `omni-actors ctl scale --auto STAGE=LEAST:MOST:REQUESTS ...`.

The numbers are those of the metrics: the requests bound to a stage's replicas (`omni_replica_requests`), its share of
those that wait for a slot (`omni_requests_queued`), and answers that stalled (`omni_audio_gaps_seconds`).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from omni_actors import flags
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import InvalidRequest, RequestTimeout, StageUnavailable, counted, suggest
from omni_actors.logs import say
from omni_actors.protocol.messages import Operation

LOOK_SECONDS = 1.0  # between two looks, and so between two replicas of a stage that come or leave
STALLED = 0.05  # of the answers with sound; beyond it a replica more is wanted
FEW = 2  # stalled answers, which say nothing
GAPS = re.compile(r'^omni_audio_gaps_seconds_(bucket\{le="0\.05"\}|count) (\S+)$', re.MULTILINE)


class Bounds(NamedTuple):
    """A stage, how many replicas it may have, and how many requests one of them is to hold."""

    stage: str
    least: int
    most: int
    requests: int


class Pace(NamedTuple):
    """Seconds for which the load has asked for more, or for less, before that is done."""

    up: float
    down: float


class Load(NamedTuple):
    """A stage's replicas, without spares and those that leave, and the requests that are bound to them or wait."""

    replicas: int
    requests: float


class Look(NamedTuple):
    """The load of each stage at a moment (seconds of any clock), and how many answers had sound and stalled so far."""

    moment: float
    loads: dict[str, Load]
    spoken: float = 0.0
    stalled: float = 0.0


def parse_bounds(text: str) -> Bounds:
    """Read STAGE=LEAST:MOST:REQUESTS. Raises `argparse.ArgumentTypeError`."""
    stage, _, numbers = text.rpartition("=")
    parts = numbers.split(":")
    if not stage or len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form STAGE=LEAST:MOST:REQUESTS")
    bounds = Bounds(stage, *map(flags.count, parts))
    if not 1 <= bounds.least <= bounds.most or not bounds.requests:
        raise argparse.ArgumentTypeError(f"{text!r}: it takes 1 <= LEAST <= MOST, and REQUESTS of 1 or more")
    return bounds


def wished(bounds: Sequence[Bounds], looks: Sequence[Look], pace: Pace) -> dict[str, int]:
    """Decide how many replicas each stage is to have: as many as now, or one more or less. Pure.

    One more if every look of the last `pace.up` seconds asks for it, one less if no look of the last `pace.down`
    seconds needs as many as there are. If too many answers stalled in that time, no stage has less, and the one whose
    replicas hold most gets one more, unless its number has changed meanwhile.

    Args:
        looks: the earliest first, from before the last `pace.down` seconds on if there are any.
    """
    now, first = looks[-1], looks[0]
    settled = first.moment <= now.moment - pace.down
    waited = first.moment <= now.moment - pace.up
    stalled = now.stalled - first.stalled
    stalls = stalled > max(STALLED * (now.spoken - first.spoken), FEW)
    fullest = max(bounds, key=lambda one: now.loads[one.stage].requests / one.requests / now.loads[one.stage].replicas)
    wishes = {}
    for one in bounds:
        there = now.loads[one.stage].replicas
        needed = [math.ceil(look.loads[one.stage].requests / one.requests) for look in looks]
        lately = [count for count, look in zip(needed, looks, strict=True) if look.moment >= now.moment - pace.up]
        more = waited and min(lately) > there
        if stalls and settled and one is fullest:
            more = more or all(look.loads[one.stage].replicas == there for look in looks)
        less = settled and max(needed) < there and not stalls
        wishes[one.stage] = min(max(there + more - less, one.least), one.most)
    return wishes


async def autoscale(client: AsyncOmniClient, bounds: Sequence[Bounds], pace: Pace) -> NoReturn:
    """Scale the stages until cancelled. Says what it does, and once what keeps it from that.

    Raises:
        OmniError: a stage does not exist, or this client may not scale.
    """
    looks: deque[Look] = deque()
    hindrance = ""
    while True:
        try:
            looks.append(await take_look(client, bounds))
            while len(looks) > 1 and looks[1].moment <= looks[-1].moment - pace.down:
                looks.popleft()
            for stage, count in wished(bounds, looks, pace).items():
                load = looks[-1].loads[stage]
                if count != load.replicas:
                    await client.operate(Operation.SCALE, stage, count=count)
                    say(f"{stage} gets {counted(count, 'replica')} for {load.requests:.0f} requests")
            hindrance = ""
        except (RequestTimeout, StageUnavailable, InvalidRequest) as error:
            if not looks and isinstance(error, InvalidRequest):
                raise
            if str(error) != hindrance:
                say(f"cannot scale now: {error}")
            hindrance = str(error)
        await asyncio.sleep(LOOK_SECONDS)


async def take_look(client: AsyncOmniClient, bounds: Sequence[Bounds]) -> Look:
    """Ask the coordinator. Raises `InvalidRequest` for a stage that there is not."""
    shown = await client.describe()
    loads = {}
    for stage in [one.stage for one in bounds]:
        replicas = [item for item in shown.stages if item.stage == stage]
        if not replicas:
            names = {item.stage for item in shown.stages}
            raise InvalidRequest(f"There is no stage {stage}.{suggest(stage, names)}", field="stage")
        held = sum(item.in_flight for item in replicas)
        waiting = shown.queued * held / shown.in_flight if shown.in_flight else 0.0
        there = sum(not (item.spare or item.leaving) for item in replicas)
        loads[stage] = Load(max(1, there), held + waiting)
    heard = {name: float(value) for name, value in GAPS.findall(await client.metrics())}
    spoken = heard.pop("count", 0.0)
    stalled = spoken - sum(heard.values())
    return Look(asyncio.get_running_loop().time(), loads, spoken, stalled)
