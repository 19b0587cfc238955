"""Serve Prometheus text from the launcher's process (`--metrics HOST:PORT`), without an HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from omni_actors.errors import ConfigError

ANSWER_SECONDS = 5.0  # for the coordinator to gather the metrics


class _PipelineCollector(Collector):
    """Asks the coordinator for every scrape, on the loop that owns the connection to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fetch: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._loop = loop
        self._fetch = fetch

    def collect(self) -> Iterable[Family]:
        """Raise what `fetch` raises, or `TimeoutError`; the scrape then fails with 500."""
        text = asyncio.run_coroutine_threadsafe(self._fetch(), self._loop).result(ANSWER_SECONDS)
        return text_string_to_metric_families(text)


class MetricsEndpoint:
    """Listens on its own thread. Create it on a running loop.

    Args:
        fetch: returns the metrics as Prometheus text.

    Raises:
        ConfigError: the address is in use or not one of this host.
    """

    def __init__(self, host: str, port: int, fetch: Callable[[], Coroutine[Any, Any, str]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        collector = _PipelineCollector(asyncio.get_running_loop(), fetch)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics: cannot listen on {host}:{port}: {error.strerror or error}.",
                hint="Choose another address or port.",
            ) from error
        registry.register(collector)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening, after the scrapes in progress."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(ANSWER_SECONDS)
