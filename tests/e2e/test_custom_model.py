"""Models that write text alone: the worked example of docs/extending.md, a plugin; and those that vLLM serves."""

from __future__ import annotations

import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import InvalidRequest, UnknownModality
from tests.support.answers import llama_answer
from tests.support.paths import EXAMPLE_MODULES, REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.servers import picture

pytestmark = pytest.mark.e2e

ENVIRONMENT = {**EXAMPLE_MODULES, "OMNI_ACTORS_ALLOW_IMPORTS": "custom_model"}


def check_answers(pipeline, checkpoint):
    """Text, tokens and counts equal those of transformers."""
    with OmniClient(pipeline.endpoint) as client:
        for prompt in ("The tide is full.", "And the rivers?"):
            params = {"thinker": {"max_tokens": 16, "temperature": 0.0}}
            output = client.generate(prompt, params=params, timeout=60)
            tokens, text, length = llama_answer(checkpoint, prompt, 16)
            assert (output.token_ids, output.text) == (tokens, text)
            assert output.usage["thinker"].input_tokens == length
            prompt_only = client.generate(prompt, params={"thinker": {"max_tokens": 0}}, timeout=60)
            assert prompt_only.text == ""
            assert prompt_only.usage["thinker"].output_tokens == 0
    pipeline.assert_idle()


def test_a_plugins_model_answers_as_transformers_does(tiny_llama):
    configuration = REPOSITORY / "examples" / "custom_model" / "tiny.yaml"
    with RunningPipeline(configuration, {"model": tiny_llama}, environment=ENVIRONMENT) as pipeline:
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
