"""Addresses of this host and of others, as TCP endpoints need them: numeric IPv4."""

from __future__ import annotations

import socket

from omni_actors.errors import ConfigError


def resolve(host: str) -> str:
    """The IPv4 address of a host name; an address stays. Raises `ConfigError` for a name that nobody knows."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"There is no IPv4 address for {host!r}: {error}.") from error


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
