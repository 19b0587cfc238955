"""Qwen3-TTS's talker, and the adapter that feeds it.

`prompt.py` says what the positions of its prompt are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer
from vllm.model_executor.models.qwen3 import Qwen3Model

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models import ModelSpec, SpeechLimit
from omni_actors.engine.models.code_talker import chosen_voice, text_of, text_to_speak, tokens_of
from omni_actors.engine.models.frame_talker import NO_CODE, FrameOutputs, FrameTalker, FrameTalkerAdapter
from omni_actors.engine.models.qwen3_tts.clip_encoder import ClipEncoder, clip_frames
from omni_actors.engine.models.qwen3_tts.prompt import (
    ARCHITECTURE,
    SAMPLE_RATE,
    lay_out,
    sampling_defaults,
    talker_config,
)
from omni_actors.engine.rows import to_torch
from omni_actors.errors import InvalidRequest, UnknownVoice
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import (
    AUTO,
    CLIP,
    CLIP_RATE,
    INSTRUCTIONS,
    LANGUAGE,
    SPEECH_INFORMATION,
    TRANSCRIPT,
    InformationValue,
    SpeechAbility,
    StageParams,
)
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

TURN = "<|im_start|>assistant\n"
OPENING, CLOSING = 3, 5  # tokens around a text in the form that the model was trained with
CLIP_CLOSING = 2
SMALL = "0b6"  # the size that follows no instructions
MIN_CLIP, MAX_CLIP = 0.5, 30.0  # seconds
CLIP_RATES = range(8000, 192_001)
LEAST_CODES = 2  # that are sampled before the one that ends the speech


class TextTalkerAdapter(FrameTalkerAdapter):
    """Turns a text, and what says how to speak it, into a vLLM request over first codes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, model = self.config, self.vllm_config.model_config.model
        self.defaults = sampling_defaults(model)[0].merged_over(self.defaults)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._voices: dict[str, int] = config.voices if config.tts_kind == "custom_voice" else {}
        self._languages = tuple(name for name in config.languages if "dialect" not in name)
        self._clips: ClipEncoder | None = None
        if config.tts_kind == "base":
            dummy = self.vllm_config.load_config.load_format == "dummy"
            groups = config.predictor_config.num_code_groups
            self._clips = ClipEncoder(model, config.speaker_encoder, groups, dummy=dummy)

    @property
    def _instructions(self) -> Literal["none", "optional", "required"]:
        if self.config.tts_kind == "voice_design":
            return "required"
        return "optional" if self.config.tts_kind == "custom_voice" and self.config.tts_size != SMALL else "none"

    @property
    def facts(self) -> EngineFacts:
        """The voices and languages, and what a request has to say besides its text."""
        return EngineFacts(
            voices=tuple(self._voices),
            max_input_tokens=self.max_model_len - 1,
            wants_information=SPEECH_INFORMATION,
            speech=SpeechAbility(
                languages=self._languages,
                instructions=self._instructions,
                clip="required" if self._clips is not None else "none",
                min_clip_seconds=MIN_CLIP,
                max_clip_seconds=MAX_CLIP,
                text_in_parts=True,
            ),
        )

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check text, language, voice, instructions and clip; the prompt is a pad per position."""
        given = request.information
        if foreign := sorted(set(given) - set(SPEECH_INFORMATION)):
            raise InvalidRequest(
                f"The talker takes no information named {foreign}; it takes {list(SPEECH_INFORMATION)}."
            )
        opening, text = self._spoken(inputs)
        clip, rate, clip_text, frames = self._clip(given) if inputs.prompt is not None else NO_CLIP
        if frames and inputs.in_parts:
            raise InvalidRequest(
                "The voice of a recording with a transcript speaks whole texts only.",
                hint="Send the whole text, or a voice without a transcript.",
                field="voice",
            )
        voice = self._voice(request.voice)
        payload = lay_out(
            self.config,
            opening=opening,
            text=text,
            instructions=self._instructed(given) if inputs.prompt is not None else (),
            language=self._language(given, voice),
            voice=self._voices[voice] if voice is not None else NO_CODE if clip is not None else None,
            clip_text=clip_text,
            clip_frames=frames,
            in_parts=inputs.in_parts,
            complete=inputs.complete,
        )
        outputs = FrameOutputs(request.request_id)

        def encode() -> None:
            if self._clips is not None and clip is not None:
                payload.voice, codes = self._clips(clip, rate)
                if frames:
                    payload.clip = codes
                    outputs.lead(codes.flatten().tolist())

        params = request.params.merged_over(self.defaults)
        if params.min_tokens is None and params.max_tokens is not None:
            params = StageParams(min_tokens=min(LEAST_CODES, params.max_tokens)).merged_over(params)
        text_tokens = len(text) - len(payload.following)  # most kinds have all of them in the prompt
        work = encode if clip is not None else None
        return self.speak(request, payload, outputs, text_tokens, params=params, work=work)

    def read_text(self, text: str) -> torch.Tensor:
        """Text ids i32 [n, 1]."""
        return torch.tensor(self._part_ids(text), dtype=torch.int32).unsqueeze(1)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """A text of `length` tokens, without voice or instructions."""
        return StageInputs(token_ids=[0] * (OPENING + length + CLOSING))

    # -- checks

    def _spoken(self, inputs: StageInputs) -> tuple[list[int], list[int]]:
        """The ids that open the turn, and those of the text to speak, in the form that the model was trained with."""
        if inputs.prompt is None:  # the warm-up
            return list(inputs.token_ids[:OPENING]), list(inputs.token_ids[OPENING:-CLOSING])
        spoken = text_to_speak(inputs.prompt)
        if inputs.in_parts:
            return self._tokenizer(TURN)["input_ids"], self._part_ids(spoken)
        ids = self._tokens(f"{TURN}{spoken}<|im_end|>\n{TURN}", "input", OPENING + CLOSING)
        return ids[:OPENING], ids[OPENING:-CLOSING]

    def _part_ids(self, text: str) -> list[int]:
        """The ids of a part of a text, in which nothing is a special token."""
        ids: list[int] = self._tokenizer(text, split_special_tokens=True)["input_ids"]
        return ids

    def _tokens(self, text: str, field: str, around: int) -> list[int]:
        """Token ids; all but `around` are the client's text."""
        return tokens_of(self._tokenizer, text, field, self.max_model_len, around)

    def _instructed(self, given: Mapping[str, InformationValue]) -> list[int]:
        """The ids of the instructions, as a turn of the user; none without instructions."""
        text = text_of(given, INSTRUCTIONS)
        if text is None:
            if self._instructions == "required":
                raise InvalidRequest(
                    "instructions: this checkpoint needs a description of the voice.",
                    hint="Say in instructions who speaks, and how.",
                    field="instructions",
                )
            return []
        if self._instructions == "none":
            raise InvalidRequest(
                "instructions: this checkpoint follows none.",
                hint="Leave them out, or use a VoiceDesign checkpoint, or CustomVoice of 1.7B.",
                field="instructions",
            )
        return self._tokens(f"<|im_start|>user\n{text}<|im_end|>\n", "instructions", OPENING + CLIP_CLOSING)

    def _language(self, given: Mapping[str, InformationValue], voice: str | None) -> int | None:
        """The code of the language; `None` for the model to find out. Some voices speak a dialect of Chinese."""
        name = (text_of(given, LANGUAGE) or AUTO).lower()
        if name != AUTO and name not in self._languages:
            raise InvalidRequest(
                f"language: there is no {name[:64]!r}; the languages are {', '.join((AUTO, *self._languages))}.",
                hint="Choose one of them, or leave it out.",
                field="language",
            )
        if name in (AUTO, "chinese") and voice in self.config.dialects:
            name = self.config.dialects[voice]
        code: int | None = self.config.languages.get(name)
        return code

    def _voice(self, name: str | None) -> str | None:
        """The name of one of the checkpoint's voices, the first where none is given; `None` if it has none."""
        if not self._voices:
            if name is not None:
                what = "takes the voice of a clip" if self._clips is not None else "speaks as its instructions say"
                raise UnknownVoice(
                    f"There is no voice {name[:64]!r}: this checkpoint has none, it {what}.",
                    hint="Leave the voice out, or use a CustomVoice checkpoint.",
                    field="voice",
                )
            return None
        return chosen_voice(name.lower() if name is not None else None, self._voices)

    def _clip(self, given: Mapping[str, InformationValue]) -> Clip:
        """The clip whose voice is to speak."""
        if self._clips is None:
            for field in (CLIP, CLIP_RATE, TRANSCRIPT):
                if field in given:
                    raise InvalidRequest(
                        f"{field}: this checkpoint cannot speak with the voice of a clip.",
                        hint="Leave it out, or use a Base checkpoint.",
                        field=field,
                    )
            return NO_CLIP
        samples, rate = _samples_of(given)
        transcript = text_of(given, TRANSCRIPT)
        if transcript is None:
            return Clip(samples, rate, [], 0)
        text = f"{TURN}{transcript}<|im_end|>\n"
        ids = self._tokens(text, "transcript", OPENING + CLIP_CLOSING)[OPENING:-CLIP_CLOSING]
        return Clip(samples, rate, ids, clip_frames(len(samples), rate, self._clips.samples_per_frame))


