"""The talker of Qwen3-TTS as a vLLM model: a dense Qwen3 that speaks the text it is given, a frame of codes a step.

`prompt.py` says what the positions of its prompt are made of.
"""

from __future__ import annotations

from vllm.model_executor.models.qwen3 import Qwen3Model

from omni_actors.engine.models import ModelSpec, SpeechLimit
from omni_actors.engine.models.frame_talker.model import FrameTalker
from omni_actors.engine.models.qwen3_tts.checkpoint import ARCHITECTURE, talker_config
from omni_actors.engine.models.qwen3_tts.talker_state import TextTalkerState
from omni_actors.protocol.payloads import StageParams


class Qwen3TtsTalker(FrameTalker):
    """The talker as a vLLM model."""

    decoder_class = Qwen3Model
    text_table_name = "talker.model.text_embedding.weight"

    @staticmethod
    def get_model_state_cls() -> type[TextTalkerState]:
        """The class by which vLLM's runner prepares this model's inputs, and that completes the frames."""
        return TextTalkerState


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: Qwen3TtsTalker},
    # Prompt embeddings give the model its own input buffer; none are ever sent.
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The defaults of Qwen's package, for a checkpoint without its own (`sampling_defaults`).
    params=StageParams(max_tokens=2048, temperature=0.9, top_p=1.0, top_k=50, repetition_penalty=1.05),
    speech_limit=SpeechLimit(38, 19),  # 3 s, and 1.5 s for each token of text, at 12.5 frames a second
    adapter="omni_actors.engine.models.qwen3_tts.talker_adapter.TextTalkerAdapter",
)
