"""Qwen2.5-Omni's talker, and the adapter that feeds it.

Input of position p, with P the thinker's prompt length (H is the thinker's width, everything is projected afterwards):

    p < P       prompt row p
    p = P       codec_embed(codec_pad) + embedding of the voice's text-bos token
    p = P + 1   codec_embed(codec_bos) + reply row 0
    p = P+2+k   codec_embed(codec token k) + reply row k + 1; after the last reply row the text-eos embedding once, then
                text-pad from there on

`TalkerModelState` puts in the rows below P, and from P on adds the text side to the embedding of the codec token at
that position (prompt tokens are codec_mask * P, codec_pad, codec_bos). Both go by absolute position, so that a
preempted request, which computes its output again as a prompt, gets the same input. vLLM's own prompt embeddings would
do the first part, but turn the ids of such positions into 0, and the repetition penalty would apply to codec token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import WeightsMapper
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models import ModelSpec, SpeechLimit, served_as
from omni_actors.engine.models.code_talker import (
    MROPE_DIMS,
    CodecOutputs,
    CodeTalker,
    CodeTalkerAdapter,
    ContinuedPositions,
    Speech,
    TalkerState,
    chosen_voice,
)
from omni_actors.engine.models.diffusers_layout import checkpoint_file
from omni_actors.engine.rows import to_host
from omni_actors.engine.scheduler import RowStream
from omni_actors.errors import ConfigError, InvalidPayload, StartupError
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest


def load_voices(model: str) -> dict[str, dict[str, Any]]:
    """Voice name -> {"bos_token": int, "cond": [1, speaker_dim], "ref_mel": [1, frames, mel_dim]}, in file order.

    Raises:
        ConfigError: the file is missing or lacks something that the published checkpoints have.
    """
    try:
        voices = torch.load(checkpoint_file(model, "spk_dict.pt"), weights_only=True, map_location="cpu")
    except (OSError, StartupError) as error:
        raise ConfigError(f"The checkpoint {model!r} has no readable spk_dict.pt: {error}") from error
    if not isinstance(voices, dict) or not voices:
        raise ConfigError(f"spk_dict.pt of {model!r} holds no voices.")
    for name, entry in voices.items():
        if not isinstance(entry, dict) or not {"bos_token", "cond", "ref_mel"} <= set(entry):
            raise ConfigError(f"Voice {name!r} in spk_dict.pt of {model!r} lacks bos_token, cond or ref_mel.")
    return voices


class RowTalkerAdapter(CodeTalkerAdapter):
    """Turns rows of the thinker into a vLLM request over codec tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.model_config.hf_config
        self._voices = tuple(load_voices(self.model_config.model))
        self.row_width = config.embedding_size
        self._mask: int = config.tts_codec_mask_token_id
        self._block: int = config.vocoder_block
        self._start: tuple[int, int] = (config.tts_codec_pad_token_id, config.tts_codec_start_token_id)
        # `talker_eos_token_id` of transformers' generate.
        self.end_token_ids = frozenset({config.tts_codec_pad_token_id, config.tts_codec_end_token_id})

    @property
    def facts(self) -> EngineFacts:
        """The checkpoint's voices, and the longest prompt that leaves room for an answer."""
        return EngineFacts(voices=self._voices, max_input_tokens=self.max_model_len - 3)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check rows, positions and voice.

        The prompt is a mask token per row, then the start, as in transformers: penalties count these tokens, too.
        """
        voice = self._voices.index(chosen_voice(request.voice, self._voices))
        self.check_names(inputs.tensors, ("prompt_rows", "reply_rows", "mrope_positions"))
        if "prompt_rows" not in inputs.tensors:
            raise InvalidPayload(f"The talker needs the tensor 'prompt_rows'; it got {sorted(inputs.tensors)}.")
        prompt = self.rows_of(inputs.tensors["prompt_rows"], "prompt_rows", minimum=2)
        n_prompt = prompt.shape[0] - 1
        reply = prompt[n_prompt:]
        if "reply_rows" in inputs.tensors:
            reply = torch.cat([reply, self.rows_of(inputs.tensors["reply_rows"], "reply_rows")])
        given = inputs.tensors.get("mrope_positions")
        positions = self.mrope_positions(given, n_prompt) if given is not None else None
        payload = RowTalkerPayload(prompt[:n_prompt], voice, reply, inputs.complete, positions)
        held_bytes = payload.prompt.nbytes + payload.reply.nbytes
        stream = RowStream(len(reply) - 1, inputs.complete, held_bytes, text_tokens=1)
        outputs = CodecOutputs(request.request_id, self.end_token_ids, self._block)
        return self.admitted(request, [self._mask] * n_prompt + [*self._start], outputs, stream, payload=payload)

    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        """Rows of the reply [n, H]. Raises `InvalidPayload`."""
        return self.rows_of(rows)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Rows of zeros for `length` positions and the first decode steps."""
        rows = torch.zeros(length, self.row_width, dtype=self.model_dtype)
        return StageInputs(tensors={"prompt_rows": to_host(rows), "reply_rows": to_host(rows[:4])})


