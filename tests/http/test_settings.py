"""Limits, TLS and CORS as flags and in the YAML, and what a checkpoint says of itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from omni_actors.config import HttpConfig
from omni_actors.errors import ConfigError
from omni_actors.http_server.app import create_app, introduction
from omni_actors.http_server.settings import (
    HttpServerSpec,
    ServerSettings,
    add_flags,
    given_flags,
    http_config,
    server_settings,
    tls_context,
)
from tests.support.builders import chain, load
from tests.support.certificates import write_certificates
from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, free_port, serving
from tests.support.waiting import PATIENCE, until

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
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


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, chain.pem and key.pem for localhost, and the key of another certificate."""
    folder = tmp_path_factory.mktemp("pem")
    authority = write_certificates(folder)
    authority.issue_cert("localhost").private_key_pem.write_to_path(folder / "other.pem")
    key = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    (folder / "locked.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    return folder


def test_a_server_for_a_running_pipeline_speaks_https(echo: HttpPipeline, pem: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "omni_actors.http_server", "--endpoint", echo.endpoint]
    command += ["--http", f"127.0.0.1:{port}", "--http-certificate", str(pem / "chain.pem")]
    command += ["--http-key", str(pem / "key.pem"), "--served-name", "sea"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
    try:
        url = f"https://localhost:{port}"
        trusting = ssl.create_default_context(cafile=str(pem / "ca.pem"))
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


@pytest.mark.parametrize(
    ("certificate", "key", "word"),
    [
        (None, "key.pem", "go together"),
        ("chain.pem", "other.pem", "cannot be used"),
        ("chain.pem", "locked.pem", "the key has a password"),
    ],
)
def test_certificates_that_cannot_be_used(pem: Path, certificate: str | None, key: str | None, word: str) -> None:
    given = {name: str(pem / file) for name, file in (("certificate", certificate), ("key", key)) if file is not None}
    with pytest.raises(ConfigError, match=word):
        tls_context(HttpConfig(**given))


def test_a_checkpoint_says_what_it_is_or_the_page_does(tmp_path: Path) -> None:
    assert introduction(str(tmp_path)) == {}
    assert introduction("Qwen/Qwen2.5-Omni-7B") == {}
    toy = introduction(str(REPOSITORY / "examples" / "speaker"))
    assert "toy" in toy["about"]
    assert len(toy["examples"]) == 6
    (broken := tmp_path / "broken").mkdir()
    (broken / "page.json").write_text(json.dumps(["no object"]))
    assert introduction(str(broken)) == {}
