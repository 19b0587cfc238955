"""Z-Image's first stage: a prompt and a negative prompt to hidden states of Qwen3's last layer but one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from omni_actors.config.checks import check_parameters
from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoder import EncoderAdapter, EncoderSequence
from omni_actors.engine.models import ModelSpec, served_as
from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES
from omni_actors.engine.models.thinkers import EncoderState, Residual
from omni_actors.engine.prompt_processors import TextPromptProcessor
from omni_actors.errors import InvalidRequest
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Parameter, Prompt
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

ARCHITECTURE = "OmniActorsZImageTextEncoder"
MAX_TOKENS = 512  # that the model was trained with, per prompt
MAX_CHARACTERS = 65_536


@served_as(ARCHITECTURE, "num_hidden_layers")
def encoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration without the last layer, whose output nothing reads."""
    config.num_hidden_layers -= 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


class ZImageTextEncoder(Qwen3ForCausalLM):
    """vLLM's Qwen3 without its last layer and norm: what it returns is transformers' `hidden_states[-2]`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.norm = Residual()  # type: ignore[assignment]  # declared as a norm

    # The class by which vLLM's runner prepares this model's inputs, and that gives the states.
    get_model_state_cls = staticmethod(lambda: EncoderState)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all but the weights of what was left out."""
        left_out = (f"model.layers.{self.config.num_hidden_layers}.", "model.norm.")
        loaded: set[str] = super().load_weights(item for item in weights if not item[0].startswith(left_out))
        return loaded


class ZImageTextAdapter(EncoderAdapter):
    """Tokenizes the prompt and the negative prompt, each as the message of a user."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig) -> None:
        super().__init__(arguments, config)
        self._prompts = TextPromptProcessor.of(arguments, config, MediaLimits())

    @property
    def facts(self) -> EngineFacts:
        """The longest prompt, and the negative prompt as a parameter."""
        return EngineFacts(
            max_input_tokens=self._prompts.max_tokens,
            max_media=self._prompts.max_media,
            parameters=(
                Parameter(
                    "negative_prompt", "text", most=MAX_CHARACTERS, default="", about="what the picture should not show"
                ),
            ),
        )

    def sequences(self, request: StageRequest, inputs: StageInputs) -> Mapping[str, EncoderSequence]:
        """The token ids of both prompts."""
        prompt = inputs.prompt
        if prompt is None:
            raise InvalidRequest("The text encoder needs a prompt.")
        check_parameters("text_encoder", self.facts.parameters, request.params)
        self._prompts.check(prompt, inputs)
        negative = Prompt(messages=(ChatMessage("user", (ContentPart(request.params.negative_prompt or ""),)),))
        both = {STATES: prompt, NEGATIVE_STATES: negative}
        return {name: EncoderSequence(self._prompts.process(request, each, ())[0]) for name, each in both.items()}


SPEC = ModelSpec(
    kind="encoder",
    folder="text_encoder",
    hf_overrides=encoder_config,
    vllm_models={ARCHITECTURE: ZImageTextEncoder},
    engine={"max_model_len": MAX_TOKENS + 1, "max_num_seqs": 64, "max_num_batched_tokens": 4096},
    required={"enable_prompt_embeds": False, "enable_prefix_caching": False},
    adapter="omni_actors.engine.models.z_image.text_encoder_stage.ZImageTextAdapter",
)
