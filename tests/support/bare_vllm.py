"""vLLM without this package: its own front end, scheduler and runner, to compare answers with.

Only the random draw and the masks of grammars are ours: on the CPU, Triton's interpreter cannot run vLLM's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logprobs import PromptLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from omni_actors.engine.workers.cpu import CPUSampler, CPUStructuredOutputs
from tests.support.stage_driver import SMALL


class BareRunner(CPUModelRunner):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.sampler = CPUSampler(self.sampler)
        self.structured_outputs_worker = CPUStructuredOutputs(self.structured_outputs_worker)


class BareWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = BareRunner(self.vllm_config, self.device)


class BareVllm:
    """vLLM's engine for a checkpoint, in this process.

    Attributes:
        prompt_logprobs: of each request answered so far, by its name, if it asked for them.
    """

    def __init__(self, checkpoint: Path) -> None:
        config = EngineArgs(
            str(checkpoint),
            generation_config="vllm",
            worker_cls="tests.support.bare_vllm.BareWorker",
            distributed_executor_backend="omni_actors.engine.core.OmniUniProcExecutor",
            skip_mm_profiling=True,
            **SMALL,
        ).create_engine_config()
        self.prompt_logprobs: dict[str, PromptLogprobs | None] = {}
        self._engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def generate(self, prompt_token_ids: list[int], **params: Any) -> CompletionOutput:
        return self.generate_all(prompt_token_ids, {"": params})[""]

    def generate_all(
        self, prompt_token_ids: list[int], cases: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, CompletionOutput]:
        """The answers to one prompt with various parameters, by name."""
        for name, given in cases.items():
            if "structured_outputs" in given:
                given = {**given, "structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
            self._engine.add_request(f"bare/{name}", {"prompt_token_ids": prompt_token_ids}, SamplingParams(**given))
        answers: dict[str, CompletionOutput] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                name = output.request_id.removeprefix("bare/")
                answers[name] = output.outputs[0]
                self.prompt_logprobs[name] = output.prompt_logprobs
        return answers
