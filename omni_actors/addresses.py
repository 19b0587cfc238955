"""Endpoints and hosts: what they look like, and who reaches them."""

from __future__ import annotations

import ipaddress

TCP, LOCAL_SCHEMES = "tcp://", ("ipc://", "inproc://")


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


def tcp_host(endpoint: str) -> str | None:
    """The host of `tcp://HOST:PORT` without brackets; `None` for what has not this form."""
    host, separator, port = endpoint.removeprefix(TCP).rpartition(":")
    number = port.isascii() and port.isdigit() and int(port) <= 65535
    if not endpoint.startswith(TCP) or not separator or not host or not number or "/" in host:
        return None
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def stays_on_host(endpoint: str) -> bool:
    """Whether what is sent to or bound at an endpoint cannot be reached from another host."""
    host = tcp_host(endpoint)
    return endpoint.startswith(LOCAL_SCHEMES) or (host is not None and is_loopback(host))
