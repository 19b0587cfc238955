"""The schema of the pipeline's YAML. `docs/configuration.md` is generated from these docstrings and types."""

from __future__ import annotations

import enum
import hashlib
import inspect
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omni_actors.errors import ConfigError
from omni_actors.protocol.fields import Limits
from omni_actors.protocol.payloads import (
    AUTOREGRESSIVE_PARAMS,
    DIFFUSION_PARAMS,
    PROMPT_PARAMS,
    TEXT_PARAMS,
    StageParams,
)

Seconds = Annotated[float, Meta(gt=0, le=1e7)]
LARGEST = 1 << 40  # bytes: more than any host has, and far from where sums overflow
# Patterns end with \Z, as $ would let a line break follow.
VariableName = Annotated[str, Meta(pattern=r"^[A-Z][A-Z0-9_]{0,63}\Z")]
VariableText = Annotated[str, Meta(max_length=32_768)]
Rank = Annotated[int, Meta(ge=0, le=1023)]
StageName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
IN_ONE_LINE = Meta(pattern=r"^[^\n\r\t]*\Z", description="in one line")
Line = Annotated[str, Meta(min_length=1, max_length=4096), IN_ONE_LINE]
AdapterName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^.\s/][^.\s]*\Z")]  # dots separate keys
MAX_ADAPTERS = 256  # of a pipeline
Origin = Annotated[str, Meta(max_length=512), Meta(pattern=r"^(\*|https?://[^/?#\s]+)\Z")]
Host = Annotated[
    str, Meta(max_length=253), Meta(pattern=r"^[A-Za-z0-9_.:-]+\Z", description="letters, digits and `._:-`")
]

Executor = Literal["host", "ray"]
OtlpProtocol = Literal["http/protobuf", "grpc"]  # in OpenTelemetry's terms

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9  # vLLM's own default
BUILT_IN_IMPORT_PREFIXES = ("omni_actors.",)
SOUND_PROCESSOR = "sound2words"  # takes the sound of a prompt stage, and a text of another one
# Defined in stage/processors.py.
BUILT_IN_PROCESSORS = (
    *("passthrough", "pictures", "thinker2talker", "talker2code2wav", "latents2image", "text2speech"),
    SOUND_PROCESSOR,
)


class StageKind(enum.StrEnum):
    """What computes a stage."""

    PROMPT = "prompt"  # chat template, tokenizer, media processing
    AUTOREGRESSIVE = "autoregressive"  # a vLLM engine core with the omni scheduler
    ENCODER = "encoder"  # a vLLM engine core that computes hidden states of prompts, for the stages after it
    DIFFUSION = "diffusion"  # a vLLM engine core without KV cache, one scheduled token per denoise step
    DIFFUSERS = "diffusers"  # a pipeline class of diffusers as it is, a step of one request at a time
    ECHO = "echo"  # no model: repeats its input; for tests and measurements of everything around the engine
    CUSTOM = "custom"  # the user's own `StageEngine`, named by `engine_class`


PARAMS_BY_KIND = {
    StageKind.PROMPT: PROMPT_PARAMS,  # if the model declares them
    StageKind.AUTOREGRESSIVE: AUTOREGRESSIVE_PARAMS,
    StageKind.ENCODER: PROMPT_PARAMS,  # if the model declares them
    StageKind.DIFFUSION: DIFFUSION_PARAMS,
    StageKind.DIFFUSERS: DIFFUSION_PARAMS | {"adapter"},
    StageKind.ECHO: AUTOREGRESSIVE_PARAMS | DIFFUSION_PARAMS,
    StageKind.CUSTOM: AUTOREGRESSIVE_PARAMS | DIFFUSION_PARAMS,  # the engine says which of them it uses
}


