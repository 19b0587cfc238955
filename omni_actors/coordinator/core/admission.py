"""Admission: checks whether a request may run, and with which parameters, before any work starts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from omni_actors.config import CoordinatorConfig, Modality, PipelineConfig, check_parameters, unknown_adapter
from omni_actors.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, UnknownModality, UnknownVoice, suggest
from omni_actors.media.limits import check_counts
from omni_actors.protocol.client import Submit
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, DECLARED_PARAMS, TEXT_PARAMS, Parameter, StageParams


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """The stages that a request needs, in order of the graph, and the parameters of each."""

    stages: tuple[str, ...]
    params: dict[str, StageParams]
    modalities: frozenset[str]


def admit(
    pipeline: PipelineConfig,
    submit: Submit,
    voices: tuple[str, ...],
    max_input_tokens: int = 0,
    max_media: Mapping[str, int] | None = None,
    parameters: Mapping[str, Sequence[Parameter] | None] | None = None,
) -> AdmittedRequest:
    """Check a request against the pipeline.

    Args:
        max_input_tokens: longest prompt of token ids, 0 for unknown. The tokens of a text are counted by its stage.
        max_media: how many media a prompt may have, by modality; no limit for those that are missing.
        parameters: those that the models declare, by stage, or `None`. The engine checks those of a missing stage.

    Raises:
        UnknownModality, UnknownVoice, PromptTooLong, InvalidRequest: naming the valid values.
    """
    offered = pipeline.modalities
    for modality in submit.modalities:
        if modality not in offered:
            raise UnknownModality(
                f"The output modality {modality!r} is not offered; this pipeline answers in {_listed(offered)}."
            )
    if submit.voice is not None and voices and submit.voice not in voices:
        raise UnknownVoice(f"There is no voice {submit.voice!r}; the voices are {_listed(voices)}.")
    tokens = submit.prompt.length
    if 0 < max_input_tokens < tokens:
        raise PromptTooLong(f"The prompt has {tokens} tokens; at most {max_input_tokens} are allowed.")
    check_counts((medium.modality for medium in submit.prompt.media), max_media or {})
    stages = pipeline.route(submit.modalities)
    params = _stage_params(pipeline, submit.params, parameters or {})
    for name in stages[:-1]:
        if params[name].max_tokens == 0:
            raise InvalidRequest(
                f"Stage {name!r}: with max_tokens 0 it only computes the prompt, and {stages[-1]!r} would get nothing.",
                hint=f"Ask for the outputs of {name!r} alone.",
                field="max_tokens",
            )
    for given in params.values():
        if given.adapter is not None and given.adapter not in pipeline.adapters:
            raise unknown_adapter(given.adapter, pipeline.adapters)
    return AdmittedRequest(stages, params, frozenset(submit.modalities))


def deadline_of(coordinator: CoordinatorConfig, given: float, now: float) -> float:
    """The Unix time by which a request has to be done; `given` is 0 for the default.

    Raises:
        InvalidRequest: the deadline is not finite, or too far away.
        DeadlineExceeded: it has passed.
    """
    if not math.isfinite(given):
        raise InvalidRequest(f"Deadline must be a finite Unix timestamp; got {given}.")
    latest = coordinator.max_timeout
    if given > now + latest:
        raise InvalidRequest(f"The deadline is {given - now:.0f} s away; at most {latest:g} s are allowed.")
    deadline = given or now + min(coordinator.default_timeout, latest)
    if deadline <= now:
        raise DeadlineExceeded("The deadline had passed before the request arrived.")
    return deadline


def size_of(submit: Submit, buffers: Sequence[Frame]) -> int:
    """Bytes of a request's prompt, media and additional information, roughly."""
    texts = sum(len(part.text or "") for message in submit.prompt.messages for part in message.content)
    information = submit.information.size if submit.information is not None else 0
    return texts + len(submit.prompt.token_ids) + information + sum(memoryview(buffer).nbytes for buffer in buffers)


def unwanted_information(
    names: Iterable[str], wanted: Collection[str], stages: tuple[str, ...]
) -> InvalidRequest | None:
    """The refusal of additional information that no stage of the route wants; `None` if each name is wanted."""
    for name in sorted(names):
        if name not in wanted:
            return InvalidRequest(
                f"{ADDITIONAL_INFORMATION}: none of the stages {_listed(stages)} wants {name!r}."
                f"{suggest(name, wanted)}",
                hint="A stage names what it wants in EngineFacts or in its StreamProcessor (docs/extending.md).",
            )
    return None


def _stage_params(
    pipeline: PipelineConfig, given: Mapping[str, StageParams], declared: Mapping[str, Sequence[Parameter] | None]
) -> dict[str, StageParams]:
    names = [stage.name for stage in pipeline.stages]
    for name in given:
        if name not in names:
            raise InvalidRequest(f"Parameters for the unknown stage {name!r}.{suggest(name, names)}")
    merged = {}
    for stage in pipeline.stages:
        own = given.get(stage.name)
        for parameter in own.given() if own is not None else ():
            if parameter not in stage.params:
                what = "which makes no text" if parameter in TEXT_PARAMS else f"of kind {stage.kind}"
                raise InvalidRequest(
                    f"{parameter} does not apply to stage {stage.name!r}, {what}."
                    f"{suggest(parameter, stage.params - DECLARED_PARAMS)}",
                    field=parameter,
                )
        if own is not None and own.max_tokens == 0 and Modality.TEXT not in stage.outputs:
            raise InvalidRequest(
                f"max_tokens must be at least 1 for stage {stage.name!r}, which makes no text.", field="max_tokens"
            )
        if own is not None and stage.name in declared:
            check_parameters(stage.name, declared[stage.name], own)
        merged[stage.name] = own.merged_over(stage.sampling) if own is not None else stage.sampling
        _check_lengths(stage.name, merged[stage.name])
    return merged


def _check_lengths(stage: str, params: StageParams) -> None:
    if params.min_tokens is not None and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"Stage {stage!r}: min_tokens {params.min_tokens} exceeds max_tokens {params.max_tokens}.",
            field="min_tokens",
        )


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(str(value) for value in values) or "nothing"
