"""The examples of docs/http.md, docs/realtime.md and docs/migrating.md work as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, picture, sound

BLOCKS = [
    block
    for page in ("http.md", "realtime.md", "migrating.md")
    for block in re.findall(r"^```(bash|python)\n(.*?)^```", (REPOSITORY / "docs" / page).read_text(), re.M | re.S)
    if "with OmniLLM(" not in block[1]  # which starts a pipeline of its own: tests/e2e/test_commands.py
]


@pytest.mark.parametrize(("language", "block"), BLOCKS, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(BLOCKS)])
def test_example(request: pytest.FixtureRequest, tmp_path: Path, language: str, block: str) -> None:
    needs_model = "structured_outputs" in block  # an echo stage writes what it is given
    draws = "/v1/images/" in block or "images.generate" in block
    clones = "/v1/audio/voices" in block
    kind = "tiny_http" if needs_model else "pictures" if draws else "cloning" if clones else "echo"
    pipeline: HttpPipeline = request.getfixturevalue(kind)
    model = "tiny-qwen2.5-omni" if needs_model else "echo"
    (tmp_path / "sea.png").write_bytes(picture())
    (tmp_path / "question.wav").write_bytes(sound())
    code = block.replace("http://127.0.0.1:8000", pipeline.url).replace("tiny-speaker", model)
    if language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", code.replace("curl ", "curl --fail-with-body ")]
    else:
        command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    if "-o speech.wav" in block:
        assert (tmp_path / "speech.wav").read_bytes().startswith(b"RIFF")
    else:
        assert re.search("sea|choices|CompletionUsage|question.wav|recording|spring=(True|False)", done.stdout), (
            done.stdout
        )


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 8
