"""Runs the worker inside the stage process."""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor

EXECUTOR_PATH = "omni_actors.engine.executor.OmniUniProcExecutor"


class OmniUniProcExecutor(UniProcExecutor):
    """vLLM's own executor under another name.

    The CPU platform rewrites the literal backend "uni" to "mp" (a further process and a further hop per step); a class
    path is left alone on every platform.
    """