ARCHITECTURE = "OmniActorsQwen2_5OmniTalker"

# Rows of the model's `text_rows` buffer; the voices' bos rows follow.
_TEXT_EOS, _TEXT_PAD, _FIRST_VOICE = 0, 1, 2


@served_as(ARCHITECTURE, "talker_config")
def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of the checkpoint's, in the shape of a Llama."""
    talker: PretrainedConfig = config.talker_config
    talker.dtype = talker.dtype or config.dtype
    talker.projection_dim = talker.embedding_size  # makes vLLM take prompt embeddings of the thinker's width
    # A Llama layer with these is the talker's layer; vLLM's Qwen2 layer has no head_dim of its own.
    talker.qkv_bias = True
    talker.mlp_bias = False
    vocoder = config.token2wav_config.dit_config
    talker.sounding_tokens = vocoder.num_embeds  # tokens that the vocoder can turn into sound
    talker.vocoder_block = vocoder.block_size // vocoder.repeats  # in tokens
    return talker


@support_torch_compile(dynamic_arg_dims=MROPE_DIMS)
class CodeTalkerDecoder(LlamaModel):
    """vLLM's Llama behind the projection of the thinker's rows, compiled for M-RoPE positions.

    The projection is compiled with it, because a piecewise CUDA graph reads its input at the address it had during
    capture: vLLM's runner keeps its embeddings in one buffer, the result of a separate projection could lie anywhere.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        del self.embed_tokens  # of the wrong width; the model's own is codec_embedding
        config = vllm_config.model_config.hf_config
        self.text_projection = ReplicatedLinear(config.embedding_size, config.hidden_size, bias=True, return_bias=False)

    # Narrower than a Llama's, which also passes keyword arguments for draft models to its layers.
    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [tokens, width] of input rows [tokens, H], or what the next pipeline rank needs."""
        if inputs_embeds is not None:
            inputs_embeds = self.text_projection(inputs_embeds)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


