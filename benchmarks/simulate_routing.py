"""Measures the CPU time and memory of the coordinator's decisions alone, at a size that no test machine has.

    python benchmarks/simulate_routing.py [--requests N] [--replicas N] [--turnover N] [--choices]

Fills the pure request core (`coordinator/core/`) with requests, without sockets or stages (this script answers for
them), then lets requests end and new ones arrive. Prints microseconds of CPU time per kind of event, and bytes per
request, as JSON, for a tenth of the size as well, so that costs which grow with the number of requests or replicas
show.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.health import HealthPolicy
from omni_actors.coordinator.core.instructions import ToClient
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.states import ReplicaEvent, ReplicaState
from omni_actors.protocol.client import Done, Submit
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Header
from omni_actors.protocol.payloads import Prompt
from omni_actors.protocol.results import AudioChunk, FinishReason, StageDone, StageUsage, TextDelta
from omni_actors.protocol.stage import OpenRequest
from omni_actors.protocol.tensors import DType, TensorRef

STAGES = ("prompt", "thinker", "talker", "code2wav")
CLIENTS = 1000
DELTAS = 20
CHUNKS = 5
BATCH = 500  # requests that end and are replaced between two ticks
NOW = 1_000_000.0
DONE = StageDone(usage=StageUsage(FinishReason.STOP))
SOUND = AudioChunk(samples=TensorRef(DType.F32, (4800,), 0), sample_rate=24_000)
SAMPLES = bytes(4 * 4800)


def pipeline(requests: int) -> PipelineConfig:
    stages: list[dict[str, Any]] = [{"name": name, "kind": "echo"} for name in STAGES]
    for before, stage in itertools.pairwise(stages):
        stage["inputs"] = {"from": before["name"]}
    stages[1]["outputs"], stages[3]["outputs"] = ["text"], ["audio"]
    coordinator = {"max_in_flight": 2 * requests, "retain_bytes": 1 << 40}
    return msgspec.convert({"name": "s", "model": "s", "stages": stages, "coordinator": coordinator}, PipelineConfig)


class Simulation:
    """A request machine with all replicas ready, and the CPU seconds and number of each kind of event."""

    def __init__(self, replicas: int, requests: int, keeps_routes: bool) -> None:
        self.keeps_routes = keeps_routes
        self.state = RequestMachine(pipeline(requests), new_seed=lambda: 1)
        for stage in STAGES:
            for index in range(replicas // len(STAGES)):
                replica = self.state.replicas.add(stage, index, 1)
                replica.state = ReplicaState.READY
                if stage == "code2wav":
                    replica.voices, replica.sample_rate = ("Chelsie", "Ethan"), 24_000
        self.routes: dict[str, dict[str, Header]] = {}
        self.seconds: dict[str, float] = {}
        self.events: dict[str, int] = {}
        self._numbers = itertools.count()

    def timed(self, kind: str, work: Callable[[], list[Any]], events: int = 1) -> list[Any]:
        began = time.process_time()
        made = work()
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.process_time() - began
        self.events[kind] = self.events.get(kind, 0) + events
        return made

    def time_choices(self) -> None:
        """Time each choice of a replica apart. It stays a part of what it is a part of, and the timer with it."""
        router = self.state.planner.router
        choose = router.choose

        def timed(*arguments: Any) -> Any:
            return self.timed("choice of a replica, with the timer", lambda: [choose(*arguments)])[0]

        router.choose = timed

    def admit(self, count: int) -> None:
        def submit() -> list[Any]:
            return [
                self.state.submit(client, header, body, [], NOW)
                for client, header, body in zip(clients, headers, bodies, strict=True)
            ]

        numbers = [next(self._numbers) for _ in range(count)]
        clients = [b"client%d" % (number % CLIENTS) for number in numbers]
        headers = [Header("", f"request-{number:012d}", deadline=NOW + 600 + number % 97) for number in numbers]
        bodies = [Submit(prompt=Prompt(token_ids=pack_token_ids(range(64))), voice="Ethan") for _ in numbers]
        for made in self.timed("admission and binding", submit, count):
            if [type(item.body) for item in made] != [OpenRequest] * len(STAGES):
                raise SystemExit(f"a request was not admitted: {made}")
            if not self.keeps_routes:
                continue
            self.routes[made[0].request_id] = {
                item.replica_id.stage: Header(
                    "", item.request_id, item.replica_id.stage, item.replica_id.replica, item.replica_id.epoch
                )
                for item in made
            }

    def results(self, kind: str, stage: str, body: Any, requests: list[str], first: int, count: int = 1) -> list[Any]:
        buffers = (SAMPLES,) if body is SOUND else ()
        headers = [
            msgspec.structs.replace(self.routes[request_id][stage], seq=first + index)
            for request_id in requests
            for index in range(count)
        ]
        return self.timed(
            kind, lambda: [self.state.from_stage(header, body, buffers, NOW) for header in headers], len(headers)
        )

    def finish(self, requests: list[str]) -> None:
        """Send the text, the audio and the end of these requests."""
        delta = TextDelta(text="word ", token_ids=pack_token_ids([7]))
        for made in self.results("text delta", "thinker", delta, requests, 0, DELTAS):
            if not isinstance(made[0], ToClient):
                raise SystemExit("a delta was not forwarded")
        self.results("audio chunk", "code2wav", SOUND, requests, 0, CHUNKS)
        firsts = {"thinker": DELTAS, "code2wav": CHUNKS}
        for stage in STAGES:
            ends = self.results("end of a stage", stage, DONE, requests, firsts.get(stage, 0))
        if not all(isinstance(made[0].body, Done) for made in ends):
            raise SystemExit("a request did not end")
        for request_id in requests:
            del self.routes[request_id]

    def ticks(self, kind: str, count: int) -> None:
        self.timed(kind, lambda: [self.state.tick(NOW + 0.1 * index) for index in range(count)], count)

    def looks(self, count: int) -> None:
        """What the fleet does twenty times a second."""
        supervision = HealthPolicy(self.state.pipeline, self.state.replicas)
        for replica in self.state.replicas:
            supervision.spawned(replica, NOW)

        def look() -> list[Any]:
            found: list[Any] = []
            for index in range(count):
                now = NOW + 0.05 * index
                found += [*supervision.stuck(now), *supervision.drained(now), *supervision.due(now)]
            return found

        if self.timed("look at the health of all", look, count):
            raise SystemExit("a replica was accused of something")

    def lose_one(self) -> int:
        replica = self.state.replicas.current("code2wav", 0)
        if replica is None:
            raise SystemExit("there is no code2wav/0")
        held = len(replica.requests)
        replica.on(ReplicaEvent.LOST)
        self.timed("loss of a replica", lambda: self.state.replica_lost(replica, NOW, "simulated"))
        return held


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def batches(items: list[str], size: int) -> Iterator[list[str]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def measure(replicas: int, requests: int, turnover: int, choices: bool = False) -> dict[str, Any]:
    simulation = Simulation(replicas, requests, keeps_routes=False)
    gc.collect()
    before = resident()
    for admitted in range(0, requests, BATCH):
        simulation.admit(min(BATCH, requests - admitted))
    gc.collect()
    memory = (resident() - before) / requests
    simulation = Simulation(replicas, requests, keeps_routes=True)
    if choices:
        simulation.time_choices()
    simulation.admit(requests)
    gc.collect()
    gc.freeze()  # as in a long-running coordinator: the garbage collector does not scan old objects again and again
    simulation.seconds.clear()
    simulation.events.clear()
    for batch in batches(list(simulation.routes)[:turnover], BATCH):
        simulation.finish(batch)
        simulation.admit(len(batch))
        simulation.ticks(f"tick in which {min(BATCH, turnover)} requests ended", 1)
    simulation.ticks("idle tick", 20)
    simulation.looks(20)
    held = simulation.lose_one()
    costs = {kind: 1e6 * simulation.seconds[kind] / simulation.events[kind] for kind in simulation.seconds}
    whole = costs["admission and binding"] + DELTAS * costs["text delta"] + CHUNKS * costs["audio chunk"]
    costs[f"whole request ({DELTAS} deltas, {CHUNKS} chunks)"] = whole + len(STAGES) * costs["end of a stage"]
    return {
        "replicas": replicas,
        "in flight": requests,
        "bytes per request": round(memory),
        "held by the lost replica": held,
        "microseconds": {kind: round(value, 2) for kind, value in costs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000, help="of all stages together")
    parser.add_argument("--requests", type=int, default=100_000, help="in flight")
    parser.add_argument("--turnover", type=int, default=5000, help="requests that end and are replaced")
    parser.add_argument("--choices", action="store_true", help="time each choice of a replica; all else seems slower")
    arguments = parser.parse_args()
    for divisor in (10, 1):
        replicas, requests = arguments.replicas // divisor, arguments.requests // divisor
        print(
            json.dumps(measure(replicas, requests, min(arguments.turnover, requests), arguments.choices), indent=1),
            flush=True,
        )


if __name__ == "__main__":
    main()
