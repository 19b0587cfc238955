"""What the engine package relies on in vLLM, as a table, and the check of a release against it.

`vllm_release.py` describes a release in the same terms. Names are `module:attribute`. What our classes override is not
in the table: the description finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

_CORE = "vllm.v1.engine.core:EngineCore"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_STATE = "vllm.v1.worker.gpu.model_states.default:DefaultModelState"
_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"

# Functions and classes that we call -> the arguments that we pass, by position or name.
CALLED: dict[str, str] = {
    _CORE: "vllm_config executor_class log_stats",
    f"{_CORE}.preprocess_add_request": "request",
    f"{_CORE}.add_request": "request request_wave",
    f"{_CORE}.abort_requests": "request_ids",
    f"{_CORE}.step": "",
    f"{_CORE}.step_with_batch_queue": "",
    f"{_CORE}.post_step": "model_executed",
    f"{_CORE}.reset_prefix_cache": "",
    f"{_CORE}.shutdown": "",
    f"{_SCHEDULER}.finish_requests": "request_ids finished_status",
    f"{_SCHEDULER}.get_request_counts": "",
    f"{_SCHEDULER}.has_requests": "",
    f"{_SCHEDULER}.make_stats": "",
    "vllm.v1.executor:Executor.get_class": "vllm_config",
    "vllm.v1.executor:Executor.collective_rpc": "method",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.supports_async_scheduling": "",
    _RUNNER: "vllm_config device",
    f"{_RUNNER}._dummy_run": "num_tokens skip_eplb is_profile randomize_inputs",
    f"{_RUNNER}.sample": "hidden_states input_batch grammar_output",
    f"{_RUNNER}.postprocess_sampled": "idx_mapping sampled_tokens num_sampled num_rejected query_start_loc",
    "vllm.v1.worker.gpu.block_table:BlockTables.compute_slot_mappings": "idx_mapping query_start_loc positions "
    "num_tokens_padded",
    "vllm.v1.core.sched.output:SchedulerOutput.make_empty": "",
    "vllm.v1.core.sched.output:CachedRequestData.make_empty": "",
    f"{_LAYERS}.fused_moe.fused_moe:try_get_optimal_moe_config": "w1_shape w2_shape top_k dtype M block_shape",
    f"{_LAYERS}.fused_moe.config:FusedMoEQuantConfig.config_name": "dtype",
    "vllm.config.compilation:CUDAGraphMode.mixed_mode": "",
    "vllm.v1.worker.gpu.mm.rope:RopeState.read_prefill_positions": "req_idx length",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": "",
    "vllm.utils.jit_monitor:activate": "verbose",
    "vllm.v1.engine.input_processor:InputProcessor": "vllm_config",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "request_id prompt params supported_tasks",
    "vllm.renderers.base:BaseRenderer.render_cmpl": "prompts",
    "vllm.renderers.base:BaseRenderer.get_mm_processor": "",
    "vllm.renderers.base:BaseRenderer.shutdown": "",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request": "tokenizer request",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.update": "new_token_ids stop_terminated",
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.get_next_output_text": "finished delta",
    "vllm.v1.serial_utils:MsgpackEncoder.encode": "obj",
    "vllm.v1.serial_utils:MsgpackDecoder": "t",
    "vllm.v1.serial_utils:MsgpackDecoder.decode": "bufs",
    "vllm.tokenizers:cached_tokenizer_from_config": "model_config",
    "vllm.tool_parsers:ToolParserManager.list_registered": "",
    "vllm.parser.parser_manager:ParserManager.get_parser": "tool_parser_name enable_auto_tools tokenizer",
    "vllm.parser.abstract_parser:Parser": "tokenizer tools",
    "vllm.parser.abstract_parser:Parser.adjust_request": "request",
    "vllm.parser.abstract_parser:Parser.parse_delta": "delta_text delta_token_ids request prompt_token_ids finished",
    "vllm.utils.import_utils:resolve_obj_by_qualname": "qualname",
    "vllm.utils:length_from_prompt_token_ids_or_embeds": "prompt_token_ids prompt_embeds",
    "vllm.utils.torch_utils:async_tensor_h2d": "data dtype device",
    "vllm.distributed.parallel_state:get_tp_group": "",
    "vllm.distributed.parallel_state:get_pp_group": "",
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch": "logits k p",
    f"{_LAYERS}.linear:ReplicatedLinear": "input_size output_size bias return_bias",
    f"{_LAYERS}.logits_processor:LogitsProcessor": "vocab_size",
    f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding": "num_embeddings embedding_dim",
    f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead": "num_embeddings embedding_dim prefix",
    f"{_MODELS}.registry:ModelRegistry.register_model": "model_arch model_cls",
    f"{_MODELS}.utils:AutoWeightsLoader.load_weights": "weights mapper",
    f"{_MODELS}.utils:WeightsMapper": "orig_to_new_prefix",
    f"{_MODELS}.utils:maybe_prefix": "prefix name",
    f"{_MODELS}.llama:LlamaModel": "vllm_config prefix",
    f"{_MODELS}.minicpmo:MiniCPMWhisperEncoder": "config",
    f"{_MODELS}.minicpmo:MiniCPMWhisperEncoder.forward": "input_features attention_mask",
    f"{_MODELS}.minicpmo:MultiModalProjector": "in_dim out_dim",
    f"{_MODELS}.idefics2_vision_model:Idefics2VisionTransformer": "config num_hidden_layers_override prefix",
    f"{_MODELS}.idefics2_vision_model:Idefics2VisionTransformer.forward": "pixel_values position_ids",
    "vllm.multimodal.parse:VideoProcessorItems": "data",
    "vllm.sampling_params:SamplingParams.clone": "",
    "vllm.multimodal.inputs:MultiModalFieldConfig.batched": "modality keep_on_cpu",
    "vllm.multimodal.inputs:MultiModalFieldConfig.flat_from_sizes": "modality size_per_item dim",
    "vllm.multimodal.processing:PromptReplacement": "modality target replacement",
    "vllm.multimodal.processing:PromptUpdateDetails.select_token_id": "seq embed_token_id",
    f"{_MODELS}.qwen2_5_omni_thinker:Qwen2_5OmniThinkerForConditionalGeneration.embed_input_ids": "input_ids",
    "vllm.compilation.decorators:support_torch_compile": "dynamic_arg_dims",
    "vllm.v1.worker.worker_base:CompilationTimes": "language_model encoder",
    "vllm.v1.outputs:ModelRunnerOutput": "req_ids req_id_to_index sampled_token_ids",
    "vllm.v1.engine:EngineCoreRequest": "request_id prompt_token_ids mm_features sampling_params pooling_params "
    "arrival_time lora_request cache_salt data_parallel_rank prompt_embeds priority",
    "vllm.sampling_params:SamplingParams": "max_tokens min_tokens temperature top_p top_k min_p repetition_penalty "
    "seed stop_token_ids ignore_eos skip_reading_prefix_cache extra_args frequency_penalty presence_penalty logit_bias "
    "allowed_token_ids bad_words stop include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
    "structured_outputs logprobs prompt_logprobs",
    "vllm.sampling_params:SamplingParams.update_from_tokenizer": "tokenizer",
    "vllm.sampling_params:SamplingParams.verify": "model_config speculative_config structured_outputs_config tokenizer",
    "vllm.sampling_params:StructuredOutputsParams": "json json_object regex choice grammar structural_tag "
    "disable_any_whitespace disable_additional_properties whitespace_pattern",
    "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request": "tokenizer request",
    "vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output": "output",
    "vllm.engine.arg_utils:EngineArgs": "model worker_cls scheduler_cls distributed_executor_backend hf_overrides "
    "additional_config async_scheduling generation_config mm_processor_cache_gb kernel_config enable_prompt_embeds "
    "skip_tokenizer_init enable_prefix_caching kv_cache_memory_bytes skip_mm_profiling tensor_parallel_size "
    "pipeline_parallel_size",
}

# Structs, dataclasses, named tuples and enumerations -> the fields or members that we read.
READ: dict[str, str] = {
    "vllm.v1.engine:EngineCoreOutput": "request_id new_token_ids finish_reason pooling_output events "
    "num_nans_in_logits new_prompt_logprobs_tensors",
    "vllm.logprobs:Logprob": "logprob rank decoded_token",
    "vllm.v1.engine.logprobs:LogprobsProcessor": "logprobs num_logprobs prompt_logprobs num_prompt_logprobs",
    "vllm.v1.structured_output.request:StructuredOutputRequest": "_grammar",
    "vllm.v1.engine:EngineCoreOutputs": "outputs scheduler_stats",
    "vllm.v1.engine:EngineCoreEvent": "type timestamp",
    "vllm.v1.engine:FinishReason": "STOP LENGTH ABORT ERROR REPETITION",
    "vllm.v1.engine:EngineCoreEventType": "SCHEDULED PREEMPTED",
    "vllm.v1.request:RequestStatus": "RUNNING FINISHED_ERROR FINISHED_ABORTED",
    "vllm.v1.core.sched.output:NewRequestData": "req_id sampling_params mm_features prompt_token_ids prefill_token_ids "
    "prompt_embeds",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
    "total_num_scheduled_tokens scheduled_spec_decode_tokens finished_req_ids",
    "vllm.v1.core.sched.output:CachedRequestData": "req_ids num_computed_tokens new_block_ids",
    "vllm.v1.outputs:ModelRunnerOutput": "pooler_output req_ids req_id_to_index sampled_token_ids num_nans_in_logits",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": "sampled_token_ids num_nans",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids num_reqs num_tokens num_reqs_after_padding "
    "num_tokens_after_padding idx_mapping idx_mapping_np query_start_loc query_start_loc_np positions seq_lens "
    "seq_lens_cpu_upper_bound num_computed_tokens_np input_ids",
    "vllm.v1.worker.gpu.model_runner:ExecuteModelState": "input_batch hidden_states",
    "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcRequestState": "max_num_reqs all_token_ids "
    "prompt_len total_len",
    "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsContext": "idx_mapping idx_mapping_np",
    "vllm.v1.metrics.stats:SchedulerStats": "kv_cache_usage prefix_cache_stats",
    "vllm.v1.metrics.stats:PrefixCacheStats": "queries hits",
    "vllm.multimodal.inputs:MultiModalFeatureSpec": "data modality identifier mm_position",
    "vllm.multimodal.inputs:PlaceholderRange": "offset length is_embed",
}

# Functions -> what their source must contain: attributes that we read or set, which have no signature, and, as a list,
# steps in the order that our hooks count on.
CONTAINS: dict[str, set[str] | list[str]] = {
    f"{_SCHEDULER}.__init__": {
        "self.current_step",
        "self.running",
        "self.waiting",
        "self.requests",
        "self.finished_req_ids",
        "self.max_num_running_reqs",
        "self.max_num_active_reqs",
        "self.hash_block_size",
        "self.block_size",
        "self.kv_cache_config",
        "self.kv_cache_manager",
    },
    "vllm.v1.engine.input_processor:InputProcessor.__init__": {"self.mm_encoder_cache_size = "},
    "vllm.v1.request:Request.__init__": {
        "self.next_decode_eligible_step",
        "self.num_computed_tokens",
        "self.num_prompt_tokens",
        "self.block_hashes",
    },
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.__init__": {
        "self.stop = ",
        "self.include_stop_str_in_output",
        "self.output_text",
    },
    # Any thread may prepare a request, and the compilation of its grammar is a future.
    f"{_CORE}.preprocess_add_request": {"structured_output_manager.grammar_init"},
    "vllm.v1.structured_output:StructuredOutputManager.grammar_init": {"self.executor.submit("},
    f"{_CORE}.__init__": {
        "self.batch_queue",
        "self.step_fn",
        "self.scheduler",
        "self.model_executor",
        "self.available_gpu_memory_for_kv_cache",
    },
    # A prompt without tokens counts as repetitions of token 0, which the runner takes out of the mask of penalties.
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__init__": {"self.penalties_state = "},
    "vllm.v1.worker.gpu.sample.penalties:PenaltiesState.__init__": {"self.prompt_bin_mask = "},
    f"{_RUNNER}.add_requests": ["self.req_states.add_request(", "self.sampler.apply_staged_writes("],
    f"{_RUNNER}.__init__": {"self.output_copy_stream", "self.encoder_cache", "self.req_states", "self.pcp_manager"},
    f"{_RUNNER}.initialize_kv_cache": {"self.block_tables = "},
    # A further step of a burst is one of these, with the inputs of the step before.
    f"{_RUNNER}.execute_model": [
        "self.add_requests(",
        "self.gather_batch_req_state(",
        "self.prepare_inputs(",
        "self.prepare_attn(",
        "self.execute_model_state = ",
    ],
    "vllm.v1.worker.gpu.states:RequestState.__init__": {
        "self.req_id_to_index",
        "self.num_computed_tokens_np",
        "self.last_sampled_tokens",
    },
    "vllm.v1.worker.gpu.block_table:BlockTables.__init__": {"self.input_block_tables"},
    f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts.__init__": {
        "self.moe_config",
        "self.quant_method",
        "params_dtype",
    },
    f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase.__init__": {"self.moe_quant_config"},
    f"{_STATE}.__init__": {"self.rope_state", "self.prompt_embeds_state"},
    # schedule() advances the step before it skips the requests that are held back.
    f"{_SCHEDULER}.schedule": ["self.current_step += 1", "self.current_step < request.next_decode_eligible_step"],
    # An attachment reaches the engine with any output.
    f"{_SCHEDULER}.update_from_output": {
        "pooling_output=pooler_output",
        "new_token_ids or pooler_output is not None or stopped",
    },
}

# Our classes that vLLM calls: their methods must take what vLLM passes, and leave none of its abstract ones open.
OURS = (
    "omni_actors.engine.scheduler:OmniScheduler",
    "omni_actors.engine.scheduler:OmniAsyncScheduler",
    "omni_actors.engine.scheduler:DiffusionScheduler",
    "omni_actors.engine.scheduler:DiffusionAsyncScheduler",
    "omni_actors.engine.core:OmniUniProcExecutor",
    "omni_actors.engine.workers.gpu:OmniGPUWorker",
    "omni_actors.engine.workers.gpu:OmniGPURunner",
    "omni_actors.engine.workers.cpu:OmniCPUWorker",
    "omni_actors.engine.workers.cpu:OmniCPURunner",
    "omni_actors.engine.workers.cpu:CPUSampler",
    "omni_actors.engine.workers.cpu:CPUStructuredOutputs",
    "omni_actors.engine.workers.diffusion:DiffusionWorker",
    "omni_actors.engine.workers.diffusion:DiffusionOutput",
    "omni_actors.engine.workers.base:AttachedOutput",
    "omni_actors.engine.models.qwen2_5_omni.thinker:Qwen2_5OmniThinker",
    "omni_actors.engine.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
    "omni_actors.engine.models.qwen2_5_omni.talker:CodeTalkerDecoder",
    "omni_actors.engine.models.qwen2_5_omni.talker:TalkerModelState",
    "omni_actors.engine.models.qwen3_asr.thinker:Qwen3Asr",
    "omni_actors.engine.models.minicpm_o.thinker:MiniCpmOThinker",
    "omni_actors.engine.models.minicpm_o.prompt:Info",
    "omni_actors.engine.models.minicpm_o.prompt:DummyInputs",
    "omni_actors.engine.models.minicpm_o.prompt:MarkedMedia",
    "omni_actors.engine.models.minicpm_o.prompt:FilmParser",
    "omni_actors.engine.models.cosyvoice2.talker:RepetitionAware",
)


class Release(msgspec.Struct):
    """A release of vLLM in the terms of the table; a name that it lacks is missing.

    A signature is text: names with spaces between, `name=` with a default, `*name` and `**name` for the rest.

    Args:
        callables: signatures of what we call: the arguments that we pass, and those that must be passed.
        fields: fields and members by class, only those that we read.
        contains: phrases by function, only those of the table, in their order in the source.
        bases: our class -> its bases in vLLM, in the order in which Python looks for methods.
        methods: base -> its methods and their signatures.
        abstract: our class -> vLLM's abstract methods that it has to define.
    """

    version: str
    callables: dict[str, str]
    fields: dict[str, list[str]]
    contains: dict[str, list[str]]
    bases: dict[str, list[str]]
    methods: dict[str, dict[str, str]]
    abstract: dict[str, list[str]]

    def overridden(self, kind: str, method: str) -> str | None:
        """The signature of vLLM's method that one of our classes overrides; None if it is only ours."""
        return next((self.methods[base][method] for base in self.bases[kind] if method in self.methods[base]), None)


