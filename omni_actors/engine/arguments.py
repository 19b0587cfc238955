"""Turns a stage's settings into vLLM's configuration, checks them, and builds the engine of a stage."""

from __future__ import annotations

import dataclasses
import difflib
import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import msgspec
import vllm.config
from pydantic import Field, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from vllm.config import VllmConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils import jit_monitor
from vllm.utils.import_utils import resolve_obj_by_qualname

from omni_actors.config import Executor, PipelineConfig, StageConfig, StageKind
from omni_actors.config.checkpoint import model_of
from omni_actors.config.checks import adapted_stages
from omni_actors.engine.models import (
    ModelKind,
    ModelSpec,
    checkpoint_architecture,
    find_model_spec,
    load_plugins,
    prompted_stage,
    register_models,
)
from omni_actors.engine.models.diffusers_layout import checkpoint_folder, part_folder
from omni_actors.engine.platform import prepare
from omni_actors.errors import ConfigError
from omni_actors.stage.engine_interface import StageEngine
from omni_actors.vllm_version import Platform


def executor_backend(workers: int, executor: Executor = "host") -> str:
    """vLLM's `distributed_executor_backend` for this number of workers."""
    if executor == "ray":
        # vLLM's older executor for Ray cannot schedule ahead, and wants hosts whose addresses differ.
        os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1"
        return "ray"
    if workers == 1:
        return "omni_actors.engine.core.OmniUniProcExecutor"
    # A stage process has threads and sockets, which must not be forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return "mp"


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


CONFIG = "adapter_config.json"  # of PEFT, which wrote the adapter
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can reserve
AT_A_TIME = 8  # adapters on the device, unless `engine.max_loras` says otherwise


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The part of an adapter's configuration that is read here."""

    r: int


def engine_arguments(adapters: Mapping[str, str], platform: Platform) -> dict[str, Any]:
    """vLLM's arguments for these adapters, folders by name; none for none.

    Raises:
        ConfigError: a folder holds no adapter, or one of a rank that vLLM does not have.
    """
    if not adapters:
        return {}
    rank = max(rank_of(name, Path(folder)) for name, folder in adapters.items())
    count = len(adapters)
    # On a CPU, vLLM runs requests without an adapter with the one in the last place, which therefore stays empty.
    places = count + 1 if platform is Platform.CPU else min(AT_A_TIME, count)
    return {
        "enable_lora": True,
        "max_loras": places,
        # Each is read once, when the stage starts: none may have to leave the host's memory for another.
        "max_cpu_loras": max(places, count),
        "max_lora_rank": next(reserved for reserved in RANKS if reserved >= rank),
    }


def rank_of(name: str, folder: Path) -> int:
    """The rank of the adapter in a folder. Raises `ConfigError` for one that vLLM cannot run."""
    try:
        rank = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_AdapterConfig).r
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"adapters.{name}: {folder} holds no LoRA adapter: {error}.",
            hint=f"Name the folder with {CONFIG} and adapter_model.safetensors.",
        ) from error
    if not 1 <= rank <= RANKS[-1]:
        raise ConfigError(f"adapters.{name}: its rank is {rank}; vLLM runs ranks from 1 to {RANKS[-1]}.")
    return rank


def lora_requests(folders: Mapping[str, str]) -> dict[str, LoRARequest]:
    """What vLLM needs to load and to run each adapter, which it knows by number, and its prefix cache by name."""
    return {name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(folders.items(), 1)}


GIB = 1 << 30
FEATURES_GIB = 0.5  # of a prompt stage, for the media of earlier turns

# Fields that this package sets itself; with other values a stage would not be what its engine expects.
RESERVED = frozenset(
    {"model", "worker_cls", "scheduler_cls", "distributed_executor_backend", "hf_overrides", "additional_config"}
)
OF_HOSTS = frozenset({"nnodes", "node_rank", "master_addr", "master_port"})  # of workers without Ray

_DEFAULTS: dict[str, Any] = {
    # sampling.py adds the end tokens; "auto" would mix in the checkpoint's sampling defaults.
    "generation_config": "vllm",
    "mm_processor_cache_gb": 0,  # the prompt stage computes features
    "enable_prefix_caching": False,
    # Requests carry a priority, which must mean the same in every stage.
    "scheduling_policy": "priority",
    # It takes 32-70 s per stage on a GPU, for kernels that our own warm-up compiles faster.
    "kernel_config": {"enable_jit_warmup": False},
}


