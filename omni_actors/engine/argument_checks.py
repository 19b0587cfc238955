"""Checks single arguments of vLLM's EngineArgs by type and range, without a checkpoint or a GPU."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_type_hints

import vllm.config
from pydantic import Field, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs

# In this order: several of vLLM's classes have fields of the same name, and the first ones are those that are used.
_CONFIGS = ("ModelConfig", "CacheConfig", "ParallelConfig", "SchedulerConfig", "LoadConfig", "MultiModalConfig")
# Where vLLM has no limit: memory for any of these is taken at the start, or the stage would wait for GPUs for ever.
_ADDED = {
    "max_num_seqs": Field(le=1 << 16),
    "max_num_batched_tokens": Field(le=1 << 24),
    "max_model_len": Field(le=1 << 26),
    "block_size": Field(le=1 << 16),
    "tensor_parallel_size": Field(le=1024),
    "pipeline_parallel_size": Field(le=1024),
    "kv_cache_memory_bytes": Field(ge=1, le=1 << 44),
    "num_gpu_blocks_override": Field(ge=1, le=1 << 32),
    "seed": Field(ge=0, le=(1 << 63) - 1),
}


def problem_of(name: str, value: object) -> str:
    """Say what is wrong with an argument; "" if nothing is, or if vLLM's annotation cannot be evaluated."""
    return wrong_type(name, value) or out_of_range(name, value)


def wrong_type(name: str, value: object) -> str:
    """Say what is wrong with the type of an argument; "" if nothing is, or if vLLM's annotation cannot be evaluated.

    Numbers, words and switches must have the type itself, so that `"8"` is not a number. A mapping may stand for an
    object of vLLM's configuration.
    """
    argument = next(item for item in dataclasses.fields(EngineArgs) if item.name == name)
    if value is None and argument.default is None:
        return ""  # not every annotation admits the default
    # One by one: some annotations of vLLM name types that exist for its type checker alone.
    holder = type("Holder", (), {"__annotations__": {name: argument.type}})
    try:
        adapter = TypeAdapter(get_type_hints(holder, vars(arg_utils), include_extras=True)[name])
    except (NameError, PydanticUserError, PydanticSchemaGenerationError):  # a type that only vLLM itself can build
        return ""
    return _problem(adapter, value, strict=not isinstance(value, dict | list))


def out_of_range(name: str, value: object) -> str:
    """Say which limit a number exceeds, of vLLM's own or of ours; "" if none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    for limit in [*_limits(name), *([_ADDED[name]] if name in _ADDED else [])]:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[int | float, limit])
        if problem := _problem(adapter, value, strict=True):
            return problem
    return ""


def _limits(name: str) -> list[Any]:
    """The limits that vLLM's configuration has for a field; it checks them only once it has read the checkpoint."""
    for config in _CONFIGS:  # a release that moves or renames one has no limits of it here, and still its own
        field = getattr(getattr(vllm.config, config, None), "__pydantic_fields__", {}).get(name)
        if field is not None and field.metadata:
            return list(field.metadata)
    return []


def _problem(adapter: TypeAdapter[Any], value: object, *, strict: bool) -> str:
    try:
        adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"] if isinstance(value, dict | list))
        return f"{path}: {first['msg']}" if path else first["msg"]
    return ""
