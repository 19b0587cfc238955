"""The examples of the first pages, and of those about HTTP, sessions and migrating, work as printed."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest

from tests.support.commands import python
from tests.support.paths import REPOSITORY
from tests.support.printed_examples import EXAMPLES, Example
from tests.support.servers import HttpPipeline


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
@pytest.mark.parametrize(
    "example", [example for example in EXAMPLES if not example.needs_model], ids=attrgetter("name")
)
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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_programs_talk_to_a_pipeline(echo: HttpPipeline, page: str) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.M | re.S)
    program, places = re.subn(r"^( +)\.\.\.  # Text\(", r"\1print(type(item).__name__)  # (", program, flags=re.M)
    assert places == 1
    program = program.replace("ipc:///tmp/omni-x/client", echo.endpoint).replace("tiny_speaker", "echo")
    assert {"Text", "Audio"} <= set(python("-c", program, check=True).stdout.split())
