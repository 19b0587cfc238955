"""The worker of a diffusion stage: no KV cache, no sampler; a `DiffusionModelRunner` does one denoise step per call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from omni_actors.engine.diffusion_runner import (
    FAILED_TOKEN,
    STEP_TOKEN,
    DiffusionModelRunner,
    StepResult,
    diffusion_job,
)
from omni_actors.errors import ConfigError, EngineError, InvalidRequest, OmniError

logger = logging.getLogger(__name__)


class DiffusionOutput(AsyncModelRunnerOutput):
    """The output of one step. All tensors of all requests cross to the host in one copy per dtype, on a side stream.

    `get_output` waits for that copy alone, so the device already works on the next step meanwhile. The entry of a request
    in `pooler_output` is None, a dict of CPU tensors after its last step, or an `OmniError`.
    """

    def __init__(
        self, request_ids: Sequence[str], results: Mapping[str, StepResult], copy_stream: torch.cuda.Stream | None
    ) -> None:
        self._request_ids = list(request_ids)
        self._results = results
        self._event: torch.cuda.Event | None = None
        self._host: dict[torch.dtype, torch.Tensor] = {}
        flat: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in self._tensors():
            flat.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        joined = {dtype: torch.cat(tensors) for dtype, tensors in flat.items()}
        if copy_stream is None or not joined:
            self._host = {dtype: tensor.cpu() for dtype, tensor in joined.items()}
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            for dtype, tensor in joined.items():
                pinned = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
                self._host[dtype] = pinned.copy_(tensor, non_blocking=True)
                # Its memory may be handed out again on the compute stream only after the copy.
                tensor.record_stream(copy_stream)
            self._event = torch.cuda.Event()
            self._event.record()

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for key in self._request_ids for tensor in self._results[key].tensors.values()]

    def get_output(self) -> ModelRunnerOutput:
        if self._event is not None:
            self._event.synchronize()
        offsets = dict.fromkeys(self._host, 0)
        outputs: list[Any] = []
        for request_id in self._request_ids:
            result = self._results[request_id]
            if result.error is not None:
                outputs.append(result.error)
                continue
            tensors = {}
            for name, tensor in result.tensors.items():
                start = offsets[tensor.dtype]
                offsets[tensor.dtype] = start + tensor.numel()
                # A copy of its own: a view would keep the pinned memory of the whole batch alive.
                tensors[name] = self._host[tensor.dtype][start : start + tensor.numel()].clone().view(tensor.shape)
            outputs.append(tensors or None)
        failed = [self._results[request_id].error is not None for request_id in self._request_ids]
        return ModelRunnerOutput(
            req_ids=self._request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(self._request_ids)},
            sampled_token_ids=[[FAILED_TOKEN if wrong else STEP_TOKEN] for wrong in failed],
            pooler_output=outputs,
        )


class DiffusionWorker(WorkerBase):
    """Runs a `DiffusionModelRunner` under a plain `EngineCore`, on CPU and CUDA, in float as the model wants it.

    One failing request ends alone: it gets its error as output together with `FAILED_TOKEN`, at which the ordinary
    stop-token check ends it; the others go on.
    """

    model_runner: DiffusionModelRunner

    def init_device(self) -> None:
        kind = self.device_config.device_type
        self._copy_stream: torch.cuda.Stream | None = None
        self._output: DiffusionOutput | None = None
        self._failed: dict[str, OmniError] = {}
        if kind == "cuda":
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
            self._copy_stream = torch.cuda.Stream(self.device)
        else:
            self.device = torch.device(kind)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        path = ((self.vllm_config.additional_config or {}).get("omni") or {}).get("runner")
        if not path:
            raise ConfigError("additional_config['omni']['runner'] names no diffusion model runner.")
        runner_class = resolve_obj_by_qualname(path)
        if not (isinstance(runner_class, type) and issubclass(runner_class, DiffusionModelRunner)):
            raise ConfigError(f"{path} is no DiffusionModelRunner.")
        self.model_runner = runner_class(self.vllm_config, self.device)
        self.model_runner.load(dummy=load_dummy_weights or self.load_config.load_format == "dummy")

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.model_runner.warm_up()
        return CompilationTimes(0.0, 0.0)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Nothing: a diffusion request keeps its state in latents."""
        return {}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """There is no KV cache to allocate."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute one step; the output is fetched with `sample_tokens`, which both of EngineCore's loops call."""
        for request_id in scheduler_output.finished_req_ids:
            self.model_runner.remove(request_id)
            self._failed.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._add(request.req_id, request.sampling_params)
        request_ids = list(scheduler_output.num_scheduled_tokens)
        if not request_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        # Asynchronous scheduling may schedule one more step of a request whose failure it has not seen yet.
        results = {key: StepResult(error=self._failed[key]) for key in request_ids if key in self._failed}
        results.update(self._step([key for key in request_ids if key not in results]))
        for request_id, result in results.items():
            if result.error is not None:
                self._fail(request_id, result.error)
                results[request_id] = StepResult(error=self._failed[request_id])
        self._output = DiffusionOutput(request_ids, results, self._copy_stream)
        return None

    def sample_tokens(self, grammar_output: Any) -> AsyncModelRunnerOutput:
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
        except Exception as error:
            self._fail(request_id, error)

    def _step(self, request_ids: list[str]) -> dict[str, StepResult]:
        """One step for these requests. If the batch fails, each is tried alone, so that only the culprits fail."""
        if not request_ids:
            return {}
        try:
            return dict(self.model_runner.step(request_ids))
        except torch.AcceleratorError:
            # The device's context is lost; no request can be saved in this process.
            raise
        except Exception as error:
            if len(request_ids) == 1:
                return {request_ids[0]: StepResult(error=error)}
            logger.warning("a batch of %d requests failed, trying them one by one: %r", len(request_ids), error)
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
            error = EngineError(f"The model failed: {type(error).__name__}: {error}")
        self._failed[request_id] = error

    def counts(self) -> dict[str, int]:
        """Requests that hold device memory, and failed ones that the scheduler has not yet ended."""
        return {"latents": self.model_runner.held(), "failed": len(self._failed)}

    def execute_dummy_batch(self) -> None:
        """Nothing to keep in step with: a diffusion stage has no data-parallel peers."""

    def shutdown(self) -> None:
        runner = self.__dict__.pop("model_runner", None)
        self._output = None
        del runner
