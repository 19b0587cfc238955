"""TLS: handshakes are bounded in time and number, and nothing of what follows is lost, on both event loops; HTTPS."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from omni_actors.config import HttpConfig
from omni_actors.errors import ConfigError
from omni_actors.http_server.app import create_app
from omni_actors.http_server.connections import bounded_protocol
from omni_actors.http_server.settings import ServerSettings, tls_context
from tests.support.nightly import nightly
from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, free_port, serving
from tests.support.waiting import PATIENCE, until
from tests.support.zmtp import closed

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
REQUEST = b"GET /app.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
Address = tuple[str, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ca.pem, and chain.pem, key.pem and locked.pem for localhost, and the key of another certificate."""
    made: Path = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(made / "ca.pem")
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(made / "key.pem")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(made / "chain.pem", append=True)
    authority.issue_cert("localhost").private_key_pem.write_to_path(made / "other.pem")
    key = serialization.load_pem_private_key((made / "key.pem").read_bytes(), None)
    locked = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (made / "locked.pem").write_bytes(key.private_bytes(*locked, serialization.BestAvailableEncryption(b"x")))
    return made


@pytest.fixture
def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "ca.pem"))


@pytest.fixture(params=[nightly("asyncio"), "uvloop"])
def serve(request: pytest.FixtureRequest, folder: Path) -> Callable[..., contextlib.AbstractContextManager[Address]]:
    @contextlib.contextmanager
    def one(connections: int = 64, **limits: object) -> Iterator[Address]:
        files = {"certificate": str(folder / "chain.pem"), "key": str(folder / "key.pem")}
        settings = ServerSettings(endpoint="ipc:///nowhere", **files, **limits)
        with serving(create_app(settings), http=bounded_protocol(settings, connections), loop=request.param) as url:
            host, port = url.removeprefix("http://").split(":")
            yield host, int(port)

    return one


Serve = Callable[..., contextlib.AbstractContextManager[Address]]


class Client:
    """TLS over a socket whose writes the test makes."""

    def __init__(self, address: Address, trust: ssl.SSLContext) -> None:
        self.socket = socket.create_connection(address, timeout=20)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = trust.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    def hello(self) -> bytes:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self._outgoing.read()

    def request_with_the_end_of_the_handshake(self, request: bytes) -> None:
        self.socket.sendall(self.hello())
        while True:
            piece = self.socket.recv(65536)
            assert piece, "the server hung up"
            self._incoming.write(piece)
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                break
        self.tls.write(request)
        self.socket.sendall(self._outgoing.read())

    def answer(self) -> bytes:
        received = b""
        while piece := self.socket.recv(65536):
            self._incoming.write(piece)
            with contextlib.suppress(ssl.SSLWantReadError):
                while data := self.tls.read(65536):
                    received += data
                break  # the server has said that this was all
        return received


def test_a_handshake_that_does_not_end_is_given_up(serve: Serve, trust: ssl.SSLContext) -> None:
    with serve(head_timeout=0.3) as address:
        silent, half, whole = (Client(address, trust) for _ in range(3))
        half.socket.sendall(half.hello()[:100])
        whole.socket.sendall(whole.hello())  # and then does not finish it
        for client in (silent, half, whole):
            assert closed(client.socket)
            client.socket.close()


def test_half_handshakes_make_room_for_clients(serve: Serve, trust: ssl.SSLContext) -> None:
    with serve(connections=4, head_timeout=60.0) as address:
        strangers = [Client(address, trust) for _ in range(12)]
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.socket.sendall(stranger.hello()[:100])
        answer = httpx.get(f"https://{address[0]}:{address[1]}/app.js", verify=trust)
        assert answer.status_code == 200
        for stranger in strangers[:9]:
            assert closed(stranger.socket)
        for stranger in strangers:
            stranger.socket.close()


def test_what_comes_with_the_end_of_the_handshake_is_answered(serve: Serve, trust: ssl.SSLContext) -> None:
    with serve() as address:
        for _ in range(10):
            client = Client(address, trust)
            client.request_with_the_end_of_the_handshake(REQUEST)
            assert client.answer().startswith(b"HTTP/1.1 200 OK")
            client.socket.close()


def test_bodies_and_limits_are_those_of_every_connection(serve: Serve, trust: ssl.SSLContext) -> None:
    with (
        serve(head_bytes=8192) as (host, port),
        httpx.Client(verify=trust, base_url=f"https://{host}:{port}") as client,
    ):
        for size in (1, 3_000_000):
            answer = client.post("/v1/files", files={"file": bytes(size)})
            assert answer.status_code == 200
            assert answer.json()["bytes"] == size
        assert client.get("/", headers={"x": "y" * 9000}).status_code == 431


def test_what_is_not_tls_ends_the_connection(serve: Serve, trust: ssl.SSLContext) -> None:
    with serve() as address:
        for sent in (REQUEST, b"\x16\x03\x01\xff\xff" + bytes(70_000), bytes(100)):
            client = Client(address, trust)
            with contextlib.suppress(ConnectionError):
                client.socket.sendall(sent)
            assert closed(client.socket)
            client.socket.close()


def test_a_server_for_a_running_pipeline_speaks_https(echo: HttpPipeline, folder: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "omni_actors.http_server", "--endpoint", echo.endpoint]
    command += ["--http", f"127.0.0.1:{port}", "--http-certificate", str(folder / "chain.pem")]
    command += ["--http-key", str(folder / "key.pem"), "--served-name", "sea"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        url = f"https://localhost:{port}"
        trusting = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        with httpx.Client(verify=trusting, timeout=60) as client:

            def response() -> httpx.Response | None:
                with contextlib.suppress(httpx.ConnectError):
                    return client.get(f"{url}/health")
                return None

            assert until(response, 20, "the server").status_code == 200
            assert [model["id"] for model in client.get(f"{url}/v1/models").json()["data"]] == ["sea", "pirate"]
            assert client.post(f"{url}/v1/chat/completions", json=HELLO).status_code == 404
            answer = client.post(f"{url}/v1/chat/completions", json={**HELLO, "model": "sea"})
            assert answer.json()["choices"][0]["message"]["content"] == "hi"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{port}/health", timeout=5)
        log = (tmp_path / "log").read_text()
        assert f"listening on https://127.0.0.1:{port}" in log
        assert "hi" not in map(str.strip, log.split()), "user content in the log"
        process.terminate()
        assert process.wait(10 * PATIENCE) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_certificates_that_cannot_be_used(folder: Path) -> None:
    chain, other, locked = (str(folder / name) for name in ("chain.pem", "other.pem", "locked.pem"))
    for given, words in (
        ({"key": other}, "go together"),
        ({"certificate": chain, "key": other}, "cannot be used"),
        ({"certificate": chain, "key": locked}, "the key has a password"),
    ):
        with pytest.raises(ConfigError, match=words):
            tls_context(HttpConfig(**given))
