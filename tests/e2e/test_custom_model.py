"""Models that write text alone: the worked example of docs/extending.md, a plugin; and those that vLLM serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import InvalidRequest, UnknownModality
from tests.support.paths import EXAMPLE_MODULES, REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.servers import picture

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ENVIRONMENT = {**EXAMPLE_MODULES, "OMNI_ACTORS_ALLOW_IMPORTS": "custom_model"}


def check_answers(pipeline: RunningPipeline, checkpoint: Path) -> None:
    """Text, tokens and counts equal those of transformers."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    with OmniClient(pipeline.endpoint) as client:
        for prompt in ("The tide is full.", "And the rivers?"):
            params = {"thinker": {"max_tokens": 16, "temperature": 0.0}}
            output = client.generate(prompt, params=params, timeout=60)
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text, return_tensors="pt").input_ids
            wanted = model.generate(tokens, max_new_tokens=16, do_sample=False)[0, tokens.shape[1] :].tolist()
            assert output.token_ids == wanted
            assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)
            assert output.usage["thinker"].input_tokens == tokens.shape[1]
            prompt_only = client.generate(prompt, params={"thinker": {"max_tokens": 0}}, timeout=60)
            assert prompt_only.text == ""
            assert prompt_only.usage["thinker"].output_tokens == 0
    pipeline.assert_idle()


def test_a_plugins_model_answers_as_transformers_does(tiny_llama: Path) -> None:
    configuration = REPOSITORY / "examples" / "custom_model" / "tiny.yaml"
    with RunningPipeline(configuration, {"model": tiny_llama}, environment=ENVIRONMENT) as pipeline:
        check_answers(pipeline, tiny_llama)


@pytest.mark.nightly
def test_a_chat_model_of_vllm_needs_no_code(tiny_llama: Path) -> None:
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 33554432}
    overrides = {f"stages.thinker.engine.{name}": value for name, value in engine.items()}
    with RunningPipeline("stage_configs/chat.yaml", {"model": tiny_llama, **overrides}) as pipeline:
        check_answers(pipeline, tiny_llama)
        with OmniClient(pipeline.endpoint) as client:
            with pytest.raises(UnknownModality):
                client.generate("Speak.", modalities=["text", "audio"], timeout=60)
            with pytest.raises(InvalidRequest, match="at most 0"):
                client.generate("What is this?", images=[picture()], timeout=60)
