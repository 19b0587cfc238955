"""The worker of a diffusion stage: no KV cache, no sampler; a `DiffusionModelRunner` does one denoise step.

A diffusion request carries a `DiffusionJob` in `SamplingParams.extra_args["omni"]["diffusion"]`. Only that entry makes
it one, not the stage to which it is sent.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from msgspec import Struct
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from omni_actors.engine.workers.base import (
    AttachedOutput,
    HostCopy,
    OmniRunnerBase,
    OmniWorkerBase,
    memory_hint,
    omni_options,
)
from omni_actors.errors import ConfigError, EngineError, InvalidRequest, OmniError
from omni_actors.protocol.fields import HostTensor
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest
from omni_actors.stage.sound import Ahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


# The two token ids that a diffusion worker "samples": vLLM's scheduler counts the first as a completed denoise step and
# ends a request at the second, by its ordinary stop-token check.
STEP_TOKEN = 0
FAILED_TOKEN = 1


class DiffusionJob(Struct, frozen=True):
    """One validated piece of work of a diffusion model: a request, or a chunk of one.

    Args:
        payload: input of the model's runner, opaque to everything else.
        num_steps: denoise steps to schedule, at least 1; the output comes with the last one.
        step_bytes: device memory in bytes that it needs during a step (activations).
        final_bytes: the same for its last step, which also decodes the latents.
        held_bytes: device memory in bytes that it holds from `add` to `remove` (latents, conditions), in a step or not.
        share: the part that it takes of a step which must be short; see `omni_actors.stage.sound.Piece`.
        tokens: of each of its steps in the packed batch; a step takes at most `max_num_batched_tokens` of them, or one
            job. 0 if its steps are not counted like this.
        first_tokens: that its first step computes besides.
        later_tokens: of all steps of the request's jobs after it, as far as they are known.
        reports_progress: tell the client after each step how many are done. Of a request, at most one job does.
        preview: its picture shows one that is not done yet.
    """

    payload: Any
    num_steps: int
    step_bytes: int = 0
    final_bytes: int = 0
    held_bytes: int = 0
    share: float = 0.0
    tokens: int = 0
    first_tokens: int = 0
    later_tokens: int = 0
    reports_progress: bool = False
    preview: bool = False

    @property
    def most_bytes(self) -> int:
        """Bytes needed by its most expensive step, in addition to those held."""
        return max(self.step_bytes, self.final_bytes)

    def bytes_at(self, step: int) -> int:
        """Bytes needed by step number `step`, counted from 1."""
        return self.final_bytes if step >= self.num_steps else self.step_bytes

    def tokens_at(self, step: int) -> int:
        """Tokens of step number `step`, counted from 1."""
        return self.tokens + (self.first_tokens if step == 1 else 0)

    @property
    def all_tokens(self) -> int:
        """Tokens of all its steps, and of the jobs to come."""
        return self.first_tokens + self.tokens * self.num_steps + self.later_tokens


class DiffusionStream(ABC):
    """One request: takes input as it arrives and makes jobs of it, one after the other.

    The engine asks for the next job only after the previous one has ended, so a job may build on what that one left on
    the device.

    Attributes:
        input_tokens: length of the input so far, for the usage report.
        finished: whether all jobs have been returned.
        held_bytes: upper bound of the device memory in bytes that is kept from one job for the next, as known now.
        job_bytes: upper bound of the device memory in bytes that a job to come holds and needs in a step.
    """

    input_tokens: int = 0
    finished: bool = False
    held_bytes: int = 0
    job_bytes: int = 0

    @abstractmethod
    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """Append input; `complete` if it is the last. Raises `OmniError`, and then takes none of it."""

    def extend_tensor(self, tensor: HostTensor, *, complete: bool) -> None:
        """Append a tensor as input, in models that take any. Raises `OmniError`, and then takes none of it."""
        raise InvalidRequest("This stage takes streamed tokens, not rows.")

    @abstractmethod
    def next_job(self) -> DiffusionJob | None:
        """The next job, or None while its input is missing. Each job is returned once."""

    def ahead(self, sample_rate: int) -> Sequence[Ahead]:
        """The pieces of sound of the jobs that `next_job` has not returned; none if they are not known."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Free the stream's device memory. None of its jobs is running any more."""


