"""The launcher: owns the run directory and all processes of one host, from startup to shutdown."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing.util
import os
import signal
import tempfile
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple

from msgspec.structs import replace

from omni_actors.client import AsyncOmniClient
from omni_actors.config import PipelineConfig, placement
from omni_actors.errors import StartupError
from omni_actors.host.addresses import resolve, resolve_eventually, source_address
from omni_actors.host.processes import EXIT_FAILED, end_tasks
from omni_actors.host.run_directory import RunDirectory, scratch_folder
from omni_actors.http_server.settings import bind, processes_of, server_settings, url
from omni_actors.launcher.children import CoordinatorChild, HttpChild
from omni_actors.launcher.mps import MpsChild
from omni_actors.launcher.node_agent import NodeAgent
from omni_actors.launcher.preflight import check_metrics_address
from omni_actors.launcher.replica_processes import ReplicaProcesses
from omni_actors.logs import get_logger, say
from omni_actors.telemetry.endpoint import MetricsEndpoint
from omni_actors.vllm_version import check_installed

logger = get_logger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_SECONDS = 1.0  # between two looks at the run directory
SAME_STOP_SECONDS = 0.5  # scancel signals both the job script and the nodes; treat signals this close together as one


class Addresses(NamedTuple):
    """Where this host listens and is reached; "" stands for socket files in the run directory."""

    own: str = "127.0.0.1"
    control: str = ""
    results: str = ""


ON_ONE_HOST = Addresses()


async def host_addresses(pipeline: PipelineConfig) -> Addresses:
    """Find this host's addresses. Raises `ConfigError` if node 0 has no known name or route within the startup time."""
    cluster = pipeline.cluster
    if not placement.spans_hosts(pipeline):
        return ON_ONE_HOST
    master = await resolve_eventually(cluster.master_addr, pipeline.coordinator.startup_timeout, say)
    if cluster.node_addr:
        own = resolve(cluster.node_addr)
    else:
        own = master if cluster.node_rank == 0 else source_address(master)
    return Addresses(own, f"tcp://{master}:{cluster.master_port}", f"tcp://{own}:0")


