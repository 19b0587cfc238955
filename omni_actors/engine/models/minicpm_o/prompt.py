"""MiniCPM-o's prompts: texts, and media as features with places for what the encoders make of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import BatchFeature, PretrainedConfig, WhisperFeatureExtractor
from vllm.config import VllmConfig
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems, MultiModalDataParser, VideoProcessorItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from vllm.multimodal.processing.processor import ResolvedPromptUpdate

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import FEATURES, LENGTHS, MASK
from omni_actors.engine.models import PromptMedia
from omni_actors.engine.models.minicpm_o.config import POOLED, QUERIES, hearing_part
from omni_actors.engine.models.minicpm_o.pictures import (
    FRAME_SIZES,
    FRAMES,
    LONGEST_SECONDS,
    MOST_SLICES,
    PIXELS,
    SIDE,
    SIZES,
    SOUND,
    SOUND_LENGTH,
    film_embeddings,
    film_of,
    grid_of,
    patches_of,
    picture_embeddings,
    places_of,
    places_of_film,
    slices_of,
    whole_of,
)
from omni_actors.engine.prompt_processors import DecodedMedia, PromptProcessor
from omni_actors.media.limits import AUDIO_RATE, MediaLimits
from omni_actors.protocol.payloads import ContentPart, Prompt

MARKS = {"audio": "<|audio|>", "image": "<|image_pad|>", "video": "<|video_pad|>"}
PLACE = "<unk>"
COUNTS = {LENGTHS: "audio", MASK: "audio", SIZES: "image", FRAME_SIZES: "video", SOUND_LENGTH: "video"}
HEARD_SECONDS = 30  # positions of the encoder
LARGEST = SIDE * math.isqrt(MOST_SLICES)  # along an edge of a picture of the most slices
MIN_SAMPLES = 1281  # make nine frames, of which five are left for an embedding


def audio_embeddings(frames: int) -> int:
    """Embeddings of this many frames of audio: a convolution of stride 2, then pooling by 5."""
    return (frames + 1) // 2 // POOLED


def audio_window(_config: PretrainedConfig) -> int:
    """Frames that the encoder encodes together, because each second sees those before it."""
    return HEARD_SECONDS * 100


def media_embeddings(modality: str, data: Mapping[str, Any]) -> int:
    """Embeddings that the encoders make of a picture or a video; -1 if its tensors contradict one another."""
    if modality == "video":
        return film_embeddings(data, audio_embeddings)
    return picture_embeddings(data[PIXELS], data[SIZES])


class Processor:
    """What the prompt stage needs of a processor; the checkpoint's own is code that no one runs here."""

    audio_token, image_token, video_token = MARKS.values()
    image_processor = None

    def __init__(self, tokenizer: Any, config: PretrainedConfig) -> None:
        self.tokenizer = tokenizer
        self.chat_template: str | None = tokenizer.chat_template
        self.feature_extractor = WhisperFeatureExtractor(feature_size=hearing_part(config).num_mel_bins)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt as text. Its answer begins at once: the template thinks first unless it is told not to."""
        text: str = self.tokenizer.apply_chat_template(messages, enable_thinking=False, **options)
        return text


class FilmParser(MultiModalDataParser):
    """Leaves videos as they are, each a `Film`."""

    def _parse_video_data(self, data: Any) -> VideoProcessorItems:
        return VideoProcessorItems(data)


class Info(BaseProcessingInfo):
    """What vLLM asks of the processor."""

    @cached_property
    def _processor(self) -> Processor:
        return Processor(self.get_tokenizer(), self.get_hf_config())

    def get_hf_processor(self, **kwargs: object) -> Any:
        """The one processor, whose padding the prompt stage sets."""
        return self._processor

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        """None."""
        return {}

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of sounds, pictures and videos."""
        return dict.fromkeys(MARKS)

    def get_num_image_tokens(self, *, image_width: int, image_height: int, **_: object) -> int:
        """How many tokens a picture becomes, but for a few."""
        columns, rows = grid_of(image_width, image_height) or (0, 0)
        return (columns * rows + 1) * QUERIES

    def get_data_parser(self) -> MultiModalDataParser:
        """A parser of sounds at 16 kHz."""
        return FilmParser(target_sr=AUDIO_RATE, expected_hidden_size=self._get_expected_hidden_size())


