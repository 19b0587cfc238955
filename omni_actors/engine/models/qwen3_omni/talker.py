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

A step samples the first code of a frame; the code predictor adds the others (`FrameTalkerState`).
"""

from __future__ import annotations

from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel

from omni_actors.engine.models import ModelSpec, SpeechLimit
from omni_actors.engine.models.code_talker import MROPE_DIMS
from omni_actors.engine.models.continued_positions import ContinuedPositions
from omni_actors.engine.models.frame_talker.model import FrameTalker, Projection
from omni_actors.engine.models.qwen3_omni.talker_state import TalkerState
from omni_actors.errors import ConfigError
from omni_actors.protocol.payloads import StageParams

ARCHITECTURE = "OmniActorsQwen3OmniTalker"


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
    text.predictor_config, text.predictor_sampling = talker.code_predictor_config, {}
    text.thinker_hidden_size = talker.thinker_hidden_size
    text.thinker_vocab_size = config.thinker_config.text_config.vocab_size
    text.text_sizes = [text.thinker_vocab_size, text.thinker_hidden_size, text.intermediate_size]
    text.speaker_id = dict(talker.speaker_id)
    text.codec_end, text.codec_pad = talker.codec_eos_token_id, talker.codec_pad_id
    text.codec_start = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    text.codec_bos = talker.codec_bos_id
    text.turn_ids = [config.im_start_token_id, config.user_token_id, config.assistant_token_id]
    text.text_bos, text.text_eos, text.text_pad = (
        config.tts_bos_token_id,
        config.tts_eos_token_id,
        config.tts_pad_token_id,
    )
    text.media_ids = [talker.audio_token_id, talker.image_token_id, talker.video_token_id]
    return text


@support_torch_compile(dynamic_arg_dims=MROPE_DIMS)
class TalkerDecoder(Qwen3MoeModel):
    """vLLM's Qwen3 with experts, compiled for M-RoPE positions."""


class Qwen3OmniTalker(FrameTalker, ContinuedPositions):
    """The talker as a vLLM model."""

    decoder_class = TalkerDecoder
    text_table_name = "thinker.model.embed_tokens.weight"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.hidden_projection = Projection(config.thinker_hidden_size, config.intermediate_size, config.hidden_size)

    @staticmethod
    def get_model_state_cls() -> type[TalkerState]:
        """The class by which vLLM's runner prepares this model's inputs, and that completes the frames."""
        return TalkerState


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: Qwen3OmniTalker},
    # Prompt embeddings give the model its own input buffer; none are ever sent.
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The defaults of transformers' Qwen3OmniMoeForConditionalGeneration.generate.
    params=StageParams(max_tokens=4096, temperature=0.9, top_p=1.0, top_k=50, repetition_penalty=1.05),
    speech_limit=SpeechLimit(38, 19),  # 3 s, and 1.5 s for each token of text, at 12.5 frames a second
    adapter="omni_actors.engine.models.qwen3_omni.talker_adapter.TalkerAdapter",
)
