"""Where a stage's workers run: one in the stage process, several in one process per GPU, or in actors of Ray."""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from omni_actors.config import Executor


def executor_backend(workers: int, executor: Executor = Executor.HOST) -> str:
    """vLLM's `distributed_executor_backend` for this number of workers."""
    if executor is Executor.RAY:
        # vLLM's older executor for Ray cannot schedule ahead, and wants hosts whose addresses differ.
        os.environ["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "1"
        return "ray"
    if workers == 1:
        return "omni_actors.engine.executor.OmniUniProcExecutor"
    # A stage process has threads and sockets, which must not be forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return "mp"


class OmniUniProcExecutor(UniProcExecutor):
    """vLLM's in-process executor under another name.

    The CPU platform rewrites the literal backend "uni" to "mp" (one more process and one more transfer per step); a
    class path is left alone on every platform.
    """
