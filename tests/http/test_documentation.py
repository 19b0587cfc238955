"""The examples of the pages about HTTP, and of docs/realtime.md and docs/migrating.md, work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, picture, sound

DOCS = REPOSITORY / "docs"
PAGES = [*sorted((DOCS / "http").glob("*.md")), DOCS / "http.md", DOCS / "realtime.md", DOCS / "migrating.md"]
BLOCKS = [
    pytest.param(language, code, id=f"{page.stem}-{number}-{language}")
    for page in PAGES
    for number, (language, code) in enumerate(
        re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.M | re.S)
    )
    if "with OmniLLM(" not in code  # which starts a pipeline of its own: tests/e2e/test_commands.py
]


@pytest.mark.parametrize(("language", "block"), BLOCKS)
def test_example(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    language: str,
    block: str,
) -> None:
    needs_model = "structured_outputs" in block  # an echo stage writes what it is given
    draws = "/v1/images/" in block or "images.generate" in block
    clones = "/v1/audio/voices" in block
    kind = "tiny_http" if needs_model else "pictures" if draws else "cloning" if clones else "echo"
    pipeline: HttpPipeline = request.getfixturevalue(kind)
    model = "tiny-qwen2.5-omni" if needs_model else "echo"
    monkeypatch.chdir(tmp_path)
    Path("sea.png").write_bytes(picture())
    Path("question.wav").write_bytes(sound())
    code = block.replace("http://127.0.0.1:8000", pipeline.url).replace("tiny-speaker", model)
    if language == "bash":
        run("bash", "-euo", "pipefail", "-c", code.replace("curl ", "curl --fail-with-body "))
    elif "\nclient = OpenAI(" in code:
        # In this process: one of its own imports the package for a second.
        exec(compile(code, "example", "exec", dont_inherit=True), module := {"__name__": "example"})
        module["client"].close()
    else:
        run(sys.executable, "-c", code)
    said = capfd.readouterr().out
    if "-o speech.wav" in block:
        assert Path("speech.wav").read_bytes().startswith(b"RIFF")
    else:
        assert re.search("sea|choices|CompletionUsage|question.wav|recording|spring=(True|False)", said), said


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def test_a_page_of_an_api_shows_curl_and_the_openai_package() -> None:
    """And says what is refused, and how."""
    pages = {page.stem: page.read_text() for page in (DOCS / "http").glob("*.md")}
    del pages["web_page"]
    for name, text in pages.items():
        assert re.search(r"^```bash\n(?:(?!```).)*curl", text, re.M | re.S), name
        assert re.search(r"^```python\n(?:(?!```).)*OpenAI\(", text, re.M | re.S), name
        assert re.search(r"^## Errors\n.*^## Not supported\n", text, re.M | re.S), name