class KnownJobs(DiffusionStream):
    """A request whose jobs are known as soon as their input is there: all of it when it starts, unless a subclass adds.

    Args:
        jobs: one after the other.
        input_tokens: length of the input, for the usage report.
        held_bytes: device memory that they leave for those after them, at most.
        free: frees it.
    """

    complete: bool = True  # no more input comes

    def __init__(
        self,
        jobs: Iterable[DiffusionJob],
        input_tokens: int,
        held_bytes: int = 0,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        self._jobs = deque(jobs)
        self._free = free
        self.input_tokens, self.held_bytes = input_tokens, held_bytes
        self.job_bytes = max((job.held_bytes + job.most_bytes for job in self._jobs), default=0)

    def next_job(self) -> DiffusionJob | None:
        """The oldest job."""
        job = self._jobs.popleft() if self._jobs else None
        self.finished = self.complete and not self._jobs
        return job

    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """Ignore a late, empty end of the input; refuse more of it."""
        if token_ids or not (complete and self.complete):
            raise InvalidRequest("This stage takes its input as a whole.")

    def close(self) -> None:
        """Forget the jobs that are left, and free what the others left."""
        self._jobs.clear()
        self._free()


class SingleJob(KnownJobs):
    """A request that is one job."""

    def __init__(self, job: DiffusionJob, input_tokens: int) -> None:
        super().__init__([job], input_tokens)


def diffusion_entry(sampling_params: SamplingParams | None) -> Mapping[str, Any]:
    """Our part of a request's parameters: `diffusion` and, from the engine, `claim` and `due`. Else empty."""
    if sampling_params is None or not sampling_params.extra_args:
        return {}
    return sampling_params.extra_args.get("omni") or {}


def diffusion_job(sampling_params: SamplingParams | None) -> DiffusionJob | None:
    """The job of a diffusion request; None for every other request."""
    return diffusion_entry(sampling_params).get("diffusion")


class StepResult(Struct, frozen=True):
    """Result of a step for one job: device tensors by name, or an error if it failed.

    With its last step come `audio` f32 [samples], `image` u8 [height, width, 3 or 4] or `latents` (floating-point
    numbers of any shape); with one before, `preview` may show what the latents would become. Tensors of other names are
    for the stages after this one; they come with the last step of a job.
    """

    tensors: Mapping[str, torch.Tensor] = {}
    error: BaseException | None = None


class DiffusionModelRunner(OmniRunnerBase):
    """Holds a diffusion model and the latents of its requests. All calls come from one thread.

    Args:
        vllm_config: the stage's configuration; `model_config.model` names the checkpoint.
        device: where the model and the latents live.

    Attributes:
        held: what `take` gave for each job, by its id, from `add` to `remove`.
        quantizations: values of vLLM's `quantization` that it has.
    """

    quantizations: ClassVar[tuple[str, ...]] = ()

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        wanted = vllm_config.model_config.quantization
        if wanted not in (None, *self.quantizations):
            known = ", ".join(self.quantizations)
            hint = f"This stage has {known}." if known else "Remove it: this stage keeps its weights as they are."
            raise ConfigError(f"This stage has no quantization {str(wanted)!r}.", hint=hint)
        self.vllm_config = vllm_config
        self.device = device
        self.held: dict[str, Any] = {}

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready; read after `load`."""

    @abstractmethod
    def load(self, *, dummy: bool) -> None:
        """Load the weights; with `dummy`, make weights that give finite output instead."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run what a request will run, so that the first request does not wait for initialisation."""

    @abstractmethod
    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request and its first input. Raises `OmniError`; keeps no state."""

    def take(self, job: DiffusionJob) -> Any:
        """Allocate a job's device memory; by default its payload is all that is needed."""
        return job.payload

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Take a job."""
        self.held[request_id] = self.take(job)

    def remove(self, request_id: str) -> None:
        """Free a job's device memory. Idempotent; ignores unknown ids."""
        self.held.pop(request_id, None)

    @abstractmethod
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Advance these jobs by one denoise step, in one batch.

        All or nothing: if it raises, no job has advanced, and the worker may try them one by one. The failure of a
        single job goes to its `StepResult`.
        """

    def omni_reset(self) -> None:
        """Do nothing: `step` leaves nothing half done."""


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
            ),
            self._split,
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

    def _split(self) -> list[dict[str, Any] | None]:
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
