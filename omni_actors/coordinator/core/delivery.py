"""Counts what a client already has of an answer, so that a replay sends it only the rest.

A stage that runs again computes its part of the answer from the start, with the same seed. Tokens, characters and
samples are counted, not messages: another attempt may cut them differently. A picture, or its latents, is one message.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Collection, Sequence

import msgspec

from omni_actors.errors import StageLost
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import TOKEN_BYTES
from omni_actors.protocol.results import AudioChunk, ImageChunk, LatentsChunk, Output, Progress, TextDelta
from omni_actors.protocol.tensors import TensorRef
from omni_actors.protocol.tools import ToolCallPiece

Fresh = tuple[Output, Sequence[Frame]]

SAMPLE_BYTES = 4


class Delivery:
    """The count for one request."""

    def __init__(self) -> None:
        self.tokens = 0
        self.characters = 0
        self.samples = 0
        self._positions = 0  # of the prompt, with log probabilities
        self._checksum = 0  # of the tokens that the client has
        self._skip_tokens = 0  # so many will come again
        self._skip_characters = 0
        self._skip_samples = 0
        self._skip_positions = 0
        self._again = 0  # checksum of those that came again
        self._calls: dict[int, int] = {}  # characters of arguments that the client has, by the index of the call
        self._skip_calls: dict[int, int] = {}  # those that will come again, with the call's name
        self._whole: collections.Counter[str] = collections.Counter()  # whole messages that the client has, by kind
        self._skip_whole: collections.Counter[str] = collections.Counter()
        self._steps: dict[str, int] = {}  # by stage: the progress that the client knows of

    def replay(self, modalities: Collection[str]) -> None:
        """Expect all that was delivered in these modalities to come again."""
        if "text" in modalities:
            self._skip_tokens, self._skip_characters = self.tokens, self.characters
            self._skip_calls = dict(self._calls)
            self._skip_positions = self._positions
            self._again = 0
        if "audio" in modalities:
            self._skip_samples = self.samples
        for kind, count in self._whole.items():
            if ("image" if kind == "preview" else kind) in modalities:
                self._skip_whole[kind] = count

    @property
    def complete(self) -> bool:
        """Whether all that the client had before a replay has come again."""
        whole = self._skip_whole["image"] or self._skip_whole["latents"]
        return not (self._skip_tokens or self._skip_characters or self._skip_samples or whole)

    def take(self, stage: str, body: Output, buffers: Sequence[Frame]) -> Fresh | None:
        """The new part of a stage's output, with its buffers; `None` for nothing.

        Raises:
            StageLost: the replay differs from what the client has, so that the rest would not fit.
        """
        match body:
            case TextDelta():
                delta = self.text(body)
                return (delta, ()) if delta is not None else None
            case AudioChunk():
                return self.audio(body, buffers)
            case ImageChunk():
                return (body, buffers) if self._is_new("preview" if body.preview else "image") else None
            case LatentsChunk():
                return (body, buffers) if self._is_new("latents") else None
            case Progress():
                return self._progress(stage, body)

    def _is_new(self, kind: str) -> bool:
        if self._skip_whole[kind]:
            self._skip_whole[kind] -= 1
            return False
        self._whole[kind] += 1
        return True

    def _progress(self, stage: str, body: Progress) -> Fresh | None:
        """Progress that the client has not seen yet. After a replay there is none until it has caught up."""
        if body.step <= self._steps.get(stage, 0):
            return None
        self._steps[stage] = body.step
        return msgspec.structs.replace(body, stage=stage), ()

    def text(self, body: TextDelta) -> TextDelta | None:
        """The new part of `body`; `None` for nothing.

        Raises:
            StageLost: the replay differs from what the client has, so that the rest would not fit.
        """
        known = min(self._skip_tokens, len(body.token_ids) // TOKEN_BYTES)
        letters = min(self._skip_characters, len(body.text))
        positions = min(self._skip_positions, len(body.prompt_logprobs))
        if known:
            self._again = zlib.crc32(body.token_ids[: known * TOKEN_BYTES], self._again)
            self._skip_tokens -= known
            if not self._skip_tokens and self._again != self._checksum:
                raise diverged()
        self._skip_characters -= letters
        self._skip_positions -= positions
        token_ids, text = body.token_ids[known * TOKEN_BYTES :], body.text[letters:]
        calls = self._new_pieces(body.tool_calls) if body.tool_calls else ()
        prompt_logprobs = body.prompt_logprobs[positions:]
        if (known or letters or positions or body.tool_calls) and not (token_ids or text or calls or prompt_logprobs):
            return None
        self._checksum = zlib.crc32(token_ids, self._checksum)
        self.tokens += len(token_ids) // TOKEN_BYTES
        self.characters += len(text)
        self._positions += len(prompt_logprobs)
        if not (known or letters or positions or calls != body.tool_calls):
            return body
        return TextDelta(
            text=text,
            token_ids=token_ids,
            tool_calls=calls,
            logprobs=body.logprobs[known:],
            prompt_logprobs=prompt_logprobs,
        )

    def _new_pieces(self, pieces: Sequence[ToolCallPiece]) -> tuple[ToolCallPiece, ...]:
        """Leave out what the client has of tool calls. A call keeps the id under which the client knows it."""
        fresh = []
        for piece in pieces:
            skip = self._skip_calls.get(piece.index)
            if skip is not None:
                self._skip_calls[piece.index] = max(0, skip - len(piece.arguments))
                piece = ToolCallPiece(index=piece.index, arguments=piece.arguments[skip:])
            self._calls[piece.index] = self._calls.get(piece.index, 0) + len(piece.arguments)
            if piece.name or piece.arguments:
                fresh.append(piece)
        return tuple(fresh)

    def audio(self, body: AudioChunk, buffers: Sequence[Frame]) -> tuple[AudioChunk, Sequence[Frame]] | None:
        """The new part of the chunk, with its buffers; `None` for nothing."""
        (length,) = body.samples.shape
        known = min(self._skip_samples, length)
        self._skip_samples -= known
        self.samples += length - known
        if not known:
            return body, buffers
        if known == length:
            return None
        rest = memoryview(buffers[body.samples.buffer]).cast("B")[known * SAMPLE_BYTES :]
        samples = TensorRef(body.samples.dtype, (length - known,), 0)
        return AudioChunk(samples=samples, sample_rate=body.sample_rate), (rest,)


def diverged() -> StageLost:
    """The error for an answer that cannot be continued."""
    return StageLost("A stage was lost, and the replay did not repeat what had been delivered.")
