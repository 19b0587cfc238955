"""`omni-actors check` reads what stands below `engine:` of every kind of stage, without a GPU or a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from omni_actors import config, launch
from omni_actors.errors import ConfigError
from omni_actors.host.processes import EXIT_OK, EXIT_USAGE
from omni_actors.launcher.preflight import check_engines
from tests.support.builders import chain, load, write
from tests.support.paths import REPOSITORY

SHIPPED = sorted((REPOSITORY / "stage_configs").glob("*.yaml"))
FULL = REPOSITORY / "stage_configs" / "qwen2_5_omni.yaml"
HUB = {"model": "Qwen/Qwen2.5-Omni-7B"}


def check(path: Path, **overrides: str) -> list[str]:
    """Load a pipeline for a host with two GPUs and check it; keys have __ for dots."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return check_engines(config.load(path, {**from_hub(path), **dotted}, devices=2).pipeline)


def from_hub(path: Path) -> dict[str, str]:
    """Names of the hub in place of folders, which are not there."""
    stages = yaml.safe_load(path.read_text())["stages"]
    own = [stage["name"] for stage in stages if stage.get("model", "").startswith("..")]
    return HUB | {f"stages.{name}.model": HUB["model"] for name in own}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_right(path: Path) -> None:
    names = [stage.name for stage in config.load(path, from_hub(path), devices=2).pipeline.stages]
    (line,) = check(path)
    assert line.startswith("engine options checked")
    assert line.endswith(f": {', '.join(names)}")


@pytest.mark.parametrize("name", ["qwen3_omni", "qwen3_omni_2gpu", "tiny_qwen3_omni"])
def test_without_the_stages_of_speech_a_configuration_serves_checkpoints_that_only_write(
    name: str, tmp_path: Path
) -> None:
    """As Thinking and Captioner need it."""
    data = yaml.safe_load((REPOSITORY / "stage_configs" / f"{name}.yaml").read_text())
    data["stages"] = [stage for stage in data["stages"] if stage["name"] not in ("talker", "code2wav")]
    (line,) = check(write(tmp_path, data))
    assert line.endswith(": prompt, thinker")


@pytest.mark.parametrize(
    ("stage", "option", "value", "problem"),
    [
        ("prompt", "dtyp", "bfloat16", "stages.prompt.engine.dtyp is not a field of vLLM's .* Did you mean 'dtype'"),
        ("thinker", "gpu_memory_utilisation", "0.5", "stages.thinker.engine.gpu_.* Did you mean 'gpu_memory_util"),
        ("talker", "max_num_seq", "8", "stages.talker.engine.max_num_seq is .* Did you mean 'max_num_seqs'"),
        ("code2wav", "max_num_seqq", "8", "stages.code2wav.engine.max_num_seqq is .* Did you mean 'max_num_seqs'"),
        ("thinker", "max_num_seqs", "many", "stages.thinker.engine.max_num_seqs: .* valid integer; got 'many'"),
        ("thinker", "max_num_seqs", "true", "stages.thinker.engine.max_num_seqs: .* valid integer; got True"),
        ("talker", "enforce_eager", "'no'", "stages.talker.engine.enforce_eager: .* valid boolean; got 'no'"),
        ("talker", "dtype", "bfloat17", "stages.talker.engine.dtype: .*'bfloat16'"),
        ("thinker", "limit_mm_per_prompt", "{image: x}", "stages.thinker.engine.limit_mm_per_prompt: image.*integer"),
        ("thinker", "tensor_parallel_size", "0", "stages.thinker.engine.tensor_parallel_size must be a whole number"),
        ("thinker", "max_num_seqs", "0", "stages.thinker.engine.max_num_seqs: Input should be greater than .*; got 0"),
        ("talker", "max_num_seqs", "1000000000000", "stages.talker.engine.max_num_seqs: Input should be less than"),
        ("talker", "max_model_len", "-2", "stages.talker.engine.max_model_len: Input should be greater than"),
        ("code2wav", "max_num_batched_tokens", "-1", "engine.max_num_batched_tokens: Input should be greater than"),
        ("thinker", "kv_cache_memory_bytes", "0", "engine.kv_cache_memory_bytes: Input should be greater than"),
        ("thinker", "tensor_parallel_size", "5000", "engine.tensor_parallel_size is 5000; at most 1024 GPUs"),
        ("thinker", "pipeline_parallel_size", "1000000000000000000", "at most 1024 GPUs"),
        ("thinker", "cpu_offload_gb", ".inf", "line 1: .inf is not a finite number"),
        ("code2wav", "worker_cls", "x", "stages.code2wav.engine.worker_cls is set by omni_actors"),
    ],
)
def test_a_wrong_option_of_a_model_is_named(stage: str, option: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(FULL, **{f"stages__{stage}__engine__{option}": value})


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("step_second", 1.0, "step_second: unknown key. Did you mean 'step_seconds'"),
        ("step_seconds", "1.0", "stages.talker.engine.step_seconds: Expected `float`, got `str`"),
    ],
)
def test_a_wrong_option_of_an_echo_stage_is_named(tmp_path: Path, option: str, value: object, problem: str) -> None:
    data = chain()
    data["stages"][2]["engine"] = {option: value}
    with pytest.raises(ConfigError, match=problem):
        check_engines(load(tmp_path, data).pipeline)


def test_a_custom_stage_checks_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", "custom_stage,tests.support")
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    monkeypatch.setattr(launch.logs, "configure", lambda process: None)
    path = str(REPOSITORY / "examples/custom_stage/echo.yaml")
    assert launch.main([path, "--check"]) == EXIT_OK
    assert "engine options checked: prompt, thinker, code2wav, leveller" in capsys.readouterr().out
    assert launch.main([path, "--check", "--set", "stages.leveller.engine.peek=1"]) == EXIT_USAGE
    shown, error = capsys.readouterr()
    assert not shown, "what is wrong does not stand below a long table"
    assert "configuration error: stages.leveller.engine.peek is no option of the leveller. Did you mean 'peak'" in error
    data = chain()
    data["stages"][2] |= {"kind": "custom", "engine_class": "tests.support.stage.RecordingEngine", "engine": {"x": 1}}
    assert check_engines(load(tmp_path, data).pipeline) == [
        "engine options checked: prompt, thinker, code2wav",
        "not checked: stages.talker.engine, as tests.support.stage.RecordingEngine has no check_options",
    ]
