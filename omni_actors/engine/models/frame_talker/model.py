"""A talker of frames as a vLLM model: the tables and heads around its layers, and the code predictor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from omni_actors.engine.models.code_predictor import CodePredictor, PredictorConfig
from omni_actors.engine.models.code_talker import CodeTalker

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


class FrameTalker(CodeTalker):
    """The model without its layers, with its code predictor, whole on every rank.

    Its configuration has, besides what the layers want: `text_sizes` (ids of texts, width of their table, width between
    the layers of their projection), `text_pad`, `codec_end`, `predictor_config` and `predictor_sampling`.

    Attributes:
        text_table_name: of the table of texts in the checkpoint.
    """

    text_table_name: ClassVar[str]
    text_table: torch.Tensor

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
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, width = self.config, self.config.hidden_size
        del self.decoder.embed_tokens  # the model's own is codec_embedding, whole on every rank
        self.codec_embedding = nn.Embedding(config.vocab_size, width)
        predictor = PredictorConfig.of(config.predictor_config, width, **config.predictor_sampling)
        self.code_predictor = CodePredictor(predictor)
        texts, given, between = config.text_sizes
        self.text_projection = Projection(given, between, width)
        # Buffers from the start: on the right device, and defined even without load_weights (dummy weights).
        self.register_buffer("text_table", torch.zeros(texts, width), persistent=False)
        never_sampled = torch.arange(config.vocab_size) >= config.vocab_size - SPECIAL_CODES
        never_sampled[config.codec_end] = False
        self.register_buffer("never_sampled", never_sampled, persistent=False)

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
