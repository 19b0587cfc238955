"""Command line: `python -m omni_actors.launch config.yaml` starts a pipeline and serves it, or answers one prompt."""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import soundfile

from omni_actors import __version__, config, logs
from omni_actors.addresses import is_loopback, resolve, resolve_soon, towards
from omni_actors.agent import Agent
from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.core import placement
from omni_actors.errors import ConfigError, OmniError, StartupError
from omni_actors.keeper import Keeper
from omni_actors.logs import say
from omni_actors.node import LocalNode
from omni_actors.observe.endpoint import MetricsEndpoint
from omni_actors.server import settings as server_settings
from omni_actors.server.process import HttpProcess
from omni_actors.server.settings import parse_address
from omni_actors.transport.keys import load_keys
from omni_actors.transport.run_directory import RunDirectory

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
STOPS = (signal.SIGINT, signal.SIGTERM)
ONE_WISH_SECONDS = 0.5  # Slurm's scancel, for one, tells the nodes to end, and the job's script that does so, too


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 ok, 1 failure, 2 wrong usage or configuration)."""
    options = _parser().parse_args(arguments)
    try:
        logs.configure("launcher")
        loaded = config.load(options.config, _overrides(options))
        load_keys(loaded.pipeline.coordinator.keys_dir)  # a wrong folder is an error before anything starts
        if options.check:
            print(config.describe(loaded))
            return EXIT_OK
        return asyncio.run(_run(loaded.pipeline, options))
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the launcher had taken over the signals
        return EXIT_INTERRUPTED
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m omni_actors.launch",
        description="Start a pipeline of stages and serve it until Ctrl-C; with --prompt, answer once and exit.",
        epilog="Values: command line > environment (OMNI_ACTORS_*) > SLURM > YAML > default; --check shows the source "
        "of each.",
    )
    parser.add_argument("config", help="the pipeline's YAML, for instance stage_configs/tiny_qwen2_5_omni.yaml")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--check", action="store_true", help="print the effective configuration and start nothing")
    parser.add_argument("--model", help="checkpoint folder or hub name")
    parser.add_argument("--run-dir", help="folder for sockets and logs")
    parser.add_argument("--listen", help="client endpoint: 'ipc', or tcp://ADDRESS:PORT")
    parser.add_argument("--keys", metavar="DIR", help="CURVE keys, made by omni_actors.keys; needed off this host")
    parser.add_argument("--record", metavar="DIR", help="record every stage's messages, for omni_actors.replay")
    parser.add_argument("--startup-timeout", type=float, help="seconds until every stage must be ready")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any value of the YAML, for instance stages.talker.engine.max_num_seqs=8",
    )
    nodes = parser.add_argument_group("several hosts", "The same command on each of them; see docs/nodes.md.")
    nodes.add_argument("--nnodes", type=int, help="number of hosts")
    nodes.add_argument("--node-rank", type=int, help="which of them this is; 0 runs the coordinator")
    nodes.add_argument("--master-addr", metavar="HOST", help="host of node 0")
    nodes.add_argument("--master-port", type=int, help="port of the coordinator there, for the other nodes")
    nodes.add_argument("--node-addr", metavar="ADDRESS", help="where the other nodes reach this host")
    nodes.add_argument("--headless", action="store_true", help="run stages only: no HTTP server, no prompt")
    http = parser.add_argument_group("HTTP", "The key that requests must bring is in OMNI_ACTORS_API_KEY.")
    http.add_argument("--http", metavar="HOST:PORT", help="serve the OpenAI API and a web page here")
    http.add_argument("--http-insecure", action="store_true", help="listen off loopback without an API key")
    http.add_argument(
        "--served-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model for HTTP clients (default: the pipeline's)",
    )
    http.add_argument(
        "--media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="host from which media may be fetched over https; .example.com: also below it",
    )
    server_settings.add_flags(http)
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics here, without the HTTP server")
    parser.add_argument("--metrics-insecure", action="store_true", help="let --metrics listen off loopback")
    request = parser.add_argument_group("one request")
    request.add_argument("--prompt", help="answer this and exit")
    request.add_argument("--audio", action="append", default=[], metavar="FILE", help="audio to go with the prompt")
    request.add_argument("--image", action="append", default=[], metavar="FILE", help="image to go with the prompt")
    request.add_argument("--save-audio", metavar="WAV", help="write the spoken answer here")
    request.add_argument("--modalities", help="comma-separated outputs (default: all that are needed)")
    request.add_argument("--voice", help="speaker")
    request.add_argument("--seed", type=int, help="seed of sampling and of the vocoder's noise")
    request.add_argument("--timeout", type=float, default=600.0, help="seconds for the answer")
    return parser


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    overrides = {}
    for item in options.set:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item!r} is not of the form KEY=VALUE.")
        overrides[key] = value
    overrides |= {f"http.{name}": json.dumps(value) for name, value in server_settings.given_flags(options).items()}
    for key, value in (
        ("model", options.model),
        ("coordinator.run_dir", options.run_dir),
        ("coordinator.listen", options.listen),
        ("coordinator.keys_dir", options.keys),
        ("coordinator.record_dir", options.record and Path(options.record).absolute()),
        ("coordinator.startup_timeout", options.startup_timeout),
        ("cluster.nnodes", options.nnodes),
        ("cluster.node_rank", options.node_rank),
        ("cluster.master_addr", options.master_addr),
        ("cluster.master_port", options.master_port),
        ("cluster.node_addr", options.node_addr),
    ):
        if value is not None:
            overrides[key] = str(value)
    return overrides


async def _run(pipeline: config.PipelineConfig, options: argparse.Namespace) -> int:
    rank = pipeline.cluster.node_rank
    if rank not in placement.ranks(pipeline):
        say(f"nothing is placed on node {rank}")
        return EXIT_OK
    if options.headless and rank == 0 and (options.http or options.prompt):
        raise ConfigError("--headless runs stages only; it goes with neither --http nor --prompt.")
    launcher = Launcher(pipeline, await _addresses(pipeline))
    launcher.own_process()
    try:
        await launcher.open()
        if options.metrics is not None and rank == 0:
            await launcher.start_metrics(options.metrics, options.metrics_insecure)
        if options.http is not None and rank == 0:
            await launcher.start_http(options)
        await launcher.start()
        if options.prompt is None or rank > 0:  # the same command runs on every node
            await launcher.serve()
            return EXIT_OK
        return await launcher.until_stopped(_answer(launcher.endpoint, pipeline.coordinator.keys_dir, options))
    finally:
        await launcher.close()


class Addresses(NamedTuple):
    """Where this host listens and is reached; "" for socket files in the run directory."""

    own: str = "127.0.0.1"
    control: str = ""
    results: str = ""


ON_ONE_HOST = Addresses()


async def _addresses(pipeline: config.PipelineConfig) -> Addresses:
    """Raises `ConfigError` if the master's name or the route to it is not known within the time for the start."""
    cluster = pipeline.cluster
    if not placement.spans_hosts(pipeline):
        return ON_ONE_HOST
    master = await resolve_soon(cluster.master_addr, pipeline.coordinator.startup_timeout, say)
    own = resolve(cluster.node_addr) if cluster.node_addr else master if cluster.node_rank == 0 else towards(master)
    return Addresses(own, f"tcp://{master}:{cluster.master_port}", f"tcp://{own}:0")


