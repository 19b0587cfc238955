"""Arguments of calls that answer many prompts: checked, and spread over prompts and stages."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from omni_actors.client.async_client import AsyncOmniClient
from omni_actors.client.prompts import to_params
from omni_actors.errors import InvalidRequest, suggest
from omni_actors.protocol.client import Submit
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, StageParams

OneStageParams = StageParams | Mapping[str, Any] | None
PipelineParams = Mapping[str, OneStageParams] | Sequence[OneStageParams]

_SUBMIT = typing.get_type_hints(Submit, include_extras=True)
_PER_PROMPT: dict[str, Any] = {
    **{name: _SUBMIT[name] for name in ("voice", "seed", "priority", "traceparent")},
    "modalities": _SUBMIT["modalities"] | None,
    "timeout": float | None,
    "request_id": str | None,
    ADDITIONAL_INFORMATION: dict[str, Any] | None,
}
# Media and the like are one value for all prompts: they are lists already. Those of single prompts go in the prompts.
_FOR_ALL = frozenset(inspect.signature(AsyncOmniClient.submit).parameters) - {"self", "prompt", "params", *_PER_PROMPT}


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list or a tuple, and not a text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def spread(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """Return `given` once per prompt: a list has one value for each of `count` prompts, anything else is for all.

    Args:
        kind: type of one value, as msgspec understands it.

    Raises:
        InvalidRequest: the list has another length, or a value another type; `name` is in the message.
    """
    values = list(given) if is_list(given) else [given] * count
    if len(values) != count:
        raise InvalidRequest(
            f"{name} has {len(values)} values for {count} prompts.", hint="Give one value for all, or one for each."
        )
    try:
        return [msgspec.convert(value, kind) for value in values]
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"{name}: {error}.", hint="Give one value for all prompts, or a list of them.") from error


def spread_options(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the options of `AsyncOmniClient.submit` for each of `count` prompts.

    Raises:
        InvalidRequest: an option is unknown, or `spread` refuses it.
    """
    result: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, given in options.items():
        if name in _FOR_ALL:
            values = [given] * count
        elif name not in _PER_PROMPT:
            raise InvalidRequest(f"There is no option {name!r}.{suggest(name, [*_PER_PROMPT, *_FOR_ALL])}")
        elif name == "modalities" and is_list(given) and all(isinstance(item, str) for item in given):
            values = spread(name, [given] * count, _PER_PROMPT[name], count)
        else:
            values = spread(name, given, _PER_PROMPT[name], count)
        for own, value in zip(result, values, strict=True):
            own[name] = value
    return result


def params_by_stage(name: str, given: PipelineParams | None, stages: Sequence[str]) -> dict[str, StageParams]:
    """Return parameters by stage name.

    Args:
        name: of the argument, for errors.
        given: a mapping by stage name, or a list with one entry for each of `stages`; an entry is a `StageParams`, a
            mapping of its fields, or `None` for the stage's defaults.
        stages: the stages that take parameters, in the pipeline's order.

    Raises:
        InvalidRequest: it has another form, or a parameter is unknown or out of range.
    """
    listed = ", ".join(stages) or "none"
    if given is None:
        return {}
    if isinstance(given, Mapping):
        entries = dict(given)
        if wrong := [stage for stage in entries if not isinstance(stage, str)]:
            raise InvalidRequest(f"{name} is a mapping by stage name; {wrong[0]!r} is none. The stages are {listed}.")
    elif is_list(given):
        if len(given) != len(stages):
            raise InvalidRequest(
                f"{name} has {len(given)} entries for {len(stages)} stages. A list has one entry for each stage that "
                f"takes parameters, in this order: {listed}.",
                hint="Use None for a stage's defaults, or a mapping by stage name.",
            )
        entries = dict(zip(stages, given, strict=True))
    else:
        raise InvalidRequest(
            f"{name} is a {type(given).__name__}; it is a mapping by stage name, or a list with one entry for each of "
            f"these stages: {listed}."
        )
    for stage, entry in entries.items():
        _check_entry(f"{name}, stage {stage!r}", entry, stages)
    return to_params({stage: entry for stage, entry in entries.items() if entry is not None})


def _check_entry(where: str, entry: object, stages: Sequence[str]) -> None:
    if entry is not None and not isinstance(entry, StageParams | Mapping):
        raise InvalidRequest(
            f"{where}: the parameters of a stage are a mapping such as {{'max_tokens': 64}}, a StageParams or None; "
            f"got a {type(entry).__name__}."
        )
    if isinstance(entry, Mapping) and set(entry) & set(stages):
        raise InvalidRequest(
            f"{where}: the entry is a mapping by stage name.",
            hint="Parameters of single prompts go in params_per_prompt.",
        )


def params_of_prompts(
    count: int,
    stages: Sequence[str],
    sampling_params: PipelineParams | None,
    sampling_params_list: Sequence[OneStageParams] | None,
    params_per_prompt: Sequence[PipelineParams | None] | None,
) -> list[dict[str, StageParams]]:
    """Return the parameters by stage of each prompt, from the three arguments that can hold them.

    Raises:
        InvalidRequest: more than one is given, or one has the wrong form or length.
    """
    given = {
        "sampling_params": sampling_params,
        "sampling_params_list": sampling_params_list,
        "params_per_prompt": params_per_prompt,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)} are given; they exclude one another.", hint="Give one of them.")
    if params_per_prompt is not None:
        if not is_list(params_per_prompt):
            raise InvalidRequest(f"params_per_prompt is a list; got a {type(params_per_prompt).__name__}.")
        if len(params_per_prompt) != count:
            raise InvalidRequest(f"params_per_prompt has {len(params_per_prompt)} entries for {count} prompts.")
        return [
            params_by_stage(f"params_per_prompt[{index}]", own, stages) for index, own in enumerate(params_per_prompt)
        ]
    if sampling_params_list is None:
        return [params_by_stage("sampling_params", sampling_params, stages)] * count
    if not is_list(sampling_params_list):
        raise InvalidRequest(
            f"sampling_params_list is a list with one entry per stage; got a {type(sampling_params_list).__name__}.",
            hint="A mapping by stage name goes in sampling_params.",
        )
    return [params_by_stage("sampling_params_list", sampling_params_list, stages)] * count
