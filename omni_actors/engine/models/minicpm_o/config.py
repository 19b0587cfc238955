"""MiniCPM-o's configuration, which transformers does not know."""

from __future__ import annotations

from transformers import AutoConfig, Qwen3Config


class MiniCpmOConfig(Qwen3Config):
    """The thinker's sizes, and a part for each of the others."""

    model_type = "minicpmo"


AutoConfig.register(MiniCpmOConfig.model_type, MiniCpmOConfig, exist_ok=True)
