"""docs/migrating.md: every name in its table can be imported and has the arguments shown, and its YAML is valid."""

from __future__ import annotations

import re
from pathlib import Path

import omni_actors.engine.stage_llm  # noqa: F401 - the table names classes around vLLM; scripts/check.sh skips such files
from omni_actors import config
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "migrating.md").read_text()


def test_the_yaml_after_the_move_is_valid_and_keeps_the_values(tmp_path: Path) -> None:
    before, after = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    file = tmp_path / "pipeline.yaml"
    file.write_text(after)
    pipeline = config.load(file, devices=1).pipeline
    assert [stage.name for stage in pipeline.stages] == ["prompt", "thinker", "talker", "code2wav"]
    assert set(pipeline.modalities) == {"text", "audio"}
    for name, value in re.findall(r"(gpu_memory_utilization|temperature|top_k|top_p): ([\d.]+)", before):
        if value != "0.15":  # the vocoder's share, which has no counterpart
            assert f"{name}: {value}" in after