Own = dict[str, dict[str, str]]  # our classes, the same on every release: class -> method -> signature


def problems(release: Release, own: Own, other: Release) -> list[str]:
    """What the engine package relies on and a release does not have; `other` is one on which the engine works."""
    return [*_calls(release), *_reads(release), *_classes(release, own, other)]


def _calls(release: Release) -> Iterator[str]:
    for name, passed in CALLED.items():
        if name not in release.callables:
            yield f"{name} is missing"
            continue
        signature = release.callables[name].split()
        known = {item.rstrip("=") for item in signature}
        open_ended = any(item.startswith("*") for item in signature)
        for argument in passed.split():
            if argument not in known and not open_ended:
                yield f"{name} takes no {argument}: {signature}"
        for item in signature:
            if not item.startswith("*") and not item.endswith("=") and item not in passed.split():
                yield f"{name} needs {item}, which we do not pass"


def _reads(release: Release) -> Iterator[str]:
    for name, fields in READ.items():
        for field in fields.split():
            if field not in release.fields.get(name, ()):
                yield f"{name} has no {field}"
    for name, phrases in CONTAINS.items():
        found = release.contains.get(name, [])
        for phrase in phrases:
            if phrase not in found:
                yield f"{name} does not contain {phrase!r}"
        if isinstance(phrases, list) and set(found) == set(phrases) and found != phrases:
            yield f"{name} has another order: {found}"


