"""The engine of a diffusion stage: streamed input in, waveforms out; one denoise step of all requests at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.sampling_params import SamplingParams

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.core import StepFailed, VllmCore, make_request
from omni_actors.engine.diffusion_budget import Claim
from omni_actors.engine.diffusion_runner import FAILED_TOKEN, STEP_TOKEN, DiffusionStream
from omni_actors.engine.tensors import to_host
from omni_actors.engine.vllm_engine import VllmEngine
from omni_actors.engine.worker_base import attachment_of
from omni_actors.errors import EngineError, InvalidRequest, ModelOutputInvalid, OmniError
from omni_actors.protocol.results import FinishReason
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.deadlines import FIRST_SECONDS
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    EngineFacts,
    EngineStatistics,
    ErrorEvent,
    StageInputs,
    StageRequest,
)
from omni_actors.telemetry.playback import Playback

if TYPE_CHECKING:
    from omni_actors.engine.diffusion_scheduler import DiffusionMixin
    from omni_actors.engine.diffusion_worker import DiffusionWorker

FIRST_JOB = "/0"  # suffix of the id of a request's first job


@dataclass(slots=True)
class _Running:
    """A request; `job_id` is the job in the core, if there is one, `jobs` and `steps` count those submitted so far.

    `claim` is what it takes of the stage's budget, known with its first job; its first sound is due at `first_due`.
    """

    request: StageRequest
    stream: DiffusionStream
    first_due: float
    claim: Claim | None = None
    job_id: str | None = None
    jobs: int = 0
    steps: int = 0
    playback: Playback = field(default_factory=Playback)

    @property
    def due(self) -> float:
        """When the listener falls silent (monotonic clock, seconds)."""
        return self.playback.runs_out if self.playback.first else self.first_due


class DiffusionEngine(VllmEngine[_Running]):
    """Runs a `DiffusionModelRunner` whose output is `audio` f32 [samples].

    A request is a `DiffusionStream`; its jobs become requests of vLLM, one after the other, so that whatever vLLM does
    for requests (batching of steps, admission, order) it does for chunks.

    Raises:
        ConfigError: the arguments do not describe a diffusion stage.
        StartupError: the model does not load.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        super().__init__(VllmCore(arguments.create_engine_config()))
        self._runner = cast("DiffusionWorker", self.core.worker).model_runner
        self._facts = self._runner.facts
        self._jobs: dict[str, str] = {}  # id of a job in the core -> request

    @property
    def _scheduler(self) -> DiffusionMixin:
        return cast("DiffusionMixin", self.core.scheduler)  # the arguments of a diffusion stage name one of its classes

    @property
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""
        return self._facts

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Have the runner check the request, and submit its first job if its input is there."""
        self._check_new(request.request_id)
        stream = self._runner.open(request, inputs)
        first_due = self._scheduler.clock() + FIRST_SECONDS
        running = self._requests[request.request_id] = _Running(request, stream, first_due)
        self._submit(running)

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """See `StageEngine.extend`. Drops input of ended requests."""
        running = self._requests.get(request_id)
        if running is None:
            return
        try:
            if rows is not None:
                raise InvalidRequest("This stage takes streamed tokens, not rows.")
            running.stream.extend(token_ids, complete=complete)
        except OmniError:
            self.abort(request_id)  # without this input it could never end
            raise
        if running.job_id is None:
            self._submit(running)

    def waits_for_input(self, request_id: str) -> bool:
        """Whether the next job is to come from input that is missing."""
        running = self._requests.get(request_id)
        return running is not None and running.job_id is None

    def _submit(self, running: _Running) -> None:
        """Add the next job of a request to the core, if its input has arrived."""
        stream = running.stream
        job = stream.next_job()
        if job is None:
            return
        if running.claim is None:
            largest = max(stream.job_bytes, job.held_bytes + job.most_bytes)
            running.claim = Claim(running.request.request_id, stream.held_bytes, largest)
        # One prompt token, and one sampled token per step: vLLM's scheduler then counts the steps.
        parameters = SamplingParams(
            max_tokens=job.num_steps,
            temperature=0.0,
            detokenize=False,
            stop_token_ids=[FAILED_TOKEN],
            extra_args={"omni": {"diffusion": job, "claim": running.claim, "due": running.due}},
        )
        job_id = f"{running.request.request_id}/{running.jobs}"
        request = make_request(job_id, [STEP_TOKEN], parameters, priority=running.request.priority)
        self.core.add(self.core.prepare(request))
        running.job_id = job_id
        running.jobs += 1
        running.steps += job.num_steps
        self._jobs[job_id] = running.request.request_id

    def abort(self, request_id: str) -> None:
        """Drop a request with its job and what it left on the device. Unknown ids are ignored."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return
        if running.job_id is not None:
            del self._jobs[running.job_id]
            self.core.abort([running.job_id])
        self._release(running)

    def _release(self, running: _Running) -> None:
        """Free the device memory of a request that has ended, and its claim."""
        running.stream.close()
        self._scheduler.release(running.request.request_id)

    def step(self) -> Sequence[EngineEvent]:
        """Do one denoise step of all jobs that fit; the events are those of completed jobs."""
        try:
            outputs = self.core.step()
        except StepFailed as failure:
            error = failure.for_request()
            ended = [self._jobs.pop(job_id) for job_id in failure.request_ids if job_id in self._jobs]
            for request_id in ended:
                self._release(self._requests.pop(request_id))
            return [ErrorEvent(request_id, error) for request_id in ended]
        events: list[EngineEvent] = []
        for output in outputs:
            if output.finish_reason is None:
                continue
            done = self._jobs.pop(output.request_id, None)
            if done is not None:  # else aborted while its last step was in flight
                events += self._job_done(done, attachment_of(output))
        return events

    def _job_done(self, request_id: str, result: dict[str, Any]) -> list[EngineEvent]:
        running = self._requests[request_id]
        running.job_id = None
        try:
            events = self._audio(request_id, running, result)
            if not running.stream.finished:
                self._submit(running)
                return events
            if not running.playback.first:
                raise EngineError("The model ended the request without a waveform.")
        except OmniError as error:
            return [self._failed(request_id, error)]
        self._release(running)
        done = self._finished(request_id, FinishReason.STOP, running.stream.input_tokens, running.steps)
        return [*events, done]

    def _audio(self, request_id: str, running: _Running, result: dict[str, Any]) -> list[EngineEvent]:
        if "error" in result:
            raise result["error"]
        audio: torch.Tensor | None = result.get("audio")
        if audio is None:  # all of it is held back until the next chunk
            return []
        if not torch.isfinite(audio).all():
            raise ModelOutputInvalid("The model's waveform holds NaN or infinite samples.")
        running.playback.add(self._scheduler.clock(), audio.shape[-1] / self._facts.sample_rate)
        return [AudioEvent(request_id, to_host(audio), self._facts.sample_rate)]

    def statistics(self) -> EngineStatistics:
        """Totals of vLLM's scheduler, and the state of the budget."""
        return replace(super().statistics(), budget=self._scheduler.budget.statistics())

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Requests whose first job was scheduled since the last call, and when (monotonic clock, seconds)."""
        scheduled = super().take_scheduled()
        return [(job_id.removesuffix(FIRST_JOB), moment) for job_id, moment in scheduled if job_id.endswith(FIRST_JOB)]

    def shutdown(self) -> None:
        """Forget all jobs and shut the core down."""
        self._jobs.clear()
        super().shutdown()
