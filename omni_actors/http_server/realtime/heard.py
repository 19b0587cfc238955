"""Estimates how much of a transcript was heard when the playback of its sound was stopped.

The model makes text first and then the sound of it, and says nowhere which sound belongs to which word. The estimate
takes the speech as even, and cuts at the last whole word before that point: rather a word too few than one that the
user never heard.
"""

from __future__ import annotations


def heard(text: str, end: float, seconds: float, rate: float, *, complete: bool) -> str:
    """The part of `text` that was heard until `end`.

    Args:
        end: seconds of sound that were played.
        seconds: length of all sound that was sent.
        rate: characters per second.
        complete: whether the sound is that of the whole text.
    """
    if complete and end >= seconds:
        return text
    count = min(int(end * rate), len(text))
    if count == len(text) or text[count].isspace() or not count:
        return text[:count].rstrip()
    words = text[:count]
    border = max((index for index, character in enumerate(words) if character.isspace()), default=-1)
    if border < 0:  # one word, or a script without spaces
        return words if not text[count].isascii() else ""
    return words[:border].rstrip()
