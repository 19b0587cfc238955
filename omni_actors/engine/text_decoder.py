"""Makes text of a request's tokens, and finds where the text ends before the model does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import cast

from vllm.logprobs import Logprob
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from omni_actors.errors import EngineError
from omni_actors.protocol.payloads import PIECE_LOGPROBS, PositionLogprobs, PromptPosition, TokenLogprob


class TextDecoder:
    """vLLM's incremental detokenizer, and which tokens the text given out so far consists of.

    With stop strings the detokenizer keeps back as many characters as could begin one. Whatever follows the text, such
    as speech, must not run ahead of it: `released` counts the tokens that are certain to be part of the answer.

    Attributes:
        stopped: whether a stop string ended the text; the request is over, although the model would go on.
        stop_reason: that string, or the token that ended the text if it is not the model's end.
        released: tokens of the answer whose text has been given out. At the end of a text that a string has stopped,
            the tokens of that string are not among them, unless their text begins before it or is part of the answer.
    """

    def __init__(self, tokenizer: TokenizerLike, request: EngineCoreRequest) -> None:
        made = IncrementalDetokenizer.from_new_request(tokenizer, request)
        if not isinstance(made, BaseIncrementalDetokenizer):
            raise EngineError("vLLM made no detokenizer for this model.")
        self._detokenizer = made
        self._logprobs = LogprobsProcessor.from_new_request(tokenizer, request)
        self._holds = bool(made.stop) and not made.include_stop_str_in_output
        self.stopped = False
        self.stop_reason: int | str | None = None
        self._end = tokenizer.eos_token_id
        self.released = 0
        self._given = 0  # characters
        self._held: deque[tuple[int, int]] = deque()  # where the text of each token not released begins and ends

    def decode(self, output: EngineCoreOutput) -> tuple[str, list[int]]:
        """The new text, and the new tokens up to the one that ends it."""
        tokens: list[int] = []
        terminated = output.finish_reason is VllmFinishReason.STOP  # by its last token, which is not text
        for index, token in enumerate(output.new_token_ids):
            before = len(self._detokenizer.output_text)
            last = index + 1 == len(output.new_token_ids)
            stop = self._detokenizer.update([token], terminated and last)
            self.stopped = stop is not None
            self.stop_reason = stop
            tokens.append(token)
            self._held.append((before, len(self._detokenizer.output_text)))
            if self.stopped:
                break
        if terminated and not self.stopped and output.stop_reason != self._end:
            self.stop_reason = output.stop_reason
        finished = self.stopped or output.finish_reason is not None
        text = self._detokenizer.get_next_output_text(finished, True)
        self._given += len(text)
        self._release(finished)
        return text, tokens

    def logprobs(self, output: EngineCoreOutput, count: int) -> tuple[PositionLogprobs, ...]:
        """The log probabilities of the first `count` new tokens; none if the request asks for none."""
        wanted = self._logprobs.num_logprobs
        if wanted is None or not output.new_token_ids:
            return ()
        self._logprobs.update_from_output(output)
        positions = cast("list[dict[int, Logprob]]", self._logprobs.logprobs)[-len(output.new_token_ids) :]
        return tuple(_position(position, wanted) for position in positions[:count])

    def prompt_logprobs(self, output: EngineCoreOutput) -> Iterator[tuple[PromptPosition, ...]]:
        """The log probabilities of the prompt, which come with the first output, in pieces for a message each.

        Call it after `logprobs`, which reads the output unless the request does not ask for those of the answer.
        """
        wanted = self._logprobs.num_prompt_logprobs
        if wanted is None or output.new_prompt_logprobs_tensors is None:
            return
        if self._logprobs.num_logprobs is None:
            self._logprobs.update_from_output(output)
        # vLLM has nothing for the first position, which follows none.
        found = cast("list[dict[int, Logprob]]", self._logprobs.prompt_logprobs)[1:]
        self._logprobs.prompt_logprobs = []
        size = PIECE_LOGPROBS // (wanted + 1)
        for start in range(0, len(found), size):
            yield tuple(_prompt_position(position, wanted) for position in found[start : start + size])

    def _release(self, finished: bool) -> None:
        if self.stopped:
            count = sum(start < self._given for start, _ in self._held)
        elif finished or not self._holds:
            count = len(self._held)
        else:
            # A token without text may begin a character that the next one completes: the two go together.
            certain = [index for index, (start, end) in enumerate(self._held, 1) if start < end <= self._given]
            count = certain[-1] if certain else 0
        self.released += count
        for _ in range(count):
            self._held.popleft()


def _position(position: dict[int, Logprob], wanted: int) -> PositionLogprobs:
    """One position from vLLM's, which has the token taken first, and ranks."""
    token, _, top = _ranked(position, wanted)
    return PositionLogprobs(token, top)


def _prompt_position(position: dict[int, Logprob], wanted: int) -> PromptPosition:
    return PromptPosition(*_ranked(position, wanted))


def _ranked(position: dict[int, Logprob], wanted: int) -> tuple[TokenLogprob, int, tuple[TokenLogprob, ...]]:
    """The token that is there, its rank, and the `wanted` likeliest in order."""
    entries = [TokenLogprob(token, entry.decoded_token or "", entry.logprob) for token, entry in position.items()]
    ranks = [entry.rank or 0 for entry in position.values()]
    ranked = sorted(zip(ranks, entries, strict=True), key=lambda pair: pair[0])
    return entries[0], ranks[0], tuple(entry for rank, entry in ranked if rank <= wanted)
