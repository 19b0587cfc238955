"""The client for code without an event loop: runs an `AsyncOmniClient` in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from omni_actors.client.async_client import ANSWER_SECONDS, AsyncOmniClient
from omni_actors.client.outputs import OmniRequestOutput
from omni_actors.client.prompts import Prompting
from omni_actors.client.streams import RequestStream, StreamItem
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.client import Description, Operation, Report
from omni_actors.protocol.header import Limits
from omni_actors.protocol.results import StageUsage
from omni_actors.protocol.telemetry import RequestTimeline

T = TypeVar("T")


class OmniClient:
    """The same for code without an event loop: one background thread runs an `AsyncOmniClient`. Thread-safe."""

    def __init__(self, endpoint: str, limits: Limits | None = None, keys: str | Path | None = None) -> None:
        self._client = AsyncOmniClient(endpoint, limits, keys)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> OmniClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is in flight and disconnect. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._run(self._client.close())
            finally:
                self._stop_loop()

    def describe(self, timeout: float = ANSWER_SECONDS) -> Description:
        """See `AsyncOmniClient.describe`."""
        return self._run(self._client.describe(timeout))

    def operate(self, operation: Operation, stage: str = "", replica: int = 0) -> Report:
        """See `AsyncOmniClient.operate`."""
        return self._run(self._client.operate(operation, stage, replica))

    def metrics(self, timeout: float = ANSWER_SECONDS) -> str:
        """See `AsyncOmniClient.metrics`."""
        return self._run(self._client.metrics(timeout))

    def timeline(self, request_id: str, timeout: float = ANSWER_SECONDS) -> RequestTimeline:
        """See `AsyncOmniClient.timeline`."""
        return self._run(self._client.timeline(request_id, timeout))

    def recent(self, count: int = 20, timeout: float = ANSWER_SECONDS) -> tuple[RequestTimeline, ...]:
        """See `AsyncOmniClient.recent`."""
        return self._run(self._client.recent(count, timeout))

    def generate(self, prompt: Prompting, **options: Any) -> OmniRequestOutput:
        """The whole answer; options as for `AsyncOmniClient.submit`."""
        return self._run(self._client.generate(prompt, **options))

    def submit(self, prompt: Prompting, **options: Any) -> SyncRequestStream:
        """Send a request; iterate over what is returned. Options as for `AsyncOmniClient.submit`."""
        return SyncRequestStream(self, self._run(self._client.submit(prompt, **options)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise InvalidRequest("This client is closed.", hint="Make a new one.")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncRequestStream:
    """The answer to one request of an `OmniClient`: iterate for `Text` and `Audio`."""

    def __init__(self, client: OmniClient, stream: RequestStream) -> None:
        self._client = client
        self._stream = stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def usage(self) -> dict[str, StageUsage]:
        return self._stream.usage

    def __iter__(self) -> Iterator[StreamItem]:
        while True:
            item = self._client._run(_next_or_none(self._stream))
            if item is None:
                return
            yield item

    def abort(self) -> None:
        self._client._run(self._stream.abort())

    def result(self) -> OmniRequestOutput:
        return self._client._run(self._stream.result())


async def _next_or_none(stream: RequestStream) -> StreamItem | None:
    with contextlib.suppress(StopAsyncIteration):
        return await stream.__anext__()
    return None
