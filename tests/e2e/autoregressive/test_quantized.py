"""A thinker in FP8, quantized by vLLM as the recipe for small GPUs says, writes the same text and feeds the talker."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from omni_actors import config
from omni_actors.stage.engine_interface import StageInputs
from tests.support.paths import REPOSITORY
from tests.support.stage_driver import Driver, make_engine

pytestmark = pytest.mark.e2e

SPEAKER = REPOSITORY / "examples" / "speaker"  # the only checkpoint here whose text means something
SENTENCE = "The children found a small boat near the river."


def said(**quantization: object) -> tuple[str, torch.Tensor]:
    """The text of an answer, and the rows for the talker."""
    template = AutoTokenizer.from_pretrained(SPEAKER)
    messages = [{"role": "user", "content": f"Say: {SENTENCE}"}]
    text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    driver = Driver(make_engine(SPEAKER, "thinker", dtype="bfloat16", **quantization))
    try:
        tokens = template(text, add_special_tokens=False)["input_ids"]
        driver.start("r1", StageInputs(token_ids=tokens), max_tokens=32, temperature=0.0)
        driver.run()
        return driver.text("r1"), driver.rows("r1").float()
    finally:
        driver.engine.shutdown()


def test_a_thinker_in_fp8_writes_the_same_and_feeds_the_talker_as_many_rows() -> None:
    shipped = config.load(REPOSITORY / "stage_configs" / "qwen2_5_omni_3b_24gb.yaml", {}, devices=1).pipeline
    engine = shipped.stage("thinker").engine
    text, rows = said()
    fp8_text, fp8_rows = said(**{name: engine[name] for name in ("quantization", "quantization_config")})
    assert fp8_text == text == SENTENCE
    assert fp8_rows.shape == rows.shape
    difference = ((fp8_rows - rows).norm() / rows.norm()).item()
    assert 0.001 < difference < 0.2, "numbers of eight bits differ, but little"
