"""FLUX.2's prompt stage: texts to token ids, and pictures to the pixels that the VAE encoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.models import ModelSpec, renamed
from omni_actors.engine.models.flux2 import MAX_TOKENS, is_distilled, reference_picture
from omni_actors.engine.models.pictures.prompts import NEGATIVE_PROMPT, PicturePrompts
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Prompt
from omni_actors.stage.engine_interface import StageRequest

ARCHITECTURE = "OmniActorsFlux2Prompts"  # a class object, which vLLM need not inspect in another process


class Flux2Prompts(PicturePrompts):
    """Turns a prompt with up to ten pictures into token ids and pixels; unless distilled, with a negative prompt."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        super().__init__(arguments, config, limits)
        self._distilled = is_distilled(Path(config.model_config.model).parent)
        self.parameters = () if self._distilled else (NEGATIVE_PROMPT,)

    def write(self, text: str, pictures: int) -> str:
        """The message of a user; the model sees pictures elsewhere."""
        written: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return written

    def process(
        self, request: StageRequest, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None = None
    ) -> tuple[list[int], dict[str, HostTensor]]:
        """The token ids of a checked prompt; as tensors those of its negative prompt, and its pictures."""
        negative = None if self._distilled else self.tokens(request.params.negative_prompt or "", 0)
        pictures = [reference_picture(image) for image in self.pictures(prompt, tensors, decoder)]
        return self._tokenize(prompt), self.tensors(negative, pictures)


SPEC = ModelSpec(
    kind="prompt",
    folder="text_encoder",
    hf_overrides=renamed(ARCHITECTURE, "num_key_value_heads"),
    vllm_models={ARCHITECTURE: Qwen3ForCausalLM},
    engine={"max_model_len": MAX_TOKENS + 1},
    prompts="omni_actors.engine.models.flux2.prompt_stage.Flux2Prompts",
)
