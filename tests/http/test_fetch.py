"""Media by URL: allowed hosts only, and no way for server-side request forgery."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from omni_actors.http_server.app import create_app
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.media import Fetcher, is_public
from omni_actors.http_server.settings import ServerSettings
from tests.support.servers import HttpPipeline, picture, serving

HOSTS = ("media.example.com", ".cdn.example.com")


NOT_PUBLIC = """
    127.0.0.1 10.0.0.1 172.16.3.4 192.168.0.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 198.51.100.7
    240.0.0.1 ::1 :: fe80::1 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1::
    ::127.0.0.1 ::ffff:0:127.0.0.1 64:ff9b:1::7f00:1 fec0::1 5f00::1 4000::1 fe80::1%eth0
"""


def test_public_addresses_are_told_from_all_others() -> None:
    assert not [address for address in NOT_PUBLIC.split() if is_public(address)]
    assert all(map(is_public, ("93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))


REFUSED = (
    *("http://media.example.com/a.png", "ftp://media.example.com/a.png", "file:///etc/passwd"),
    *("gopher://media.example.com/", "https://other.example.com/a.png", "https://example.com/"),
    *("https://media.example.com.evil.net/a.png", "https://evilcdn.example.com/a.png"),
    *("https://media.example.com@evil.net/", "https://user:pass@media.example.com/"),
    *("https://media.example.com:8443/", "https://media.example.com:0/", "https://@media.example.com/"),
    *("https://media.example.com./", "https://xn--mdia-bpa.example.com/"),
    *("https://media.example.com%2eevil.net/", "https://media%E3%80%82example.com/", "https://127.0.0.1/"),
    *("https://[::1]/", "https://2130706433/", "https://0x7f.1/", "https://localhost/"),
    *("https://169.254.169.254/latest/meta-data/", "https://media.example.com\\@evil.net/"),
    *("https://media.example.com\t.evil.net/", "https://media.example.com /", "https://mediа.example.com/"),  # Cyrillic
    *("https://[media.example.com/", "https://media.example.com:99999/", "https:///a.png"),
    *("//media.example.com/a.png", "media.example.com/a.png", ""),
)


def test_only_urls_of_named_hosts_are_allowed() -> None:
    fetcher = Fetcher(HOSTS, 1000)
    for url in REFUSED:
        with pytest.raises(HttpError) as caught:
            fetcher.check(url, "field")
        assert (caught.value.status, caught.value.param) == (400, "field"), url
    for host in ("media.example.com", "MEDIA.example.com:443", "cdn.example.com", "a.b.cdn.example.com"):
        fetcher.check(f"https://{host}/a.png?b=c", "field")
    with pytest.raises(HttpError, match="fetches no media by URL"):
        Fetcher((), 1000).check("https://media.example.com/", "field")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def media_server(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder: Path = tmp_path_factory.mktemp("certificates")
    certificate = authority.issue_cert("media.example.com")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for index, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(str(folder / "chain.pem"), append=bool(index))

    answers = {
        "redirect": RedirectResponse("http://127.0.0.1/secret"),
        "large": Response(b"x" * 200_000),
        "missing": Response(b"secret words", 404),
        "packed": Response(gzip.compress(bytes(10_000_000)), headers={"content-encoding": "gzip"}),
        "image": Response(picture(), media_type="image/png"),
    }

    async def answer(request: Request) -> Response:
        return answers[request.path_params["name"]]

    app = Starlette(routes=[Route("/{name}", answer)])
    with serving(app, ssl_certfile=str(folder / "chain.pem"), ssl_keyfile=str(folder / "key.pem")) as url:
        yield int(url.rpartition(":")[2])


Make = Callable[..., Fetcher]


@pytest.fixture
def make(authority: trustme.CA, media_server: int) -> Make:
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    def fetcher(
        *addresses: Sequence[str],
        allowed: Callable[[str], bool] = lambda address: True,
        limit: int = 100_000,
        ports: Sequence[int] = (443, media_server),
    ) -> Fetcher:
        answers = list(addresses) or [["127.0.0.1"]]

        async def resolve(host: str, port: int) -> Sequence[str]:
            return answers.pop(0) if len(answers) > 1 else answers[0]

        return Fetcher(HOSTS, limit, ports=ports, trust=trust, resolve=resolve, allowed=allowed)

    return fetcher


def get(fetcher: Fetcher, port: int, path: str, host: str = "media.example.com") -> bytes:
    return asyncio.run(fetcher.fetch(f"https://{host}:{port}/{path}", "field"))


def test_an_allowed_url_is_fetched_without_the_proxies_of_the_environment_and_stays_packed(
    make: Make, media_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert get(make(), media_server, "image") == picture()
    assert len(get(make(), media_server, "packed")) < 100_000


def test_what_cannot_be_fetched_is_refused_without_the_words_of_the_host(make: Make, media_server: int) -> None:
    for path, host, status, said in (
        ("redirect", "media", 400, "Redirects are not followed"),
        ("large", "media", 413, "exceeds 100000 bytes"),
        ("missing", "media", 400, "answered 404"),
        ("image", "cdn", 400, "could not be fetched"),  # it has the certificate of another host
    ):
        with pytest.raises(HttpError, match=said) as caught:
            get(make(), media_server, path, host=f"{host}.example.com")
        assert caught.value.status == status
        assert "secret" not in caught.value.message
    private = (["127.0.0.1"], ["10.1.2.3"], ["93.184.216.34", "127.0.0.1"], ["::ffff:127.0.0.1"], [])
    for addresses in private:
        with pytest.raises(HttpError, match="not allowed"):
            get(make(addresses, allowed=is_public), media_server, "image")


NO_HTTP = {
    "too short": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nshort!",
    "a large head": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000,
    "only continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "nothing": b"",
    "junk": b"\0" * 100_000,
}


@pytest.mark.parametrize("answer", NO_HTTP.values(), ids=NO_HTTP)
async def test_answers_that_are_no_http_are_errors(authority: trustme.CA, make: Make, answer: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("media.example.com").configure_cert(context)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(HttpError, match="could not be fetched"):
            await make(limit=10**6, ports=(port,)).fetch(f"https://media.example.com:{port}/", "field")


def test_what_was_fetched_counts_towards_the_bytes_of_all_requests(
    echo: HttpPipeline, make: Make, media_server: int
) -> None:
    """Else a body of a kilobyte could make the server hold half a gigabyte."""
    part = {"type": "image_url", "image_url": {"url": f"https://media.example.com:{media_server}/large"}}
    body = {"model": "echo", "messages": [{"role": "user", "content": [part] * 3}]}
    settings = ServerSettings(endpoint=echo.endpoint, body_bytes=100_000, bodies_bytes=300_000)
    with serving(create_app(settings, fetcher=make(limit=250_000))) as url:
        for _ in range(2):  # what the first one held was given back
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"


def test_a_name_that_resolves_differently_the_second_time_gains_nothing(make: Make, media_server: int) -> None:
    """The address that was checked is the one that is connected to."""
    seen: list[str] = []

    def allowed(address: str) -> bool:
        seen.append(address)
        return address == "127.0.0.1"

    assert get(make(["127.0.0.1"], ["127.0.0.2"], allowed=allowed), media_server, "image") == picture()
    assert seen == ["127.0.0.1"]


def test_a_request_with_a_url(echo: HttpPipeline, make: Make, media_server: int) -> None:
    def body(url: str) -> dict:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
        return {"model": "echo", "messages": [{"role": "user", "content": parts}]}

    app = create_app(ServerSettings(endpoint=echo.endpoint), fetcher=make())
    with serving(app) as url:
        good = httpx.post(f"{url}/v1/chat/completions", json=body(f"https://media.example.com:{media_server}/image"))
        assert good.status_code == 200
        bad = httpx.post(f"{url}/v1/chat/completions", json=body("http://169.254.169.254/latest/meta-data/"))
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "messages[0].content[0].image_url.url"
