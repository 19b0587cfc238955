"""Qwen3-Omni's talker, and the adapter that feeds it.

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

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models import ModelSpec, SpeechLimit, served_as
from omni_actors.engine.models.code_talker import MROPE_DIMS, ContinuedPositions, chosen_voice
from omni_actors.engine.models.frame_talker import (
    FrameOutputs,
    FramePayload,
    FrameTalker,
    FrameTalkerAdapter,
    Projection,
)
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

HEADER = 3  # tokens that open the assistant's turn
OPENING = 6  # positions between them and the first frame


DEFAULT_VOICE = "ethan"  # of transformers' generate, where the checkpoint has it


class TalkerAdapter(FrameTalkerAdapter):
    """Turns the thinker's tokens, and its states at places of media, into a vLLM request over first codes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row_width = self.config.thinker_hidden_size
        voices: dict[str, int] = self.config.speaker_id
        self._voices = sorted(voices, key=lambda name: name != DEFAULT_VOICE)
        self._turn, self._user, self._assistant = self.config.turn_ids
        self._media_ids = frozenset(self.config.media_ids)
        # Of images and videos, whose positions have three dimensions.
        self._seen_ids = frozenset(self.config.media_ids[1:])

    @property
    def facts(self) -> EngineFacts:
        """The checkpoint's voices, the default first, and the longest prompt that leaves room for an answer."""
        return EngineFacts(voices=tuple(self._voices), max_input_tokens=self.max_model_len - OPENING - 1)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check tokens, media, positions and voice; the prompt is a pad per position."""
        voice, config = self.config.speaker_id[chosen_voice(request.voice, self._voices)], self.config
        token_ids = self._checked(inputs.token_ids)
        n_prompt = inputs.scalars.get("prompt_tokens")
        if isinstance(n_prompt, bool) or not isinstance(n_prompt, int) or not 0 < n_prompt < len(token_ids):
            raise InvalidPayload(f"prompt_tokens: must lie in 1..{len(token_ids) - 1}; got {n_prompt!r}.")
        self.check_names(inputs.tensors, ("media_rows", "mrope_positions"))
        prompt = token_ids[:n_prompt]
        begin = self._reply_turn(prompt)
        turns = self._users_turns(prompt)
        kept = [position for turn in turns for position in turn]
        media, places = self._media(inputs.tensors.get("media_rows"), prompt, kept)
        first, *following = token_ids[begin + HEADER :]
        seen = [*(prompt[index] for index in kept), *prompt[begin : begin + HEADER]]
        payload = FramePayload(
            texts=[*seen, *[config.text_pad] * 4, config.text_bos, first],
            codes=[*config.codec_start, voice, config.codec_pad, config.codec_bos],
            following=following,
            complete=inputs.complete,
            ending=(config.text_eos,),
            media=media,
            places=places,
            positions=self._positions(inputs.tensors.get("mrope_positions"), prompt, turns),
        )
        return self.speak(request, payload, FrameOutputs(request.request_id), text_tokens=1)

    def read_tokens(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Text ids i32 [n, 1]. Raises `InvalidPayload`."""
        return torch.tensor(self._checked(token_ids), dtype=torch.int32).unsqueeze(1)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """A user's turn of `length` tokens, and the text of the first frames."""
        prompt = [self._turn, self._user, *[0] * length, self._turn, self._assistant, 0]
        return StageInputs(token_ids=[*prompt, *[0] * 4], scalars={"prompt_tokens": len(prompt)})

    # -- checks

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """Text ids that lie in the thinker's vocabulary."""
        if beyond := [token for token in token_ids if not 0 <= token < self.config.thinker_vocab_size]:
            raise InvalidPayload(
                f"Token ids {beyond[:8]} are outside the thinker's vocabulary of {self.config.thinker_vocab_size}."
            )
        return list(token_ids)

    def _reply_turn(self, prompt: list[int]) -> int:
        """Where the last turn of the assistant begins, with the three tokens that open it."""
        for index in range(len(prompt) - HEADER, -1, -1):
            if prompt[index] == self._turn and prompt[index + 1] == self._assistant:
                return index
        raise InvalidRequest(
            "The prompt opens no turn of the assistant, so there is nothing to speak in.",
            hint="Send messages, or a prompt in the form of the chat template; or ask for text alone.",
        )

    def _users_turns(self, prompt: list[int]) -> list[range]:
        """Positions of each of the user's turns; the talker sees no others."""
        starts = [index for index, token in enumerate(prompt) if token == self._turn]
        ends = [*starts[1:], len(prompt)]
        turns = (range(start, end) for start, end in zip(starts, ends, strict=True))
        return [turn for turn in turns if len(turn) > 1 and prompt[turn[1]] == self._user]

    def _media(
        self, rows: HostTensor | None, prompt: list[int], kept: list[int]
    ) -> tuple[torch.Tensor | None, list[int]]:
        """The rows for media in the user's turns, and their places among the positions that are kept."""
        places = [position for position, token in enumerate(prompt) if token in self._media_ids]
        given = 0 if rows is None else rows.shape[0] if rows.shape else -1
        if given != len(places):
            raise InvalidPayload(f"media_rows: the prompt has {len(places)} places of media; got {given} rows.")
        if rows is None:
            return None, []
        media = self.rows_of(rows, "media_rows")
        number = {position: index for index, position in enumerate(places)}
        seen = [(place, number[position]) for place, position in enumerate(kept) if position in number]
        if not seen:
            return None, []
        return media[[row for _, row in seen]], [place for place, _ in seen]

    def _positions(self, tensor: HostTensor | None, prompt: list[int], turns: list[range]) -> torch.Tensor | None:
        """The thinker's positions i64 [3, U] of the user's turns, moved together.

        A turn begins with text, which has the same position in all three dimensions, one after the largest before it.
        """
        if tensor is None:
            if self._seen_ids.isdisjoint(prompt):
                return None
            raise InvalidPayload("mrope_positions: a prompt with images or videos needs them.")
        positions = self.mrope_positions(tensor, len(prompt))
        moved, following = [positions[:, :0]], 0
        for turn in turns:
            own = positions[:, turn.start : turn.stop]
            moved.append(own - own[:, :1] + following)
            following = int(moved[-1].max()) + 1
        return torch.cat(moved, dim=1)


ARCHITECTURE = "OmniActorsQwen3OmniTalker"


@served_as(ARCHITECTURE, "thinker_config")
def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of the checkpoint's, in the shape of a Qwen3 with experts.

    Raises:
        ConfigError: the checkpoint has a thinker only.
    """
    talker = getattr(config, "talker_config", None)
    if talker is None or not getattr(config, "enable_audio_output", True):
        raise ConfigError(
            "This checkpoint has no talker: it answers in text only.",
            hint="Leave the stages after the thinker out of the YAML, or use an Instruct checkpoint.",
        )
    text = talker.text_config
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


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: Qwen3OmniTalker},
    # Prompt embeddings give the model its own input buffer; none are ever sent.
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The defaults of transformers' Qwen3OmniMoeForConditionalGeneration.generate.
    params=StageParams(max_tokens=4096, temperature=0.9, top_p=1.0, top_k=50, repetition_penalty=1.05),
    speech_limit=SpeechLimit(38, 19),  # 3 s, and 1.5 s for each token of text, at 12.5 frames a second
    adapter="omni_actors.engine.models.qwen3_omni.talker.TalkerAdapter",
)
