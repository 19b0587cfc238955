"""ZMTP 3.1 by hand (ZeroMQ RFC 37), for peers that libzmq would never be."""

from __future__ import annotations

import socket
import struct

GREETING_BYTES = 64


def greeting(mechanism: bytes = b"NULL", as_server: bool = False) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def entry(name: bytes, value: bytes) -> bytes:
    """One property of a handshake."""
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def command(body: bytes) -> bytes:
    return b"\x04" + bytes([len(body)]) + body if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body)) + body


def frame(body: bytes, more: bool = False) -> bytes:
    return (
        bytes([more, len(body)]) + body if len(body) < 256 else bytes([more | 2]) + struct.pack(">Q", len(body)) + body
    )


def connect(endpoint: str) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=12)


def dealer(endpoint: str, identity: bytes = b"stranger") -> socket.socket:
    """A connection after its handshake without keys."""
    made = connect(endpoint)
    made.sendall(greeting())
    made.sendall(command(b"\x05READY" + entry(b"Socket-Type", b"DEALER") + entry(b"Identity", identity)))
    received = b""
    while len(received) < GREETING_BYTES + 2 or len(received) < GREETING_BYTES + 2 + received[GREETING_BYTES + 1]:
        received += made.recv(1)
    return made


def closed(made: socket.socket) -> bool:
    """Whether the other side ends the connection, within its timeout; what it sends is discarded."""
    try:
        while made.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
