"""What the HTTP server is told at its start, and the checks on where it may listen."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from omni_actors.errors import ConfigError

BACKLOG = 2048
MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Everything that does not come from the pipeline itself.

    Args:
        endpoint: the coordinator's client endpoint.
        api_key: what requests must bring as `Authorization: Bearer KEY`; `None` for no check.
        check_host: refuse requests whose Host header is no loopback name. Without it, a web page that resolves its own
            name to 127.0.0.1 could use a server that has no key.
        served_names: names under which the model is offered; those of the pipeline when empty.
        media_hosts: hosts from which media may be fetched over https; `.example.com` also allows its subdomains.
        body_bytes: largest request body; `bodies_bytes` bounds all bodies that are being handled at a time.
        media_parts: media of one request.
        audio_seconds, image_pixels, video_seconds, media_bytes: largest medium (pixels: width * height).
        files_bytes, file_seconds: bounds of uploaded files, all together, and their life.
        request_timeout: seconds until an answer must be complete.
        read_timeout: seconds for a request's body to arrive.
        write_timeout: seconds that a client may leave a piece of its answer unread.
    """

    endpoint: str
    api_key: str | None = None
    check_host: bool = True
    served_names: tuple[str, ...] = ()
    media_hosts: tuple[str, ...] = ()
    body_bytes: int = 64 * MIB
    bodies_bytes: int = 512 * MIB
    media_parts: int = 16
    media_bytes: int = 32 * MIB
    audio_seconds: float = 300.0
    image_pixels: int = 4096 * 4096
    video_seconds: float = 60.0
    files_bytes: int = 256 * MIB
    file_seconds: float = 3600.0
    request_timeout: float = 600.0
    read_timeout: float = 60.0
    write_timeout: float = 60.0


def parse_address(text: str, option: str = "--http") -> tuple[str, int]:
    """`HOST:PORT`, `[IPV6]:PORT` or `PORT` (on 127.0.0.1). Raises `ConfigError`."""
    host, separator, port = text.rpartition(":")
    if not separator:
        host = "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {text!r} is not of the form HOST:PORT.", hint="For instance 127.0.0.1:8000.")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def url(listener: socket.socket) -> str:
    """The address of a listening socket as people type it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
