"""MiniCPM-o's prompts: texts, and recordings as features with places for what the encoder makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch
from transformers import BatchFeature, PretrainedConfig, WhisperFeatureExtractor
from vllm.config import VllmConfig
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import FEATURES, LENGTHS, MASK
from omni_actors.engine.models.minicpm_o.config import HEARING, hearing_part
from omni_actors.engine.models.registry import PromptMedia
from omni_actors.engine.prompt import ChatTemplate, PromptProcessor
from omni_actors.media.limits import AUDIO_RATE, MediaLimits
from omni_actors.protocol.payloads import ContentPart, Prompt

SOUND, SOUND_BEGIN, SOUND_END, PLACE = "<|audio|>", "<|audio_start|>", "<|audio_end|>", "<unk>"
POOLED = HEARING["audio_pool_step"]
LONGEST_SECONDS = 30  # positions of the encoder
MIN_SAMPLES = 1281  # make nine frames, of which five are left for an embedding


def audio_embeddings(frames: int) -> int:
    """Embeddings of this many frames of audio: a convolution of stride 2, then pooling by 5."""
    return (frames + 1) // 2 // POOLED


def audio_window(_config: PretrainedConfig) -> int:
    """Frames that the encoder encodes together: all of them, because each second sees those before it."""
    return LONGEST_SECONDS * 100


class Processor:
    """What the prompt stage needs of a processor; the checkpoint's own is code that no one runs here."""

    audio_token = SOUND

    def __init__(self, tokenizer: Any, config: PretrainedConfig) -> None:
        self.tokenizer = tokenizer
        self.chat_template: str | None = tokenizer.chat_template
        self.feature_extractor = WhisperFeatureExtractor(feature_size=hearing_part(config).num_mel_bins)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt as text. Its answer begins at once: the template thinks first unless it is told not to."""
        text: str = self.tokenizer.apply_chat_template(messages, enable_thinking=False, **options)
        return text


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
        """Any number of sounds."""
        return {"audio": None}

    def get_data_parser(self) -> MultiModalDataParser:
        """A parser of sounds at 16 kHz."""
        return MultiModalDataParser(target_sr=AUDIO_RATE, expected_hidden_size=self._get_expected_hidden_size())


class DummyInputs(BaseDummyInputsBuilder[Info]):
    """The longest media, for which vLLM sets memory aside."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """A placeholder for each."""
        return SOUND * mm_counts.get("audio", 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> MultiModalDataDict:
        """Silence."""
        length, number = LONGEST_SECONDS * AUDIO_RATE, mm_counts.get("audio", 0)
        return {"audio": self._get_dummy_audios(length=length, num_audios=number, overrides=mm_options.get("audio"))}


class MediaProcessor(BaseMultiModalProcessor[Info]):
    """Computes features, and puts into a prompt as many places as the encoder makes embeddings of them."""

    def _call_hf_processor(self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        made = self.info.get_hf_processor().feature_extractor(
            hf_data["audio"],
            sampling_rate=AUDIO_RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        lengths = made["attention_mask"].sum(dim=1)
        sounds = [sound[:, :length] for sound, length in zip(made["input_features"], lengths.tolist(), strict=True)]
        mask = torch.ones(len(sounds), 1, dtype=torch.bool)
        return BatchFeature({FEATURES: torch.cat(sounds, dim=1), LENGTHS: lengths, MASK: mask})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            FEATURES: MultiModalFieldConfig.flat_from_sizes("audio", hf_inputs[LENGTHS], dim=1),
            LENGTHS: MultiModalFieldConfig.batched("audio", keep_on_cpu=True),
            MASK: MultiModalFieldConfig.batched("audio", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        tokenizer: Any = self.info.get_tokenizer()
        sound, begin, end, place = tokenizer.convert_tokens_to_ids([SOUND, SOUND_BEGIN, SOUND_END, PLACE])

        def places(item: int) -> PromptUpdateDetails:
            frames: Any = out_mm_kwargs["audio"][item][LENGTHS].data
            return PromptUpdateDetails.select_token_id([begin, *[place] * audio_embeddings(int(frames)), end], place)

        return [PromptReplacement("audio", [sound], places)]


class Template:
    """The checkpoint's chat template, which takes texts; a medium is a line of its own, as in the model's `chat`."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, with one placeholder per medium."""
        messages = [
            msgspec.structs.replace(
                message,
                content=tuple(part if part.media is None else ContentPart(text=SOUND) for part in message.content),
            )
            for message in prompt.messages
        ]
        return self._chat.render(msgspec.structs.replace(prompt, messages=tuple(messages)))


MEDIA = PromptMedia(None, MIN_SAMPLES, audio_window, audio_embeddings)


class Prompts(PromptProcessor):
    """Turns texts and recordings into token ids and encoded features."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        super().__init__(arguments, config, limits, MEDIA)
        model = arguments.model_config
        chat = ChatTemplate(self.processor, model.tool_call_parser, model.tool_chat_template, text_only=True)
        self._template = Template(chat)

    @classmethod
    def of(cls, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> Prompts:
        """The processor of a checkpoint."""
        return cls(arguments, config, limits)
