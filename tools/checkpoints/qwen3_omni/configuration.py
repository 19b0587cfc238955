"""Configurations, generation settings and processors of Qwen3-Omni checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.checkpoints.qwen3_omni.tokens import CHAT_TEMPLATE, FULL_TOKENS, tiny_layout
from tools.checkpoints.tokenizer import TokenLayout

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
AUDIO_RATE = 16000
CODE_GROUPS = 16
POSITIONS_PER_SECOND = 13
# transformers forbids the talker the last 1024 ids of its vocabulary, except the end, in a model of any size.
SPECIAL_CODES = 1024


@dataclass(frozen=True)
class CodecTokens:
    """Ids of the talker's vocabulary: `sounds` codes of the first codebook from 0, then the special ones."""

    sounds: int
    pad: int
    start: int
    end: int
    no_think: int
    think_start: int
    think_end: int
    voices: Mapping[str, int]

    @property
    def vocab_size(self) -> int:
        """Returns the number of rows of the talker's embedding."""
        return self.sounds + SPECIAL_CODES


FULL_CODEC = CodecTokens(
    sounds=2048,
    pad=2148,
    start=2149,
    end=2150,
    no_think=2155,
    think_start=2156,
    think_end=2157,
    voices={"chelsie": 2301, "ethan": 2302, "aiden": 2303},
)


def tiny_codec(sounds: int) -> CodecTokens:
    """Returns the ids of a tiny talker's vocabulary."""
    return CodecTokens(
        sounds=sounds,
        pad=sounds + 20,
        start=sounds + 21,
        end=sounds + 22,
        no_think=sounds + 27,
        think_start=sounds + 28,
        think_end=sounds + 29,
        voices={"chelsie": sounds + 43, "ethan": sounds + 44, "aiden": sounds + 45},
    )


@dataclass(frozen=True)
class TinySizes:
    """What may differ between tiny checkpoints; the defaults are those of the one that all tests share.

    The talker takes the thinker's states from above the layers that see the picture's deeper features (`states_layer`).
    """

    vocabulary: int = 512  # of texts
    sounds: int = 128  # codes of each codebook
    groups: int = CODE_GROUPS
    head_width: int = 32  # of thinker, talker and predictor
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    layers: int = 5
    experts: int = 8
    chosen: int = 2  # experts for each token
    states_layer: int = 3
    talker_width: int = 64
    talker_heads: int = 4
    talker_kv_heads: int = 2
    talker_layers: int = 3
    talker_experts: int = 8
    talker_chosen: int = 2
    predictor_layers: int = 2
    decoder_width: int = 64
    decoder_heads: int = 4
    decoder_layers: int = 2
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


TINY = TinySizes()


def rope(mrope_section: list[int]) -> dict[str, Any]:
    """Returns rotary settings; the published ones say `interleaved`, vLLM reads `mrope_interleaved`."""
    return {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": mrope_section,
        "interleaved": True,
        "mrope_interleaved": True,
    }


def media_fields(layout: TokenLayout) -> dict[str, int]:
    """Returns the fields that the thinker's and the talker's configuration have in common."""
    ids = layout.ids()
    return {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": 2,
        "tie_word_embeddings": False,
    }