class Qwen2_5OmniTalker(CodeTalker, ContinuedPositions, SupportsPP):
    """The talker as a vLLM model."""

    decoder_class = CodeTalkerDecoder
    text_table_name = "thinker.model.embed_tokens.weight"
    text_rows: torch.Tensor

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "token2wav.": None,
            "talker.thinker_to_talker_proj.": "decoder.text_projection.",
            "talker.codec_head.": "codec_head.",
            "talker.model.embed_tokens.": "codec_embedding.",
            "talker.model.": "decoder.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        voices = load_voices(vllm_config.model_config.model)
        self.text_token_ids = [
            config.tts_text_end_token_id,
            config.tts_text_pad_token_id,
            *(int(voice["bos_token"]) for voice in voices.values()),
        ]
        # A buffer from the start: on the right device, and defined even without load_weights (dummy weights).
        self.register_buffer(
            "text_rows", torch.zeros(len(self.text_token_ids), config.embedding_size), persistent=False
        )
        # The start token, as in transformers, and tokens that neither are sound nor end the speech, on
        # which transformers' vocoder fails.
        never_sampled = torch.arange(config.vocab_size) >= config.sounding_tokens
        never_sampled[[config.tts_codec_end_token_id, config.tts_codec_pad_token_id]] = False
        never_sampled[config.tts_codec_start_token_id] = True
        self.register_buffer("never_sampled", never_sampled, persistent=False)
        self.codec_embedding = VocabParallelEmbedding(config.vocab_size, config.embedding_size)
        self.make_empty_intermediate_tensors = cast("CodeTalkerDecoder", self.decoder).make_empty_intermediate_tensors

    # The class by which vLLM's runner prepares this model's inputs.
    get_model_state_cls = staticmethod(lambda: TalkerModelState)

    def take_table(self, table: torch.Tensor) -> None:
        """Keep those rows of the thinker's table that the talker adds to its own input."""
        self.text_rows.copy_(table[self.text_token_ids])


@dataclass(slots=True)
class RowTalkerPayload:
    """The worker's part of a new request.

    Args:
        prompt: rows [P, H] of the positions without a codec token, in the model's dtype.
        voice: index among the checkpoint's voices.
        reply: reply rows [n >= 1, H] known at the start, in the model's dtype.
        positions: the thinker's M-RoPE positions i64 [3, P]; None for text prompts.
    """

    prompt: torch.Tensor = field(repr=False)  # vLLM prints requests when a step fails
    voice: int
    reply: torch.Tensor = field(repr=False)
    complete: bool
    positions: torch.Tensor | None = field(repr=False)


class TalkerModelState(TalkerState):
    """Adds the text side to the input embeddings of every step.

    The rows stay in host memory, where they arrived; one copy per step brings those of the whole batch to the device.
    Speech goes on long after its text has ended; the padding row for that is already on the device.
    """

    payload_class = RowTalkerPayload
    model: Qwen2_5OmniTalker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fixed_rows = self.model.text_rows.to("cpu", self.dtype).unbind()
        self.pad = self._fixed_rows[_TEXT_PAD]
        self._pad_row = self.model.text_rows[_TEXT_PAD].to(self.dtype)  # on the device

    def begin(self, payload: RowTalkerPayload) -> Speech[torch.Tensor]:
        """See `TalkerState`."""
        speech = Speech(len(payload.prompt), (self._fixed_rows[_TEXT_EOS],))
        speech.extend((self._fixed_rows[_FIRST_VOICE + payload.voice], *payload.reply.unbind()), payload.complete)
        return speech

    def prompt_inputs(self, payload: RowTalkerPayload) -> torch.Tensor:
        """See `TalkerState`."""
        return async_tensor_h2d(payload.prompt, device=self.device)

    def pieces(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each row."""
        return rows.unbind()

    def last_codes(self, batch: InputBatch) -> torch.Tensor:
        """See `TalkerState`."""
        return self.model.embed_input_ids(batch.input_ids[: batch.num_reqs])

    def text_rows(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `TalkerState`."""
        if all(piece is self.pad for piece in pieces):
            return self._pad_row
        return async_tensor_h2d(torch.stack(list(pieces)), device=self.device)


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: Qwen2_5OmniTalker},
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The defaults of transformers' Qwen2_5OmniForConditionalGeneration.generate.
    params=StageParams(max_tokens=4096, temperature=0.9, top_p=0.8, top_k=40, repetition_penalty=1.05),
    steps_per_schedule=4,  # a third of a block of the vocoder, which cannot use less
    speech_limit=SpeechLimit(150, 75),  # 3 s, and 1.5 s for each token of text, at 50 codes a second
    adapter="omni_actors.engine.models.qwen2_5_omni.talker.RowTalkerAdapter",
)
