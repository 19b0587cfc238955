"""The prompt stage: prompts become token ids and encoded features, in a separate process.

Images and audio take tens of milliseconds to seconds to prepare; in the thinker's loop they would stall the next token
of every other request. The output is that of vLLM's own front end, byte for byte, so the thinker treats it like any
vLLM request. Here, too, media must not stall others: prompts with media are processed on threads, whose decoders are
processes of their own (`media/decoders.py`), while texts are processed in the stage's loop.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import jinja2
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.utils.import_utils import resolve_obj_by_qualname

from omni_actors.config.checks import check_parameters
from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.instruction import instructed
from omni_actors.engine.prompt_processing import PromptProcessor
from omni_actors.engine.text_prompts import TextPromptProcessor
from omni_actors.errors import EngineError, InvalidRequest, OmniError
from omni_actors.logs import trace_of
from omni_actors.media.decoders import THREADS, DecoderThreads, MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.payloads import Prompt
from omni_actors.protocol.results import FinishReason
from omni_actors.protocol.tensors import HostTensor
from omni_actors.protocol.tools import TOOLS
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    ErrorEvent,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    StreamEvent,
)

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0  # of a step that has nothing to do but to wait for media

Processed = tuple[list[int], dict[str, HostTensor]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: StageRequest
    prompt: Prompt
    tensors: Sequence[HostTensor]  # of its media, and then the embeddings that it has instead of tokens


class PromptEngine(StageEngine):
    """Turns prompts into token ids and encoded features, by priority and arrival.

    A step returns one prompt: one with media that is ready, or else the most urgent text, which it processes itself.
    With `scheduling_policy: fcfs`, its own or that of the stage after it, priority does not count.

    Args:
        arguments: of kind "prompt"; the vLLM fields are those of the thinker that takes the result.
        limits: for media; the length of audio is lowered to the limit of the model's feature extractor.

    Raises:
        ConfigError: the model has no processor for audio, images and video.
    """

    def __init__(self, arguments: OmniEngineArgs, limits: MediaLimits | None = None) -> None:
        config = arguments.create_engine_config()
        self.prompts = _processor(arguments, config, limits or MediaLimits())
        self._instruction = arguments.model_config.instruction
        self._texts: dict[str, _Waiting] = {}  # by request, in order of arrival; so are the two below
        self._media: dict[str, _Waiting] = {}
        self._running: dict[str, tuple[_Waiting, MediaDecoder]] = {}
        self._threads = DecoderThreads()
        self._free = THREADS  # those that have neither work nor a result that no step has taken
        self._ready: queue.SimpleQueue[tuple[_Waiting, Future[Processed]]] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._scheduled: list[tuple[str, float]] = []

    @property
    def facts(self) -> EngineFacts:
        """The longest prompt that leaves room for an answer, in tokens, and how many media it may have."""
        return EngineFacts(
            max_input_tokens=self.prompts.max_tokens,
            embeds_width=self.prompts.embeds_width,
            max_media=self.prompts.max_media,
            parameters=self.prompts.parameters,
        )

    @property
    def limits(self) -> MediaLimits:
        """The limits in force."""
        return self.prompts.limits

    @property
    def decoder_pids(self) -> list[int]:
        """Process ids of the decoders that run."""
        return self._threads.pids

    # -- StageEngine

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Check a prompt with its media and queue it. Raises `OmniError`, before anything is decoded."""
        prompt = inputs.prompt
        if prompt is None:
            raise InvalidRequest("The prompt stage needs a prompt.")
        if any(request.request_id in held for held in (self._texts, self._media, self._running)):
            raise InvalidRequest(f"Request {request.request_id!r} is already running.")
        check_parameters("prompt", self.prompts.parameters, request.params)
        tensors = self.prompts.check(prompt, inputs)  # of what came: an instruction alone is an empty prompt, too
        prompt = instructed(prompt, self._instruction)
        waiting = _Waiting(request, prompt, tensors)
        (self._media if prompt.media else self._texts)[request.request_id] = waiting
        self._fill_threads()

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """Ignore a late, empty end of the input; refuse any other input, since a prompt comes as a whole."""
        if rows is not None or not complete:
            raise InvalidRequest(f"Request {request_id!r} got more input; a prompt comes as a whole.")

    def abort(self, request_id: str) -> None:
        """Forget a prompt, and end what decodes its media. Unknown ids are ignored."""
        self._texts.pop(request_id, None)
        self._media.pop(request_id, None)
        if request_id in self._running:
            _, decoder = self._running.pop(request_id)
            decoder.cancel()

    def runnable(self) -> bool:
        """Whether a text waits, or a prompt with media is ready."""
        return bool(self._texts) or not self._ready.empty()

    def busy(self) -> bool:
        """Whether threads work on prompts with media."""
        return self._free < THREADS

    def on_progress(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when a prompt with media is ready."""
        self._wake = wake

    def step(self) -> Sequence[EngineEvent]:
        """Return a prompt that is ready, or else process the most urgent text; with neither, wait for media."""
        if self._ready.empty() and self._texts:
            waiting = self._most_urgent(self._texts.values())
            request_id = waiting.request.request_id
            del self._texts[request_id]
            self._scheduled.append((request_id, time.monotonic()))
            return self._events(waiting, lambda: self._process(waiting))
        if self._ready.empty() and not self.busy():
            return []
        try:
            waiting, future = self._ready.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            return []
        self._free += 1
        self._fill_threads()
        running = self._running.get(waiting.request.request_id)
        if running is None or running[0] is not waiting:  # it was aborted
            return []
        del self._running[waiting.request.request_id]
        return self._events(waiting, future.result)

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Prompts whose processing has begun since the last call, and when."""
        taken, self._scheduled = self._scheduled, []
        return taken

    def counts(self) -> dict[str, int]:
        """Prompts that wait or are processed."""
        return {"requests": len(self._texts) + len(self._media) + len(self._running)}

    def shutdown(self) -> None:
        """Forget all prompts; end decoders and threads."""
        for held in (self._texts, self._media, self._running):
            held.clear()
        self._threads.close()
        self.prompts.shutdown()

    # -- processing

    def _most_urgent(self, waiting: Iterable[_Waiting]) -> _Waiting:
        """The one to process next, the oldest of several."""
        # A search through all is cheap compared to the processing, and needs no second index that aborts must update.
        return min(waiting, key=lambda entry: entry.request.priority if self.prompts.by_priority else 0)

    def _fill_threads(self) -> None:
        """Give the most urgent prompts with media to the threads that are free."""
        while self._free and self._media:
            waiting = self._most_urgent(self._media.values())
            request_id = waiting.request.request_id
            del self._media[request_id]
            self._scheduled.append((request_id, time.monotonic()))
            self._free -= 1
            decoder = self._submit(waiting)
            self._running[request_id] = waiting, decoder
            decoder.future.add_done_callback(self._reporter(waiting))

    def _submit(self, waiting: _Waiting) -> MediaDecoder:
        return self._threads.submit(lambda decoder: self._process(waiting, decoder))

    def _process(self, waiting: _Waiting, decoder: MediaDecoder | None = None) -> Processed:
        request = waiting.request
        return self.prompts.process(request.request_id, waiting.prompt, waiting.tensors, decoder, request.params)

    def _reporter(self, waiting: _Waiting) -> Callable[[Future[Processed]], None]:
        def report(future: Future[Processed]) -> None:  # runs on a thread
            self._ready.put((waiting, future))
            self._wake()

        return report

    def _events(self, waiting: _Waiting, result: Callable[[], Processed]) -> list[EngineEvent]:
        """What a prompt became: its output, or the error that `result` raises."""
        request_id = waiting.request.request_id
        try:
            token_ids, tensors = result()
        except OmniError as error:
            return [ErrorEvent(request_id, error)]
        except (ValueError, VLLMClientError, jinja2.TemplateError) as error:
            # That is how the processors of vLLM and transformers report what they cannot take.
            logger.info("request %s refused by the processor: %s", request_id, trace_of(error))
            return [ErrorEvent(request_id, InvalidRequest(f"The prompt cannot be processed: {error}"))]
        except Exception as error:  # noqa: BLE001 - reported as this request's error
            logger.error("request %s failed in the processor: %s", request_id, trace_of(error))
            failure = EngineError(f"The prompt's processing failed: {type(error).__name__}: {error}")
            return [ErrorEvent(request_id, failure)]
        tools = waiting.prompt.tools
        lists = {TOOLS: tools.packed()} if tools is not None else {}
        return [
            StreamEvent(request_id, token_ids=token_ids, tensors=tensors, start=0, final=True, lists=lists),
            FinishedEvent(request_id, FinishReason.STOP, 0, max(len(token_ids), waiting.prompt.length)),
        ]


def _processor(arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> TextPromptProcessor:
    """The processor that the model names, or one for an omni model or a text model."""
    spec = arguments.model_spec()
    if spec.prompts:
        processor_class: type[TextPromptProcessor] = resolve_obj_by_qualname(spec.prompts)
        return processor_class.of(arguments, config, limits)
    if spec.media is None:
        return TextPromptProcessor.of(arguments, config, limits)
    return PromptProcessor(arguments, config, limits, spec.media)