class Modality(enum.StrEnum):
    """What clients can get out of a pipeline."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    LATENTS = "latents"
    WORDS = "words"  # of what is said, with times


class HttpConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP server: limits, TLS, CORS. Each key is also a flag: `body_bytes` is `--http-body-bytes`.

    Limits of connections, bodies and sessions are those of each process; what is kept (files, voices) is shared.

    Args:
        workers: processes that share the port, each with an event loop and detection of turns of its own; 0 for one per
            four cores of the host, at most eight. For `omni-actors launch` only.
        connections: connections at a time; fewer if the limit of open files is lower.
        head_bytes: largest head of a request: its first line and headers.
        head_timeout: seconds for a request's head to arrive.
        body_bytes: largest request body, and largest event of a session.
        bodies_bytes: all request bodies and events of sessions that arrive or are handled at a time, with the media
            fetched for them, the uploaded files and earlier turns that they refer to, and the log probabilities of
            answers that are not yet whole; at least `body_bytes`.
        media_parts: number of media in one request.
        media_bytes: largest audio, image or video.
        audio_seconds: longest audio.
        image_pixels: largest image, width times height.
        video_seconds: longest video.
        files_bytes: all uploaded files together, and all videos that were made.
        file_seconds: lifetime of an uploaded file, and of a video.
        request_timeout: seconds until an answer must be complete, for requests that set no `timeout`.
        read_timeout: seconds for a request's body to arrive.
        write_timeout: seconds that a client may leave its answer unread; then its connection ends.
        served_names: names of the model for HTTP clients, the preferred one first; by default the pipeline's `name`,
            and `model` unless it is a path. The flag is `--served-name`, once for each.
        voice_aliases: further names of voices, such as `alloy: Chelsie`. The flag is `--voice-alias alloy=Chelsie`,
            once for each. A voice of the pipeline keeps its own name.
        names: `openai` to take OpenAI's names, too: their models (`gpt-…`, `o3`, `tts-1`, `whisper-1` and so on) are
            the pipeline's, and each of their voices is one of its voices, always the same. Also `--openai-names`.
        transcriber: client endpoint of another pipeline, such as `ipc:///tmp/ears/client`: it writes down recordings,
            the turns of realtime sessions, and the sounds of prompts for a model that does not hear.
        voices: how many voices clients may make of recordings, if the model takes those.
        voices_dir: folder for them, which several servers may share; by default one in the run directory.
        realtime_sessions: sessions of /v1/realtime and of texts that are still being written at a time, of each
            process; with four or more, the last sixteenth is kept for addresses that have none.
        realtime_session_seconds: longest session.
        realtime_idle_seconds: seconds without an event of the client, and without an answer, that end a session.
        realtime_events_per_second: events that are read of a client in the long run; it is slowed down to this. More
            pings, pongs and small pieces of events than this end its session.
        cors_origins: origins (`https://example.com`, or `*`) whose web pages may use the server from a browser; by
            default none.
        certificate: PEM file with the certificate and its chain; makes the server speak https.
        key: PEM file with the certificate's private key, without a password.
    """

    workers: Annotated[int, Meta(ge=0, le=64)] = 0
    connections: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    head_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 20)] = 64 << 10
    head_timeout: Seconds = 10.0
    body_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 34)] = 64 << 20
    bodies_bytes: Annotated[int, Meta(ge=1 << 10, le=LARGEST)] = 512 << 20
    media_parts: Annotated[int, Meta(ge=0, le=256)] = 16
    media_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 34)] = 32 << 20
    audio_seconds: Seconds = 300.0
    image_pixels: Annotated[int, Meta(ge=1, le=LARGEST)] = 4096 * 4096
    video_seconds: Seconds = 60.0
    files_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 256 << 20
    file_seconds: Seconds = 3600.0
    request_timeout: Seconds = 600.0
    read_timeout: Seconds = 60.0
    write_timeout: Seconds = 60.0
    served_names: Annotated[list[Line], Meta(max_length=64)] = []
    voice_aliases: Annotated[dict[Line, Line], Meta(max_length=64)] = {}
    names: Literal["own", "openai"] = "own"
    transcriber: Line | None = None
    voices: Annotated[int, Meta(ge=0, le=10_000)] = 100
    voices_dir: Line | None = None
    realtime_sessions: Annotated[int, Meta(ge=0, le=1 << 16)] = 128
    realtime_session_seconds: Seconds = 3600.0
    realtime_idle_seconds: Seconds = 300.0
    realtime_events_per_second: Annotated[int, Meta(ge=1, le=1_000_000)] = 500
    cors_origins: Annotated[list[Origin], Meta(max_length=64)] = []
    certificate: Line | None = None
    key: Line | None = None


