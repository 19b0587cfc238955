"""A talker of frames as a vLLM model: the tables and heads around its layers, and the code predictor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from omni_actors.engine.models.code_predictor import CodePredictor, PredictorConfig

SPECIAL_CODES = 1024  # the last ids of the vocabulary, of which only the end is ever sampled
PROJECTED_AT_ONCE = 8192  # rows of the text table


class Projection(nn.Module):
    """Takes rows of one width to the talker's."""

    def __init__(self, given: int, between: int, made: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(given, between)
        self.linear_fc2 = nn.Linear(between, made)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, given] -> [n, made]."""
        projected: torch.Tensor = self.linear_fc2(F.silu(self.linear_fc1(rows)))
        return projected


class FrameTalker(nn.Module):
    """The model without its layers, with its code predictor, whole on every rank.

    Its configuration has, besides what the layers want: `text_sizes` (ids of texts, width of their table, width between
    the layers of their projection), `text_pad`, `codec_end`, `predictor_config` and `predictor_sampling`.

    Attributes:
        decoder_class: vLLM's model of the layers.
        text_table_name: of the table of texts in the checkpoint.
    """

    decoder_class: ClassVar[type[nn.Module]]
    text_table_name: ClassVar[str]
    text_table: torch.Tensor
    never_sampled: torch.Tensor

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "code2wav.": None,
            "speaker_encoder.": None,
            "talker.model.codec_embedding.": "codec_embedding.",
            "talker.model.": "decoder.",
            "talker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: PretrainedConfig = vllm_config.model_config.hf_config
        self.config = config
        width = config.hidden_size
        self.decoder = self.decoder_class(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "decoder"))
        del self.decoder.embed_tokens  # the model's own is codec_embedding, whole on every rank
        self.codec_embedding = nn.Embedding(config.vocab_size, width)
        self.codec_head = ParallelLMHead(config.vocab_size, width, prefix=maybe_prefix(prefix, "codec_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        predictor = PredictorConfig.of(config.predictor_config, width, **config.predictor_sampling)
        self.code_predictor = CodePredictor(predictor)
        texts, given, between = config.text_sizes
        self.text_projection = Projection(given, between, width)
        # Buffers from the start: on the right device, and defined even without load_weights (dummy weights).
        self.register_buffer("text_table", torch.zeros(texts, width), persistent=False)
        never_sampled = torch.arange(config.vocab_size) >= config.vocab_size - SPECIAL_CODES
        never_sampled[config.codec_end] = False
        self.register_buffer("never_sampled", never_sampled, persistent=False)
        self.make_empty_intermediate_tensors = self.decoder.make_empty_intermediate_tensors

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
        """Hidden states [tokens, width] at positions [tokens], or [3, tokens] for M-RoPE."""
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
                if name == self.text_table_name:
                    tables.append(weight)
                else:
                    yield name, weight

        loaded = AutoWeightsLoader(self).load_weights(talker_weights(), mapper=self.hf_to_vllm_mapper)
        with torch.inference_mode():
            for start in range(0, len(self.text_table) if tables else 0, PROJECTED_AT_ONCE):
                rows = tables[0][start : start + PROJECTED_AT_ONCE].to(self.text_table)
                self.text_table[start : start + len(rows)] = self.text_projection(rows)
        return loaded
