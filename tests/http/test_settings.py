"""Limits and CORS as flags and in the YAML, and what a checkpoint says of itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

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
)
from tests.support.builders import chain, load
from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, serving

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


def test_a_checkpoint_says_what_it_is_or_the_page_does(tmp_path: Path) -> None:
    assert introduction(str(tmp_path)) == {}
    assert introduction("Qwen/Qwen2.5-Omni-7B") == {}
    toy = introduction(str(REPOSITORY / "examples" / "speaker"))
    assert "toy" in toy["about"]
    assert len(toy["examples"]) == 6
    (broken := tmp_path / "broken").mkdir()
    (broken / "page.json").write_text(json.dumps(["no object"]))
    assert introduction(str(broken)) == {}
