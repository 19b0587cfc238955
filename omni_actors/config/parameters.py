"""Parameters that models declare: checks a request's against them, and shows them with the pipeline's defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from omni_actors.errors import InvalidRequest, suggest
from omni_actors.protocol.parameters import Parameter
from omni_actors.protocol.payloads import DECLARED_PARAMS, StageParams

ALWAYS = "seed"  # a parameter of every stage


def with_defaults(declared: Sequence[Parameter] | None, defaults: StageParams) -> tuple[Parameter, ...] | None:
    """Return the declared parameters with the defaults that a pipeline's YAML sets in place of the model's."""
    if declared is None:
        return None
    given = defaults.given()
    given.update(given.pop("extra_args", {}))
    return tuple(msgspec.structs.replace(one, default=given.get(one.name, one.default)) for one in declared)


def check_parameters(stage: str, declared: Sequence[Parameter] | None, params: StageParams) -> None:
    """Check `params`; `declared` is `None` for a model that declares nothing, which has those of its kind of stage.

    Raises:
        InvalidRequest: one is not declared, or its value is outside the declared limits; `field` names it.
    """
    given = params.given()
    for name in given if declared is None else ():
        if name in DECLARED_PARAMS:
            raise InvalidRequest(f"The model of stage {stage!r} has no parameter {name!r}.", field=name)
    if declared is None:
        return
    known = {parameter.name: parameter for parameter in declared}
    for name, value in {**given.pop("extra_args", {}), **given}.items():
        if name == ALWAYS:
            continue
        if name not in known:
            raise InvalidRequest(
                f"The model of stage {stage!r} has no parameter {name!r}.{suggest(name, known)}", field=name
            )
        if problem := known[name].problem(value):
            raise InvalidRequest(f"{name} of stage {stage!r} {problem}.", field=name)


def unknown_adapter(name: str, known: Iterable[str]) -> InvalidRequest:
    """The refusal of a LoRA adapter that the pipeline does not have."""
    return InvalidRequest(
        f"There is no adapter {name[:200]!r}.{suggest(name[:200], list(known))}",
        hint="`omni-actors ctl lora list` has the names of all adapters.",
        field="adapter",
    )
