"""The main job as a command, and the offline class, each with a pipeline of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import soundfile

from omni_actors.client.offline import OmniLLM
from omni_actors.errors import UnknownVoice
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.e2e

CONFIG = "stage_configs/tiny_qwen2_5_omni.yaml"


def test_one_prompt_from_the_command_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    wav = tmp_path / "out.wav"
    command = [sys.executable, "-m", "omni_actors.launch", CONFIG, "--model", str(tiny_checkpoint)]
    command += ["--prompt", "What is the capital of France?", "--save-audio", str(wav), "--seed", "3"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) > 8, "the answer's text goes to stdout"
    assert "missing: " in run.stderr
    assert "ready after" in run.stderr
    samples, rate = soundfile.read(wav)
    assert rate == 24_000
    assert len(samples) == 64 * 480  # the talker's 64 tokens of the YAML
    assert 0.05 < numpy.abs(samples).max() < 0.95


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
