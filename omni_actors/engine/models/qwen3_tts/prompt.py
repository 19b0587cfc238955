"""Qwen3-TTS's prompt, and what its checkpoint says of speakers and languages.

i positions     instructions, as a turn of the user
    3               the tokens that open the assistant's turn
    3 to 5          tts_pad + think or nothink, think_bos, the language if one is named, think_eos, the voice if there
                    is one
    1               tts_bos + codec_pad

then, where the text is known at the start (voices of the checkpoint, voices that are described):

    t + 1           text and tts_eos + codec_pad
    1               tts_pad + codec_bos                         frame k: tts_pad

where it is read while it is spoken (the voice of a clip; a text that comes in parts):

    1               text 0 + codec_bos                          frame k: text k + 1, then tts_eos, then tts_pad

where the clip is continued (T the clip's text, the text and tts_eos; C the clip's frames):

    1 + C           T, then tts_pad + codec_bos, C              frame k: what is left of T, then tts_pad
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig, Qwen3Config

from omni_actors.config.checkpoint import read_json_object
from omni_actors.engine.models import served_as
from omni_actors.engine.models.diffusers_layout import checkpoint_file
from omni_actors.engine.models.frame_talker import NO_CODE, FramePayload
from omni_actors.errors import ConfigError, StartupError
from omni_actors.protocol.payloads import StageParams

CODEC_FOLDER = "speech_tokenizer"
ARCHITECTURE = "OmniActorsQwen3TtsTalker"
CODEC = "qwen3_tts_tokenizer_12hz"
KINDS = ("custom_voice", "voice_design", "base")
SAMPLE_RATE = 24_000  # Hz, of the speaker encoder and of the codec


class Qwen3TtsConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is not followed
    """The whole model's, with its parts as they are in the file."""

    model_type = "qwen3_tts"


AutoConfig.register(Qwen3TtsConfig.model_type, Qwen3TtsConfig, exist_ok=True)


def codec_config(model: str) -> dict[str, Any]:
    """The configuration of the codec.

    Raises:
        StartupError: it is missing, or is that of another codec.
        ConfigError: it is no JSON object.
    """
    config = read_json_object(checkpoint_file(model, f"{CODEC_FOLDER}/config.json"))
    if config.get("model_type") != CODEC:
        raise StartupError(
            f"The codec of {model!r} is {config.get('model_type')!r}; this model needs {CODEC!r}.",
            hint="Use a checkpoint whose name has 12Hz in it.",
        )
    return config


def sampling_defaults(model: str) -> tuple[StageParams, dict[str, Any]]:
    """What the checkpoint's generation_config.json says: of the talker, and of the code predictor."""
    given = read_json_object(checkpoint_file(model, "generation_config.json"))

    def drawn(prefix: str, sample: str) -> dict[str, Any]:
        found = {name: given[prefix + name] for name in ("temperature", "top_k", "top_p") if prefix + name in given}
        return found if given.get(sample, True) else found | {"top_k": 1}

    talker = drawn("", "do_sample")
    if "repetition_penalty" in given:
        talker["repetition_penalty"] = given["repetition_penalty"]
    if "max_new_tokens" in given:
        talker["max_tokens"] = given["max_new_tokens"]
    return StageParams(**talker), drawn("subtalker_", "subtalker_dosample")


@served_as(ARCHITECTURE, "talker_config")
def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of the checkpoint's, in the shape of a dense Qwen3.

    Its positions are one number each: the three of the published configuration are always equal.

    Raises:
        ConfigError: the checkpoint is of a kind that this family does not know.
    """
    if config.tts_model_type not in KINDS:
        raise ConfigError(f"tts_model_type {config.tts_model_type!r} of the checkpoint is none of {', '.join(KINDS)}.")
    talker = config.talker_config
    text = _qwen3(talker)
    text.dtype = config.dtype or "bfloat16"
    text.predictor_config = _qwen3(talker["code_predictor_config"])
    text.predictor_sampling = sampling_defaults(config.name_or_path)[1]
    text.text_sizes = [talker["text_vocab_size"], talker["text_hidden_size"], talker["text_hidden_size"]]
    text.text_bos, text.text_eos = config.tts_bos_token_id, config.tts_eos_token_id
    text.text_pad = config.tts_pad_token_id
    text.codec_end, text.codec_pad, text.codec_bos = (
        talker[f"codec_{name}_id"] for name in ("eos_token", "pad", "bos")
    )
    text.codec_think = [talker[f"codec_{name}_id"] for name in ("think", "nothink", "think_bos", "think_eos")]
    text.languages = {name.lower(): code for name, code in (talker.get("codec_language_id") or {}).items()}
    text.voices = {name.lower(): code for name, code in (talker.get("spk_id") or {}).items()}
    text.dialects = {name.lower(): spoken for name, spoken in (talker.get("spk_is_dialect") or {}).items() if spoken}
    text.tts_kind, text.tts_size = config.tts_model_type, config.tts_model_size
    text.speaker_encoder = config.speaker_encoder_config
    return text


def _qwen3(given: dict[str, Any]) -> Qwen3Config:
    """A part's configuration as transformers' Qwen3, with plain rotary positions, and fields of its own."""
    own = {name: value for name, value in given.items() if name not in ("model_type", "rope_scaling", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": float(given.get("rope_theta", 10_000))}
    return Qwen3Config(**own, rope_parameters=rope, tie_word_embeddings=False)


def lay_out(
    config: PretrainedConfig,
    *,
    opening: Sequence[int],
    text: Sequence[int],
    instructions: Sequence[int] = (),
    language: int | None = None,
    voice: int | None = None,
    clip_text: Sequence[int] = (),
    clip_frames: int = 0,
    in_parts: bool = False,
    complete: bool = True,
) -> FramePayload:
    """Lay out the prompt of one request. What is made of a clip, its voice and its frames, comes later.

    Args:
        opening: the three tokens that open the assistant's turn.
        language: its code; `None` for the model to find out.
        voice: its code; `NO_CODE` for that of a clip, `None` for none.
        clip_frames: of the clip that is continued, whose text is `clip_text`; 0 to start afresh.
        in_parts: `text` is the beginning of it; `complete` if no more will come.
    """
    think, nothink, think_bos, think_eos = config.codec_think
    heard = [nothink, think_bos, think_eos] if language is None else [think, think_bos, language, think_eos]
    at: dict[str, Any] = {"voice_at": len(instructions) + len(opening) + len(heard)}
    heard += [voice] if voice is not None else []
    pad, eos = config.text_pad, config.text_eos
    texts = [*instructions, *opening, *[pad] * len(heard), config.text_bos]
    codes = [*heard, config.codec_pad]
    at["clip_at"] = len(texts) + 1
    if clip_frames:
        spoken = [*clip_text, *text, eos]
        length = 1 + clip_frames
        texts += [*spoken[:length], *[pad] * (length - len(spoken))]
        codes += [config.codec_bos, *[NO_CODE] * clip_frames]
        return FramePayload(texts, codes, spoken[length:], complete, **at)
    if voice == NO_CODE or in_parts:
        texts.append(text[0])
        codes.append(config.codec_bos)
        return FramePayload(texts, codes, list(text[1:]), complete, (eos,), **at)
    texts += [*text, eos, pad]
    codes += [*[config.codec_pad] * (len(text) + 1), config.codec_bos]
    return FramePayload(texts, codes, [], complete, **at)