class Launcher:
    """What one host runs of a pipeline: its stages under an agent and, on node 0, the coordinator and HTTP server."""

    def __init__(self, pipeline: config.PipelineConfig, addresses: Addresses = ON_ONE_HOST) -> None:
        self._pipeline = pipeline
        self._stop = asyncio.Event()
        self._signalled_at: float | None = None  # not whether it ends: it may do so for another reason
        self._owns_process = False
        self._failure: StartupError | None = None
        self._http: HttpProcess | None = None
        self._metrics: MetricsEndpoint | None = None
        self._metrics_client: AsyncOmniClient | None = None
        self._agent: Agent | None = None
        self._rank = pipeline.cluster.node_rank
        self._keeper: Keeper | None = None
        self._run_directory = RunDirectory(pipeline.coordinator.run_dir)
        self._control = addresses.control or self._run_directory.endpoint("control")
        results = addresses.results or self._run_directory.endpoint("results")
        if self._rank == 0:
            self._keeper = Keeper(pipeline, self._run_directory, self._control, results, self._on_coordinator_end, say)
        self._node = LocalNode(pipeline, self._run_directory, self._control, addresses.own)

    @property
    def endpoint(self) -> str:
        """Where clients connect, once `open` has returned; "" on nodes other than 0."""
        return self._keeper.client_endpoint if self._keeper is not None else ""

    def own_process(self) -> None:
        """What a launcher may do that has a process to itself.

        First SIGINT or SIGTERM: orderly end. A later one: at once. The fork server's socket goes into the run
        directory, so that it is cleared away with it even after a SIGKILL.
        """
        usual, tempfile.tempdir = tempfile.tempdir, str(self._run_directory.path)
        multiprocessing.util.get_temp_dir()  # made once per process, here; multiprocessing removes it at priority -100
        tempfile.tempdir = usual
        multiprocessing.util.Finalize(None, self._run_directory.close, exitpriority=-200)
        self._owns_process = True
        loop = asyncio.get_running_loop()
        # Not the loop's own handlers: it takes those away when it ends, and the process has still to come to its end.
        for number in STOPS:
            signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._on_signal, signal.Signals(number)))

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            say(f"stopping ({signal.Signals(number).name}); once more to stop at once")
            self._stop.set()
        elif now > self._signalled_at + ONE_WISH_SECONDS:
            self._kill_coordinator()
            self._node.kill()
            self._run_directory.close()
            os._exit(128 + number)

    def _kill_coordinator(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()

    def _on_coordinator_end(self, why: str) -> None:
        if why:
            self._fail(why)
        self._stop.set()

    def _on_shutdown(self, reason: str, failed: bool) -> None:
        """The coordinator ends the pipeline."""
        if failed:
            self._fail(reason)
        self._stop.set()

    def _fail(self, why: str) -> None:
        self._run_directory.keep = True
        self._failure = self._failure or StartupError(why, hint="")

    # -- start --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the coordinator (on node 0), and the import of what the stages need beside it.

        Raises:
            OmniError: the coordinator cannot start, for instance because its address is taken.
        """
        say(f"logs in {self._run_directory.logs}")
        warming = asyncio.create_task(self._node.warm_up())
        warming.add_done_callback(lambda task: task.cancelled() or task.exception())  # `start` will say it
        if self._keeper is not None:
            await self._keeper.start()
        self._agent = Agent(
            self._pipeline,
            self._rank,
            self._control,
            self._node,
            self._on_shutdown,
            self._keeper.kill_silent if self._keeper is not None else lambda: None,
            patient=self._keeper is not None,
        )

    async def start_http(self, options: argparse.Namespace) -> None:
        """Start the HTTP server. Beside the stages: it answers 503 with their names while they load.

        Raises:
            ConfigError: the address is wrong or taken, or would be open to others without a key.
        """
        arguments = [f"--served-name={name}" for name in options.served_name]
        arguments += [f"--media-host={host}" for host in options.media_host]
        if self._pipeline.coordinator.keys_dir is not None:
            arguments.append(f"--keys={self._pipeline.coordinator.keys_dir}")
        self._http = HttpProcess(
            options.http,
            options.http_insecure,
            self.endpoint,
            arguments,
            self._run_directory.log_file("http"),
            self._pipeline.http,
        )
        await self._http.start()
        say(f"HTTP on {self._http.url}")

    async def start_metrics(self, address: str, insecure: bool) -> None:
        """Serve metrics from this process, which outlives the coordinator.

        Raises:
            ConfigError: the address is wrong or taken, or would be open to others.
        """
        host, port = parse_address(address, "--metrics")
        if not is_loopback(host) and not insecure:
            raise ConfigError(
                f"--metrics {host}: metrics have no key, whoever reaches the address reads them.",
                hint="Use 127.0.0.1, or add --metrics-insecure if that is meant.",
            )
        client = AsyncOmniClient(self.endpoint, keys=self._pipeline.coordinator.keys_dir)
        self._metrics_client = await client.__aenter__()
        self._metrics = MetricsEndpoint(host, port, client.metrics)
        say(f"metrics on {self._metrics.url}")

    async def start(self) -> None:
        """Wait until the coordinator says that every replica is ready, or has died and others of its stage live.

        Raises:
            StartupError: all replicas of a stage died, or one is not ready in time; with the tail of its log.
        """
        if self._agent is None:
            await self.open()
        if self._agent is not None:
            await self._first(self._agent.launched.wait())
        self._raise_failure()
        if self._rank > 0 and not self._stop.is_set():
            say(f"node {self._rank} serves")

    async def _first(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Wait for some work or for the end of the pipeline, which cancels it."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- serve and end ------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Until a signal, an operator or a coordinator that cannot be kept ends it; raises `StartupError` for that."""
        await self._stop.wait()
        self._raise_failure()

    async def until_stopped(self, work: Coroutine[Any, Any, int]) -> int:
        """Run `work`; a signal cancels it."""
        task = await self._first(work)
        return EXIT_FAILED if task.cancelled() else task.result()

    async def close(self) -> None:
        """Requests get a moment to end, clients their answers; stages end, sockets and files go, in this order."""
        self._stop.set()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        if self._metrics_client is not None:
            await self._metrics_client.close()
        if self._keeper is not None:
            await self._keeper.stop()  # the agent obeys it until then
        if self._agent is not None:
            await self._agent.close("the launcher stops")
        stops = [self._node.stop(self._pipeline.coordinator.shutdown_timeout)]
        if self._http is not None:
            stops.append(self._http.stop())
        await asyncio.gather(*stops)
        if not self._owns_process:
            self._run_directory.close()
            return
        # The run directory is cleared at the exit of the process, after the fork server's socket. All has ended: a
        # signal that comes in the time until then is not to change the exit code.
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)


