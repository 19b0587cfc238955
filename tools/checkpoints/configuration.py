"""Configurations, generation settings and processors of the written checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.checkpoints.tokenizer import CHAT_TEMPLATE, FULL_TOKENS, TokenLayout, tiny_layout

ARCHITECTURE = "Qwen2_5OmniModel"  # as published; it is the name under which vLLM knows the thinker
AUDIO_RATE = 16000


@dataclass(frozen=True)
class CodecTokens:
    """Ids of the talker's vocabulary: `sounds` codec tokens from 0, then a gap, then the special ones."""

    vocab_size: int
    sounds: int
    pad: int
    start: int
    end: int
    mask: int


# As published: 8192 sounds, special tokens 100, 101, 102 and 104 after them.
FULL_CODEC = CodecTokens(vocab_size=8448, sounds=8192, pad=8292, start=8293, end=8294, mask=8296)


def tiny_codec(sounds: int) -> CodecTokens:
    """Returns the ids of a tiny talker's vocabulary."""
    return CodecTokens(sounds + 32, sounds, pad=sounds + 12, start=sounds + 13, end=sounds + 14, mask=sounds + 16)


@dataclass(frozen=True)
class TinySizes:
    """What may differ between tiny checkpoints; the defaults are those of the one that all tests share.

    vLLM's attention on CPU needs heads of 32 or more. As in the published model, the talker's head width is not its
    width / heads, so code that assumes so fails here, too.
    """

    vocabulary: int = 512  # of texts
    sounds: int = 256  # codec tokens
    head_width: int = 32  # of thinker and talker
    heads: int = 4
    kv_heads: int = 2
    layers: int = 3
    between: int = 256  # width of the layers' inner part
    talker_width: int = 64
    talker_heads: int = 4
    talker_kv_heads: int = 2
    talker_layers: int = 3
    talker_between: int = 256
    dit_heads: int = 4  # of 16
    dit_layers: int = 4
    dit_block: int = 24  # frames
    channels: int = 128  # of BigVGAN's first layer

    @property
    def layout(self) -> TokenLayout:
        """Returns the ids of texts."""
        return tiny_layout(self.vocabulary)

    @property
    def codec(self) -> CodecTokens:
        """Returns the ids of codec tokens."""
        return tiny_codec(self.sounds)


TINY = TinySizes()


