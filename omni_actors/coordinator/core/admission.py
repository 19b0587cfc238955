"""The way in: checks whether a request may run and with which parameters, and has it wait for a slot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from omni_actors.config import Modality, PipelineConfig, StageConfig, check_parameters, unknown_adapter
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.request import ActiveRequest, Retained
from omni_actors.coordinator.core.routing import Planner
from omni_actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    StageUnavailable,
    UnknownModality,
    UnknownVoice,
    counted,
    suggest,
)
from omni_actors.media.limits import check_counts
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.delivery import Delivery
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import Submit
from omni_actors.protocol.payloads import DECLARED_PARAMS, TEXT_PARAMS, StageParams
from omni_actors.sharing import Budget, FairQueue, Tenant, Ticket


def size_of(submit: Submit, buffers: Sequence[Frame]) -> int:
    """Bytes of a request's prompt, media and additional information, roughly."""
    texts = sum(len(part.text or "") for message in submit.prompt.messages for part in message.content)
    given = len(submit.prompt.token_ids) + submit.information.size
    return texts + given + sum(memoryview(buffer).nbytes for buffer in buffers)


def _check_lengths(stage: str, params: StageParams) -> None:
    if params.min_tokens is not None and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"Stage {stage!r}: min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}.",
            field="min_tokens",
        )


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(str(value) for value in values) or "nothing"


RETRY_AFTER_SECONDS = 1.0


