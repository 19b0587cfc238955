"""What the prompt stage does with a prompt that has media: the model's processor."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.chat_template import ChatTemplate
from omni_actors.engine.encoded_requests import RequestWriter
from omni_actors.engine.models import PromptMedia
from omni_actors.engine.sound_pieces import in_pieces
from omni_actors.engine.text_prompts import NO_PARAMS, TextPromptProcessor
from omni_actors.errors import ConfigError, EngineError, InvalidRequest
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    AUDIO_RATE,
    DEFAULT_VIDEO_RATE,
    IMAGE_FILE,
    Item,
    MediaLimits,
    check_finite,
)
from omni_actors.protocol.payloads import (
    MEDIA_MODALITIES,
    USE_AUDIO_IN_VIDEO,
    Media,
    MediaEncoding,
    Prompt,
    StageParams,
)
from omni_actors.protocol.tensors import DType, HostTensor


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


@dataclasses.dataclass(frozen=True)
class DecodedMedia:
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

    Raises:
        ConfigError: the model has no processor for audio, images and video.
    """

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits, media: PromptMedia) -> None:
        self._input_processor = InputProcessor(config)
        self.renderer = self._input_processor.renderer
        if not config.model_config.supports_multimodal_inputs:
            raise ConfigError(f"{config.model_config.model!r} takes text only.", hint="Use an Omni checkpoint.")
        self._info = self.renderer.get_mm_processor().info
        self.processor = self._info.get_hf_processor()
        model = arguments.model_config
        template = ChatTemplate(self.processor, model.tool_call_parser, model.tool_chat_template)
        seconds = min(limits.audio_seconds, float(self.processor.feature_extractor.chunk_length))
        limits = dataclasses.replace(limits, audio_seconds=seconds)
        super().__init__(config, self.processor.tokenizer, template, limits, dict(self._info.allowed_mm_limits))
        self.placeholders: dict[str, int] = {
            modality: self._tokenizer.convert_tokens_to_ids(getattr(self.processor, f"{modality}_token"))
            for modality in MEDIA_MODALITIES
        }
        self._positions_per_second = media.positions_per_second(config.model_config.hf_config)
        self._min_audio_samples = media.min_audio_samples
        self._audio_window = media.audio_window(config.model_config.hf_config)
        self._audio_embeddings = media.audio_embeddings
        self._longest_audio: int = self.processor.feature_extractor.n_samples
        self._writer = RequestWriter()
        self._one_at_a_time = threading.Lock()

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
        self,
        request_id: str,
        prompt: Prompt,
        tensors: Sequence[HostTensor],
        decoder: MediaDecoder | None = None,
        params: StageParams = NO_PARAMS,
    ) -> tuple[list[int], dict[str, HostTensor]]:
        """Return the token ids of a checked prompt, and its media or embeddings as tensors.

        Args:
            decoder: for prompts with media.
            params: of the stage; this one has none.
        """
        if not prompt.media or decoder is None:
            return super().process(request_id, prompt, tensors)
        decoded = self._decode(prompt.media, tensors, decoder)
        with self._one_at_a_time:
            return self._with_media(request_id, prompt, decoded)

    def _decode(self, media: Sequence[Media], tensors: Sequence[HostTensor], by: MediaDecoder) -> list[DecodedMedia]:
        """Decode media, files and other sample rates in the decoder's process; nothing shares memory with `tensors`."""
        names = [f"media {index} ({medium.modality})" for index, medium in enumerate(media)]
        given = list(zip(media, tensors, names, strict=True))
        sent = [(item, tensor.data) for medium, tensor, name in given if (item := _item(medium, tensor, name))]
        used = sum(
            memoryview(tensor.data).nbytes for medium, tensor, _ in given if medium.encoding is MediaEncoding.ARRAY
        )
        arrays = iter(by.decode(sent, self.limits, used) if sent else ())
        decoded = [
            _media_of(medium, next(arrays) if _item(medium, tensor, name) else _array(tensor), name)
            for medium, tensor, name in given
        ]
        for result, name in zip(decoded, names, strict=True):
            if result.modality == "audio" and len(result.data) < self._min_audio_samples:
                raise InvalidRequest(f"{name} is shorter than {self._min_audio_samples} samples at 16 kHz.")
        return decoded

    def _tokenize(self, prompt: Prompt, media: Sequence[DecodedMedia] = ()) -> list[int]:
        """The token ids of a prompt, with one placeholder for each of its media."""
        token_ids = super()._tokenize(prompt)
        self._check_placeholders(token_ids, media)
        return token_ids

    def _with_media(
        self, request_id: str, prompt: Prompt, media: Sequence[DecodedMedia]
    ) -> tuple[list[int], dict[str, HostTensor]]:
        if prompt.token_ids:
            shown = [index for index in range(len(media)) if index not in prompt.sounds]
        else:  # in the order in which the messages refer to them, which is the order of the placeholders
            shown = [part.media for message in prompt.messages for part in message.content if part.media is not None]
        sounds = [media[sound] for index in shown if (sound := prompt.media[index].sound) is not None]
        media = [media[index] for index in shown]
        token_ids = self._tokenize(prompt, media)
        self._check_length(len(token_ids) + sum(self._tokens_of(item) - 1 for item in media))
        data: dict[str, list[Any]] = {}
        for item in (*media, *sounds):
            data.setdefault(item.modality, []).append(item.data)
        self._set_padding(data.get("audio", ()))
        given: Any = {"prompt_token_ids": token_ids, "multi_modal_data": data}
        if sounds:
            rate = next(item.frames_per_second for item in media if item.modality == "video")
            seconds = self.processor.video_processor.temporal_patch_size / rate
            # vLLM lays sound between pictures by its own argument, and by a second for each pair without it.
            given["mm_processor_kwargs"] = {
                USE_AUDIO_IN_VIDEO: True,
                "fps": rate,
                "second_per_grid_ts": [seconds] * len(sounds),
            }
        (engine_input,) = self.renderer.render_cmpl([given])
        self._check_length(len(engine_input["prompt_token_ids"]))
        request = self._input_processor.process_inputs(
            request_id, engine_input, SamplingParams(), supported_tasks=("generate",)
        )
        self._set_video_rates(request, [item for item in media if item.modality == "video"])
        request.mm_features = in_pieces(request.mm_features or (), self._audio_window, self._audio_embeddings)
        return list(request.prompt_token_ids or ()), self._writer.write(request)

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
            item = feature.data
            if item is None:  # vLLM leaves out what its cache holds, which is off (`arguments.py`)
                raise EngineError("vLLM left out the features of a video.")
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
