"""Simulates a pipeline of 1,000 replicas under each way of choosing among them.

    python benchmarks/simulate_balance.py [--hosts N] [--seconds N] [--load X] [--hot X] [--settings NAME ...]

The decisions are the coordinator's own (`coordinator/core/`); engines, clients and time are simulated. A host has four
thinkers and four talkers, and every fifth host takes twice as long for everything. A step takes some time and a little
more for each request in it; a prompt's tokens take time as well unless they are in the replica's prefix cache.
Conversations have several turns, short and long answers mixed, half of them spoken; `--hot` is the part of all
conversations that are the same one. Prints a line of JSON for each setting; times are in simulated seconds.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.instructions import Instruction, ToStage
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.states import ReplicaState
from omni_actors.protocol.client import Submit
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Header
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StageParams
from omni_actors.protocol.results import AudioChunk, FinishReason, StageDone, StageUsage, TextDelta
from omni_actors.protocol.stage import OpenRequest
from omni_actors.protocol.tensors import DType, TensorRef

SETTINGS: dict[str, dict[str, Any]] = {
    "requests": {"balance": "requests", "prefix_lead": 0, "host_lead": 0},  # as it was before there was a choice
    "time": {"prefix_lead": 0, "host_lead": 0},
    "time, prefix": {"host_lead": 0},
    "default": {},
}
PER_HOST = 4  # replicas of each stage
STEP, STEP_REQUEST = 0.03, 0.004  # seconds of a step, and more for each request in it
PREFILL = 0.0004  # seconds of a prompt's token
CACHE_TOKENS = 100_000
SLOW_HOSTS, SLOWNESS = 5, 2.0  # every fifth
FIRST_TOKENS, TURN_TOKENS, TURNS, PAUSE = 600, 60, 4, 8.0  # of a conversation
ANSWER_TOKENS, SPREAD, SHORT, SHORT_TOKENS = 160, 0.8, 0.4, 24
CODES = 2  # of the talker, for a token of text
PIECES = 4  # messages in which a stage sends its output
WARM = 0.3  # part of the time that is not counted
SAMPLES = 1920  # of a code


@dataclass
class Conversation:
    """Its messages so far, as tokens and as what is sent."""

    name: int
    left: int
    spoken: bool
    messages: list[ChatMessage] = field(default_factory=list)
    tokens: int = 0

    def say(self, role: str, tokens: int, what: str) -> None:
        text = f"{self.name} {what} ".ljust(4 * tokens, "x")
        self.messages.append(ChatMessage(role=role, content=(ContentPart(text=text),)))
        self.tokens += tokens


@dataclass
class Job:
    """A request: how many tokens each stage makes for it."""

    request_id: str
    conversation: Conversation
    prompt: int
    tokens: dict[str, int]
    came: float
    limit: bool
    first: float = 0.0
    began: dict[str, float] = field(default_factory=dict)
    seq: collections.Counter[str] = field(default_factory=collections.Counter)
    hosts: dict[str, int] = field(default_factory=dict)


class Engine:
    """A replica: its requests advance together, a token a step, but while it computes a prompt."""

    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.cached: collections.OrderedDict[int, int] = collections.OrderedDict()
        self.version = 0
        self._at = self._progress = 0.0
        self._free = 0.0  # when it is through with prompts
        self._marks: list[tuple[float, int, Job, int]] = []  # progress at which a piece of a request is done
        self.running = 0
        self._numbers = itertools.count()

    def _step(self) -> float:
        return self.slowness * (STEP + STEP_REQUEST * self.running)

    def advance(self, now: float) -> None:
        self._progress += max(0.0, now - max(self._at, self._free)) / self._step()
        self._at = now

    def start(self, job: Job, tokens: int, now: float, prompt: int) -> float:
        """Returns when the prompt is computed."""
        self.advance(now)
        self._free = max(self._free, now) + self.slowness * PREFILL * prompt
        self.running += 1
        for piece in range(1, PIECES + 1):
            mark = self._progress + tokens * piece / PIECES
            heapq.heappush(self._marks, (mark, next(self._numbers), job, piece))
        return self._free

    def next(self) -> float:
        """When the next piece is done."""
        if not self._marks:
            return math.inf
        return max(self._at, self._free) + max(0.0, self._marks[0][0] - self._progress) * self._step()

    def take(self, now: float) -> list[tuple[Job, int]]:
        self.advance(now)
        taken = []
        while self._marks and self._marks[0][0] <= self._progress + 1e-6:
            _, _, job, piece = heapq.heappop(self._marks)
            taken.append((job, piece))
            self.running -= piece == PIECES
        return taken

    def reuse(self, conversation: Conversation, prompt: int) -> int:
        """Tokens of a prompt that are in the cache, which then holds all of it."""
        held = min(self.cached.pop(conversation.name, 0), prompt)
        self.cached[conversation.name] = prompt
        while sum(self.cached.values()) > CACHE_TOKENS:
            self.cached.popitem(last=False)
        return held


class World:
    """The pipeline, its clients and the clock."""

    def __init__(self, hosts: int, load: float, hot: float, routing: dict[str, Any]) -> None:
        self.random = random.Random(7)
        nodes = list(range(hosts))
        shared = {"kind": "echo", "replicas": PER_HOST * hosts, "node": nodes}
        stages = [
            {"name": "thinker", "outputs": ["text"], **shared},
            {"name": "talker", "outputs": ["audio"], "inputs": {"from": "thinker"}, **shared},
        ]
        coordinator = {"max_in_flight": 1_000_000, "retain_bytes": 1 << 40, "speech_pace": 0, "routing": routing}
        made = {"name": "s", "model": "s", "stages": stages, "coordinator": coordinator}
        self.machine = RequestMachine(msgspec.convert(made, PipelineConfig), new_seed=lambda: 1)
        self.engines: dict[tuple[str, int], Engine] = {}
        for stage in ("thinker", "talker"):
            for index in range(PER_HOST * hosts):
                replica = self.machine.replicas.add(stage, index, 1, node=index % hosts)
                replica.state = ReplicaState.READY
                slow = index % hosts % SLOW_HOSTS == 0
                self.engines[stage, index] = Engine(SLOWNESS if slow else 1.0)
        answer = (1 - SHORT) * ANSWER_TOKENS + SHORT * SHORT_TOKENS
        rate = PER_HOST * hosts * (1 - (1 - 1 / SLOWNESS) / SLOW_HOSTS) / STEP_REQUEST  # tokens a second, at most
        self.every = TURNS * answer / (rate * load)  # seconds between two conversations
        self.hot = hot
        self.now = 0.0
        self.events: list[tuple[float, int, Any]] = []
        self.numbers = itertools.count()
        self.jobs: dict[str, Job] = {}
        self.ended: list[Job] = []
        self.ends: list[float] = []
        self.reused = self.prompted = self.together = self.spoken = self.decisions = 0
        self.seconds = 0.0

    def at(self, when: float, event: Any) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), event))

    def run(self, seconds: float) -> dict[str, Any]:
        self.at(0.0, "conversation")
        while self.events and self.events[0][0] < seconds:
            self.now, _, event = heapq.heappop(self.events)
            if event == "conversation":
                self._begin()
                self.at(self.now + self.random.expovariate(1 / self.every), "conversation")
            elif isinstance(event, Conversation):
                self._ask(event)
            else:
                key, version = event
                if self.engines[key].version == version:
                    self._produce(key)
        counted = [job for job in self.ended if job.came > WARM * seconds]
        waits = sorted(job.first - job.came for job in counted)
        ends = sorted(job.began["end"] - job.came for job in counted)
        loads = [engine.running for key, engine in self.engines.items() if key[0] == "thinker"]
        return {
            "requests": len(counted),
            "mean": round(statistics.mean(ends), 2),
            "p95": round(ends[int(0.95 * len(ends))], 2),
            "first text p95": round(waits[int(0.95 * len(waits))], 2),
            "prompt cached": f"{self.reused / self.prompted:.0%}",
            "speech on one host": f"{self.together / max(1, self.spoken):.0%}",
            "running at the end, mean and largest": [round(statistics.mean(loads), 1), max(loads)],
            "microseconds per request": round(1e6 * self.seconds / self.decisions, 1),
        }

    def _begin(self) -> None:
        hot = self.random.random() < self.hot
        turns = 1 if hot else 1 + min(20, int(self.random.expovariate(1 / TURNS)))
        made = Conversation(0 if hot else next(self.numbers) + 1, turns, self.random.random() < 0.5)
        made.say("system", FIRST_TOKENS, "setting")
        self._ask(made)

    def _ask(self, conversation: Conversation) -> None:
        conversation.left -= 1
        conversation.say("user", TURN_TOKENS, f"question {conversation.left}")
        short = self.random.random() < SHORT
        mean = SHORT_TOKENS if short else ANSWER_TOKENS
        length = max(4, round(mean * self.random.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)))
        length = min(length, SHORT_TOKENS) if short else length
        name = f"r{next(self.numbers)}"
        tokens = {"thinker": length, "talker": CODES * length}
        job = self.jobs[name] = Job(name, conversation, conversation.tokens, tokens, self.now, short)
        params = {"thinker": StageParams(max_tokens=SHORT_TOKENS)} if short else {}
        modalities = ("text", "audio") if conversation.spoken else ("text",)
        prompt = Prompt(messages=tuple(conversation.messages))
        submit = Submit(prompt=prompt, modalities=modalities, params=params)
        began = time.process_time()
        made = self.machine.submit(b"client %d" % (conversation.name % 1000), Header("", name), submit, [], self.now)
        self.seconds += time.process_time() - began
        self.decisions += 1
        self._obey(made)
        if conversation.spoken:
            self.spoken += 1
            self.together += job.hosts["thinker"] == job.hosts["talker"]

    def _obey(self, instructions: list[Instruction]) -> None:
        for item in instructions:
            if not isinstance(item, ToStage) or not isinstance(item.body, OpenRequest):
                continue
            key = item.replica_id.stage, item.replica_id.replica
            job, engine, prompt = self.jobs[item.request_id], self.engines[key], 0
            replica = self.machine.replicas.current(*key)
            job.hosts[key[0]] = replica.node if replica is not None else -1
            if key[0] == "thinker":
                held = engine.reuse(job.conversation, job.prompt)
                self.reused, self.prompted = self.reused + held, self.prompted + job.prompt
                prompt = job.prompt - held
            began = engine.start(job, job.tokens[key[0]], self.now, prompt)
            job.began[key[0]] = began
            job.first = began if key[0] == "thinker" else job.first
            self._schedule(key)

    def _schedule(self, key: tuple[str, int]) -> None:
        engine = self.engines[key]
        engine.version += 1
        if (when := engine.next()) < math.inf:
            self.at(when, (key, engine.version))

    def _produce(self, key: tuple[str, int]) -> None:
        stage, index = key
        for job, piece in self.engines[key].take(self.now):
            tokens = job.tokens[stage]
            part = tokens * piece // PIECES - tokens * (piece - 1) // PIECES
            if stage == "thinker":
                self._say(job, stage, index, TextDelta(text="x", token_ids=pack_token_ids([1] * part)))
            else:
                samples = TensorRef(DType.F32, (part * SAMPLES,), 0)
                self._say(job, stage, index, AudioChunk(samples=samples, sample_rate=24_000), (b"",))
            if piece == PIECES:
                reason = FinishReason.LENGTH if job.limit and tokens >= SHORT_TOKENS else FinishReason.STOP
                usage = StageUsage(reason, job.prompt, tokens, job.began[stage], self.now)
                self._say(job, stage, index, StageDone(usage=usage))
                self._end(job)
        self._schedule(key)

    def _say(self, job: Job, stage: str, index: int, body: Any, buffers: tuple[bytes, ...] = ()) -> None:
        header = Header("", job.request_id, stage, index, 1, 0, job.seq[stage])
        job.seq[stage] += 1
        self.machine.from_stage(header, body, buffers, self.now)

    def _end(self, job: Job) -> None:
        if job.request_id in self.machine.active:
            return
        self.machine.tick(self.now)
        job.began["end"] = self.now
        self.ended.append(self.jobs.pop(job.request_id))
        if job.conversation.left > 0:
            job.conversation.say("assistant", job.tokens["thinker"], "answer")
            self.at(self.now + self.random.expovariate(1 / PAUSE), job.conversation)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=125, help="of eight replicas each")
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated")
    parser.add_argument("--load", type=float, default=0.5, help="part of what all thinkers can do at most")
    parser.add_argument("--hot", type=float, default=0.0, help="part of the conversations that are the same one")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    given = parser.parse_args()
    for name in given.settings:
        world = World(given.hosts, given.load, given.hot, SETTINGS[name])
        print(json.dumps({"setting": name, **world.run(given.seconds)}), flush=True)


if __name__ == "__main__":
    main()
