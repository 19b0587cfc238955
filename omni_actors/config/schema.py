"""What the pipeline's YAML may hold."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omni_actors.errors import ConfigError
from omni_actors.protocol.header import Limits
from omni_actors.protocol.payloads import AUTOREGRESSIVE_PARAMS, DIFFUSION_PARAMS, StageParams

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
            from an allowed prefix, the dotted path of an `StreamProcessor`.
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
        devices: GPU numbers of its host, counted among those that CUDA_VISIBLE_DEVICES leaves there; default: the first
            ones for stages with a model. The replicas of a node take one after the other, or as many as
            `engine.tensor_parallel_size` and `pipeline_parallel_size` say.
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
        environment: variables that the stage's process sets before it touches a device, OMP_NUM_THREADS among them.
        yields_to: stages to which this one leaves a device that they share while requests of theirs wait for their
            first output (see `stage/device_priority.py`).
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
    environment: dict[VariableName, str | int] = {}
    yields_to: list[StageName] = []

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
        keys_dir: folder of CURVE keys, made by `omni-actors keys`; without them TCP stays on this host.
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
        record_dir: folder in which every stage records what it takes and gives, for `omni-actors replay`.
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
        early_chunk_seconds: how long input may wait in a stage for the announcement of its request.
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
    early_chunk_seconds: Seconds = 10.0
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
