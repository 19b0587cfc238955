"""Log probabilities of an answer's tokens, on their way to the client."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import TokenId

MAX_LOGPROBS = 20  # likeliest tokens per position


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token, its text, and the logarithm of its probability. The text is empty within a character."""

    token_id: TokenId
    text: Annotated[str, Meta(max_length=4096)]
    logprob: float


class PositionLogprobs(Struct, frozen=True, array_like=True):
    """The token at one position of the answer, and the likeliest tokens there, the likeliest first."""

    token: TokenLogprob
    top: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_LOGPROBS)] = ()
