"""Command line: `python -m omni_actors.launch config.yaml` starts a pipeline and serves it, or answers one prompt."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import soundfile

from omni_actors import __version__, config, logs
from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.coordinator import Coordinator
from omni_actors.core.replicas import Replica
from omni_actors.core.states import ReplicaState
from omni_actors.errors import ConfigError, OmniError, StartupError
from omni_actors.messages import Hop
from omni_actors.node import LocalNode
from omni_actors.server.process import HttpProcess
from omni_actors.transport.run_directory import RunDirectory

logger = logs.get_logger(__name__)

PROGRESS_SECONDS = 5.0
SUPERVISE_SECONDS = 0.05
STOP_SECONDS = 4.0  # that one stage may take to stop before it is killed
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 ok, 1 failure, 2 wrong usage or configuration)."""
    options = _parser().parse_args(arguments)
    try:
        logs.configure("launcher")
        loaded = config.load(options.config, _overrides(options))
        if options.check:
            print(config.describe(loaded))
            return EXIT_OK
        return asyncio.run(_run(loaded.pipeline, options))
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m omni_actors.launch",
        description="Start a pipeline of stages and serve it until Ctrl-C; with --prompt, answer once and exit.",
        epilog="Values: command line > environment (OMNI_ACTORS_*) > YAML > default; --check shows the source of each.",
    )
    parser.add_argument("config", help="the pipeline's YAML, for instance stage_configs/tiny_qwen2_5_omni.yaml")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--check", action="store_true", help="print the effective configuration and start nothing")
    parser.add_argument("--model", help="checkpoint folder or hub name")
    parser.add_argument("--run-dir", help="folder for sockets and logs")
    parser.add_argument("--listen", help="client endpoint: 'ipc', or tcp://127.0.0.1:PORT")
    parser.add_argument("--record", metavar="DIR", help="record every stage's messages, for omni_actors.replay")
    parser.add_argument("--startup-timeout", type=float, help="seconds until every stage must be ready")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="any value of the YAML, for instance stages.talker.engine.max_num_seqs=8")  # fmt: skip
    http = parser.add_argument_group("HTTP", "The key that requests must bring is in OMNI_ACTORS_API_KEY.")
    http.add_argument("--http", metavar="HOST:PORT", help="serve the OpenAI API and a web page here")
    http.add_argument("--http-insecure", action="store_true", help="listen off loopback without an API key")
    http.add_argument("--served-name", action="append", default=[], metavar="NAME",
                      help="name of the model for HTTP clients (default: the pipeline's)")  # fmt: skip
    http.add_argument("--media-host", action="append", default=[], metavar="HOST",
                      help="host from which media may be fetched over https; .example.com: also below it")  # fmt: skip
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
    for key, value in (
        ("model", options.model),
        ("coordinator.run_dir", options.run_dir),
        ("coordinator.listen", options.listen),
        ("coordinator.record_dir", options.record and Path(options.record).absolute()),
        ("coordinator.startup_timeout", options.startup_timeout),
    ):
        if value is not None:
            overrides[key] = str(value)
    return overrides


async def _run(pipeline: config.PipelineConfig, options: argparse.Namespace) -> int:
    launcher = Launcher(pipeline)
    launcher.own_process()
    try:
        if options.http is not None:
            await launcher.start_http(options)
        await launcher.start()
        if options.prompt is None:
            await launcher.serve()
            return EXIT_OK
        return await launcher.until_stopped(_answer(launcher.endpoint, options))
    finally:
        await launcher.close()


