"""The tokenizer of a written checkpoint: published special tokens and template, made-up words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.checkpoints import CheckpointError

# The token that tells the talker which voice to use. They have no published name.
VOICE_TOKENS = {"Ethan": "<|voice_ethan|>", "Chelsie": "<|voice_chelsie|>"}

_SEEN = ("image_token", "video_token")

# Each word becomes one token, by merging it from the left. The last ones make multi-byte characters one token.
_WORDS = "the a and of to in is it you that was for on are with as they be at one have this"
MERGED_WORDS = (
    *("user", "assistant", "system"),
    *(f" {word}" for word in _WORDS.split()),
    *("ing", "er", "ed", "\u00e9", "\u00fc", "\u4f60", "\u597d"),
)


def chat_template(named: Mapping[str, str], system: str | None) -> str:
    """Returns a template with roles and one placeholder per media part, equivalent to the published one.

    Args:
        named: the tokens of media, by their names in the tokenizer.
        system: the default system prompt; `None`: there is none.
    """
    image, video = (f"{named['vision_bos_token']}{named[name]}{named['vision_eos_token']}" for name in _SEEN)
    audio = f"{named['audio_bos_token']}{named['audio_token']}{named['audio_eos_token']}"
    beginning = "{%- if loop.first and message['role'] != 'system' -%}"
    beginning += f"{{{{ '<|im_start|>system\\n{system}<|im_end|>\\n' }}}}{{%- endif -%}}"
    return (
        "{%- for message in messages -%}"
        f"{beginning if system else ''}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] }}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}"
        f"{{{{ '{image}' }}}}"
        "{%- elif part['type'] in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}"
        f"{{{{ '{audio}' }}}}"
        "{%- elif part['type'] in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}"
        f"{{{{ '{video}' }}}}"
        "{%- elif 'text' in part -%}{{ part['text'] }}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


@dataclass(frozen=True)
class TokenLayout:
    """The ids of the tokens in a vocabulary.

    `vocab_size` is the number of rows of the embedding; `first_special` the id of the first of `special`, the others
    follow it; `first_speech` that of the first of `speech`; `voices` maps a voice to the id of its token; `fixed` holds
    words with a given id. Every other id gets a made-up word, so that each of them decodes to some text. `written` are
    those of `special` and `speech` that stay in decoded texts. `named` are the attributes of the tokenizer that its
    processor and its chat template rely on.
    """

    vocab_size: int
    first_special: int
    first_speech: int
    voices: Mapping[str, int]
    fixed: Mapping[str, int]
    special: tuple[str, ...]
    speech: tuple[str, ...]
    written: tuple[str, ...]
    named: Mapping[str, str]
    template: str

    def ids(self) -> dict[str, int]:
        """Returns the id of every special and speech token by name."""
        ids = {name: self.first_special + index for index, name in enumerate(self.special)}
        return ids | {name: self.first_speech + index for index, name in enumerate(self.speech)}

    def special_ids(self) -> dict[str, int]:
        """Returns the id of every token that is not ordinary text: those of `ids()` and of the voices."""
        return self.ids() | {VOICE_TOKENS[voice]: index for voice, index in self.voices.items()}


def byte_level(text: str) -> str:
    """Returns text in the alphabet of byte-level BPE: one printable character per UTF-8 byte."""
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def make_vocabulary(layout: TokenLayout) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the words (token to id) and the merges of the byte-level BPE."""
    from tokenizers import pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    taken = set(layout.special_ids().values()) | set(layout.fixed.values())
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
    return vocabulary, merges


def make_tokenizer(layout: TokenLayout) -> Any:
    """Returns a Qwen2 tokenizer with the published special tokens at the ids that the layout gives them."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    (words, merges), special = make_vocabulary(layout), layout.special_ids()
    # Special tokens are part of the BPE vocabulary, so that they can have ids beyond the number of words.
    tokenizer = Qwen2Tokenizer(
        vocab={**words, **special},
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(layout.named),
        chat_template=layout.template,
        model_max_length=32768,
    )
    for is_special in (True, False):
        names = [name for name in special if (name not in layout.written) is is_special]
        added = [AddedToken(name, special=is_special, normalized=False) for name in names]
        tokenizer.add_tokens(added, special_tokens=is_special)
    for name, index in special.items():
        if (found := tokenizer.convert_tokens_to_ids(name)) != index:
            raise CheckpointError(f"token {name} got id {found}, not {index}")
    return tokenizer
