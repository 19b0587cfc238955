"""Plans where a request runs: on which replicas its stages run next, and which stages run again after a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omni_actors.config import LossPolicy, PipelineConfig
from omni_actors.coordinator.core.admission import unwanted_information
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.requests import ActiveRequest
from omni_actors.coordinator.core.restart_scope import StageGraph
from omni_actors.coordinator.core.routing import Router
from omni_actors.coordinator.core.suspects import IsolationRuns
from omni_actors.errors import OmniError, StageLost, StageUnavailable
from omni_actors.protocol.fields import MAX_ATTEMPT


@dataclass(frozen=True)
class Route:
    """The replicas for those stages of a request that are bound to none."""

    replicas: tuple[Replica, ...]


@dataclass(frozen=True)
class Wait:
    """No replica of `stage` is free for the request now; one will be."""

    stage: str


@dataclass(frozen=True)
class Unavailable:
    """The request cannot run, now or later."""

    error: OmniError


class Planner:
    """Reads requests and replicas and changes neither, but for the replicas that it reserves for suspects."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._entry = pipeline.entry.name
        self._max_attempts = pipeline.coordinator.max_attempts
        self._policies = {stage.name: stage.on_replica_loss for stage in pipeline.stages}
        self._speaks = {stage.name: bool(stage.outputs) for stage in pipeline.stages}
        self.graph = StageGraph(pipeline)
        self.isolation_runs = IsolationRuns(replicas)
        self.router = Router(pipeline, replicas)

    def plan(self, request: ActiveRequest, now: float) -> Route | Wait | Unavailable:
        """Choose a replica for every stage that the request still needs."""
        missing = request.missing
        if self._entry in missing and request.retained is None:
            return Unavailable(_not_kept())
        chosen: dict[str, Replica] = {}
        # The stage that suspects it last: no replica is emptied for a request that has to wait for another one.
        for stage in sorted(missing, key=lambda stage: stage == request.suspected_by):
            suspected = request.suspected_by == stage
            if suspected:
                replica = self.isolation_runs.replica_for(request, now)
            else:
                replica = self.router.choose(stage, request, self._sources(request, stage, chosen))
            if replica is None:
                return Wait(stage) if self._replicas.recoverable(stage) else Unavailable(_unavailable(request, stage))
            chosen[stage] = replica
        replicas = tuple(chosen.values())
        error = self._information_error(request, replicas)
        return Route(replicas) if error is None else Unavailable(error)

    def _sources(self, request: ActiveRequest, stage: str, chosen: Mapping[str, Replica]) -> Iterator[Replica]:
        """The replicas that feed a stage, as far as they are known."""
        for source in self.graph.sources[stage]:
            replica_id = request.bound.get(source)
            replica = self._replicas.at(replica_id) if replica_id is not None else chosen.get(source)
            if replica is not None:
                yield replica

    @staticmethod
    def _information_error(request: ActiveRequest, chosen: Sequence[Replica]) -> OmniError | None:
        """Why these replicas cannot run a request for the sake of its additional information."""
        if not request.information:
            return None
        wanted = {name for replica in chosen for name in replica.wants_information}
        if request.retained is None and not request.information.isdisjoint(wanted):
            return _not_kept()
        whole_route = len(chosen) == len(request.stages)
        return unwanted_information(request.information, wanted, request.stages) if whole_route else None

    def replays(self, stage: str) -> bool:
        """Whether work that a stage loses runs again, as configured."""
        return self._policies[stage] is LossPolicy.REPLAY

    def may_wait_for(self, stage: str) -> bool:
        """Whether new requests may wait for a stage of which no replica is ready."""
        return self.replays(stage) and self._replicas.recoverable(stage)

    def replay(self, request: ActiveRequest, lost: str, counts: bool) -> set[str] | None:
        """The stages that run again when the work of the stage `lost` is gone; `None` if the request has to fail.

        `counts` says whether this is one of the losses that `max_attempts` bounds.
        """
        again = self.graph.again(request.stages, [lost], lambda stage: self.holds(request, stage))
        possible = (
            (self._entry not in again or request.retained is not None)
            and request.losses_made_up + counts < self._max_attempts
            and request.attempt < MAX_ATTEMPT
            and self.replays(lost)
            and all(self._replicas.recoverable(stage) for stage in again)
        )
        return again if possible else None

    def holds(self, request: ActiveRequest, stage: str) -> bool:
        """Whether the replica that worked on a request is alive."""
        replica_id = request.bound.get(stage)
        replica = self._replicas.at(replica_id) if replica_id is not None else None
        return replica is not None and replica.alive

    def may_have_begun(self, request: ActiveRequest, stage: str) -> bool:
        """Whether a stage may have got input for a request: one that has not cannot have died of it.

        A stage that sends text or audio to the coordinator does so no later than it feeds the stages after it.
        """
        for source in self.graph.sources[stage]:
            if source not in request.stages or source in request.usage or request.next_seq.get(source):
                continue
            if self._speaks[source] or not self.may_have_begun(request, source):
                return False
        return True

    def is_through_with(self, request: ActiveRequest, stage: str) -> bool:
        """Whether a request needs nothing more of a stage: it is done, and so are those that take its output.

        That the stage is done is not enough: its last chunks may have died with it on their way.
        """
        needed = {stage, *self.graph.downstream[stage]} & set(request.stages)
        return needed <= set(request.usage)


def _not_kept() -> StageLost:
    return StageLost("What it takes to run the request again was not kept.")


def _unavailable(request: ActiveRequest, stage: str) -> StageUnavailable:
    text = f"No replica of stage {stage!r} is ready, and none will be.{request.lost_before()}"
    return StageUnavailable(text, stage=stage)
