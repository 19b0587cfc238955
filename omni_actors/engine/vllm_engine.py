"""The common part of the engines that run a `VllmCore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from omni_actors.engine.core import VllmCore
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.protocol.results import FinishReason
from omni_actors.stage.engine_interface import EngineStatistics, ErrorEvent, FinishedEvent, StageEngine

RunningT = TypeVar("RunningT")


class VllmEngine(StageEngine, Generic[RunningT]):
    """Holds the running requests, ends them (finished or failed), and reports the core's statistics."""

    def __init__(self, core: VllmCore) -> None:
        self.core = core
        self._requests: dict[str, RunningT] = {}

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidRequest(f"Request {request_id!r} is already running.")

    def _finished(
        self,
        request_id: str,
        reason: FinishReason,
        input_tokens: int,
        output_tokens: int,
        stop_reason: int | str | None = None,
        picture_tokens: int = 0,
    ) -> FinishedEvent:
        """End a request that the core has finished."""
        del self._requests[request_id]
        return FinishedEvent(request_id, reason, input_tokens, output_tokens, stop_reason, picture_tokens)

    def _failed(self, request_id: str, error: OmniError) -> ErrorEvent:
        """End a request that the core may still compute."""
        self.abort(request_id)
        return ErrorEvent(request_id, error)

    def runnable(self) -> bool:
        """Whether the core would do something in a step."""
        return self.core.runnable()

    def counts(self) -> dict[str, int]:
        """Requests here, in vLLM's scheduler and in its worker, and what each holds for them."""
        running, waiting = self.core.scheduler.get_request_counts()
        return {
            "requests": len(self._requests),
            "running": running,
            "waiting": waiting,
            **self.core.scheduler.omni_counts(),
            **self.core.worker_counts(),
        }

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Requests that vLLM scheduled for the first time, and when."""
        return self.core.statistics.take_scheduled()

    def statistics(self) -> EngineStatistics:
        """Totals of vLLM's scheduler."""
        return self.core.statistics.now(self.core.scheduler)

    def device_bytes(self) -> int:
        """Bytes that torch's allocator has reserved in this process."""
        return torch.cuda.memory_reserved() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0

    @property
    def ends_with_process(self) -> bool:
        """Whether no other process works for it. vLLM's own shutdown searches all objects for garbage, twice."""
        return self.core.vllm_config.parallel_config.world_size == 1

    def shutdown(self) -> None:
        """Drop all requests and shut the core down."""
        self._requests.clear()
        self.core.shutdown()
