"""The engine of a diffusion stage: sound, pictures or latents; one denoise step of all requests at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from msgspec import Struct
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.core import VllmCore, VllmEngine, make_request
from omni_actors.engine.rows import check_finite, to_host
from omni_actors.engine.scheduler import Claim
from omni_actors.engine.workers.base import attachment_of
from omni_actors.engine.workers.diffusion import FAILED_TOKEN, STEP_TOKEN, DiffusionJob, DiffusionStream
from omni_actors.errors import EngineError, ModelOutputInvalid, OmniError
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.messages import FinishReason
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    ImageEvent,
    LatentsEvent,
    ProgressEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
)
from omni_actors.stage.sound import FIRST_SECONDS, Ahead, Arrivals, Costs, Outlook, foresee
from omni_actors.telemetry.metrics import Metric
from omni_actors.telemetry.request_log import Playback

if TYPE_CHECKING:
    from omni_actors.engine.scheduler import DiffusionMixin
    from omni_actors.engine.workers.diffusion import DiffusionWorker


KNOWN = frozenset({"audio", "image", "latents", "preview", "error"})  # to the engine, in the result of a step


def picture_events(request_id: str, result: Mapping[str, Any], *, preview: bool) -> list[ImageEvent | LatentsEvent]:
    """Events for the CPU tensors of a `StepResult`; none if it has neither a picture nor latents.

    Args:
        preview: whether the job whose result it is makes a preview. A result of a step that is not the last has its
            latents under the name `preview`, and they are those of one in any case.

    Raises:
        ModelOutputInvalid: the latents hold NaN or infinite values, or a picture is not u8 [height, width, 3 or 4].
    """
    events: list[ImageEvent | LatentsEvent] = []
    for name in ("preview", "latents"):
        latents: torch.Tensor | None = result.get(name)
        if latents is not None:
            check_finite(latents, "latents")
            events.append(LatentsEvent(request_id, to_host(latents), preview=preview or name == "preview"))
    pixels: torch.Tensor | None = result.get("image")
    if pixels is not None:
        if pixels.dtype is not torch.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (3, 4):
            raise ModelOutputInvalid(
                f"The model's picture is {pixels.dtype} {list(pixels.shape)}, not u8 [h, w, 3 or 4]."
            )
        events.append(ImageEvent(request_id, to_host(pixels), preview=preview))
    return events


def other_tensors(request_id: str, result: Mapping[str, Any], *, final: bool) -> list[StreamEvent]:
    """The event with those CPU tensors of a `StepResult` that only a later stage knows; none if there are none.

    Args:
        final: whether it is the request's last.

    Raises:
        ModelOutputInvalid: one holds NaN or infinite values.
    """
    others = {name: tensor for name, tensor in result.items() if name not in KNOWN}
    for name, tensor in others.items():
        check_finite(tensor, name)
    hosted = {name: to_host(tensor) for name, tensor in others.items()}
    return [StreamEvent(request_id, tensors=hosted, final=final)] if hosted else []


class _RunningStream(Struct):
    """A request; `job_id` is the job in the core, if there is one, `jobs` and `steps` count those submitted so far.

    `job` is the one in the core, with `done` of its steps done, and `answered` says that there was output. `claim` is
    its share of the stage's budget, known with its first job. Its first sound is due at `first_due`; `made` are the
    moments at which its pieces were made, those in `kept` leave together at `leaves`, and `arrivals` are of its input.
    """

    request: StageRequest
    stream: DiffusionStream
    first_due: float
    arrivals: Arrivals = msgspec.field(default_factory=Arrivals)
    claim: Claim | None = None
    job_id: str | None = None
    job: DiffusionJob | None = None
    done: int = 0
    answered: bool = False
    jobs: int = 0
    steps: int = 0
    made: Playback = msgspec.field(default_factory=Playback)
    kept: list[EngineEvent] = []
    leaves: float = 0.0
    left: bool = False

    @property
    def due(self) -> float:
        """Time of the playback underrun if every chunk is sent at once (monotonic seconds)."""
        return self.made.runs_out if self.made.first else self.first_due


class DiffusionEngine(VllmEngine[_RunningStream]):
    """Runs a `DiffusionModelRunner`, whose output is sound, a picture or latents.

    A request is a `DiffusionStream`; its jobs become requests of vLLM, one after the other, so that whatever vLLM does
    for requests (batching of steps, admission, order) it does for chunks.

    Raises:
        ConfigError: the arguments do not describe a diffusion stage.
        StartupError: the model does not load.
    """

    def __init__(self, arguments: OmniEngineArgs) -> None:
        super().__init__(VllmCore(arguments.create_engine_config(), has_groups=False))
        self._runner = cast("DiffusionWorker", self.core.worker).model_runner
        self._facts = self._runner.facts
        self._began = 0.0  # when the latest step did
        self._keeps = bool(arguments.model_config.decode.get("smooth_start", True))  # first sounds, for a while
        self._costs = Costs(self._scheduler.places)
        self._pace = 0.0  # seconds for a token of the input, of the answer that got some last
        self._keeping: dict[str, _RunningStream] = {}  # requests with sound that has not left
        self._queue: dict[str, _RunningStream] = {}  # requests whose sound waits for room

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
        running = self._requests[request.request_id] = _RunningStream(request, stream, first_due)
        self._arrived(running)
        self._submit(running)

    def _extend(
        self,
        request_id: str,
        running: _RunningStream,
        rows: HostTensor | None,
        token_ids: Sequence[int],
        complete: bool,
    ) -> None:
        if rows is not None:
            running.stream.extend_tensor(rows, complete=complete)
        else:
            running.stream.extend(token_ids, complete=complete)
        self._arrived(running)
        if running.job_id is None:
            self._submit(running)

    def _arrived(self, running: _RunningStream) -> None:
        running.arrivals.add(self._scheduler.clock(), running.stream.input_tokens)
        self._pace = running.arrivals.pace(self._pace)

    def waits_for_input(self, request_id: str) -> bool:
        """Whether the next job is to come from input that is missing."""
        running = self._requests.get(request_id)
        return running is not None and running.job_id is None

    def _submit(self, running: _RunningStream) -> None:
        """Add the next job of a request to the core, if its input has arrived and there is room for its sound."""
        if not (running.jobs or self._has_room()):
            self._queue[running.request.request_id] = running
            return
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
        running.job_id, running.job, running.done = job_id, job, 0
        running.jobs += 1
        running.steps += job.num_steps

    def _has_room(self) -> bool:
        """Whether another answer's sound can be begun; pictures, latents and sound for files have no listeners."""
        listeners = sum(bool(running.jobs) for running in self._requests.values())
        return not (self._keeps and self._facts.sample_rate) or listeners < self._costs.listeners

    def _admit(self) -> None:
        """Begin the sound of answers that waited for room, in order of priority and of when it was due."""
        order = sorted(self._queue.values(), key=lambda running: (running.request.priority, running.first_due))
        for running in order:
            if not self._has_room():
                break
            del self._queue[running.request.request_id]
            self._submit(running)

    def abort(self, request_id: str) -> None:
        """Drop a request with its job and what it left on the device. Unknown ids are ignored."""
        running = self._requests.pop(request_id, None)
        self._keeping.pop(request_id, None)
        self._queue.pop(request_id, None)
        if running is None:
            return
        if running.job_id is not None:
            self.core.abort([running.job_id])
        self._release(running)
        self._admit()

    def _release(self, running: _RunningStream) -> None:
        """Free the device memory of a request that has ended, and its claim."""
        running.stream.close()
        self._scheduler.release(running.request.request_id)

    def step(self) -> Sequence[EngineEvent]:
        """Do one denoise step of all jobs that fit; the events are those of completed jobs, previews and progress."""
        self._began = self._scheduler.clock()
        events = super().step()
        self._admit()
        self._foresee()
        return [*events, *self._leaving()]

    def _note_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        if outputs:
            computed = {output.request_id for output in outputs}
            jobs = [running.job for running in self._requests.values() if running.job_id in computed]
            self._costs.stepped([job.share for job in jobs if job is not None], self._began, self._scheduler.clock())

    def _take(self, request_id: str, running: _RunningStream, output: EngineCoreOutput) -> list[EngineEvent]:
        """Progress, and the latents of a preview if the runner has made them; or what a job gives at its end."""
        result, job = attachment_of(output), running.job
        if output.finish_reason is None:
            return [*_progress(running), *picture_events(request_id, result, preview=True)]
        running.job_id = None
        if "error" in result:
            raise result["error"]
        pictures = picture_events(request_id, result, preview=job is not None and job.preview)
        others = other_tensors(request_id, result, final=running.stream.finished)
        events: list[EngineEvent] = [*_progress(running), *pictures, *others]
        self._take_audio(request_id, running, job, result.get("audio"))
        running.answered |= bool(running.kept or pictures or others)
        if not running.stream.finished:
            self._submit(running)
            return events
        if not running.answered:
            raise EngineError("The model ended the request without an output.")
        self._release(running)
        events += self._let_go(running)
        done = FinishedEvent(request_id, FinishReason.STOP, running.stream.input_tokens, running.steps)
        return [*events, self._finished(done)]

    def _failed(self, request_id: str, error: OmniError) -> list[EngineEvent]:
        return [*self._let_go(self._requests[request_id]), *super()._failed(request_id, error)]

    def _take_audio(
        self, request_id: str, running: _RunningStream, job: DiffusionJob | None, audio: torch.Tensor | None
    ) -> None:
        """Check a piece of sound, and keep it until it leaves."""
        if audio is None:  # held back until the next chunk, or not a sound
            return
        check_finite(audio, "waveform")
        seconds = audio.shape[-1] / self._facts.sample_rate
        running.made.add(self._scheduler.clock(), seconds)
        if job is not None:
            self._costs.completed(job.share, job.num_steps, seconds)
        running.kept.append(AudioEvent(request_id, to_host(audio), self._facts.sample_rate))
        self._keeping[request_id] = running

    def _foresee(self) -> None:
        """Decide when first sounds that are kept leave."""
        kept = [running for running in self._keeping.values() if not running.left]
        if not kept or not self._keeps:
            return
        outlooks = {key: self._outlook(running) for key, running in self._requests.items() if key not in self._queue}
        foresee(list(outlooks.values()), self._costs, self._scheduler.clock())
        for running in kept:
            running.leaves = outlooks[running.request.request_id].leaves

    def _outlook(self, running: _RunningStream) -> Outlook:
        """What is to be made of a request."""
        job = running.job if running.job_id is not None else None
        now = [Ahead(running.made.seconds, job.share, max(1, job.num_steps - running.done))] if job is not None else []
        ahead = [*now, *running.stream.ahead(self._facts.sample_rate)]
        return Outlook(running.made, running.due, running.arrivals.pace(self._pace), ahead)

    def _leaving(self) -> list[EngineEvent]:
        """The sound whose time to leave has come."""
        now = self._scheduler.clock()
        leaving = [running for running in self._keeping.values() if running.leaves <= now]
        return [event for running in leaving for event in self._let_go(running)]

    def _let_go(self, running: _RunningStream) -> list[EngineEvent]:
        """The request's sound, which may leave now."""
        self._keeping.pop(running.request.request_id, None)
        running.left |= bool(running.kept)
        events, running.kept = running.kept, []
        return events

    def runnable(self) -> bool:
        """Whether a step would do something: compute, or send sound that was kept."""
        now = self._scheduler.clock() if self._keeping else 0.0
        return super().runnable() or any(running.leaves <= now for running in self._keeping.values())

    def statistics(self) -> Mapping[Metric, float]:
        """Totals of vLLM's scheduler, and the state of the budget."""
        return {**super().statistics(), **self._scheduler.budget.statistics()}

    def shutdown(self) -> None:
        """Forget all requests and shut the core down."""
        self._keeping.clear()
        self._queue.clear()
        super().shutdown()


def _progress(running: _RunningStream) -> list[ProgressEvent]:
    """That one more step of the request's job is done, if the job is one that says so."""
    running.done += 1
    if running.job is None or not running.job.reports_progress:
        return []
    return [ProgressEvent(running.request.request_id, running.done, running.job.num_steps)]
