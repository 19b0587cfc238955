"""A stage may run a checkpoint of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_actors import launch
from omni_actors.config.checkpoint import models_of
from omni_actors.errors import ConfigError
from omni_actors.launcher.preflight import check_launch
from tests.support.builders import chain, load

PROMPT, THINKER, TALKER, CODE2WAV = range(4)


def pipeline() -> dict[str, Any]:
    """The chain with stages of the kinds that Qwen2.5-Omni has."""
    data = chain()
    for stage in data["stages"]:
        stage["kind"] = {"prompt": "prompt", "code2wav": "diffusion"}.get(stage["name"], "autoregressive")
    return data


def test_a_stage_runs_the_checkpoint_of_its_own_and_a_prompt_stage_that_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    data = pipeline()
    data["stages"][THINKER]["model"] = "own"
    data["stages"][CODE2WAV]["model"] = "someone/vocoder"
    loaded = load(tmp_path, data).pipeline
    assert loaded.stage("thinker").model == str(tmp_path / "own"), "relative to the YAML file"
    assert models_of(loaded) == (str(tmp_path / "own"), "echo", "someone/vocoder")


def test_a_checkpoint_that_is_not_there_is_named_with_its_stage(tmp_path: Path) -> None:
    data = pipeline()
    data["stages"][TALKER]["model"] = "./nowhere"
    with pytest.raises(ConfigError, match=r"stages\.talker\.model: there is no folder './nowhere'"):
        load(tmp_path, data)


def test_a_prompt_stage_cannot_prepare_prompts_for_another_checkpoint(tmp_path: Path) -> None:
    data = pipeline()
    data["stages"][PROMPT]["model"] = "someone/other"
    with pytest.raises(ConfigError, match=r"stages\.prompt\.model is 'someone/other', but the stage 'thinker'.*'echo'"):
        load(tmp_path, data)
    data["stages"][THINKER]["model"] = "someone/other"
    load(tmp_path, data)


def test_every_stage_reads_its_own_checkpoint(tmp_path: Path) -> None:
    from omni_actors.engine.arguments import stage_arguments

    data = pipeline()
    for name, architecture in (("whole", "Qwen2_5OmniModel"), ("other", "Qwen9OmniModel")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    data |= {"model": "whole"}
    data["stages"][TALKER]["model"] = "other"
    loaded = load(tmp_path, data).pipeline
    for name in ("prompt", "thinker", "code2wav"):
        assert stage_arguments(loaded, loaded.stage(name)).model_spec()
    with pytest.raises(ConfigError, match="'talker' of 'Qwen9OmniModel'"):
        stage_arguments(loaded, loaded.stage("talker")).model_spec()
    (tmp_path / "other" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"other/config\.json is not valid JSON"):
        check_launch(loaded, launch.parser().parse_args(["pipeline.yaml", "--check"]))
