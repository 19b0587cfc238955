"""Qwen-Image's text encoder: prompts, with pictures in them or not, to the states of Qwen3-VL before its last norm."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.transformers_utils.processor import cached_get_processor

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import RequestReader, merged_patches
from omni_actors.engine.encoder import EncoderAdapter, EncoderSequence
from omni_actors.engine.models import ModelSpec, renamed
from omni_actors.engine.models.pictures import MAX_REFERENCES, NEGATIVE_STATES, STATES, negative_ids
from omni_actors.engine.models.qwen_image import SYSTEM
from omni_actors.engine.models.thinker_state import EncoderState, Residual
from omni_actors.engine.rows import FRAME_PREFIX
from omni_actors.errors import InvalidPayload, PromptTooLong
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

ARCHITECTURE = "OmniActorsQwenImageTextEncoder"
PROCESSOR = "processor"  # folder of the checkpoint
MAX_TOKENS = 12_288  # of a prompt with ten pictures of 1024 tokens each
SMALLEST, LARGEST = 32 * 32, 2048 * 2048  # pixels of a picture; the prompt stage has scaled it already


class _ProcessingInfo(Qwen3VLProcessingInfo):
    """Finds the processor in its folder, and has it leave the size of pictures as it is."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        """transformers' processor. What vLLM would have it do with the size of pictures has been done."""
        folder = Path(self.ctx.model_config.model).parent / PROCESSOR
        processor: Any = cached_get_processor(str(folder))
        processor.image_processor.size = {"shortest_edge": SMALLEST, "longest_edge": LARGEST}
        return processor


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLMultiModalProcessor, info=_ProcessingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class QwenImageTextEncoder(Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL without its last norm."""

    # vLLM would look for the levels that pictures are scaled to in the folder of the model, where they are not.
    supports_mm_device_do_normalize = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.language_model.model.norm = Residual()  # type: ignore[assignment]  # declared as a norm

    # The class by which vLLM's runner prepares this model's inputs, and that gives the states.
    get_model_state_cls = staticmethod(lambda: EncoderState)

    def load_weights(self, weights: Any) -> set[str]:
        """Load all but the weight of the norm."""
        loaded: set[str] = super().load_weights(
            item for item in weights if not item[0].endswith("language_model.norm.weight")
        )
        return loaded


class QwenImageTextAdapter(EncoderAdapter):
    """Encodes what the prompt stage sends: the prompt, and the negative prompt if there is one."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig) -> None:
        super().__init__(arguments, config)
        hf_config = config.model_config.hf_config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        self._requests = RequestReader(merged_patches(hf_config.vision_config.spatial_merge_size), lambda frames: -1)
        self._picture_token: int = hf_config.image_token_id
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._most: int = config.model_config.max_model_len - 1
        self._unread = len(tokenizer(SYSTEM, add_special_tokens=False)["input_ids"])

    @property
    def facts(self) -> EngineFacts:
        """The longest prompt. It has no parameters."""
        return EngineFacts(max_input_tokens=self._most, parameters=())

    def sequences(self, request: StageRequest, inputs: StageInputs) -> Mapping[str, EncoderSequence]:
        """The prompts; of each the text after the system's message is given on."""
        encoded = {name: tensor for name, tensor in inputs.tensors.items() if name.startswith(FRAME_PREFIX)}
        token_ids, features = self._requests.read(encoded, inputs.token_ids)
        found = {STATES: self._sequence(token_ids, features)}
        if (negative := negative_ids(inputs.tensors)) is not None:
            found[NEGATIVE_STATES] = self._sequence(negative, features)
        return found

    def _sequence(self, token_ids: list[int], features: Sequence[MultiModalFeatureSpec]) -> EncoderSequence:
        """A prompt with pictures where its placeholders are. Raises `InvalidPayload` if they do not fit."""
        if len(token_ids) > self._most:
            raise PromptTooLong(f"The prompt has {len(token_ids)} tokens; at most {self._most} fit.")
        if wrong := [token for token in token_ids if not 0 <= token < self._vocabulary]:
            raise InvalidPayload(f"Token id {wrong[0]} is outside the vocabulary 0..{self._vocabulary - 1}.")
        runs, pictures = self._divided(token_ids)
        if len(token_ids) <= self._unread or [end - begin for begin, end in pictures] != [
            feature.mm_position.length for feature in features
        ]:
            raise InvalidPayload("The places for pictures in the prompt are not those of the pictures.")
        places = [PlaceholderRange(offset=begin, length=end - begin) for begin, end in pictures]
        placed = [replace(feature, mm_position=place) for feature, place in zip(features, places, strict=True)]
        return EncoderSequence(token_ids, placed, runs)

    def _divided(self, token_ids: list[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Begins and ends of the text between the pictures, and of the pictures. Texts may be empty."""
        pictures = []
        at = 0
        for picture, group in itertools.groupby(token_ids, key=lambda token: token == self._picture_token):
            length = len(list(group))
            if picture:
                pictures.append((at, at + length))
            at += length
        begins = [self._unread, *(end for _, end in pictures)]
        ends = [*(begin for begin, _ in pictures), len(token_ids)]
        return list(zip(begins, ends, strict=True)), pictures


SPEC = ModelSpec(
    kind="encoder",
    folder="text_encoder",
    tokens_folder=PROCESSOR,
    hf_overrides=renamed(ARCHITECTURE, "vision_config"),
    vllm_models={ARCHITECTURE: QwenImageTextEncoder},
    engine={
        "max_model_len": MAX_TOKENS + 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "limit_mm_per_prompt": {"image": MAX_REFERENCES, "video": 0},
    },
    required={"enable_prompt_embeds": False, "enable_prefix_caching": False},
    adapter="omni_actors.engine.models.qwen_image.text_encoder_stage.QwenImageTextAdapter",
)
