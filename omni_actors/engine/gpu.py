"""Worker and runner of autoregressive stages on CUDA. Never import this on the CPU or `cpu.py` here (see there)."""

from __future__ import annotations

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from omni_actors.engine.runner import OmniRunnerMixin
from omni_actors.engine.worker_base import OmniWorkerBase


class OmniGPURunner(OmniRunnerMixin, GPUModelRunner):
    """vLLM's V2 runner with rows in and out."""


class OmniGPUWorker(OmniWorkerBase, Worker):
    """vLLM's worker with our runner."""

    def _make_model_runner(self) -> OmniGPURunner:
        return OmniGPURunner(self.vllm_config, self.device)
