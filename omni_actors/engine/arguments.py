"""Turns a stage's settings into vLLM's configuration."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from omni_actors.config import Executor
from omni_actors.engine.argument_checks import problem_of
from omni_actors.engine.executor import executor_backend
from omni_actors.engine.lora import engine_arguments
from omni_actors.engine.models import (
    ModelKind,
    ModelSpec,
    checkpoint_architecture,
    find_model_spec,
    prompted_stage,
    register_models,
)
from omni_actors.engine.models.diffusers_layout import checkpoint_folder, part_folder
from omni_actors.engine.platform import prepare
from omni_actors.errors import ConfigError
from omni_actors.stage.start_phases import phase
from omni_actors.vllm_version import Platform

GIB = 1 << 30

# Fields that this package sets itself; with other values a stage would not be what its engine expects.
RESERVED = frozenset(
    {"model", "worker_cls", "scheduler_cls", "distributed_executor_backend", "hf_overrides", "additional_config"}
)
OF_HOSTS = frozenset({"nnodes", "node_rank", "master_addr", "master_port"})  # of workers without Ray

_DEFAULTS: dict[str, Any] = {
    # sampling.py adds the end tokens; "auto" would mix in the checkpoint's sampling defaults.
    "generation_config": "vllm",
    # The prompt stage sends whole features; vLLM's cache protocol would leave out tensors it has sent before.
    "mm_processor_cache_gb": 0,
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
        row_budget_bytes: bytes of embedding rows that an autoregressive stage may hold at a time.
        row_cache_bytes: bytes of memory for rows of positions in the prefix cache; without them, requests whose rows
            another stage takes compute all of their prompt. 0 keeps none.
        steps_per_schedule: decode steps of an autoregressive stage for one scheduling; None is the model's own number.
        latent_budget_bytes: bytes of device memory that a diffusion stage holds for its requests and computes with.
        decode: how a diffusion stage decodes: the fields of `config.DecodeConfig` by name.
        adapters: folders of LoRA adapters by name.
        instruction: what a prompt stage puts before what it gets.
        tool_call_parser: vLLM's name of the parser that finds tool calls in answers.
        tool_chat_template: file with the chat template of prompts with tools; default: the model's own.
    """

    model: str
    model_stage: str
    row_budget_bytes: int = 2 * GIB
    latent_budget_bytes: int = 2 * GIB
    row_cache_bytes: int = GIB
    steps_per_schedule: int | None = None
    decode: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    instruction: str = ""
    tool_call_parser: str | None = None
    tool_chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("row_budget_bytes", "latent_budget_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive; got {getattr(self, name)}.")
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
    executor: Executor = Executor.HOST

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
            problem = problem_of(name, value)
            if problem:
                raise ConfigError(f"{self.where}.{name}: {problem}; got {value!r}.")

    def model_spec(self) -> ModelSpec:
        """The model of this stage. Raises `ConfigError` if there is none or if it is of another kind."""
        architecture = checkpoint_architecture(self.model_config.model)
        stage = prompted_stage(architecture) if self.kind == "prompt" else self.model_config.model_stage
        spec = find_model_spec(architecture, stage)
        if self.kind not in (spec.kind, "prompt"):
            raise ConfigError(f"Stage {stage!r} is {spec.kind}, not {self.kind}.")
        return spec

    @phase("configuration")
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
        adapters = engine_arguments(self.model_config.adapters, platform)
        if platform is Platform.CPU and self.engine.get("max_loras", math.inf) < adapters.get("max_loras", 0):
            raise ConfigError(f"{self.where}.max_loras must be at least {adapters['max_loras']} on a CPU.")
        arguments = {**_DEFAULTS, **spec.engine, **adapters, **self.engine, **spec.required}
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
        if self.kind == "diffusion":
            worker = "omni_actors.engine.diffusion_worker.DiffusionWorker"
        else:
            name = "cpu.OmniCPUWorker" if platform is Platform.CPU else "gpu.OmniGPUWorker"
            worker = f"omni_actors.engine.{name}"
        return {"worker_cls": worker, "scheduler_cls": self._scheduler(asynchronous=False)}

    def _scheduler(self, *, asynchronous: bool) -> str:
        if self.kind == "diffusion":
            name = "diffusion_scheduler.Diffusion"
        else:
            name = "scheduler.Omni"
        return f"omni_actors.engine.{name}{'Async' if asynchronous else ''}Scheduler"
