"""The pipeline's YAML: strict, checked before anything starts, every value with its source.

Precedence: command line > environment > SLURM > YAML > default. A key that is not known is an error that names the
nearest valid one; so is a stage graph with a cycle, a missing stage or a device that this host does not have.
"""

from __future__ import annotations

import collections
import difflib
import enum
import hashlib
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct

from omni_actors import envs, slurm
from omni_actors.addresses import TCP, is_address, is_loopback, stays_on_host, tcp_host
from omni_actors.errors import ConfigError
from omni_actors.messages import AUTOREGRESSIVE_PARAMS, DIFFUSION_PARAMS, Limits, StageParams

Seconds = Annotated[float, Meta(gt=0, le=1e7)]
VariableName = Annotated[str, Meta(pattern="^[A-Z][A-Z0-9_]{0,63}$")]
Rank = Annotated[int, Meta(ge=0, le=1023)]
StageName = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,31}$")]

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9  # vLLM's own default
BUILT_IN_IMPORT_PREFIXES = ("omni_actors.",)
BUILT_IN_PROCESSORS = ("passthrough", "thinker2talker", "talker2code2wav")  # those of stage/processors.py


class StageKind(enum.StrEnum):
    """What computes a stage."""

    PROMPT = "prompt"  # chat template, tokenizer, media processing
    AUTOREGRESSIVE = "autoregressive"  # a vLLM engine core with the omni scheduler
    DIFFUSION = "diffusion"  # a vLLM engine core without KV cache, one scheduled token per denoise step
    ECHO = "echo"  # no model: repeats its input; for tests and measurements of everything around the engine
    CUSTOM = "custom"  # a `StageEngine` of the user's own, named by `engine_class`


PARAMS_BY_KIND = {
    StageKind.PROMPT: frozenset[str](),
    StageKind.AUTOREGRESSIVE: AUTOREGRESSIVE_PARAMS,
    StageKind.DIFFUSION: DIFFUSION_PARAMS,
    StageKind.ECHO: AUTOREGRESSIVE_PARAMS | DIFFUSION_PARAMS,
    StageKind.CUSTOM: AUTOREGRESSIVE_PARAMS | DIFFUSION_PARAMS,  # which of them mean something, the engine says
}


class Modality(enum.StrEnum):
    TEXT = "text"
    AUDIO = "audio"


class OtlpProtocol(enum.StrEnum):
    """How spans travel to an OpenTelemetry collector, in OpenTelemetry's words."""

    HTTP = "http/protobuf"
    GRPC = "grpc"


class LossPolicy(enum.StrEnum):
    """What becomes of the requests that a lost replica held."""

    REPLAY = "replay"  # they run again, on another replica or on the restarted one
    FAIL = "fail"  # they fail with `stage_lost`


class InputConfig(Struct, frozen=True, forbid_unknown_fields=True, rename={"sources": "from"}):
    """Where a stage's input comes from.

    Args:
        sources: the stage, or the list of stages, whose output this one takes.
        processor: turns that output into this stage's input: `passthrough`, `thinker2talker`, `talker2code2wav` or,
            from an allowed prefix, the dotted path of an `InputProcessor`.
        start_after: steps of the source to wait for before this stage starts; 0 waits for the whole of its output.
    """

    sources: StageName | Annotated[list[StageName], Meta(min_length=1)]
    processor: str = "passthrough"
    start_after: Annotated[int, Meta(ge=0, le=100_000)] = 2

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.sources,) if isinstance(self.sources, str) else tuple(self.sources)


class DecodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a diffusion stage decodes; what is not given is the model's own. Chunks are counted in blocks of the model.

    Args:
        policy: `chunks`: sound comes while tokens still come; `whole`: once all of them are there.
        first_blocks: blocks of the first chunk.
        largest_blocks: blocks of the longest chunk.
        look_ahead_blocks: blocks computed behind each chunk and thrown away.
        precision: number format of the vocoder's arithmetic; `auto` is the fastest that the model was measured with.
    """

    policy: Literal["chunks", "whole"] = "chunks"
    first_blocks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    largest_blocks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    look_ahead_blocks: Annotated[int, Meta(ge=0, le=1024)] | None = None
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"


class StageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage.

    Args:
        name: its name in logs, errors, metrics and parameters of requests.
        kind: what computes it.
        model_stage: which part of the checkpoint it runs; default: the stage's name.
        inputs: where its input comes from; exactly one stage has none and takes the prompt.
        outputs: what of its output goes to the client. Audio that is not among them goes to the stages after it.
        engine: vLLM's engine arguments by name; options of the engine for the kinds `echo` and `custom`.
        engine_class: dotted path of a `StageEngine`, for stages of the kind `custom` only.
        sampling: the stage's defaults for the parameters of requests.
        replicas: processes that run this stage.
        node: rank of the node that runs it; of a list, the replicas take one after the other.
        devices: GPU numbers of its host; default: the first one for stages with a model. The replicas of a node take
            one after the other, or as many as `engine.tensor_parallel_size` says.
        startup_timeout: seconds until a replica must be ready; default: that of the coordinator.
        budget_bytes: embedding rows (autoregressive) or latents (diffusion) that the stage holds at a time.
        restarts: how often a lost replica is started again within `coordinator.restart_window`.
        restart_backoff: seconds before the second restart, doubled each time; the first is at once.
        stall_timeout: seconds after which a replica that holds requests while its engine loop does not turn is killed
            and counts as lost.
        retain_bytes: what each replica keeps of what it sent to the stages after it, so that they can begin anew
            without it; a request over it begins further up.
        on_replica_loss: what becomes of the requests that a lost replica held.
        decode: how the stage decodes, for diffusion stages only.
        environment: variables that the stage's process sets before it touches a device.
        gives_way_to: stages to which this one leaves a shared device while requests of theirs wait for their first
            output (see stage/turns.py).
    """

    name: StageName
    kind: StageKind
    model_stage: str | None = None
    inputs: InputConfig | None = None
    outputs: list[Modality] = []
    engine: dict[str, Any] = {}
    engine_class: str | None = None
    sampling: StageParams = StageParams()
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    node: Rank | Annotated[list[Rank], Meta(min_length=1)] = 0
    devices: list[Annotated[int, Meta(ge=0, le=1023)]] | None = None
    startup_timeout: Seconds | None = None
    budget_bytes: Annotated[int, Meta(ge=1)] = 2 << 30
    restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    restart_backoff: Seconds = 0.5
    stall_timeout: Seconds = 4.25  # with heartbeat_interval: what is stuck is known within five seconds
    on_replica_loss: LossPolicy = LossPolicy.REPLAY
    retain_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    decode: DecodeConfig | None = None
    environment: dict[VariableName, str] = {}
    gives_way_to: list[StageName] = []

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.inputs.source_names if self.inputs is not None else ()

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.node,) if isinstance(self.node, int) else tuple(self.node)

    def node_of(self, index: int) -> int:
        """The rank of the node on which a replica runs."""
        return self.nodes[index % len(self.nodes)]

    @property
    def part(self) -> str:
        """The part of the checkpoint that this stage runs."""
        return self.model_stage or self.name


class CoordinatorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The process that owns requests.

    Args:
        run_dir: folder for sockets, logs and pid files; default: a new folder of this run, removed at exit.
        listen: client endpoint: `ipc` (a socket in `run_dir`), or `tcp://ADDRESS:PORT`.
        keys_dir: folder of CURVE keys, made by `omni_actors.keys`; without them TCP stays on this host.
        max_in_flight: requests admitted at a time; others are refused with `overloaded`.
        startup_timeout: seconds until every stage must be ready.
        shutdown_timeout: seconds that stages may take to stop before they are killed.
        drain_timeout: seconds that a stop waits for requests in flight.
        heartbeat_interval: seconds between two heartbeats of a replica.
        heartbeat_timeout: seconds of silence after which a ready replica is killed; at least twice the interval.
        restart_window: seconds over which the restarts of a replica, or of the coordinator, are counted.
        restarts: how often a lost coordinator is started again within that time.
        reconnect_timeout: seconds for which stages and nodes keep their models and wait for a lost coordinator.
        retain_bytes: what is kept of admitted requests, all together, so that they can be run again; one beyond it
            fails when a replica that holds it is lost.
        max_attempts: how often one request runs.
        default_timeout: seconds until the deadline of requests that bring none.
        max_timeout: the latest deadline that a request may ask for, in seconds from now.
        tombstone_ttl: seconds for which an ended request is remembered, to absorb late messages.
        record_dir: folder in which every stage records what it takes and gives, for `omni_actors.replay`.
        otlp_endpoint: OpenTelemetry collector that gets the spans of requests, as `http://host:4318`.
        otlp_protocol: how spans travel to it.
    """

    run_dir: str | None = None
    listen: str = "ipc"
    keys_dir: str | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    startup_timeout: Seconds = 600.0
    shutdown_timeout: Seconds = 8.0
    drain_timeout: Annotated[float, Meta(ge=0, le=1e7)] = 2.0
    heartbeat_interval: Seconds = 0.5
    heartbeat_timeout: Seconds = 4.0  # before its links stall
    restart_window: Seconds = 600.0
    restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 10
    reconnect_timeout: Seconds = 300.0
    retain_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    max_attempts: Annotated[int, Meta(ge=1, le=255)] = 4
    default_timeout: Seconds = 600.0
    max_timeout: Seconds = 86_400.0
    tombstone_ttl: Seconds = 60.0
    record_dir: str | None = None
    otlp_endpoint: str | None = None
    otlp_protocol: OtlpProtocol = OtlpProtocol.HTTP


class ClusterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts that a pipeline is spread over; each runs the same command with its own `node_rank`.

    Node 0 runs the coordinator, which the others reach at `master_addr:master_port`. They are reached at `node_addr`:
    by default the address from which this host reaches the master.

    Args:
        nnodes: how many there are.
        node_rank: which one this is, from 0.
        master_addr: address or name of node 0.
        master_port: its port for the other nodes; clients have one of their own.
        node_addr: address at which the other nodes reach this one.
    """

    nnodes: Annotated[int, Meta(ge=1, le=1024)] = 1
    node_rank: Rank = 0
    master_addr: Annotated[str, Meta(min_length=1, max_length=253)] = "127.0.0.1"
    master_port: Annotated[int, Meta(ge=1, le=65535)] = 29600
    node_addr: Annotated[str, Meta(min_length=1, max_length=253)] | None = None


class FlowConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much may wait where. An edge is sender -> receiver; its window is what may be sent without new credit.

    Args:
        edge_messages: window of an edge between stages, or from a stage to the coordinator, in messages.
        edge_bytes: the same in bytes.
        outbox_messages: messages of its own that may wait in a stage before it stops stepping its engine.
        outbox_bytes: the same in bytes.
        backlog_requests: whole requests that a stage may hold and could compute before it grants no more credit.
        client_window_messages: window towards a client, in messages. Clients grant by 64 messages, 256 KiB or 50 ms.
        client_window_bytes: the same in bytes.
        client_messages: messages that may wait for a client beyond its window; with more it loses its requests.
        client_bytes: the same in bytes.
        client_stall_seconds: a client that grants nothing for so long while messages wait loses its requests.
        parked_seconds: how long input may wait in a stage for the announcement of its request.
        arena_bytes: shared memory of a replica for large buffers; 0 for none.
        inline_bytes: larger buffers go through shared memory.
    """

    edge_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    edge_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    outbox_messages: Annotated[int, Meta(ge=1, le=10_000)] = 256
    outbox_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 64 << 20
    backlog_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    client_window_messages: Annotated[int, Meta(ge=256, le=1_000_000)] = 1024
    client_window_bytes: Annotated[int, Meta(ge=1 << 20)] = 16 << 20
    client_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    client_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    client_stall_seconds: Seconds = 30.0
    parked_seconds: Seconds = 10.0
    arena_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 64 << 20
    inline_bytes: Annotated[int, Meta(ge=1)] = 32 << 10


class HttpConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server: limits, TLS, foreign pages. Each key is also a flag: `body_bytes` is `--http-body-bytes`.

    Args:
        body_bytes: largest request body.
        bodies_bytes: all bodies that are being handled at a time.
        media_parts: media of one request.
        media_bytes: largest medium.
        audio_seconds: longest sound.
        image_pixels: largest picture, width times height.
        video_seconds: longest video.
        files_bytes: uploaded files, all together.
        file_seconds: life of an uploaded file.
        request_timeout: seconds until an answer must be complete, for requests that bring no `timeout`.
        read_timeout: seconds for a request's body to arrive.
        write_timeout: seconds that a client may leave a piece of its answer unread.
        cors_origins: origins (`https://example.com`, or `*`) whose web pages may use the server from a browser; by
            default none.
        certificate: PEM file with the certificate and those up to its root; makes the server speak https.
        key: PEM file with the certificate's private key, without a password.
    """

    body_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 34)] = 64 << 20
    bodies_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 40)] = 512 << 20
    media_parts: Annotated[int, Meta(ge=0, le=256)] = 16
    media_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 34)] = 32 << 20
    audio_seconds: Seconds = 300.0
    image_pixels: Annotated[int, Meta(ge=1, le=1 << 40)] = 4096 * 4096
    video_seconds: Seconds = 60.0
    files_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 << 20
    file_seconds: Seconds = 3600.0
    request_timeout: Seconds = 600.0
    read_timeout: Seconds = 60.0
    write_timeout: Seconds = 60.0
    cors_origins: Annotated[list[Annotated[str, Meta(pattern=r"^(\*|https?://[^/?#\s]+)$")]], Meta(max_length=64)] = []
    certificate: str | None = None
    key: str | None = None


class PipelineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole pipeline: one checkpoint, a directed acyclic graph of stages.

    Args:
        name: what clients and logs call it; the name of the model over HTTP.
        model: checkpoint folder, relative to the YAML file, or hub name.
        stages: the stages, in any order.
        coordinator: the process that owns requests.
        limits: largest messages.
        flow: how much may wait where.
        http: the HTTP server.
        plugins: modules with models of one's own, from allowed prefixes; see docs/extending.md.
        cluster: the hosts, where there is more than one.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    stages: Annotated[list[StageConfig], Meta(min_length=1, max_length=64)]
    coordinator: CoordinatorConfig = CoordinatorConfig()
    limits: Limits = Limits()
    flow: FlowConfig = FlowConfig()
    http: HttpConfig = HttpConfig()
    plugins: Annotated[list[str], Meta(max_length=64)] = []
    cluster: ClusterConfig = ClusterConfig()

    def stage(self, name: str) -> StageConfig:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"There is no stage {name!r}; the stages are {[stage.name for stage in self.stages]}.")

    @property
    def entry(self) -> StageConfig:
        """The stage that takes the prompt: the one without inputs."""
        return next(stage for stage in self.stages if stage.inputs is None)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """All that the pipeline can answer in, in stage order."""
        return tuple(dict.fromkeys(modality for stage in self.stages for modality in stage.outputs))

    def downstream(self, name: str) -> tuple[str, ...]:
        """The stages that take input from `name`."""
        return tuple(stage.name for stage in self.stages if name in stage.source_names)

    def beyond(self, name: str) -> tuple[str, ...]:
        """The stages that take input from one that takes input, directly or not, from `name`."""
        found: set[str] = set()
        ahead = set(self.downstream(name))
        while ahead:
            ahead = {after for stage in ahead for after in self.downstream(stage)} - found
            found |= ahead
        return tuple(stage.name for stage in self.stages if stage.name in found)

    def route(self, modalities: Iterable[str]) -> tuple[str, ...]:
        """The stages needed to answer in `modalities`, in order of the graph, entry first."""
        needed = {stage.name for stage in self.stages if set(stage.outputs) & set(modalities)}
        for stage in reversed(self.stages):  # stages are in topological order after validation
            if stage.name in needed:
                needed.update(stage.source_names)
        return tuple(stage.name for stage in self.stages if stage.name in needed)

    def digest(self) -> str:
        """Hash of everything that both ends of a connection must agree on: not of what is one host's own."""
        coordinator = msgspec.structs.replace(
            self.coordinator, run_dir=None, record_dir=None, keys_dir=None, listen="ipc"
        )
        cluster = msgspec.structs.replace(self.cluster, node_rank=0, node_addr=None, master_addr="-")
        shared = msgspec.structs.replace(self, coordinator=coordinator, cluster=cluster)
        return hashlib.sha256(msgspec.json.encode(shared, order="deterministic")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Loading


class LoadedConfig(NamedTuple):
    """A checked pipeline and where each of its values comes from (dotted key -> source)."""

    pipeline: PipelineConfig
    sources: dict[str, str]
    path: Path


def load(path: str | Path, overrides: Mapping[str, str] | None = None, devices: int | None = None) -> LoadedConfig:
    """Read, override, check.

    Args:
        path: the YAML file.
        overrides: command-line values by dotted key, for instance `{"stages.thinker.engine.max_num_seqs": "8"}`.
        devices: number of GPUs of this host; counted when `None`.

    Raises:
        ConfigError: anything wrong, naming the key and, for unknown ones, the nearest valid key.
    """
    path = Path(path)
    data = _read_yaml(path)
    sources = {key: f"yaml {path.name}" for key in flatten(data)}
    from_env = envs.config_overrides()
    for key, (value, variable) in slurm.config_overrides(known={*from_env, *(overrides or {})}).items():
        _set_value(data, key, value, sources, f"SLURM {variable}")
    for key, (value, variable) in from_env.items():
        _set_value(data, key, value, sources, f"env {variable}")
    for key, value in (overrides or {}).items():
        _set_value(data, key, value, sources, "command line")
    _refuse_unknown_keys(data, PipelineConfig, "")
    try:
        pipeline = msgspec.convert(data, PipelineConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path.name}: {error}.") from error
    pipeline = msgspec.structs.replace(
        pipeline, model=_resolve_model(pipeline.model, path.parent), stages=_in_graph_order(pipeline.stages)
    )
    if pipeline.coordinator.keys_dir is not None:
        from_yaml = sources.get("coordinator.keys_dir", "").startswith("yaml")
        folder = (path.parent if from_yaml else Path()) / Path(pipeline.coordinator.keys_dir).expanduser()
        coordinator = msgspec.structs.replace(pipeline.coordinator, keys_dir=str(folder.absolute()))
        pipeline = msgspec.structs.replace(pipeline, coordinator=coordinator)
    _check_stages(pipeline, host_devices() if devices is None else devices)
    return LoadedConfig(pipeline, sources, path)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"Cannot read the pipeline file {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid YAML: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping with the keys name, model and stages.")
    return data


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of taking the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _set_value(data: dict[str, Any], key: str, text: str, sources: dict[str, str], source: str) -> None:
    """Set the dotted `key` to `text`, read as YAML. Stages are addressed by name: `stages.thinker.replicas`."""
    node: Any = data
    parts = key.split(".")
    for index, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = _stage_by_name(node, part, key)
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise ConfigError(f"{source}: {'.'.join(parts[: index + 1])!r} is no mapping, so {key!r} cannot be set.")
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {key!r} does not name a value.")
    try:
        node[parts[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the value {text!r} of {key!r} is no valid YAML.") from error
    for old in [old for old in sources if old == key or old.startswith(f"{key}.")]:
        del sources[old]
    sources[key] = source


def _stage_by_name(stages: list[Any], name: str, key: str) -> Any:
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)]
    if name not in names:
        raise ConfigError(f"{key!r}: there is no stage {name!r}.{suggest(name, [str(known) for known in names])}")
    return next(stage for stage in stages if isinstance(stage, dict) and stage.get("name") == name)


