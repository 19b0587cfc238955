"""What a prompt becomes: the chat template, token ids, and the features of its media.

The output is that of vLLM's own front end, byte for byte, so the thinker treats it like any vLLM request.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import torch
from msgspec import Struct
from PIL import Image
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import in_pieces, request_tensors
from omni_actors.engine.models import PromptMedia
from omni_actors.engine.rows import check_rows, embeds_width
from omni_actors.errors import ConfigError, EngineError, InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    AUDIO_RATE,
    DEFAULT_VIDEO_RATE,
    IMAGE_FILE,
    Item,
    MediaLimits,
    check_counts,
    check_finite,
    check_media,
)
from omni_actors.protocol.fields import DType, HostTensor, unpack_token_ids
from omni_actors.protocol.payloads import (
    MEDIA_MODALITIES,
    PROMPT_EMBEDS,
    TOOLS,
    USE_AUDIO_IN_VIDEO,
    ChatMessage,
    HearingAbility,
    Media,
    MediaEncoding,
    Parameter,
    Prompt,
    ToolCall,
    function_of,
)
from omni_actors.sharing import Budget
from omni_actors.stage.engine_interface import StageInputs, StageRequest

Processed = tuple[list[int], dict[str, HostTensor]]  # token ids, and embeddings or features
TOOLS_WORD = re.compile(r"\btools\b")


class ChatTemplate:
    """Renders prompts.

    Args:
        processor: transformers' processor of the model, with its own template.
        parser: vLLM's name of the parser for tool calls; without one, no tools are taken.
        tool_template: file with the template of prompts with tools; `None` for the model's own.
        text_only: the model takes no media, so its template may expect contents as texts instead of lists of parts.

    Raises:
        ConfigError: there is no template, the file cannot be read, or no template has a place for tools.
    """

    def __init__(
        self, processor: Any, parser: str | None, tool_template: str | None, *, text_only: bool = False
    ) -> None:
        if not processor.chat_template:
            raise ConfigError(
                "The model's tokenizer has no chat template.", hint="Use the checkpoint that was trained to chat."
            )
        self._text_only = text_only
        self._processor = processor
        self._parser = parser
        try:
            self._tool_template = Path(tool_template).read_text(encoding="utf-8") if tool_template is not None else None
        except (OSError, ValueError) as error:
            raise ConfigError(f"tool_chat_template: cannot read {tool_template}: {error}.") from error
        if parser is not None and not TOOLS_WORD.search(self._tool_template or str(processor.chat_template)):
            whose = "tool_chat_template" if tool_template is not None else "The model's chat template"
            raise ConfigError(
                f"{whose} has no place for tools, although tool_call_parser is set.",
                hint="Name a file with one that has, as tool_chat_template; stage_configs/ has one for Qwen2.5-Omni.",
            )

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, with one placeholder per medium. Raises `InvalidRequest` for tools that do not fit."""
        messages = [self._message(message, prompt) for message in prompt.messages]
        options: dict[str, Any] = {}
        if prompt.uses_tools:
            if self._parser is None:
                raise InvalidRequest(
                    "tools: this pipeline calls none, as it has no tool_call_parser.",
                    hint="Its operator can set one (--tool-call-parser hermes, for models of the Qwen family).",
                    field=TOOLS,
                )
            definitions = prompt.tools.definitions if prompt.tools is not None else ()
            tools = [{"type": "function", "function": function_of(definition)} for definition in definitions]
            options = {"chat_template": self._tool_template, "tools": tools or None}
        text: str = self._processor.apply_chat_template(messages, **options, tokenize=False, add_generation_prompt=True)
        return text

    def _message(self, message: ChatMessage, prompt: Prompt) -> dict[str, Any]:
        content: Any = [
            {"type": "text", "text": part.text or ""}
            if part.media is None
            else {"type": prompt.media[part.media].modality}
            for part in message.content
        ]
        if self._text_only:
            content = "\n".join(part["text"] for part in content)
        converted: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            converted["tool_calls"] = [_call(call) for call in message.tool_calls]
        if message.tool_call_id:
            converted["tool_call_id"] = message.tool_call_id
        return converted


