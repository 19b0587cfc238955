"""Where a stage's workers run: inside the stage process, or, if there are several, in one process for each GPU."""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor

IN_PROCESS = "omni_actors.engine.executor.OmniUniProcExecutor"
PROCESSES = "mp"


def executor_backend(workers: int) -> str:
    """vLLM's `distributed_executor_backend` for so many GPUs."""
    if workers == 1:
        return IN_PROCESS
    # A stage process has threads and sockets, which a fork would carry along half alive.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return PROCESSES


class OmniUniProcExecutor(UniProcExecutor):
    """vLLM's own executor under another name.

    The CPU platform rewrites the literal backend "uni" to "mp" (one more process and one more transfer per step); a
    class path is left alone on every platform.
    """
