"""The examples of the documentation that a model must answer work as printed."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from tests.support.printed_examples import EXAMPLES, Example
from tests.support.servers import HttpPipeline

NEED_MODEL = [example for example in EXAMPLES if example.needs_model]


@pytest.mark.e2e
@pytest.mark.parametrize("example", NEED_MODEL, ids=attrgetter("name"))
def test_example(
    tiny_http: HttpPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    example: Example,
) -> None:
    monkeypatch.chdir(tmp_path)
    example.run(tiny_http, "tiny-qwen2.5-omni", tmp_path, capfd)
