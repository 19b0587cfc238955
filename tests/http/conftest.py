"""Pipelines with an HTTP server, shared by the tests of this folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import chromium, watched_page
from tests.support.paths import REPOSITORY
from tests.support.scripted import scripted_pipeline
from tests.support.servers import HttpPipeline, close_clients

ONE_SAMPLE = {"stages.code2wav.engine.samples_per_token": 1}


@pytest.fixture(autouse=True, scope="session")
def requests_are_patient() -> Iterator[None]:
    """httpx gives up after 5 s, which an answer may take on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "post", "put", "delete", "options", "request", "stream"):
            patch.setattr(httpx, name, functools.partial(getattr(httpx, name), timeout=60))
        yield


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture(scope="session")
def echo_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpPipeline]:
    overrides = {"adapters.pirate": tmp_path_factory.mktemp("adapter")}
    with HttpPipeline(overrides=overrides) as pipeline:
        yield pipeline


@pytest.fixture
def echo(echo_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """Fast echo stages; idle again after each test."""
    yield echo_pipeline
    echo_pipeline.assert_idle()


@pytest.fixture(scope="session")
def picture_pipeline() -> Iterator[HttpPipeline]:
    overrides = {"stages.dit.engine.step_seconds": 0.002}
    with HttpPipeline(REPOSITORY / "stage_configs" / "echo_image.yaml", overrides) as pipeline:
        yield pipeline


@pytest.fixture
def pictures(picture_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """Echo stages that make pictures; idle again after each test."""
    yield picture_pipeline
    picture_pipeline.assert_idle()


@pytest.fixture(scope="session")
def video_pipeline() -> Iterator[HttpPipeline]:
    overrides = {"stages.video.engine.step_seconds": 0.002}
    with HttpPipeline(REPOSITORY / "stage_configs" / "echo_video.yaml", overrides) as pipeline:
        yield pipeline


@pytest.fixture
def videos(video_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """An echo stage that makes videos with sound; idle again after each test."""
    yield video_pipeline
    video_pipeline.assert_idle()


@pytest.fixture(scope="session")
def cloning_pipeline() -> Iterator[HttpPipeline]:
    overrides = {"stages.code2wav.engine.samples_per_token": 1, "http.voices": 3, "http.voice_aliases.alloy": "Mara"}
    with HttpPipeline(REPOSITORY / "stage_configs" / "echo_speech.yaml", overrides) as pipeline:
        yield pipeline


@pytest.fixture
def cloning(cloning_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """A pipeline that speaks with the voice of a recording; idle and without voices after each test."""
    yield cloning_pipeline
    cloning_pipeline.assert_idle()
    for name in httpx.get(f"{cloning_pipeline.url}/v1/audio/voices").json()["voices"]:
        assert httpx.delete(f"{cloning_pipeline.url}/v1/audio/voices/{name}").status_code == 200


@pytest.fixture(scope="session")
def preset_pipeline() -> Iterator[HttpPipeline]:
    speech = {"languages": ["English", "German"], "instructions": "none", "clip": "none", "text_in_parts": True}
    overrides = {
        **ONE_SAMPLE,
        "stages.talker.engine.speech": json.dumps(speech),
        "stages.talker.engine.voices": json.dumps(["vivian", "ryan"]),
    }
    with HttpPipeline(REPOSITORY / "stage_configs" / "echo_speech.yaml", overrides) as pipeline:
        yield pipeline


@pytest.fixture
def preset(preset_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """A pipeline with voices of its own, which speaks a text while it is written; idle again after each test."""
    yield preset_pipeline
    preset_pipeline.assert_idle()


@pytest.fixture(scope="session")
def slow_speech_pipeline() -> Iterator[HttpPipeline]:
    overrides = {
        **ONE_SAMPLE,
        "stages.talker.engine.speech": json.dumps({"languages": ["English"]}),
        "stages.talker.engine.voices": json.dumps(["vivian"]),
        "stages.talker.engine.step_seconds": 0.002,
    }
    with HttpPipeline(REPOSITORY / "stage_configs" / "echo_speech.yaml", overrides) as pipeline:
        yield pipeline


@pytest.fixture
def slow_speech(slow_speech_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """A pipeline that speaks whole texts only, up to 500 characters a second; idle again after each test."""
    yield slow_speech_pipeline
    slow_speech_pipeline.assert_idle()


@pytest.fixture(scope="session")
def writing_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpPipeline]:
    engine = {"samples_per_token": 1, "voices": [], "speech": {"text_in_parts": True}}
    stage = {"name": "talker", "kind": "echo", "outputs": ["audio"], "engine": engine}
    config = tmp_path_factory.mktemp("writing") / "one_stage.yaml"
    config.write_text(json.dumps({"name": "echo-speech", "model": "echo", "stages": [stage]}))
    with HttpPipeline(config) as pipeline:
        yield pipeline


@pytest.fixture
def writing(writing_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """A single stage, whose sound begins with the first words; echo stages after others wait for all of a sentence."""
    yield writing_pipeline
    writing_pipeline.assert_idle()


@pytest.fixture(scope="session")
def slow_pipeline() -> Iterator[HttpPipeline]:
    overrides = {f"stages.{stage}.engine.step_seconds": 0.05 for stage in ("thinker", "code2wav")}
    overrides |= {"coordinator.max_in_flight": 2, "coordinator.max_queued": 0}
    with HttpPipeline(overrides=overrides) as pipeline:
        yield pipeline


@pytest.fixture
def slow(slow_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """20 tokens a second, two requests at a time; idle again after each test."""
    yield slow_pipeline
    slow_pipeline.assert_idle()


@pytest.fixture(scope="session")
def scripted_http(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpPipeline]:
    config = tmp_path_factory.mktemp("scripted") / "scripted.yaml"
    config.write_bytes(msgspec.yaml.encode(scripted_pipeline(tiny_checkpoint)))
    template = REPOSITORY / "stage_configs" / "qwen2_5_omni_tools.jinja"
    environment = {"OMNI_ACTORS_ALLOW_IMPORTS": "tests.support"}
    arguments = ["--openai-names", f"--tool-chat-template={template}"]
    with HttpPipeline(config, arguments=arguments, environment=environment) as pipeline:
        yield pipeline


@pytest.fixture
def scripted(scripted_http: HttpPipeline) -> Iterator[HttpPipeline]:
    """A model that says what it is asked to, and calls tools; idle again after each test."""
    yield scripted_http
    scripted_http.assert_idle()


@pytest.fixture(scope="session")
def talkative_pipeline() -> Iterator[HttpPipeline]:
    overrides: dict[str, Any] = {f"stages.{stage}.engine.step_seconds": 0.02 for stage in ("thinker", "code2wav")}
    with HttpPipeline(overrides={**overrides, "http.names": "openai"}) as pipeline:
        yield pipeline


@pytest.fixture
def talkative(talkative_pipeline: HttpPipeline) -> Iterator[HttpPipeline]:
    """50 tokens a second, by OpenAI's names; idle again after each test."""
    yield talkative_pipeline
    talkative_pipeline.assert_idle()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with watched_page(browser) as page:
        yield page