def rope(mrope_section: list[int]) -> dict[str, Any]:
    """Returns rotary settings with the head's frequencies split over time, height and width."""
    return {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": mrope_section}


def shared_token_fields(layout: TokenLayout) -> dict[str, int]:
    """Returns the fields that the thinker's and the talker's configuration have in common."""
    ids = layout.ids()
    return {
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def thinker_fields(layout: TokenLayout, user_token: int) -> dict[str, Any]:
    """Returns the fields of the thinker's configuration that depend on the tokenizer only."""
    ids = layout.ids()
    return shared_token_fields(layout) | {
        "user_token_id": user_token,
        "vision_token_id": ids["<|vision_pad|>"],
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "ignore_index": -100,
        "tie_word_embeddings": False,
    }


def talker_fields(layout: TokenLayout, codec: CodecTokens) -> dict[str, Any]:
    """Returns the fields of the talker's configuration that depend on the token ids only."""
    ids = layout.ids()
    return shared_token_fields(layout) | {
        "vocab_size": codec.vocab_size,
        "tts_text_start_token_id": ids["<tts_text_bos>"],
        "tts_text_end_token_id": ids["<tts_text_eos>"],
        "tts_text_pad_token_id": ids["<tts_pad>"],
        "tts_codec_start_token_id": codec.start,
        "tts_codec_end_token_id": codec.end,
        "tts_codec_pad_token_id": codec.pad,
        "tts_codec_mask_token_id": codec.mask,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }


def text_fields(layout: TokenLayout) -> dict[str, Any]:
    """Returns the fields of the thinker's text model that depend on the tokenizer only."""
    ids = layout.ids()
    return {
        "vocab_size": layout.vocab_size,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }


def tiny_config(user_token: int, sizes: TinySizes = TINY) -> Any:
    """Returns the configuration of a tiny checkpoint."""
    from transformers import Qwen2_5OmniConfig

    width, layout, codec = sizes.heads * sizes.head_width, sizes.layout, sizes.codec
    quarter = sizes.head_width // 8  # of the head's frequencies are for time, the rest for height and width
    sections = [quarter, 3 * quarter // 2, 3 * quarter // 2]
    thinker = thinker_fields(layout, user_token) | {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": width,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,
            "window_size": 112,
            "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        "text_config": text_fields(layout)
        | {
            "hidden_size": width,
            "intermediate_size": sizes.between,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "max_position_embeddings": 32768,
            "rope_parameters": rope(sections),
        },
    }
    talker = talker_fields(layout, codec) | {
        "embedding_size": width,
        "hidden_size": sizes.talker_width,
        "intermediate_size": sizes.talker_between,
        "num_hidden_layers": sizes.talker_layers,
        "num_attention_heads": sizes.talker_heads,
        "num_key_value_heads": sizes.talker_kv_heads,
        "head_dim": sizes.head_width,
        "max_position_embeddings": 32768,
        "rope_parameters": rope(sections),
    }
    token2wav = {
        "dit_config": {
            "hidden_size": 16 * sizes.dit_heads,
            "num_hidden_layers": sizes.dit_layers,
            "num_attention_heads": sizes.dit_heads,
            "head_dim": 16,
            "emb_dim": 64,
            "ff_mult": 2,
            "block_size": sizes.dit_block,
            "look_ahead_layers": [sizes.dit_layers // 2],
            "look_backward_layers": [0, sizes.dit_layers - 1],
            "repeats": 2,
            "num_embeds": codec.sounds + 1,
            "mel_dim": 80,
            "enc_emb_dim": 192,
            "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_res2net_scale": 2,
            "enc_se_channels": 16,
        },
        "bigvgan_config": {
            "mel_dim": 80,
            "upsample_initial_channel": sizes.channels,
            "resblock_kernel_sizes": [3, 7],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    }
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=token2wav, enable_audio_output=True
    )
    config.architectures = [ARCHITECTURE]
    config.dtype = "float32"
    return config


def full_config(user_token: int) -> Any:
    """Returns the configuration with the sizes of the published Qwen2.5-Omni-7B.

    Every size is given, even where it is the default of transformers, because defaults may change.
    """
    from transformers import Qwen2_5OmniConfig

    width = 3584
    thinker = thinker_fields(FULL_TOKENS, user_token) | {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "d_model": 1280,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": width,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,
            "window_size": 112,
            "out_hidden_size": width,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "text_config": text_fields(FULL_TOKENS)
        | {
            "hidden_size": width,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_parameters": rope([16, 24, 24]),
        },
    }
    talker = talker_fields(FULL_TOKENS, FULL_CODEC) | {
        "embedding_size": width,
        "hidden_size": 896,
        "intermediate_size": 18944,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_parameters": rope([16, 24, 24]),
    }
    token2wav = {
        "dit_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 22,
            "num_attention_heads": 16,
            "head_dim": 64,
            "emb_dim": 512,
            "ff_mult": 2,
            "block_size": 24,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
            "repeats": 2,
            "num_embeds": FULL_CODEC.sounds + 1,
            "mel_dim": 80,
            "enc_emb_dim": 192,
            "enc_dim": 128,
            "enc_channels": [256, 256, 256, 256, 768],
            "enc_attention_channels": 64,
            "enc_res2net_scale": 2,
            "enc_se_channels": 64,
        },
        "bigvgan_config": {
            "mel_dim": 80,
            "upsample_initial_channel": 1536,
            "resblock_kernel_sizes": [3, 7, 11],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    }
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=token2wav, enable_audio_output=True
    )
    config.architectures = [ARCHITECTURE]
    config.dtype = "bfloat16"
    return config


def make_generation_config(layout: TokenLayout) -> Any:
    """Returns the thinker's generation settings: its end and padding tokens."""
    from transformers import GenerationConfig

    ids = layout.ids()
    return GenerationConfig(
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=False,
    )


def make_processor(tokenizer: Any, *, audio_seconds: int, max_pixels: int) -> Any:
    """Returns the processor of text, audio, images and video.

    Audio is padded to `audio_seconds`, images are scaled down to `max_pixels`.
    """
    from transformers import Qwen2_5OmniProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, WhisperFeatureExtractor

    vision = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 56 * 56}
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(**vision, max_pixels=max_pixels),
        video_processor=Qwen2VLVideoProcessor(**vision, max_pixels=max_pixels),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=128, sampling_rate=AUDIO_RATE, hop_length=160, chunk_length=audio_seconds, n_fft=400
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
