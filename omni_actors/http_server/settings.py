"""Settings of the HTTP server: its flags, what the launcher hands to its process, and where it may listen."""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from omni_actors import envs, flags
from omni_actors.config import HttpConfig
from omni_actors.config.checks import check_http_sizes
from omni_actors.config.loading import converted
from omni_actors.config.schema import meanings
from omni_actors.errors import ConfigError
from omni_actors.host.addresses import is_loopback
from omni_actors.host.run_directory import check_folder_can_be_made, check_own_folder, check_readable, expanded

BACKLOG = 2048
CORES_PER_PROCESS, MOST_PROCESSES = 4, 8  # by default: stages need the other cores
MAX_MILLISECONDS = 2**31 - 1
MAX_PEM_BYTES = 1 << 20
MEDIA_HOST = re.compile(r"\.?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
REPEATED: dict[str, tuple[str, Callable[[str], Any], str, str]] = {  # key: flag, type, value's name and help
    "served_names": (
        "--served-name",
        flags.line,
        "NAME",
        "name of the model for HTTP clients (default: the pipeline's)",
    ),
    "voice_aliases": ("--voice-alias", lambda text: _alias(text), "NAME=VOICE", "another name for a voice"),
    "cors_origins": ("--http-cors-origin", str, "ORIGIN", "origin whose web pages may use the server, or *"),
}
SPEC_FLAG = "--spec"  # the launcher starts the process with this and an `HttpServerSpec` instead of the other flags


class ServerSettings(HttpConfig, frozen=True, kw_only=True):
    """Everything that the pipeline itself does not say: the section `http` of its YAML, and these.

    Args:
        endpoint: the coordinator's client endpoint.
        keys: folder of CURVE keys for it.
        api_key: what requests must bring as `Authorization: Bearer KEY`; `None` for no check.
        check_host: refuse requests whose Host header is not a loopback name. Without it, a web page that resolves its
            own name to 127.0.0.1 could use a server that has no key.
        shared_dir: folder of this user alone, for what the processes of the server share; `None` for one process.
        media_hosts: hosts from which media may be fetched over https; `.example.com` also allows its subdomains.
    """

    endpoint: str
    keys: str | None = None
    api_key: str | None = None
    check_host: bool = True
    shared_dir: str | None = None
    media_hosts: tuple[str, ...] = ()


class HttpServerSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What the launcher hands to the server's process, as JSON.

    Args:
        settings: without the API key, which the process reads from its environment.
        listener: file descriptor of the listening socket.
        launcher_pid: process id of the launcher.
        log_file: where the process's output goes.
    """

    settings: ServerSettings
    listener: int
    launcher_pid: int
    log_file: str


# ---------------------------------------------------------------------------------------------------------------------
# Flags


def add_flags(parser: argparse.ArgumentParser, http: argparse._ActionsContainer | None = None) -> None:
    """Add the flags of the server: its own, and one for each key of the section `http`, such as `--http-body-bytes`.

    A key's flag that is not given stays `None`, so that the YAML or the default holds.

    Args:
        http: the group for those that are no limits.
    """
    http = http or parser
    limits = parser.add_argument_group("HTTP limits", "Of each process; the YAML has them in its section `http`.")
    http.add_argument("--http-insecure", action="store_true", help="listen off loopback without an API key")
    http.add_argument(
        "--media-host",
        action="append",
        default=[],
        metavar="HOST",
        help="host from which media may be fetched over https; .example.com allows its subdomains too",
    )
    about, defaults = meanings(HttpConfig), HttpConfig()
    for name, hint in get_type_hints(HttpConfig).items():
        number = {int: int, float: flags.finite}.get(hint)
        text = re.split(r"[;.] |, such as", about.get(name, ""))[0].rstrip(".").replace("%", "%%")
        if (default := getattr(defaults, name)) not in (None, [], {}):
            text += f" (default: {default})"
        options: dict[str, Any] = {"type": number or str, "help": text, "metavar": "N" if number else name.upper()}
        if name in REPEATED:
            _, kind, metavar, text = REPEATED[name]
            options = {"type": kind, "action": "append", "metavar": metavar, "help": f"{text}; repeatable"}
        (limits if number else http).add_argument(_flag(name), **options)
    text = "take OpenAI's names of models and voices, too"
    http.add_argument("--openai-names", dest="http_names", action="store_const", const="openai", help=text)


def given_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Keys and values of the section `http` that were given as flags."""
    names = HttpConfig.__struct_fields__
    given = {name: value for name in names if (value := getattr(options, _destination(name))) is not None}
    if "voice_aliases" in given:
        given["voice_aliases"] = dict(given["voice_aliases"])
    return given


def _destination(name: str) -> str:
    return _flag(name)[2:].replace("-", "_")


def _flag(name: str) -> str:
    return REPEATED[name][0] if name in REPEATED else f"--http-{name.replace('_', '-')}"


def _alias(text: str) -> tuple[str, str]:
    """Split NAME=VOICE."""
    name, separator, voice = text.partition("=")
    if not (separator and name and voice):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VOICE, such as alloy=Chelsie")
    return flags.line(name), flags.line(voice)


def http_config(options: argparse.Namespace) -> HttpConfig:
    """Build the section `http` from flags alone. Raises `ConfigError`, naming the key, for a value off limits."""
    http = converted(given_flags(options), HttpConfig, "http")
    check_http_sizes(http)
    return http


def server_settings(http: HttpConfig, endpoint: str, keys: str | None, options: argparse.Namespace) -> ServerSettings:
    """Complete the section `http` with the server's own flags and the environment."""
    api_key = envs.api_key()
    return ServerSettings(
        **msgspec.structs.asdict(http),
        endpoint=endpoint,
        keys=keys,
        api_key=api_key,
        check_host=api_key is None and not options.http_insecure,  # `bind` then allows loopback only
        media_hosts=media_hosts(options),
    )


def media_hosts(options: argparse.Namespace) -> tuple[str, ...]:
    """Hosts from which media may be fetched, from flags and environment. Raises `ConfigError` for an invalid name."""
    hosts = tuple(dict.fromkeys([*envs.media_hosts(), *(host.lower() for host in options.media_host)]))
    for host in hosts:
        if not MEDIA_HOST.fullmatch(host):
            raise ConfigError(f"--media-host: {host!r} is not a host name.", hint="For instance media.example.com.")
    return hosts


# ---------------------------------------------------------------------------------------------------------------------
# Where to listen


def bind(address: str, settings: ServerSettings, insecure: bool, count: int = 1) -> list[socket.socket]:
    """Listen on `HOST:PORT` with as many sockets as processes share it; the kernel spreads connections over them.

    A connection ends when its client has read nothing for `write_timeout` seconds.

    Raises:
        ConfigError: the address is wrong or taken, would be open to others without a key, or TLS cannot be used.
    """
    host, port = check_listening(address, settings, settings.api_key, insecure)
    family, bound = _resolve(host, port)
    milliseconds = min(math.ceil(1000 * settings.write_timeout), MAX_MILLISECONDS)
    listeners: list[socket.socket] = []
    try:
        if count > 1:  # a socket that shares its port would also share that of another server of this user
            _listener(family, bound, milliseconds, shares=False).close()
        for _ in range(count):
            listeners.append(_listener(family, bound, milliseconds, shares=count > 1))
            bound = listeners[0].getsockname()
    except OSError as error:
        for listener in listeners:
            listener.close()
        hint = "Choose another address or port."
        raise ConfigError(f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}.", hint=hint) from error
    return listeners


def _listener(family: socket.AddressFamily, address: Any, milliseconds: int, shares: bool) -> socket.socket:
    both = family is socket.AF_INET6  # IPv4, too
    listener = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=shares, dualstack_ipv6=both)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def processes_of(http: HttpConfig) -> int:
    """How many processes serve: those that `http.workers` names, or as many as the cores of this host can feed."""
    return http.workers or min(max(len(os.sched_getaffinity(0)) // CORES_PER_PROCESS, 1), MOST_PROCESSES)


def check_listening(address: str, config: HttpConfig, api_key: str | None, insecure: bool) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, without binding it.

    Raises:
        ConfigError: the address is wrong, would be open to others without a key, or TLS cannot be used.
    """
    host, port = parse_address(address)
    check_exposure(host, api_key, insecure)
    tls_context(config)
    if config.voices_dir is not None:
        folder = expanded(config.voices_dir, "http.voices_dir")
        check_folder_can_be_made(folder, "http.voices_dir")
        if folder.exists():
            check_own_folder(folder, "The folder http.voices_dir")
    _resolve(host, port)
    return host, port


def tls_context(config: HttpConfig) -> ssl.SSLContext | None:
    """The TLS context of connections; `None` without a certificate.

    Raises:
        ConfigError: certificate or key are missing, cannot be read, or do not belong together.
    """
    if config.certificate is None and config.key is None:
        return None
    if config.certificate is None or config.key is None:
        raise ConfigError("http.certificate and http.key go together: one of them is missing.")
    for name, path in (("http.certificate", config.certificate), ("http.key", config.key)):
        size = check_readable(expanded(path, name), name)
        if size > MAX_PEM_BYTES:
            raise ConfigError(f"{name}: {path} has {size} bytes; a PEM file of this kind has a few thousand.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ssl.SSLError, ConfigError) as error:
        raise ConfigError(
            f"The certificate {config.certificate!r} with the key {config.key!r} cannot be used: {error}.",
            hint="Both are PEM files; the key is that of the certificate and has no password.",
        ) from error
    return context


def _no_password() -> str:
    raise ConfigError("the key has a password", hint="")  # else the terminal would be asked for it


def parse_address(text: str, option: str = "--http") -> tuple[str, int]:
    """Split `HOST:PORT`, `[IPV6]:PORT` or `PORT` (on 127.0.0.1). Raises `ConfigError`."""
    host, separator, port = text.rpartition(":")
    if not separator:
        host = "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {text!r} is not of the form HOST:PORT.", hint="For instance 127.0.0.1:8000.")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def check_exposure(host: str, api_key: str | None, insecure: bool) -> None:
    """Raise `ConfigError` if a server on `host` would be open to others without a key."""
    if not is_loopback(host) and api_key is None and not insecure:
        raise ConfigError(
            f"Without an API key the HTTP server listens on loopback only, not on {host!r}.",
            hint="Set OMNI_ACTORS_API_KEY, or give --http-insecure if something else keeps strangers out.",
        )


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The family and address to bind. Raises `ConfigError` for a name that is unknown or none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--http: {host!r} is not an address of this host: {error}.") from error
    return family, address


def url(listener: socket.socket, config: HttpConfig) -> str:
    """Return the URL of a listening socket as people type it."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
