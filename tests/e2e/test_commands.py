"""The offline class with a pipeline of its own; `tests/process/test_lifecycle.py` has the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_actors.client.offline import OmniLLM
from omni_actors.errors import UnknownVoice
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.e2e

CONFIG = "stage_configs/tiny_qwen2_5_omni.yaml"


def test_offline_generation_keeps_order_and_fails_one_alone(tiny_checkpoint: Path) -> None:
    params = {"thinker": {"max_tokens": 6}, "talker": {"max_tokens": 9}}
    prompts = ["Hi", "What is the capital of France?", "word " * 3000, "Hi"]
    with OmniLLM(REPOSITORY / CONFIG, {"model": str(tiny_checkpoint)}) as llm:
        outputs = llm.generate(prompts, params, seed=4)
        again = llm.generate(prompts[1], sampling_params_list=[{"max_tokens": 6}, {"max_tokens": 9}, None], seed=4)
        wrong = llm.generate("Hi", params, voice="Nobody")
    assert [output.error is None for output in outputs] == [True, True, False, True]
    assert outputs[0].token_ids == outputs[3].token_ids != outputs[1].token_ids
    assert again[0].token_ids == outputs[1].token_ids, "the list leaves out the prompt stage, which takes no parameters"
    assert len(again[0].audio) == 9 * 480
    for output in (outputs[0], outputs[1]):
        assert output.audio is not None
        assert len(output.audio) == 9 * 480
        assert output.finish_reasons == {"prompt": "stop", "thinker": "length", "talker": "length", "code2wav": "stop"}
    assert isinstance(wrong[0].error, UnknownVoice)
