"""The answer to a request: pieces of text and audio in order, then usage by stage or a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy
from numpy.typing import NDArray

from omni_actors.client.outputs import OmniRequestOutput
from omni_actors.errors import OmniError
from omni_actors.protocol.client import Done
from omni_actors.protocol.logprobs import PositionLogprobs
from omni_actors.protocol.results import StageUsage
from omni_actors.protocol.tools import CollectedCalls, ToolCallPiece


class Text(msgspec.Struct, frozen=True):
    """The next piece of text with the thinker's `token_ids`. The text is empty if they end inside a character.

    `tool_calls` are the next pieces of calls of tools, which are not part of the text. `logprobs` has an entry for each
    token if the request asks for them.
    """

    text: str
    token_ids: list[int]
    tool_calls: tuple[ToolCallPiece, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()


class Audio(msgspec.Struct, frozen=True):
    """The next piece of audio: f32 [samples] in [-1, 1] at `sample_rate` Hz."""

    samples: NDArray[numpy.float32]
    sample_rate: int


StreamItem = Text | Audio


class RequestStream:
    """The answer to one request: iterate for `Text` and `Audio` in order, then read `usage`.

    Iteration raises the `OmniError` with which the request failed.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.usage: dict[str, StageUsage] = {}
        self._abort = abort
        self._items: asyncio.Queue[StreamItem | Done | OmniError] = asyncio.Queue()
        self._ended = False
        self.on_delivery: Callable[[], None] | None = None  # is called for each item that arrives

    def __aiter__(self) -> AsyncIterator[StreamItem]:
        return self

    async def __anext__(self) -> StreamItem:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, Text | Audio):
            return item
        self._ended = True
        if isinstance(item, OmniError):
            raise item
        self.usage = item.usage
        raise StopAsyncIteration

    @property
    def ready(self) -> bool:
        """Whether the next step of the iteration need not wait."""
        return self._ended or not self._items.empty()

    async def abort(self) -> None:
        """End the request in all stages. Idempotent. Iteration then raises `Aborted`, unless it was over already."""
        if not self._ended:
            self._abort(self.request_id)

    async def result(self) -> OmniRequestOutput:
        """Wait for the whole answer. Raises the `OmniError` with which the request failed."""
        output = OmniRequestOutput(self.request_id)
        texts: list[str] = []
        pieces: list[NDArray[numpy.float32]] = []
        calls = CollectedCalls()
        async for item in self:
            if isinstance(item, Text):
                texts.append(item.text)
                calls.add(item.tool_calls)
                output.token_ids.extend(item.token_ids)
                output.logprobs.extend(item.logprobs)
            else:
                pieces.append(item.samples)
                output.sample_rate = item.sample_rate
        output.text = "".join(texts)
        output.tool_calls = calls.whole()
        if pieces:
            output.audio = numpy.concatenate(pieces)
        output.usage = self.usage
        output.finish_reasons = {stage: usage.finish_reason.value for stage, usage in self.usage.items()}
        return output

    def deliver(self, item: StreamItem | Done | OmniError) -> None:
        """Append an item. The client calls this for each message of the request."""
        self._items.put_nowait(item)
        if self.on_delivery is not None:
            self.on_delivery()
