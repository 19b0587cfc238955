"""The ranks of a spread replica on a host other than its first one, where no engine core runs."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from omni_actors.errors import StartupError


def run(vllm_config: VllmConfig) -> None:
    """Start this host's ranks, which take their work from the first host. Returns when one of them has ended.

    Raises:
        StartupError: a rank does not start.
    """
    try:
        executor = MultiprocExecutor(vllm_config, monitor_workers=False)
    except Exception as error:  # vLLM raises its plain Exception for a worker that ends
        raise StartupError(
            f"The ranks of {vllm_config.model_config.model} on this host do not start: {type(error).__name__}: {error}",
            hint="The log of the replica on this host has the worker's own error.",
        ) from error
    executor.start_worker_monitor(inline=True)
