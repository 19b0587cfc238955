"""What a client has of an answer, counted, so that when a part of it is computed again only the rest is passed on.

The coordinator counts for a stage that was lost and starts over, the client for a coordinator that was lost. What runs
again is computed from the start, with the same seed. Tokens, characters and samples are counted, not messages: another
attempt may cut them differently. A picture, or its latents, is one message, and a video is always cut in the
same way.
"""

from __future__ import annotations

import collections
import copy
import zlib
from collections.abc import Collection, Sequence

from omni_actors.errors import StageLost
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import TOKEN_BYTES, TensorRef
from omni_actors.protocol.messages import (
    AudioChunk,
    Delivered,
    ImageChunk,
    LatentsChunk,
    Output,
    StepsDone,
    TextDelta,
    VideoChunk,
    WordsChunk,
)
from omni_actors.protocol.payloads import ToolCallPiece

Fresh = tuple[Output, Sequence[Frame]]

SAMPLE_BYTES = 4


# What is counted of an answer, and the modality that it belongs to.
COUNTED = {
    "tokens": "text",
    "characters": "text",
    "prompt positions": "text",
    "samples": "audio",
    "image": "image",
    "preview": "image",
    "video": "video",
    "latents": "latents",
    "words": "words",
}
# Previews and log probabilities may differ.
ESSENTIAL = ("tokens", "characters", "samples", "image", "video", "latents", "words")


class Delivery:
    """The count for one request."""

    def __init__(self, delivered: Delivered | None = None) -> None:
        self._has = copy.deepcopy(delivered or Delivered())  # what the client has
        self._to_skip: collections.Counter[str] = collections.Counter()  # of that, what a replay still brings again
        self._checksum_again = 0  # of the tokens that came again
        self._calls_to_skip: dict[int, int] = {}  # of the calls, what comes again, with their names

    def replay(self, modalities: Collection[str]) -> None:
        """Expect all that was delivered in these modalities to come again."""
        self._to_skip |= {kind: count for kind, count in self._has.counts.items() if COUNTED[kind] in modalities}
        if "text" in modalities:
            self._calls_to_skip = dict(self._has.calls)
            self._checksum_again = 0

    def state(self) -> Delivered:
        """All that was counted, to go on with elsewhere."""
        return copy.deepcopy(self._has)

    @property
    def complete(self) -> bool:
        """Whether all that the client had before a replay has come again."""
        return not any(self._to_skip[kind] for kind in ESSENTIAL)

    def take(self, body: Output, buffers: Sequence[Frame]) -> Fresh | None:
        """The new part of an output, with its buffers; `None` for nothing.

        Raises:
            StageLost: the replay differs from what the client has, so that the rest would not fit.
        """
        match body:
            case TextDelta():
                delta = self._text(body)
                return (delta, ()) if delta is not None else None
            case AudioChunk():
                return self._audio(body, buffers)
            case ImageChunk():
                return None if self._known("preview" if body.preview else "image", 1) else (body, buffers)
            case VideoChunk() | LatentsChunk() | WordsChunk():
                return None if self._known(body.modality, 1) else (body, buffers)
            case StepsDone():
                if body.step <= self._has.steps.get(body.stage, 0):  # after a replay, until it has caught up
                    return None
                self._has.steps[body.stage] = body.step
                return body, ()

    def _known(self, kind: str, count: int) -> int:
        """Count output, and return how much of it, from its start, the client has already."""
        known = min(self._to_skip[kind], count)
        self._to_skip[kind] -= known
        self._has.counts[kind] = self._has.counts.get(kind, 0) + count - known
        return known

    def _text(self, body: TextDelta) -> TextDelta | None:
        size = self._known("tokens", len(body.token_ids) // TOKEN_BYTES) * TOKEN_BYTES
        letters = self._known("characters", len(body.text))
        positions = self._known("prompt positions", len(body.prompt_logprobs))
        if size:
            self._checksum_again = zlib.crc32(body.token_ids[:size], self._checksum_again)
            if not self._to_skip["tokens"] and self._checksum_again != self._has.checksum:
                raise diverged()
        calls = self._new_pieces(body.tool_calls) if body.tool_calls else ()
        self._has.checksum = zlib.crc32(body.token_ids[size:], self._has.checksum)
        if not (size or letters or positions or calls != body.tool_calls):
            return body
        fresh = TextDelta(
            text=body.text[letters:],
            token_ids=body.token_ids[size:],
            tool_calls=calls,
            logprobs=body.logprobs[size // TOKEN_BYTES :],
            prompt_logprobs=body.prompt_logprobs[positions:],
        )
        return fresh if fresh.text or fresh.token_ids or calls or fresh.prompt_logprobs else None

    def _new_pieces(self, pieces: Sequence[ToolCallPiece]) -> tuple[ToolCallPiece, ...]:
        """Leave out what the client has of tool calls. A call keeps the id under which the client knows it."""
        fresh = []
        for piece in pieces:
            skip = self._calls_to_skip.get(piece.index)
            if skip is not None:
                self._calls_to_skip[piece.index] = max(0, skip - len(piece.arguments))
                piece = ToolCallPiece(index=piece.index, arguments=piece.arguments[skip:])
            self._has.calls[piece.index] = self._has.calls.get(piece.index, 0) + len(piece.arguments)
            if piece.name or piece.arguments:
                fresh.append(piece)
        return tuple(fresh)

    def _audio(self, body: AudioChunk, buffers: Sequence[Frame]) -> tuple[AudioChunk, Sequence[Frame]] | None:
        (length,) = body.samples.shape
        known = self._known("samples", length)
        if not known:
            return body, buffers
        if known == length:
            return None
        rest = memoryview(buffers[body.samples.buffer]).cast("B")[known * SAMPLE_BYTES :]
        samples = TensorRef(body.samples.dtype, (length - known,), 0)
        return AudioChunk(samples=samples, sample_rate=body.sample_rate), (rest,)


def diverged() -> StageLost:
    """The error for an answer that cannot be continued."""
    return StageLost("A process was lost, and the replay did not repeat what had been delivered.")