@dataclass(frozen=True)
class OmniModelConfig:
    """The part of a stage's configuration that vLLM does not know.

    Args:
        model: folder or hub name of the checkpoint, with all its stages.
        model_stage: the stage of it, for example "talker".
        budget_bytes: bytes that the stage's requests may hold at a time: embedding rows in an autoregressive stage, in
            a diffusion stage device memory with what a step needs.
        row_cache_bytes: bytes of memory for rows of positions in the prefix cache; without them, requests whose rows
            another stage takes compute all of their prompt. 0 keeps none.
        steps_per_schedule: decode steps of an autoregressive stage for one scheduling; None is the model's own number.
        decode: how a diffusion stage decodes: the fields of `config.DecodeConfig` by name.
        adapters: folders of LoRA adapters by name.
        tool_call_parser: vLLM's name of the parser that finds tool calls in answers.
        tool_chat_template: file with the chat template of prompts with tools; default: the model's own.
    """

    model: str
    model_stage: str
    budget_bytes: int = 2 * GIB
    row_cache_bytes: int = GIB
    steps_per_schedule: int | None = None
    decode: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    tool_call_parser: str | None = None
    tool_chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.budget_bytes < 1:
            raise ConfigError(f"budget_bytes must be positive; got {self.budget_bytes}.")
        if self.row_cache_bytes < 0:
            raise ConfigError(f"row_cache_bytes must not be negative; got {self.row_cache_bytes}.")
        if self.steps_per_schedule is not None and self.steps_per_schedule < 1:
            raise ConfigError(f"steps_per_schedule must be at least 1; got {self.steps_per_schedule}.")