def thinker_fields(layout: TokenLayout, roles: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of the thinker's configuration that depend on the tokenizer only."""
    return media_fields(layout) | {"user_token_id": roles["user"]}


def text_fields(layout: TokenLayout) -> dict[str, Any]:
    """Returns the fields of the thinker's text model that depend on the tokenizer only."""
    ids = layout.ids()
    return {
        "vocab_size": layout.vocab_size,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def talker_fields(layout: TokenLayout, codec: CodecTokens) -> dict[str, Any]:
    """Returns the fields of the talker's configuration that depend on the token ids only."""
    return media_fields(layout) | {
        "codec_pad_id": codec.pad,
        "codec_bos_id": codec.start,
        "codec_eos_token_id": codec.end,
        "codec_nothink_id": codec.no_think,
        "codec_think_bos_id": codec.think_start,
        "codec_think_eos_id": codec.think_end,
        "speaker_id": dict(codec.voices),
        "spatial_merge_size": 2,
    }


def make_config(
    layout: TokenLayout,
    roles: Mapping[str, int],
    *,
    thinker: dict[str, Any],
    talker: dict[str, Any],
    code2wav: dict[str, Any],
    dtype: str,
) -> Any:
    """Returns the configuration of the whole model, of the three parts and the ids of a tokenizer."""
    from transformers import Qwen3OmniMoeConfig

    ids = layout.ids()
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
        enable_audio_output=True,
        im_start_token_id=ids["<|im_start|>"],
        im_end_token_id=ids["<|im_end|>"],
        tts_pad_token_id=ids["<tts_pad>"],
        tts_bos_token_id=ids["<tts_text_bos>"],
        tts_eos_token_id=ids["<tts_text_eod>"],
        **{f"{role}_token_id": index for role, index in roles.items()},
    )
    config.architectures = [ARCHITECTURE]
    config.dtype = dtype
    return config


def tiny_config(roles: Mapping[str, int], sizes: TinySizes = TINY) -> Any:
    """Returns the configuration of a tiny checkpoint.

    As in the published model, the talker's head_dim is not hidden_size / heads, and a frame has 1920 samples. The
    windows of the audio encoder (2 s) and of the vocoder are short, so that a short request has several of them.
    """
    width, layout, codec = sizes.width, sizes.layout, sizes.codec
    sections = [3 * sizes.head_width // 16, *[5 * sizes.head_width // 32] * 2]
    thinker = thinker_fields(layout, roles) | {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 200,
            "conv_chunksize": 500,
            "downsample_hidden_size": 16,
            "output_dim": width,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 64,
            "image_size": 128,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0, 1],
        },
        "text_config": text_fields(layout)
        | {
            "hidden_size": width,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_width,
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.chosen,
            "max_position_embeddings": 32768,
            "rope_parameters": rope(sections),
        },
    }
    talker = talker_fields(layout, codec) | {
        "thinker_hidden_size": width,
        "num_code_groups": sizes.groups,
        "accept_hidden_layer": sizes.states_layer,
        "text_config": {
            "vocab_size": codec.vocab_size,
            "hidden_size": sizes.talker_width,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_hidden_layers": sizes.talker_layers,
            "num_attention_heads": sizes.talker_heads,
            "num_key_value_heads": sizes.talker_kv_heads,
            "head_dim": sizes.head_width,
            "num_experts": sizes.talker_experts,
            "num_experts_per_tok": sizes.talker_chosen,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
            "rope_parameters": rope(sections),
        },
        "code_predictor_config": {
            "vocab_size": codec.sounds,
            "hidden_size": sizes.talker_width,
            "intermediate_size": 96,
            "num_hidden_layers": sizes.predictor_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": sizes.head_width,
            "num_code_groups": sizes.groups,
            "max_position_embeddings": 512,
        },
    }
    code2wav = {
        "codebook_size": codec.sounds,
        "num_quantizers": sizes.groups,
        "hidden_size": sizes.decoder_width,
        "intermediate_size": 96,
        "num_hidden_layers": sizes.decoder_layers,
        "num_attention_heads": sizes.decoder_heads,
        "num_key_value_heads": sizes.decoder_heads,
        "sliding_window": sizes.window,
        "decoder_dim": sizes.channels,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "max_position_embeddings": 8000,
    }
    return make_config(layout, roles, thinker=thinker, talker=talker, code2wav=code2wav, dtype="float32")


def full_config(roles: Mapping[str, int]) -> Any:
    """Returns the configuration with the sizes of the published Qwen3-Omni-30B-A3B.

    Every size is given, even where it is the default of transformers, because defaults may change.
    """
    width = 2048
    thinker = thinker_fields(FULL_TOKENS, roles) | {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "d_model": 1280,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "downsample_hidden_size": 480,
            "output_dim": width,
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 2304,
            "image_size": 768,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "text_config": text_fields(FULL_TOKENS)
        | {
            "hidden_size": width,
            "intermediate_size": 768,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 65536,
            "rope_parameters": rope([24, 20, 20]),
        },
    }
    talker = talker_fields(FULL_TOKENS, FULL_CODEC) | {
        "thinker_hidden_size": width,
        "num_code_groups": CODE_GROUPS,
        "accept_hidden_layer": 24,
        "text_config": {
            "vocab_size": FULL_CODEC.vocab_size,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "moe_intermediate_size": 384,
            "shared_expert_intermediate_size": 768,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "max_position_embeddings": 65536,
            "rope_parameters": rope([24, 20, 20]),
        },
        "code_predictor_config": {
            "vocab_size": FULL_CODEC.sounds,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_code_groups": CODE_GROUPS,
            "max_position_embeddings": 32768,
        },
    }
    code2wav = {
        "codebook_size": FULL_CODEC.sounds,
        "num_quantizers": CODE_GROUPS,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "sliding_window": 72,
        "decoder_dim": 1536,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "max_position_embeddings": 8000,
    }
    return make_config(FULL_TOKENS, roles, thinker=thinker, talker=talker, code2wav=code2wav, dtype="bfloat16")


def make_processor(tokenizer: Any, *, audio_seconds: int, max_pixels: int) -> Any:
    """Returns the processor of text, audio, images and video.

    Audio may have `audio_seconds`, images are scaled down to `max_pixels`.
    """
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        WhisperFeatureExtractor,
    )

    vision = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 56 * 56}
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**vision, max_pixels=max_pixels),
        video_processor=Qwen2VLVideoProcessor(**vision, max_pixels=max_pixels),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128, sampling_rate=AUDIO_RATE, hop_length=160, chunk_length=audio_seconds, n_fft=400
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
