"""Log probabilities in OpenAI's two shapes, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_actors.protocol.payloads import PositionLogprobs, PromptPosition, TokenLogprob

LEAST = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's value


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
    """The `logprobs` of a chat completion's choice; `None` without any."""
    if not positions:
        return None
    return {"content": token_logprobs(positions), "refusal": None}


def token_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    """An entry for each token, as chats and responses have it."""
    return [
        {**_entry(position.token), "top_logprobs": [_entry(token) for token in position.top]} for position in positions
    ]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST), "bytes": list(token.text.encode())}


def prompt_logprobs(positions: Sequence[PromptPosition]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id at each position, the prompt's own token first.

    The first position has none, as nothing comes before it.
    """
    found: list[dict[str, Any] | None] = [None]
    for position in positions:
        ranked = {str(token.token_id): _ranked(token, rank) for rank, token in enumerate(position.top, 1)}
        own = {str(position.token.token_id): _ranked(position.token, position.rank)}
        found.append({**own, **ranked})
    return found


def _ranked(token: TokenLogprob, rank: int) -> dict[str, Any]:
    return {"logprob": max(token.logprob, LEAST), "rank": rank, "decoded_token": token.text}


class CompletionLogprobs:
    """The `logprobs` of a text completion's choice, piece by piece. Offsets count characters of the tokens' texts."""

    def __init__(self) -> None:
        self._offset = 0

    def piece(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        """The next positions; `None` for none."""
        if not positions:
            return None
        offsets = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(position.token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(position.token.logprob, LEAST) for position in positions],
            "tokens": [position.token.text for position in positions],
            "top_logprobs": [
                {token.text: max(token.logprob, LEAST) for token in (*position.top, position.token)}
                for position in positions
            ],
        }
