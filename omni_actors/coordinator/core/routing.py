"""Chooses the replica of a stage that takes a request: by the work that it has ahead, and by what it already has.

Every choice starts with the replica that is expected to be through first. Two others may take its place if they have
little more ahead: the one with the conversation's earlier turns in its prefix cache, and one on the host, or the GPU,
of the stage before. How much more is bounded (`coordinator.routing`), so a conversation that everyone asks about fills
one replica only up to there. What such a choice looks at is bounded, too, however many replicas there are.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from omni_actors.config import Modality, PipelineConfig, StageConfig, StageKind
from omni_actors.config.devices import slot_devices
from omni_actors.coordinator.core.conversations import Conversations, Part, parts_of
from omni_actors.coordinator.core.forecast import AVERAGE, Forecast
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.requests import ActiveRequest
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.header import Body
from omni_actors.protocol.payloads import Prompt, StageParams
from omni_actors.protocol.results import StageDone

NEIGHBOURS = 16  # replicas of a host that are looked at for one choice
SAME_GPU = 1.25  # times the lead of the same host


class Router:
    """The choice among the replicas of each stage, with what it takes to make it.

    Attributes:
        chosen: how many choices went to the holder of a prefix ("prefix"), to the least loaded one ("load"), to the
            host of the stage before ("host").
    """

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._settings = pipeline.coordinator.routing
        self._replicas = replicas
        self._stages = {stage.name: stage for stage in pipeline.stages}
        self._devices: dict[tuple[str, int], frozenset[int]] = {}
        self._caches = frozenset(stage.name for stage in pipeline.stages if _caches_prefixes(stage))
        self._text_stages = tuple(stage.name for stage in pipeline.stages if Modality.TEXT in stage.outputs)
        self.forecast = Forecast(pipeline)
        self.conversations = Conversations(self._settings.conversations if self._settings.prefix_lead else 0)
        self.chosen: collections.Counter[str] = collections.Counter()

    # -- choices ------------------------------------------------------------------------------------------------------

    def parts(self, prompt: Prompt, buffers: Sequence[Frame], params: dict[str, StageParams]) -> tuple[Part, ...]:
        """By what to recognize a prompt; nothing if no stage has a choice that depends on it."""
        if not any(self._replicas.count(stage) > 1 for stage in self._caches):
            return ()
        adapters = (params[stage].adapter for stage in self._text_stages if stage in params)
        return parts_of(prompt, buffers, next(filter(None, adapters), None))

    def choose(self, stage: str, request: ActiveRequest, sources: Iterable[Replica]) -> Replica | None:
        """The replica that takes a request in a stage, `None` if none is ready. `sources` feed it there."""
        least = self._replicas.choose(stage)
        if least is None:
            return None
        holder, prefix = self._holder(stage, request)
        sources = tuple(sources) if self._settings.host_lead else ()
        best, price = least, math.inf
        away = [source for source in sources if self._nearness(least, (source,)) < self._nearest(source)]
        for replica in itertools.chain((least, holder), *(self._on_host(stage, source) for source in away)):
            if replica is None or not replica.takes_requests or (replica.congested and not least.congested):
                continue
            held, near = prefix if replica is holder else 0.0, self._nearness(replica, sources)
            if (paid := replica.cost - AVERAGE * (held + near)) < price:
                best, price = replica, paid
        self.chosen["prefix" if best is holder and prefix else "load" if best is least else "host"] += 1
        return best

    def _holder(self, stage: str, request: ActiveRequest) -> tuple[Replica | None, float]:
        """The replica that has the beginning of the prompt, and its lead."""
        if stage not in self._caches or not request.parts:
            return None, 0.0
        held = self.conversations.holder(stage, request.parts)
        if held is None:
            return None, 0.0
        index, epoch, share = held
        return self._replicas.find(stage, index, epoch), self._settings.prefix_lead * share

    def _on_host(self, stage: str, source: Replica) -> Iterator[Replica]:
        return itertools.islice(self._replicas.on_host(stage, source.node), NEIGHBOURS)

    def _nearest(self, source: Replica) -> float:
        """The lead of a replica that could not be nearer to one that feeds it."""
        return self._settings.host_lead * (SAME_GPU if self._gpus(source) else 1.0)

    def _nearness(self, replica: Replica, sources: Iterable[Replica]) -> float:
        """The lead of a replica on the host, or the GPU, of one that feeds it."""
        lead = 0.0
        for source in sources:
            if source.node == replica.node:
                gpus = self._gpus(source)
                same_gpu = bool(gpus) and not gpus.isdisjoint(self._gpus(replica))
                lead = max(lead, self._settings.host_lead * (SAME_GPU if same_gpu else 1.0))
        return lead

    def _gpus(self, replica: Replica) -> frozenset[int]:
        """The GPUs that the YAML gives a replica; none if it does not say."""
        place = replica.stage, replica.slot
        if place not in self._devices:
            stage = self._stages[replica.stage]
            self._devices[place] = frozenset(slot_devices(stage, replica.slot, 0) if stage.devices else ())
        return self._devices[place]

    # -- what follows -------------------------------------------------------------------------------------------------

    def hold(self, request: ActiveRequest, replica: Replica) -> None:
        """Bind a request to a replica, with the work that it is expected to be."""
        stage = replica.stage
        work = request.work[stage] = self.forecast.work(stage, request.stages, request.params[stage])
        replica.hold(request.request_id, work.ahead)
        if stage in self._caches:
            self.conversations.computes(replica, request.parts)

    def notice(self, request: ActiveRequest, stage: str, body: Body) -> None:
        """Take note of what a stage sent."""
        if isinstance(body, StageDone):
            self._finished(request, stage, body)
            return
        amount = self.forecast.amount(body)
        if amount:
            for concerned in self.forecast.speech if stage == self.forecast.sound else (stage,):
                work = request.work.get(concerned)
                if work is not None and work.advance(amount):
                    self._expect(request, concerned)

    def _finished(self, request: ActiveRequest, stage: str, body: StageDone) -> None:
        replica = self._replicas.at(request.bound[stage])
        if replica is not None:
            replica.slowness = self.forecast.pace(stage, replica.pace, body.usage)
        self.forecast.learn(stage, request.stages, body.usage, request.work.get(stage))
        if stage == self.forecast.text:
            for later in self.forecast.speech:
                work = request.work.get(later)
                if work is not None:
                    work.resize(*self.forecast.spoken(body.usage.output_tokens))
                    self._expect(request, later)

    def _expect(self, request: ActiveRequest, stage: str) -> None:
        replica_id = request.bound.get(stage)
        replica = self._replicas.at(replica_id) if replica_id is not None else None
        if replica is not None:
            replica.expect(request.request_id, request.work[stage].ahead)


def _caches_prefixes(stage: StageConfig) -> bool:
    """Whether a stage computes a prompt faster whose beginning it has computed before."""
    kinds = (StageKind.AUTOREGRESSIVE, StageKind.ECHO, StageKind.CUSTOM)
    cached = stage.engine.get("enable_prefix_caching") is not False  # on by default in all models that write text
    return Modality.TEXT in stage.outputs and stage.kind in kinds and cached
