"""Qwen-Image's prompt stage: texts to token ids, and pictures to what the two encoders take of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from PIL import Image
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import request_tensors
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.pictures import on_white
from omni_actors.engine.models.pictures.prompts import NEGATIVE_PROMPT, PicturePrompts
from omni_actors.engine.models.qwen_image import (
    MULTIPLE,
    PICTURE_TOKEN,
    REFERENCE_SIZE,
    scaled_size,
    text_encoder_stage,
    written,
)
from omni_actors.errors import InvalidRequest
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Parameter, Prompt
from omni_actors.stage.engine_interface import StageRequest

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


SPEC = ModelSpec(
    kind="prompt",
    folder="text_encoder",
    tokens_folder=text_encoder_stage.PROCESSOR,
    hf_overrides=text_encoder_stage.SPEC.hf_overrides,
    vllm_models=text_encoder_stage.SPEC.vllm_models,
    engine=text_encoder_stage.SPEC.engine,
    prompts="omni_actors.engine.models.qwen_image.prompt_stage.QwenImagePrompts",
)
