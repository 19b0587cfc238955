"""What surrounds the weights: token ids, sizes, tokenizer and processor of the checkpoint that speaks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.checkpoints.omni import QWEN2_5_OMNI, make_config, make_generation_config, make_processor, role_ids
from tools.checkpoints.tokenizer import tokenizer_of
from tools.speaker import SpeakerError
from tools.speaker.codec import CODES

SPEAKER_DIM = 192
# 9.0 million weights, as many as 18.5 MB of float16 hold. As published, the special codes lie 12 and more after the
# sounds; the talker's vocabulary is a multiple of 32. vLLM's attention on a CPU needs heads of 32 or more.
SIZES = QWEN2_5_OMNI.tiny_sizes(
    {
        **{"vocabulary": 1024, "first_special": 1000, "first_speech": 1014, "voices": {"Ethan": 1018, "Chelsie": 1019}},
        **{"sounds": CODES, "codec_vocabulary": -(-(CODES + 17) // 32) * 32},
        **{"audio_layers": 3, "audio_between": 256, "audio_width": 96},
        **{"vision_width": 32, "vision_between": 64, "vision_heads": 2},
        **{"between": 384, "layers": 4, "heads": 6, "kv_heads": 2},
        **{"talker_width": 224, "talker_between": 448, "talker_layers": 8, "talker_heads": 8, "talker_kv_heads": 4},
        **{"dit_head_width": 64, "dit_layers": 6, "dit_heads": 2, "dit_embedding": 96, "dropout": 0.0},
        **{"dit_ahead": [2], "dit_backward": [0, 4], "channels": 192},
    }
)
TOKENS = QWEN2_5_OMNI.layout(SIZES)
# Prefixes of the four parts' tensors in the whole model.
PARTS = {
    "thinker": "thinker.",
    "talker": "talker.",
    "dit": "token2wav.code2wav_dit_model.",
    "vocoder": "token2wav.code2wav_bigvgan_model.",
}


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
    special = TOKENS.special_ids()
    unused = (index for index in range(TOKENS.first_special, TOKENS.vocab_size) if index not in special.values())
    special |= {f"<|unused_{index}|>": index for index in unused}
    pairs = [(first, second) for first, second in merges]
    return tokenizer_of(TOKENS, vocabulary, pairs, special)


def speaker_config(user_token: int) -> Any:
    """Returns the configuration."""
    return make_config(QWEN2_5_OMNI, SIZES, {"user": user_token})


def write_layout(folder: Path, tokenizer: Any) -> None:
    """Writes configuration, generation settings, tokenizer and processor into a folder."""
    make_config(QWEN2_5_OMNI, SIZES, role_ids(tokenizer)).save_pretrained(folder)
    make_generation_config(TOKENS).save_pretrained(folder)
    make_processor(QWEN2_5_OMNI, SIZES, tokenizer).save_pretrained(folder)


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder that `write_layout` has written. Raises SpeakerError if there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise SpeakerError(f"{folder} has no tokenizer.json; name a folder that `corpus` or `export` has written.")
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    words = {word: index for word, index in model["vocab"].items() if index < TOKENS.first_special}
    return _make_tokenizer(words, model["merges"])
