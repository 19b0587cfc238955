"""One stage in the caller's process, through `StageLLM`."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.stage_llm import StageLLM
from omni_actors.engine.tensors import to_torch
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.results import FinishReason
from tests.support.stage_driver import SMALL, prompt_length, talker_inputs, token_inputs

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
        with pytest.raises(InvalidRequest, match="params has 0 entries for 1 prompts"):
            stage.generate([{"prompt_token_ids": [1]}], [])
        with pytest.raises(InvalidRequest, match="'thinker' has no voices"):
            stage.generate([{"prompt_token_ids": [1]}], voice="Ethan")
        assert set(stage.engine.counts().values()) == {0}
    assert [result.token_ids for result in results[:2]] == [answer.thinker_tokens[:8] for answer in answers[:2]]
    assert results[0].finish_reasons == {"thinker": "length"}
    assert results[0].text
    usage = results[0].usage["thinker"]
    assert usage.input_tokens == len(answers[0].prompt_token_ids)
    assert usage.output_tokens == 8
    assert usage.finish_reason is FinishReason.LENGTH
    assert 0 < usage.first_output <= usage.finished
    rows = to_torch(results[0].tensors["rows"])
    torch.testing.assert_close(rows, answers[0].thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)
    assert isinstance(results[2].error, InvalidRequest)


def test_incomplete_rows_end_a_request_only_if_it_needs_more_of_them(tiny_checkpoint, answers):
    rows, length = answers[0].thinker_rows, prompt_length(answers[0])
    inputs = talker_inputs(rows, length, replies=15)  # rows after the first, and no more will come
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "talker"), "autoregressive", SMALL)
    with StageLLM(arguments) as stage:
        starved, short, whole = stage.generate(
            [inputs, inputs, talker_inputs(rows, length)],
            [{"max_tokens": 30, "min_tokens": 30}, {"max_tokens": 3}, {"max_tokens": 30, "min_tokens": 30}],
            seed=[0] * 3,
        )
        assert set(stage.engine.counts().values()) == {0}, "the request that starved is gone, too"
        assert stage.generate([inputs], {"max_tokens": 3}, seed=0)[0].token_ids == short.token_ids
    assert isinstance(starved.error, InvalidRequest)
    assert starved.error.stage == "talker"
    assert starved.finish_reasons == starved.usage == {}
    assert starved.token_ids == whole.token_ids[:12], "codec tokens leave in blocks of the vocoder"
    assert short.error is None
    assert short.token_ids == whole.token_ids[:3]
    assert short.finish_reasons == {"talker": "length"}
    assert len(whole.token_ids) == 30