class Clip(NamedTuple):
    """A clip f32 [samples] at `rate` Hz; its text and how many frames it has, if it is to be continued."""

    samples: np.ndarray | None
    rate: int
    text: list[int]
    frames: int


NO_CLIP = Clip(None, SAMPLE_RATE, [], 0)


def _samples_of(given: Mapping[str, InformationValue]) -> tuple[np.ndarray, int]:
    """The clip's samples f32 [n], and its rate."""
    clip, rate = given.get(CLIP), given.get(CLIP_RATE)
    if not isinstance(clip, HostTensor):
        raise InvalidRequest(
            "clip: this checkpoint speaks with the voice of a clip, and none was sent.",
            hint=f"Send {MIN_CLIP:g} to {MAX_CLIP:g} s of one person's speech, f32 [samples], and its clip_rate.",
            field="clip",
        )
    if isinstance(rate, bool) or not isinstance(rate, int) or rate not in CLIP_RATES:
        raise InvalidRequest(
            f"clip_rate: must be a whole number of Hz from {CLIP_RATES[0]} to {CLIP_RATES[-1]}; got {rate!r}.",
            field="clip_rate",
        )
    clip.validate("clip")
    if clip.dtype is not DType.F32 or len(clip.shape) != 1:
        raise InvalidRequest(f"clip: must be f32 [samples]; got {clip.dtype} {list(clip.shape)}.", field="clip")
    seconds = clip.shape[0] / rate
    if not MIN_CLIP <= seconds <= MAX_CLIP:
        raise InvalidRequest(
            f"clip: it lasts {seconds:.1f} s; {MIN_CLIP:g} to {MAX_CLIP:g} s are allowed.", field="clip"
        )
    samples = to_torch(clip, "clip").numpy().copy()  # the memory is the sender's
    if not np.isfinite(samples).all() or np.abs(samples).max() > 1:
        raise InvalidRequest("clip: its samples must be finite and lie in -1..1.", field="clip")
    if not samples.any():
        raise InvalidRequest("clip: it is silent.", hint="Send speech.", field="clip")
    return samples, rate


class Qwen3TtsTalker(FrameTalker):
    """The talker as a vLLM model."""

    decoder_class = Qwen3Model
    text_table_name = "talker.model.text_embedding.weight"


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: Qwen3TtsTalker},
    # Prompt embeddings give the model its own input buffer; none are ever sent.
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The defaults of Qwen's package, for a checkpoint without its own (`sampling_defaults`).
    params=StageParams(max_tokens=2048, temperature=0.9, top_p=1.0, top_k=50, repetition_penalty=1.05),
    speech_limit=SpeechLimit(38, 19),  # 3 s, and 1.5 s for each token of text, at 12.5 frames a second
    adapter="omni_actors.engine.models.qwen3_tts.talker.TextTalkerAdapter",
)
