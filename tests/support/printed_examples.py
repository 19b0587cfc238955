"""The examples that the documentation of the HTTP server prints, and how they are run."""

from __future__ import annotations

import re
import subprocess
import sys
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
    subprocess.run(command, check=True, timeout=600)


PAGES = [DOCS / "http.md", DOCS / "realtime.md", DOCS / "migrating.md"]
EXAMPLES = [
    Example(f"{page.stem}-{number}-{language}", language, code)
    for page in PAGES
    for number, (language, code) in enumerate(
        re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.M | re.S)
    )
    if "with OmniLLM(" not in code  # which starts a pipeline of its own: tests/process/test_offline.py
]
