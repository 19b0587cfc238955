"""The way in: checks a request, and has it wait for a slot until it is its client's turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.admission import admit, deadline_of, size_of
from omni_actors.coordinator.core.planning import Planner
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.requests import ActiveRequest, Retained
from omni_actors.coordinator.core.slots import Slots, Tenant, Ticket
from omni_actors.errors import Overloaded, StageUnavailable, counted
from omni_actors.protocol.client import Submit
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.header import Header

RETRY_AFTER_SECONDS = 1.0


class Gate:
    """Makes requests of what clients send; `slots` says who runs.

    Args:
        new_seed: gives the seed of a request that brings none.
        may_retain: whether so many more bytes of input can be kept for requests that run.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        replicas: ReplicaTable,
        planner: Planner,
        new_seed: Callable[[], int],
        may_retain: Callable[[int], bool],
    ) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._planner = planner
        self._new_seed = new_seed
        self._may_retain = may_retain
        settings = pipeline.coordinator
        self.slots = Slots(
            settings.max_in_flight,
            settings.max_queued,
            settings.retain_bytes,
            lambda stages: any(True for _ in self._congested(stages)),
        )

    @property
    def max_input_tokens(self) -> int:
        """The longest prompt that every replica of the entry stage takes; 0 while none has said."""
        limits = [replica.max_input_tokens for replica in self._replicas.of(self._pipeline.entry.name)]
        return min((limit for limit in limits if limit), default=0)

    @property
    def max_media(self) -> dict[str, int]:
        """How many media a prompt may have, by modality, for every replica of the entry stage."""
        most: dict[str, int] = {}
        for replica in self._replicas.of(self._pipeline.entry.name):
            for modality, count in replica.max_media.items():
                most[modality] = min(count, most.get(modality, count))
        return most

    def admit(
        self, client: bytes, header: Header, submit: Submit, buffers: Sequence[Frame], now: float
    ) -> ActiveRequest:
        """Check a request against the pipeline and its state. Raises `OmniError`."""
        deadline = deadline_of(self._pipeline.coordinator, header.deadline, now)
        longest = self.max_input_tokens if submit.prompt.length else 0
        loaded = {stage: replica for stage in submit.params if (replica := self._replicas.loaded(stage)) is not None}
        parameters = {stage: replica.parameters for stage, replica in loaded.items()}
        admitted = admit(
            self._pipeline,
            submit,
            self._replicas.voices if submit.voice is not None else (),
            longest,
            self.max_media,
            parameters,
        )
        size = size_of(submit, buffers)
        for stage in admitted.stages:
            waits = self._planner.may_wait_for(stage) and self._may_retain(size)
            if self._replicas.choose(stage) is None and not waits:
                raise StageUnavailable(f"No replica of stage {stage!r} is ready.", stage=stage)
        return ActiveRequest(
            header.request_id,
            client,
            admitted.stages,
            admitted.modalities,
            deadline,
            params=admitted.params,
            seed=submit.seed if submit.seed is not None else self._new_seed(),
            voice=submit.voice,
            priority=submit.priority,
            retained=Retained(submit.prompt, buffers, size, submit.information),
            parts=self._planner.router.parts(submit.prompt, buffers, admitted.params),
            information=frozenset(submit.information.entries) if submit.information is not None else frozenset(),
        )

    def enter(self, request: ActiveRequest, tenant: str, key: bytes) -> list[str]:
        """Have a request wait for a slot. Returns the ids of others that the queue has no place for any more.

        Raises:
            Overloaded: it has no place for this one.
        """
        size = request.retained.size if request.retained is not None else 0
        ticket = Ticket(
            request.request_id,
            key or request.client,
            Tenant(request.client, tenant),
            request.priority,
            size,
            request.stages,
        )
        crowded_out = self.slots.enter(ticket)
        if request.request_id in crowded_out:
            raise self.overloaded(next(self._congested(request.stages), None))
        return crowded_out

    def overloaded(self, congested: Replica | None = None) -> Overloaded:
        """The error of a request that has no place in the queue, for the sake of a stage if one takes no input."""
        stage, why = None, f"{self.slots.held} of {self._pipeline.coordinator.max_in_flight} slots are taken"
        if congested is not None:
            stage, why = congested.stage, f"Stage {congested.stage!r} takes no more input for now"
        return Overloaded(
            f"{why}, with {counted(self.slots.waiting, 'request')} waiting.",
            hint="Try again later, or with fewer requests at a time: the client with the most is refused first.",
            stage=stage,
            retry_after=RETRY_AFTER_SECONDS,
        )

    def _congested(self, stages: tuple[str, ...]) -> Iterator[Replica]:
        """Replicas that would get a request for these stages now, and take no more input."""
        for stage in stages:
            replica = self._replicas.choose(stage)
            if replica is not None and replica.congested:
                yield replica