class DummyInputs(BaseDummyInputsBuilder[Info]):
    """The longest media, for which vLLM sets memory aside."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """A placeholder for each."""
        return "".join(mark * mm_counts.get(modality, 0) for modality, mark in MARKS.items())

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> MultiModalDataDict:
        """Silence, and pictures of the most slices."""
        sounds, pictures, videos = (mm_counts.get(modality, 0) for modality in MARKS)
        silence = self._get_dummy_audios(length=LONGEST_SECONDS * AUDIO_RATE, num_audios=sounds + videos)
        dark = np.zeros((LONGEST_SECONDS, SIDE, SIDE, 3), np.uint8)
        films: Any = [(dark, sound) for sound in silence[sounds:]]
        return {
            "audio": silence[:sounds],
            "image": self._get_dummy_images(width=LARGEST, height=LARGEST, num_images=pictures),
            "video": films,
        }


class MarkedMedia(BaseMultiModalProcessor[Info]):
    """Computes features, and puts into a prompt as many places as the encoder makes embeddings of them."""

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        made: dict[str, Any] = {}
        if sounds := hf_data.get("audio"):
            made[FEATURES], made[LENGTHS] = self._heard(sounds)
            made[MASK] = torch.ones(len(sounds), 1, dtype=torch.bool)
        if pictures := hf_data.get("images"):
            patches, made[SIZES] = zip(*(patches_of(slices_of(picture)) for picture in pictures), strict=True)
            made[PIXELS] = torch.cat(patches)
        if films := hf_data.get("videos"):
            seen = [patches_of(whole_of(Image.fromarray(frame)) for frame in frames) for frames, _ in films]
            patches, made[FRAME_SIZES] = zip(*seen, strict=True)
            made[FRAMES] = torch.cat(patches)
            made[SOUND], made[SOUND_LENGTH] = self._heard([sound for _, sound in films])
        return BatchFeature(made)

    def _heard(self, sounds: Sequence[NDArray[np.float32]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [mel bins, frames] of sounds one after the other, from half a minute at a time; frames of each."""
        extractor, most = self.info.get_hf_processor().feature_extractor, HEARD_SECONDS * AUDIO_RATE
        features, lengths = [torch.zeros(extractor.feature_size, 0)], []
        for sound in sounds:
            lengths.append(0)
            for begin in range(0, len(sound), most):
                piece = extractor(
                    sound[begin : begin + most],
                    sampling_rate=AUDIO_RATE,
                    padding="max_length",
                    return_attention_mask=True,
                    return_tensors="pt",
                )
                frames = int(piece["attention_mask"].sum())
                lengths[-1] += frames
                features.append(piece["input_features"][0, :, :frames])
        return torch.cat(features, dim=1), torch.tensor(lengths)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = {name: MultiModalFieldConfig.batched(modality, keep_on_cpu=True) for name, modality in COUNTS.items()}
        for modality, features, length in (("audio", FEATURES, LENGTHS), ("video", SOUND, SOUND_LENGTH)):
            if features in hf_inputs:
                fields[features] = MultiModalFieldConfig.flat_from_sizes(modality, hf_inputs[length], dim=1)
        for modality, pixels, each in (("image", PIXELS, SIZES), ("video", FRAMES, FRAME_SIZES)):
            if pixels in hf_inputs:
                patches = torch.stack([sizes.prod(dim=1).sum() for sizes in hf_inputs[each]])
                fields[pixels] = MultiModalFieldConfig.flat_from_sizes(modality, patches)
        return fields

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        def sound(item: int) -> str:
            frames: Any = out_mm_kwargs["audio"][item][LENGTHS].data
            return f"<|audio_start|>{PLACE * audio_embeddings(int(frames))}<|audio_end|>"

        def picture(item: int) -> str:
            size = mm_items.get_items("image", ImageProcessorItems).get_image_size(item)
            return places_of(grid_of(size.width, size.height), item)

        def film(item: int) -> str:
            data: Any = out_mm_kwargs["video"][item]
            sound = audio_embeddings(int(data[SOUND_LENGTH].data))
            return places_of_film(len(data[FRAME_SIZES].data), sound, PLACE)

        def replacement(modality: str, text: Callable[[int], str]) -> PromptReplacement:
            return PromptReplacement(
                modality, self._ids(MARKS[modality]), lambda item: self._places(self._ids(text(item)))
            )

        return [replacement("audio", sound), replacement("image", picture), replacement("video", film)]

    def _recompute_cached_prompt_update(
        self, cached_update: ResolvedPromptUpdate, new_item_idx: int
    ) -> ResolvedPromptUpdate:
        update = super()._recompute_cached_prompt_update(cached_update, new_item_idx)
        if update.modality != "image":
            return update
        known: list[int] = update.content.full  # a picture of an earlier prompt, and its number there
        (end,) = self._ids("</image_id>")
        numbered = [*self._ids(f"<image_id>{new_item_idx}"), *known[known.index(end) :]]
        changed: ResolvedPromptUpdate = update.with_content(self._places(numbered))
        return changed

    def _ids(self, text: str) -> list[int]:
        tokenizer: Any = self.info.get_tokenizer()
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _places(self, token_ids: list[int]) -> PromptUpdateDetails:
        return PromptUpdateDetails.select_token_id(token_ids, *self._ids(PLACE))


MEDIA = PromptMedia(None, MIN_SAMPLES, audio_window, audio_embeddings)


class Prompts(PromptProcessor):
    """Turns texts and media into token ids and encoded features; the checkpoint's chat template takes texts."""

    text_only = True

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        super().__init__(arguments, config, limits, MEDIA)

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, with one placeholder per medium.

        A medium is a line of its own, as in the model's `chat`; in a message with a video nothing is between the parts,
        as there with `omni_mode`.
        """
        messages = []
        for message in prompt.messages:
            kinds = [None if part.media is None else prompt.media[part.media].modality for part in message.content]
            texts = [
                part.text or "" if kind is None else MARKS[kind]
                for part, kind in zip(message.content, kinds, strict=True)
            ]
            content = tuple(ContentPart(text=text) for text in (["".join(texts)] if "video" in kinds else texts))
            messages.append(msgspec.structs.replace(message, content=content))
        return super().render(msgspec.structs.replace(prompt, messages=tuple(messages)))

    def _longest_sound(self, limits: MediaLimits, config: VllmConfig) -> float:
        return min(limits.audio_seconds, LONGEST_SECONDS)

    def _tokens_of(self, item: DecodedMedia) -> int:
        if item.modality != "video":
            return super()._tokens_of(item)
        return math.ceil(len(item.data) / item.frames_per_second) * QUERIES

    def _data(self, shown: Sequence[tuple[DecodedMedia, DecodedMedia | None]]) -> tuple[dict[str, list[Any]], None]:
        data: dict[str, list[Any]] = {}
        for item, sound in shown:
            given = item.data
            if item.modality == "video":
                given = film_of(item.data, item.frames_per_second, None if sound is None else sound.data)
            data.setdefault(item.modality, []).append(given)
        self._set_padding([*data.get("audio", ()), *(sound for _, sound in data.get("video", ()))])
        return data, None
