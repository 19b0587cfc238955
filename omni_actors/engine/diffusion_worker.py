"""The worker of a diffusion stage: no KV cache, no sampler; a `DiffusionModelRunner` does one denoise step per call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from omni_actors.engine.diffusion_runner import (
    FAILED_TOKEN,
    STEP_TOKEN,
    DiffusionModelRunner,
    StepResult,
    diffusion_job,
)
from omni_actors.engine.worker_base import AttachedOutput, HostCopy, OmniWorkerBase, memory_hint, omni_options
from omni_actors.errors import ConfigError, EngineError, InvalidRequest, OmniError
from omni_actors.stage.start_phases import phase

logger = logging.getLogger(__name__)


class DiffusionOutput(AttachedOutput):
    """The output of one step. The tensors of all requests are copied to the host, once per dtype, on a side stream.

    Waiting for the output waits only for that copy, while the device works on the next step. A request's attachment is
    its tensors, on the CPU, after its last step, `{"error": OmniError}` if it failed, or None.
    """

    def __init__(
        self, request_ids: Sequence[str], results: Mapping[str, StepResult], copy_stream: torch.cuda.Stream | None
    ) -> None:
        failed = [results[request_id].error is not None for request_id in request_ids]
        super().__init__(
            ModelRunnerOutput(
                req_ids=list(request_ids),
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=[[FAILED_TOKEN if wrong else STEP_TOKEN] for wrong in failed],
            )
        )
        self._results = [results[request_id] for request_id in request_ids]
        flat: dict[str, list[torch.Tensor]] = {}
        for result in self._results:
            for tensor in result.tensors.values():
                flat.setdefault(str(tensor.dtype), []).append(tensor.reshape(-1))
        joined = {dtype: torch.cat(tensors) for dtype, tensors in flat.items()}
        self._copy = HostCopy(joined, copy_stream)
        self._computed: torch.cuda.Event | None = None
        if copy_stream is not None and not joined:
            # A step without output is waited for, too: otherwise the host would queue all steps of a job at once, and
            # requests could join or leave only after them.
            self._computed = torch.cuda.Event(blocking=True)
            self._computed.record()

    def attachments(self) -> list[dict[str, Any] | None]:
        """Wait for the step and its copies; give every request its own tensors."""
        if self._computed is not None:
            self._computed.synchronize()
        host = self._copy.wait()
        offsets = dict.fromkeys(host, 0)
        entries: list[dict[str, Any] | None] = []
        for result in self._results:
            entry: dict[str, Any] = {}
            if result.error is not None:
                entry["error"] = result.error
            for name, tensor in result.tensors.items():
                kind = str(tensor.dtype)
                start, offsets[kind] = offsets[kind], offsets[kind] + tensor.numel()
                # Copied: a view would keep the memory of the whole batch alive.
                entry[name] = host[kind][start : offsets[kind]].clone().view(tensor.shape)
            entries.append(entry or None)
        return entries


class DiffusionWorker(OmniWorkerBase, WorkerBase):
    """Runs a `DiffusionModelRunner` under a plain `EngineCore`, on CPU and CUDA.

    A failing request ends alone: its output is its error and `FAILED_TOKEN`, at which vLLM's ordinary stop-token check
    ends it; the others go on.
    """

    model_runner: DiffusionModelRunner  # type: ignore[assignment]  # declared as a module for vLLM's own workers
    device: torch.device

    @phase("device")
    def init_device(self) -> None:
        """Choose the device; on CUDA also make the stream for copies to the host."""
        kind = self.device_config.device_type
        self._copy_stream: torch.cuda.Stream | None = None
        self._output: DiffusionOutput | None = None
        self._failed: dict[str, OmniError] = {}
        if kind == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
            # float32 must mean float32: by default convolutions run in TF32, with an error that depends on the batch.
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cuda.matmul.allow_tf32 = False
            self._copy_stream = torch.cuda.Stream(self.device)
        else:
            self.device = torch.device(kind)

    @phase("weights")
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Make and load the runner.

        Raises:
            ConfigError: `additional_config` names none, or a class that is no `DiffusionModelRunner`.
        """
        path = omni_options(self.vllm_config).get("runner")
        if not path:
            raise ConfigError("additional_config['omni']['runner'] names no diffusion model runner.")
        runner_class = resolve_obj_by_qualname(path)
        if not (isinstance(runner_class, type) and issubclass(runner_class, DiffusionModelRunner)):
            raise ConfigError(f"{path} is not a DiffusionModelRunner.")
        self.model_runner = runner_class(self.vllm_config, self.device)
        self.model_runner.load(dummy=load_dummy_weights or self.load_config.load_format == "dummy")

    @phase("warm-up")
    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up. The times are zero: vLLM only logs them."""
        self.model_runner.warm_up()
        return CompilationTimes(0.0, 0.0)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Empty: a diffusion request keeps its state in latents."""
        return {}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Do nothing: there is no KV cache to allocate."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The task whose requests vLLM's scheduler steps token by token."""
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute one step. `sample_tokens`, which both of EngineCore's loops call, returns its output."""
        for request_id in scheduler_output.finished_req_ids:
            self.model_runner.remove(request_id)
            self._failed.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._add(request.req_id, request.sampling_params)
        request_ids = list(scheduler_output.num_scheduled_tokens)
        if not request_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        # Asynchronous scheduling may schedule another step of a request before it has seen its failure.
        results = {key: StepResult(error=self._failed[key]) for key in request_ids if key in self._failed}
        results.update(self._step([key for key in request_ids if key not in results]))
        for request_id, result in results.items():
            if result.error is not None:
                self._fail(request_id, result.error)
                results[request_id] = StepResult(error=self._failed[request_id])
        self._output = DiffusionOutput(request_ids, results, self._copy_stream)
        return None

    def sample_tokens(self, grammar_output: Any) -> DiffusionOutput:
        """The output of the step that `execute_model` computed. Raises `EngineError` if there was none."""
        output, self._output = self._output, None
        if output is None:
            raise EngineError("sample_tokens was called without a step.")
        return output

    def _add(self, request_id: str, sampling_params: Any) -> None:
        job = diffusion_job(sampling_params)
        if job is None:
            self._fail(request_id, InvalidRequest("This stage computes diffusion requests only."))
            return
        try:
            self.model_runner.add(request_id, job)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - reported as this request's error
            self._fail(request_id, error)

    def _step(self, request_ids: list[str]) -> dict[str, StepResult]:
        """Do one step for these requests. If the batch fails, each is tried alone, so that only the culprits fail."""
        if not request_ids:
            return {}
        try:
            return dict(self.model_runner.step(request_ids))
        except torch.AcceleratorError:
            # The CUDA context is lost; no request can be saved in this process.
            raise
        except Exception as error:  # noqa: BLE001 - reported as the error of the requests that cause it
            if len(request_ids) == 1:
                return {request_ids[0]: StepResult(error=error)}
            logger.warning("a batch of %d requests failed; trying them one by one: %r", len(request_ids), error)
        results: dict[str, StepResult] = {}
        for request_id in request_ids:
            results.update(self._step([request_id]))
        return results

    def _fail(self, request_id: str, error: BaseException) -> None:
        self.model_runner.remove(request_id)
        if request_id in self._failed:
            return
        if not isinstance(error, OmniError):
            logger.error("request %s failed", request_id, exc_info=error)
            error = EngineError(f"The model failed: {type(error).__name__}: {error}", hint=memory_hint(error))
        self._failed[request_id] = error

    def omni_counts(self) -> dict[str, int]:
        """State of the runner, and failed requests that the scheduler has not ended yet."""
        return {**super().omni_counts(), "failed": len(self._failed)}

    def omni_reset(self) -> None:
        """Forget a step that failed halfway, with its output."""
        super().omni_reset()
        self._output = None

    def execute_dummy_batch(self) -> None:
        """Do nothing: a diffusion stage has no data-parallel peers."""

    def shutdown(self) -> None:
        """Drop the runner, and with it the model's memory. Idempotent."""
        runner = self.__dict__.pop("model_runner", None)
        self._output = None
        del runner
