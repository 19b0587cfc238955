"""A thinker in FP8, quantized by vLLM as the recipe for small GPUs says, writes the same text and feeds the talker."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from omni_actors import config
from omni_actors.stage.engine_interface import StageInputs
from tests.support.paths import REPOSITORY
from tests.support.stage_driver import Driver, make_engine

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SPEAKER = REPOSITORY / "examples" / "speaker"  # the only checkpoint here whose text means something
SENTENCE = "The children found a small boat near the river."


def test_a_thinker_in_fp8_writes_the_same_and_feeds_the_talker_as_many_rows():
    template = AutoTokenizer.from_pretrained(SPEAKER)
    messages = [{"role": "user", "content": f"Say: {SENTENCE}"}]
    text = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = StageInputs(token_ids=template(text, add_special_tokens=False)["input_ids"])
    shipped = config.load(REPOSITORY / "stage_configs" / "qwen2_5_omni_3b_24gb.yaml", {}, devices=1).pipeline
    engine, found = shipped.stage("thinker").engine, []
    for quantization in ({}, {name: engine[name] for name in ("quantization", "quantization_config")}):
        thinker = Driver(make_engine(SPEAKER, "thinker", dtype="bfloat16", **quantization))
        thinker.start("r1", inputs, max_tokens=32, temperature=0.0)
        thinker.run()
        assert thinker.text("r1") == SENTENCE
        found.append(thinker.rows("r1").float())
        thinker.engine.shutdown()
    rows, fp8_rows = found
    assert fp8_rows.shape == rows.shape
    assert 0.001 < ((fp8_rows - rows).norm() / rows.norm()).item() < 0.2, "numbers of eight bits differ, but little"
