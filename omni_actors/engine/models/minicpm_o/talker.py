"""MiniCPM-o's talker: a Llama that speaks an answer once it is written.

Its prompt is a row for each token of the answer, the end of the text and the begin of the sound; then come S3 tokens,
25 a second, and the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models import ModelSpec, SpeechLimit
from omni_actors.engine.models.code_talker import CodecOutputs, CodeTalker, CodeTalkerAdapter
from omni_actors.engine.models.diffusers_layout import read_tensors
from omni_actors.engine.models.minicpm_o.config import speech_part
from omni_actors.engine.rows import check_rows, to_host, to_torch
from omni_actors.engine.scheduler import RowStream
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

ARCHITECTURE = "OmniActorsMiniCpmOTalker"
ROWS = ("prompt_rows", "reply_rows")
GAIN, DIRECTION = (
    "tts.head_code.0.parametrizations.weight.original0",
    "tts.head_code.0.parametrizations.weight.original1",
)
BLOCK = 4  # tokens of a message to the vocoder


def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of the checkpoint's, as a Llama's."""
    if not hasattr(config, "tts_config"):  # vLLM first calls the function with an empty configuration
        return config
    speech = speech_part(config)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    talker = LlamaConfig(
        **{name: speech[name] for name in sizes},
        max_position_embeddings=speech["max_position_embeddings"],
        vocab_size=speech["num_audio_tokens"],
        tie_word_embeddings=False,
        dtype=config.dtype or "bfloat16",
    )
    talker.architectures = [ARCHITECTURE]
    talker.text_end, talker.sound_begin = speech["text_eos_token_id"], speech["audio_bos_token_id"]
    return talker


class MiniCpmOTalker(CodeTalker):
    """The talker as a vLLM model."""

    decoder_class = LlamaModel

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "tts.model.": "decoder.",
            "tts.emb_code.0.": "codec_embedding.",
            "tts.head_code.0.": "codec_head.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        del self.decoder.embed_tokens  # its tokens are those of codec_embedding
        self.codec_embedding = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
        self.register_buffer("never_sampled", torch.zeros(self.config.vocab_size, dtype=torch.bool), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the checkpoint; return the names of the parameters that were set."""
        return AutoWeightsLoader(self).load_weights(_talker_weights(weights), mapper=self.hf_to_vllm_mapper)


def _talker_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The talker's own weights; the head's gains and directions as one."""
    head: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        if name in (GAIN, DIRECTION):
            head[name] = weight
            if len(head) == 2:
                yield "tts.head_code.0.weight", torch._weight_norm(head[DIRECTION], head[GAIN], 0)
        elif name.startswith(("tts.model.layers.", "tts.model.norm.", "tts.emb_code.0.")):
            yield name, weight


class MiniCpmOTalkerAdapter(CodeTalkerAdapter):
    """Turns the rows of an answer into a vLLM request over S3 tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.model_config.hf_config
        self._width: int = config.hidden_size
        self.end_token_ids = frozenset({self.vocabulary - 1})
        self._marks = torch.zeros(2, self._width, dtype=self.model_dtype)  # the end of the text, the begin of the sound
        if self.vllm_config.load_config.load_format != "dummy":
            ((_, table),) = read_tensors(self.vllm_config.model_config.model, "tts.emb_text.")
            self._marks = table[[config.text_end, config.sound_begin]].to(self.model_dtype)

    @property
    def facts(self) -> EngineFacts:
        """The longest answer that leaves room for a token. Voices are the vocoder's."""
        return EngineFacts(max_input_tokens=self.max_model_len - 3)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check the rows of a complete answer. Raises `OmniError`."""
        if not inputs.complete:
            raise InvalidPayload("This talker takes an answer once it is complete.", hint="Remove start_after.")
        if foreign := sorted(inputs.tensors.keys() - set(ROWS)):
            raise InvalidPayload(f"The talker takes no tensors named {foreign}.")
        parts = []
        for name in ROWS:
            if name in inputs.tensors:
                check_rows(inputs.tensors[name], self._width, name)
                parts.append(to_torch(inputs.tensors[name], name).to(self.model_dtype))
        embeds = torch.cat([*parts, self._marks])
        outputs = CodecOutputs(request.request_id, self.end_token_ids, BLOCK)
        stream = RowStream(0, complete=True, held_bytes=embeds.nbytes, text_tokens=len(embeds) - 2)
        return self.admitted(request, None, outputs, stream, prompt_embeds=embeds)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Rows of zeros for `length` tokens."""
        return StageInputs(tensors={ROWS[0]: to_host(torch.zeros(length, self._width, dtype=self.model_dtype))})


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: MiniCpmOTalker},
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The model's own `TTSSamplingParams`, and the 2 s that a speech has at least.
    params=StageParams(max_tokens=2048, min_tokens=50, temperature=0.8, top_p=0.85, top_k=25, repetition_penalty=1.05),
    steps_per_schedule=BLOCK,
    speech_limit=SpeechLimit(75, 40),  # 3 s, and 1.6 s for each token of text, at 25 tokens a second
    adapter="omni_actors.engine.models.minicpm_o.talker.MiniCpmOTalkerAdapter",
)
