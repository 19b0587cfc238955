"""Configurations of Qwen3-TTS checkpoints.

The names and the defaults are those of Qwen's package `qwen-tts`. The sizes of the published 1.7B and 0.6B (28 layers,
their widths, the ids of codes, voices and languages, the codec's sizes) are not in that package; they are from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.checkpoints.qwen3_omni.configuration import CODE_GROUPS, FULL_CODEC, CodecTokens, tiny_codec
from tools.checkpoints.qwen3_omni.tokens import ROLES, make_layout, tiny_layout
from tools.checkpoints.tokenizer import TokenLayout

ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
KINDS = ("custom_voice", "voice_design", "base")
SIZES = ("1b7", "0b6")
SAMPLES_PER_FRAME = 1920
FULL_TOKENS = make_layout(151936, 151643, ROLES)
LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
    "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}
VOICES = {
    "serena": 3066,
    "vivian": 3065,
    "uncle_fu": 3010,
    "ryan": 3061,
    "aiden": 2861,
    "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875,
    "dylan": 2878,
}
DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}  # what a voice speaks instead of Chinese
TINY_VOICES = ("vivian", "ryan", "eric")
SAMPLING: dict[str, Any] = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}
TINY_SPEAKER_ENCODER = {
    "mel_dim": 128,
    "enc_channels": [32, 32, 32, 32, 96],
    "enc_attention_channels": 8,
    "enc_res2net_scale": 4,
    "enc_se_channels": 8,
}


@dataclass(frozen=True)
class TinySizes:
    """What may differ between tiny checkpoints; the defaults are those of the ones that all tests share."""

    vocabulary: int = 512  # of texts
    sounds: int = 128  # codes of each codebook
    head_width: int = 32  # of talker and predictor
    width: int = 64
    text_width: int = 80
    heads: int = 4
    kv_heads: int = 2
    layers: int = 3
    predictor_width: int = 48  # not the talker's, as in the 1.7B: between the two lies a projection
    predictor_layers: int = 2
    decoder_width: int = 48
    decoder_heads: int = 4
    decoder_layers: int = 2
    latent_width: int = 64
    window: int = 8  # frames that the decoder's attention sees
    channels: int = 64  # of the decoder's first layer of sound

    @property
    def layout(self) -> TokenLayout:
        """Returns the ids of texts."""
        return tiny_layout(self.vocabulary)

    @property
    def codec(self) -> CodecTokens:
        """Returns the ids of codes."""
        return tiny_codec(self.sounds)

    @property
    def layers_of_qwen(self) -> dict[str, int]:
        """Returns what the layers of talker and predictor have in common."""
        return {
            "intermediate_size": 96,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
        }

    @property
    def decoder(self) -> dict[str, int]:
        """Returns the configuration of the codec's decoder."""
        return {
            "codebook_size": self.sounds,
            "hidden_size": self.decoder_width,
            "latent_dim": self.latent_width,
            "codebook_dim": 32,
            "intermediate_size": 96,
            "num_hidden_layers": self.decoder_layers,
            "num_attention_heads": self.decoder_heads,
            "num_key_value_heads": self.decoder_heads,
            "head_dim": 16,
            "sliding_window": self.window,
            "decoder_dim": self.channels,
            "max_position_embeddings": 2000,
        }

    @property
    def encoder(self) -> dict[str, int]:
        """Returns the configuration of the codec's encoder."""
        return {
            "codebook_size": self.sounds,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "hidden_size": 32,
            "num_filters": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_quantizers": CODE_GROUPS,
            "upsample_groups": 32,
            "sliding_window": 4,  # the reference does without a window: whoever keeps it hears the difference
        }


TINY = TinySizes()
FULL_TALKERS: Mapping[str, dict[str, Any]] = {
    "1b7": {"hidden_size": 2048, "intermediate_size": 6144},
    "0b6": {"hidden_size": 1024, "intermediate_size": 3072},
}
FULL_TALKER = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "text_hidden_size": 2048,
    "max_position_embeddings": 32768,
}
FULL_PREDICTOR = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}
FULL_DECODER = {
    "codebook_size": FULL_CODEC.sounds,
    "hidden_size": 512,
    "latent_dim": 1024,
    "codebook_dim": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "sliding_window": 72,
    "decoder_dim": 1536,
    "max_position_embeddings": 8000,
}


