"""Wraps vLLM's EngineCore: add, abort, step, statistics, the recovery from a failed step; and what engines share."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request, RequestStatus

from omni_actors.engine.scheduler import OmniSchedulerBase
from omni_actors.engine.workers.base import memory_hint
from omni_actors.engine.workers.ray import place_workers
from omni_actors.errors import ConfigError, EngineError, InvalidRequest, OmniError, StartupError
from omni_actors.host.processes import STEADY
from omni_actors.protocol.fields import HostTensor
from omni_actors.stage.engine_interface import EngineEvent, EngineLost, ErrorEvent, FinishedEvent, StageEngine
from omni_actors.telemetry import metrics as table
from omni_actors.telemetry.metrics import Metric

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerBase


logger = logging.getLogger(__name__)


class OmniUniProcExecutor(UniProcExecutor):
    """vLLM's in-process executor under another name.

    The CPU platform rewrites the literal backend "uni" to "mp" (one more process and one more transfer per step); a
    class path is left alone on every platform.
    """


KEPT_SCHEDULED = 4096  # entries kept until `take_scheduled`; later ones are dropped


class CoreStatistics:
    """Statistics of one engine core, which must run with `log_stats`."""

    def __init__(self) -> None:
        self._preemptions = 0
        self._queries = 0
        self._hits = 0
        self._scheduled: dict[str, float] = {}  # since the last `take_scheduled`
        self._seen: set[str] = set()  # requests scheduled before: a preempted one is scheduled again

    def add(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """Add the outputs of a step."""
        for group in outputs.values():
            if group.scheduler_stats is not None:
                self._add_stats(group.scheduler_stats)
            for output in group.outputs:
                for event in output.events or ():
                    if event.type is EngineCoreEventType.PREEMPTED:
                        self._preemptions += 1
                    elif event.type is EngineCoreEventType.SCHEDULED:
                        self._note_scheduled(output.request_id, event.timestamp)
                if output.finish_reason is not None:
                    self._seen.discard(output.request_id)

    def _note_scheduled(self, request_id: str, moment: float) -> None:
        if request_id not in self._seen and len(self._scheduled) < KEPT_SCHEDULED:
            self._seen.add(request_id)
            self._scheduled[request_id] = moment

    def _add_stats(self, stats: SchedulerStats) -> None:
        self._queries += stats.prefix_cache_stats.queries
        self._hits += stats.prefix_cache_stats.hits

    def forget(self, request_ids: list[str]) -> None:
        """Forget aborted requests."""
        self._seen.difference_update(request_ids)

    def take_scheduled(self) -> list[tuple[str, float]]:
        """Requests scheduled for the first time since the last call, and when (monotonic clock, seconds)."""
        taken, self._scheduled = list(self._scheduled.items()), {}
        return taken

    def now(self, scheduler: Scheduler) -> dict[Metric, float]:
        """The totals, with the scheduler's present state."""
        stats = scheduler.make_stats()
        if stats is not None:
            self._add_stats(stats)
        running, waiting = scheduler.get_request_counts()
        return {
            table.VLLM_RUNNING: running,
            table.VLLM_WAITING: waiting,
            table.VLLM_KV: stats.kv_cache_usage if stats is not None else 0.0,
            table.VLLM_PREEMPTIONS: self._preemptions,
            table.VLLM_QUERIES: self._queries,
            table.VLLM_HITS: self._hits,
        }


# The cores of a process share vLLM's process groups, which a core's shutdown destroys, so they shut down when the last
# of them that has groups does. Those of a dense model have none for experts: a model with experts starts only when they
# are gone. A stage process has one core; a caller of StageLLM may have several.
_ALIVE: list[VllmCore] = []
_ENDED: list[EngineCore] = []


class StepFailed(Exception):
    """A step failed and was contained: the core goes on without the requests `request_ids`."""

    def __init__(self, request_ids: Sequence[str], cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.request_ids = tuple(request_ids)
        self.cause = cause

    def for_request(self) -> EngineError:
        """The error with which each of its requests ends."""
        return EngineError(f"A step of the model failed: {self}", hint=memory_hint(self.cause))


def make_request(
    request_id: str,
    token_ids: Sequence[int] | None,
    sampling_params: SamplingParams,
    *,
    prompt_embeds: torch.Tensor | None = None,
    mm_features: list[Any] | None = None,
    priority: int = 0,
    lora_request: LoRARequest | None = None,
) -> EngineCoreRequest:
    """A request for vLLM's core; `prompt_embeds` [positions, width] take the place of the tokens' embeddings.

    Args:
        token_ids: the prompt, to which penalties apply; `None` for a prompt of embeddings alone.
    """
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(token_ids) if token_ids is not None else None,  # a copy: vLLM keeps what it is given
        mm_features=mm_features,
        sampling_params=sampling_params,
        pooling_params=None,
        arrival_time=STEADY(),
        lora_request=lora_request,
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=prompt_embeds,
        priority=priority,
    )


