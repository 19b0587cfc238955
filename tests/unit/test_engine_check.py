"""What is refused before an engine loads anything: options below `engine:`, parts of plugins, checkpoints."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_actors import config, launch
from omni_actors.config.checkpoint import models_of
from omni_actors.engine import models
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.autoregressive import AutoregressiveEngine
from omni_actors.engine.core import VllmCore
from omni_actors.engine.models import checkpoint_architecture
from omni_actors.engine.models.qwen2_5_omni import talker
from omni_actors.errors import ConfigError
from omni_actors.host.processes import EXIT_OK, EXIT_USAGE
from omni_actors.launcher.preflight import check_engines, check_launch
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
        ("code2wav", "max_num_seqq", "8", "stages.code2wav.engine.max_num_seqq is .* Did you mean 'max_num_seqs'"),
        ("thinker", "max_num_seqs", "many", "stages.thinker.engine.max_num_seqs: .* valid integer; got 'many'"),
        ("talker", "enforce_eager", "'no'", "stages.talker.engine.enforce_eager: .* valid boolean; got 'no'"),
        ("talker", "dtype", "bfloat17", "stages.talker.engine.dtype: .*'bfloat16'"),
        ("thinker", "limit_mm_per_prompt", "{image: x}", "stages.thinker.engine.limit_mm_per_prompt: image.*integer"),
        ("thinker", "tensor_parallel_size", "0", "stages.thinker.engine.tensor_parallel_size must be a whole number"),
        ("talker", "pipeline_parallel_size", "'2'", "engine.pipeline_parallel_size must be a whole number"),
        ("thinker", "max_num_seqs", "0", "stages.thinker.engine.max_num_seqs: Input should be greater than .*; got 0"),
        ("talker", "max_num_seqs", "1000000000000", "stages.talker.engine.max_num_seqs: Input should be less than"),
        ("code2wav", "max_num_batched_tokens", "-1", "engine.max_num_batched_tokens: Input should be greater than"),
        ("thinker", "kv_cache_memory_bytes", "0", "engine.kv_cache_memory_bytes: Input should be greater than"),
        ("thinker", "tensor_parallel_size", "5000", "engine.tensor_parallel_size is 5000; at most 1024 GPUs"),
        ("thinker", "cpu_offload_gb", ".inf", "line 1: .inf is not a finite number"),
        ("code2wav", "worker_cls", "x", "stages.code2wav.engine.worker_cls is set by omni_actors"),
    ],
)
def test_a_wrong_option_of_a_model_is_named(stage: str, option: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(FULL, **{f"stages__{stage}__engine__{option}": value})


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_diffusion_stage_is_not_spread(option: str) -> None:
    with pytest.raises(ConfigError, match="A diffusion stage runs on one GPU"):
        check(FULL, **{f"stages__code2wav__engine__{option}": "2", "stages__code2wav__devices": "[0, 1]"})


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


@pytest.mark.parametrize("adapter", ["collections.OrderedDict", "json.dumps"])
def test_an_adapter_of_a_plugin_must_be_one(
    tiny_checkpoint: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("plugin_with_a_wrong_adapter")
    module.SPEC = replace(talker.SPEC, adapter=adapter)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    architecture = checkpoint_architecture(str(tiny_checkpoint))
    monkeypatch.setattr(models, "MODULES", {(architecture, "speaker"): module.__name__})
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "speaker"), "autoregressive")
    with pytest.raises(ConfigError, match=f"{adapter} is not an AutoregressiveAdapter") as caught:
        AutoregressiveEngine(arguments)
    assert "ModelSpec" in caught.value.hint


def test_vllms_own_scheduler_is_refused(tiny_checkpoint: Path) -> None:
    made = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "talker"), "autoregressive").create_engine_config()
    made.scheduler_config.scheduler_cls = None  # as where a configuration was not made by OmniEngineArgs
    with pytest.raises(ConfigError, match="Scheduler is not an OmniSchedulerBase"):
        VllmCore(made)


@pytest.mark.parametrize(
    ("stage", "kind"), [("thinker", "autoregressive"), ("talker", "autoregressive"), ("code2wav", "diffusion")]
)
def test_a_stages_configuration_can_be_sent_to_a_new_process(tiny_checkpoint: Path, stage: str, kind: Any) -> None:
    made = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), stage), kind).create_engine_config()
    assert stage.encode() in ForkingPickler.dumps(made).tobytes()


def test_wrong_types_within_a_config_json_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config["thinker_config"]["text_config"]["hidden_size"] = "many"
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = OmniEngineArgs(OmniModelConfig(str(tmp_path), "thinker"), "autoregressive")
    with pytest.raises(ConfigError, match=f"(?s)the config.json of {tmp_path}: .*'hidden_size' expected int, got str"):
        arguments.create_engine_config()


def test_an_engine_has_its_workers_on_one_host_or_on_a_ray_cluster() -> None:
    with pytest.raises(ConfigError, match="nnodes: the workers of a replica are on one host") as refused:
        OmniEngineArgs(OmniModelConfig("x", "thinker"), "autoregressive", {"nnodes": 2})
    assert "`executor: ray`" in refused.value.hint


PROMPT, THINKER, TALKER, CODE2WAV = range(4)


def pipeline() -> dict[str, Any]:
    """The chain with stages of the kinds that Qwen2.5-Omni has."""
    data = chain()
    for stage in data["stages"]:
        stage["kind"] = {"prompt": "prompt", "code2wav": "diffusion"}.get(stage["name"], "autoregressive")
    return data


def test_a_stage_runs_the_checkpoint_of_its_own_and_a_prompt_stage_that_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    data = pipeline()
    data["stages"][THINKER]["model"] = "own"
    data["stages"][CODE2WAV]["model"] = "someone/vocoder"
    loaded = load(tmp_path, data).pipeline
    assert loaded.stage("thinker").model == str(tmp_path / "own"), "relative to the YAML file"
    assert models_of(loaded) == (str(tmp_path / "own"), "echo", "someone/vocoder")
    data["stages"][TALKER]["model"] = "./nowhere"
    with pytest.raises(ConfigError, match=r"stages\.talker\.model: there is no folder './nowhere'"):
        load(tmp_path, data)


def test_a_prompt_stage_cannot_prepare_prompts_for_another_checkpoint(tmp_path: Path) -> None:
    data = pipeline()
    data["stages"][PROMPT]["model"] = "someone/other"
    with pytest.raises(ConfigError, match=r"stages\.prompt\.model is 'someone/other', but the stage 'thinker'.*'echo'"):
        load(tmp_path, data)
    data["stages"][THINKER]["model"] = "someone/other"
    load(tmp_path, data)


def test_every_stage_reads_its_own_checkpoint(tmp_path: Path) -> None:
    from omni_actors.engine.arguments import stage_arguments

    data = pipeline()
    for name, architecture in (("whole", "Qwen2_5OmniModel"), ("other", "Qwen9OmniModel")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    data |= {"model": "whole"}
    data["stages"][TALKER]["model"] = "other"
    loaded = load(tmp_path, data).pipeline
    for name in ("prompt", "thinker", "code2wav"):
        assert stage_arguments(loaded, loaded.stage(name)).model_spec()
    with pytest.raises(ConfigError, match="'talker' of 'Qwen9OmniModel'"):
        stage_arguments(loaded, loaded.stage("talker")).model_spec()
    (tmp_path / "other" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"other/config\.json is not valid JSON"):
        check_launch(loaded, launch.parser().parse_args(["pipeline.yaml", "--check"]))
