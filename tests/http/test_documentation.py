"""The examples of the first pages, and of those about HTTP, sessions and migrating, work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.printed_examples import EXAMPLES, Example
from tests.support.servers import HttpPipeline

NEED_MODEL = [example for example in EXAMPLES if example.needs_model]
NEED_NO_MODEL = [example for example in EXAMPLES if not example.needs_model]


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
@pytest.mark.parametrize("example", NEED_NO_MODEL, ids=attrgetter("name"))
def test_example(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    example: Example,
) -> None:
    draws = "/v1/images/" in example.code or "images.generate" in example.code
    clones = "/v1/audio/voices" in example.code
    films = "/v1/videos" in example.code or "videos.create" in example.code
    name = "videos" if films else "pictures" if draws else "cloning" if clones else "echo"
    pipeline: HttpPipeline = request.getfixturevalue(name)
    monkeypatch.chdir(tmp_path)
    example.run(pipeline, "echo", tmp_path, capfd)


@pytest.mark.e2e
@pytest.mark.parametrize("example", NEED_MODEL, ids=attrgetter("name"))
def test_example_of_a_model(
    tiny_http: HttpPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    example: Example,
) -> None:
    monkeypatch.chdir(tmp_path)
    example.run(tiny_http, "tiny-qwen2.5-omni", tmp_path, capfd)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_programs_talk_to_a_pipeline(echo: HttpPipeline, page: str) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.M | re.S)
    program, places = re.subn(r"^( +)\.\.\.  # Text\(", r"\1print(type(item).__name__)  # (", program, flags=re.M)
    assert places == 1
    program = program.replace("ipc:///tmp/omni-x/client", echo.endpoint).replace("tiny_speaker", "echo")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=True)
    assert {"Text", "Audio"} <= set(done.stdout.split())
