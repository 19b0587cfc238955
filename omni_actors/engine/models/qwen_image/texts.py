"""Qwen-Image's prompt stage and text encoder.

The first makes token ids of texts, and of pictures what the two encoders take of them; the second makes of prompts,
with pictures in them or not, the states of Qwen3-VL before its last norm.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.transformers_utils.processor import cached_get_processor
from vllm.v1.engine.input_processor import InputProcessor

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import RequestReader, merged_patches, request_tensors
from omni_actors.engine.encoder import EncoderAdapter, EncoderSequence
from omni_actors.engine.models import ModelSpec, renamed
from omni_actors.engine.models.pictures import MAX_REFERENCES, NEGATIVE_STATES, STATES, negative_ids, on_white
from omni_actors.engine.models.pictures.prompts import NEGATIVE_PROMPT, PicturePrompts
from omni_actors.engine.models.qwen_image import MULTIPLE, PICTURE_TOKEN, REFERENCE_SIZE, SYSTEM, scaled_size, written
from omni_actors.engine.models.thinkers import EncoderState, Residual
from omni_actors.engine.rows import FRAME_PREFIX
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Parameter, Prompt
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


LARGEST_SIZE = 2048


class QwenImagePrompts(PicturePrompts):
    """Turns a prompt with up to ten pictures into token ids, encoded features, and pixels for the VAE encoder."""

    parameters = (
        NEGATIVE_PROMPT,
        Parameter(
            "reference_size", "int", MULTIPLE, LARGEST_SIZE, multiple_of=MULTIPLE, default=REFERENCE_SIZE,
            about="edge of the square whose area reference pictures are scaled to, in pixels",
        ),
    )  # fmt: skip

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        super().__init__(arguments, config, limits)
        self._picture_token: int = self._tokenizer.convert_tokens_to_ids(PICTURE_TOKEN)
        self._input_processor = InputProcessor(config)
        self._one_at_a_time = threading.Lock()  # vLLM's objects are not made for several threads

    def write(self, text: str, pictures: int) -> str:
        """As the model was trained with it: pictures come first."""
        return written(text, pictures)

    def shutdown(self) -> None:
        """End the threads of vLLM's renderer."""
        self._input_processor.renderer.shutdown()

    def process(
        self, request: StageRequest, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None = None
    ) -> tuple[list[int], dict[str, HostTensor]]:
        """The token ids of a checked prompt; as tensors those of its negative prompt, and what its pictures become."""
        token_ids, params = self._counted(self._tokenize(prompt), len(prompt.media)), request.params
        negative = None
        if params.negative_prompt is not None:
            negative = self._counted(self.tokens(params.negative_prompt, len(prompt.media)), len(prompt.media))
        found: dict[str, HostTensor] = {}
        size = int((params.extra_args or {}).get("reference_size", REFERENCE_SIZE))
        if pictures := [_scaled(each, size) for each in self.pictures(prompt, tensors, decoder)]:
            token_ids, found, lengths = self._encoded(request.request_id, token_ids, pictures)
            negative = self._filled(negative, lengths) if negative is not None else None
        self._check_length(len(token_ids))
        return token_ids, found | self.tensors(negative, pictures)

    def _counted(self, token_ids: list[int], pictures: int) -> list[int]:
        """The ids, if they have a placeholder for each picture; one inside a text would take the picture of another."""
        if (found := token_ids.count(self._picture_token)) != pictures:
            raise InvalidRequest(
                f"The prompt contains {PICTURE_TOKEN} {found - pictures} times.", hint="Remove it from the text."
            )
        return token_ids

    def _encoded(
        self, request_id: str, token_ids: list[int], pictures: Sequence[Image.Image]
    ) -> tuple[list[int], dict[str, HostTensor], list[int]]:
        """The ids with a placeholder for each of a picture's tokens, the encoded request, and the pictures' tokens."""
        given: Any = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": [on_white(one) for one in pictures]}}
        with self._one_at_a_time:
            # The cache that this leaves out would leave out the pictures of a request that is made again.
            (engine_input,) = self._input_processor.renderer.render_cmpl([given], skip_mm_cache=True)
            self._check_length(len(engine_input["prompt_token_ids"]))
            request = self._input_processor.process_inputs(
                request_id, engine_input, SamplingParams(), supported_tasks=("generate",)
            )
        lengths = [feature.mm_position.length for feature in request.mm_features or ()]
        return list(request.prompt_token_ids or ()), request_tensors(request), lengths

    def _filled(self, token_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """The ids with as many placeholders for each picture as it has tokens."""
        rest = iter(lengths)
        return [token for each in token_ids for token in [each] * (next(rest) if each == self._picture_token else 1)]


def _scaled(image: Image.Image, size: int) -> Image.Image:
    return image.resize(scaled_size(*image.size, size), Image.Resampling.LANCZOS)


TEXT_ENCODER = ModelSpec(
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
    adapter="omni_actors.engine.models.qwen_image.texts.QwenImageTextAdapter",
)
SPEC = {
    "text_encoder": TEXT_ENCODER,
    "prompt": replace(
        TEXT_ENCODER,
        kind="prompt",
        required={},
        adapter="",
        prompts="omni_actors.engine.models.qwen_image.texts.QwenImagePrompts",
    ),
}
