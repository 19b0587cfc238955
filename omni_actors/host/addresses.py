"""Parses endpoints and hosts, tells which of them other hosts can reach, and resolves names to IPv4 addresses."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable

from omni_actors.errors import ConfigError

TCP, IPC = "tcp://", "ipc://"
LOCAL_SCHEMES = (IPC, "inproc://")
REPORT_SECONDS = 5.0  # between two reports that a name is still unknown


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach `host` (a name or an address, without brackets)."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether `host` is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_tcp(endpoint: str) -> bool:
    """Whether an endpoint is TCP, so that its link may fail while both ends live."""
    return endpoint.startswith(TCP)


def tcp_host(endpoint: str) -> str | None:
    """The host of `tcp://HOST:PORT`, without brackets; `None` for an endpoint of another form."""
    host, separator, port = endpoint.removeprefix(TCP).rpartition(":")
    number = port.isascii() and port.isdigit() and int(port) <= 65535
    if not is_tcp(endpoint) or not separator or not host or not number or "/" in host:
        return None
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_endpoint(endpoint: str) -> bool:
    """Whether a text has the form of an endpoint: `ipc://PATH`, `tcp://HOST:PORT` or, in one process, `inproc://NAME`."""
    # One that is not printable may not even be encodable, such as a file name of another encoding.
    return endpoint.isprintable() and (endpoint.startswith(LOCAL_SCHEMES) or tcp_host(endpoint) is not None)


def stays_on_host(endpoint: str) -> bool:
    """Whether no other host can reach what is bound at, or sent to, an endpoint."""
    host = tcp_host(endpoint)
    return endpoint.startswith(LOCAL_SCHEMES) or (host is not None and is_loopback(host))


def resolve(host: str) -> str:
    """Return the IPv4 address of a host name or address. Raises `ConfigError` for an unknown name."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"There is no IPv4 address for {host!r}: {error}.") from error


async def resolve_eventually(host: str, seconds: float, on_wait: Callable[[str], None]) -> str:
    """Resolve a name that may take `seconds` to appear: hosts that start together are not all known at once.

    `on_wait` receives the reason every few seconds meanwhile.
    """
    deadline = time.monotonic() + seconds
    next_report = 0.0
    while True:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, resolve, host)
        except ConfigError as error:
            now = time.monotonic()
            if now > deadline:
                raise
            if now >= next_report:
                next_report = now + REPORT_SECONDS
                on_wait(str(error))
        await asyncio.sleep(1.0)


def source_address(address: str) -> str:
    """Return the address from which this host reaches another one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ConfigError(f"There is no route to {address}: {error.strerror}.") from error
        return str(probe.getsockname()[0])
