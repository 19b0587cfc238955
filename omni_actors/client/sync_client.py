"""The client for code without an event loop: runs an `AsyncOmniClient` in a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from omni_actors.client.async_client import ANSWER_SECONDS, AsyncOmniClient
from omni_actors.client.prompts import Prompting
from omni_actors.client.streams import OmniRequestOutput, RequestStream, StreamItem
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import Limits
from omni_actors.protocol.messages import Description, Operation, Report, RequestTimeline, StageUsage

T = TypeVar("T")


class OmniClient:
    """A connection to a coordinator for code without an event loop. Thread-safe; use it as a context manager.

    Arguments, and errors of all methods, are those of `AsyncOmniClient`.
    """

    def __init__(self, endpoint: str, limits: Limits | None = None, keys: str | Path | None = None) -> None:
        self._client = AsyncOmniClient(endpoint, limits, keys)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self.run(lambda client: client.__aenter__())
        except BaseException:  # Ctrl-C, too: the thread must not stay behind
            self._stop_loop()
            raise

    def __enter__(self) -> OmniClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort all requests in flight and disconnect. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self.run(lambda client: client.close())
            finally:
                self._stop_loop()

    def describe(self, timeout: float = ANSWER_SECONDS) -> Description:
        """See `AsyncOmniClient.describe`."""
        return self.run(lambda client: client.describe(timeout))

    def operate(
        self, operation: Operation, stage: str = "", replica: int = 0, count: int | None = None, node: int | None = None
    ) -> Report:
        """See `AsyncOmniClient.operate`."""
        return self.run(lambda client: client.operate(operation, stage, replica, count=count, node=node))

    def metrics(self, timeout: float = ANSWER_SECONDS) -> str:
        """See `AsyncOmniClient.metrics`."""
        return self.run(lambda client: client.metrics(timeout))

    def timeline(self, request_id: str, timeout: float = ANSWER_SECONDS) -> RequestTimeline:
        """See `AsyncOmniClient.timeline`."""
        return self.run(lambda client: client.timeline(request_id, timeout))

    def recent(self, count: int = 20, timeout: float = ANSWER_SECONDS) -> tuple[RequestTimeline, ...]:
        """See `AsyncOmniClient.recent`."""
        return self.run(lambda client: client.recent(count, timeout))

    def generate(self, prompt: Prompting, **options: Any) -> OmniRequestOutput:
        """Send a request and wait for the whole answer; options as for `AsyncOmniClient.submit`."""
        return self.run(lambda client: client.generate(prompt, **options))

    def generate_choices(self, prompt: Prompting, n: int, **options: Any) -> list[OmniRequestOutput]:
        """Send a prompt for `n` answers and wait for all; options as for `AsyncOmniClient.submit`."""
        return self.run(lambda client: client.generate_choices(prompt, n, **options))

    def submit(self, prompt: Prompting, **options: Any) -> SyncRequestStream:
        """Send a request and return the stream of its answer; options as for `AsyncOmniClient.submit`."""
        return SyncRequestStream(self, self.run(lambda client: client.submit(prompt, **options)))

    def run(self, work: Callable[[AsyncOmniClient], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine with the underlying `AsyncOmniClient` in the background thread and return its result."""
        if self._loop.is_closed():
            raise InvalidRequest("This client is closed.", hint="Make a new one.")
        # No `concurrent.futures.Future`: Ctrl-C can leave its lock taken, and the loop would wait for that for ever.
        ended: SimpleQueue[T | BaseException] = SimpleQueue()
        tasks: list[asyncio.Task[None]] = []

        async def end() -> None:
            results: tuple[T | BaseException] = await asyncio.gather(work(self._client), return_exceptions=True)
            tasks.clear()  # were the task freed in the caller's thread, Ctrl-C could come meanwhile, and be ignored
            ended.put(results[0])

        try:
            self._loop.call_soon_threadsafe(lambda: tasks.append(self._loop.create_task(end())))
            outcome = ended.get()
        except BaseException:  # Ctrl-C while it waits: the coroutine ends with the call
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            raise
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncRequestStream:
    """The answer to one request of an `OmniClient`: iterate for its items in order, then read `usage`."""

    def __init__(self, client: OmniClient, stream: RequestStream) -> None:
        self._client = client
        self._stream = stream

    @property
    def request_id(self) -> str:
        """The id under which logs and timelines know the request."""
        return self._stream.request_id

    @property
    def usage(self) -> dict[str, StageUsage]:
        """By stage; complete once the stream has ended."""
        return self._stream.usage

    def __iter__(self) -> Iterator[StreamItem]:
        while (item := self._client.run(lambda _: _next(self._stream))) is not None:
            yield item

    def append_text(self, text: str) -> None:
        """See `RequestStream.append_text`."""
        self._client.run(lambda _: self._stream.append_text(text))

    def end_text(self) -> None:
        """See `RequestStream.end_text`."""
        self._client.run(lambda _: self._stream.end_text())

    def abort(self) -> None:
        """See `RequestStream.abort`."""
        self._client.run(lambda _: self._stream.abort())

    def result(self) -> OmniRequestOutput:
        """See `RequestStream.result`."""
        return self._client.run(lambda _: self._stream.result())


async def _next(stream: RequestStream) -> StreamItem | None:
    return await anext(stream, None)