class Gate:
    """Makes requests of what clients send; `slots` says who runs.

    Args:
        retained: bytes of input that are kept for requests that run.
        first_attempt: the number of the first attempt at each.
    """

    def __init__(
        self, pipeline: PipelineConfig, replicas: ReplicaTable, planner: Planner, retained: Budget, first_attempt: int
    ) -> None:
        self._first_attempt = first_attempt
        self._pipeline = pipeline
        self._replicas = replicas
        self._planner = planner
        self._retained = retained
        settings = pipeline.coordinator
        self.slots = FairQueue(
            settings.max_in_flight,
            settings.max_queued,
            settings.retain_bytes,
            lambda stages: any(True for _ in self._congested(stages)),
        )

    @property
    def max_input_tokens(self) -> int:
        """The longest prompt that every replica of the entry stage takes; 0 while none has said."""
        limits = [replica.facts.max_input_tokens for replica in self._replicas.of(self._pipeline.entry.name)]
        return min((limit for limit in limits if limit), default=0)

    @property
    def max_media(self) -> dict[str, int]:
        """How many media a prompt may have, by modality, for every replica of the entry stage."""
        most: dict[str, int] = {}
        for replica in self._replicas.of(self._pipeline.entry.name):
            for modality, count in replica.facts.max_media.items():
                most[modality] = min(count, most.get(modality, count))
        return most

    def admit(
        self, client: bytes, header: Header, submit: Submit, buffers: Sequence[Frame], now: float
    ) -> ActiveRequest:
        """Check a request against the pipeline and its state. Raises `OmniError`."""
        deadline = self._deadline(header.deadline, now)
        stages = self._stages(submit)
        params = self._params(submit.params, stages)
        if submit.more_text is not None:
            self._check_text_in_parts()
        size = size_of(submit, buffers)
        for stage in stages:
            waits = self._planner.may_wait_for(stage) and self._retained.fits(size)
            if not waits and self._replicas.choose(stage) is None:
                raise StageUnavailable(f"No replica of stage {stage!r} is ready.", stage=stage)
        return ActiveRequest(
            header.request_id,
            client,
            stages,
            frozenset(submit.modalities),
            deadline,
            params=params,
            seed=submit.seed,
            attempt=self._first_attempt,
            delivery=Delivery(submit.delivered),
            voice=submit.voice,
            priority=submit.priority,
            retained=Retained(submit.prompt, buffers, size, submit.information),
            parts=self._planner.router.parts(submit.prompt, buffers, params),
            information=frozenset(submit.information.entries),
            more_text=submit.more_text,
            text_length=len(submit.prompt.only_text or "") if submit.more_text is not None else 0,
        )

    def _deadline(self, given: float, now: float) -> float:
        """The Unix time by which a request has to be done; `given` is 0 for the default.

        Raises:
            InvalidRequest: the deadline is not finite, or too far away.
            DeadlineExceeded: it has passed.
        """
        if not math.isfinite(given):
            raise InvalidRequest(f"Deadline must be a finite Unix timestamp; got {given}.")
        latest = self._pipeline.coordinator.max_timeout
        if given > now + latest:
            raise InvalidRequest(f"The deadline is {given - now:.0f} s away; at most {latest:g} s are allowed.")
        deadline = given or now + min(self._pipeline.coordinator.default_timeout, latest)
        if deadline <= now:
            raise DeadlineExceeded("The deadline had passed before the request arrived.")
        return deadline

    def _stages(self, submit: Submit) -> tuple[str, ...]:
        """Check modalities, voice and prompt. Returns the stages of the request, in order of the graph.

        Raises:
            UnknownModality, UnknownVoice, PromptTooLong, InvalidRequest: naming the valid values.
        """
        offered = self._pipeline.modalities
        for modality in submit.modalities:
            if modality not in offered:
                raise UnknownModality(
                    f"The output modality {modality!r} is not offered; this pipeline answers in {_listed(offered)}."
                )
        voices = self._replicas.voices if submit.voice is not None else ()
        if voices and submit.voice not in voices:
            raise UnknownVoice(f"There is no voice {submit.voice!r}; the voices are {_listed(voices)}.")
        tokens = submit.prompt.length  # those of a text are counted by its stage
        longest = self.max_input_tokens if tokens else 0
        if 0 < longest < tokens:
            raise PromptTooLong(f"The prompt has {tokens} tokens; at most {longest} are allowed.")
        check_counts((medium.modality for medium in submit.prompt.media), self.max_media)
        return self._pipeline.route(submit.modalities)

    def _params(self, given: Mapping[str, StageParams], stages: Sequence[str]) -> dict[str, StageParams]:
        """Check the parameters of a request for these stages. Returns those of all stages. Raises `InvalidRequest`."""
        names = [stage.name for stage in self._pipeline.stages]
        for name in given:
            if name not in names:
                raise InvalidRequest(
                    f"Parameters for the unknown stage {name!r}.{suggest(name, names)}", field="params"
                )
        params = {}
        for stage in self._pipeline.stages:
            own = given.get(stage.name)
            if own is not None:
                self._check_own(stage, own)
            params[stage.name] = own.merged_over(stage.sampling) if own is not None else stage.sampling
            _check_lengths(stage.name, params[stage.name])
        for name in stages[:-1]:
            if params[name].max_tokens == 0:
                raise InvalidRequest(
                    f"Stage {name!r}: with max_tokens 0 it only computes the prompt, and {stages[-1]!r} would get "
                    "nothing.",
                    hint=f"Ask for the outputs of {name!r} alone.",
                    field="max_tokens",
                )
        for own in params.values():
            if own.adapter is not None and own.adapter not in self._pipeline.adapters:
                raise unknown_adapter(own.adapter, self._pipeline.adapters)
        return params

    def _check_own(self, stage: StageConfig, own: StageParams) -> None:
        """Check what a request gives for a stage. The engine checks what a model that is not loaded yet declares."""
        for parameter in own.given():
            if parameter not in stage.params:
                what = "which makes no text" if parameter in TEXT_PARAMS else f"of kind {stage.kind}"
                raise InvalidRequest(
                    f"{parameter} does not apply to stage {stage.name!r}, {what}."
                    f"{suggest(parameter, stage.params - DECLARED_PARAMS)}",
                    field=parameter,
                )
        if own.max_tokens == 0 and Modality.TEXT not in stage.outputs:
            raise InvalidRequest(
                f"max_tokens must be at least 1 for stage {stage.name!r}, which makes no text.", field="max_tokens"
            )
        if (loaded := self._replicas.loaded(stage.name)) is not None:
            check_parameters(stage.name, loaded.facts.parameters, own)

    def _check_text_in_parts(self) -> None:
        entry = self._replicas.loaded(self._pipeline.entry.name)
        if entry is None or entry.facts.speech is None or not entry.facts.speech.text_in_parts:
            raise InvalidRequest(
                "This pipeline takes no text in parts.", hint="Send whole sentences, a request each.", field="more_text"
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
