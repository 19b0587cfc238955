"""What the HTTP server is told at its start, and the checks on where it may listen."""

from __future__ import annotations

import argparse
import socket
import ssl
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from omni_actors.addresses import is_loopback
from omni_actors.config import HttpConfig
from omni_actors.errors import ConfigError

BACKLOG = 2048


class ServerSettings(HttpConfig, frozen=True, kw_only=True):
    """Everything that does not come from the pipeline itself: the configuration's limits, and these.

    Args:
        endpoint: the coordinator's client endpoint.
        keys: folder of CURVE keys for it.
        api_key: what requests must bring as `Authorization: Bearer KEY`; `None` for no check.
        check_host: refuse requests whose Host header is no loopback name. Without it, a web page that resolves its own
            name to 127.0.0.1 could use a server that has no key.
        served_names: names under which the model is offered; those of the pipeline when empty.
        media_hosts: hosts from which media may be fetched over https; `.example.com` also allows its subdomains.
    """

    endpoint: str
    keys: str | None = None
    api_key: str | None = None
    check_host: bool = True
    served_names: tuple[str, ...] = ()
    media_hosts: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# Flags: one for each key of the configuration's section `http`


def add_flags(parser: argparse._ActionsContainer) -> None:
    """`--http-body-bytes` and so on. What is not given stays `None`, so that the YAML or the default holds."""
    for name, hint in get_type_hints(HttpConfig).items():
        kind = {int: int, float: float}.get(hint, str)
        action: dict[str, Any] = {"type": kind}
        if name == "cors_origins":
            action = {"action": "append", "default": None, "metavar": "ORIGIN"}
        parser.add_argument(_flag(name), help=f"`http.{name}` of the YAML", **action)


def given_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Key of the section -> value, of the flags that were given."""
    names = HttpConfig.__struct_fields__
    return {name: value for name in names if (value := getattr(options, _flag(name)[2:].replace("-", "_"))) is not None}


def as_flags(config: HttpConfig) -> list[str]:
    """The flags that make a server of its own have this configuration."""
    flags = []
    for name in HttpConfig.__struct_fields__:
        value = getattr(config, name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        flags += [f"{_flag(name)}={item}" for item in values]
    return flags


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the section, with their limits checked. Raises `ConfigError` that names the key."""
    try:
        return msgspec.structs.asdict(msgspec.convert(values, HttpConfig))
    except msgspec.ValidationError as error:
        raise ConfigError(f"http: {error}.") from error


def check_certificate(config: HttpConfig) -> None:
    """Raise `ConfigError` unless certificate and key are both absent, or both readable and of one another."""
    if config.certificate is None and config.key is None:
        return
    if config.certificate is None or config.key is None:
        raise ConfigError("http.certificate and http.key go together: one of them is missing.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ssl.SSLError, ConfigError) as error:
        raise ConfigError(
            f"The certificate {config.certificate!r} with the key {config.key!r} cannot be used: {error}.",
            hint="Both are PEM files; the key is that of the certificate and has no password.",
        ) from error


def _no_password() -> str:
    raise ConfigError("the key has a password", hint="")  # else the terminal would be asked for it


def _flag(name: str) -> str:
    return "--http-cors-origin" if name == "cors_origins" else f"--http-{name.replace('_', '-')}"


# ---------------------------------------------------------------------------------------------------------------------
# Where to listen


def parse_address(text: str, option: str = "--http") -> tuple[str, int]:
    """`HOST:PORT`, `[IPV6]:PORT` or `PORT` (on 127.0.0.1). Raises `ConfigError`."""
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` where the address is in use or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--http: {host!r} is no address of this host: {error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}.", hint="Choose another address or port."
        ) from error
    return listener


def url(listener: socket.socket, config: HttpConfig) -> str:
    """The address of a listening socket as people type it."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