def suggest(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the nearest known word, else the list of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if nearest:
        return f" Did you mean {nearest[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""


def _refuse_unknown_keys(data: Any, struct: type[Struct], path: str) -> None:
    """Like msgspec's own check, but naming the nearest valid key."""
    if not isinstance(data, dict):
        return  # the conversion reports the wrong type
    hints = get_type_hints(struct, include_extras=True)
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    fields = {encoded: hints[name] for name, encoded in names}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(f"Unknown key {_join(path, str(key))!r}.{suggest(str(key), fields)}")
        inner, is_list = _inner_struct(fields[key])
        if inner is None:
            continue
        items = value if is_list and isinstance(value, list) else [value]
        for index, item in enumerate(items):
            name = item.get("name", index) if isinstance(item, dict) else index
            _refuse_unknown_keys(item, inner, _join(path, f"{key}.{name}" if is_list else str(key)))


def _inner_struct(annotation: Any) -> tuple[type[Struct] | None, bool]:
    """The struct inside a field's type, and whether the field is a list of it.

    With `typing`, not `msgspec.inspect`: the latter crashed the interpreter in a later conversion (msgspec 0.22).
    """
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return annotation, False
    arguments = get_args(annotation)
    is_list = get_origin(annotation) is list
    for argument in arguments:
        found, nested_list = _inner_struct(argument)
        if found is not None:
            return found, is_list or nested_list
    return None, False


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _resolve_model(model: str, base: Path) -> str:
    """Relative paths are relative to the YAML file; what is no existing folder stays a hub name."""
    candidate = Path(model).expanduser()
    for folder in (base / candidate, candidate):
        if folder.is_dir():
            return str(folder.resolve())
    if model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model: there is no folder {model!r} (looked beside the YAML file and in the current folder).",
            hint="Give the folder of a checkpoint, or make a tiny one: python -m omni_actors.checkpoints tiny DIR.",
        )
    return model


