"""Who may use the server and each of its routes, how its process starts and ends, and its settings."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from starlette.routing import Route

from omni_actors.client import OmniClient
from omni_actors.config import HttpConfig
from omni_actors.errors import ConfigError
from omni_actors.http_server.app import create_app, create_routes, introduction
from omni_actors.http_server.settings import (
    HttpServerSpec,
    ServerSettings,
    add_flags,
    check_exposure,
    given_flags,
    http_config,
    parse_address,
    server_settings,
)
from omni_actors.sharing import Budget
from tests.support.builders import chain, load
from tests.support.http_servers import http_server
from tests.support.paths import REPOSITORY
from tests.support.servers import ECHO, HttpPipeline, free_port, serving, sound
from tests.support.waiting import PATIENCE, until

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


PAGE_FILES = re.compile(r"/(vendor/)?\w+\.(js|css)")
KEY = {"authorization": "Bearer sesame"}
LOOPBACK = {"host": "localhost"}
OF_ANOTHER = {"host": "pipeline.example"}
ROUTES = sorted(
    (method, re.sub(r"{\w+(:path)?}", "x", route.path))
    for route in create_routes(ServerSettings(endpoint="ipc:///nowhere"), Budget(0)).routes
    if isinstance(route, Route)
    for method in route.methods or ()
)
assert len(ROUTES) > 30


@pytest.fixture(scope="module")
def servers(echo_pipeline: HttpPipeline) -> Iterator[dict[str, str]]:
    """As they are started: with a key (on any address), without one (on loopback), and with --http-insecure."""
    endpoint = echo_pipeline.endpoint
    with (
        serving(create_app(ServerSettings(endpoint=endpoint, api_key="sesame", check_host=False))) as keyed,
        serving(create_app(ServerSettings(endpoint=endpoint))) as loopback,
        serving(create_app(ServerSettings(endpoint=endpoint, check_host=False))) as insecure,
    ):
        yield {"keyed": keyed, "loopback": loopback, "insecure": insecure}


@pytest.fixture(scope="module")
def clients(servers: dict[str, str]) -> Iterator[dict[str, httpx.Client]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(httpx.Client(base_url=url, timeout=60)) for name, url in servers.items()}


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic c8OpczpzZXNhbWU=", "s\xe9same"])
def test_wrong_keys_are_refused(servers: dict[str, str], header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = httpx.post(f"{servers['keyed']}{CHAT}", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


FOREIGN = ("evil.example", "127.0.0.1.evil.example", "evil.example:8000", "[", "")


@pytest.mark.parametrize("host", [*FOREIGN, "localhost", "127.0.0.1:1", "[::1]:8000"])
def test_foreign_host_names_are_refused(servers: dict[str, str], host: str) -> None:
    """A page of evil.example whose name resolves to 127.0.0.1 reaches the port, but sends its own name."""
    status = httpx.get(f"{servers['loopback']}/v1/models", headers={"host": host}).status_code
    assert status in ((400, 403) if host in FOREIGN else (200,))


def test_other_addresses_than_loopback_need_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(host, None, False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com"):
        with pytest.raises(ConfigError, match="OMNI_ACTORS_API_KEY"):
            check_exposure(host, None, False)
        check_exposure(host, "key", False)
        check_exposure(host, None, True)


def test_addresses_are_parsed_or_refused() -> None:
    addresses = {"127.0.0.1:80": ("127.0.0.1", 80), "8000": ("127.0.0.1", 8000), "[::1]:9": ("::1", 9), "h:0": ("h", 0)}
    assert {text: parse_address(text) for text in addresses} == addresses
    for text in ("", "a:b", "127.0.0.1:", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:١"):
        with pytest.raises(ConfigError):
            parse_address(text)


def test_health_names_a_dead_stage() -> None:
    # The server keeps a description for 0.2 s, so a talker that came back sooner would never be seen to be away.
    with HttpPipeline(overrides={"stages.talker.engine.start_seconds": 2}) as pipeline:
        with OmniClient(pipeline.endpoint) as client:
            (talker,) = [status.pid for status in client.describe().stages if status.stage == "talker"]
        psutil.Process(talker).kill()
        response = until(lambda: not_well(pipeline.url), 5, "another status than 200")
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["missing"][0].startswith("talker/0")
        until(lambda: not not_well(pipeline.url), 10, "the talker's return")


def test_killing_the_http_server_loses_its_streams_and_nothing_else(slow: HttpPipeline) -> None:
    def stream(begun: threading.Event) -> int:
        body = {**HELLO, "messages": [{"role": "user", "content": "word " * 400}], "stream": True}
        with httpx.stream("POST", f"{slow.url}{CHAT}", json=body, timeout=60) as answer:
            seen = 0
            with contextlib.suppress(httpx.TransportError):
                for _ in answer.iter_lines():
                    seen += 1
                    begun.set()
                raise AssertionError("the stream ended as if it were complete")
            return seen

    file = httpx.post(f"{slow.url}/v1/files", files={"file": sound()}).json()["id"]
    started = [threading.Event() for _ in range(2)]
    with ThreadPoolExecutor() as pool, OmniClient(slow.endpoint) as client:
        streams = [pool.submit(stream, begun) for begun in started]
        assert all(begun.wait(10 * PATIENCE) for begun in started)
        assert client.describe().in_flight == 2
        http_server(slow).kill()
        assert all(future.result(10 * PATIENCE) for future in streams)
        until(lambda: not client.describe().in_flight, 15, "the requests of the dead server to end")
        assert slow.openai(max_retries=3, timeout=30).chat.completions.create(**HELLO).choices
        assert httpx.get(f"{slow.url}/v1/files/{file}").status_code == 200, "its files are still there"


def not_well(url: str) -> httpx.Response | None:
    response = httpx.get(f"{url}/health")
    return None if response.status_code == 200 else response


def test_health_while_the_stages_load() -> None:
    port = free_port()
    command = [sys.executable, "-m", "omni_actors.launch", ECHO, "--http", f"127.0.0.1:{port}"]
    command += ["--set", "stages.talker.engine.start_seconds=600"]  # longer than the test
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        seen: set[tuple[int, str]] = set()

        def is_loading() -> bool:
            with contextlib.suppress(httpx.TransportError):
                response = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5 * PATIENCE)
                seen.add((response.status_code, ",".join(response.json().get("missing", []))))
            return (503, "talker/0 (loading)") in seen

        until(is_loading, 30, lambda: f"the talker's loading alone; seen so far: {seen}")
        assert 200 not in {status for status, _ in seen}
    finally:
        process.kill()
        process.communicate()

    # The server dies with its launcher, however that ended.
    def is_gone() -> bool:
        try:
            httpx.get(f"http://127.0.0.1:{port}/", timeout=1)
        except httpx.ConnectError:
            return True
        return False

    until(is_gone, 5, "the HTTP server to end with its launcher")


def test_a_url_cannot_forge_a_line_of_the_log(servers: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omni_actors")
    assert httpx.get(f"{servers['keyed']}/a%0A2026-11-22%20ERROR%20forged%1b%5b2J").status_code == 401
    (line,) = until(lambda: [text for text in caplog.messages if "forged" in text], 5, "the line")
    assert line.isprintable()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_key_or_a_loopback_name(clients: dict[str, httpx.Client], method: str, path: str) -> None:
    """Metrics, timelines and the schema, too. `None` stands for an answer of the route itself."""
    is_open = path in ("/", "/health") or PAGE_FILES.fullmatch(path)
    needs_key = None if is_open else 401
    wrong = {"authorization": "Bearer sesam"}
    for server, headers, wanted in (
        ("keyed", LOOPBACK, needs_key),
        ("keyed", OF_ANOTHER, needs_key),
        ("keyed", {**LOOPBACK, **wrong}, needs_key),
        ("keyed", {**OF_ANOTHER, **KEY}, None),
        ("loopback", LOOPBACK, None),
        ("loopback", OF_ANOTHER, 403),
        ("loopback", {**OF_ANOTHER, **KEY}, 403),
        ("insecure", OF_ANOTHER, None),
    ):
        status = clients[server].request(method, path, headers=headers).status_code
        assert (status if status in (401, 403) else None) == wanted, (server, headers)


GIVEN: dict[str, Any] = {
    "names": "openai",
    "served_names": ["tts-1", "gpt-4o-audio-preview"],
    "voice_aliases": {"alloy": "Chelsie", "ash": "Ethan"},
    "cors_origins": ["https://a.example", "https://b.example:8443"],
}


# Each key has another value than by default.
CHANGED = HttpConfig(
    **{
        name: GIVEN[name] if name in GIVEN else "a text" if default is None else default + 1
        for name, default in msgspec.structs.asdict(HttpConfig()).items()
    }
)
FLAGS = {"cors_origins": "--http-cors-origin", "served_names": "--served-name", "voice_aliases": "--voice-alias"}


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(arguments)


def test_every_key_is_a_flag() -> None:
    given = []
    for name in HttpConfig.__struct_fields__:
        value = getattr(CHANGED, name)
        flag = FLAGS.get(name, f"--http-{name.replace('_', '-')}")
        items = [f"{key}={voice}" for key, voice in value.items()] if isinstance(value, dict) else value
        given += [f"{flag}={item}" for item in (items if isinstance(items, list) else [items])]
    assert http_config(parse(*given)) == CHANGED
    assert given_flags(parse()) == {}
    assert given_flags(parse("--openai-names")) == {"names": "openai"}
    with pytest.raises(ConfigError, match=r"media_parts"):
        http_config(parse("--http-media-parts=-1"))


def test_settings_survive_the_way_to_the_servers_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ACTORS_API_KEY", "sesame")
    options = parse("--media-host=Example.com")
    settings = server_settings(CHANGED, "ipc:///tmp/client", "/keys", options)
    assert {name: getattr(settings, name) for name in HttpConfig.__struct_fields__} == msgspec.structs.asdict(CHANGED)
    assert settings.endpoint == "ipc:///tmp/client"
    assert settings.keys == "/keys"
    assert settings.api_key == "sesame"
    assert not settings.check_host, "the key keeps strangers out"
    assert settings.media_hosts == ("example.com",)
    spec = HttpServerSpec(settings, listener=7, launcher_pid=8, log_file="/x")
    assert msgspec.json.decode(msgspec.json.encode(spec), type=HttpServerSpec) == spec


@pytest.mark.parametrize("wrong", ["alloy", "=Chelsie", "alloy=", "a\nb=Chelsie"])
def test_an_alias_without_a_voice_or_a_name_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--voice-alias={wrong}")
    assert "--voice-alias" in capsys.readouterr().err


def test_a_server_without_a_key_checks_the_host_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_ACTORS_API_KEY", raising=False)
    assert server_settings(HttpConfig(), "ipc:///tmp/client", None, parse()).check_host
    assert not server_settings(HttpConfig(), "ipc:///tmp/client", None, parse("--http-insecure")).check_host


def test_origins_that_are_none(tmp_path: Path) -> None:
    for origin in ("example.com", "https://a.example/path", "javascript:alert(1)", ""):
        with pytest.raises(ConfigError, match=r"cors_origins"):
            load(tmp_path, {**chain(), "http": {"cors_origins": [origin]}})


OURS, THEIRS = "https://a.example", "https://evil.example"


def test_pages_of_allowed_origins_may_read_answers_and_refusals(echo: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=echo.endpoint, api_key="sesame", check_host=False, cors_origins=[OURS])
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serving(create_app(settings)) as url:
        for origin, allowed in ((OURS, OURS), (THEIRS, None)):
            before = httpx.options(f"{url}/v1/chat/completions", headers={"origin": origin, **ask})
            assert before.headers.get("access-control-allow-origin") == allowed
            assert (before.status_code == 200) == (allowed is not None)
            for key, status in (("sesame", 200), ("wrong", 401)):
                headers = {"origin": origin, "authorization": f"Bearer {key}"}
                answer = httpx.post(f"{url}/v1/chat/completions", json=HELLO, headers=headers)
                assert answer.status_code == status
                assert answer.headers.get("access-control-allow-origin") == allowed
        assert "x-request-id" in answer.headers
    answer = httpx.get(f"{echo.url}/v1/models", headers={"origin": OURS})
    assert not [name for name in answer.headers if name.startswith("access-control")], "by default none is allowed"


def test_a_checkpoint_says_what_it_is_or_the_page_does(tmp_path: Path) -> None:
    assert introduction(str(tmp_path)) == {}
    assert introduction("Qwen/Qwen2.5-Omni-7B") == {}
    toy = introduction(str(REPOSITORY / "examples" / "speaker"))
    assert "toy" in toy["about"]
    assert len(toy["examples"]) == 6
    (broken := tmp_path / "broken").mkdir()
    (broken / "page.json").write_text(json.dumps(["no object"]))
    assert introduction(str(broken)) == {}
