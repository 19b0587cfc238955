"""The common part of the workers and runners of autoregressive and diffusion stages."""

from __future__ import annotations

import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_actors.engine.models import checkpoint_architecture, find_model_spec, register_models
from omni_actors.host.processes import die_with_parent
from omni_actors.stage.start_phases import phase

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    VllmWorker = WorkerBase
else:
    VllmWorker = object  # what stands behind the mixin in the order of the base classes


def omni_options(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """Our part of vLLM's additional_config (see `OmniEngineArgs.create_engine_config`)."""
    config = vllm_config.additional_config
    options: Mapping[str, Any] = config.get("omni", {}) if isinstance(config, dict) else {}
    return options


def memory_hint(error: BaseException) -> str | None:
    """What to do next if the device ran out of memory; None for all other errors."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    return (
        "The device ran out of memory: lower budget_bytes, engine.max_num_seqs or engine.max_num_batched_tokens of "
        "this stage, or engine.gpu_memory_utilization of another stage on the same device."
    )


class OmniRunnerBase(ABC):
    """A runner with its own state per request, which the engine can count and clear."""

    @abstractmethod
    def omni_counts(self) -> dict[str, int]:
        """State held for requests, by name; all zero when idle."""

    @abstractmethod
    def omni_reset(self) -> None:
        """Forget a step that failed halfway. The requests themselves end through `finished_req_ids` as usual."""


class OmniWorkerBase(VllmWorker):
    """Mixin for vLLM workers whose `model_runner` is an `OmniRunnerBase`."""

    @property
    def _omni_runner(self) -> OmniRunnerBase:
        return cast("OmniRunnerBase", self.model_runner)  # each of vLLM's workers declares another class for it

    @phase("device")
    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `init_device`, timed, where ranks wait for one another."""
        if self.vllm_config.parallel_config.world_size > 1:
            _die_with_engine()
        return super().init_device(*args, **kwargs)

    @phase("kernels")
    def compile_or_warm_up_model(self) -> Any:
        """vLLM's `compile_or_warm_up_model`, timed."""
        return super().compile_or_warm_up_model()

    @phase("weights")
    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `load_model`, after our models are registered: with several workers, each has its own process."""
        options = omni_options(self.vllm_config)
        register_models(find_model_spec(checkpoint_architecture(options["model"]), options["model_stage"]))
        return super().load_model(*args, **kwargs)

    def omni_counts(self) -> dict[str, int]:
        """State that the runner holds for requests, by name; all zero when idle."""
        return self._omni_runner.omni_counts()

    def omni_reset(self) -> None:
        """Forget a step that failed halfway."""
        self._omni_runner.omni_reset()

    def omni_prompt_sizes(self) -> list[int]:
        """Numbers of tokens for `omni_run_prompts` that compile kernels; none where nothing is compiled."""
        return []

    def omni_run_prompts(self, tokens: int) -> None:
        """Run the model on a batch of prompts that no request has, and that leaves nothing in the KV cache."""
        runner = cast("GPUModelRunner", self.model_runner)
        runner._dummy_run(tokens, skip_eplb=True, is_profile=True, randomize_inputs=True)


def _die_with_engine() -> None:
    """Have a worker that has a process of its own end with the process that started it, also while it loads.

    By themselves vLLM's workers take ten seconds to leave the GPU, and those that still wait for others do not end.
    """
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it died before
        os._exit(1)


class HostCopy:
    """Tensors on their way to the host: one copy each for the whole batch, on a side stream, with their dtype.

    Args:
        tensors: device tensors that are not written to again; kept alive until the copy is complete.
        copy_stream: the side stream; needed for CUDA tensors only.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], copy_stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self._source: Mapping[str, torch.Tensor] = tensors
        if not any(tensor.is_cuda for tensor in tensors.values()):
            self._host = dict(tensors)
            return
        if copy_stream is None:
            raise ValueError("CUDA tensors need a copy_stream.")
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            # For a non-blocking copy to the CPU torch uses pinned memory by itself.
            self._host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
            self._event = torch.cuda.Event(blocking=True)  # sleeps instead of spinning on the driver's lock
            self._event.record(copy_stream)

    def wait(self) -> dict[str, torch.Tensor]:
        """Wait for the copies; return the host tensors."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        self._source = {}
        return self._host


def attachment_of(output: EngineCoreOutput) -> dict[str, Any]:
    """What `AttachedOutput.attachments` gave this request in a step; empty for none."""
    return cast("dict[str, Any]", output.pooling_output or {})  # vLLM declares a tensor, and passes on what it gets


def attach(output: EngineCoreOutput, attachment: Mapping[str, Any]) -> None:
    """Put another attachment in the place of an output's own."""
    output.pooling_output = attachment  # type: ignore[assignment]  # as above


class WrappedOutput(AsyncModelRunnerOutput):
    """A runner's output to which something is added once vLLM waits for it."""

    def __init__(self, inner: AsyncModelRunnerOutput | ModelRunnerOutput) -> None:
        self._inner = inner

    def inner_output(self) -> ModelRunnerOutput:
        """Wait for the output itself."""
        inner = self._inner
        return inner.get_output() if isinstance(inner, AsyncModelRunnerOutput) else inner

    def get_kv_connector_output(self) -> Any:
        """Abstract since vLLM 0.33, unused in 0.32."""
        inner = getattr(self._inner, "get_kv_connector_output", None)
        return inner() if inner else getattr(self._inner, "kv_connector_output", None)


class AttachedOutput(WrappedOutput):
    """A runner's output with one dictionary per request in `pooler_output`.

    vLLM passes `pooler_output[i]` on as `EngineCoreOutput.pooling_output`, even for requests that sample tokens.
    Subclasses build the dictionaries in `attachments`, which runs when vLLM waits for the output.
    """

    @abstractmethod
    def attachments(self) -> list[dict[str, Any] | None]:
        """One entry per request, in the order of the batch."""

    def get_output(self) -> ModelRunnerOutput:
        """vLLM's output, with the attachments once they have arrived."""
        output = self.inner_output()
        # Declared for tensors, but passed on untouched.
        output.pooler_output = self.attachments()  # type: ignore[assignment]
        return output
