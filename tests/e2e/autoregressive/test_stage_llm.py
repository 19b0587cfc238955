"""One stage in the caller's process, through `StageLLM`."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.stage_llm import StageLLM
from omni_actors.engine.tensors import to_torch
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import StageParams
from tests.support.stage_driver import SMALL, token_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_stage_llm_runs_one_stage(tiny_checkpoint, answers):
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "thinker"), "autoregressive", SMALL)
    with StageLLM(arguments) as stage:
        results = stage.generate(
            [
                {"prompt_token_ids": answers[0].prompt_token_ids},
                token_inputs(answers[1].prompt_token_ids),
                {"prompt_token_ids": []},
            ],
            StageParams(max_tokens=8),
        )
        with pytest.raises(InvalidRequest):
            stage.generate([{"prompt_token_ids": [1]}], [])
    assert [result.token_ids for result in results[:2]] == [answer.thinker_tokens[:8] for answer in answers[:2]]
    assert results[0].finish_reasons == {"thinker": "length"}
    assert results[0].text
    rows = to_torch(results[0].tensors["rows"])
    torch.testing.assert_close(rows, answers[0].thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)
    assert isinstance(results[2].error, InvalidRequest)