class Launcher:
    """A whole pipeline on this host: run directory, coordinator, processes."""

    def __init__(self, pipeline: config.PipelineConfig) -> None:
        self._pipeline = pipeline
        self._began = time.monotonic()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._started = False
        self._closing = False
        self._supervisor: asyncio.Task[None] | None = None
        self._killed: dict[Hop, str] = {}  # why we killed it
        self._kill_at: dict[Hop, float] = {}
        self._owns_process = False
        self._failure: StartupError | None = None
        self._http: HttpProcess | None = None
        self._run_directory = RunDirectory(pipeline.coordinator.run_dir)
        try:
            self._coordinator = Coordinator(pipeline, self._run_directory, self._on_change, self._shut_down)
        except BaseException:
            self._run_directory.close()
            raise
        self._node = LocalNode(pipeline, self._run_directory, self._coordinator.control_endpoint, self._on_exit)

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._coordinator.client_endpoint

    def own_process(self) -> None:
        """What a launcher may do that has a process to itself.

        First SIGINT or SIGTERM: orderly end. Second: at once. The fork server's socket goes into the run directory, so
        that it is cleared away with it even after a SIGKILL.
        """
        usual, tempfile.tempdir = tempfile.tempdir, str(self._run_directory.path)
        multiprocessing.util.get_temp_dir()  # made once per process, here; multiprocessing removes it at priority -100
        tempfile.tempdir = usual
        multiprocessing.util.Finalize(None, self._run_directory.close, exitpriority=-200)
        self._owns_process = True
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _shut_down(self) -> None:
        """An operator asks for what a signal would do."""
        _say("stopping: an operator asked for it")
        self._stop.set()
        self._changed.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._node.kill()
            self._run_directory.close()
            os._exit(128 + number)
        _say(f"stopping ({signal.Signals(number).name}); once more to stop at once")
        self._stop.set()
        self._changed.set()

    # -- start --------------------------------------------------------------------------------------------------------

    async def start_http(self, options: argparse.Namespace) -> None:
        """Start the HTTP server. Before the stages: it answers 503 with their names while they load.

        Raises:
            ConfigError: the address is wrong or taken, or would be open to others without a key.
        """
        arguments = [f"--served-name={name}" for name in options.served_name]
        arguments += [f"--media-host={host}" for host in options.media_host]
        self._http = HttpProcess(
            options.http, options.http_insecure, self.endpoint, arguments, self._run_directory.log_file("http")
        )
        await self._http.start()
        _say(f"HTTP on {self._http.url}")

    async def start(self) -> None:
        """Start all replicas in parallel and wait until every one is ready, or has died and others of its stage live.

        Raises:
            StartupError: all replicas of a stage died, or one is not ready in time; with the tail of its log.
        """
        # No epoch occurs twice in a run directory: a stage that outlives a killed launcher for a moment must not be
        # taken for one of the next launcher's.
        epoch = time.time_ns() // 1_000_000
        replicas = [
            self._coordinator.expect_replica(stage.name, index, epoch)
            for stage in self._pipeline.stages
            for index in range(stage.replicas)
        ]
        _say(f"starting {', '.join(replica.name for replica in replicas)}; logs in {self._run_directory.logs}")
        spawning = asyncio.create_task(self._spawn(replicas))
        self._supervisor = asyncio.create_task(self._supervise(), name="supervisor")
        try:
            await self._await_ready(spawning)
        finally:
            if not spawning.done():
                self._node.abandon_starts()
            await asyncio.gather(spawning, return_exceptions=True)
        self._started = True
        if not self._stop.is_set():
            _say(f"ready after {time.monotonic() - self._began:.1f} s, clients connect to {self.endpoint}")

    async def _spawn(self, replicas: list[Replica]) -> None:
        for replica in replicas:
            await self._node.start(replica.hop)

    async def _await_ready(self, spawning: asyncio.Task[None]) -> None:
        next_report = self._began + PROGRESS_SECONDS
        while missing := self._coming():
            if self._stop.is_set():
                return
            if self._failure is not None:
                raise self._failure
            if spawning.done() and spawning.exception() is not None:
                raise StartupError(f"Cannot start a process: {spawning.exception()}.")
            now = time.monotonic()
            for replica in missing:
                if now > self._began + self._coordinator.supervision.startup_timeout(replica):
                    raise StartupError(self._explain(replica, "is not ready in time"), hint="")
            if now >= next_report:
                next_report = now + PROGRESS_SECONDS
                _say(self._progress())
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.5)
        if self._failure is not None:
            raise self._failure

    def _coming(self) -> list[Replica]:
        """Replicas that are not ready, but will be."""
        missing = self._coordinator.state.replicas.missing()
        return [replica for replica in missing if replica.state is not ReplicaState.DEAD]

    def _progress(self) -> str:
        replicas = list(self._coordinator.state.replicas)
        ready = [replica.name for replica in replicas if replica.state is ReplicaState.READY]
        missing = [f"{replica.name} ({replica.phase})" for replica in replicas if replica.name not in ready]
        return f"ready: {', '.join(ready) or 'none'}; missing: {', '.join(missing) or 'none'}"

    def _on_change(self, replica: Replica) -> None:
        if replica.state is ReplicaState.READY:
            _say(f"{replica.name} ready in {replica.seconds:.1f} s; {self._progress()}")
        elif replica.state is ReplicaState.DRAINING:
            _say(f"{replica.name} drains")
        self._changed.set()

    def _on_exit(self, identity: Hop, how: str) -> None:
        """A process ended. If that leaves a stage without any while starting, it ends the launch."""
        replica = self._coordinator.state.replicas.find(identity.stage, identity.replica, identity.epoch)
        self._kill_at.pop(identity, None)
        why = self._killed.pop(identity, "")
        wanted = replica is not None and replica.restart_wanted
        self._coordinator.replica_died(identity, f"{why}; {how}" if why else how)
        if self._stop.is_set() or replica is None:
            return
        if wanted:
            _say(f"{replica.name} has stopped and is started again")
            return
        self._run_directory.keep = True
        text = self._explain(replica, f"died ({why}; {how})" if why else f"died ({how})")
        peers = [other for other in self._coordinator.state.replicas if other.stage == replica.stage]
        if not self._started and not any(other.alive for other in peers):
            self._failure = self._failure or StartupError(text, hint="")
        elif replica.state is ReplicaState.WAITING:
            delay = max(0.0, replica.restart_at - time.monotonic())
            _say(f"{text}\n{replica.name} is started again in {delay:.1f} s")
        else:
            _say(f"degraded: {text}")
        self._changed.set()

    # -- supervision --------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Kill what is stuck, stop what has drained, start again what is due."""
        while not self._closing:
            await asyncio.sleep(SUPERVISE_SECONDS)
            try:
                await self._look()
            except Exception:  # nobody else would start anything again
                logger.exception("a turn of the supervisor failed")

    async def _look(self) -> None:
        now = time.monotonic()
        supervision = self._coordinator.supervision
        for replica, why in supervision.stuck(now):
            # While all start, the launch ends with a better text.
            if self._started and replica.hop not in self._killed:
                logger.error("killing %s: %s", replica.name, why)
                self._killed[replica.hop] = why
                self._node.kill_replica(replica.hop)
        for replica in supervision.drained(now):
            self._coordinator.tell_stop(replica)
            self._kill_at[replica.hop] = now + STOP_SECONDS
        for hop in [hop for hop, at in self._kill_at.items() if at <= now]:
            del self._kill_at[hop]
            self._killed[hop] = "it did not stop"
            self._node.kill_replica(hop)
        for replica in supervision.due(now):
            if not self._stop.is_set() or self._coordinator.state.in_flight:
                await self._restart(replica)

    async def _restart(self, dead: Replica) -> None:
        epoch = max(dead.epoch + 1, time.time_ns() // 1_000_000)
        replica = self._coordinator.expect_replica(dead.stage, dead.index, epoch)
        _say(f"starting {replica.name} again")
        try:
            await self._node.start(replica.hop)
        except (OSError, OmniError) as error:
            self._on_exit(replica.hop, f"cannot start a process: {error}")

    def _explain(self, replica: Replica, what: str) -> str:
        words = self._coordinator.fatal.get(replica.hop, "").strip()
        tail = self._node.log_tail(replica.hop)
        reason = f" {words}" if words else ""
        return f"{replica.name} {what} while {replica.phase}.{reason}\n--- last lines of its log\n{tail}\n---"

    # -- serve and end ------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Until a signal comes."""
        await self._stop.wait()

    async def until_stopped(self, work: Coroutine[Any, Any, int]) -> int:
        """Run `work`; a signal cancels it."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return EXIT_FAILED
        return task.result()

    async def close(self) -> None:
        """Requests get a moment to end, clients their answers; stages end, sockets and files go, in this order."""
        self._stop.set()
        await self._drain()
        self._closing = True
        if self._supervisor is not None:
            self._node.refuse_starts()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._coordinator.tell_shutdown("the launcher stops")
        stops = [self._node.stop(self._pipeline.coordinator.shutdown_timeout)]
        if self._http is not None:
            stops.append(self._http.stop())
        await asyncio.gather(*stops)
        await self._coordinator.close()
        if not self._owns_process:  # otherwise at the exit of the process, after the fork server's socket
            self._run_directory.close()


    async def _drain(self) -> None:
        """Admit nothing, and wait for what is in flight until the deadline for it."""
        self._coordinator.refuse_new()
        if self._started:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._coordinator.idle.wait(), self._pipeline.coordinator.drain_timeout)


def _say(text: str) -> None:
    """For the person at the terminal; stdout belongs to the answer."""
    print(f"[omni_actors] {text}", file=sys.stderr, flush=True)


async def _answer(endpoint: str, options: argparse.Namespace) -> int:
    """One request: text to stdout as it comes, audio to a file."""
    modalities = options.modalities.split(",") if options.modalities else _needed_modalities(options)
    pieces = []
    rate = 0
    async with AsyncOmniClient(endpoint) as client:
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
        _say(f"wrote {seconds:.2f} s of audio to {options.save_audio}")
    return EXIT_OK


def _needed_modalities(options: argparse.Namespace) -> list[str] | None:
    """Text alone needs no talker; `None` asks for all that the pipeline has."""
    return None if options.save_audio else ["text"]


if __name__ == "__main__":
    sys.exit(main())
