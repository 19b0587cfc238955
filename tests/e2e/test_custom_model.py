"""The worked example of docs/extending.md: a model that omni_actors does not know, as a plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")])),
    "OMNI_ACTORS_ALLOW_IMPORTS": "custom_model",
}


def test_a_plugins_model_answers_as_transformers_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    from omni_actors.client import OmniClient

    checkpoint = tmp_path / "tiny_llama"
    subprocess.run(
        [sys.executable, "-m", "custom_model.tiny", str(checkpoint), "--tokenizer", str(tiny_checkpoint)],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, **ENVIRONMENT},
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    with (
        RunningPipeline(EXAMPLES / "custom_model" / "tiny.yaml", {"model": checkpoint}, environment=ENVIRONMENT) as own,
        OmniClient(own.endpoint) as client,
    ):
        for prompt in ("The tide is full.", "And the rivers?"):
            output = client.generate(prompt, params={"thinker": {"max_tokens": 16}}, timeout=60)
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text, return_tensors="pt").input_ids
            wanted = model.generate(tokens, max_new_tokens=16, do_sample=False)[0, tokens.shape[1] :].tolist()
            assert output.token_ids == wanted
            assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)
            assert output.usage["thinker"].input_tokens == tokens.shape[1]
        own.assert_idle()
