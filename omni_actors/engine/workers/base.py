"""What the workers of all platforms share, and bursts: several decode steps of the model for one scheduling.

At small batches a step costs the host more than the device: scheduler, preparation of inputs, copies of results. In a
burst the scheduler gives a request the places of several tokens at once, the runner computes them one after the other
without coming back, and all of them return together. To vLLM's scheduler the tokens after the first are drafts of
speculative decoding that are always accepted; the runner never sees them as such.

The first step of a burst is an ordinary step of vLLM's runner, prefills included. Each further step is, too, but for
what the step before has left on the device: while it has the same requests, their inputs are advanced there. Requests
have bursts of different lengths, so the batch may become smaller on the way; vLLM then prepares it whole.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from omni_actors.engine.models import checkpoint_architecture, find_model_spec, register_models
from omni_actors.host.processes import die_with_parent

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

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `init_device`, where ranks wait for one another."""
        if self.vllm_config.parallel_config.world_size > 1:
            _die_with_engine()
        return super().init_device(*args, **kwargs)

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
    """What an `AttachedOutput` gave this request in a step; empty for none."""
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

    Args:
        attachments: makes the dictionaries, in the order of the batch, when vLLM waits for the output.
    """

    def __init__(
        self, inner: AsyncModelRunnerOutput | ModelRunnerOutput, attachments: Callable[[], list[dict[str, Any] | None]]
    ) -> None:
        super().__init__(inner)
        self._attachments = attachments

    def get_output(self) -> ModelRunnerOutput:
        """vLLM's output, with the attachments once they have arrived."""
        output = self.inner_output()
        # Declared for tensors, but passed on untouched.
        output.pooler_output = self._attachments()  # type: ignore[assignment]
        return output


if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner

    VllmRunner = GPUModelRunner
else:
    VllmRunner = object  # what stands behind the mixin in the order of the base classes

DRAFT = -1  # a token that is not known yet


def burst_of(output: SchedulerOutput) -> Mapping[str, int]:
    """The requests of a step that go on for more than one, and their steps, the longest first."""
    burst: Mapping[str, int] = getattr(output, "omni_burst", {})
    return burst


def mark_burst(output: SchedulerOutput) -> None:
    """Tell the runner that the drafts of a step stand for steps of a burst."""
    steps = {request_id: 1 + len(drafts) for request_id, drafts in output.scheduled_spec_decode_tokens.items()}
    # A plain dataclass: the attribute is kept in process and when pickled.
    output.omni_burst = dict(sorted(steps.items(), key=lambda item: -item[1]))  # type: ignore[attr-defined]


def first_step(output: SchedulerOutput, burst: Mapping[str, int]) -> SchedulerOutput:
    """The first step of a burst: a token for each request of it, those with the most steps first, and the prefills."""
    first = copy.copy(output)  # with the attributes that dataclasses.replace would leave out
    others = {name: count for name, count in output.num_scheduled_tokens.items() if name not in burst}
    first.num_scheduled_tokens = dict.fromkeys(burst, 1) | others
    first.total_num_scheduled_tokens = sum(first.num_scheduled_tokens.values())
    first.scheduled_spec_decode_tokens = {}
    return first


@dataclass
class FurtherStep(SchedulerOutput):
    """A step of a burst after its first.

    Args:
        before: the batch of the step before, if it had the same requests.
    """

    before: InputBatch | None = None

    @classmethod
    def of(cls, requests: Sequence[str], computed: Sequence[int], before: InputBatch | None) -> FurtherStep:
        """A token for each of `requests`, which have computed that many."""
        step = cls(**vars(SchedulerOutput.make_empty()), before=before)
        step.num_scheduled_tokens = dict.fromkeys(requests, 1)
        step.total_num_scheduled_tokens = len(requests)
        cached = CachedRequestData.make_empty()
        cached.req_ids = list(requests)
        cached.num_computed_tokens = list(computed)
        cached.new_block_ids = [None] * len(requests)
        step.scheduled_cached_reqs = cached
        return step


