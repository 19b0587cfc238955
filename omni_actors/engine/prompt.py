"""The prompt stage: chat template, tokenizer and the model's processor, in a separate process.

Images and audio take tens of milliseconds to seconds to prepare; in the thinker's loop they would stall the next token
of every other request. The output is that of vLLM's own front end, byte for byte, so the thinker treats it like any
vLLM request.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import torch
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.media import DecodedMedia, MediaLimits, check_media, decode_media
from omni_actors.engine.tensors import FRAME_PREFIX, check_rows, embeds_width
from omni_actors.errors import ConfigError, EngineError, InvalidPayload, InvalidRequest, OmniError, PromptTooLong
from omni_actors.logs import trace_of
from omni_actors.protocol.fields import unpack_token_ids
from omni_actors.protocol.payloads import MEDIA_MODALITIES, PROMPT_EMBEDS, Prompt
from omni_actors.protocol.results import FinishReason
from omni_actors.protocol.tensors import DType, HostTensor
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

MAX_FRAMES = 256  # tensors in one message
# With fewer samples at 16 kHz the audio encoder has no frame to encode (one window every 160 samples, then two
# convolutions with stride 2).
MIN_AUDIO_SAMPLES = 321


def seconds_per_patch(seconds: float, patches: int, positions_per_second: int) -> float:
    """The `seconds` per patch with which vLLM's time positions of a video come closest to those of transformers.

    Both floor `patch * seconds * positions_per_second`, vLLM in double precision, transformers in single. If the
    product is a whole number, as for 25 frames per second, the last bit of `seconds` decides.
    """
    index = torch.arange(patches)
    wanted = (index.float() * torch.tensor(seconds, dtype=torch.float32) * positions_per_second).long()

    def misses(candidate: float) -> int:
        return int(((index.double() * (candidate * positions_per_second)).long() != wanted).sum())

    return min(torch.tensor(seconds, dtype=torch.float32).item(), seconds, key=misses)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    request: StageRequest
    prompt: Prompt
    tensors: Sequence[HostTensor]  # of its media, and then the embeddings that it has instead of tokens


class PromptEngine(StageEngine):
    """Turns prompts into token ids and encoded features, one request per step, by priority and arrival.

    With `scheduling_policy: fcfs`, its own or that of the stage after it, priority does not count.

    Args:
        arguments: of kind "prompt"; the vLLM fields are those of the thinker that takes the result.
        limits: for media; the length of audio is lowered to the limit of the model's feature extractor.

    Raises:
        ConfigError: the model has no processor for audio, images and video.
    """

    def __init__(self, arguments: OmniEngineArgs, limits: MediaLimits | None = None) -> None:
        config = arguments.create_engine_config()
        self._input_processor = InputProcessor(config)
        self.renderer = self._input_processor.renderer
        if not config.model_config.supports_multimodal_inputs:
            raise ConfigError(f"{config.model_config.model!r} takes text only.", hint="Use an Omni checkpoint.")
        self.processor = self.renderer.get_mm_processor().info.get_hf_processor()
        self._tokenizer = self.processor.tokenizer
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._embeds_width = embeds_width(config.model_config)
        self._max_tokens: int = config.model_config.max_model_len - 1  # leaves room for one token of reply
        self.placeholders: dict[str, int] = {
            modality: self._tokenizer.convert_tokens_to_ids(getattr(self.processor, f"{modality}_token"))
            for modality in MEDIA_MODALITIES
        }
        vision = config.model_config.hf_config.thinker_config.vision_config
        self._positions_per_second: int = getattr(vision, "tokens_per_second", 25)
        limits = limits or MediaLimits()
        seconds = min(limits.audio_seconds, float(self.processor.feature_extractor.chunk_length))
        self._limits = dataclasses.replace(limits, audio_seconds=seconds)
        self._encoder = MsgpackEncoder()
        self._by_priority = config.scheduler_config.policy == "priority"
        self._waiting: dict[str, _Waiting] = {}  # by request, in order of arrival
        self._scheduled: list[tuple[str, float]] = []

    @property
    def facts(self) -> EngineFacts:
        """The longest prompt that leaves room for an answer, in tokens."""
        return EngineFacts(max_input_tokens=self._max_tokens, embeds_width=self._embeds_width)

    @property
    def limits(self) -> MediaLimits:
        """The limits in force."""
        return self._limits

    # -- StageEngine

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        """Check a prompt with its media and queue it. Raises `OmniError`, before anything is decoded."""
        prompt = inputs.prompt
        if prompt is None:
            raise InvalidRequest("The prompt stage needs a prompt.")
        if request.request_id in self._waiting:
            raise InvalidRequest(f"Request {request.request_id!r} is already running.")
        if len(inputs.media) != len(prompt.media):
            raise InvalidPayload(f"The prompt names {len(prompt.media)} media, but has {len(inputs.media)} tensors.")
        for index, (media, tensor) in enumerate(zip(prompt.media, inputs.media, strict=True)):
            check_media(media, tensor, self._limits, index)
        self._check_prompt(prompt)
        tensors = [*inputs.media, *self._embeds(prompt, inputs)]
        self._waiting[request.request_id] = _Waiting(request, prompt, tensors)

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        """Ignore a late, empty end of the input; refuse any other input, since a prompt comes as a whole."""
        if rows is not None or not complete:
            raise InvalidRequest(f"Request {request_id!r} got more input; a prompt comes as a whole.")

    def abort(self, request_id: str) -> None:
        """Forget a prompt. Unknown ids are ignored."""
        self._waiting.pop(request_id, None)

    def runnable(self) -> bool:
        """Whether a prompt waits."""
        return bool(self._waiting)

    def step(self) -> Sequence[EngineEvent]:
        """Process the most urgent request, the oldest of several."""
        if not self._waiting:
            return []
        # A search through all is cheap compared to the processing, and needs no second index that aborts must update.
        first = min(self._waiting.values(), key=lambda waiting: waiting.request.priority if self._by_priority else 0)
        request = first.request
        del self._waiting[request.request_id]
        self._scheduled = [(request.request_id, time.monotonic())]
        try:
            token_ids, tensors = self._process(request.request_id, first.prompt, first.tensors)
        except OmniError as error:
            return [ErrorEvent(request.request_id, error)]
        except (ValueError, VLLMClientError, jinja2.TemplateError) as error:
            # That is how the processors of vLLM and transformers report what they cannot take.
            logger.info("request %s refused by the processor: %s", request.request_id, trace_of(error))
            return [ErrorEvent(request.request_id, InvalidRequest(f"The prompt cannot be processed: {error}"))]
        except Exception as error:  # noqa: BLE001 - reported as this request's error
            logger.error("request %s failed in the processor: %s", request.request_id, trace_of(error))
            failure = EngineError(f"The prompt's processing failed: {type(error).__name__}: {error}")
            return [ErrorEvent(request.request_id, failure)]
        return [
            StreamEvent(request.request_id, token_ids=token_ids, tensors=tensors, start=0, final=True),
            FinishedEvent(request.request_id, FinishReason.STOP, 0, max(len(token_ids), first.prompt.length)),
        ]

    def take_scheduled(self) -> Sequence[tuple[str, float]]:
        """The prompt that the last step took, and when."""
        taken, self._scheduled = self._scheduled, []
        return taken

    def counts(self) -> dict[str, int]:
        """Prompts that wait."""
        return {"requests": len(self._waiting)}

    def shutdown(self) -> None:
        """Forget all prompts and end the renderer's threads."""
        self._waiting.clear()
        self.renderer.shutdown()

    # -- checks

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.token_ids:
            token_ids = unpack_token_ids(prompt.token_ids)
            if wrong := [token for token in token_ids if not 0 <= token < self._vocabulary]:
                raise InvalidPayload(f"Token id {wrong[0]} is outside the vocabulary 0..{self._vocabulary - 1}.")
        if prompt.length:
            self._check_length(prompt.length)
            return
        parts = [part for message in prompt.messages for part in message.content]
        if not any(part.media is not None or (part.text and part.text.strip()) for part in parts):
            raise InvalidRequest("The prompt is empty.", hint="Send some text, audio, image or video.")
        named = {part.media for part in parts}
        if unused := [index for index in range(len(prompt.media)) if index not in named]:
            raise InvalidRequest(f"No message refers to media {unused}.")

    def _embeds(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """The embeddings of a prompt, if it came as such. The thinker checks their values."""
        if prompt.embeds is None:
            return []
        if PROMPT_EMBEDS not in inputs.tensors or not self._embeds_width:
            raise InvalidRequest(f"{PROMPT_EMBEDS}: this stage takes none.", hint="Set engine.enable_prompt_embeds.")
        embeds = inputs.tensors[PROMPT_EMBEDS]
        check_rows(embeds, self._embeds_width, PROMPT_EMBEDS, minimum=1)
        return [embeds]

    def _check_length(self, n_tokens: int) -> None:
        if n_tokens > self._max_tokens:
            raise PromptTooLong(f"The prompt has {n_tokens} tokens; at most {self._max_tokens} fit.")

    def _check_placeholders(self, token_ids: Sequence[int], media: Sequence[DecodedMedia]) -> None:
        """Raise `InvalidRequest` unless there is one placeholder per medium.

        A placeholder inside a text would silently take the medium meant for the next one.
        """
        for modality, token_id in self.placeholders.items():
            wanted = sum(item.modality == modality for item in media)
            if (found := token_ids.count(token_id)) != wanted:
                token = getattr(self.processor, f"{modality}_token")
                raise InvalidRequest(
                    f"The prompt contains {token} {found} times, for {wanted} {modality} media.",
                    hint=f"Remove {token} from texts, or send one medium for each.",
                )

    # -- processing

    def _process(
        self, request_id: str, prompt: Prompt, tensors: Sequence[HostTensor]
    ) -> tuple[list[int], dict[str, HostTensor]]:
        if prompt.embeds is not None:  # nothing to process: there are neither texts nor media
            return unpack_token_ids(prompt.token_ids), {PROMPT_EMBEDS: tensors[0]}
        decoded = [
            decode_media(media, tensor, self._limits, index)
            for index, (media, tensor) in enumerate(zip(prompt.media, tensors, strict=True))
        ]
        for index, item in enumerate(decoded):
            if item.modality == "audio" and len(item.data) < MIN_AUDIO_SAMPLES:
                raise InvalidRequest(f"media {index} (audio) is shorter than {MIN_AUDIO_SAMPLES} samples at 16 kHz.")
        if prompt.token_ids:
            token_ids, media = unpack_token_ids(prompt.token_ids), decoded
        else:
            token_ids = self._tokenizer(self._render(prompt))["input_ids"]
            # In the order in which the messages refer to them, which is the order of the placeholders.
            media = [
                decoded[part.media] for message in prompt.messages for part in message.content if part.media is not None
            ]
        self._check_length(len(token_ids))
        self._check_placeholders(token_ids, media)
        if not media:
            return token_ids, {}

        data: dict[str, list[Any]] = {}
        for item in media:
            data.setdefault(item.modality, []).append(item.data)
        (engine_input,) = self.renderer.render_cmpl([{"prompt_token_ids": token_ids, "multi_modal_data": data}])
        self._check_length(len(engine_input["prompt_token_ids"]))
        request = self._input_processor.process_inputs(
            request_id, engine_input, SamplingParams(), supported_tasks=("generate",)
        )
        self._set_video_rates(request, [item for item in media if item.modality == "video"])
        return list(request.prompt_token_ids or ()), self._encode(request)

    def _render(self, prompt: Prompt) -> str:
        """The prompt as text, with one placeholder per medium."""
        messages: list[dict[str, Any]] = []
        for message in prompt.messages:
            content: list[Mapping[str, str]] = []
            for part in message.content:
                if part.media is None:
                    content.append({"type": "text", "text": part.text or ""})
                else:
                    content.append({"type": prompt.media[part.media].modality})
            messages.append({"role": message.role, "content": content})
        text: str = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _set_video_rates(self, request: EngineCoreRequest, videos: Sequence[DecodedMedia]) -> None:
        """Set the seconds per temporal patch of each video, from which the model computes its positions.

        The processor takes one frame rate for all videos of a prompt, and vLLM casts the result to the model's dtype:
        in bfloat16 a video with 30 frames per second is off by a position after four seconds.
        """
        frames = self.processor.video_processor.temporal_patch_size
        features = [feature for feature in request.mm_features or () if feature.modality == "video"]
        for feature, video in zip(features, videos, strict=True):
            item = feature.data
            if item is None:  # vLLM leaves out what its cache holds, which is off (`arguments.py`)
                raise EngineError("vLLM left out the features of a video.")
            patches = int(cast("torch.Tensor", item["video_grid_thw"].data)[0])
            seconds = seconds_per_patch(frames / video.frames_per_second, patches, self._positions_per_second)
            field = item["second_per_grid_ts"]
            data = torch.tensor(seconds, dtype=torch.float64)
            item["second_per_grid_ts"] = dataclasses.replace(field, data=data)

    def _encode(self, request: EngineCoreRequest) -> dict[str, HostTensor]:
        """A request in vLLM's own encoding. The tensors share the features' memory, which nothing changes any more."""
        frames = self._encoder.encode(request)
        if len(frames) > MAX_FRAMES:
            raise InvalidRequest(
                f"The media of the prompt make {len(frames)} tensors; at most {MAX_FRAMES} are allowed."
            )
        encoded = {}
        for index, frame in enumerate(frames):
            data = memoryview(cast("bytes | bytearray | memoryview", frame)).cast("B")  # never the frame of a socket
            encoded[f"{FRAME_PREFIX}{index}"] = HostTensor(DType.U8, (data.nbytes,), data)
        return encoded
