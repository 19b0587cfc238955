"""Which files of tests share a pipeline of models: one worker runs them, and the pipeline ends with the last of them.

Each of these pipelines takes up to 20 s to start, and costs time while it is idle.
"""

from __future__ import annotations

import re

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.paths import REPOSITORY

# The fixtures of pipelines for the tests of tests/e2e, by the pipeline. A file belongs to the first one that it names.
PIPELINES = {
    "qwen3_tts_http": "Qwen3-TTS",
    "qwen3_http": "Qwen3-Omni",
    "tiny_pipeline": "Qwen2.5-Omni",
    "tiny_http": "Qwen2.5-Omni",
}
PARAMETER = re.compile(rf"\b({'|'.join(PIPELINES)}): ")


class ByPipeline(LoadFileScheduling):
    """Gives all files of tests/e2e that share a pipeline to one worker, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        used = PARAMETER.search((REPOSITORY / file).read_text()) if file.startswith("tests/e2e/") else None
        return PIPELINES[used.group(1)] if used else file


def end_unused(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared pipelines that `item` used and the next test does not."""
    if not isinstance(item, pytest.Function):
        return
    needed = nextitem.fixturenames if isinstance(nextitem, pytest.Function) else ()
    for name in set(PIPELINES) & set(item.fixturenames) - set(needed):
        for fixture in item._fixtureinfo.name2fixturedefs[name]:
            fixture.finish(item._request)
