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
# Kinds of pipelines, and the fixtures of each pipeline. A file belongs to the first kind that it names. Of its kind's
# files those come first that name the first pipelines, which so end soonest.
PIPELINES = {
    "Qwen3-TTS": (("qwen3_tts_http",),),
    "Qwen3-Omni": (("qwen3_http",),),
    "Qwen2.5-Omni": (("tiny_pipeline", "tiny_http"),),
    "scripted": (("talkative", "talkative_pipeline"), ("scripted", "scripted_http")),
    ECHO: (
        ("several", "several_pipeline"),
        ("writing", "writing_pipeline"),
        ("slow_speech", "slow_speech_pipeline"),
        ("preset", "preset_pipeline"),
        ("deaf_pipeline",),
        ("cloning", "cloning_pipeline"),
        ("videos", "video_pipeline"),
        ("pictures", "picture_pipeline"),
        ("slow", "slow_pipeline"),
        ("drawling", "drawling_pipeline"),
        ("echo", "echo_pipeline", "shared_launcher"),
    ),
}
FOLDERS = {ECHO: ("http", "process")}  # of the files that share a pipeline; else MODELS
MODELS = ("e2e", "http")
ENGINES = ("e2e/autoregressive/", "e2e/diffusion/")  # folders whose files share engines, which start in their process


@functools.cache
def pipeline_of(file: Path) -> str | None:
    """The kind of pipelines that a file of tests shares with others."""
    folder, text = file.relative_to(REPOSITORY / "tests").parts[0], file.read_text()
    for kind, pipelines in PIPELINES.items():
        fixtures = "|".join(name for pipeline in pipelines for name in pipeline)
        if folder in FOLDERS.get(kind, MODELS) and re.search(rf"\b({fixtures})[,:)]", text):
            return kind
    return None


@functools.cache
def names(file: Path, pipeline: tuple[str, ...]) -> bool:
    """Whether a file names a pipeline, as a parameter or in quotes."""
    return re.search(rf"\b({'|'.join(pipeline)})(\"?[,:)]|\" )", file.read_text()) is not None


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
    kinds = list(PIPELINES)

    def place(item: pytest.Item) -> tuple[int, ...]:
        kind = pipeline_of(item.path)
        if kind is None:
            return (1,)
        named = (number for number, pipeline in enumerate(PIPELINES[kind]) if names(item.path, pipeline))
        return 2 if kind == ECHO else 0, kinds.index(kind), next(named)

    items.sort(key=place)


def end_unused(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, end the pipelines of its kind that no later file names."""
    kind = pipeline_of(item.path)
    if kind is None or not isinstance(item, pytest.Function) or (nextitem is not None and nextitem.path == item.path):
        return
    files = list(dict.fromkeys(test.path for test in item.session.items if pipeline_of(test.path) == kind))
    later = files[files.index(item.path) + 1 :]
    for pipeline in PIPELINES[kind]:
        if any(names(file, pipeline) for file in later):
            continue
        for name in pipeline:
            for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
                fixture.finish(item._request)
