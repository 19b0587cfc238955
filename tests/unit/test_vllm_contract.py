"""The names and signatures of vLLM that the engine package relies on. A vLLM bump is judged here first."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytest.importorskip("omni_actors.engine")  # prepares the process, which must precede vLLM

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

# (function, the parameters that we pass or receive by name or position)
SIGNATURES = [
    (EngineCore.__init__, ["vllm_config", "executor_class", "log_stats"]),
    (EngineCore.preprocess_add_request, ["request"]),
    (EngineCore.add_request, ["request", "request_wave"]),
    (EngineCore.abort_requests, ["request_ids"]),
    (EngineCore.step, []),
    (EngineCore.step_with_batch_queue, []),
    (EngineCore.post_step, ["model_executed"]),
    (EngineCore.shutdown, []),
    (Scheduler.schedule, ["throttle_prefills"]),
    (Scheduler.add_request, ["request"]),
    (Scheduler.finish_requests, ["request_ids", "finished_status"]),
    (Scheduler.update_from_output, ["scheduler_output", "model_runner_output"]),
    (Scheduler._free_request, ["request"]),
    (Scheduler._handle_blocked_waiting_request, ["request"]),
    (Scheduler.get_request_counts, []),
    (GPUModelRunner.__init__, ["vllm_config", "device"]),
    (GPUModelRunner.load_model, ["load_dummy_weights"]),
    (GPUModelRunner.add_requests, ["scheduler_output"]),
    (GPUModelRunner.update_requests, ["scheduler_output"]),
    (GPUModelRunner.finish_requests, ["scheduler_output"]),
    (GPUModelRunner.sample_tokens, ["grammar_output"]),
    (ModelState.add_request, ["req_index", "new_req_data"]),
    (DefaultModelState.prepare_inputs_embeds, ["scheduled_encoder_inputs", "input_batch", "req_states"]),
    (RopeState.read_prefill_positions, ["req_idx", "length"]),
    (
        Sampler._sample_random,
        ["processed_logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "top_k", "top_p", "use_fused_sampler"],
    ),
    (Worker._make_model_runner, []),
    (Worker.load_model, ["load_dummy_weights"]),
    (Worker.determine_available_memory, []),
    (WorkerBase.init_device, []),
    (UniProcExecutor.supports_async_scheduling, []),
    (Scheduler.make_stats, []),
    (AsyncModelRunnerOutput.get_output, []),
    (LlamaModel.forward, ["input_ids", "positions", "intermediate_tensors", "inputs_embeds"]),
    (Qwen2_5OmniThinkerForConditionalGeneration.embed_input_ids, ["input_ids"]),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signature(function, expected):
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    assert [name for name in names if name in expected] == expected


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            EngineCoreRequest,
            "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request "
            "cache_salt data_parallel_rank prompt_embeds prompt_is_token_ids priority",
        ),
        (EngineCoreOutput, "request_id new_token_ids finish_reason pooling_output events"),
        (EngineCoreOutputs, "outputs scheduler_stats"),
        (EngineCoreEvent, "type timestamp"),
        (SamplingParams, "extra_args skip_reading_prefix_cache stop_token_ids seed ignore_eos min_tokens"),
    ],
)
def test_struct_fields(kind, fields):
    assert set(fields.split()) <= set(kind.__struct_fields__)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (NewRequestData, "req_id sampling_params mm_features prefill_token_ids prompt_embeds"),
        (SchedulerOutput, "scheduled_new_reqs num_scheduled_tokens total_num_scheduled_tokens finished_req_ids"),
        (ModelRunnerOutput, "pooler_output req_ids sampled_token_ids"),
        (InputBatch, "req_ids num_reqs num_tokens idx_mapping_np query_start_loc_np num_computed_tokens_np input_ids"),
        (SchedulerStats, "kv_cache_usage prefix_cache_stats"),
        (PrefixCacheStats, "queries hits"),
        (MultiModalFeatureSpec, "data modality identifier mm_position"),
        (PlaceholderRange, "offset length is_embed"),
        (
            EngineArgs,
            "model worker_cls scheduler_cls distributed_executor_backend hf_overrides additional_config "
            "async_scheduling generation_config mm_processor_cache_gb kernel_config enable_prompt_embeds "
            "skip_tokenizer_init enable_prefix_caching skip_mm_profiling",
        ),
    ],
)
def test_dataclass_fields(kind, fields):
    assert set(fields.split()) <= {field.name for field in dataclasses.fields(kind)}


def test_attributes_read_in_methods():
    """Instance attributes have no signature; the source must at least set them where we expect it."""
    expected = {
        Scheduler.__init__: ("self.current_step", "self.running", "self.requests", "self.finished_req_ids"),
        Request.__init__: ("self.next_decode_eligible_step", "self.num_computed_tokens", "self.num_prompt_tokens"),
        EngineCore.__init__: ("self.batch_queue", "self.step_fn", "self.scheduler", "self.model_executor"),
        GPUModelRunner.__init__: ("self.output_copy_stream", "self.encoder_cache", "self.req_states"),
        GPUModelRunner.execute_model: ("self.execute_model_state = ",),
        DefaultModelState.__init__: ("self.rope_state", "self.prompt_embeds_state"),
    }
    for function, names in expected.items():
        source = inspect.getsource(function)
        assert not [name for name in names if name not in source], function.__qualname__


def test_a_held_request_is_skipped_and_the_step_advances_first():
    source = inspect.getsource(Scheduler.schedule)
    advance = source.index("self.current_step += 1")
    assert advance < source.index("self.current_step < request.next_decode_eligible_step")


def test_every_waiting_request_is_asked_about_before_it_is_admitted():
    """The budget of diffusion stages answers False for a request that must wait."""
    source = inspect.getsource(Scheduler.schedule)
    asked = source.index("ready_to_schedule = self._handle_blocked_waiting_request(request)")
    assert "if not ready_to_schedule:" in source[asked:].splitlines()[1]
    assert asked < source.index("request.status = RequestStatus.RUNNING")


def test_any_output_with_an_attachment_reaches_the_engine():
    source = inspect.getsource(Scheduler.update_from_output)
    assert "pooling_output=pooler_output" in source
    assert "new_token_ids or pooler_output is not None or stopped" in source


def test_enumerations():
    assert {reason.name for reason in FinishReason} >= {"STOP", "LENGTH", "ABORT", "ERROR", "REPETITION"}
    assert RequestStatus.FINISHED_ERROR in RequestStatus
    assert RequestStatus.FINISHED_ABORTED in RequestStatus
    assert {event.name for event in EngineCoreEventType} >= {"SCHEDULED", "PREEMPTED"}
    assert issubclass(AsyncScheduler, Scheduler)