@dataclass(frozen=True)
class OmniEngineArgs:
    """Arguments of one stage's engine.

    Args:
        kind: the engine; "prompt" prepares the prompts of a thinker with the thinker's arguments.
        engine: fields of vLLM's EngineArgs by name.
        asynchronous: schedule one step ahead of the device; `None` leaves it to vLLM (on for CUDA, off for CPU).
        where: path of `engine` in the YAML, for messages.
        executor: where the workers run.

    Raises:
        ConfigError: `engine` has an unknown or a reserved field.
    """

    model_config: OmniModelConfig
    kind: ModelKind
    engine: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool | None = None
    where: str = "engine"
    executor: Executor = "host"

    def __post_init__(self) -> None:
        known = {item.name for item in dataclasses.fields(EngineArgs)} - RESERVED - OF_HOSTS
        for name in self.engine:
            if name in OF_HOSTS:
                raise ConfigError(
                    f"{self.where}.{name}: the workers of a replica are on one host, or on GPUs of a Ray cluster.",
                    hint="Remove it; for workers on several hosts, give the stage `executor: ray` (docs/deploying.md).",
                )
            if name in RESERVED:
                raise ConfigError(f"{self.where}.{name} is set by omni_actors itself.", hint="Remove it.")
            if name not in known:
                nearest = difflib.get_close_matches(name, known, 1)
                advice = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ConfigError(f"{self.where}.{name} is not a field of vLLM's EngineArgs.{advice}")

    def check(self) -> None:
        """Check values that can be judged without the checkpoint. Raises `ConfigError` for a wrong one."""
        self._parallel_sizes()
        for name, value in self.engine.items():
            if problem := wrong_type(name, value) or out_of_range(name, value):
                raise ConfigError(f"{self.where}.{name}: {problem}; got {value!r}.")

    def model_spec(self) -> ModelSpec:
        """The model of this stage. Raises `ConfigError` if there is none or if it is of another kind."""
        architecture = checkpoint_architecture(self.model_config.model)
        stage = prompted_stage(architecture) if self.kind == "prompt" else self.model_config.model_stage
        spec = find_model_spec(architecture, stage)
        if self.kind not in (spec.kind, "prompt"):
            raise ConfigError(f"Stage {stage!r} is {spec.kind}, not {self.kind}.")
        return spec

    def adapter_class(self, base: type) -> Any:
        """The model's adapter. Raises `ConfigError` if it is no subclass of `base`."""
        name = self.model_spec().adapter
        found = resolve_obj_by_qualname(name)
        if isinstance(found, type) and issubclass(found, base):
            return found
        raise ConfigError(
            f"{name} is not an {base.__name__}.",
            hint="Name a subclass of it as `adapter` in the model's ModelSpec (docs/extending.md).",
        )

    def create_engine_config(self) -> VllmConfig:
        """vLLM's configuration of this stage; also registers its models with vLLM.

        Raises:
            ConfigError: vLLM refuses the arguments, or they contradict what the model requires.
        """
        platform = prepare()
        self.check()
        spec = self.model_spec()
        register_models(spec)
        for name, value in spec.required.items():
            if self.engine.get(name, value) != value:
                raise ConfigError(f"{self.where}.{name} must be {value!r} for the {self.model_config.model_stage}.")
        parallel = self._parallel_sizes()
        adapters = engine_arguments(self.model_config.adapters, platform) if self.kind == "autoregressive" else {}
        if platform is Platform.CPU and self.engine.get("max_loras", math.inf) < adapters.get("max_loras", 0):
            raise ConfigError(f"{self.where}.max_loras must be at least {adapters['max_loras']} on a CPU.")
        features = {"mm_processor_cache_gb": FEATURES_GIB} if self.kind == "prompt" else {}
        arguments = {**_DEFAULTS, **features, **spec.engine, **adapters, **self.engine, **spec.required}
        arguments |= {
            "model": self._folder(spec),
            "hf_overrides": spec.hf_overrides,
            "distributed_executor_backend": executor_backend(math.prod(parallel.values()), self.executor),
            **parallel,
            "additional_config": {
                "omni": {
                    **dataclasses.asdict(self.model_config),
                    "steps_per_schedule": self._steps_per_schedule(spec, arguments),
                    "kind": self.kind,
                    "runner": spec.runner,
                    "speech_limit": spec.speech_limit,
                }
            },
        }
        if spec.folder and not arguments.get("skip_tokenizer_init"):
            folder = checkpoint_folder(self.model_config.model)
            arguments.setdefault("tokenizer", str(part_folder(folder, spec.tokens_folder)))
        arguments |= self._classes(platform)
        if self.asynchronous is not None:
            arguments["async_scheduling"] = self.asynchronous
        try:
            config = EngineArgs(**arguments).create_engine_config()
        except ConfigError:
            raise
        except Exception as error:  # vLLM and transformers raise anything, above all for a checkpoint's odd config.json
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ConfigError(
                f"vLLM refuses the arguments of the {self.model_config.model_stage}, or the config.json of "
                f"{self.model_config.model}: {kind}{error}",
                hint="Correct the one or the other; omni-actors check tries both without starting anything.",
            ) from error
        config.model_config.hf_overrides = {}  # done, and workers with a process of their own cannot get a closure
        if self.asynchronous is not None:
            # The CPU platform always turns it off, although its executor supports it; tests turn it back on.
            config.scheduler_config.async_scheduling = self.asynchronous
        if self.kind != "prompt" and config.scheduler_config.async_scheduling:
            # vLLM has decided only now; a plain scheduler would waste every other step.
            config.scheduler_config.scheduler_cls = self._scheduler(asynchronous=True)
        return config

    def _steps_per_schedule(self, spec: ModelSpec, arguments: Mapping[str, Any]) -> int:
        """How many steps a scheduling stands for. Raises `ConfigError` if it cannot be as many as were asked for."""
        asked = self.model_config.steps_per_schedule
        problem = None
        if spec.steps_per_schedule is None:
            problem = f"The {self.model_config.model_stage} of this model"
        elif arguments.get("pipeline_parallel_size", 1) > 1:
            problem = "A stage with pipeline_parallel_size"
        elif arguments.get("speculative_config") is not None:
            problem = "A stage with speculative_config"
        if problem is None:
            return asked or spec.steps_per_schedule or 1
        if asked is not None and asked > 1:
            raise ConfigError(f"{problem} takes one step at a time; steps_per_schedule is {asked}.", hint="Remove it.")
        return 1

    def _folder(self, spec: ModelSpec) -> str:
        """What vLLM takes for the checkpoint: one part of it, if it has a folder for each."""
        model = self.model_config.model
        return str(part_folder(checkpoint_folder(model), spec.folder)) if spec.folder else model

    def _parallel_sizes(self) -> dict[str, int]:
        """vLLM's parallel sizes by name. Raises `ConfigError` for sizes that this kind of stage cannot have."""
        sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), 1)
        if self.kind == "prompt":  # has the thinker's arguments and runs no model
            return sizes
        for name in sizes:
            size = self.engine.get(name, 1)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{self.where}.{name} must be a whole number of at least 1; got {size!r}.")
            if size > 1 and self.kind == "diffusion":
                raise ConfigError("A diffusion stage runs on one GPU.", hint="Give it replicas instead.")
            sizes[name] = size
        return sizes

    def _classes(self, platform: Platform) -> dict[str, str]:
        if self.kind == "prompt":  # only reads the configuration, runs no core
            return {}
        worker = "cpu.OmniCPUWorker" if platform is Platform.CPU else "gpu.OmniGPUWorker"
        if self.kind == "diffusion":
            worker = "diffusion.DiffusionWorker"
        scheduler = self._scheduler(asynchronous=False)
        return {"worker_cls": f"omni_actors.engine.workers.{worker}", "scheduler_cls": scheduler}

    def _scheduler(self, *, asynchronous: bool) -> str:
        kind = "Diffusion" if self.kind == "diffusion" else "Omni"
        return f"omni_actors.engine.scheduler.{kind}{'Async' if asynchronous else ''}Scheduler"


