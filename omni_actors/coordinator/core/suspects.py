"""Finds the request that crashes replicas, by group testing (docs/decisions.md).

A replica dies for many reasons, and most often no request is to blame. So evidence is summed up: each loss counts
for the requests that the stage may have begun, and a request with enough of it against itself is a suspect. Suspects
run apart from all other requests, in groups: a replica of the stage takes nothing new until it is empty, then only the
group. A group that crashes its replica is halved. A suspect is cleared when its stage has finished it, or when it has
run for longer than it took to crash before. It is declared poison only if it was running alone at a crash; then the
losses that it explains no longer count against the requests that ran with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from omni_actors.coordinator.core.replicas import Evidence, Replica, ReplicaState, ReplicaTable
from omni_actors.coordinator.core.request import ActiveRequest, Loss
from omni_actors.errors import Poison, counted

SUSPECT = 2 * Evidence.CRASHED  # evidence that makes a suspect: two crashes, or four kills
GUILTY = 1 * Evidence.CRASHED  # of that, what came while it was alone on its replica, to declare it poison
EMPTY_SECONDS = 10.0  # that a replica has to become empty for a group; then the group joins those who are left
RUN_SECONDS = 60.0  # the longest run after which a suspect is cleared
MARGIN_SECONDS = 1.0  # that a suspect must run for longer than twice the time in which it crashed before


class IsolationRun(Struct, eq=False):
    """A group of suspects of one stage, and the replica that they have to themselves while they run."""

    stage: str
    members: dict[str, ActiveRequest]
    replica: Replica | None = None
    until: float = math.inf  # then it starts although its replica is not empty; once it has started: then it ends
    started: bool = False


class IsolationRuns:
    """The suspects of all stages in groups, in the order in which they run.

    Several groups of a stage run at a time if it has several replicas, but one replica stays for the other requests.
    """

    def __init__(self, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._runs: list[IsolationRun] = []
        self._run_of: dict[str, IsolationRun] = {}  # by request
        self.ended = False  # a replica is free for others again

    def __len__(self) -> int:
        return len(self._runs)

    def record_crash(
        self,
        held: Sequence[ActiveRequest],
        replica: Replica,
        why: str,
        evidence: Evidence,
        begun: Callable[[ActiveRequest, str], bool],
        now: float,
    ) -> ActiveRequest | None:
        """Record the loss of a replica in the requests it held, and return the culprit, if any.

        Args:
            begun: whether the stage may have begun a request. One that it has not begun is not accused.
        """
        if not evidence:
            return None
        stage = replica.stage
        computing = [request for request in held if stage not in request.usage]
        accused = [request for request in computing if begun(request, stage)]
        # If suspects were running, others that were there are not to blame.
        accused = [request for request in accused if request.suspected_by == stage] or accused
        for request in held:
            counts = evidence if request in accused else Evidence.NONE
            seconds = now - request.opened_at.get(stage, now)
            request.losses.append(Loss(replica.replica_id, why, counts, len(computing) == 1, seconds))
        suspects = [request for request in accused if request.evidence(stage) >= SUSPECT]
        if len(computing) == 1 and suspects and suspects[0].evidence(stage, alone=True) >= GUILTY:
            return suspects[0]
        self._group([each for each in suspects if each.suspected_by in (None, stage)], stage, evidence)
        return None

    def _group(self, suspects: Sequence[ActiveRequest], stage: str, evidence: Evidence) -> None:
        """Put suspects that were running when a replica died into two groups."""
        middle = (len(suspects) + 1) // 2
        groups = []
        for half in filter(None, (suspects[:middle], suspects[middle:])):
            groups.append(IsolationRun(stage, {request.request_id: request for request in half}))
            for request in half:
                self.clear(request)
                request.suspected_by = stage
                self._run_of[request.request_id] = groups[-1]
        # If it crashed, it was one of these, and the sooner it is found the better. After a kill the others go first.
        self._runs = [*groups, *self._runs] if evidence is Evidence.CRASHED else [*self._runs, *groups]

    def clear_others(self, culprit: ActiveRequest, others: Iterable[ActiveRequest]) -> None:
        """Stop counting losses that the culprit explains."""
        explained = {loss.replica_id for loss in culprit.losses if loss.evidence}
        for request in others:
            if request is culprit or not request.losses:
                continue
            request.forgive(explained.__contains__)
            if request.suspected_by is not None and request.evidence(request.suspected_by) < SUSPECT:
                self.clear(request)

    def clear(self, request: ActiveRequest) -> None:
        """Let a suspect go that has passed or has ended. Idempotent."""
        request.suspected_by = None
        run = self._run_of.pop(request.request_id, None)
        if run is not None:
            del run.members[request.request_id]
            if not run.members:
                self._release(run)
                self._runs.remove(run)

    def replica_for(self, request: ActiveRequest, now: float) -> Replica | None:
        """The replica that a suspect and its group have to themselves; `None` if there is none yet."""
        run = self._run_of[request.request_id]
        if run.replica is None:
            replica = self._replicas.choose(run.stage) if self._may_start(run.stage) else None
            if replica is None:
                return None
            replica.reserved = True
            run.replica, run.until = replica, now + EMPTY_SECONDS
        if not run.started and (not run.replica.computing or now >= run.until):
            run.started, run.until = True, now + 2 * max(map(_seconds_to_pass, run.members.values()))
        return run.replica if run.started and run.replica.serves else None

    def _may_start(self, stage: str) -> bool:
        """Whether one more replica may be kept for suspects. Of several, one is left to the other requests."""
        running = sum(run.stage == stage and run.replica is not None for run in self._runs)
        replicas = [replica for replica in self._replicas.of(stage) if not replica.spare]
        coming = sum(replica.state not in (ReplicaState.DEAD, ReplicaState.DRAINING) for replica in replicas)
        return running < (sum(replica.serves for replica in replicas) - 1 if coming > 1 else 1)

    def tick(self, now: float) -> None:
        """Clear those that have run for long enough, and end the runs that are over or cannot go on."""
        for run in list(self._runs):
            replica = run.replica
            if replica is None:
                continue
            running = [request for request in run.members.values() if request.request_id in replica.requests]
            for request in running:
                if now >= request.opened_at[run.stage] + _seconds_to_pass(request):
                    self._pass(request, run.stage)
            if not run.members:
                continue  # that was the last one
            if not (self._replicas.at(replica.replica_id) is replica and replica.serves):
                self._release(run)  # it starts over, on the next replica that is free
            elif now >= run.until + MARGIN_SECONDS or (run.started and not running):  # the rest wait for other stages
                self._release(run)
                self._runs.remove(run)
                self._runs.append(run)

    def _pass(self, request: ActiveRequest, stage: str) -> None:
        request.forgive(lambda lost: lost.stage == stage)
        self.clear(request)

    def rank(self, request: ActiveRequest) -> int:
        """The place of a request among those that wait: suspects in the order of their runs, then all others."""
        run = self._run_of.get(request.request_id)
        return self._runs.index(run) if run is not None else len(self._runs)

    def _release(self, run: IsolationRun) -> None:
        if run.replica is not None:
            run.replica.reserved = False
            run.replica, run.started, run.until = None, False, math.inf
            self.ended = True


def _seconds_to_pass(request: ActiveRequest) -> float:
    """Seconds for which a suspect has to run without a crash."""
    stage = request.suspected_by
    before = [loss.seconds for loss in request.losses if loss.evidence and loss.replica_id.stage == stage]
    return min(RUN_SECONDS, 2 * max(before, default=0.0) + MARGIN_SECONDS)


def poison(request: ActiveRequest, stage: str) -> Poison:
    """The error of a request that is blamed for the deaths of a stage's replicas."""
    count = sum(loss.replica_id.stage == stage and loss.evidence > 0 for loss in request.losses)
    text = f"{counted(count, 'replica')} died computing this request: {request.history()}."
    return Poison(text, stage=stage)
