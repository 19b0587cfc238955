"""Writes Qwen2.5-Omni checkpoints without a network: one tiny and runnable, one full-sized and without weights.

    python -m omni_actors.checkpoints tiny OUT_DIR [--seed N]
    python -m omni_actors.checkpoints full OUT_DIR

`tiny` has the real architecture at toy size and random weights whose scales are chosen so that the outputs say
something: greedy tokens vary with the prompt and do not fall into a cycle, the waveform has amplitude and is not
clipped (docs/adr/0002-tiny-checkpoint.md). It measures this at the end and fails when a figure is missed.

`full` has the published sizes of Qwen2.5-Omni-7B and no weights; vLLM fills it with `load_format: dummy`.

Both are in the layout of the published checkpoint, so whatever loads one loads the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

ARCHITECTURE = "Qwen2_5OmniModel"  # as published; it is the name under which vLLM knows the thinker
MARKER_FILE = "omni_actors_checkpoint.json"
AUDIO_RATE = 16000


class CheckpointError(Exception):
    """A checkpoint cannot be written, or the one written does not behave as promised."""


class FolderError(CheckpointError):
    """The folder holds something that this module did not write."""


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


# The published names, in the published order. Every id that follows from a name is looked up, never written down.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
SPEECH_TOKENS = ("<tts_pad>", "<tts_text_bos>", "<tts_text_eos>")
# The token that tells the talker which voice to use. They have no published name.
VOICE_TOKENS = {"Ethan": "<|voice_ethan|>", "Chelsie": "<|voice_chelsie|>"}

# Attributes of the tokenizer that the processor and the chat template rely on.
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

# Each word becomes one token, by merging it from the left. The last ones make multi-byte characters one token.
MERGED_WORDS = (
    "user", "assistant", "system", " the", " a", " and", " of", " to", " in", " is", " it", " you", " that", " was",
    " for", " on", " are", " with", " as", " they", " be", " at", " one", " have", " this", "ing", "er", "ed",
    "\u00e9", "\u00fc", "\u4f60", "\u597d",
)  # fmt: skip

# Equivalent to the published template: a default system prompt, roles, and one placeholder per media part.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}"
    "{{ message['content'] }}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}"
    "{{ '<|vision_bos|><|IMAGE|><|vision_eos|>' }}"
    "{%- elif part['type'] in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}"
    "{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}"
    "{%- elif part['type'] in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}"
    "{{ '<|vision_bos|><|VIDEO|><|vision_eos|>' }}"
    "{%- elif 'text' in part -%}"
    "{{ part['text'] }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- endif -%}"
)


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens lie in a vocabulary.

    `vocab_size` is the number of rows of the embedding; `first_special` the id of `<|endoftext|>`, the others follow
    it; `first_speech` the id of `<tts_pad>`; `voices` maps a voice to the id of its token; `fixed` holds words with a
    given id. Every other id gets a made-up word, so that each of them decodes to some text.
    """

    vocab_size: int
    first_special: int
    first_speech: int
    voices: dict[str, int]
    fixed: dict[str, int] = field(default_factory=dict)


TINY_TOKENS = TokenLayout(vocab_size=512, first_special=480, first_speech=500, voices={"Ethan": 506, "Chelsie": 507})
FULL_TOKENS = TokenLayout(
    vocab_size=152064,
    first_special=151643,
    first_speech=151859,
    voices={"Ethan": 151870, "Chelsie": 151872},
    fixed={"user": 872},
)


