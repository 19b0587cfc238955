"""Our schedulers on one that only counts, and an engine of row streams around it. Without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from omni_actors.engine.scheduler import OmniSchedulerMixin, RowStream
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.messages import FinishReason
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
)


@dataclass
class CountedRequest:
    """The part of vLLM's request that the schedulers read; it ends with the last of its `max_tokens`."""

    request_id: str
    num_prompt_tokens: int = 1
    priority: int = 0
    num_computed_tokens: int = 0
    num_tokens: int = 0
    max_tokens: int = 1 << 30
    sampling_params: Any = field(default_factory=SamplingParams)
    next_decode_eligible_step: int = 0
    num_output_placeholders: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens


class CountingScheduler:
    """What vLLM's scheduler does around the hooks: advance, run the eligible, then admit by priority and arrival."""

    def __init__(self, vllm_config: SimpleNamespace, places: int = 1 << 20) -> None:
        self.vllm_config = vllm_config
        self.hash_block_size = 1
        self.most_running = places
        self.requests: dict[str, CountedRequest] = {}
        self.running: list[CountedRequest] = []
        self.waiting: list[CountedRequest] = []
        self.finished_req_ids: set[str] = set()
        self.num_waiting_for_streaming_input = 0
        self.current_step = 0
        self.scheduler_config = SimpleNamespace(prefill_schedule_interval=1)

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        self.current_step += 1
        batch = {r.request_id: 1 for r in self.running if self.current_step >= r.next_decode_eligible_step}
        admitted = []
        for request in sorted(self.waiting, key=lambda waiting: waiting.priority):
            if len(self.running) >= self.most_running:
                break
            if self._handle_blocked_waiting_request(request):
                self.waiting.remove(request)
                self.running.append(request)
                admitted.append(SimpleNamespace(req_id=request.request_id))
                batch[request.request_id] = request.num_tokens
        for request_id, count in batch.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            request.num_tokens = request.num_computed_tokens + 1
            if request.num_computed_tokens == request.max_tokens:
                self._free_request(request)
        return SimpleNamespace(
            num_scheduled_tokens=batch, total_num_scheduled_tokens=sum(batch.values()), scheduled_new_reqs=admitted
        )

    def _handle_blocked_waiting_request(self, request: CountedRequest) -> bool:
        return True

    def add_request(self, request: CountedRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def update_from_output(self, scheduler_output: Any, output: Any) -> None:
        pass

    def preempt(self, request: CountedRequest) -> None:
        self.running.remove(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def finish(self, request: CountedRequest) -> None:
        self._free_request(request)  # as vLLM's scheduler does, however a request ends

    def _free_request(self, request: CountedRequest) -> None:
        del self.requests[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)

    def has_requests(self) -> bool:
        return bool(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)


class StreamScheduler(OmniSchedulerMixin, CountingScheduler):
    """The scheduler under test."""

    def __init__(self, budget_bytes: int = 1 << 20, places: int = 1 << 20) -> None:
        # CountingScheduler sets vllm_config before the mixin reads it, as vLLM's scheduler does.
        super().__init__(SimpleNamespace(additional_config={"omni": {"budget_bytes": budget_bytes}}), places)

    def running_ids(self) -> set[str]:
        return {request.request_id for request in self.running}


class CountingEngine(StageEngine):
    """A talker that makes one token per row and step, and ends when its rows have ended. A row is `width` f32."""

    def __init__(self, scheduler: StreamScheduler, width: int) -> None:
        self.scheduler = scheduler
        self._width = width
        self._rows: dict[str, int] = {}  # decode rows so far
        self._complete: set[str] = set()

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts()

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        prompt = int(inputs.scalars["prompt_tokens"])
        reply = inputs.tensors.get("reply_rows")
        self._rows[request.request_id] = reply.shape[0] if reply is not None else 0
        held = sum(memoryview(tensor.data).nbytes for tensor in inputs.tensors.values())
        self._note(request.request_id, inputs.complete)
        stream = RowStream(self._rows[request.request_id], inputs.complete, held)
        self.scheduler.open_stream(request.request_id, stream)
        self.scheduler.add_request(CountedRequest(request.request_id, prompt, request.priority))

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        count = rows.shape[0] if rows is not None else 0
        self._rows[request_id] += count
        self._note(request_id, complete)
        self.scheduler.push_rows(request_id, torch.zeros(count, self._width), complete=complete)

    def _note(self, request_id: str, complete: bool) -> None:
        if complete:
            self._complete.add(request_id)

    def abort(self, request_id: str) -> None:
        if (request := self.scheduler.requests.get(request_id)) is not None:
            self.scheduler.finish(request)

    def runnable(self) -> bool:
        return self.scheduler.has_runnable()

    def over_budget(self) -> bool:
        return not self.scheduler.budget.rows.fits()

    def step(self) -> Sequence[EngineEvent]:
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, None)
        events: list[EngineEvent] = []
        for request in list(self.scheduler.running):
            name = request.request_id
            made = request.num_computed_tokens - request.num_prompt_tokens
            if name in self._complete and made >= self._rows[name]:
                self.scheduler.finish(request)
                events.append(FinishedEvent(name, FinishReason.STOP, request.num_prompt_tokens, made))
        return events

    def counts(self) -> dict[str, int]:
        return self.scheduler.omni_counts()

    def shutdown(self) -> None: ...