def _call(call: ToolCall) -> dict[str, Any]:
    """A call as templates expect it: with its arguments as an object, not as JSON."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"messages: the arguments of the tool call {call.name[:64]!r} are not the JSON of an object: {error}.",
            field="messages",
        ) from error
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class TextPromptProcessor:
    """Turns a prompt into token ids.

    Attributes:
        parameters: what requests may set for the stage; None for the parameters of its kind.
        hearing: what it can do if its model writes down what it hears.

    Args:
        config: of the stage that takes the result.
        write: writes the text of a prompt, with one placeholder per medium. Raises `InvalidRequest` for what has no
            place there.
        limits: for media.
        max_media: how many media a prompt may have, by modality.
    """

    parameters: tuple[Parameter, ...] | None = None
    hearing: HearingAbility | None = None

    def __init__(
        self,
        config: VllmConfig,
        tokenizer: Any,
        write: Callable[[Prompt], str],
        limits: MediaLimits,
        max_media: Mapping[str, int],
    ) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._vocabulary: int = config.model_config.get_vocab_size()
        self.embeds_width = embeds_width(config.model_config)
        self.max_tokens: int = config.model_config.max_model_len - 1  # leaves room for one token of reply
        self.limits = limits
        self.max_media = dict(max_media)
        self.by_priority = config.scheduler_config.policy == "priority"

    @classmethod
    def of(cls, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> TextPromptProcessor:
        """The processor of a model that takes text only. Raises `ConfigError` if its tokenizer has no chat template."""
        model = arguments.model_config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        template = ChatTemplate(tokenizer, model.tool_call_parser, model.tool_chat_template, text_only=True)
        return cls(config, tokenizer, template.render, limits, dict.fromkeys(MEDIA_MODALITIES, 0))

    def shutdown(self) -> None:
        """End what it has started: nothing."""

    # -- checks

    def check(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """Check a prompt with its media before anything is decoded; return its tensors, as `process` takes them.

        Raises:
            OmniError: something is wrong with it.
        """
        if len(inputs.media) != len(prompt.media):
            raise InvalidPayload(f"The prompt names {len(prompt.media)} media, but has {len(inputs.media)} tensors.")
        budget = Budget(self.limits.decoded_bytes)
        for index, (media, tensor) in enumerate(zip(prompt.media, inputs.media, strict=True)):
            check_media(media, tensor, self.limits, budget, index)
        check_counts((media.modality for media in prompt.media), self.max_media)
        self._check_prompt(prompt)
        return [*inputs.media, *self._embeds(prompt, inputs)]

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
            raise InvalidRequest("The prompt is empty.", hint="Send some text, audio, image or video.", field="prompt")
        named = {part.media for part in parts} | prompt.sounds
        if unused := [index for index in range(len(prompt.media)) if index not in named]:
            raise InvalidRequest(f"No message refers to media {unused}.")

    def _embeds(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """The embeddings of a prompt, if it came as such. The thinker checks their values."""
        if prompt.embeds is None:
            return []
        if PROMPT_EMBEDS not in inputs.tensors or not self.embeds_width:
            raise InvalidRequest(f"{PROMPT_EMBEDS}: this stage takes none.", hint="Set engine.enable_prompt_embeds.")
        embeds = inputs.tensors[PROMPT_EMBEDS]
        check_rows(embeds, self.embeds_width, PROMPT_EMBEDS, minimum=1)
        return [embeds]

    def _check_length(self, n_tokens: int) -> None:
        if n_tokens > self.max_tokens:
            raise PromptTooLong(f"The prompt has {n_tokens} tokens; at most {self.max_tokens} fit.")

    # -- processing

    def process(
        self, request: StageRequest, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None = None
    ) -> Processed:
        """Return the token ids of a checked prompt, and its embeddings if it came as such.

        Args:
            decoder: for prompts with media.

        Raises:
            OmniError: the request is at fault.
            ValueError, VLLMClientError, jinja2.TemplateError: likewise, as vLLM and transformers report it.
        """
        if prompt.embeds is not None:  # nothing to process: there are neither texts nor media
            return unpack_token_ids(prompt.token_ids), {PROMPT_EMBEDS: tensors[0]}
        return self._tokenize(prompt), {}

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids:
            token_ids = unpack_token_ids(prompt.token_ids)
        else:  # the template has written the special tokens
            token_ids = self._tokenizer(self._write(prompt), add_special_tokens=False)["input_ids"]
        self._check_length(len(token_ids))
        return token_ids


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


class DecodedMedia(Struct, frozen=True):
    """Input of the model: audio f32 [samples] at 16 kHz, a PIL RGB image, or video u8 [frames, height, width, 3]."""

    modality: str
    data: Any
    frames_per_second: float = DEFAULT_VIDEO_RATE


class PromptProcessor(TextPromptProcessor):
    """Turns a prompt of an omni model into token ids and encoded features.

    Prompts with media may be processed on several threads: their media are decoded at the same time, and the rest one
    after the other, because vLLM's objects are not made for more. A text needs none of these and never waits for them.

    Args:
        arguments: of kind "prompt"; the vLLM fields are those of the thinker that takes the result.
        config: made from them.
        limits: for media; the length of audio is lowered to the limit of the model's feature extractor.
        media: what the model says of its media.

    Attributes:
        text_only: see `ChatTemplate`.

    Raises:
        ConfigError: the model has no processor for media.
    """

    text_only: ClassVar[bool] = False

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits, media: PromptMedia) -> None:
        self._input_processor = InputProcessor(config)
        self.renderer = self._input_processor.renderer
        if not config.model_config.supports_multimodal_inputs:
            raise ConfigError(f"{config.model_config.model!r} takes text only.", hint="Use an Omni checkpoint.")
        self._info = self.renderer.get_mm_processor().info
        self.processor = self._info.get_hf_processor()
        model = arguments.model_config
        self._chat = ChatTemplate(
            self.processor, model.tool_call_parser, model.tool_chat_template, text_only=self.text_only
        )
        limits = dataclasses.replace(limits, audio_seconds=self._longest_sound(limits, config))
        allowed = self._info.allowed_mm_limits
        most = {modality: allowed.get(modality, 0) for modality in MEDIA_MODALITIES}
        super().__init__(config, self.processor.tokenizer, self.render, limits, most)
        self.placeholders: dict[str, int] = {
            modality: self._tokenizer.convert_tokens_to_ids(getattr(self.processor, f"{modality}_token"))
            for modality in allowed
        }
        rate = media.positions_per_second
        self._positions_per_second = rate(config.model_config.hf_config) if rate is not None else 0
        self._min_audio_samples = media.min_audio_samples
        self._audio_window = media.audio_window(config.model_config.hf_config)
        self._audio_embeddings = media.audio_embeddings
        self._longest_audio: int = self.processor.feature_extractor.n_samples
        self._one_at_a_time = threading.Lock()

    def _longest_sound(self, limits: MediaLimits, config: VllmConfig) -> float:
        """The longest sound in seconds: what the model's feature extractor takes, within the limits."""
        return min(limits.audio_seconds, float(self.processor.feature_extractor.chunk_length))

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, by the chat template. Raises `InvalidRequest` for what has no place there."""
        return self._chat.render(prompt)

    def shutdown(self) -> None:
        """End the renderer's threads."""
        self.renderer.shutdown()

    # -- media

    def _check_prompt(self, prompt: Prompt) -> None:
        super()._check_prompt(prompt)
        rates = {item.frames_per_second or DEFAULT_VIDEO_RATE for item in prompt.media if item.sound is not None}
        if len(rates) > 1:  # the processor takes one rate, by which it lays the sound between the pictures
            raise InvalidRequest(
                f"The videos with sound have {len(rates)} rates, {sorted(rates)} frames per second; they need one.",
                hint="Send all videos at one rate, or one of them.",
                field=USE_AUDIO_IN_VIDEO,
            )

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

    def process(
        self, request: StageRequest, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None = None
    ) -> Processed:
        """Return the token ids of a checked prompt, and its media or embeddings as tensors.

        Args:
            decoder: for prompts with media.
        """
        if not prompt.media or decoder is None:
            return super().process(request, prompt, tensors)
        decoded = self._decode(prompt.media, tensors, decoder)
        with self._one_at_a_time:
            return self._with_media(request.request_id, prompt, decoded)

    def _decode(self, media: Sequence[Media], tensors: Sequence[HostTensor], by: MediaDecoder) -> list[DecodedMedia]:
        """Decode media, files and other sample rates in the decoder's process; nothing shares memory with `tensors`."""
        names = [f"media {index} ({medium.modality})" for index, medium in enumerate(media)]
        given = list(zip(media, tensors, names, strict=True))
        items = [_item(*one) for one in given]
        sent = [(item, tensor.data) for item, tensor in zip(items, tensors, strict=True) if item is not None]
        used = sum(
            memoryview(tensor.data).nbytes for medium, tensor, _ in given if medium.encoding is MediaEncoding.ARRAY
        )
        arrays = iter(by.decode(sent, self.limits, used) if sent else ())
        decoded = []
        for item, (medium, tensor, name) in zip(items, given, strict=True):
            decoded.append(_media_of(medium, _array(tensor) if item is None else next(arrays), name))
            if medium.modality == "audio" and len(decoded[-1].data) < self._min_audio_samples:
                raise InvalidRequest(f"{name} is shorter than {self._min_audio_samples} samples at 16 kHz.")
        return decoded

    def _tokenize(self, prompt: Prompt, media: Sequence[DecodedMedia] = ()) -> list[int]:
        """The token ids of a prompt, with one placeholder for each of its media."""
        token_ids = super()._tokenize(prompt)
        self._check_placeholders(token_ids, media)
        return token_ids

    def _with_media(self, request_id: str, prompt: Prompt, media: Sequence[DecodedMedia]) -> Processed:
        if prompt.token_ids:
            shown = [index for index in range(len(media)) if index not in prompt.sounds]
        else:  # in the order in which the messages refer to them, which is the order of the placeholders
            shown = [part.media for message in prompt.messages for part in message.content if part.media is not None]
        sounds = [prompt.media[index].sound for index in shown]
        pairs = [
            (media[index], None if sound is None else media[sound]) for index, sound in zip(shown, sounds, strict=True)
        ]
        media = [media[index] for index in shown]
        token_ids = self._tokenize(prompt, media)
        self._check_length(len(token_ids) + sum(self._tokens_of(item) - 1 for item in media))
        data, options = self._data(pairs)
        given: Any = {"prompt_token_ids": token_ids, "multi_modal_data": data}
        if options is not None:
            given["mm_processor_kwargs"] = options
        # The cache that this leaves out would leave out features which the next stage has had before.
        (engine_input,) = self.renderer.render_cmpl([given], skip_mm_cache=True)
        self._check_length(len(engine_input["prompt_token_ids"]))
        request = self._input_processor.process_inputs(
            request_id, engine_input, SamplingParams(), supported_tasks=("generate",)
        )
        if self._positions_per_second and (videos := [item for item in media if item.modality == "video"]):
            self._set_video_rates(request, videos)
        request.mm_features = in_pieces(request.mm_features or (), self._audio_window, self._audio_embeddings)
        return list(request.prompt_token_ids or ()), request_tensors(request)

    def _data(
        self, shown: Sequence[tuple[DecodedMedia, DecodedMedia | None]]
    ) -> tuple[dict[str, list[Any]], dict[str, Any] | None]:
        """What the model's processor gets of media and the sounds of videos, and its options."""
        data: dict[str, list[Any]] = {}
        sounds = [sound for _, sound in shown if sound is not None]
        for item in (*(item for item, _ in shown), *sounds):
            data.setdefault(item.modality, []).append(item.data)
        self._set_padding(data.get("audio", ()))
        if not sounds:
            return data, None
        rate = next(item.frames_per_second for item, _ in shown if item.modality == "video")
        seconds = self.processor.video_processor.temporal_patch_size / rate
        # vLLM lays sound between pictures by its own argument, and by a second for each pair without it.
        return data, {USE_AUDIO_IN_VIDEO: True, "fps": rate, "second_per_grid_ts": [seconds] * len(sounds)}

    def _tokens_of(self, item: DecodedMedia) -> int:
        """How many tokens an image or a video becomes: known from its size, before the costly processing.

        Audio counts as one token: its length is bounded, and the lengths are checked again afterwards.
        """
        if item.modality == "audio":
            return 1
        if item.modality == "image":
            width, height = item.data.size
            return int(
                self._info.get_num_image_tokens(
                    image_width=width, image_height=height, image_processor=self.processor.image_processor, mm_kwargs={}
                )
            )
        frames, height, width, _ = item.data.shape
        return int(
            self._info.get_num_video_tokens(
                image_width=width,
                image_height=height,
                num_frames=frames,
                image_processor=self.processor.video_processor,
                mm_kwargs={},
            )
        )

    def _set_padding(self, sounds: Sequence[np.ndarray[Any, Any]]) -> None:
        """Have sounds padded with the silence that their last frames see, and no more.

        The extractor pads every sound to the longest that it takes, 300 s of the published model, and computes features
        of it all; the padding is cut off afterwards.
        """
        extractor = self.processor.feature_extractor
        frames = -(-(max(map(len, sounds), default=0) + extractor.n_fft) // extractor.hop_length)
        extractor.n_samples = min(frames * extractor.hop_length, self._longest_audio)

    def _set_video_rates(self, request: EngineCoreRequest, videos: Sequence[DecodedMedia]) -> None:
        """Set the seconds per temporal patch of each video, from which the model computes its positions.

        The processor takes one frame rate for all videos of a prompt, and vLLM casts the result to the model's dtype:
        in bfloat16 a video with 30 frames per second is off by a position after four seconds.
        """
        frames = self.processor.video_processor.temporal_patch_size
        features = [feature for feature in request.mm_features or () if feature.modality == "video"]
        for feature, video in zip(features, videos, strict=True):
            if feature.data is None:
                raise EngineError("vLLM left out the features of a video.")
            feature.data = item = feature.data.copy()  # other prompts have the same video at another rate
            patches = int(cast("torch.Tensor", item["video_grid_thw"].data)[0])
            seconds = seconds_per_patch(frames / video.frames_per_second, patches, self._positions_per_second)
            field = item["second_per_grid_ts"]
            data = torch.tensor(seconds, dtype=torch.float64)
            item["second_per_grid_ts"] = dataclasses.replace(field, data=data)


def _item(media: Media, tensor: HostTensor, name: str) -> Item | None:
    """What a decoder has to do for a medium; `None` for arrays that the model's processor takes as they are."""
    size = memoryview(tensor.data).nbytes
    if media.encoding is MediaEncoding.FILE:
        return Item(AUDIO_FILE if media.modality == "audio" else IMAGE_FILE, name, size)
    if media.modality == "audio" and media.sample_rate != AUDIO_RATE:
        return Item(AUDIO_ARRAY, name, size, media.sample_rate or AUDIO_RATE)
    return None


def _array(tensor: HostTensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor, because its bytes may be a socket frame that is soon reused."""
    dtype = np.float32 if tensor.dtype is DType.F32 else np.uint8
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape).copy()


def _media_of(media: Media, array: np.ndarray[Any, Any], name: str) -> DecodedMedia:
    if media.modality == "audio":
        check_finite(bool(np.isfinite(array).all()), name)
        return DecodedMedia("audio", array)
    if media.modality == "image":
        # An image, not an array: with an array the processor would guess which axis holds the channels.
        return DecodedMedia("image", Image.fromarray(array, "RGB"))
    return DecodedMedia("video", array, media.frames_per_second or DEFAULT_VIDEO_RATE)
