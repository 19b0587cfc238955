"""Answers many prompts with one client: as many at a time as the pipeline admits, urgent ones first."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omni_actors.client.async_client import AsyncOmniClient
from omni_actors.client.outputs import OmniRequestOutput
from omni_actors.client.prompts import Prompting
from omni_actors.client.streams import RequestStream
from omni_actors.errors import OmniError, Overloaded
from omni_actors.protocol.payloads import StageParams

RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PromptCall:
    """A prompt with its parameters by stage and its options for `AsyncOmniClient.submit`."""

    prompt: Prompting
    params: dict[str, StageParams]
    options: dict[str, Any]


async def answer_all(
    client: AsyncOmniClient, calls: Sequence[PromptCall], at_a_time: int, done: Callable[[int], Any]
) -> list[OmniRequestOutput]:
    """Return one output per call, in order; a call that failed has its `error` set.

    Args:
        at_a_time: requests to have in flight. Of those that wait here, lower values of `priority` go first, then
            earlier ones.
        done: called with 1 for each call that is answered.
    """
    outputs: dict[int, OmniRequestOutput] = {}
    waiting = [(call.options.get("priority", 0), index) for index, call in enumerate(calls)]
    heapq.heapify(waiting)

    async def work() -> None:
        while waiting:
            place = heapq.heappop(waiting)
            try:
                outputs[place[1]] = await _answer(client, calls[place[1]])
            except Overloaded as error:  # another client of this pipeline has requests, too
                heapq.heappush(waiting, place)
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)
            else:
                done(1)

    workers = [asyncio.create_task(work()) for _ in range(min(at_a_time, len(calls)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [outputs[index] for index in range(len(calls))]


async def _answer(client: AsyncOmniClient, call: PromptCall) -> OmniRequestOutput:
    """Answer one call. Raises `Overloaded`; all other errors of the request are in the output."""
    stream: RequestStream | None = None
    try:
        stream = await client.submit(call.prompt, params=call.params, **call.options)
        return await stream.result()
    except Overloaded:
        raise
    except OmniError as error:
        return OmniRequestOutput(stream.request_id if stream is not None else "", error=error)
    except asyncio.CancelledError:
        if stream is not None:
            await stream.abort()
        raise
