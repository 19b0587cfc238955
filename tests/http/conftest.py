"""Pipelines with an HTTP server, shared by the tests of this folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import chromium, watched_page
from tests.support.http_servers import http_servers
from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.scripted import scripted_pipeline
from tests.support.servers import ECHO, HttpPipeline, close_clients
from tests.support.waiting import until

ONE_SAMPLE = {"stages.code2wav.engine.samples_per_token": 1}
SPEECH, IMAGE, VIDEO = (f"stage_configs/echo_{name}.yaml" for name in ("speech", "image", "video"))
Make = Callable[[pytest.FixtureRequest], HttpPipeline]


@pytest.fixture(autouse=True, scope="session")
def requests_are_patient() -> Iterator[None]:
    """httpx gives up after 5 s, which an answer may take on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "post", "put", "delete", "options", "request", "stream"):
            patch.setattr(httpx, name, functools.partial(getattr(httpx, name), timeout=240))
        yield


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    close_clients()


def shared(pipeline: str, each: str, make: Make) -> tuple[Any, Any]:
    """Two fixtures: a pipeline that all tests share, and the same one, idle again after each test."""

    @pytest.fixture(scope="session", name=pipeline)
    def started(request: pytest.FixtureRequest) -> Iterator[HttpPipeline]:
        with make(request) as running:
            yield running

    @pytest.fixture(name=each)
    def idle(request: pytest.FixtureRequest) -> Iterator[HttpPipeline]:
        running = request.getfixturevalue(pipeline)
        yield running
        running.assert_idle()

    return started, idle


def configured(overrides: Mapping[str, object], config: str = ECHO) -> Make:
    return lambda _: HttpPipeline(config, overrides)


def steps(seconds: float, *stages: str) -> dict[str, float]:
    return {f"stages.{stage}.engine.step_seconds": seconds for stage in stages}


def speaking(ability: dict[str, Any], *voices: str, **overrides: object) -> Make:
    own = {"stages.talker.engine.speech": json.dumps(ability), "stages.talker.engine.voices": json.dumps(voices)}
    return configured({**ONE_SAMPLE, **own, **overrides}, SPEECH)


def echo_with_adapter(request: pytest.FixtureRequest) -> HttpPipeline:
    folder = request.getfixturevalue("tmp_path_factory").mktemp("adapter")
    return HttpPipeline(overrides={"adapters.pirate": folder})


def one_stage(request: pytest.FixtureRequest) -> HttpPipeline:
    """A single stage, whose sound begins with the first words; echo stages after others wait for all of a sentence."""
    engine = {"samples_per_token": 1, "voices": [], "speech": {"text_in_parts": True}}
    stage = {"name": "talker", "kind": "echo", "outputs": ["audio"], "engine": engine}
    config = request.getfixturevalue("tmp_path_factory").mktemp("writing") / "one_stage.yaml"
    config.write_text(json.dumps({"name": "echo-speech", "model": "echo", "stages": [stage]}))
    return HttpPipeline(config)


def tool_calling(request: pytest.FixtureRequest) -> HttpPipeline:
    checkpoint: Path = request.getfixturevalue("tiny_checkpoint")
    config = request.getfixturevalue("tmp_path_factory").mktemp("scripted") / "scripted.yaml"
    config.write_bytes(msgspec.yaml.encode(scripted_pipeline(checkpoint)))
    template = REPOSITORY / "stage_configs" / "qwen2_5_omni_tools.jinja"
    environment = {"OMNI_ACTORS_ALLOW_IMPORTS": "tests.support"}
    return HttpPipeline(
        config, arguments=["--openai-names", f"--tool-chat-template={template}"], environment=environment
    )


INSTRUCTED = {"languages": ["English", "German"], "instructions": "none", "clip": "none", "text_in_parts": True}

SLOWLY = {"coordinator.max_in_flight": 2, "coordinator.max_queued": 0, **steps(0.05, "thinker", "code2wav")}
MARA = {**ONE_SAMPLE, "http.voices": 3, "http.voice_aliases.alloy": "Mara"}
DRAWLING = {"stages.code2wav.engine.samples_per_token": 4800, "http.write_timeout": 1, "http.media_parts": 2}
DRAWLING |= {"http.bodies_bytes": 1 << 20, "http.body_bytes": 1 << 20}
SEVERAL = {**steps(0.02, "thinker", "code2wav"), "http.workers": 3}

echo_pipeline, echo = shared("echo_pipeline", "echo", echo_with_adapter)
picture_pipeline, pictures = shared("picture_pipeline", "pictures", configured(steps(0.002, "dit"), IMAGE))
video_pipeline, videos = shared("video_pipeline", "videos", configured(steps(0.002, "video"), VIDEO))
# Voices of their own; the second one speaks whole texts only, up to 500 characters a second.
preset_pipeline, preset = shared("preset_pipeline", "preset", speaking(INSTRUCTED, "vivian", "ryan"))
slow_speech_pipeline, slow_speech = shared(
    "slow_speech_pipeline", "slow_speech", speaking({"languages": ["English"]}, "vivian", **steps(0.002, "talker"))
)
writing_pipeline, writing = shared("writing_pipeline", "writing", one_stage)
scripted_http, scripted = shared("scripted_http", "scripted", tool_calling)
# 20 tokens a second, two requests at a time; and 50 a second, by OpenAI's names.
slow_pipeline, slow = shared("slow_pipeline", "slow", configured(SLOWLY))
talkative_pipeline, talkative = shared(
    "talkative_pipeline", "talkative", configured({"http.names": "openai", **steps(0.02, "thinker", "code2wav")})
)
cloning_pipeline, idle_cloning = shared("cloning_pipeline", "idle_cloning", configured(MARA, SPEECH))
# Much sound, few events, and small limits of the server.
drawling_pipeline, drawling = shared("drawling_pipeline", "drawling", configured(DRAWLING))
several_pipeline, idle_several = shared("several_pipeline", "idle_several", configured(SEVERAL))


@pytest.fixture
def cloning(idle_cloning: HttpPipeline) -> Iterator[HttpPipeline]:
    """Speaks with the voice of a recording; without voices after each test."""
    yield idle_cloning
    for name in httpx.get(f"{idle_cloning.url}/v1/audio/voices").json()["voices"]:
        assert httpx.delete(f"{idle_cloning.url}/v1/audio/voices/{name}").status_code == 200


@pytest.fixture
def several(idle_several: HttpPipeline) -> HttpPipeline:
    """Three processes of the HTTP server, and 50 tokens a second."""
    until(lambda: len(http_servers(idle_several)) == SEVERAL["http.workers"], 30, "all processes")
    return idle_several


@pytest.fixture(scope="session")
def deaf_pipeline() -> Iterator[RunningPipeline]:
    """Echo stages that take no sound."""
    with RunningPipeline(ECHO, {"stages.prompt.engine.max_media": '{"audio": 0}'}) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with watched_page(browser) as page:
        yield page
