"""Several answers to one prompt, each a request of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from omni_actors.client.prompts import to_params
from omni_actors.client.streams import OmniRequestOutput, RequestStream, StreamItem
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.protocol.messages import StageUsage

MAX_CHOICES = 16
SEEDS = 1 << 63


class ChoiceItem(NamedTuple):
    """The next item of one answer; the item is `None` once the answer is complete."""

    choice: int
    item: StreamItem | None


class ChoiceStreams:
    """The answers to one prompt: iterate for `ChoiceItem`s in the order in which they arrive, then read `usages`.

    Iteration raises the `OmniError` of the first answer that fails; the others then end, too.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self.streams = tuple(streams)
        self._left = len(streams)  # answers that are not complete
        self._arrived: asyncio.Queue[int] = asyncio.Queue()  # the answer of each item that was not read yet
        for choice, stream in enumerate(streams):
            for _ in range(stream.unread):
                self._arrived.put_nowait(choice)
            stream.on_delivery = functools.partial(self._arrived.put_nowait, choice)

    def __aiter__(self) -> AsyncIterator[ChoiceItem]:
        return self

    async def __anext__(self) -> ChoiceItem:
        if not self._left:
            raise StopAsyncIteration
        choice = await self._arrived.get()
        try:
            return ChoiceItem(choice, await anext(self.streams[choice]))
        except StopAsyncIteration:
            self._left -= 1
            return ChoiceItem(choice, None)
        except OmniError:
            self._left = 0
            await self.abort()
            raise

    @property
    def ready(self) -> bool:
        """Whether the next step of the iteration need not wait."""
        return not self._left or not self._arrived.empty()

    @property
    def usages(self) -> list[dict[str, StageUsage]]:
        """The usage of each answer by stage; complete once the iteration has ended."""
        return [stream.usage for stream in self.streams]

    async def abort(self) -> None:
        """End those answers in all stages that have not ended. Idempotent."""
        for stream in self.streams:
            await stream.abort()

    async def results(self) -> list[OmniRequestOutput]:
        """Wait for all answers. Raises the `OmniError` of the first one that fails; the others then end, too."""
        waiting = [asyncio.ensure_future(stream.result()) for stream in self.streams]
        try:
            return await asyncio.gather(*waiting)
        except BaseException:  # a cancelled task's, too: the other answers must not go on unread
            await self.abort()
            await asyncio.gather(*waiting, return_exceptions=True)
            raise


def check_choices(count: int) -> None:
    """Raise `InvalidRequest` for a number of answers that a request cannot have."""
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidRequest(
            f"n: a prompt has 1 to {MAX_CHOICES} answers; {count} were asked for.",
            hint="Send the prompt more than once: a prompt that is still in the cache is not computed again.",
            field="n",
        )


def of_choice(options: Mapping[str, Any], choice: int) -> dict[str, Any]:
    """The options of `submit` for one of several answers. Seeds count up from the first answer's, as with vLLM.

    Only the first answer comes with the prompt's log probabilities.
    """
    own = dict(options)
    if not choice:
        return own
    own["request_id"] = f"{options['request_id']}-{choice}"
    own["seed"] = _counted(options.get("seed"), choice)
    own["params"] = {
        stage: msgspec.structs.replace(given, seed=_counted(given.seed, choice), prompt_logprobs=None)
        for stage, given in to_params(options.get("params") or {}).items()
    }
    return own


def _counted(seed: int | None, choice: int) -> int | None:
    return seed if seed is None else (seed + choice) % SEEDS