ENGINES: dict[ModelKind, str] = {  # imported by name, so that a process loads only the one it runs
    "prompt": "omni_actors.engine.prompt.PromptEngine",
    "autoregressive": "omni_actors.engine.autoregressive.AutoregressiveEngine",
    "encoder": "omni_actors.engine.encoder.EncoderEngine",
    "diffusion": "omni_actors.engine.diffusion.DiffusionEngine",
}


def build_stage_engine(pipeline: PipelineConfig, stage: StageConfig, report: Callable[[str], None]) -> StageEngine:
    """The engine of a pipeline's stage.

    Args:
        report: called with the start-up phase.
    """
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM then logs through our handlers (logs.py), in one format
    if threads := os.environ.get("OMP_NUM_THREADS"):
        # The fork server has read the variable already; this process may have another share of the cores.
        import torch

        torch.set_num_threads(int(threads))
    load_plugins(pipeline.plugins)
    report(f"loading {stage.part}")
    if stage.kind is StageKind.DIFFUSERS:
        from omni_actors.engine.pipelines import DiffusersEngine

        return DiffusersEngine(pipeline, stage)
    return build_engine(stage_arguments(pipeline, stage))


def stage_arguments(pipeline: PipelineConfig, stage: StageConfig) -> OmniEngineArgs:
    """Engine arguments of a stage. The prompt stage also has those of the stage that it prepares prompts for."""
    engine = dict(stage.engine)
    if stage.kind is StageKind.PROMPT:
        for name in pipeline.prompted(stage.name):
            engine = {**pipeline.stage(name).engine, **engine}
    model = OmniModelConfig(
        model=model_of(pipeline, stage),
        model_stage=stage.part,
        budget_bytes=stage.budget_bytes,
        row_cache_bytes=stage.row_cache_bytes,
        steps_per_schedule=stage.steps_per_schedule,
        decode=msgspec.to_builtins(stage.decode) if stage.decode is not None else {},
        adapters=dict(pipeline.adapters) if stage.name in adapted_stages(pipeline) else {},
        tool_call_parser=pipeline.tool_call_parser,
        tool_chat_template=pipeline.tool_chat_template,
    )
    where = f"stages.{stage.name}.engine"
    return OmniEngineArgs(model, cast("ModelKind", stage.kind.value), engine, where=where, executor=stage.executor)


def check_arguments(pipeline: PipelineConfig, stages: Sequence[StageConfig], *, with_checkpoint: bool) -> None:
    """Check the engine arguments of stages without loading a model.

    Args:
        with_checkpoint: also let vLLM build its configuration, which reads the checkpoint's and needs its platform.

    Raises:
        ConfigError: an argument is unknown, of the wrong type or refused by vLLM; with its dotted path.
    """
    for stage in stages:  # first each one's own: the prompt stage has arguments of the stage after it, too
        model, kind = OmniModelConfig(model_of(pipeline, stage), stage.part), cast("ModelKind", stage.kind.value)
        OmniEngineArgs(model, kind, stage.engine, where=f"stages.{stage.name}.engine").check()
    load_plugins(pipeline.plugins)
    for stage in stages if with_checkpoint else ():
        stage_arguments(pipeline, stage).create_engine_config()


def build_engine(arguments: OmniEngineArgs) -> StageEngine:
    """The engine for `arguments`, loaded and warmed up.

    Raises:
        ConfigError: the arguments are wrong.
        StartupError: the model does not load or the core does not start.
    """
    # vLLM runs the garbage collector eight times while it starts; without this each pass scans every import (0.3 s).
    gc.freeze()
    engine: StageEngine = resolve_obj_by_qualname(ENGINES[arguments.kind])(arguments)
    engine.warm_up()
    jit_monitor.activate(verbose=True)  # the log names each kernel that a request waits for a compiler of
    return engine
