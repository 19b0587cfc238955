"""The examples of the first pages, and of those about HTTP, sessions and migrating, work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, picture, sound

DOCS = REPOSITORY / "docs"
# With this docs/http.md says that its programs begin.
CLIENT = """from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
"""


class Example(NamedTuple):
    """A block of code of a page; `name` is the page's and a number."""

    name: str
    language: str
    code: str

    @property
    def needs_model(self) -> bool:
        """Whether it takes a model: an echo stage writes what it is given."""
        return "structured_outputs" in self.code

    def run(self, pipeline: HttpPipeline, model: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        """Run it in `folder`, the working directory, and check what it writes."""
        (folder / "sea.png").write_bytes(picture())
        (folder / "question.wav").write_bytes(sound())
        begins = self.language == "python" and "client." in self.code and "OpenAI(" not in self.code
        code = (CLIENT if begins else "") + self.code
        code = code.replace("http://127.0.0.1:8000", pipeline.url).replace("tiny-speaker", model)
        code = code.replace("ws://127.0.0.1:8000", pipeline.url.replace("http", "ws", 1))
        if self.language == "bash":
            run("bash", "-euo", "pipefail", "-c", code.replace("curl ", "curl --fail-with-body "))
        elif "\nclient = OpenAI(" in code:
            # In this process: one of its own imports the package for a second.
            exec(compile(code, "example", "exec", dont_inherit=True), module := {"__name__": "example"})
            module["client"].close()
        else:
            run(sys.executable, "-c", code)
        said = capfd.readouterr().out
        if "-o speech.wav" in self.code:
            assert (folder / "speech.wav").read_bytes().startswith(b"RIFF")
        else:
            assert re.search("sea|hear|choices|CompletionUsage|question.wav|recording|ek_|spring=(True|False)", said), (
                said
            )


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=240)


PAGES = [DOCS / "http.md", DOCS / "realtime.md", DOCS / "migrating.md"]
EXAMPLES = [
    Example(f"{page.stem}-{number}-{language}", language, code)
    for page in PAGES
    for number, (language, code) in enumerate(
        re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.M | re.S)
    )
    if "with OmniLLM(" not in code  # which starts a pipeline of its own: tests/process/test_offline.py
]


NEED_MODEL = [example for example in EXAMPLES if example.needs_model]
NEED_NO_MODEL = [example for example in EXAMPLES if not example.needs_model]


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
