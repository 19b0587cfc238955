"""Where a stage's workers run: one worker in the stage process, several in one process per GPU."""

from __future__ import annotations

import os

from vllm.v1.executor.uniproc_executor import UniProcExecutor


def executor_backend(workers: int) -> str:
    """vLLM's `distributed_executor_backend` for this number of workers."""
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