async def _answer(endpoint: str, keys: str | None, options: argparse.Namespace) -> int:
    """One request: text to stdout as it comes, audio to a file."""
    modalities = options.modalities.split(",") if options.modalities else _needed_modalities(options)
    pieces = []
    rate = 0
    async with AsyncOmniClient(endpoint, keys=keys) as client:
        stream = await client.submit(
            options.prompt,
            modalities=modalities,
            voice=options.voice,
            seed=options.seed,
            audios=[Path(name) for name in options.audio],
            images=[Path(name) for name in options.image],
            timeout=options.timeout,
        )
        async for event in stream:
            if isinstance(event, Text):
                print(event.text, end="", flush=True)
            elif isinstance(event, Audio):
                pieces.append(event.samples)
                rate = event.sample_rate
    print(flush=True)
    if options.save_audio:
        if not pieces:
            raise StartupError("The answer has no audio to save.", hint="Ask for --modalities text,audio.")
        with soundfile.SoundFile(options.save_audio, "w", rate, 1, format="WAV", subtype="PCM_16") as file:
            for piece in pieces:
                file.write(piece)
        seconds = sum(len(piece) for piece in pieces) / rate
        say(f"wrote {seconds:.2f} s of audio to {options.save_audio}")
    return EXIT_OK


def _needed_modalities(options: argparse.Namespace) -> list[str] | None:
    """Text alone needs no talker; `None` asks for all that the pipeline has."""
    return None if options.save_audio else ["text"]


if __name__ == "__main__":
    sys.exit(main())
