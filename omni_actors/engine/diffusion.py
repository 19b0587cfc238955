"""The engine of a diffusion stage: whole inputs in, waveforms out, a denoise step of all requests at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.core import StepFailed, VllmCore, make_request
from omni_actors.engine.diffusion_runner import FAILED_TOKEN, STEP_TOKEN, DiffusionJob, DiffusionModelRunner
from omni_actors.engine.tensors import to_host
from omni_actors.errors import EngineError, InvalidRequest
from omni_actors.messages import FinishReason, HostTensor
from omni_actors.stage.interface import (
    AudioEvent,
    EngineEvent,
    EngineFacts,
    ErrorEvent,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
)


class DiffusionEngine(StageEngine):
    """Serves a `DiffusionModelRunner` whose output is `audio` f32 [samples].

    Raises:
        ConfigError: the arguments do not describe a diffusion stage.
        StartupError: the model does not load.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        self.core = VllmCore(arguments.create_engine_config())
        self._runner: DiffusionModelRunner = self.core.worker.model_runner
        self._facts = self._runner.facts
        self._jobs: dict[str, DiffusionJob] = {}

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        if request.request_id in self._jobs:
            raise InvalidRequest(f"Request {request.request_id!r} is already running.")
        if not inputs.complete:
            raise InvalidRequest("A diffusion stage takes its input as a whole; it came incomplete.")
        job = self._runner.prepare(request, inputs)
        # One prompt token and one sampled token per step: the base scheduler then counts steps for us.
        parameters = SamplingParams(
            max_tokens=job.num_steps,
            temperature=0.0,
            detokenize=False,
            stop_token_ids=[FAILED_TOKEN],
            extra_args={"omni": {"diffusion": job}},
        )
        self.core.add(make_request(request.request_id, [STEP_TOKEN], parameters, priority=request.priority))
        self._jobs[request.request_id] = job

    def extend(self, request_id: str, rows: HostTensor | None, *, complete: bool) -> None:
        """A late, empty end of the input is harmless; anything else contradicts what the request began with."""
        if rows is not None or not complete:
            raise InvalidRequest(f"Request {request_id!r} got more input; a diffusion stage takes it as a whole.")

    def abort(self, request_id: str) -> None:
        if self._jobs.pop(request_id, None) is not None:
            self.core.abort([request_id])

    def runnable(self) -> bool:
        return self.core.runnable()

    def step(self) -> Sequence[EngineEvent]:
        try:
            outputs = self.core.step()
        except StepFailed as failure:
            error = EngineError(f"A step of the model failed: {failure}")
            return [
                ErrorEvent(request_id, error) for request_id in failure.request_ids if self._jobs.pop(request_id, None)
            ]
        events: list[EngineEvent] = []
        for output in outputs:
            if output.finish_reason is None:
                continue
            job = self._jobs.pop(output.request_id, None)
            if job is not None:  # else aborted while its last step was in flight
                events += self._finish(output.request_id, job, output.pooling_output or {})
        return events

    def _finish(self, request_id: str, job: DiffusionJob, result: dict[str, Any]) -> list[EngineEvent]:
        if "error" in result:
            return [ErrorEvent(request_id, result["error"])]
        audio: torch.Tensor | None = result.get("audio")
        if audio is None:
            return [ErrorEvent(request_id, EngineError("The model ended the request without a waveform."))]
        if not torch.isfinite(audio).all():
            return [ErrorEvent(request_id, EngineError("The model's waveform holds NaN or infinite samples."))]
        return [
            AudioEvent(request_id, to_host(audio), self._facts.sample_rate),
            FinishedEvent(request_id, FinishReason.STOP, job.input_tokens, job.num_steps),
        ]

    def counts(self) -> dict[str, int]:
        running, waiting = self.core.scheduler.get_request_counts()
        return {
            "requests": len(self._jobs),
            "running": running,
            "waiting": waiting,
            **self.core.scheduler.omni_counts(),
            **self.core.worker.omni_counts(),
        }

    def shutdown(self) -> None:
        self._jobs.clear()
        self.core.shutdown()