class InputConfig(Struct, frozen=True, forbid_unknown_fields=True, rename={"sources": "from"}):
    """The source of a stage's input.

    Args:
        sources: the stage, or the list of stages, whose output this one takes.
        processor: turns that output into this stage's input: `passthrough`, `pictures`, `thinker2talker`,
            `talker2code2wav`, `latents2image`, `text2speech`, `sound2words` or, from an allowed prefix,
            the dotted path of a `StreamProcessor`.
        start_after: steps of the source to wait for before this stage starts; 0 waits for its whole output.
    """

    sources: StageName | Annotated[list[StageName], Meta(min_length=1, max_length=64)]
    processor: Line = "passthrough"
    start_after: Annotated[int, Meta(ge=0, le=100_000)] = 2

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the source stages, in the order of `from`."""
        return (self.sources,) if isinstance(self.sources, str) else tuple(self.sources)


class DecodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a diffusion stage decodes. The model has its own defaults; chunks are counted in its blocks.

    Args:
        policy: `chunks` makes sound while tokens still arrive; `whole` once all of them are there.
        first_blocks: blocks of the first chunk.
        largest_blocks: blocks of the longest chunk.
        look_ahead_blocks: blocks computed after each chunk and discarded.
        precision: number format of the vocoder's arithmetic; `auto` is the fastest that the model was validated with.
        solver: method by which Qwen2.5-Omni's flow is solved: `rk4`, the default, evaluates the network four times in
            an interval, as the reference does, `midpoint` twice, `euler` once. There are `num_steps` (of `sampling`)
            points: with 6 in place of 10 the network costs 44 % less for 0.16 dB, which no cheaper solver reaches.
            docs/benchmarks.md has what each costs in sound.
        smooth_start: keep the first sound of an answer until the rest of it is foreseen to follow without a gap, not at
            all while there is little load, and at most 5 s; and begin no more answers than the stage can make in time.
    """

    policy: Literal["chunks", "whole"] = "chunks"
    first_blocks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    largest_blocks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    look_ahead_blocks: Annotated[int, Meta(ge=0, le=1024)] | None = None
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    solver: Literal["rk4", "midpoint", "euler"] | None = None
    smooth_start: bool = True


class StageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage.

    Args:
        name: its name in logs, errors, metrics and parameters of requests.
        kind: what computes it.
        model: checkpoint folder or hub name, if it is another than the pipeline's. A prompt stage takes that of the
            stage that it prepares prompts for.
        model_stage: which part of the checkpoint it runs; default: the stage's name.
        inputs: source of its input; exactly one stage has none and takes the prompt.
        outputs: modalities of its output that go to the client. Audio not listed here goes to the stages after it.
        engine: vLLM's engine arguments by name; for the kinds `diffusers`, `echo` and `custom`, the
            engine's own options.
        engine_class: dotted path of a `StageEngine`, for stages of the kind `custom` only.
        sampling: the stage's defaults for the parameters of requests.
        replicas: processes that run this stage.
        spares: further processes that are loaded and ready but take requests only in the place of a replica that is
            lost or drains. They take their node, devices and memory as replicas do, after those.
        node: rank of the node that runs it, by default 0; replicas take the ranks of a list in turn.
        devices: GPU numbers of its host, counted among those that CUDA_VISIBLE_DEVICES leaves there; default: the first
            ones for stages with a model. The replicas of a node take them in turn, each one GPU or as many as
            `engine.tensor_parallel_size` and `pipeline_parallel_size` say.
        executor: where the workers of an autoregressive stage run: `host`, in its process or in one per GPU of its
            host, or `ray`, in actors on free GPUs of the Ray cluster that its host belongs to, as many as
            `engine.tensor_parallel_size` and `pipeline_parallel_size` say.
        startup_timeout: seconds until a replica must be ready; default: the coordinator's.
        budget_bytes: bytes that the stage's requests may hold when one more is admitted; it waits until it fits or is
            alone, and whatever comes for admitted requests is taken. Embedding rows in an autoregressive stage; in a
            diffusion stage the device memory of a request from its first chunk to its end, with what a step needs. At
            the sizes of Qwen2.5-Omni the vocoder keeps 14.2 MB for a request, and the default admits 144 requests.
        row_cache_bytes: bytes of rows that an autoregressive stage keeps in the host's memory for positions in its
            prefix cache. A spoken turn takes from the prefix cache what it finds rows for, and computes the rest. At
            the sizes of Qwen2.5-Omni-7B a position has 7 kB, and the default holds 150 000 of them; 0 keeps none.
        steps_per_schedule: decode steps that an autoregressive stage computes before its scheduler looks again.
            Default: the model's own number, 4 for the talker of Qwen2.5-Omni and 1 for all others, which take no more.
            With more, each costs the host less; new requests, aborts and the tokens themselves wait for the last one.
        restarts: how often in a row, within `coordinator.restart_window`, a replica is started again that does not
            become ready; ten times as often one that becomes ready but is lost before it has finished a request; 0 for
            never.
        restart_backoff: seconds before the second restart, doubled each time; the first is immediate.
        stall_timeout: seconds after which a replica that holds requests, but whose engine loop makes no progress, is
            killed and counts as lost; at least twice `coordinator.heartbeat_interval`.
        retain_bytes: bytes of sent output that each replica keeps, so that a stage after it can restart a request; one
            that does not fit restarts further upstream.
        on_replica_loss: what happens to the requests that a lost replica held: with `replay` they run again, on another
            replica or on the restarted one, with `fail` they fail with `stage_lost`.
        decode: how the stage decodes, for diffusion stages only.
        environment: variables that the stage's process sets before it touches a device, such as OMP_NUM_THREADS.
        multiprocessors: the most multiprocessors of a GPU on which an autoregressive stage computes, rounded down to an
            even number; under MPS only, which lets the other stages of the GPU have the rest. Default: all of them.
    """

    name: StageName
    kind: StageKind
    model: Line | None = None
    model_stage: Line | None = None
    inputs: InputConfig | None = None
    outputs: Annotated[list[Modality], Meta(max_length=len(Modality))] = []
    engine: dict[str, Any] = {}
    engine_class: Line | None = None
    sampling: StageParams = StageParams()
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    spares: Annotated[int, Meta(ge=0, le=1024)] = 0
    node: Rank | Annotated[list[Rank], Meta(min_length=1, max_length=1024)] | None = None
    devices: Annotated[list[Annotated[int, Meta(ge=0, le=1023)]], Meta(max_length=1024)] | None = None
    executor: Executor = "host"
    startup_timeout: Seconds | None = None
    budget_bytes: Annotated[int, Meta(ge=1, le=LARGEST)] = 2 << 30
    row_cache_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 1 << 30
    steps_per_schedule: Annotated[int, Meta(ge=1, le=64)] | None = None
    restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    restart_backoff: Seconds = 0.5
    stall_timeout: Seconds = 4.25  # with heartbeat_interval, a stuck replica is noticed within five seconds
    on_replica_loss: Literal["replay", "fail"] = "replay"
    retain_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 256 << 20
    decode: DecodeConfig | None = None
    environment: dict[VariableName, VariableText | int] = {}
    multiprocessors: Annotated[int, Meta(ge=2, le=1024)] | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the stages whose output it takes; none for the first stage."""
        return self.inputs.source_names if self.inputs is not None else ()

    @property
    def params(self) -> frozenset[str]:
        """Names of the parameters that requests may set for it."""
        without_text = self.kind is StageKind.AUTOREGRESSIVE and Modality.TEXT not in self.outputs
        found = PARAMS_BY_KIND[self.kind] - (TEXT_PARAMS if without_text else frozenset())
        draws = self.kind is StageKind.DIFFUSION and not self.outputs  # if the model declares that it has adapters
        return found | {"adapter"} if draws else found

    @property
    def processes(self) -> int:
        """Number of its processes: replicas and spares."""
        return self.replicas + self.spares

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ranks of its nodes; replica i runs on the i-th, cyclically."""
        return (self.node or 0,) if self.node is None or isinstance(self.node, int) else tuple(self.node)

    def node_of(self, index: int) -> int:
        """Return the rank of the node on which a replica runs."""
        return self.nodes[index % len(self.nodes)]

    @property
    def part(self) -> str:
        """Part of the checkpoint that this stage runs."""
        return self.model_stage or self.name


class CoordinatorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The coordinator: the process that owns requests.

    Args:
        run_dir: folder for sockets, logs and the lock; default: a new folder for this run, removed at exit.
        listen: client endpoint: `ipc` (a socket in `run_dir`), or `tcp://ADDRESS:PORT`.
        keys_dir: folder of CURVE keys, made by `omni-actors keys`; without them TCP stays on this host.
        max_in_flight: requests that run at a time; each has a slot. Some slots are kept for clients that have none.
        max_queued: requests that may wait for a slot; with more, the client that has most gets `overloaded`.
        startup_timeout: seconds until every stage must be ready.
        shutdown_timeout: seconds that stages and the HTTP server may take to stop before they are killed.
        drain_timeout: seconds that a stop waits for requests in flight.
        heartbeat_interval: seconds between two heartbeats of a replica.
        heartbeat_timeout: seconds of silence after which a ready replica is killed; at least twice the interval.
        restart_window: seconds over which the restarts of a replica, or of the coordinator, are counted.
        restarts: how often within that time a coordinator is started again that is lost within two seconds of its
            start.
        reconnect_timeout: seconds for which stages and nodes keep their models and wait for a lost coordinator.
        retain_bytes: bytes of admitted requests kept, all together, so that they can run again; one that does not fit
            fails when a replica that holds it is lost.
        max_attempts: how often one request may run, after losses that are not its fault; one that crashes its stage is
            found sooner.
        move_after: seconds for which a node must be away before its replicas move to other nodes that have room.
        default_timeout: seconds until the deadline of requests that set none.
        max_timeout: the latest deadline that a request may ask for, in seconds from now.
        tombstone_ttl: seconds for which an ended request is remembered, to absorb late messages.
        otlp_endpoint: OpenTelemetry collector that receives the spans of requests, such as `http://host:4318`.
        otlp_protocol: how spans travel to it.
    """

    run_dir: Line | None = None
    listen: Line = "ipc"
    keys_dir: Line | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    max_queued: Annotated[int, Meta(ge=0, le=10_000)] = 256
    startup_timeout: Seconds = 600.0
    shutdown_timeout: Seconds = 8.0
    drain_timeout: Annotated[float, Meta(ge=0, le=1e7)] = 2.0
    heartbeat_interval: Seconds = 0.5
    heartbeat_timeout: Seconds = 4.0  # shorter than the time after which links stall
    restart_window: Seconds = 600.0
    restarts: Annotated[int, Meta(ge=0, le=1_000_000)] = 10
    reconnect_timeout: Seconds = 300.0
    retain_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 256 << 20
    max_attempts: Annotated[int, Meta(ge=1, le=255)] = 64
    move_after: Seconds = 300.0  # a node that can reach no coordinator has ended by then, as `reconnect_timeout` says
    default_timeout: Seconds = 600.0
    max_timeout: Seconds = 86_400.0
    tombstone_ttl: Seconds = 60.0
    otlp_endpoint: Line | None = None
    otlp_protocol: OtlpProtocol = "http/protobuf"

    @property
    def stop_time(self) -> float:
        """Seconds after which a launcher that was told to stop has ended, if nothing is wrong with it."""
        return self.drain_timeout + self.shutdown_timeout + 5.0


class ClusterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The hosts that a pipeline is spread over; each runs the same command with its own `node_rank`.

    Node 0 runs the coordinator, which the others reach at `master_addr:master_port`. Each node is reached at its
    `node_addr`: by default the address from which it reaches node 0.

    Args:
        nnodes: number of hosts; with 2 or more, further ones may join while the pipeline runs.
        node_rank: rank of this host, from 0.
        master_addr: address or name of node 0.
        master_port: node 0's port for the other nodes; clients use another.
        node_addr: address at which the other nodes reach this one.
    """

    nnodes: Annotated[int, Meta(ge=1, le=1024)] = 1
    node_rank: Rank = 0
    master_addr: Host = "127.0.0.1"
    master_port: Annotated[int, Meta(ge=1, le=65535)] = 29600
    node_addr: Host | None = None


class FlowConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what may wait where. An edge is sender -> receiver; its window is what may be sent without new credit.

    Args:
        edge_messages: window of an edge between stages, or from a stage to the coordinator, in messages.
        edge_bytes: the same in bytes.
        outbox_messages: unsent messages that may wait in a stage before it stops stepping its engine.
        outbox_bytes: the same in bytes.
        backlog_requests: requests ready to compute that a stage may hold before it stops granting credit.
        client_window_messages: window to a client, in messages. Clients grant credit per 64 messages, 256 KiB or 50 ms.
        client_window_bytes: the same in bytes.
        client_messages: messages that may wait for a client beyond its window while it has at most ten requests, for
            a hundred requests ten times as many; with more, its requests fail.
        client_bytes: bytes of these, however many requests it has; by default 64 MiB, and 1 GiB in a pipeline that
            makes pictures.
        client_stall_seconds: seconds without credit, while messages wait, after which a client's requests fail.
        early_chunk_seconds: seconds that input may wait in a stage for the announcement of its request.
        arena_bytes: shared memory of a replica for large buffers, at least 1 MiB; 0 for none.
        inline_bytes: buffers larger than this go through shared memory.
    """

    edge_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    edge_bytes: Annotated[int, Meta(ge=1, le=LARGEST)] = 64 << 20
    outbox_messages: Annotated[int, Meta(ge=1, le=10_000)] = 256
    outbox_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 64 << 20
    backlog_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    client_window_messages: Annotated[int, Meta(ge=256, le=1_000_000)] = 1024
    client_window_bytes: Annotated[int, Meta(ge=1 << 20, le=LARGEST)] = 16 << 20
    client_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    client_bytes: Annotated[int, Meta(ge=1, le=LARGEST)] | None = None
    client_stall_seconds: Seconds = 30.0
    early_chunk_seconds: Seconds = 10.0
    arena_bytes: Annotated[int, Meta(ge=0, le=LARGEST)] = 64 << 20
    inline_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 32 << 10


class PipelineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline: a checkpoint and a directed acyclic graph of stages.

    Args:
        name: its name in logs and for clients; over HTTP, the name of the model.
        model: checkpoint folder, relative to the YAML file, or hub name.
        stages: the stages, in any order.
        coordinator: the process that owns requests.
        limits: largest messages.
        flow: limits on what may wait where.
        http: the HTTP server.
        plugins: modules with your own models, from allowed prefixes; see docs/extending.md.
        cluster: the hosts, if there is more than one.
        adapters: LoRA adapters of the stage that writes text, of a diffusers stage, or of one that denoises pictures
            if its model takes any: folders by name, relative to the YAML file. A request names one as its model, or
            as the stage's parameter `adapter`.
        tool_call_parser: vLLM's name of the parser for the model's tool calls, such as `hermes`; without one, requests
            with tools are refused.
        tool_chat_template: file with the chat template of prompts with tools, for models whose own has no place for
            them; relative to the YAML file.
        mps: `auto` runs the replicas that share a GPU under a private CUDA MPS daemon, so that they compute at the same
            time; `off` starts none, so that they take turns.
    """

    name: Annotated[str, Meta(min_length=1, max_length=128), IN_ONE_LINE]
    model: Line
    stages: Annotated[list[StageConfig], Meta(min_length=1, max_length=64)]
    coordinator: CoordinatorConfig = CoordinatorConfig()
    limits: Limits = Limits()
    flow: FlowConfig = FlowConfig()
    http: HttpConfig = HttpConfig()
    plugins: Annotated[list[Line], Meta(max_length=64)] = []
    cluster: ClusterConfig = ClusterConfig()
    adapters: Annotated[dict[AdapterName, Line], Meta(max_length=MAX_ADAPTERS)] = {}
    tool_call_parser: Line | None = None
    tool_chat_template: Line | None = None
    mps: Literal["auto", "off"] = "auto"

    def stage(self, name: str) -> StageConfig:
        """The stage of this name. Raises `ConfigError` if there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"There is no stage {name!r}; the stages are {[stage.name for stage in self.stages]}.")

    @property
    def entry(self) -> StageConfig:
        """Stage that takes the prompt: the one without inputs."""
        return next(stage for stage in self.stages if stage.inputs is None)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities in which the pipeline can answer, in stage order."""
        return tuple(dict.fromkeys(modality for stage in self.stages for modality in stage.outputs))

    @property
    def client_bytes(self) -> int:
        """Bytes that may wait for a client: some sound, or the pictures of requests that end at the same time."""
        if self.flow.client_bytes is not None:
            return self.flow.client_bytes
        return 1 << 30 if {Modality.IMAGE, Modality.VIDEO, Modality.LATENTS} & set(self.modalities) else 64 << 20

    def prompted(self, name: str) -> tuple[str, ...]:
        """Return the stages that take the prompts of a prompt stage, and not its sound alone."""
        followers = {follower: self.stage(follower).inputs for follower in self.downstream(name)}
        return tuple(one for one, inputs in followers.items() if inputs and inputs.processor != SOUND_PROCESSOR)

    def downstream(self, name: str) -> tuple[str, ...]:
        """Return the stages that take input from `name`."""
        return tuple(stage.name for stage in self.stages if name in stage.source_names)

    def route(self, modalities: Iterable[str]) -> tuple[str, ...]:
        """Return the stages needed to answer in `modalities`, in graph order, entry first."""
        return self.feeding({stage.name for stage in self.stages if set(stage.outputs) & set(modalities)})

    def feeding(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return these stages and all whose output reaches them, in graph order."""
        needed = set(names)
        for stage in reversed(self.stages):  # stages are in topological order after validation
            if stage.name in needed:
                needed.update(stage.source_names)
        return tuple(stage.name for stage in self.stages if stage.name in needed)

    def digest(self) -> str:
        """Hash what both ends of a connection must agree on, which leaves out settings of a single host."""
        coordinator = msgspec.structs.replace(self.coordinator, run_dir=None, keys_dir=None, listen="ipc")
        cluster = msgspec.structs.replace(self.cluster, nnodes=1, node_rank=0, node_addr=None, master_addr="-")
        template = "-" if self.tool_chat_template is not None else None
        shared = msgspec.structs.replace(
            self, coordinator=coordinator, cluster=cluster, mps="auto", tool_chat_template=template
        )
        return hashlib.sha256(msgspec.json.encode(shared, order="deterministic")).hexdigest()[:16]


FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)


def meanings(struct: type[Struct]) -> dict[str, str]:
    """Map each field of a struct to its text in `Args:` of the docstring."""
    _, _, text = inspect.cleandoc(struct.__doc__ or "").partition("Args:\n")
    parts = FIELD.split(text)[1:]
    return {name: " ".join(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)}