def model_config(
    kind: str,
    size: str,
    layout: TokenLayout,
    codec: CodecTokens,
    *,
    talker: dict[str, Any],
    predictor: dict[str, Any],
    speaker_encoder: dict[str, Any],
    voices: Mapping[str, int],
    languages: Mapping[str, int],
    mrope_section: list[int],
    dtype: str,
) -> dict[str, Any]:
    """Returns the content of config.json."""
    ids = layout.ids()
    spoken = voices if kind == "custom_voice" else {}
    rope = {"rope_theta": 1000000, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_tts",
        "dtype": dtype,
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size,
        "tts_model_type": kind,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "speaker_encoder_config": {"enc_dim": talker["hidden_size"], "sample_rate": 24000} | speaker_encoder,
        "talker_config": rope
        | talker
        | {
            "model_type": "qwen3_tts_talker",
            "vocab_size": codec.vocab_size,
            "text_vocab_size": layout.vocab_size,
            "num_code_groups": CODE_GROUPS,
            "rope_scaling": {"interleaved": True, "mrope_section": mrope_section, "rope_type": "default"},
            "codec_bos_id": codec.start,
            "codec_eos_token_id": codec.end,
            "codec_pad_id": codec.pad,
            "codec_think_id": codec.no_think - 1,
            "codec_nothink_id": codec.no_think,
            "codec_think_bos_id": codec.think_start,
            "codec_think_eos_id": codec.think_end,
            "codec_language_id": dict(languages),
            "spk_id": dict(spoken),
            "spk_is_dialect": {voice: DIALECTS.get(voice, False) for voice in spoken},
            "code_predictor_config": rope
            | predictor
            | {
                "model_type": "qwen3_tts_talker_code_predictor",
                "vocab_size": codec.sounds,
                "num_code_groups": CODE_GROUPS,
            },
        },
    }


def codec_config(decoder: dict[str, Any], encoder: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of speech_tokenizer/config.json."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": CODE_GROUPS,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "encoder_config": {"model_type": "mimi", "sampling_rate": 24000, "use_causal_conv": True} | encoder,
        "decoder_config": {
            "num_quantizers": CODE_GROUPS,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000,
            "hidden_act": "silu",
            "attention_bias": False,
        }
        | decoder,
    }


def tiny_config(kind: str, size: str = "1b7", sizes: TinySizes = TINY) -> dict[str, Any]:
    """Returns the configuration of a tiny checkpoint; `size` is what it says of itself."""
    talker = {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "text_hidden_size": sizes.text_width,
        "max_position_embeddings": 32768,
    }
    predictor = {
        "hidden_size": sizes.predictor_width,
        "num_hidden_layers": sizes.predictor_layers,
        "max_position_embeddings": 512,
    }
    shift = FULL_CODEC.pad - sizes.codec.pad  # between ids of the published vocabulary and this one
    return model_config(
        kind,
        size,
        sizes.layout,
        sizes.codec,
        talker=sizes.layers_of_qwen | talker,
        predictor=sizes.layers_of_qwen | predictor,
        speaker_encoder=TINY_SPEAKER_ENCODER,
        voices={voice: VOICES[voice] - shift for voice in TINY_VOICES},
        languages={language: code - shift for language, code in LANGUAGES.items()},
        mrope_section=[3 * sizes.head_width // 16, *[5 * sizes.head_width // 32] * 2],
        dtype="float32",
    )


def full_config(kind: str, size: str = "1b7") -> dict[str, Any]:
    """Returns the configuration with the published sizes."""
    return model_config(
        kind,
        size,
        FULL_TOKENS,
        FULL_CODEC,
        talker=FULL_TALKER | FULL_TALKERS[size],
        predictor=FULL_PREDICTOR,
        speaker_encoder={},
        voices=VOICES,
        languages=LANGUAGES,
        mrope_section=[24, 20, 20],
        dtype="bfloat16",
    )
