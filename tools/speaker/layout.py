"""What surrounds the weights: token ids, sizes, tokenizer and processor of the checkpoint that speaks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.checkpoints.configuration import (
    ARCHITECTURE,
    CodecTokens,
    make_generation_config,
    make_processor,
    rope,
    talker_fields,
    text_fields,
    thinker_fields,
)
from tools.checkpoints.tokenizer import CHAT_TEMPLATE, NAMED_TOKENS, VOICE_TOKENS, TokenLayout
from tools.speaker.codec import CODES
from tools.speaker.errors import SpeakerError

TOKENS = TokenLayout(vocab_size=1024, first_special=1000, first_speech=1014, voices={"Ethan": 1018, "Chelsie": 1019})
# As published, special tokens lie 12, 13, 14 and 16 after the sounds; the size is a multiple of 32.
CODEC = CodecTokens(
    vocab_size=-(-(CODES + 17) // 32) * 32,
    sounds=CODES,
    pad=CODES + 12,
    start=CODES + 13,
    end=CODES + 14,
    mask=CODES + 16,
)
WIDTH = 192
SPEAKER_DIM = 192
# Prefixes of the four parts' tensors in the whole model.
PARTS = {
    "thinker": "thinker.",
    "talker": "talker.",
    "dit": "token2wav.code2wav_dit_model.",
    "vocoder": "token2wav.code2wav_bigvgan_model.",
}


def token_ids() -> dict[str, int]:
    """Returns the ids of all tokens that are no text."""
    return TOKENS.ids() | {VOICE_TOKENS[voice]: index for voice, index in TOKENS.voices.items()}


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Returns a Qwen2 tokenizer of 1024 tokens, whose merges are learned from texts.

    Raises:
        SpeakerError: the texts are too few for that many merges, or lack the roles' names.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer
    learned.decoder = decoders.ByteLevel()
    words = TOKENS.first_special
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(learned.to_str())["model"]
    vocabulary = dict(model["vocab"])
    if len(vocabulary) != words or "user" not in vocabulary:
        raise SpeakerError(f"The texts give {len(vocabulary)} tokens instead of {words}; the corpus is too small.")
    return _make_tokenizer(vocabulary, model["merges"])


def _make_tokenizer(vocabulary: dict[str, int], merges: Iterable[Iterable[str]]) -> Any:
    """Returns the tokenizer with these words and merges, and all special tokens at their ids."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    special = token_ids()
    unused = (index for index in range(TOKENS.first_special, TOKENS.vocab_size) if index not in special.values())
    special |= {f"<|unused_{index}|>": index for index in unused}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary | special,
        merges=[tuple(pair) for pair in merges],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special], special_tokens=True)
    return tokenizer


def make_config(user_token: int) -> Any:
    """Returns the configuration; 9.0 million weights, as many as 18.5 MB of float16 hold.

    vLLM's attention on a CPU needs heads of 32 or more, and in the talker the width of a head is not that of the hidden
    state divided by the heads, as in the published model.
    """
    from transformers import Qwen2_5OmniConfig

    thinker = thinker_fields(TOKENS, user_token) | {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 3,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "d_model": 96,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": WIDTH,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,
            "window_size": 112,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
        },
        "text_config": text_fields(TOKENS)
        | {
            "hidden_size": WIDTH,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": rope([4, 6, 6]),
        },
    }
    talker = talker_fields(TOKENS, CODEC) | {
        "embedding_size": WIDTH,
        "hidden_size": 224,
        "intermediate_size": 448,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 32768,
        "rope_parameters": rope([4, 6, 6]),
    }
    token2wav = {
        "dit_config": {
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "head_dim": 64,
            "emb_dim": 96,
            "ff_mult": 2,
            "block_size": 24,
            "look_ahead_layers": [2],
            "look_backward_layers": [0, 4],
            "repeats": 2,
            "num_embeds": CODEC.sounds + 1,
            "mel_dim": 80,
            "enc_emb_dim": SPEAKER_DIM,
            "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_res2net_scale": 2,
            "enc_se_channels": 16,
            "dropout": 0.0,
        },
        "bigvgan_config": {
            "mel_dim": 80,
            "upsample_initial_channel": 192,
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


def write_layout(folder: Path, tokenizer: Any) -> None:
    """Writes configuration, generation settings, tokenizer and processor into a folder."""
    make_config(tokenizer.convert_tokens_to_ids("user")).save_pretrained(folder)
    make_generation_config(TOKENS).save_pretrained(folder)
    make_processor(tokenizer, audio_seconds=30, max_pixels=256 * 28 * 28).save_pretrained(folder)


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder that `write_layout` has written. Raises SpeakerError if there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise SpeakerError(f"{folder} has no tokenizer.json; name a folder that `corpus` or `export` has written.")
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    words = {word: index for word, index in model["vocab"].items() if index < TOKENS.first_special}
    return _make_tokenizer(words, model["merges"])
