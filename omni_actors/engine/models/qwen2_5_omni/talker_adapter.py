"""Thinker rows -> vLLM requests of the talker, and vLLM's outputs -> codec tokens for the vocoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as VllmFinishReason

from omni_actors.engine.adapter import Admission, AutoregressiveAdapter, RequestOutputs
from omni_actors.engine.core import make_request
from omni_actors.engine.models.qwen2_5_omni.talker import CodeTalkerPayload
from omni_actors.engine.models.qwen2_5_omni.voices import load_voices
from omni_actors.engine.sampling import make_sampling_params
from omni_actors.engine.scheduler import RowStream
from omni_actors.engine.tensors import check_rows, to_host, to_torch
from omni_actors.errors import InvalidPayload, UnknownVoice
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, StageInputs, StageRequest, StreamEvent


class CodecOutputs(RequestOutputs):
    """Codec tokens of one request as a stream. The token that ends the speech is not sound and is left out.

    Tokens are sent when they complete a block of the vocoder, which cannot use less: a message per token and request
    would cost the engine's thread more time than the step that makes the tokens.

    Args:
        block: codec tokens per block.
    """

    def __init__(self, request_id: str, end_token_ids: frozenset[int], block: int) -> None:
        self._request_id = request_id
        self._end_token_ids = end_token_ids
        self._block = block
        self._sent = 0
        self._generated = 0  # since the last event, with the token that ends the speech
        self._held: list[int] = []

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """One event per block of codec tokens, and the rest with the last; an end token is left out."""
        tokens = list(output.new_token_ids)
        finished = output.finish_reason is not None
        self._generated += len(tokens)
        if output.finish_reason is VllmFinishReason.STOP and tokens and tokens[-1] in self._end_token_ids:
            tokens.pop()
        self._held += tokens
        if len(self._held) < self._block and not finished:
            return ()
        event = StreamEvent(
            self._request_id, token_ids=self._held, start=self._sent, final=finished, generated=self._generated
        )
        self._sent += len(self._held)
        self._held, self._generated = [], 0
        return (event,)


class CodeTalkerAdapter(AutoregressiveAdapter):
    """Turns rows of the thinker into a vLLM request over codec tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.model_config.hf_config
        self._voices = tuple(load_voices(self.model_config.model))
        self.row_width: int = config.embedding_size
        self.row_dtype = self.model_dtype
        self._mask: int = config.tts_codec_mask_token_id
        self._block: int = config.vocoder_block
        self._start: tuple[int, int] = (config.tts_codec_pad_token_id, config.tts_codec_start_token_id)
        # `talker_eos_token_id` of transformers' generate.
        self.end_token_ids = frozenset({config.tts_codec_pad_token_id, config.tts_codec_end_token_id})
        # vLLM keeps a rotary table of four times this many positions for M-RoPE; beyond it the device would fault.
        self._max_position: int = 4 * config.max_position_embeddings - self.max_model_len

    @property
    def facts(self) -> EngineFacts:
        """The checkpoint's voices, and the longest prompt that leaves room for an answer."""
        return EngineFacts(voices=self._voices, max_input_tokens=self.max_model_len - 3)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check rows, positions and voice.

        The prompt is a mask token per row, then the start, as in transformers: penalties count these tokens, too.
        """
        voice = self._voice_index(request.voice)
        given = dict(inputs.tensors)
        prompt = self._tensor(given, "prompt_rows", minimum=2)
        n_prompt = prompt.shape[0] - 1
        token_ids = [self._mask] * n_prompt + [*self._start]
        self.check_length(len(token_ids))
        reply = [prompt[n_prompt:]]
        if "reply_rows" in given:
            reply.append(self._tensor(given, "reply_rows"))
        positions = self._positions(given.pop("mrope_positions", None), n_prompt)
        if given:
            raise InvalidPayload(f"The talker takes no tensors named {sorted(given)}.")
        payload = CodeTalkerPayload(prompt[:n_prompt], voice, torch.cat(reply), inputs.complete, positions)
        params = request.params.merged_over(self.defaults)
        sampling = make_sampling_params(
            params,
            seed=request.effective_seed,
            end_token_ids=self.end_token_ids,
            vocabulary=self.vocabulary,
            payload=payload,
        )
        core_request = make_request(request.request_id, token_ids, sampling, priority=request.priority)
        held_bytes = payload.prompt.nbytes + payload.reply.nbytes
        stream = RowStream(payload.reply.shape[0] - 1, inputs.complete, held_bytes, text_tokens=1)
        return Admission(core_request, CodecOutputs(request.request_id, self.end_token_ids, self._block), stream)

    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        """Reply rows [n, H] on the CPU in the model's dtype. Raises `InvalidPayload`."""
        check_rows(rows, self.row_width, "reply rows")
        return to_torch(rows).to(self.row_dtype)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Rows of zeros for `length` positions and the first decode steps."""
        rows = torch.zeros(length, self.row_width, dtype=self.row_dtype)
        return StageInputs(tensors={"prompt_rows": to_host(rows), "reply_rows": to_host(rows[:4])})

    def _tensor(self, tensors: dict[str, HostTensor], name: str, *, minimum: int = 0) -> torch.Tensor:
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise InvalidPayload(f"The talker needs the tensor {name!r}; it got {sorted(tensors)}.")
        check_rows(tensor, self.row_width, name, minimum=minimum)
        return to_torch(tensor, name).to(self.row_dtype)

    def _voice_index(self, voice: str | None) -> int:
        if voice is None:
            return 0
        if voice not in self._voices:
            raise UnknownVoice(f"There is no voice {voice!r}; the voices are {', '.join(self._voices)}.")
        return self._voices.index(voice)

    def _positions(self, tensor: HostTensor | None, length: int) -> torch.Tensor | None:
        if tensor is None:
            return None
        if tensor.dtype is not DType.I64 or tuple(tensor.shape) != (3, length):
            raise InvalidPayload(f"mrope_positions: needs i64 [3, {length}]; got {tensor.dtype} {list(tensor.shape)}.")
        positions = to_torch(tensor, "mrope_positions")
        if int(positions.min()) < 0 or int(positions.max()) >= self._max_position:
            raise InvalidPayload(f"mrope_positions: values must lie in [0, {self._max_position}).")
        return positions
