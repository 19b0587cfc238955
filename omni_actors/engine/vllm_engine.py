"""What the engines around a `VllmCore` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from omni_actors.engine.core import VllmCore
from omni_actors.engine.statistics import device_bytes
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.protocol.results import FinishReason
from omni_actors.stage.engine_interface import EngineStatistics, ErrorEvent, FinishedEvent, StageEngine

RunningT = TypeVar("RunningT")


class VllmEngine(StageEngine, Generic[RunningT]):
    """Keeps the requests that run, tells what `core` says of itself, and ends requests in the two ways there are."""

    def __init__(self, core: VllmCore) -> None:
        self.core = core
        self._requests: dict[str, RunningT] = {}

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidRequest(f"Request {request_id!r} is already running.")

    def _finished(self, request_id: str, reason: FinishReason, input_tokens: int, output_tokens: int) -> FinishedEvent:
        """The end of a request that the core has done with."""
        del self._requests[request_id]
        return FinishedEvent(request_id, reason, input_tokens, output_tokens)

    def _failed(self, request_id: str, error: OmniError) -> ErrorEvent:
        """The end of a request that the core may still compute."""
        self.abort(request_id)
        return ErrorEvent(request_id, error)

    def runnable(self) -> bool:
        return self.core.runnable()

    def counts(self) -> dict[str, int]:
        running, waiting = self.core.scheduler.get_request_counts()
        return {
            "requests": len(self._requests),
            "running": running,
            "waiting": waiting,
            **self.core.scheduler.omni_counts(),
            **self.core.worker_counts(),
        }

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        return self.core.take_scheduled()

    def statistics(self) -> EngineStatistics:
        return self.core.statistics()

    def device_bytes(self) -> int:
        return device_bytes()

    def shutdown(self) -> None:
        self._requests.clear()
        self.core.shutdown()
