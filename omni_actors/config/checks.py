"""Checks of a well-formed configuration before anything starts, and of the modules and classes that it names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from omni_actors import envs
from omni_actors.config.checkpoint import check_models
from omni_actors.config.placement import gpus_of_replica, memory_plan, stage_devices
from omni_actors.config.schema import (
    BUILT_IN_IMPORT_PREFIXES,
    BUILT_IN_PROCESSORS,
    SOUND_PROCESSOR,
    ClusterConfig,
    CoordinatorConfig,
    DecodeConfig,
    HttpConfig,
    PipelineConfig,
    StageConfig,
    StageKind,
)
from omni_actors.errors import ConfigError, InvalidRequest, suggest
from omni_actors.host.addresses import TCP, is_address, is_loopback, stays_on_host, tcp_host
from omni_actors.host.run_directory import check_readable
from omni_actors.protocol.payloads import DECLARED_PARAMS, TEXT_PARAMS, Parameter, StageParams

LEAST_ARENA_BYTES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")
_OTLP = re.compile(r"https?://[^\s/:@]+(:\d{1,5})?(/\S*)?")
_OTLP_GRPC = re.compile(r"[^\s/:@]+:\d{1,5}")


def check_pipeline(pipeline: PipelineConfig, devices: int) -> None:
    """Raise `ConfigError` for the first thing wrong; `devices` is the number of GPUs of this host."""
    for plugin in pipeline.plugins:
        check_allowed(plugin, "plugins")
    entries = [stage.name for stage in pipeline.stages if stage.inputs is None]
    if len(entries) != 1:
        raise ConfigError(f"Exactly one stage has no inputs and takes the prompt; here: {entries or 'none'}.")
    if not pipeline.modalities:
        raise ConfigError("No stage has outputs: at least one stage needs outputs: [text] or [audio].")
    for modality in pipeline.modalities:
        producers = [stage.name for stage in pipeline.stages if modality in stage.outputs]
        if len(producers) > 1:
            raise ConfigError(f"The stages {producers} all output {modality}; one stage owns a modality.")
    _check_exposure(pipeline.coordinator, pipeline.cluster)
    _check_collector(pipeline.coordinator)
    check_models(pipeline)
    check_text_edges(pipeline)
    _check_tools(pipeline)
    for stage in pipeline.stages:
        where = f"stages.{stage.name}"
        if stage.sampling.max_tokens == 0:
            raise ConfigError(f"{where}.sampling.max_tokens must be at least 1; only a request can set it to 0.")
        for name in stage.sampling.given():
            if name not in stage.params:
                what = "a stage without text" if name in TEXT_PARAMS else f"a stage of kind {stage.kind}"
                raise ConfigError(f"{where}.sampling.{name} does not apply to {what}.{suggest(name, stage.params)}")
        _check_engine_class(stage, f"{where}.engine_class")
        if stage.executor == "ray":
            _check_ray(stage, where)
        if stage.decode is not None:
            _check_decode(stage.kind, stage.decode, f"{where}.decode")
        for key in ("steps_per_schedule", "multiprocessors"):
            if getattr(stage, key) is not None and stage.kind is not StageKind.AUTOREGRESSIVE:
                raise ConfigError(f"{where}.{key} does not apply to a stage of kind {stage.kind}.")
        if stage.inputs is not None:
            _check_processor(stage.inputs.processor, f"{where}.inputs.processor")
            if len(set(stage.source_names)) != len(stage.source_names):
                raise ConfigError(f"{where}.inputs.from names a stage twice: {list(stage.source_names)}.")
        if not stage.outputs and not pipeline.downstream(stage.name):
            raise ConfigError(f"{where}: its output goes nowhere; give it outputs, or make it the input of a stage.")
        _check_nodes(stage, where, pipeline.cluster)
        if pipeline.cluster.node_rank in stage.nodes:  # a host knows only its own GPUs
            _check_devices(stage, where, devices)
    if pipeline.cluster.node_rank >= pipeline.cluster.nnodes:
        raise ConfigError(
            f"cluster.node_rank: there is no node {pipeline.cluster.node_rank}; {_known_nodes(pipeline.cluster)}."
        )
    _check_memory_shares(pipeline, devices)
    _check_times(pipeline)
    _check_sizes(pipeline)


def _check_times(pipeline: PipelineConfig) -> None:
    coordinator = pipeline.coordinator
    times = {"coordinator.heartbeat_timeout": coordinator.heartbeat_timeout}
    times |= {f"stages.{stage.name}.stall_timeout": stage.stall_timeout for stage in pipeline.stages}
    for key, seconds in times.items():
        if seconds < 2 * coordinator.heartbeat_interval:  # a beat tells of both life and progress
            raise ConfigError(
                f"{key} ({seconds:g} s) must be at least twice coordinator.heartbeat_interval "
                f"({coordinator.heartbeat_interval:g} s)."
            )


def _check_sizes(pipeline: PipelineConfig) -> None:
    """Check sizes that must fit one in the other; a single one has its range in the schema."""
    limits = pipeline.limits
    least = limits.header_bytes + limits.body_bytes + limits.buffer_bytes
    if limits.message_bytes < least:
        raise ConfigError(
            f"limits.message_bytes ({limits.message_bytes}) is less than header_bytes, body_bytes and buffer_bytes "
            f"together ({least})."
        )
    check_http_sizes(pipeline.http)
    if 0 < pipeline.flow.arena_bytes < LEAST_ARENA_BYTES:
        raise ConfigError(
            f"flow.arena_bytes ({pipeline.flow.arena_bytes}) must be at least {LEAST_ARENA_BYTES}, or 0 for no arena."
        )


def _check_tools(pipeline: PipelineConfig) -> None:
    """Check what belongs to tools, which only a prompt stage or one of your own can put into a prompt."""
    template = pipeline.tool_chat_template
    if template is not None:
        check_readable(Path(template), "tool_chat_template")
        if pipeline.tool_call_parser is None:
            raise ConfigError(
                "tool_chat_template goes with tool_call_parser, which is not set.",
                hint="Set it to vLLM's name of the parser that fits the template, such as hermes.",
            )
    if pipeline.tool_call_parser is not None and pipeline.entry.kind is StageKind.ECHO:
        raise ConfigError("tool_call_parser: an echo stage calls no tools.", hint="Leave it out.")


def check_http_sizes(http: HttpConfig) -> None:
    """Raise `ConfigError` if the largest body could never be taken."""
    if http.bodies_bytes < http.body_bytes:
        raise ConfigError(f"http.bodies_bytes ({http.bodies_bytes}) is less than body_bytes ({http.body_bytes}).")


def _check_exposure(coordinator: CoordinatorConfig, cluster: ClusterConfig) -> None:
    """Require keys for endpoints that other hosts can reach. Host names are checked later, when they are bound."""
    listen = coordinator.listen
    host = tcp_host(listen)
    if listen != "ipc" and (host is None or not _HOST.fullmatch(host)):
        raise ConfigError(f"coordinator.listen: {listen!r} is neither 'ipc' nor {TCP}ADDRESS:PORT.")
    exposed = []
    if listen != "ipc" and not stays_on_host(listen):
        exposed.append(f"coordinator.listen: other hosts can reach {listen}")
    if cluster.nnodes > 1 and is_address(cluster.master_addr) and not is_loopback(cluster.master_addr):
        exposed.append(f"cluster.master_addr: other hosts can reach {cluster.master_addr}")
    if exposed and coordinator.keys_dir is None:
        raise ConfigError(
            f"{exposed[0]}, and there are no keys to keep strangers out.",
            hint="Make keys with omni-actors keys DIR and add --keys DIR; or use a loopback address (127.0.0.0/8).",
        )


def _check_collector(coordinator: CoordinatorConfig) -> None:
    endpoint, grpc = coordinator.otlp_endpoint, coordinator.otlp_protocol == "grpc"
    if endpoint is None or _OTLP.fullmatch(endpoint) or (grpc and _OTLP_GRPC.fullmatch(endpoint)):
        return
    raise ConfigError(
        f"coordinator.otlp_endpoint: {endpoint!r} is not the URL of a collector.", hint="For instance http://host:4318."
    )


def _check_decode(kind: StageKind, decode: DecodeConfig, where: str) -> None:
    if kind is not StageKind.DIFFUSION:
        raise ConfigError(f"{where} does not apply to a stage of kind {kind}; only diffusion stages decode.")
    check_chunks(decode, where)


def check_chunks(decode: DecodeConfig, where: str) -> None:
    """Check what needs no model; the model checks the rest against its own defaults. Raises `ConfigError`."""
    blocks = (decode.first_blocks, decode.largest_blocks, decode.look_ahead_blocks)
    if decode.policy == "whole" and any(count is not None for count in blocks):
        raise ConfigError(f"{where}.policy 'whole' has no chunks; remove the numbers of blocks.")
    if decode.first_blocks and decode.largest_blocks and decode.largest_blocks < decode.first_blocks:
        raise ConfigError(
            f"{where}.largest_blocks ({decode.largest_blocks}) is less than first_blocks ({decode.first_blocks})."
        )


def _check_engine_class(stage: StageConfig, where: str) -> None:
    if (stage.engine_class is not None) != (stage.kind is StageKind.CUSTOM):
        raise ConfigError(f"{where} is for stages of kind custom, and those need it; this one is of kind {stage.kind}.")
    if stage.engine_class is not None:
        if "." not in stage.engine_class:
            raise ConfigError(f"{where}: {stage.engine_class!r} is not the dotted path of a class.")
        check_allowed(stage.engine_class, where)


def _check_ray(stage: StageConfig, where: str) -> None:
    if stage.kind is not StageKind.AUTOREGRESSIVE:
        raise ConfigError(
            f"{where}.executor: ray is for autoregressive stages, and this one is of kind {stage.kind}.",
            hint="Leave it out, and give the stage `node` and `devices`.",
        )
    if stage.devices is not None:
        raise ConfigError(
            f"{where}.devices does not go with executor: ray, as Ray chooses the GPUs.", hint="Leave one of them out."
        )


def _check_processor(name: str, where: str) -> None:
    if "." in name:
        check_allowed(name, where)
    elif name not in BUILT_IN_PROCESSORS:
        raise ConfigError(f"{where}: unknown name {name!r}.{suggest(name, BUILT_IN_PROCESSORS)}")


def _check_devices(stage: StageConfig, where: str, devices: int) -> None:
    placed = stage_devices(stage, devices)
    if len(set(placed)) != len(placed):
        raise ConfigError(f"{where}.devices names a device twice: {placed}.")
    size = gpus_of_replica(stage)
    if len(placed) % size:
        raise ConfigError(
            f"{where}.devices names {len(placed)} GPUs, but a replica takes {size}.",
            hint=f"Name {size} GPUs for each replica of a node, or change engine.tensor_parallel_size or "
            "engine.pipeline_parallel_size.",
        )
    for device in placed:
        if device >= devices:
            have = f"devices 0 to {devices - 1}" if devices else "no GPU"
            raise ConfigError(
                f"{where}.devices: there is no device {device}; this host has {have}.",
                hint="Name others. For another host than this one, `omni-actors check` takes `--gpus N`.",
            )


def _check_nodes(stage: StageConfig, where: str, cluster: ClusterConfig) -> None:
    key = f"{where}.node"
    for rank in stage.nodes:
        if rank >= cluster.nnodes:
            raise ConfigError(
                f"{key}: there is no node {rank}; {_known_nodes(cluster)}.", hint="Set cluster.nnodes, or --nnodes."
            )
    if len(set(stage.nodes)) != len(stage.nodes):
        raise ConfigError(f"{key} names a node twice: {list(stage.nodes)}.")
    if len(stage.nodes) > stage.processes:
        raise ConfigError(
            f"{key} names {len(stage.nodes)} nodes, but there are {stage.processes} replicas and spares.",
            hint=f"Set {where}.replicas or {where}.spares.",
        )


def _known_nodes(cluster: ClusterConfig) -> str:
    return f"cluster.nnodes is {cluster.nnodes}, so there are nodes 0 to {cluster.nnodes - 1}"


def _check_memory_shares(pipeline: PipelineConfig, devices: int) -> None:
    """Check that the shares of each GPU fit. vLLM itself checks stages with explicit `kv_cache_memory_bytes`."""
    for (rank, device), shares in memory_plan(pipeline, devices).items():
        total = sum(share for _, share in shares)
        if total > 1.0:
            listed = ", ".join(f"{name} {share:g}" for name, share in shares)
            raise ConfigError(
                f"{device_name(pipeline, rank, device)} is promised {total:.2f} of its memory: {listed}.",
                hint="Lower engine.gpu_memory_utilization of these stages, or move one to another device.",
            )


def device_name(pipeline: PipelineConfig, rank: int, device: int) -> str:
    """A GPU as errors name it; without the node if there is only one."""
    return f"GPU {device} of node {rank}" if pipeline.cluster.nnodes > 1 else f"GPU {device}"


# ---------------------------------------------------------------------------------------------------------------------
# Modules and classes named in the YAML


def check_allowed(name: str, where: str) -> None:
    """Raise `ConfigError` unless a module or class lies below an allowed prefix, compared by whole words."""
    allowed = BUILT_IN_IMPORT_PREFIXES + envs.allowed_import_prefixes()
    if not any(f"{name}.".startswith(f"{prefix.rstrip('.')}.") for prefix in allowed):
        raise ConfigError(
            f"{where}: {name!r} is outside the allowed import prefixes {list(allowed)}.",
            hint="If you trust this code, add its prefix to OMNI_ACTORS_ALLOW_IMPORTS.",
        )


def resolve_class(name: str, registry: Mapping[str, type], base: type, where: str) -> type:
    """Return the class called `name`: from `registry`, or imported if it is a dotted path with an allowed prefix.

    Raises:
        ConfigError: the name is unknown, its prefix is not allowed, or the class is not a subclass of `base`.
    """
    if "." not in name:
        if name not in registry:
            raise ConfigError(f"{where}: unknown name {name!r}.{suggest(name, registry)}")
        return registry[name]
    check_allowed(name, where)
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{where}: {name!r} is not a subclass of {base.__name__}.")
    return found


TEXT_TAKERS = {  # kinds of stages that can take text by a processor
    "text2speech": (StageKind.AUTOREGRESSIVE, StageKind.ECHO, StageKind.CUSTOM),
    SOUND_PROCESSOR: (StageKind.ENCODER, StageKind.ECHO, StageKind.CUSTOM),
}


# -- text edges: a stage takes the text of another --------------------------------------------------------------------


def takes_text(stage: StageConfig) -> bool:
    """Whether a stage takes the text of the stage before it."""
    return stage.inputs is not None and stage.inputs.processor in TEXT_TAKERS


def sends_text(pipeline: PipelineConfig, name: str) -> bool:
    """Whether the stages after one take its text, in place of rows and tokens."""
    return any(takes_text(pipeline.stage(follower)) for follower in pipeline.downstream(name))


def check_text_edges(pipeline: PipelineConfig) -> None:
    """Raise `ConfigError` where text cannot be taken, and for a prompt stage that is not the first."""
    for stage in pipeline.stages:
        where = f"stages.{stage.name}"
        if stage.kind is StageKind.PROMPT and stage.inputs is not None:
            raise ConfigError(f"{where}.inputs: a stage of kind prompt takes what clients send: it is the first.")
        if stage.inputs is not None and takes_text(stage):
            _check_taker(pipeline, stage, stage.inputs.processor, where)


def _check_taker(pipeline: PipelineConfig, stage: StageConfig, processor: str, where: str) -> None:
    if stage.kind not in TEXT_TAKERS[processor]:
        raise ConfigError(
            f"{where}.inputs.processor: {processor!r} brings a text, and a stage of kind {stage.kind} takes none.",
            hint="text2speech is for stages that speak a text, sound2words for stages that align one.",
        )
    sources = [name for name in stage.source_names if pipeline.stage(name).kind is not StageKind.PROMPT]  # of text
    if len(sources) > 1 or (processor != SOUND_PROCESSOR and len(stage.source_names) > 1):
        besides = " besides a prompt stage" if processor == SOUND_PROCESSOR else ""
        raise ConfigError(
            f"{where}.inputs.from: {processor!r} takes one stage{besides}; here: {list(stage.source_names)}."
        )
    for source in sources:
        others = [name for name in pipeline.downstream(source) if not takes_text(pipeline.stage(name))]
        if others:
            raise ConfigError(
                f"{where}.inputs.from: {source!r} sends its text to this stage, so it cannot send rows or tokens to "
                f"{others}.",
                hint="Run the model in a second stage for the one or the other.",
            )


# -- LoRA adapters ----------------------------------------------------------------------------------------------------


def adapted_stages(pipeline: PipelineConfig) -> tuple[str, ...]:
    """The stages that run adapters: those whose text is an output, of diffusers, and whose latents become pictures."""
    kinds = (StageKind.AUTOREGRESSIVE, StageKind.ECHO)
    inputs = [stage.inputs for stage in pipeline.stages if stage.inputs is not None]
    drawing = {name for each in inputs if each.processor == "latents2image" for name in each.source_names}
    return tuple(
        stage.name
        for stage in pipeline.stages
        if stage.kind is StageKind.DIFFUSERS
        or stage.name in drawing
        or (stage.kind in kinds and "text" in stage.outputs)
    )


ALWAYS = "seed"  # a parameter of every stage


# -- parameters that models declare -----------------------------------------------------------------------------------


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
        hint="The pipeline's YAML names them as `adapters`.",
        field="adapter",
    )