def byte_level(text: str) -> str:
    """Returns text as byte-level BPE spells it: one printable character per UTF-8 byte."""
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def make_vocabulary(layout: TokenLayout) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the vocabulary (token to id) and the merges of the byte-level BPE."""
    from tokenizers import pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {name: layout.first_special + index for index, name in enumerate(SPECIAL_TOKENS)}
    special |= {name: layout.first_speech + index for index, name in enumerate(SPEECH_TOKENS)}
    special |= {VOICE_TOKENS[voice]: index for voice, index in layout.voices.items()}
    taken = set(special.values()) | set(layout.fixed.values())
    free_ids = (index for index in range(len(vocabulary), layout.vocab_size) if index not in taken)

    merges: list[tuple[str, str]] = []
    for word in MERGED_WORDS:
        symbols = byte_level(word)
        for length in range(2, len(symbols) + 1):
            token = symbols[:length]
            if token not in vocabulary:
                merges.append((symbols[: length - 1], symbols[length - 1]))
                vocabulary[token] = layout.fixed.get(token) or next(free_ids)
    vocabulary |= {byte_level(f" w{index}"): index for index in free_ids}
    return vocabulary | special, merges


def make_tokenizer(layout: TokenLayout) -> Any:
    """Returns a Qwen2 tokenizer with the published special tokens at the ids that the layout gives them."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    vocabulary, merges = make_vocabulary(layout)
    # Special tokens are part of the BPE vocabulary: this is what lets them keep ids beyond the number of words.
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )
    names = (*SPECIAL_TOKENS, *SPEECH_TOKENS, *VOICE_TOKENS.values())
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    for name in names:
        token_id = tokenizer.convert_tokens_to_ids(name)
        if token_id != vocabulary[name]:
            raise CheckpointError(f"token {name} got id {token_id}, not {vocabulary[name]}")
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


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
TINY_CODEC = CodecTokens(vocab_size=288, sounds=256, pad=268, start=269, end=270, mask=272)


def text_ids(layout: TokenLayout) -> dict[str, int]:
    """Returns the id of every special and speech token by name."""
    ids = {name: layout.first_special + index for index, name in enumerate(SPECIAL_TOKENS)}
    return ids | {name: layout.first_speech + index for index, name in enumerate(SPEECH_TOKENS)}


def rope(mrope_section: list[int]) -> dict[str, Any]:
    """Returns rotary settings with the head's frequencies split over time, height and width."""
    return {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": mrope_section}


def shared_token_fields(layout: TokenLayout) -> dict[str, int]:
    """Returns the fields that the thinker's and the talker's configuration have in common."""
    ids = text_ids(layout)
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
    ids = text_ids(layout)
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
    ids = text_ids(layout)
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
    ids = text_ids(layout)
    return {
        "vocab_size": layout.vocab_size,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }


def tiny_config(user_token: int) -> Any:
    """Returns the configuration of the tiny checkpoint.

    vLLM's attention on CPU needs head_dim >= 32, hence 32 in the thinker and the talker. The talker's head_dim is not
    hidden_size / heads, as in the published model, so code that assumes so fails here too.
    """
    from transformers import Qwen2_5OmniConfig

    width = 128
    thinker = thinker_fields(TINY_TOKENS, user_token) | {
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
            "d_model": 64, "max_source_positions": 1500, "n_window": 100, "output_dim": width,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "in_channels": 3, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 25, "window_size": 112,
            "out_hidden_size": width, "fullatt_block_indexes": [1],
        },
        "text_config": text_fields(TINY_TOKENS) | {
            "hidden_size": width, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_parameters": rope([4, 6, 6]),
        },
    }  # fmt: skip
    talker = talker_fields(TINY_TOKENS, TINY_CODEC) | {
        "embedding_size": width, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 32768,
        "rope_parameters": rope([4, 6, 6]),
    }  # fmt: skip
    token2wav = {
        "dit_config": {
            "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "emb_dim": 64,
            "ff_mult": 2, "block_size": 24, "look_ahead_layers": [2], "look_backward_layers": [0, 3], "repeats": 2,
            "num_embeds": TINY_CODEC.sounds + 1, "mel_dim": 80, "enc_emb_dim": 192, "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96], "enc_attention_channels": 16, "enc_res2net_scale": 2,
            "enc_se_channels": 16,
        },
        "bigvgan_config": {
            "mel_dim": 80, "upsample_initial_channel": 128, "resblock_kernel_sizes": [3, 7],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    }  # fmt: skip
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=token2wav, enable_audio_output=True
    )
    config.architectures = [ARCHITECTURE]
    config.dtype = "float32"
    return config


