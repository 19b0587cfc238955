"""Which files of tests share a pipeline of models: one worker runs them, and the pipeline ends with the last of them.

Each of these pipelines takes up to 20 s to start, and costs time while it is idle.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.paths import REPOSITORY

# The fixtures of pipelines for the tests of FOLDERS, by the pipeline. A file belongs to the first one that it names.
PIPELINES = {
    "qwen3_tts_http": "Qwen3-TTS",
    "qwen3_http": "Qwen3-Omni",
    "tiny_pipeline": "Qwen2.5-Omni",
    "tiny_http": "Qwen2.5-Omni",
}
FOLDERS = (REPOSITORY / "tests" / "e2e", REPOSITORY / "tests" / "http")
PARAMETER = re.compile(rf"\b({'|'.join(PIPELINES)})[,:)]")


@functools.cache
def pipeline_of(file: Path) -> str | None:
    """The pipeline that a file of tests shares with others."""
    if not any(file.is_relative_to(folder) for folder in FOLDERS):
        return None
    used = PARAMETER.search(file.read_text())
    return PIPELINES[used.group(1)] if used else None


class ByPipeline(LoadFileScheduling):
    """Gives all files that share a pipeline to one worker, and the last files to the last of three workers.

    Models, which come first, keep two cores busy; tests of servers and single modules wait for most of their time.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return pipeline_of(REPOSITORY / file) or file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if len(self.nodes) > 2 and node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def sharing_first(items: list[pytest.Item]) -> None:
    """Sort tests so that those that share a pipeline come first: they are the longest that one worker has to run."""
    items.sort(key=lambda item: pipeline_of(item.path) is None)


def end_unused(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pipeline that `item` shares with the tests before it, unless the next test shares it, too."""
    pipeline = pipeline_of(item.path)
    if pipeline is None or not isinstance(item, pytest.Function):
        return
    if nextitem is not None and pipeline_of(nextitem.path) == pipeline:
        return
    for name, shared in PIPELINES.items():
        if shared == pipeline:
            for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
                fixture.finish(item._request)
