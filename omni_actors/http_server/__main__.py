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

import setproctitle
import uvicorn

from omni_actors import envs, logs
from omni_actors.addresses import is_loopback
from omni_actors.errors import ConfigError
from omni_actors.http_server import settings as server_settings
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from omni_actors.processes import EXIT_OK, EXIT_USAGE, die_with_parent

KEEP_ALIVE_SECONDS = 30
SHUTDOWN_SECONDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code (2 for a wrong address or a forbidden exposure)."""
    options = _parser().parse_args(arguments)
    logs.configure("http")
    setproctitle.setproctitle("omni:http")
    try:
        if options.listener is not None:
            _follow_launcher(options.launcher_pid)
            listener = socket.socket(fileno=options.listener)
        else:
            host, port = server_settings.parse_address(options.http)
            server_settings.check_exposure(host, envs.api_key(), options.http_insecure)
            listener = server_settings.listen(host, port)
        settings = _settings(options, listener)
        server_settings.check_certificate(settings)
    except ConfigError as error:
        print(f"configuration error: {error}", file=sys.stderr)
        return EXIT_USAGE
    logs.get_logger(__name__).info("listening on %s", server_settings.url(listener, settings))
    _join_logs()
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=False,  # the gate logs each request with its id
        ws="none",
        proxy_headers=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[listener]))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m omni_actors.http_server",
        description="OpenAI-compatible HTTP server for a running pipeline.",
        epilog="The key that requests must bring is in the environment, OMNI_ACTORS_API_KEY; without one the server "
        "listens on loopback only, unless --http-insecure is given.",
    )
    parser.add_argument("--endpoint", required=True, help="client endpoint of the pipeline, as the launcher prints it")
    parser.add_argument("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="where to listen")
    parser.add_argument("--keys", metavar="DIR", default=envs.keys_dir(), help="CURVE keys for a tcp:// endpoint")
    add_arguments(parser)
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)  # the launcher's listening socket
    parser.add_argument("--launcher-pid", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that the launcher passes on."""
    parser.add_argument("--http-insecure", action="store_true", help="listen off loopback without an API key")
    parser.add_argument(
        "--served-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model for clients (default: the pipeline's)",
    )
    parser.add_argument(
        "--media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="host from which https media may be fetched; .example.com: and below it",
    )
    server_settings.add_flags(parser.add_argument_group("limits, TLS, foreign pages"))


def _follow_launcher(pid: int) -> None:
    """End with the launcher, and leave Ctrl-C to it: it decides in which order things stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != pid:  # it died before the line above
        raise ConfigError("The launcher is gone.", hint="")


def _join_logs() -> None:
    """uvicorn's warnings in our format; what it says at info is said by us."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = logging.getLogger("omni_actors").handlers
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False


def _settings(options: argparse.Namespace, listener: socket.socket) -> ServerSettings:
    key = envs.api_key()
    loopback = is_loopback(listener.getsockname()[0])
    return ServerSettings(
        **server_settings.checked(server_settings.given_flags(options)),
        endpoint=options.endpoint,
        keys=options.keys,
        api_key=key,
        check_host=loopback and key is None and not options.http_insecure,
        served_names=tuple(options.served_name),
        media_hosts=tuple(dict.fromkeys([*envs.media_hosts(), *(host.lower() for host in options.media_host)])),
    )


if __name__ == "__main__":
    sys.exit(main())
