"""Addresses of this host and of others, as TCP endpoints need them: numeric IPv4."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from omni_actors.errors import ConfigError

WORD_SECONDS = 5.0


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


def is_tcp(endpoint: str) -> bool:
    """Whether an endpoint may be reached over a link that can be cut."""
    return endpoint.startswith("tcp://")