class Launcher:
    """Runs one host's part of a pipeline: its stages under an agent and, on node 0, the coordinator and HTTP server.

    In this order: `open`, `start_metrics` and `start_http` if wanted, `start`, `serve` or `until_stopped`, `close`.

    Args:
        started: when this process started, on the monotonic clock, if it runs nothing else; now if `None`.

    Raises:
        ConfigError: stages of this host need vLLM, and it is missing or of a version that is not supported.
    """

    def __init__(
        self, pipeline: PipelineConfig, addresses: Addresses = ON_ONE_HOST, started: float | None = None
    ) -> None:
        self._pipeline = pipeline
        self._rank = pipeline.cluster.node_rank
        if placement.runs_models(pipeline, self._rank):
            check_installed()
        self._run_directory = RunDirectory(pipeline.coordinator.run_dir)
        self._control = addresses.control or self._run_directory.endpoint("control")
        self._processes = ReplicaProcesses(pipeline, self._run_directory, self._control, addresses.own)
        self._coordinator: CoordinatorChild | None = None
        if self._rank == 0:
            results = addresses.results or self._run_directory.endpoint("results")
            self._coordinator = CoordinatorChild(
                pipeline, self._run_directory, self._control, results, self._on_end, started
            )
        self._mps = MpsChild(pipeline, self._run_directory, say)
        self._agent: NodeAgent | None = None
        self._http: list[HttpChild] = []
        self._metrics: MetricsEndpoint | None = None
        self._metrics_client: AsyncOmniClient | None = None
        self._started = time.monotonic() if started is None else started
        self._stop = asyncio.Event()
        self._failure: StartupError | None = None
        self._signalled_at: float | None = None
        self._looking: asyncio.Task[None] | None = None
        self._owns_process = False

    @property
    def endpoint(self) -> str:
        """Where clients connect, once `open` has returned; "" on nodes other than 0."""
        return self._coordinator.client_endpoint if self._coordinator is not None else ""

    # -- startup ------------------------------------------------------------------------------------------------------

    def own_process(self) -> None:
        """Take over the signals and temporary files of a process that runs nothing but this launcher.

        The first SIGINT or SIGTERM starts an orderly shutdown, a later one ends everything at once. The fork server's
        socket goes into the run directory, so that it is removed with it even after a SIGKILL.
        """
        usual, tempfile.tempdir = tempfile.tempdir, str(self._run_directory.path)
        multiprocessing.util.get_temp_dir()  # made once per process, here; multiprocessing removes it at priority -100
        tempfile.tempdir = usual
        multiprocessing.util.Finalize(None, self._run_directory.close, exitpriority=-200)
        self._owns_process = True
        loop = asyncio.get_running_loop()
        # Not the loop's own handlers: it removes those when it ends, and the process still has to exit after that.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._on_signal, signal.Signals(number)))

    async def open(self) -> None:
        """Start the coordinator (on node 0), MPS if it is of use and, at the same time, the stages' imports.

        Raises:
            OmniError: the coordinator cannot start, for instance because its address is taken.
        """
        say(f"logs in {self._run_directory.logs}")
        self._looking = asyncio.create_task(self._watch_run_directory(), name="run directory")
        warm_up = asyncio.create_task(self._processes.warm_up())
        warm_up.add_done_callback(lambda task: task.cancelled() or task.exception())  # the first replica reports it
        on_silence = None
        if self._coordinator is not None:
            await self._coordinator.start()
            self._run_directory.announce(self._pipeline.name, self.endpoint, self._pipeline.coordinator.keys_dir)
            on_silence = self._coordinator.kill_if_silent
        await self._unless_stopped(self._mps.start())
        self._processes.mps = self._mps.clients
        self._agent = NodeAgent(self._pipeline, self._control, self._processes, self._on_shutdown, on_silence)

    async def start_metrics(self, address: str, insecure: bool) -> None:
        """Serve metrics from this process, which outlives the coordinator.

        Raises:
            ConfigError: the address is wrong or taken, or would be open to others.
        """
        host, port = check_metrics_address(address, insecure)
        client = AsyncOmniClient(self.endpoint, keys=self._pipeline.coordinator.keys_dir)
        self._metrics_client = await client.__aenter__()
        self._metrics = MetricsEndpoint(host, port, client.metrics)
        say(f"metrics on {self._metrics.url}")

    async def start_http(self, options: argparse.Namespace) -> None:
        """Start the HTTP server. It does not wait for the stages: it answers 503 with their names while they load.

        Raises:
            ConfigError: the address is wrong or taken, or would be open to others without a key.
        """
        keys = self._pipeline.coordinator.keys_dir
        settings = server_settings(self._pipeline.http, self.endpoint, keys, options)
        if settings.voices_dir is None:
            settings = replace(settings, voices_dir=str(self._run_directory.voices))
        settings = replace(settings, shared_dir=str(scratch_folder(self._run_directory.path, "http")))
        listeners = bind(options.http, settings, options.http_insecure, processes_of(settings))
        for number, listener in enumerate(listeners):
            log_file = self._run_directory.log_file(f"http-{number}" if number else "http")
            self._http.append(HttpChild(listener, settings, log_file, self._on_end))
        for child in self._http:
            await child.start()
        say(f"HTTP on {url(listeners[0], settings)}")

    async def start(self) -> None:
        """Wait until every stage can serve, which the coordinator decides. Calls `open` if that was not done before.

        Raises:
            StartupError: all replicas of a stage died, or one is not ready in time; with the last lines of its log.
        """
        if self._agent is None:
            await self.open()
        if self._agent is not None:
            await self._unless_stopped(self._agent.launched.wait())
        self._raise_failure()
        if self._rank > 0 and not self._stop.is_set():
            say(f"node {self._rank} serves")

    # -- serve --------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve until a signal or an operator's shutdown. Raises `StartupError` if the coordinator is lost for good."""
        await self._stop.wait()
        self._raise_failure()

    async def until_stopped(self, work: Coroutine[Any, Any, int]) -> int:
        """Run `work` and return its exit code; a signal cancels it."""
        task = await self._unless_stopped(work)
        if task.cancelled():
            self._raise_failure()
            return EXIT_FAILED
        code: int = task.result()
        return code

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run some work until it is done or the pipeline stops, which cancels it."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(stop, task)
        return task

    def keep_logs(self) -> None:
        """Have the logs stay where they are, as something went wrong that they may explain."""
        self._run_directory.keep = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- reasons to stop ----------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            say(f"stopping ({number.name}); once more to stop at once")
            self._stop.set()
        elif now > self._signalled_at + SAME_STOP_SECONDS:
            if self._coordinator is not None:
                self._coordinator.kill()
            self._processes.kill()
            self._run_directory.close()
            os._exit(128 + number)

    async def _watch_run_directory(self) -> None:
        """End the pipeline when its run directory is lost: neither clients nor restarted stages could connect."""
        lost = ""
        while True:
            before = lost
            try:
                lost = self._run_directory.look()
            except OSError as error:  # the disk is full, for instance; try again
                logger.warning("cannot look at the run directory: %s", error)
            else:
                # Twice: a signal to all processes may reach the fork server, which removes its socket, before this one.
                if lost and lost == before:
                    self._on_shutdown(f"{lost} Start the pipeline again, with a --run-dir that nothing cleans.", True)
                    return
            await asyncio.sleep(LOOK_SECONDS)

    def _on_end(self, failure: str) -> None:
        """Handle the end of the coordinator, or of an HTTP server that cannot serve; "" after an orderly end."""
        self._on_shutdown(failure, failed=bool(failure))

    def _on_shutdown(self, reason: str, failed: bool) -> None:
        """Handle the end of the pipeline, as the coordinator announces it or as its loss forces it."""
        if failed:
            self.keep_logs()
            self._failure = self._failure or StartupError(reason, hint="")
        self._stop.set()

    # -- shutdown -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End everything in order: requests in flight get a moment, then stages end, then sockets and files go."""
        self._stop.set()
        if self._looking is not None:
            self._looking.cancel()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if self._metrics_client is not None:
            await self._metrics_client.close()
        if self._coordinator is not None:
            await self._coordinator.stop()  # the agent obeys it until then
        elif self._agent is not None:
            await self._agent.drain(self._pipeline.coordinator.drain_timeout)
        if self._agent is not None:
            await self._agent.close("the launcher stops")
        seconds = self._pipeline.coordinator.shutdown_timeout
        await asyncio.gather(self._processes.stop(seconds), *(child.stop(seconds) for child in self._http))
        await self._mps.stop()  # after its clients
        if self._run_directory.keep:
            say(f"the logs stay in {self._run_directory.logs}")
        if not self._owns_process:
            self._run_directory.close()
            return
        # The run directory is removed when the process exits, after the fork server's socket. All has ended by now, so
        # a signal must not change the exit code any more.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._run_directory.expect_removal(multiprocessing.util.get_temp_dir())
