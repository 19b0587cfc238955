"""What an omni model is asked about a recording that it is to write down, as a user would ask it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_PROMPT = 16_384  # characters
TRANSCRIBE = "Write down what is said in this recording, word for word, in the language that is spoken{language}."
TRANSLATE = "Translate what is said in this recording into English."
ONLY = " Answer with that text alone: no introduction, no comment, no quotation marks."
CONTEXT = "\n\nThis text comes before it, or shows how names and terms are spelt:\n<<<\n{prompt}\n>>>"

Language = Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z-]{1,34}$")]
TranscriptionPrompt = Annotated[str, Meta(max_length=MAX_PROMPT)]


def transcription_question(language: str | None, prompt: str) -> str:
    """Ask for the words, in `language` if the client knows it."""
    return TRANSCRIBE.format(language=f" ({language})" if language else "") + _rest(prompt)


def translation_question(prompt: str) -> str:
    """Ask for the words in English."""
    return TRANSLATE + _rest(prompt)


def _rest(prompt: str) -> str:
    return ONLY + (CONTEXT.format(prompt=prompt) if prompt.strip() else "")