def full_config(user_token: int) -> Any:
    """Returns the configuration with the sizes of the published Qwen2.5-Omni-7B.

    Every size is written down, also where transformers has it as a default: a default is not a promise.
    """
    from transformers import Qwen2_5OmniConfig

    width = 3584
    thinker = thinker_fields(FULL_TOKENS, user_token) | {
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "d_model": 1280, "max_source_positions": 1500, "n_window": 100, "output_dim": width,
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 25,
            "window_size": 112, "out_hidden_size": width, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "text_config": text_fields(FULL_TOKENS) | {
            "hidden_size": width, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_parameters": rope([16, 24, 24]),
        },
    }  # fmt: skip
    talker = talker_fields(FULL_TOKENS, FULL_CODEC) | {
        "embedding_size": width, "hidden_size": 896, "intermediate_size": 18944, "num_hidden_layers": 24,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768,
        "rope_parameters": rope([16, 24, 24]),
    }  # fmt: skip
    token2wav = {
        "dit_config": {
            "hidden_size": 1024, "num_hidden_layers": 22, "num_attention_heads": 16, "head_dim": 64, "emb_dim": 512,
            "ff_mult": 2, "block_size": 24, "look_ahead_layers": [10], "look_backward_layers": [0, 20], "repeats": 2,
            "num_embeds": FULL_CODEC.sounds + 1, "mel_dim": 80, "enc_emb_dim": 192, "enc_dim": 128,
            "enc_channels": [256, 256, 256, 256, 768], "enc_attention_channels": 64, "enc_res2net_scale": 2,
            "enc_se_channels": 64,
        },
        "bigvgan_config": {
            "mel_dim": 80, "upsample_initial_channel": 1536, "resblock_kernel_sizes": [3, 7, 11],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    }  # fmt: skip
    config = Qwen2_5OmniConfig(
        thinker_config=thinker, talker_config=talker, token2wav_config=token2wav, enable_audio_output=True
    )
    config.architectures = [ARCHITECTURE]
    config.dtype = "bfloat16"
    return config


def make_generation_config(layout: TokenLayout) -> Any:
    """Returns the thinker's generation settings: what ends a reply and what pads it."""
    from transformers import GenerationConfig

    ids = text_ids(layout)
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
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

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


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Returns a generator that depends on the seed and on the name only, not on the order in which it is asked for."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def normal(shape: tuple[int, ...] | torch.Size, seed: int, name: str, std: float = 1.0) -> torch.Tensor:
    """Returns a float32 tensor of independent normal values with mean 0."""
    return torch.randn(shape, generator=seeded_generator(seed, name), dtype=torch.float32) * std


@dataclass(frozen=True)
class Scale:
    """How one parameter is drawn: normal around `mean` with a given spread.

    `gain` is relative to the fan-in (a layer with gain 1 keeps the size of what goes through it), `std` is absolute;
    exactly one of them is set.
    """

    gain: float | None = None
    std: float | None = None
    mean: float = 0.0


# First match wins. docs/adr/0002-tiny-checkpoint.md says why these values.
SCALES: tuple[tuple[str, Scale], ...] = (
    # Thinker and talker: attention dominates the residual stream and is sharp, so that the next token hashes the
    # whole context instead of following from the last token. That is what keeps greedy decoding out of cycles.
    (r"^thinker\.model\.embed_tokens\.weight$", Scale(std=1.0)),
    (r"^talker\.model\.embed_tokens\.weight$", Scale(std=1.0)),
    (r"^(thinker|talker)\.model\.layers\.\d+\.self_attn\.[qk]_proj\.weight$", Scale(gain=2.0)),
    (r"^(thinker|talker)\.model\.layers\.\d+\.self_attn\.o_proj\.weight$", Scale(gain=2.0)),
    (r"^(thinker|talker)\.model\.layers\.\d+\.mlp\.down_proj\.weight$", Scale(gain=2.0)),
    (r"^thinker\.lm_head\.weight$", Scale(gain=3.0)),
    (r"^talker\.codec_head\.weight$", Scale(gain=3.0)),
    # DiT: mel values are log amplitudes around -4, where the vocoder's decibel window (-11 to 2.3) is not clipped.
    (r"\.codec_embed\.weight$", Scale(std=2.0)),
    (r"\.transformer_blocks\.\d+\.attn_norm\.linear\.weight$", Scale(gain=0.5)),
    (r"\.proj_out\.weight$", Scale(gain=2.0)),
    (r"\.proj_out\.bias$", Scale(std=1.0, mean=-4.0)),
    # BigVGAN: quiet residual branches; conv_post sets the loudness.
    (r"\.resblocks\.\d+\.convs[12]\.\d+\.weight$", Scale(gain=0.5)),
    (r"\.conv_post\.weight$", Scale(gain=0.2)),
    (r"\.(alpha|beta)$", Scale(std=0.3)),
    # Everything else.
    (r"(norm\w*|ln_q|layer_norm)\.weight$", Scale(std=0.1, mean=1.0)),
    (r"\.bias$", Scale(std=0.1)),
    (r"\.weight$", Scale(gain=1.0)),
)


def scale_of(name: str) -> Scale:
    """Returns how the named parameter is drawn; raises CheckpointError for a name that no rule covers."""
    for pattern, scale in SCALES:
        if re.search(pattern, name):
            return scale
    raise CheckpointError(f"no rule says how to draw parameter {name}")


def fan_in(name: str, shape: torch.Size) -> int:
    """Returns how many inputs one output of the layer sums over."""
    if ".ups." in name:  # a transposed convolution [in, out, kernel]: about two taps of the kernel meet each output
        return shape[0] * 2
    return int(np.prod(shape[1:]))


def draw_parameter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Returns the value of one parameter, float32."""
    scale = scale_of(name)
    std = scale.std if scale.gain is None else scale.gain / fan_in(name, shape) ** 0.5
    value = scale.mean + normal(shape, seed, name, std)
    if name.endswith("conv_post.weight"):
        # The vocoder's activations have a large mean; without this the waveform would have a large offset.
        value -= value.mean(dim=-1, keepdim=True)
    return value


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, spoken_ids: list[int]) -> None:
    """Fills a model in place. The thinker only ever answers with `spoken_ids`, the talker with codec sounds.

    The other rows of the two output layers are zero: a logit of 0 never wins against the best of the others, so no
    reply ends before its length limit and every codec token has a row in the vocoder's embedding.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_parameter(name, parameter.shape, seed))
    keep = torch.zeros(model.thinker.lm_head.weight.shape[0], 1)
    keep[spoken_ids] = 1
    model.thinker.lm_head.weight.mul_(keep)
    model.talker.codec_head.weight[TINY_CODEC.sounds :] = 0


def spoken_token_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of the ordinary tokens that are printable text on their own."""
    special = set(tokenizer.added_tokens_decoder)
    texts = {index: tokenizer.decode([index]) for index in range(len(tokenizer)) if index not in special}
    return [index for index, text in texts.items() if text and text.isprintable() and "\ufffd" not in text]


def make_voices(layout: TokenLayout, seed: int, *, mel_dim: int, speaker_dim: int) -> dict[str, dict[str, Any]]:
    """Returns the content of spk_dict.pt: per voice the token, the embedding [1, speaker_dim], the mel [1, T, mel_dim].

    T differs between the voices. The mel is smooth in time and lies around -4, as log amplitudes of speech do.
    """
    voices: dict[str, dict[str, Any]] = {}
    for voice, frames in (("Chelsie", 300), ("Ethan", 420)):
        noise = normal((1, mel_dim, frames + 8), seed, f"{voice}.ref_mel", 6.0)
        mel = nn.functional.avg_pool1d(noise, kernel_size=9, stride=1).transpose(1, 2)
        voices[voice] = {
            "bos_token": layout.voices[voice],
            "cond": normal((1, speaker_dim), seed, f"{voice}.cond"),
            "ref_mel": (mel - 4.0).contiguous(),
        }
    return voices


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


MEASURED_PROMPTS = ("hello", "What is the capital of France?", "Tell me a story about a dog.")
THINKER_TOKENS = 32
CODEC_TOKENS = 64
MIN_DISTINCT = 10
PEAK_RANGE = (0.05, 0.95)
SAMPLES_PER_CODEC_TOKEN = 480


def keep_talker_attention_mask(model: Any) -> None:
    """Makes the talker of a loaded transformers model see its attention mask of ones.

    transformers 5.19 drops an all-ones mask in `generate()`, and the talker adds the embeddings of the codec's pad and
    start tokens to its prompt only `if attention_mask is not None`. Without this, an unpadded prompt gets a talker
    that differs from the published one. Only this instance is changed.
    """
    talker = model.talker
    original_forward = talker.forward

    @wraps(original_forward)  # generate() validates its arguments against the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None:
            embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
            batch, length = (kwargs["input_ids"] if embeds is None else embeds).shape[:2]
            past = 0 if cache is None else cache.get_seq_length()
            kwargs["attention_mask"] = torch.ones(batch, past + length, dtype=torch.long)
        return original_forward(*args, **kwargs)

    talker.forward = forward


@dataclass(frozen=True)
class Answer:
    """What the checkpoint answers to one prompt in one voice, and how clear its greedy choices were.

    The gaps are the smallest differences between the best and the second best logit over all steps.
    """

    prompt: str
    voice: str
    thinker_tokens: tuple[int, ...]
    codec_tokens: tuple[int, ...]
    peak: float
    samples: int
    thinker_gap: float
    codec_gap: float


class GapRecorder:
    """A logits processor that changes nothing and keeps the smallest gap between the two best logits."""

    def __init__(self) -> None:
        self.smallest = float("inf")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best, second = scores.topk(2, dim=-1).values[0].tolist()
        self.smallest = min(self.smallest, best - second)
        return scores


def generate_arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns a processor's output as keyword arguments for the model's `generate()`.

    transformers 5.19 hands what has no prefix to all three parts, and the talker refuses pixels.
    """
    pixels = ("pixel_values", "pixel_values_videos")
    return {f"thinker_{name}" if name in pixels else name: value for name, value in inputs.items()}


def load_reference_model(folder: Path) -> Any:
    """Returns transformers' model of a checkpoint in float32, with the talker's attention mask kept."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    keep_talker_attention_mask(model)
    return model


def measure_answer(model: Any, inputs: dict[str, Any], prompt: str, voice: str) -> Answer:
    """Runs the whole model greedily, for 32 thinker and 64 codec tokens at most."""
    ids = model.config.thinker_config, model.config.talker_config
    gaps = GapRecorder(), GapRecorder()
    codes: list[torch.Tensor] = []
    hook = model.token2wav.register_forward_pre_hook(lambda module, args: codes.append(args[0]))
    random_state = torch.get_rng_state()
    torch.manual_seed(0)  # the vocoder's initial noise
    try:
        sequences, waveform = model.generate(
            **generate_arguments(inputs),
            speaker=voice,
            thinker_max_new_tokens=THINKER_TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=[ids[0].eos_token_id, ids[0].pad_token_id],
            thinker_logits_processor=[gaps[0]],
            talker_max_new_tokens=CODEC_TOKENS,
            talker_do_sample=False,
            talker_eos_token_id=[ids[1].tts_codec_end_token_id, ids[1].tts_codec_pad_token_id],
            talker_logits_processor=[gaps[1]],
        )
    finally:
        hook.remove()
        torch.set_rng_state(random_state)
    return Answer(
        prompt=prompt,
        voice=voice,
        thinker_tokens=tuple(sequences[0, inputs["input_ids"].shape[1] :].tolist()),
        codec_tokens=tuple(codes[0][0].tolist()),
        peak=float(waveform.abs().max()),
        samples=waveform.numel(),
        thinker_gap=gaps[0].smallest,
        codec_gap=gaps[1].smallest,
    )


def media_prompts(processor: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, processor output): the same question about different sounds, pictures and films."""
    time_axis = np.arange(AUDIO_RATE, dtype=np.float32) / AUDIO_RATE
    ramp = np.linspace(0, 255, 84 * 84 * 3).reshape(84, 84, 3).astype(np.uint8)
    for name, pitch, picture in (("first", 220.0, ramp), ("second", 660.0, np.ascontiguousarray(ramp[::-1]))):
        tone = np.sin(2 * np.pi * pitch * time_axis)
        film = np.stack([picture, picture // 2])
        contents = {"audio": {"audio": [tone]}, "image": {"images": [picture]}, "video": {"videos": [film]}}
        for media, content in contents.items():
            messages = [{"role": "user", "content": [{"type": media}, {"type": "text", "text": "What is this?"}]}]
            text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            yield f"{media}, {name}", dict(processor(text=text, **content, return_tensors="pt"))


def measure_answers(folder: Path) -> list[Answer]:
    """Returns what the checkpoint answers to texts in every voice, and to media in one."""
    from transformers import Qwen2_5OmniProcessor

    processor = Qwen2_5OmniProcessor.from_pretrained(folder)
    model = load_reference_model(folder)
    answers = []
    for prompt in MEASURED_PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = dict(processor(text=text, return_tensors="pt"))
        answers += [measure_answer(model, inputs, prompt, voice) for voice in model.speaker_map]
    first_voice = next(iter(model.speaker_map))
    return answers + [measure_answer(model, inputs, name, first_voice) for name, inputs in media_prompts(processor)]


def missed_figures(answers: list[Answer]) -> list[str]:
    """Returns a sentence for every promise about the outputs that the answers break."""
    missed = []
    for answer in answers:
        who = f"{answer.prompt!r} ({answer.voice})"
        wanted_samples = CODEC_TOKENS * SAMPLES_PER_CODEC_TOKEN
        if len(answer.thinker_tokens) != THINKER_TOKENS or len(answer.codec_tokens) != CODEC_TOKENS:
            missed.append(f"{who}: a reply ended before its length limit")
        if len(set(answer.thinker_tokens)) < MIN_DISTINCT:
            missed.append(f"{who}: only {len(set(answer.thinker_tokens))} different thinker tokens")
        if len(set(answer.codec_tokens)) < MIN_DISTINCT:
            missed.append(f"{who}: only {len(set(answer.codec_tokens))} different codec tokens")
        if not PEAK_RANGE[0] <= answer.peak <= PEAK_RANGE[1]:
            missed.append(f"{who}: waveform peak {answer.peak:.3f} outside {PEAK_RANGE}")
        if answer.samples != wanted_samples:
            missed.append(f"{who}: {answer.samples} samples instead of {wanted_samples}")
    texts = {answer.thinker_tokens for answer in answers}
    prompts = {answer.prompt for answer in answers}
    if len(texts) != len(prompts):
        missed.append(f"{len(prompts)} prompts, but only {len(texts)} different replies")
    if len({answer.codec_tokens for answer in answers}) != len(answers):
        missed.append("two prompts or voices got the same codec tokens")
    return missed


def print_figures(answers: list[Answer]) -> None:
    """Prints one line per answer."""
    print(f"{'prompt':32} {'voice':8} {'texts':>5} {'codes':>5} {'peak':>6} {'text gap':>9} {'code gap':>9}")
    for answer in answers:
        distinct = len(set(answer.thinker_tokens)), len(set(answer.codec_tokens))
        print(
            f"{answer.prompt:32} {answer.voice:8} {distinct[0]:5} {distinct[1]:5} {answer.peak:6.3f} "
            f"{answer.thinker_gap:9.5f} {answer.codec_gap:9.5f}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def claim_folder(folder: Path, contents: dict[str, Any]) -> None:
    """Creates the folder or takes over one that this module wrote; refuses any other that is not empty."""
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is not a directory")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / MARKER_FILE).exists():
        raise FolderError(f"{folder} is not empty and was not written by this command; name another directory")
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        old.unlink()  # a full checkpoint over a tiny one must not keep the weights
    (folder / MARKER_FILE).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def write_voices(folder: Path, voices: dict[str, dict[str, Any]]) -> None:
    """Writes spk_dict.pt; it loads with torch.load(weights_only=True)."""
    torch.save(voices, folder / "spk_dict.pt")


def write_tiny(folder: Path, seed: int = 0, *, check: bool = True) -> list[Answer]:
    """Writes the tiny checkpoint and returns what it answers (nothing with check=False).

    Raises FolderError when the folder is foreign, CheckpointError when the outputs do not vary as promised.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration

    claim_folder(folder, {"kind": "tiny", "seed": seed})
    tokenizer = make_tokenizer(TINY_TOKENS)
    config = tiny_config(tokenizer.convert_tokens_to_ids("user"))
    model = Qwen2_5OmniForConditionalGeneration(config).to(torch.float32)
    draw_weights(model, seed, spoken_token_ids(tokenizer))
    model.generation_config = make_generation_config(TINY_TOKENS)
    model.save_pretrained(folder)
    config.architectures = [ARCHITECTURE]  # saving the model has put its class name there
    config.save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=30, max_pixels=256 * 28 * 28).save_pretrained(folder)
    dit = config.token2wav_config.dit_config
    write_voices(folder, make_voices(TINY_TOKENS, seed, mel_dim=dit.mel_dim, speaker_dim=dit.enc_emb_dim))
    if not check:
        return []
    answers = measure_answers(folder)
    missed = missed_figures(answers)
    if missed:
        print_figures(answers)
        raise CheckpointError("the outputs do not vary as promised:\n  " + "\n  ".join(missed))
    return answers


def write_full(folder: Path) -> None:
    """Writes the checkpoint with the published sizes and without weights; raises FolderError if it is foreign."""
    claim_folder(folder, {"kind": "full"})
    tokenizer = make_tokenizer(FULL_TOKENS)
    config = full_config(tokenizer.convert_tokens_to_ids("user"))
    config.save_pretrained(folder)
    make_generation_config(FULL_TOKENS).save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=300, max_pixels=12845056).save_pretrained(folder)
    dit = config.token2wav_config.dit_config
    write_voices(folder, make_voices(FULL_TOKENS, 0, mel_dim=dit.mel_dim, speaker_dim=dit.enc_emb_dim))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_actors.checkpoints", description="Writes Qwen2.5-Omni checkpoints offline."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser("tiny", help="toy size, random weights, runnable")
    tiny.add_argument("out_dir", type=Path)
    tiny.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    full = kinds.add_parser("full", help="published 7B sizes, no weights (vLLM: load_format dummy)")
    full.add_argument("out_dir", type=Path)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 when the outputs miss a figure, 2 when the folder cannot be used."""
    options = make_parser().parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet_transformers()
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other, for minutes on a busy machine
    started = time.monotonic()
    try:
        if options.kind == "tiny":
            print_figures(write_tiny(options.out_dir, options.seed))
        else:
            write_full(options.out_dir)
    except (FolderError, OSError) as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 1
    print(f"checkpoints: wrote {options.kind} to {options.out_dir} in {time.monotonic() - started:.1f} s")
    return 0


def quiet_transformers() -> None:
    """Silences warnings of transformers that do not apply.

    It compares every id of the talker's configuration with the talker's vocabulary, also those of text tokens.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
