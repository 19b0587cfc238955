"""Parts that an engine refuses before it loads anything: those of plugins, and those that vLLM would choose itself."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.autoregressive import AutoregressiveEngine
from omni_actors.engine.core import VllmCore
from omni_actors.engine.models import checkpoint_architecture, registry
from omni_actors.engine.models.qwen2_5_omni import talker
from omni_actors.errors import ConfigError

if TYPE_CHECKING:  # the engine package prepares the process, which must precede vLLM
    from vllm.config import VllmConfig


@pytest.fixture
def vllm_config(tiny_checkpoint: Path) -> VllmConfig:
    return OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "talker"), "autoregressive").create_engine_config()


@pytest.mark.parametrize("adapter", ["collections.OrderedDict", "json.dumps"])
def test_an_adapter_of_a_plugin_must_be_one(
    tiny_checkpoint: Path, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("plugin_with_a_wrong_adapter")
    module.SPEC = replace(talker.SPEC, adapter=adapter)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    architecture = checkpoint_architecture(str(tiny_checkpoint))
    monkeypatch.setattr(registry, "MODULES", {(architecture, "speaker"): module.__name__})
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "speaker"), "autoregressive")
    with pytest.raises(ConfigError, match=f"{adapter} is not an AutoregressiveAdapter") as caught:
        AutoregressiveEngine(arguments)
    assert "ModelSpec" in caught.value.hint


def test_vllms_own_scheduler_is_refused(vllm_config: VllmConfig) -> None:
    vllm_config.scheduler_config.scheduler_cls = None  # as where a configuration was not made by OmniEngineArgs
    with pytest.raises(ConfigError, match="Scheduler is not an OmniSchedulerInterface") as caught:
        VllmCore(vllm_config)
    assert "create_engine_config" in caught.value.hint


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
