"""Log probabilities of the tokens of an answer and of its prompt, on their way to the client."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from omni_actors.protocol.fields import TokenId

MAX_LOGPROBS = 20  # likeliest tokens per position
MAX_PROMPT_LOGPROBS = 32_768  # of a prompt: its tokens times the entries of each, which are made between two steps
PIECE_LOGPROBS = 4_096  # of those, in one message


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token, its text, and the logarithm of its probability. The text is empty within a character."""

    token_id: TokenId
    text: Annotated[str, Meta(max_length=4096)]
    logprob: float


class PositionLogprobs(Struct, frozen=True, array_like=True):
    """The token at one position of the answer, and the likeliest tokens there, the likeliest first."""

    token: TokenLogprob
    top: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_LOGPROBS)] = ()


class PromptPosition(Struct, frozen=True, array_like=True):
    """The token at one position of the prompt, how many tokens were likelier there plus one, and the likeliest."""

    token: TokenLogprob
    rank: Annotated[int, Meta(ge=1)]
    top: Annotated[tuple[TokenLogprob, ...], Meta(max_length=MAX_LOGPROBS)] = ()
