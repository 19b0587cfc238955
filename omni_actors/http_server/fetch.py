"""Fetch media by URL: https, allowed hosts, public addresses, no redirects, bounded in bytes and time.

The check is made on the very address that is then connected to, so a name that resolves differently the second time
gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpcore

from omni_actors.http_server.errors import bad_field, too_large
from omni_actors.http_server.shares import reserve

FETCH_SECONDS = 20.0
HTTPS_PORT = 443
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
RESOLVERS = 8  # names that are looked up at a time: a slow name server must not take the threads that decode
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class AddressRefused(Exception):
    """A host name resolves to an address that must not be reached from here."""


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, also when IPv4 is embedded in IPv6."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if embedded is not None:
            return is_public(str(embedded))
        if parsed in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed not in GLOBAL_UNICAST:  # `is_global` is also true of site-local and unassigned addresses
            return False
    return parsed.is_global and not parsed.is_multicast


_resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolver")


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host name."""
    found = await asyncio.get_running_loop().run_in_executor(
        _resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(entry[4][0]) for entry in found]


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects only to addresses that pass `allowed`."""

    def __init__(self, resolve: Resolve, allowed: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._allowed = allowed
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the address that was checked, so that no second look-up can give another.

        Raises:
            AddressRefused: one of the host's addresses is not allowed.
            httpcore.ConnectError: the name does not resolve.
        """
        try:
            addresses = await self._resolve(host, port)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        # One private address among public ones is not an accident: refuse the name altogether.
        if not addresses or not all(self._allowed(address) for address in addresses):
            raise AddressRefused(host)
        return await self._backend.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Raise `AddressRefused`: no URL may reach a local socket."""
        raise AddressRefused(path)

    async def sleep(self, seconds: float) -> None:
        """Wait between attempts, in seconds."""
        await self._backend.sleep(seconds)


class Fetcher:
    """Fetches media for requests.

    Args:
        hosts: allowed hosts in lower case; `.example.com` allows the subdomains of example.com too.
        limit: maximum size in bytes.
        ports: allowed ports.
        trust, resolve, allowed: certificates, name resolution and address check. Tests replace them.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        limit: int,
        *,
        ports: Sequence[int] = (HTTPS_PORT,),
        trust: ssl.SSLContext | None = None,
        resolve: Resolve = resolve,
        allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._hosts = hosts
        self._limit = limit
        self._ports = ports
        self._trust = trust or (ssl.create_default_context() if hosts else None)
        self._backend = CheckedBackend(resolve, allowed)

    def check(self, url: str, param: str) -> None:
        """Raise `HttpError` 400 unless this URL may be fetched."""
        if not self._hosts:
            message = "This server fetches no media by URL: send a data: URI, or have its operator set --media-host."
            raise bad_field(param, message, "url_not_allowed")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), HTTPS_PORT if parts.port is None else parts.port
        except ValueError:
            raise bad_field(param, "This is not a valid URL.", "invalid_url") from None
        if parts.scheme != "https":
            raise bad_field(param, "Media are fetched over https only.", "url_not_allowed")
        if parts.username is not None or parts.password is not None or port not in self._ports:
            raise bad_field(param, "The URL must have no credentials and no unusual port.", "url_not_allowed")
        if not url.isascii() or any(character.isspace() or character == "\\" for character in url):
            message = "This is not a valid URL: escape spaces, backslashes and non-ASCII characters."
            raise bad_field(param, message, "invalid_url")
        if not any(host == name.removeprefix(".") or (name[0] == "." and host.endswith(name)) for name in self._hosts):
            message = f"Media may not be fetched from {host!r}: its operator can allow that with --media-host."
            raise bad_field(param, message, "url_not_allowed")

    async def fetch(self, url: str, param: str) -> bytes:
        """Fetch `url`. What it holds counts towards the bytes of the request that this task handles.

        Raises:
            HttpError: 400 for any failure, with a message that reveals nothing about the network; 413 or 503 for size.
        """
        self.check(url, param)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._get(url, param)
        except AddressRefused:
            message = "This host resolves to an address that is not allowed."
            raise bad_field(param, message, "url_not_allowed") from None
        except (TimeoutError, OSError, httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
            raise bad_field(param, "The URL could not be fetched.", "media_not_fetched") from None

    async def _get(self, url: str, param: str) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async with (
            httpcore.AsyncConnectionPool(ssl_context=self._trust, network_backend=self._backend) as pool,
            pool.stream("GET", url, headers={"Host": urlsplit(url).netloc, "User-Agent": "omni_actors"}) as response,
        ):
            if response.status != 200:
                detail = "Redirects are not followed." if 300 <= response.status < 400 else ""
                message = f"The URL's host answered {response.status}. {detail}".strip()
                raise bad_field(param, message, "media_not_fetched")
            async for piece in response.aiter_stream():
                size += len(piece)
                if size > self._limit:
                    raise too_large(f"The file at this URL exceeds {self._limit} bytes.", param)
                reserve(len(piece))
                pieces.append(piece)
        return b"".join(pieces)