def _classes(release: Release, own: Own, other: Release) -> Iterator[str]:
    for kind, methods in own.items():
        for method, ours in methods.items():
            theirs = release.overridden(kind, method)
            if theirs is not None and not takes(ours, theirs):
                yield f"{kind}.{method}({ours}) does not take what vLLM passes: ({theirs})"
            if theirs is None and other.overridden(kind, method) is not None:
                yield f"{kind}.{method} overrides nothing any more"
        for method in release.abstract.get(kind, ()):
            if method not in methods:
                yield f"{kind} does not define {method}, which is abstract"


def takes(ours: str, theirs: str) -> bool:
    """Whether every call that fits `theirs` fits `ours`, as far as names and order tell."""
    names = [item.rstrip("=") for item in theirs.split() if not item.startswith("*")]
    given = ours.split()
    own_names = [item.rstrip("=") for item in given if not item.startswith("*")]
    if own_names[: len(names)] != names[: len(own_names)]:
        return False
    if len(own_names) < len(names):
        return len(own_names) < len(given)  # the rest goes to *args or **kwargs
    return all(item.startswith("*") or item.endswith("=") for item in given[len(names) :])


def untested(release: Release) -> Mapping[str, list[str]]:
    """Names of the table that a recorded release says nothing about: it was recorded for an older table."""
    known = {"callables": release.callables, "fields": release.fields, "contains": release.contains}
    table = {"callables": CALLED, "fields": READ, "contains": CONTAINS}
    return {kind: sorted(set(table[kind]) - set(known[kind])) for kind in table if set(table[kind]) - set(known[kind])}
