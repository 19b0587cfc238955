"""The talker of Qwen3-Omni as a vLLM model: decodes frames of codes, one step a frame, to speak the thinker's text.

Input of position p, with U the number of positions of the user's turns (`project` is a text token's embedding, taken to
the talker's width):

    p < U           project(token p), at places of media the projected state of the thinker there
    U <= p < U + 3  project(the three tokens that open the reply)
    U + 3 ... 6     project(tts_pad) + embedding of nothink, think_bos, think_eos, the voice
    U + 7           project(tts_bos) + embedding of codec_pad
    U + 8           project(reply token 0) + embedding of codec_bos
    U + 9 + k       sum of the embeddings of the codes of frame k + project(reply token k + 1), after the last one
                    project(tts_eos) once, then project(tts_pad)

A step samples the first code of a frame; the code predictor adds the others (`TalkerState`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.code_predictor import CodePredictor, PredictorConfig
from omni_actors.engine.models.continued_positions import ContinuedPositions
from omni_actors.engine.models.qwen3_omni.talker_state import TalkerState
from omni_actors.errors import ConfigError
from omni_actors.protocol.payloads import StageParams

ARCHITECTURE = "OmniActorsQwen3OmniTalker"
SPECIAL_CODES = 1024  # the last ids of the vocabulary, of which only the end is ever sampled
PROJECTED_AT_ONCE = 8192  # rows of the text table


def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of the checkpoint's, in the shape of a Qwen3 with experts.

    Raises:
        ConfigError: the checkpoint has a thinker only.
    """
    if not hasattr(config, "thinker_config"):  # vLLM first calls the function with an empty configuration
        return config
    talker = getattr(config, "talker_config", None)
    if talker is None or not getattr(config, "enable_audio_output", True):
        raise ConfigError(
            "This checkpoint has no talker: it answers in text only.",
            hint="Leave the stages after the thinker out of the YAML, or use an Instruct checkpoint.",
        )
    text = talker.text_config
    text.architectures = [ARCHITECTURE]
    text.dtype = text.dtype or config.dtype
    # The published configuration says "interleaved", vLLM reads another name.
    text.rope_parameters = {**text.rope_parameters, "mrope_interleaved": True}
    text.predictor_config = talker.code_predictor_config
    text.thinker_hidden_size = talker.thinker_hidden_size
    text.thinker_vocab_size = config.thinker_config.text_config.vocab_size
    text.speaker_id = dict(talker.speaker_id)
    text.codec_end, text.codec_pad = talker.codec_eos_token_id, talker.codec_pad_id
    text.codec_start = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    text.codec_bos = talker.codec_bos_id
    text.turn_ids = [config.im_start_token_id, config.user_token_id, config.assistant_token_id]
    text.tts_ids = [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id]
    text.media_ids = [talker.audio_token_id, talker.image_token_id, talker.video_token_id]
    return text


class Projection(nn.Module):
    """Takes rows of the thinker's width to the talker's."""

    def __init__(self, given: int, between: int, made: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(given, between)
        self.linear_fc2 = nn.Linear(between, made)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, given] -> [n, made]."""
        projected: torch.Tensor = self.linear_fc2(F.silu(self.linear_fc1(rows)))
        return projected


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "b"},
        # Positions are [3, tokens]; Qwen3MoeModel declares dimension 0 and cannot be compiled with M-RoPE.
        "positions": {-1: "b"},
        "intermediate_tensors": {0: "b"},
        "inputs_embeds": {0: "b"},
    }
)
class TalkerDecoder(Qwen3MoeModel):
    """vLLM's Qwen3 with experts, compiled for M-RoPE positions."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        del self.embed_tokens  # the model's own is codec_embedding, whole on every rank


class Qwen3OmniTalker(nn.Module, ContinuedPositions):
    """The talker as a vLLM model, with its code predictor, whole on every rank."""

    text_table: torch.Tensor
    never_sampled: torch.Tensor

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "code2wav.": None,
            "talker.model.codec_embedding.": "codec_embedding.",
            "talker.model.": "decoder.",
            "talker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        width = config.hidden_size
        self.decoder = TalkerDecoder(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "decoder"))
        self.codec_embedding = nn.Embedding(config.vocab_size, width)
        self.codec_head = ParallelLMHead(config.vocab_size, width, prefix=maybe_prefix(prefix, "codec_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.code_predictor = CodePredictor(PredictorConfig.of(config.predictor_config, width))
        self.text_projection = Projection(config.thinker_hidden_size, config.intermediate_size, width)
        self.hidden_projection = Projection(config.thinker_hidden_size, config.intermediate_size, width)
        # Buffers from the start: on the right device, and defined even without load_weights (dummy weights).
        self.register_buffer("text_table", torch.zeros(config.thinker_vocab_size, width), persistent=False)
        never_sampled = torch.arange(config.vocab_size) >= config.vocab_size - SPECIAL_CODES
        never_sampled[config.codec_end] = False
        self.register_buffer("never_sampled", never_sampled, persistent=False)
        self.make_empty_intermediate_tensors = self.decoder.make_empty_intermediate_tensors

    @staticmethod
    def get_model_state_cls() -> type[TalkerState]:
        """The class by which vLLM's runner prepares this model's inputs, and that completes the frames."""
        return TalkerState

    def embed_input_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Embeddings of first codes [tokens, width]."""
        embeddings: torch.Tensor = self.codec_embedding(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states [tokens, width] at M-RoPE positions [3, tokens]."""
        if inputs_embeds is None:
            inputs_embeds = self.codec_embedding(input_ids)
        hidden: torch.Tensor = self.decoder(None, positions, intermediate_tensors, inputs_embeds=inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits [tokens, vocabulary], minus infinity for what is never sampled; None where they are not gathered."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits.masked_fill_(self.never_sampled, float("-inf"))
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the whole checkpoint, and project its text table once and for all."""
        tables = []

        def talker_weights() -> Iterable[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if name == "thinker.model.embed_tokens.weight":
                    tables.append(weight)
                else:
                    yield name, weight

        loaded = AutoWeightsLoader(self).load_weights(talker_weights(), mapper=self.hf_to_vllm_mapper)
        with torch.inference_mode():
            for start in range(0, len(self.text_table) if tables else 0, PROJECTED_AT_ONCE):
                rows = tables[0][start : start + PROJECTED_AT_ONCE].to(self.text_table)
                self.text_table[start : start + len(rows)] = self.text_projection(rows)
        return loaded


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: Qwen3OmniTalker},
    # Prompt embeddings give the model its own input buffer; none are ever sent.
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The defaults of transformers' Qwen3OmniMoeForConditionalGeneration.generate.
    params=StageParams(max_tokens=4096, temperature=0.9, top_p=1.0, top_k=50, repetition_penalty=1.05),
    adapter="omni_actors.engine.models.qwen3_omni.talker_adapter.TalkerAdapter",
)
