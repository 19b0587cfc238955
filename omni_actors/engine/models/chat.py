"""Any chat model that vLLM serves, in place of the thinker: text in, text out."""

from __future__ import annotations

from transformers import PretrainedConfig

from omni_actors.engine.models.registry import ModelSpec
from omni_actors.protocol.payloads import StageParams


def as_published(config: PretrainedConfig) -> PretrainedConfig:
    """Leave a configuration as it is: vLLM finds the model's class by the architecture that it names."""
    return config


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=as_published,
    engine={"enable_prefix_caching": True},
    required={"enable_prompt_embeds": False},
    params=StageParams(max_tokens=1024, temperature=0.0),
    adapter="omni_actors.engine.adapter.TextAdapter",
)
