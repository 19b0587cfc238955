"""Measures the ways in which a speaking pipeline takes two GPUs of one host, one after the other, with the same load.

    python benchmarks/two_gpus.py stage_configs/qwen2_5_omni.yaml --model DIR [--parts a b c d] [--logs FOLDER]

    a  one launcher; two talkers and two vocoders, one of each on either GPU
    b  two launchers with a GPU each, as on two hosts; the same stages
    c  launch/ray.sh on a Ray cluster of two nodes with a GPU each; the same stages
    d  one launcher; the thinker's layers split over both GPUs (TP=2), the talker on one, the vocoder on the other

Two launchers have keys, as on two hosts, and encrypt what goes from one to the other; `--without-keys` shows what that
costs. The jobs of launch/ray.sh always have them. "ready_s" does not count the start of Ray's cluster.

The load goes over HTTP (benchmarks/serve.py); weights are random unless `--load-format ""` is given. Every part has
`--limit` seconds, all its processes end with it, and both GPUs have to be free before and after it. The table comes
last, also if a part failed: then with the end of its logs, and exit code 1. Without GPUs it runs on the CPU, where
only the way through is of interest. The pipeline's stages must be called thinker, talker and code2wav.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import serve
import workload

from omni_actors.config.placement import host_devices, visible_devices
from omni_actors.host.processes import adopt_orphans, describe_exit
from omni_actors.transport.curve import make_cluster

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"
MODEL_STAGES = ("thinker", "talker", "code2wav")
PARTS = {
    "a": "one launcher, two talkers and vocoders",
    "b": "two launchers, two talkers and vocoders",
    "c": "Ray, two talkers and vocoders",
    "d": "one launcher, thinker TP=2",
}
COLUMNS = ("load", "req_per_s", "ttft_ms", "ttfa_ms", "smooth_start_ms", "e2e_s", "stalled")
READY = re.compile(r"ready after .* clients connect to (\S+)")
URL = re.compile(r"HTTP on (\S+)")
STAGE_LOGS = re.compile(r"logs in (/\S+)")
RAY_NODE_STARTED = re.compile("Ray runtime started")
RAY_PROGRAMS = ("raylet/raylet", "gcs/gcs_server")
POLL_SECONDS = 0.1
END_SECONDS = 20.0  # for an orderly end, before SIGKILL
FREE_SECONDS = 20.0  # until the memory of processes that have ended is free
FREE_MIB = 2048.0  # in use on a GPU on which nothing runs
TAIL_LINES = 15


class Outcome(NamedTuple):
    """What became of a part."""

    part: str
    ready: float = 0.0
    rows: Sequence[dict[str, Any]] = ()
    problem: str = ""  # with the end of the logs


class Programs:
    """The processes of one part. What they print is in `folder`, and all that they started ends with them.

    Args:
        gpus: how many of this host's they may use.
    """

    def __init__(self, folder: Path, gpus: int) -> None:
        self.folder, self._gpus = folder, gpus
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.latest_start = 0.0  # by `perf_counter`
        self._short: str | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], gpus: Sequence[int], **environment: str) -> None:
        """Start a program that sees these GPUs only."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        given = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment}
        if self._gpus:
            given["CUDA_VISIBLE_DEVICES"] = ",".join(visible_devices(gpus))
        with self._log(name).open("wb") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            out: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=ROOT, env=given, start_new_session=True, **out)
        self._processes.append((name, process))
        self.latest_start = time.perf_counter()

    async def said(self, name: str, pattern: re.Pattern[str]) -> re.Match[str]:
        """Wait until a program prints this.

        Raises:
            RuntimeError: one of the programs has ended.
        """
        while True:
            for other, process in self._processes:
                if (code := process.poll()) is not None:
                    raise RuntimeError(f"{other} ended with {describe_exit(code)}")
            if found := pattern.search(self._text(name)):
                return found
            await asyncio.sleep(POLL_SECONDS)

    def short_folder(self) -> str:
        """A folder for sockets, whose paths must be short, until the end; then its logs are in `folder`."""
        self._short = tempfile.mkdtemp(prefix="r-", dir="/tmp")
        return self._short

    def end(self) -> None:
        """End all in order, those that started last first, then by force whatever is left. Keeps the stages' logs."""
        for number, log in enumerate(STAGE_LOGS.findall("".join(self._text(name) for name, _ in self._processes))):
            with contextlib.suppress(OSError):  # they go with a launcher that has ended
                shutil.copytree(log, self.folder / f"stages-{number}", dirs_exist_ok=True)
        for _, process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, END_SECONDS)
        for _, process in self._processes:
            process.wait()
        if self._short is not None:
            for logs in Path(self._short).glob("session_2*/logs"):
                shutil.copytree(logs, self.folder / "ray-logs", dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(self._short)

    def tails(self) -> Iterator[str]:
        """The last lines of every program."""
        for name, _ in self._processes:
            lines = self._text(name).splitlines()[-TAIL_LINES:]
            yield "\n".join([f"--- {self._log(name)}", *lines])

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _text(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")


def settings(part: str, options: argparse.Namespace, gpus: int) -> list[str]:
    """The `--set` arguments that make the pipeline of a part from the one of `options`."""
    found = {f"stages.{name}.engine.load_format": options.load_format for name in MODEL_STAGES if options.load_format}
    for name in MODEL_STAGES[1:] if part in "abc" else ():
        found[f"stages.{name}.replicas"] = "2"
        if part != "a" or gpus:
            found[f"stages.{name}.{'devices' if part == 'a' else 'node'}"] = "[0, 1]"
    if part == "d":
        found["stages.thinker.engine.tensor_parallel_size"] = "2"
        found |= {"stages.thinker.devices": "[0, 1]", "stages.code2wav.devices": "[1]"} if gpus else {}
        if not gpus:
            found["stages.thinker.environment"] = '{VLLM_CPU_OMP_THREADS_BIND: "0|1"}'  # the cores of the ranks
    given = [f"{key}={value}" for key, value in found.items()] + options.set
    return [argument for item in given for argument in ("--set", item)]


async def start(part: str, programs: Programs, options: argparse.Namespace, gpus: int) -> tuple[str, str]:
    """Start a part; return its endpoint and its URL once it serves."""
    arguments = [options.config, "--http", f"{LOOPBACK}:0", *settings(part, options, gpus)]
    if options.model:
        arguments += ["--model", options.model]
    launch = [sys.executable, "-m", "omni_actors.launch", *arguments]
    if part in "ad":
        serving = "launcher"
        programs.start(serving, launch, (0, 1))
    elif part == "b":
        serving = "node-0"
        launch += ["--nnodes", "2", "--master-addr", LOOPBACK, "--master-port", str(free_port())]
        if not options.without_keys:
            make_cluster(programs.folder / "keys")
            launch += ["--keys", str(programs.folder / "keys")]
        for rank in (0, 1):
            own = ["--node-rank", str(rank), *(["--headless"] if rank else [])]
            programs.start(f"node-{rank}", [*launch, *own], (rank,))
    else:
        serving = "ray"
        address = await start_ray(programs, gpus)
        ray = {"RAY_ADDRESS": address, "OMNI_PYTHON": sys.executable}
        programs.start(serving, ["bash", str(ROOT / "launch/ray.sh"), *arguments, "--nnodes", "2"], (0, 1), **ray)
    url = await programs.said(serving, URL)
    ready = await programs.said(serving, READY)
    return ready[1], url[1]


async def start_ray(programs: Programs, gpus: int) -> str:
    """Start a cluster of two nodes with a GPU each; return its address."""
    found = find_spec("ray")
    if found is None or found.origin is None:
        raise RuntimeError("Ray is not installed: pip install 'omni_actors[ray]'")
    paths = [Path(found.origin).parent / "core/src/ray" / name for name in RAY_PROGRAMS]
    if refused := [str(path) for path in paths if not os.access(path, os.X_OK)]:
        # A wheel that was unpacked by hand loses this.
        raise RuntimeError(f"Ray cannot start programs that are not executable: chmod +x {' '.join(refused)}")
    # Ray's console script may lie outside of PATH, as after `pip install --target`.
    node = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", LOOPBACK]
    node += ["--num-cpus", "4", "--num-gpus", "1" if gpus else "0", "--object-store-memory", "100000000"]
    # Two nodes of one host would otherwise take the same ports.
    node += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
    port = free_port()
    address = f"{LOOPBACK}:{port}"
    head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", programs.short_folder()]
    for rank, own in enumerate((head, ["--address", address])):
        name = f"ray-{rank}"
        ray = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        programs.start(name, [*node, *own], (rank,), **ray)
        await programs.said(name, RAY_NODE_STARTED)
    return address


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


async def run_part(part: str, options: argparse.Namespace, gpus: int) -> Outcome:
    """Start a part, measure it, end it."""
    programs = Programs(options.logs / part, gpus)
    ready, rows, problem = 0.0, [], ""
    try:
        if not await free(gpus):
            raise RuntimeError("a GPU is in use already")
        async with asyncio.timeout(options.limit):
            endpoint, url = await start(part, programs, options, gpus)
            ready = time.perf_counter() - programs.latest_start
            print(f"{part}: ready after {ready:.1f} s", file=sys.stderr, flush=True)
            rows = await serve.measure(endpoint, options, url, only_http=True)
    except TimeoutError:
        problem = f"not done within {options.limit:g} s, {'measuring' if ready else 'starting'} until then"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other parts run
        problem = f"{type(error).__name__}: {error}"
    finally:
        programs.end()
    if problem:
        print(f"{part}: {problem}", file=sys.stderr, flush=True)
        problem = "\n".join([problem, *programs.tails()])
    if not await free(gpus):
        problem = f"{problem}\nits end left more than {FREE_MIB:g} MiB of a GPU in use".lstrip()
    return Outcome(part, ready, rows, problem)


async def free(gpus: int) -> bool:
    """Wait a moment until nothing runs on the GPUs."""
    deadline = time.perf_counter() + FREE_SECONDS
    while gpus and max(map(float, workload.nvidia_smi("memory.used")), default=0.0) > FREE_MIB:
        if time.perf_counter() > deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each load of each part; what failed has a row with dashes."""
    rows = []
    for outcome in outcomes:
        first = {"part": f"{outcome.part}: {PARTS[outcome.part]}", "ready_s": f"{outcome.ready:.1f}"}
        for row in outcome.rows or [{}]:
            rows.append(first | {name: row.get(name, "-") for name in COLUMNS})
    return workload.table(rows)


async def main(options: argparse.Namespace) -> int:
    gpus = min(host_devices(), 2)
    if gpus == 1:
        raise SystemExit("This needs two GPUs, or none to try it on the CPU; this host has one.")
    adopt_orphans()
    options.logs = options.logs.resolve()
    outcomes = [await run_part(part, options, gpus) for part in options.parts]
    for outcome in outcomes:
        if outcome.problem:
            print(f"\n{outcome.part} failed: {outcome.problem}")
    print(f"\n{table(outcomes)}\n{workload.versions_line()}\nlogs: {options.logs}")
    if options.json:
        options.json.write_text(workload.report([outcome._asdict() for outcome in outcomes]))
    return int(any(outcome.problem for outcome in outcomes))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("config")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    made.add_argument("--limit", type=float, default=150.0, help="seconds for each part")
    made.add_argument("--logs", type=Path, help="folder for everything that is printed (default: a new one)")
    made.add_argument("--load-format", default="dummy", help="vLLM's load_format of every stage")
    made.add_argument("--without-keys", action="store_true", help="let the two launchers of b not encrypt")
    serve.add_load_arguments(made)
    made.set_defaults(concurrency=[8, 32], rounds=1, speech=False)
    return made


if __name__ == "__main__":
    arguments = parser().parse_args()
    if Path(arguments.config).is_file():
        arguments.config = str(Path(arguments.config).resolve())
    arguments.logs = arguments.logs or Path(tempfile.mkdtemp(prefix="two-gpus-"))
    sys.exit(asyncio.run(main(arguments)))
