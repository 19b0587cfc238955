"""The tokenizer of a written checkpoint: published special tokens and template, made-up words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.checkpoints.errors import CheckpointError

# The published names, in the published order. Ids are always looked up by name.
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
    "user",
    "assistant",
    "system",
    " the",
    " a",
    " and",
    " of",
    " to",
    " in",
    " is",
    " it",
    " you",
    " that",
    " was",
    " for",
    " on",
    " are",
    " with",
    " as",
    " they",
    " be",
    " at",
    " one",
    " have",
    " this",
    "ing",
    "er",
    "ed",
    "\u00e9",
    "\u00fc",
    "\u4f60",
    "\u597d",
)


def chat_template(image: str, audio: str, video: str, beginning: str = "") -> str:
    """A template with roles and one placeholder per media part.

    Args:
        beginning: what comes before a message.
    """
    return (
        "{%- for message in messages -%}"
        f"{beginning}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['content'] is string -%}"
        "{{ message['content'] }}"
        "{%- else -%}"
        "{%- for part in message['content'] -%}"
        "{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}"
        f"{{{{ '{image}' }}}}"
        "{%- elif part['type'] in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}"
        f"{{{{ '{audio}' }}}}"
        "{%- elif part['type'] in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}"
        f"{{{{ '{video}' }}}}"
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


# Equivalent to the published template, which has a default system prompt.
CHAT_TEMPLATE = chat_template(
    image="<|vision_bos|><|IMAGE|><|vision_eos|>",
    audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
    video="<|vision_bos|><|VIDEO|><|vision_eos|>",
    beginning="{%- if loop.first and message['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif -%}",
)


@dataclass(frozen=True)
class TokenLayout:
    """The ids of the tokens in a vocabulary.

    `vocab_size` is the number of rows of the embedding; `first_special` the id of the first of `special`, the others
    follow it; `first_speech` that of the first of `speech`; `voices` maps a voice to the id of its token; `fixed` holds
    words with a given id. Every other id gets a made-up word, so that each of them decodes to some text. `named` are
    the attributes of the tokenizer that its processor and its chat template rely on. The defaults are Qwen2.5-Omni's.
    """

    vocab_size: int
    first_special: int
    first_speech: int
    voices: dict[str, int]
    fixed: dict[str, int] = field(default_factory=dict)
    special: tuple[str, ...] = SPECIAL_TOKENS
    speech: tuple[str, ...] = SPEECH_TOKENS
    named: Mapping[str, str] = field(default_factory=lambda: NAMED_TOKENS)
    template: str = CHAT_TEMPLATE

    def ids(self) -> dict[str, int]:
        """Returns the id of every special and speech token by name."""
        ids = {name: self.first_special + index for index, name in enumerate(self.special)}
        return ids | {name: self.first_speech + index for index, name in enumerate(self.speech)}


def tiny_layout(vocab_size: int) -> TokenLayout:
    """Returns a layout whose special tokens are among the last 32 ids."""
    voices = {"Ethan": vocab_size - 6, "Chelsie": vocab_size - 5}
    return TokenLayout(vocab_size, first_special=vocab_size - 32, first_speech=vocab_size - 12, voices=voices)


TINY_TOKENS = tiny_layout(512)
FULL_TOKENS = TokenLayout(
    vocab_size=152064,
    first_special=151643,
    first_speech=151859,
    voices={"Ethan": 151870, "Chelsie": 151872},
    fixed={"user": 872},
)


def byte_level(text: str) -> str:
    """Returns text in the alphabet of byte-level BPE: one printable character per UTF-8 byte."""
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def special_ids(layout: TokenLayout) -> dict[str, int]:
    """Returns the id of every token that is no ordinary text: the special and speech tokens and those of the voices."""
    return layout.ids() | {VOICE_TOKENS[voice]: index for voice, index in layout.voices.items()}


def make_vocabulary(layout: TokenLayout) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the vocabulary (token to id) and the merges of the byte-level BPE."""
    from tokenizers import pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = special_ids(layout)
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
    # Special tokens are part of the BPE vocabulary, so that they can have ids beyond the number of words.
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(layout.named),
        chat_template=layout.template,
        model_max_length=32768,
    )
    names = list(special_ids(layout))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    for name in names:
        token_id = tokenizer.convert_tokens_to_ids(name)
        if token_id != vocabulary[name]:
            raise CheckpointError(f"token {name} got id {token_id}, not {vocabulary[name]}")
    return tokenizer