class VllmCore:
    """An EngineCore in this process.

    Args:
        has_groups: whether its workers make vLLM's process groups.

    Raises:
        ConfigError: the scheduler or the worker is not one of ours.
        StartupError: the core does not start.
    """

    def __init__(self, vllm_config: VllmConfig, has_groups: bool = True) -> None:
        if not vllm_config.use_v2_model_runner:
            raise ConfigError("vLLM chose its V1 model runner.", hint="Call engine.platform.prepare before vLLM.")
        scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
        if not issubclass(scheduler_class, OmniSchedulerBase):
            raise ConfigError(
                f"{scheduler_class.__name__} is not an OmniSchedulerBase.",
                hint="Take the configuration from OmniEngineArgs.create_engine_config, which chooses the scheduler.",
            )
        self.vllm_config = vllm_config
        self.has_groups = has_groups
        self.statistics = CoreStatistics()
        if vllm_config.parallel_config.use_ray:
            place_workers(vllm_config.parallel_config)
        try:
            self._core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=True)
        except Exception as error:  # vLLM and the model's loader raise anything
            known = (error.message, error.hint) if isinstance(error, OmniError) else None
            cause, hint = known or (f"{type(error).__name__}: {error}", None)
            raise StartupError(
                f"The engine core for {vllm_config.model_config.model} does not start: {cause}",
                hint=hint or "The chained exception names the cause; a checkpoint that is cut off is one of them.",
            ) from error
        _ALIVE.append(self)

    @property
    def scheduler(self) -> OmniSchedulerBase:
        """The core's scheduler, which is one of ours."""
        return cast("OmniSchedulerBase", self._core.scheduler)

    @property
    def worker(self) -> WorkerBase:
        """The worker of a stage on one GPU, which runs in this process."""
        return cast("UniProcExecutor", self._core.model_executor).driver_worker.worker

    def compile_prompt_kernels(self, seconds: float) -> None:
        """Run batches of prompts until all kernels for them are compiled, or `seconds` have passed."""
        began = STEADY()
        rpc = self._core.model_executor.collective_rpc
        sizes: list[int] = rpc("omni_prompt_sizes")[0]
        done: list[int] = []
        for size in sizes:
            if STEADY() - began >= seconds:
                logger.warning("Kernels for prompts of %s tokens are compiled when the first come.", sizes[len(done) :])
                break
            rpc("omni_run_prompts", args=(size,))
            done.append(size)
        if done:
            logger.info("Compiled kernels for prompts of %s tokens in %.1f s.", done, STEADY() - began)

    def forget_warm_up(self) -> None:
        """Clear what the warm-up left in the prefix cache and the statistics."""
        self._core.reset_prefix_cache()
        self.scheduler.make_stats()  # those since the last step
        self.statistics = CoreStatistics()

    def worker_counts(self) -> dict[str, int]:
        """State that the first worker's runner holds for requests, by name; all workers hold the same."""
        counts: dict[str, int] = self._core.model_executor.collective_rpc("omni_counts")[0]
        return counts

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Load a LoRA adapter. Raises `StartupError` if it does not fit the model."""
        try:
            self._core.add_lora(adapter)
        except Exception as error:  # vLLM raises anything for files that do not fit
            raise StartupError(
                f"The adapter {adapter.lora_name!r} cannot be loaded: {type(error).__name__}: {error}",
                hint=f"Check the files in {adapter.lora_path}: was it trained for this model?",
            ) from error

    def prepare(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """What `add` takes. Any thread may call it, and starts the compilation of a grammar with it."""
        return self._core.preprocess_add_request(request)

    def add(self, prepared: tuple[Request, int]) -> None:
        """Queue a request. Its id must not be in use."""
        self._core.add_request(*prepared)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests. Idempotent; ignores unknown ids."""
        self._core.abort_requests(list(request_ids))
        self.statistics.forget(list(request_ids))

    def runnable(self) -> bool:
        """Whether `step` would do something now."""
        if self.scheduler.has_runnable():
            return True
        # A schedule() that found nothing leaves an empty batch in the queue, which waits for the next real one.
        return any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in self._core.batch_queue or ())

    def step(self) -> list[EngineCoreOutput]:
        """Do one step. The result is empty if there was nothing to do or the step only filled the pipeline.

        Raises:
            StepFailed: the step failed; its requests are gone, and the core can be used on.
            EngineLost: the device failed; the process has to end.
        """
        if not self.runnable():
            return []
        try:
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
        except Exception as error:  # a model may raise anything; only the requests of the step are to end
            logger.exception("A step of the model failed; its requests end with an error.")
            if device_is_lost(error) or getattr(self._core.model_executor, "is_failed", False):
                raise EngineLost(f"The device or one of its workers failed: {error}") from error
            raise StepFailed(self._contain(), error) from error
        if not outputs:
            return []
        self.statistics.add(outputs)
        return [output for group in outputs.values() for output in group.outputs]

    def _contain(self) -> list[str]:
        """End the requests that the failed step may have touched; return their ids.

        Otherwise they would count as computed but never finish, and the loop would spin forever. Requests that are
        still waiting have no state in the worker and go on.
        """
        scheduler = self.scheduler
        # A failure inside schedule() can leave a request between the queues; if nothing is running, all of them end.
        touched = [request.request_id for request in scheduler.running] or list(scheduler.requests)
        ended = scheduler.finish_requests(touched, RequestStatus.FINISHED_ERROR)
        if self._core.batch_queue is not None:
            self._core.batch_queue.clear()
        self._core.model_executor.collective_rpc("omni_reset")
        gone = [request.request_id for request in ended]
        self.statistics.forget(gone)
        return gone

    def shutdown(self) -> None:
        """Drop all requests. With the last core of this process that has groups, also free everything. Idempotent."""
        if self not in _ALIVE:
            return
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        _ALIVE.remove(self)
        _ENDED.append(self._core)
        if not any(core.has_groups for core in _ALIVE):
            for core in _ENDED:
                core.shutdown()
            _ENDED.clear()


