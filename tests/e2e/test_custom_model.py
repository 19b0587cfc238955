"""Models that write text alone: the worked example of docs/extending.md, a plugin; and those that vLLM serves."""

from __future__ import annotations

import pytest

from omni_actors.client import OmniClient
from omni_actors.client.prompts import to_prompt
from omni_actors.config import load
from omni_actors.engine import models
from omni_actors.engine.arguments import stage_arguments
from omni_actors.engine.stage_llm import StageLLM
from omni_actors.errors import InvalidRequest, UnknownModality
from omni_actors.protocol.codec import BufferList
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest
from omni_actors.stage.process import build_engine
from tests.support.answers import llama_answer
from tests.support.paths import EXAMPLE_MODULES, REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.servers import picture

pytestmark = pytest.mark.e2e

CONFIGURATION = REPOSITORY / "examples" / "custom_model" / "tiny.yaml"
ENVIRONMENT = {**EXAMPLE_MODULES, "OMNI_ACTORS_ALLOW_IMPORTS": "custom_model"}
PROMPTS = ("The tide is full.", "And the rivers?")
GREEDY = {"max_tokens": 16, "temperature": 0.0}


def check_answers(pipeline, checkpoint):
    """Text, tokens and counts equal those of transformers."""
    with OmniClient(pipeline.endpoint) as client:
        for prompt in PROMPTS:
            output = client.generate(prompt, params={"thinker": GREEDY}, timeout=60)
            tokens, text, length = llama_answer(checkpoint, prompt, 16)
            assert (output.token_ids, output.text) == (tokens, text)
            assert output.usage["thinker"].input_tokens == length
            prompt_only = client.generate(prompt, params={"thinker": {"max_tokens": 0}}, timeout=60)
            assert prompt_only.text == ""
            assert prompt_only.usage["thinker"].output_tokens == 0
    pipeline.assert_idle()


def test_a_plugins_model_answers_as_transformers_does(tiny_llama, monkeypatch):
    """Both of its stages in this process; those of a pipeline: the next test."""
    monkeypatch.setattr(models, "MODULES", dict(models.MODULES))
    monkeypatch.syspath_prepend(CONFIGURATION.parents[1])
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", "custom_model")
    pipeline = load(CONFIGURATION, {"model": str(tiny_llama)}).pipeline
    prompt_stage = build_engine(pipeline, pipeline.stage("prompt"), str)
    models.load_plugins(pipeline.plugins)
    with StageLLM(stage_arguments(pipeline, pipeline.stage("thinker"))) as thinker:
        for text in PROMPTS:
            given, _ = to_prompt(text, (), (), (), None, BufferList())
            prompt_stage.start(StageRequest("r", StageParams(), 0), StageInputs(prompt=given))
            tokens, end = prompt_stage.step()
            (output,) = thinker.generate([StageInputs(token_ids=tokens.token_ids)], GREEDY)
            token_ids, answer, length = llama_answer(tiny_llama, text, 16)
            assert (output.token_ids, output.text) == (token_ids, answer)
            assert output.usage["thinker"].input_tokens == end.output_tokens == length


@pytest.mark.nightly
def test_a_pipeline_of_a_plugins_model_answers_as_transformers_does(tiny_llama):
    with RunningPipeline(CONFIGURATION, {"model": tiny_llama}, environment=ENVIRONMENT) as pipeline:
        check_answers(pipeline, tiny_llama)


@pytest.mark.nightly
def test_a_chat_model_of_vllm_needs_no_code(tiny_llama):
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 33554432}
    overrides = {f"stages.thinker.engine.{name}": value for name, value in engine.items()}
    with RunningPipeline("stage_configs/chat.yaml", {"model": tiny_llama, **overrides}) as pipeline:
        check_answers(pipeline, tiny_llama)
        with OmniClient(pipeline.endpoint) as client:
            with pytest.raises(UnknownModality):
                client.generate("Speak.", modalities=["text", "audio"], timeout=60)
            with pytest.raises(InvalidRequest, match="at most 0"):
                client.generate("What is this?", images=[picture()], timeout=60)