class BurstRunnerMixin(VllmRunner):
    """Mixin, in front of vLLM's V2 `GPUModelRunner`: computes the further steps of a burst."""

    _step: FurtherStep | None = None  # the further step that is being computed
    _gathered: tuple[BatchReqState | None, int | None] = (None, None)

    def further_steps(self, burst: Mapping[str, int], batch: InputBatch) -> list[tuple[list[str], SamplerOutput]]:
        """Compute the steps of a burst after its first, that of `batch`; what each has sampled for which requests."""
        indices = [self.req_states.req_id_to_index[name] for name in burst]
        computed = self.req_states.num_computed_tokens_np[indices].tolist()
        requests = list(burst)
        sampled: list[tuple[list[str], SamplerOutput]] = []
        for number in range(1, max(burst.values())):
            count = sum(steps > number for steps in burst.values())
            before = batch if batch.num_reqs == count else None  # all of them decode, in the same order
            step = FurtherStep.of(requests[:count], [start + number for start in computed[:count]], before)
            batch, output = self._further_step(step)
            sampled.append((step.scheduled_cached_reqs.req_ids, output))
        return sampled

    @torch.inference_mode()
    def _further_step(self, step: FurtherStep) -> tuple[InputBatch, SamplerOutput]:
        self._step = step
        try:
            super().execute_model(step)
        finally:
            self._step = None
        forward = self.execute_model_state
        self.execute_model_state = None
        if forward is None or forward.hidden_states is None:
            raise RuntimeError("A further step of a burst has no hidden states to sample from.")
        batch = forward.input_batch
        output, num_sampled, num_rejected = self.sample(forward.hidden_states, batch, None)
        self.postprocess_sampled(
            batch.idx_mapping, output.sampled_token_ids, num_sampled, num_rejected, batch.query_start_loc
        )
        return batch, output

    # -- what vLLM's `execute_model` calls

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add new requests; a further step has none, and must not take the next of the buffers of two steps' inputs."""
        if self._step is None:
            super().add_requests(scheduler_output)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> tuple[BatchReqState | None, int | None]:
        """The host's state of the batch; that of the step before if it had the same requests."""
        if self._step is None or self._step.before is None:
            self._gathered = super().gather_batch_req_state(scheduler_output, *args, **kwargs)
        return self._gathered

    def prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> InputBatch:
        """The inputs of a step; those of the step before, a token further, if it had the same requests."""
        if self._step is None or self._step.before is None:
            return super().prepare_inputs(scheduler_output, *args, **kwargs)
        batch = self._step.before
        count = batch.num_reqs
        last = torch.index_select(self.req_states.last_sampled_tokens.view(-1), 0, batch.idx_mapping)
        batch.input_ids[:count].copy_(last)
        batch.positions[:count].add_(1)
        batch.seq_lens[:count].add_(1)
        bound = batch.seq_lens_cpu_upper_bound.clone()
        bound[:count].add_(1)
        return replace(batch, num_computed_tokens_np=batch.num_computed_tokens_np + 1, seq_lens_cpu_upper_bound=bound)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables and slots; the tables of the step before if it had the same requests."""
        if self._step is None or self._step.before is None or self.pcp_manager is not None:
            return super().prepare_attn(input_batch)
        rows = input_batch.num_reqs_after_padding
        slots = self.block_tables.compute_slot_mappings(
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.positions,
            num_tokens_padded=input_batch.num_tokens_after_padding,
        )
        return tuple(table[:rows] for table in self.block_tables.input_block_tables), slots


class BurstOutput(WrappedOutput):
    """The output of a burst's first step with the tokens of its further steps."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput | ModelRunnerOutput,
        further: Sequence[tuple[list[str], SamplerOutput]],
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(inner)
        self._requests = [request_id for requests, _ in further for request_id in requests]
        outputs = [output for _, output in further]
        tensors = {"tokens": torch.cat([output.sampled_token_ids[:, 0] for output in outputs])}
        nans = [output.num_nans for output in outputs if output.num_nans is not None]
        if nans:
            tensors["nans"] = torch.cat(nans)
        self._copy = HostCopy(tensors, copy_stream if tensors["tokens"].is_cuda else None)

    def get_output(self) -> ModelRunnerOutput:
        """The output of the first step, with all tokens once they have arrived."""
        output = self.inner_output()
        further = {name: tensor.tolist() for name, tensor in self._copy.wait().items()}
        for request_id, token in zip(self._requests, further["tokens"], strict=True):
            output.sampled_token_ids[output.req_id_to_index[request_id]].append(token)
        if output.num_nans_in_logits is not None and "nans" in further:
            for request_id, count in zip(self._requests, further["nans"], strict=True):
                output.num_nans_in_logits[request_id] += count
        return output