def device_is_lost(error: BaseException | None) -> bool:
    """Whether an error is one after which every later call on the device fails too. Out of memory is not."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return False
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            return True
        error = error.__cause__
    return False


RunningT = TypeVar("RunningT")


class VllmEngine(StageEngine, Generic[RunningT]):
    """Holds the running requests, ends them (finished or failed), and reports the core's statistics.

    What the core computes for a request has ids of its own: the request's, a slash and a number from 0.
    """

    def __init__(self, core: VllmCore) -> None:
        self.core = core
        self._requests: dict[str, RunningT] = {}

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidRequest(f"Request {request_id!r} is already running.")

    def _finished(self, event: FinishedEvent) -> FinishedEvent:
        """End a request that the core has finished."""
        del self._requests[event.request_id]
        return event

    def _failed(self, request_id: str, error: OmniError) -> list[EngineEvent]:
        """End a request that the core may still compute."""
        self.abort(request_id)
        return [ErrorEvent(request_id, error)]

    def _request_of(self, computed: str) -> str:
        """The request for which the core computes what has this id there."""
        return computed.rpartition("/")[0]

    @abstractmethod
    def _take(self, request_id: str, running: RunningT, output: EngineCoreOutput) -> list[EngineEvent]:
        """Events of an output for a request. An `OmniError` ends the request."""

    def step(self) -> Sequence[EngineEvent]:
        """Do one step of vLLM. Requests of a failed step end with an error each; others go on."""
        events: list[EngineEvent] = []
        try:
            outputs = self.core.step()
        except StepFailed as failure:
            for request_id in dict.fromkeys(map(self._request_of, failure.request_ids)):
                if request_id in self._requests:
                    events += self._failed(request_id, failure.for_request())
            return events
        self._note_step(outputs)
        for output in outputs:
            request_id = self._request_of(output.request_id)
            if (running := self._requests.get(request_id)) is not None:
                try:
                    events += self._take(request_id, running, output)
                except OmniError as error:
                    events += self._failed(request_id, error)
        return events

    def _extend(
        self, request_id: str, running: RunningT, rows: HostTensor | None, token_ids: Sequence[int], complete: bool
    ) -> None:
        """Append streamed input; see `StageEngine.extend`."""
        super().extend(request_id, rows, token_ids=token_ids, complete=complete)

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """See `StageEngine.extend`. Drops input of ended requests: a talker may end before its input does."""
        if (running := self._requests.get(request_id)) is None:
            return
        try:
            self._extend(request_id, running, rows, token_ids, complete)
        except OmniError:
            self.abort(request_id)  # without this input it could never end
            raise

    def _note_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Take note of a step that did not fail, before its outputs are taken."""

    def _run_warm_up(self) -> None:
        """Step until nothing is left, in the worker, too. Raises the error of a request that fails."""
        while self.runnable():
            for event in self.step():
                if isinstance(event, ErrorEvent):
                    raise event.error

    def runnable(self) -> bool:
        """Whether the core would do something in a step."""
        return self.core.runnable()

    def counts(self) -> dict[str, int]:
        """Requests here, in vLLM's scheduler and in its worker, and what each holds for them."""
        running, waiting = self.core.scheduler.get_request_counts()
        return {
            "requests": len(self._requests),
            "running": running,
            "waiting": waiting,
            **self.core.scheduler.omni_counts(),
            **self.core.worker_counts(),
        }

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Requests of which vLLM first scheduled something since the last call, and when (monotonic clock, seconds)."""
        scheduled = self.core.statistics.take_scheduled()
        return [(self._request_of(name), moment) for name, moment in scheduled if name.endswith("/0")]

    def statistics(self) -> Mapping[Metric, float]:
        """Totals of vLLM's scheduler."""
        return self.core.statistics.now(self.core.scheduler)

    def device_bytes(self) -> int:
        """Bytes that torch's allocator has reserved in this process."""
        return torch.cuda.memory_reserved() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0

    @property
    def ends_with_process(self) -> bool:
        """Whether no other process works for it. vLLM's own shutdown searches all objects for garbage, twice."""
        return self.core.vllm_config.parallel_config.world_size == 1

    def shutdown(self) -> None:
        """Drop all requests and shut the core down."""
        self._requests.clear()
        self.core.shutdown()
