"""Tests that share a pipeline of models run in one worker."""

from __future__ import annotations

import ast

from tests.support.paths import REPOSITORY
from tests.support.sharing import PIPELINES, pipeline_of


def test_every_file_that_uses_a_shared_pipeline_belongs_to_it_and_to_no_other() -> None:
    """By a parameter or by the name in a string. Any other file would start it once more in another worker."""
    used = {}
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {node.arg for node in nodes if isinstance(node, ast.arg)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        used[file] = {PIPELINES[name] for name in names & set(PIPELINES)}
    assert {"Qwen2.5-Omni", "Qwen3-Omni", "Qwen3-TTS"} == set().union(*used.values())
    strangers = {file.name: found for file, found in used.items() if found - {pipeline_of(file)}}
    assert strangers == {}
