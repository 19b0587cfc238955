"""The engine of a prompt stage: messages and media become the inputs of a model.

Images and audio take tens of milliseconds to seconds to prepare; in the thinker's loop they would stall the next token
of every other request. The output is that of vLLM's own front end, byte for byte, so the thinker treats it like any
vLLM request. Here, too, media must not stall others: prompts with media are processed on threads, whose decoders are
processes of their own (`media/decoders.py`), while texts are processed in the stage's loop.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import jinja2
import numpy as np
from msgspec import Struct
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.utils.import_utils import resolve_obj_by_qualname

from omni_actors.config.checks import check_parameters
from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.prompt_processors import Processed, PromptProcessor, TextPromptProcessor
from omni_actors.errors import Aborted, EngineError, InvalidRequest, OmniError
from omni_actors.logs import trace_of
from omni_actors.media.decoders import THREADS, DecoderThreads, MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import DType, HostTensor, TensorRef
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import (
    LANGUAGE,
    TOOLS,
    ChatMessage,
    ContentPart,
    Media,
    MediaEncoding,
    Prompt,
    StageParams,
)
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
SPOKEN_RATE = 24_000  # of the sound of realtime sessions, in Hz


class _Waiting(Struct, eq=False):
    request: StageRequest
    prompt: Prompt
    tensors: Sequence[HostTensor]  # of its media, and then the embeddings that it has instead of tokens
    decoder: MediaDecoder | None = None  # of media that are being processed


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
        self._held: dict[str, _Waiting] = {}  # by request, in order of arrival
        self._threads = DecoderThreads()
        self._free = THREADS  # those that have neither work nor a result that no step has taken
        self._ready: queue.SimpleQueue[tuple[_Waiting, Future[Processed]]] = queue.SimpleQueue()
        self._scheduled: list[tuple[str, float]] = []

    @property
    def facts(self) -> EngineFacts:
        """The longest prompt that leaves room for an answer, in tokens, and how many media it may have."""
        return EngineFacts(
            max_input_tokens=self.prompts.max_tokens,
            embeds_width=self.prompts.embeds_width,
            wants_information=(LANGUAGE,) if self.prompts.hearing is not None else (),
            max_media=self.prompts.max_media,
            parameters=self.prompts.parameters,
            hearing=self.prompts.hearing,
        )

    def warm_up(self) -> None:
        """Begin to start the decoders and to use them, for sounds: that takes a second or two, the first time."""
        if not self.prompts.max_media.get("audio"):
            return
        second = np.zeros(SPOKEN_RATE, np.float32)
        tensor = HostTensor(DType.F32, second.shape, second.tobytes())
        sound = Media("audio", MediaEncoding.ARRAY, TensorRef(DType.F32, second.shape, 0), sample_rate=SPOKEN_RATE)
        prompt = Prompt(messages=(ChatMessage("user", (ContentPart(media=0),)),), media=(sound,))
        for _ in range(THREADS):
            decoder = self._submit(_Waiting(StageRequest("_warm_up", StageParams(), 0), prompt, [tensor]))
            decoder.future.add_done_callback(_log_failure)

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
        if request.request_id in self._held:
            raise InvalidRequest(f"Request {request.request_id!r} is already running.")
        check_parameters("prompt", self.prompts.parameters, request.params)
        self._held[request.request_id] = _Waiting(request, prompt, self.prompts.check(prompt, inputs))
        self._fill_threads()

    def abort(self, request_id: str) -> None:
        """Forget a prompt, and end what decodes its media. Unknown ids are ignored."""
        waiting = self._held.pop(request_id, None)
        if waiting is not None and waiting.decoder is not None:
            waiting.decoder.cancel()

    def runnable(self) -> bool:
        """Whether a text waits, or a prompt with media is ready."""
        return not self._ready.empty() or any(not waiting.prompt.media for waiting in self._held.values())

    def busy(self) -> bool:
        """Whether threads work on prompts with media."""
        return self._free < THREADS

    def step(self) -> Sequence[EngineEvent]:
        """Return a prompt that is ready, or else process the most urgent text; with neither, wait for media."""
        texts = [waiting for waiting in self._held.values() if not waiting.prompt.media] if self._ready.empty() else []
        if texts:
            waiting = self._most_urgent(texts)
            self._scheduled.append((waiting.request.request_id, time.monotonic()))
            result: Callable[[], Processed] = functools.partial(self._process, waiting)
        else:
            try:
                waiting, future = self._ready.get(timeout=WAIT_SECONDS if self.busy() else 0.0)
            except queue.Empty:
                return []
            self._free += 1
            self._fill_threads()
            if self._held.get(waiting.request.request_id) is not waiting:  # it was aborted
                return []
            result = future.result
        del self._held[waiting.request.request_id]
        return self._events(waiting, result)

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """Prompts whose processing started since the last call, and when."""
        taken, self._scheduled = self._scheduled, []
        return taken

    def counts(self) -> dict[str, int]:
        """Prompts that wait or are processed."""
        return {"requests": len(self._held)}

    def shutdown(self) -> None:
        """Forget all prompts; end decoders and threads."""
        self._held.clear()
        self._threads.close()
        self.prompts.shutdown()

    # -- processing

    def _most_urgent(self, waiting: Iterable[_Waiting]) -> _Waiting:
        """The one to process next, the oldest of several."""
        # A search through all is cheap compared to the processing, and needs no second index that aborts must update.
        return min(waiting, key=lambda entry: entry.request.priority if self.prompts.by_priority else 0)

    def _fill_threads(self) -> None:
        """Give the most urgent prompts with media to the threads that are free."""
        waiting = [one for one in self._held.values() if one.prompt.media and one.decoder is None] if self._free else []
        while self._free and waiting:
            first = self._most_urgent(waiting)
            waiting.remove(first)
            self._scheduled.append((first.request.request_id, time.monotonic()))
            self._free -= 1
            first.decoder = self._submit(first)
            first.decoder.future.add_done_callback(functools.partial(self._report, first))

    def _submit(self, waiting: _Waiting) -> MediaDecoder:
        return self._threads.submit(lambda decoder: self._process(waiting, decoder))

    def _process(self, waiting: _Waiting, decoder: MediaDecoder | None = None) -> Processed:
        return self.prompts.process(waiting.request, waiting.prompt, waiting.tensors, decoder)

    def _report(self, waiting: _Waiting, future: Future[Processed]) -> None:
        """Runs on a thread."""
        self._ready.put((waiting, future))
        self.wake()

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


def _log_failure(warm_up: Future[Processed]) -> None:
    if not warm_up.cancelled() and (error := warm_up.exception()) is not None and not isinstance(error, Aborted):
        logger.warning("A decoder was not warmed up, the first medium waits for it: %s", trace_of(error))


def _processor(arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> TextPromptProcessor:
    """The processor that the model names, or one for an omni model or a text model."""
    spec = arguments.model_spec()
    if spec.prompts:
        make: Callable[..., TextPromptProcessor] = resolve_obj_by_qualname(spec.prompts)
        return make(arguments, config, limits)
    if spec.media is None:
        return TextPromptProcessor.of(arguments, config, limits)
    return PromptProcessor(arguments, config, limits, spec.media)
