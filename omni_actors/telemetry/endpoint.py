"""Serves metrics as Prometheus text from the launcher's process (`--metrics HOST:PORT`), without an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from omni_actors.errors import ConfigError
from omni_actors.host.addresses import is_loopback
from omni_actors.telemetry.metrics import TABLE, Kind, Labels, Meters

T = TypeVar("T")


def families(meters: Meters) -> Iterator[Family]:
    """Every metric, in the order of the table, including those without a series."""
    values = _by_name(meters.values)
    histograms = _by_name(meters.histograms)
    for metric in TABLE.values():
        if metric.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, histogram in histograms.get(metric.name, ()):
                bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
                sums = [float(count) for count in itertools.accumulate(histogram.counts)]
                family.add_metric(labels, list(zip(bounds, sums, strict=True)), histogram.total)
            yield family
            continue
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        plain = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.get(metric.name, ()):
            plain.add_metric(labels, value)
        yield plain


def _by_name(series: Mapping[tuple[str, Labels], T]) -> dict[str, list[tuple[Labels, T]]]:
    """The series of each metric, in order of their labels."""
    found: dict[str, list[tuple[Labels, T]]] = {}
    for name, labels in sorted(series):
        found.setdefault(name, []).append((labels, series[(name, labels)]))
    return found


class _MetersCollector(Collector):
    """Adapts `Meters` to prometheus-client."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def collect(self) -> Iterable[Family]:
        return families(self._meters)


def render(meters: Meters) -> str:
    """The values of all metrics in the text format 0.0.4."""
    text: bytes = generate_latest(_MetersCollector(meters))
    return text.decode()


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ANSWER_SECONDS = 5.0  # for the coordinator to gather the metrics
CONNECTIONS = 16  # at a time, each with a thread; the oldest makes room for the next one
READ_SECONDS = 5.0  # for which a connection may send nothing


class _MetricsHandler(WSGIRequestHandler):
    timeout = READ_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are many."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; with 5, a burst waits seconds

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, after ending the oldest one if there are too many."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # it has ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was handled."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of peers that hang up or send no HTTP."""


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


def is_name_of_loopback(host: str) -> bool:
    """Whether a Host header is a loopback name. That of a web page whose name resolves to this host is not."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


class MetricsEndpoint:
    """Listens on its own thread. Create it on a running loop.

    Args:
        fetch: returns the metrics as Prometheus text.

    Raises:
        ConfigError: the address is in use or not one of this host.
    """

    def __init__(self, host: str, port: int, fetch: Callable[[], Coroutine[Any, Any, str]]) -> None:
        loop = asyncio.get_running_loop()

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
            """Ask the coordinator, on the loop that owns the connection to it. What fails becomes an answer 500."""
            if is_loopback(host) and not is_name_of_loopback(environ.get("HTTP_HOST", "")):
                start_response("403 Forbidden", [("Content-Type", "text/plain")])
                return [b"Metrics are served to loopback names only, such as 127.0.0.1.\n"]
            text = asyncio.run_coroutine_threadsafe(fetch(), loop).result(ANSWER_SECONDS)
            start_response("200 OK", [("Content-Type", METRICS_TYPE)])
            return [text.encode()]

        server = _ServerOfIPv6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, answer, server, _MetricsHandler)
        except OSError as error:
            raise ConfigError(
                f"--metrics: cannot listen on {host}:{port}: {error.strerror or error}.",
                hint="Choose another address or port.",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening, after the scrapes in progress."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(ANSWER_SECONDS)
