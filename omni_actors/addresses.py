"""Endpoints and hosts: what they look like, who reaches them, and the numeric IPv4 that TCP endpoints are made of."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable

from omni_actors.errors import ConfigError

TCP, LOCAL_SCHEMES = "tcp://", ("ipc://", "inproc://")
WORD_SECONDS = 5.0


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach `host` (a name or an address, without brackets)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether `host` is no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_tcp(endpoint: str) -> bool:
    """Whether an endpoint may be reached over a link that can be cut."""
    return endpoint.startswith(TCP)


def tcp_host(endpoint: str) -> str | None:
    """The host of `tcp://HOST:PORT` without brackets; `None` for what has not this form."""
    host, separator, port = endpoint.removeprefix(TCP).rpartition(":")
    number = port.isascii() and port.isdigit() and int(port) <= 65535
    if not is_tcp(endpoint) or not separator or not host or not number or "/" in host:
        return None
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def stays_on_host(endpoint: str) -> bool:
    """Whether what is sent to or bound at an endpoint cannot be reached from another host."""
    host = tcp_host(endpoint)
    return endpoint.startswith(LOCAL_SCHEMES) or (host is not None and is_loopback(host))


def resolve(host: str) -> str:
    """The IPv4 address of a host name; an address stays. Raises `ConfigError` for a name that nobody knows."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"There is no IPv4 address for {host!r}: {error}.") from error


async def resolve_soon(host: str, seconds: float, on_wait: Callable[[str], None]) -> str:
    """`resolve`, but a name may take `seconds` to appear: hosts that start together are not all known at once."""
    deadline = time.monotonic() + seconds
    next_word = 0.0
    while True:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, resolve, host)
        except ConfigError as error:
            now = time.monotonic()
            if now > deadline:
                raise
            if now >= next_word:
                next_word = now + WORD_SECONDS
                on_wait(str(error))
        await asyncio.sleep(1.0)


def towards(address: str) -> str:
    """The address of this host from which it reaches another one. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ConfigError(f"There is no route to {address}: {error.strerror}.") from error
        return str(probe.getsockname()[0])
