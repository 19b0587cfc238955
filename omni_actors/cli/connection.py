"""What the commands share: which pipeline they talk to, and durations, sizes and states as people read them.

The endpoint is an argument (`--endpoint ENDPOINT`, or ENDPOINT by itself, wherever it stands), else
`OMNI_ACTORS_ENDPOINT`, else that of the only pipeline of this user on this host.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TypedDict

from omni_actors import envs
from omni_actors.errors import ConfigError, OmniError, RequestTimeout
from omni_actors.host.addresses import IPC, TCP, is_endpoint
from omni_actors.host.processes import EXIT_FAILED, EXIT_OK
from omni_actors.host.run_directory import Running, running
from omni_actors.protocol.messages import StageStatus
from omni_actors.transport.curve import load_keys


def duration(seconds: float) -> str:
    """Three significant digits: `640 µs`, `12.3 ms`, `4.56 s`."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.{0 if value >= 100 or unit == 'µs' else 1}f} {unit}"
    return f"{seconds:.2f} s"


def size(n_bytes: float) -> str:
    """Binary units: `44 B`, `7.0 KiB`, `1.5 MiB`."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        n_bytes /= 1024
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} GiB"


def state(status: StageStatus) -> str:
    """A replica's state, with what an operator made of it: `ready (spare)`, `draining (leaving)`."""
    marks = {"spare": status.spare, "joining": status.joining, "leaving": status.leaving}
    shown = ", ".join(name for name, applies in marks.items() if applies)
    return f"{status.state} ({shown})" if shown else status.state


CONNECT_SECONDS = 2.0
FLAG = "--endpoint"


class Connection(TypedDict):
    """Arguments of a client: where a pipeline listens, and the folder of the keys that it asks for."""

    endpoint: str
    keys: str | None


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which pipeline to talk to."""
    parser.add_argument(FLAG, help="where the pipeline listens (default: OMNI_ACTORS_ENDPOINT, else the only one here)")
    parser.add_argument("--keys", metavar="DIR", help="CURVE keys for a tcp:// endpoint (default: OMNI_ACTORS_KEYS)")


def with_flag(arguments: Sequence[str]) -> list[str]:
    """Put the endpoint first, as `--endpoint ENDPOINT`, wherever it stands and whether the flag is there or not."""
    given = list(arguments)
    for index, argument in enumerate(given):
        if argument.removeprefix(FLAG + "=").startswith((IPC, TCP)):
            before = index - 1 if index and given[index - 1] == FLAG else index
            return [FLAG, argument.removeprefix(FLAG + "="), *given[:before], *given[index + 1 :]]
    return given


def run(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, work: Callable[[argparse.Namespace], object]
) -> int:
    """Parse a command line and do its work. Returns the exit code: 0, or 1 with a printed error."""
    options = parser.parse_args(with_flag(sys.argv[1:] if arguments is None else arguments))
    try:
        work(options)
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def connection(options: argparse.Namespace) -> Connection:
    """Find the pipeline.

    Raises:
        ConfigError: no pipeline is named and none runs here, or several do; or the keys cannot be used.
        RequestTimeout: nothing listens there.
    """
    keys = options.keys or envs.keys_dir()
    load_keys(keys)
    named: str | None = options.endpoint or envs.endpoint()
    if named is None:
        found = only_one(running())
        return {"endpoint": found.endpoint, "keys": keys or found.keys}
    if is_endpoint(named):
        check_listens(named)
    return {"endpoint": named, "keys": keys}  # the client refuses what is not an endpoint


def only_one(pipelines: Sequence[Running]) -> Running:
    """Return the only pipeline. Raises `ConfigError` if there is none, or more than one."""
    how = "with --endpoint or in OMNI_ACTORS_ENDPOINT"
    if not pipelines:
        raise ConfigError(
            "No endpoint was given, and no pipeline of this user runs here.",
            hint=f"Start one with omni-actors launch, or name one {how}.",
        )
    if len(pipelines) > 1:
        listed = "".join(f"\n  {pipeline.endpoint}  {pipeline.name}, process {pipeline.pid}" for pipeline in pipelines)
        raise ConfigError(f"{len(pipelines)} pipelines run here.", hint=f"Name one of them {how}:{listed}")
    return pipelines[0]


def check_listens(endpoint: str) -> None:
    """Raise `RequestTimeout` at once if nothing listens at a socket file, where a client would wait for someone."""
    if not endpoint.startswith(IPC):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(endpoint.removeprefix(IPC))
        except TimeoutError:
            return  # it listens, and is busy
        except OSError as error:
            here = ", ".join(pipeline.endpoint for pipeline in running())
            raise RequestTimeout(
                f"Nothing listens at {endpoint}: {error.strerror or error}.",
                hint=f"Running here: {here}." if here else "Start the pipeline, or name the one that runs.",
            ) from error
