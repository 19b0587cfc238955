"""Which files of tests share a pipeline, or engines: one worker runs them, and a pipeline ends with its last file.

One of models takes up to 20 s to start, and each costs time while it is idle: 5 % of a core with an HTTP server.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.paths import REPOSITORY

ECHO = "echo stages"
# The fixtures of each pipeline, or of several that are kept together. A file belongs to the first one that it names.
PIPELINES = {
    "Qwen3-TTS": ("qwen3_tts_http",),
    "Qwen3-Omni": ("qwen3_http",),
    "Qwen2.5-Omni": ("tiny_pipeline", "tiny_http"),
    "scripted": ("scripted", "scripted_http"),
    ECHO: (
        *("echo", "echo_pipeline", "slow", "slow_pipeline", "pictures", "picture_pipeline", "videos", "video_pipeline"),
        *("cloning", "cloning_pipeline", "preset", "preset_pipeline", "slow_speech", "slow_speech_pipeline"),
        *("drawling", "drawling_pipeline", "several", "several_pipeline", "deaf_pipeline", "shared_launcher"),
    ),
}
FOLDERS = {ECHO: ("http", "process")}  # of the files that share a pipeline; else MODELS
MODELS = ("e2e", "http")
ENGINES = ("e2e/autoregressive/", "e2e/diffusion/")  # folders whose files share engines, which start in their process


@functools.cache
def pipeline_of(file: Path) -> str | None:
    """The pipeline that a file of tests shares with others."""
    folder, text = file.relative_to(REPOSITORY / "tests").parts[0], file.read_text()
    for pipeline, fixtures in PIPELINES.items():
        if folder in FOLDERS.get(pipeline, MODELS) and re.search(rf"\b({'|'.join(fixtures)})[,:)]", text):
            return pipeline
    return None


class ByPipeline(LoadFileScheduling):
    """Gives all files that share a pipeline or engines to one worker, and what comes last to the last of three workers.

    Models, which come first, keep two cores busy; tests of servers and single modules wait for most of their time.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        engines = next((folder for folder in ENGINES if f"tests/{folder}" in file), None)
        return pipeline_of(REPOSITORY / file) or engines or file

    def _assign_work_unit(self, node: WorkerController) -> None:
        if len(self.nodes) > 2 and node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def sharing_first(items: list[pytest.Item]) -> None:
    """Sort tests so that models that are shared come first, as they take longest, and shared echo stages last."""
    places = {None: 1, ECHO: 2}
    items.sort(key=lambda item: places.get(pipeline_of(item.path), 0))


def end_unused(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pipeline that `item` shares with the tests before it, unless the next test shares it, too."""
    pipeline = pipeline_of(item.path)
    if pipeline is None or not isinstance(item, pytest.Function):
        return
    if nextitem is not None and pipeline_of(nextitem.path) == pipeline:
        return
    for name in PIPELINES[pipeline]:
        for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
            fixture.finish(item._request)
