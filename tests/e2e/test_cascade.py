"""The shipped cascade with tiny checkpoints: what a model writes is the next one's prompt, and the last one speaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_actors.client import OmniClient
from omni_actors.errors import InvalidRequest
from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.nightly]

SPEAKER = REPOSITORY / "examples" / "speaker"  # writes and says what follows "Say: "
SENTENCE = "The children found a small boat near the river."
ENGINE = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 33554432}
TOKENS = {"listener": 32, "chat": 8, "reader": 32, "talker": 64}


def tiny(shipped: dict[str, Any], chat_model: Path) -> dict[str, Any]:
    """The stages as they are shipped, with checkpoints and engines for a CPU."""
    shipped["model"] = str(SPEAKER)
    for stage in shipped["stages"]:
        stage |= {"stall_timeout": 60, "devices": None}
        if stage["kind"] == "autoregressive":
            media = {"limit_mm_per_prompt": {"image": 0, "audio": 1, "video": 0}} if stage["name"] == "listener" else {}
            stage["engine"] = {**ENGINE, **media}
            stage["sampling"] = {"max_tokens": TOKENS[stage["name"]], "temperature": 0.0}
        if "instruction" in stage:
            stage["instruction"] = "Say: "
        if stage["name"] == "chat":
            stage["model"] = str(chat_model)
    return shipped


@pytest.fixture(scope="module")
def cascade(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPipeline]:
    shipped = yaml.safe_load((REPOSITORY / "stage_configs" / "cascade.yaml").read_text())
    path = tmp_path_factory.mktemp("cascade") / "cascade.yaml"
    path.write_text(yaml.safe_dump(tiny(shipped, tiny_llama), sort_keys=False))
    with RunningPipeline(path) as pipeline:
        yield pipeline


def chat_answer(checkpoint: Path, text: str) -> tuple[list[int], str]:
    """What the chat model answers to a text, by transformers."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    made = LlamaForCausalLM.from_pretrained(checkpoint).generate(tokens, max_new_tokens=8, do_sample=False)
    wanted = made[0, tokens.shape[1] :].tolist()
    return wanted, tokenizer.decode(wanted, skip_special_tokens=True)


def test_each_model_goes_on_with_what_the_one_before_it_wrote(cascade: RunningPipeline, tiny_llama: Path) -> None:
    tokens, text = chat_answer(tiny_llama, SENTENCE)
    with OmniClient(cascade.endpoint) as client:
        output = client.generate(SENTENCE, modalities=["text", "audio"], seed=3, timeout=120)
    assert output.token_ids == tokens
    assert output.text == text
    reference = Reference(SPEAKER)
    inputs = reference.inputs([{"role": "user", "content": f"Say: {text.strip()}"}])
    spoken = reference.generate(inputs, thinker_max_tokens=32, talker_max_tokens=64, seed=3)
    assert output.usage["reader"].input_tokens == inputs["input_ids"].shape[1]
    assert len(output.audio) == spoken.waveform.numel() > 0
    cascade.assert_idle()


def test_what_the_other_models_would_not_see_is_refused(cascade: RunningPipeline) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SENTENCE}]
    with OmniClient(cascade.endpoint) as client, pytest.raises(InvalidRequest, match="one message of the user"):
        client.generate({"messages": messages}, modalities=["text"], timeout=60)
