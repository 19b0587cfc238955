"""The HTTP server for a running pipeline: `python -m omni_actors.http_server --endpoint ENDPOINT --http HOST:PORT`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
import setproctitle
import uvicorn

from omni_actors import envs, logs
from omni_actors.errors import ConfigError
from omni_actors.host.addresses import is_endpoint
from omni_actors.host.processes import EXIT_OK, EXIT_USAGE, die_with_parent, raise_file_limit
from omni_actors.http_server.app import create_app
from omni_actors.http_server.connections import RESERVED_FILES, bounded_protocol, bounded_websocket
from omni_actors.http_server.realtime import calls
from omni_actors.http_server.settings import (
    SPEC_FLAG,
    HttpServerSpec,
    ServerSettings,
    add_flags,
    bind,
    http_config,
    server_settings,
    url,
)
from omni_actors.sharing import Budget
from omni_actors.transport.curve import load_keys

KEEP_ALIVE_SECONDS = 30
SHUTDOWN_SECONDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code (2 for a wrong address or a forbidden exposure)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        logs.configure("http")
        setproctitle.setproctitle("omni:http")
        listener, settings = _from_launcher(given[1]) if given[:1] == [SPEC_FLAG] else _from_flags(given)
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_USAGE
    logs.get_logger(__name__).info("listening on %s", url(listener, settings))
    _join_logs()
    bodies = Budget(settings.bodies_bytes)
    reserved = RESERVED_FILES + (settings.realtime_sessions if calls.available() else 0)
    config = uvicorn.Config(
        create_app(settings, bodies=bodies),
        http=bounded_protocol(settings, raise_file_limit(reserved) // 2),  # each may have a journal
        log_config=None,
        access_log=False,  # the middleware logs each request with its id
        ws=bounded_websocket(settings, bodies),
        ws_max_size=settings.body_bytes,
        ws_per_message_deflate=False,  # sound does not get smaller, and a small frame could become a large one
        proxy_headers=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_actors.http_server",
        description="OpenAI-compatible HTTP server for a running pipeline.",
        epilog="The key that requests must bring is in the environment, OMNI_ACTORS_API_KEY; without one the server "
        "listens on loopback only, unless --http-insecure is given.",
    )
    parser.add_argument("--endpoint", required=True, help="client endpoint of the pipeline, as the launcher prints it")
    parser.add_argument("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="where to listen")
    parser.add_argument("--keys", metavar="DIR", default=envs.keys_dir(), help="CURVE keys for a tcp:// endpoint")
    add_flags(parser)
    return parser


def _from_flags(given: Sequence[str]) -> tuple[socket.socket, ServerSettings]:
    options = parser().parse_args(given)
    if not is_endpoint(options.endpoint):
        raise ConfigError(f"--endpoint: {options.endpoint!r} is not of the form ipc://PATH or tcp://HOST:PORT.")
    load_keys(options.keys)
    settings = server_settings(http_config(options), options.endpoint, options.keys, options)
    if settings.workers > 1:
        hint = "Give it to omni-actors launch, or start this program on several ports."
        raise ConfigError("--http-workers: this program is one process.", hint=hint)
    (listener,) = bind(options.http, settings, options.http_insecure)
    return listener, settings


def _from_launcher(spec_json: str) -> tuple[socket.socket, ServerSettings]:
    """End with the launcher, and leave Ctrl-C to it: it decides in which order things stop."""
    spec = msgspec.json.decode(spec_json, type=HttpServerSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != spec.launcher_pid:  # it died before the line above
        raise ConfigError("The launcher is gone.", hint="")
    logs.configure("http", spec.log_file)
    keys = {"api_key": envs.api_key()}
    return socket.socket(fileno=spec.listener), msgspec.structs.replace(spec.settings, **keys)


def _join_logs() -> None:
    """Log the libraries' warnings in our format and number; what they log at info, this process logs itself."""
    for name in ("uvicorn", "python_multipart"):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = logging.getLogger("omni_actors").handlers
        theirs.setLevel(logging.WARNING)
        theirs.propagate = False


if __name__ == "__main__":
    sys.exit(main())