def _in_graph_order(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """The stages, each after its sources; raises `ConfigError` for double or missing names and cycles."""
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two stages are called {name!r}; stage names must differ.")
    for stage in stages:
        for source in stage.source_names:
            if source not in names:
                raise ConfigError(
                    f"stages.{stage.name}.inputs.from: there is no stage {source!r}.{suggest(source, names)}"
                )
    ordered: list[StageConfig] = []
    remaining = list(stages)
    while remaining:
        done = {stage.name for stage in ordered}
        ready = [stage for stage in remaining if set(stage.source_names) <= done]
        if not ready:
            cycle = ", ".join(stage.name for stage in remaining)
            raise ConfigError(f"The stages {cycle} wait for one another: the inputs form a cycle.")
        ordered += ready
        remaining = [stage for stage in remaining if stage not in ready]
    return ordered


def _check_stages(pipeline: PipelineConfig, devices: int) -> None:
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
    for stage in pipeline.stages:
        where = f"stages.{stage.name}"
        for name in stage.sampling.given():
            allowed = PARAMS_BY_KIND[stage.kind]
            if name not in allowed:
                raise ConfigError(
                    f"{where}.sampling.{name} does not apply to a stage of kind {stage.kind}.{suggest(name, allowed)}"
                )
        for other in stage.gives_way_to:
            if other == stage.name or all(known.name != other for known in pipeline.stages):
                names = [known.name for known in pipeline.stages if known is not stage]
                raise ConfigError(f"{where}.gives_way_to: there is no other stage {other!r}.{suggest(other, names)}")
        _check_engine_class(stage, f"{where}.engine_class")
        if stage.decode is not None:
            _check_decode(stage.kind, stage.decode, f"{where}.decode")
        if stage.inputs is not None:
            _check_processor(stage.inputs.processor, f"{where}.inputs.processor")
            if len(set(stage.source_names)) != len(stage.source_names):
                raise ConfigError(f"{where}.inputs.from names a stage twice: {list(stage.source_names)}.")
        if not stage.outputs and not pipeline.downstream(stage.name):
            raise ConfigError(f"{where}: its output goes nowhere; give it outputs, or make it the input of a stage.")
        _check_nodes(stage, where, pipeline.cluster)
        if pipeline.cluster.node_rank in stage.nodes:  # of the others only they themselves know
            _check_devices(stage, where, devices)
    if pipeline.cluster.node_rank >= pipeline.cluster.nnodes:
        raise ConfigError(
            f"cluster.node_rank: there is no node {pipeline.cluster.node_rank}; {_known_nodes(pipeline.cluster)}."
        )
    _check_memory_shares(pipeline, devices)
    coordinator = pipeline.coordinator
    if coordinator.heartbeat_timeout < 2 * coordinator.heartbeat_interval:
        raise ConfigError(
            f"coordinator.heartbeat_timeout {coordinator.heartbeat_timeout:g} s must be at least twice "
            f"heartbeat_interval {coordinator.heartbeat_interval:g} s."
        )


def _check_exposure(coordinator: CoordinatorConfig, cluster: ClusterConfig) -> None:
    """What other hosts reach needs keys. Names are resolved, and refused, only when something is bound."""
    listen = coordinator.listen
    if listen != "ipc" and (tcp_host(listen) or "*") == "*":
        raise ConfigError(f"coordinator.listen: {listen!r} is neither 'ipc' nor {TCP}ADDRESS:PORT.")
    exposed = []
    if listen != "ipc" and not stays_on_host(listen):
        exposed.append(f"coordinator.listen: other hosts reach {listen}")
    if cluster.nnodes > 1 and is_address(cluster.master_addr) and not is_loopback(cluster.master_addr):
        exposed.append(f"cluster.master_addr: other hosts reach {cluster.master_addr}")
    if exposed and coordinator.keys_dir is None:
        raise ConfigError(
            f"{exposed[0]}, and there are no keys to keep strangers out.",
            hint="Make keys: python -m omni_actors.keys DIR, and give --keys DIR; or stay on loopback (127.0.0.0/8).",
        )


def _check_decode(kind: StageKind, decode: DecodeConfig, where: str) -> None:
    """What needs no model to be seen; the model checks the rest against its own defaults."""
    if kind is not StageKind.DIFFUSION:
        raise ConfigError(f"{where} does not apply to a stage of kind {kind}; only diffusion stages decode.")
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
            raise ConfigError(f"{where}: {stage.engine_class!r} is no dotted path of a class.")
        check_importable(stage.engine_class, where)


def _check_processor(name: str, where: str) -> None:
    check_importable(name, where)
    if "." not in name and name not in BUILT_IN_PROCESSORS:
        raise ConfigError(f"{where}: unknown name {name!r}.{suggest(name, BUILT_IN_PROCESSORS)}")


def _check_devices(stage: StageConfig, where: str, devices: int) -> None:
    if stage.devices is None:
        return
    if len(set(stage.devices)) != len(stage.devices):
        raise ConfigError(f"{where}.devices names a device twice: {stage.devices}.")
    size = tensor_parallel_size(stage)
    if len(stage.devices) % size:
        raise ConfigError(
            f"{where}.devices names {len(stage.devices)} GPUs, but a replica takes {size}.",
            hint=f"Name {size} GPUs for each replica of a node, or change engine.tensor_parallel_size.",
        )
    for device in stage.devices:
        if device >= devices:
            have = f"devices 0 to {devices - 1}" if devices else "no GPU"
            raise ConfigError(f"{where}.devices: there is no device {device}; this host has {have}.")


def _check_nodes(stage: StageConfig, where: str, cluster: ClusterConfig) -> None:
    for rank in stage.nodes:
        if rank >= cluster.nnodes:
            raise ConfigError(
                f"{where}.node: there is no node {rank}; {_known_nodes(cluster)}.",
                hint="Set cluster.nnodes, or --nnodes.",
            )
    if len(set(stage.nodes)) != len(stage.nodes):
        raise ConfigError(f"{where}.node names a node twice: {list(stage.nodes)}.")
    if len(stage.nodes) > stage.replicas:
        raise ConfigError(
            f"{where}.node names {len(stage.nodes)} nodes, but there are {stage.replicas} replicas.",
            hint=f"Set {where}.replicas.",
        )


def _known_nodes(cluster: ClusterConfig) -> str:
    return f"cluster.nnodes is {cluster.nnodes}, so there are nodes 0 to {cluster.nnodes - 1}"


def _check_memory_shares(pipeline: PipelineConfig, devices: int) -> None:
    """The shares of one GPU must fit; explicit `kv_cache_memory_bytes` are not counted, vLLM checks those itself."""
    for (rank, device), shares in memory_plan(pipeline, devices).items():
        total = sum(share for _, share in shares)
        if total > 1.0:
            listed = ", ".join(f"{name} {share:g}" for name, share in shares)
            raise ConfigError(
                f"{_device_name(pipeline, rank, device)} is promised {total:.2f} of its memory: {listed}.",
                hint="Lower engine.gpu_memory_utilization of these stages, or move one to another device.",
            )


def _device_name(pipeline: PipelineConfig, rank: int, device: int) -> str:
    return f"GPU {device} of node {rank}" if pipeline.cluster.nnodes > 1 else f"GPU {device}"


def memory_plan(pipeline: PipelineConfig, devices: int) -> dict[tuple[int, int], list[tuple[str, float]]]:
    """(node, GPU) -> (stage, share of its memory) for the stages that vLLM sizes by `gpu_memory_utilization`.

    `devices` is the number of this host's GPUs; another node is taken to have GPUs if this one has, or if it is named.
    """
    plan: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for stage in pipeline.stages:
        if stage.kind is not StageKind.AUTOREGRESSIVE or "kv_cache_memory_bytes" in stage.engine:
            continue
        share = stage.engine.get("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            where = f"stages.{stage.name}.engine.gpu_memory_utilization"
            raise ConfigError(f"{where} must be a number above 0 and up to 1, got {share!r}.")
        replicas = collections.Counter(
            (stage.node_of(index), device)
            for index in range(stage.replicas)
            for device in replica_devices(stage, index, devices)
        )
        for place, count in replicas.items():
            plan.setdefault(place, []).append((stage.name, share * count))
    return plan


def tensor_parallel_size(stage: StageConfig) -> int:
    """How many GPUs a replica takes."""
    size = stage.engine.get("tensor_parallel_size", 1)
    return size if isinstance(size, int) and size > 0 else 1  # what is wrong with it the engine says


def replica_devices(stage: StageConfig, index: int, devices: int) -> list[int]:
    """GPUs of one replica on its node: as many as it needs, those of the stage one replica after the other."""
    placed, size = stage_devices(stage, devices), tensor_parallel_size(stage)
    if not placed:
        return []
    before = sum(stage.node_of(other) == stage.node_of(index) for other in range(index))
    first = before % max(1, len(placed) // size) * size
    return placed[first : first + size]


def stage_devices(stage: StageConfig, devices: int) -> list[int]:
    """GPUs of a stage: those named, else the first one, else none where the host has none or none is needed."""
    if stage.devices is not None:
        return stage.devices
    needs_device = stage.kind in (StageKind.AUTOREGRESSIVE, StageKind.DIFFUSION)
    return [0] if devices and needs_device else []


def host_devices() -> int:
    """Number of NVIDIA GPUs that this process may use, without initialising CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))


# ---------------------------------------------------------------------------------------------------------------------
# Classes named in the YAML


def check_importable(name: str, where: str) -> None:
    """A dotted `name` must begin with an allowed prefix; plain names are looked up in a registry later."""
    if "." in name:
        check_allowed(name, where)


def check_allowed(name: str, where: str) -> None:
    """Raise `ConfigError` unless a module, or a class in one, lies below an allowed prefix (in whole words)."""
    allowed = BUILT_IN_IMPORT_PREFIXES + envs.allowed_import_prefixes()
    if not any(f"{name}.".startswith(f"{prefix.rstrip('.')}.") for prefix in allowed):
        raise ConfigError(
            f"{where}: {name!r} is outside the allowed import prefixes {list(allowed)}.",
            hint="Only code that you trust may be named; add its prefix to OMNI_ACTORS_ALLOW_IMPORTS.",
        )


def resolve_class(name: str, registry: Mapping[str, type], base: type, where: str) -> type:
    """The class that `name` stands for, from `registry` or an allowed dotted path.

    Raises:
        ConfigError: unknown name, forbidden prefix, or no subclass of `base`.
    """
    if "." not in name:
        if name not in registry:
            raise ConfigError(f"{where}: unknown name {name!r}.{suggest(name, registry)}")
        return registry[name]
    check_importable(name, where)
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: cannot import {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{where}: {name!r} is no subclass of {base.__name__}.")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Showing


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested mappings; list items that have a name are addressed by it."""
    if isinstance(value, dict):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(flatten(item, _join(prefix, str(key))))
        return flat or {prefix: {}}
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        flat = {}
        for item in value:
            flat.update(flatten(item, _join(prefix, str(item["name"]))))
        return flat
    return {prefix: value}


def describe(loaded: LoadedConfig, devices: int | None = None) -> str:
    """The effective configuration, one value a line with its source, then placement and memory plan."""
    devices = host_devices() if devices is None else devices
    pipeline = loaded.pipeline
    flat = {
        key: value
        for key, value in flatten(msgspec.to_builtins(pipeline)).items()
        if value is not None or key in loaded.sources
    }
    width = max(len(key) for key in flat)
    shown = {key: _show(value) for key, value in flat.items()}
    value_width = min(60, max(len(text) for text in shown.values()))
    lines = [f"pipeline {pipeline.name} ({loaded.path}), configuration {pipeline.digest()}"]
    lines += [
        f"  {key:<{width}}  {text:<{value_width}}  [{_source_of(key, loaded.sources)}]" for key, text in shown.items()
    ]
    lines.append("placement")
    for stage in pipeline.stages:
        taken = {device for index in range(stage.replicas) for device in replica_devices(stage, index, devices)}
        where = ", ".join(f"GPU {device}" for device in sorted(taken)) or "CPU"
        if pipeline.cluster.nnodes > 1:
            where += f" of node {', '.join(str(rank) for rank in stage.nodes)}"
        lines.append(f"  {stage.name}: {stage.replicas} x {stage.kind} on {where}, takes input from "
                     f"{', '.join(stage.source_names) or 'the client'}")  # fmt: skip
    cluster = pipeline.cluster
    if cluster.nnodes > 1:
        master = f"tcp://{cluster.master_addr}:{cluster.master_port}"
        lines.append(f"node {cluster.node_rank} of {cluster.nnodes}; the coordinator listens for nodes at {master}")
    for (rank, device), shares in memory_plan(pipeline, devices).items():
        total = sum(share for _, share in shares)
        name = _device_name(pipeline, rank, device)
        lines.append(f"memory of {name}: " + " + ".join(f"{n} {s:g}" for n, s in shares) + f" = {total:.2f}")
    return "\n".join(lines)


def _show(value: Any) -> str:
    return str(msgspec.json.encode(value).decode())


def _source_of(key: str, sources: Mapping[str, str]) -> str:
    """The source of a key, or of the mapping that holds it."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return "default"
