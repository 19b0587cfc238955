"""A checkpoint breaks while it is served. Stages of a model that are killed: test_qwen3_pipeline.py."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import StageUnavailable
from tests.support.pipelines import RunningPipeline

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

THINKER = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True}
PROMPT = "Tell me, in a few words, why the sea is salt and the rivers are not."


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def pipeline(checkpoint: Path) -> Iterator[RunningPipeline]:
    with RunningPipeline("stage_configs/tiny_qwen2_5_omni.yaml", {"model": checkpoint}) as running:
        yield running


async def test_a_checkpoint_that_breaks_while_it_is_served(pipeline: RunningPipeline, checkpoint: Path) -> None:
    """A stage that cannot load it any more is given up, with the reason; those that have it go on."""
    text_only = {"modalities": ["text"], "params": {"thinker": THINKER}, "seed": 5}
    async with AsyncOmniClient(pipeline.endpoint) as client:
        before = await client.generate(PROMPT, **text_only)
        weights = checkpoint / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        speaking = asyncio.create_task(
            client.generate(
                PROMPT, params={"thinker": THINKER, "talker": {"min_tokens": 50, "max_tokens": 60}}, timeout=120
            )
        )
        stages = {status.stage: status for status in (await client.describe()).stages}
        psutil.Process(stages["code2wav"].pid).kill()
        with pytest.raises(StageUnavailable, match="code2wav"):
            await speaking
        stages = {status.stage: status.state for status in (await client.describe()).stages}
        assert stages == {"prompt": "ready", "thinker": "ready", "talker": "ready", "code2wav": "dead"}
        assert (await client.generate(PROMPT, **text_only)).text == before.text
        with pytest.raises(StageUnavailable, match="code2wav"):
            await client.generate(PROMPT)
    log = (pipeline.run_dir / "logs" / "code2wav-0.log").read_text()
    assert f"The engine core for {checkpoint} does not start: SafetensorError" in log
