"""What a wheel holds, how configurations are found by name, and what is said where a part of the installation lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from omni_actors import launch
from omni_actors.config import load
from omni_actors.config.loading import find_config, shipped
from omni_actors.host.processes import EXIT_USAGE
from tests.support.paths import REPOSITORY

NAMES = sorted(path.stem for path in (REPOSITORY / "stage_configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel of this package was unpacked."""
    source = tmp_path_factory.mktemp("source")
    for name in ("omni_actors", "stage_configs", "examples"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", "out", "."], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    unpacked = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(next((source / "out").glob("*.whl"))) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.mark.nightly
def test_the_wheel_holds_configurations_and_examples(wheel: Path) -> None:
    package = wheel / "omni_actors"
    for folder in ("stage_configs", "examples"):
        ours = {
            path.relative_to(REPOSITORY / folder)
            for path in (REPOSITORY / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        theirs = {path.relative_to(package / folder) for path in (package / folder).rglob("*") if path.is_file()}
        assert theirs == ours
        assert theirs


@pytest.mark.nightly
def test_an_installed_package_finds_its_configurations_by_name(wheel: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(wheel)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import omni_actors; print(omni_actors.__file__)").startswith(str(wheel))
    assert "yaml echo.yaml" in run("-m", "omni_actors.launch", "echo", "--check")


def test_names_paths_and_what_lies_in_the_current_folder_are_all_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped() == NAMES
    assert find_config(REPOSITORY / "stage_configs" / "echo.yaml") == REPOSITORY / "stage_configs" / "echo.yaml"
    monkeypatch.chdir(tmp_path)
    for given in ("echo", "echo.yaml", "stage_configs/echo.yaml"):
        assert find_config(given) == REPOSITORY / "stage_configs" / "echo.yaml", given
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo.yaml").write_text("name: mine")
    assert find_config("echo.yaml").read_text() == "name: mine"
    assert load(REPOSITORY / "stage_configs" / "echo.yaml").pipeline == load("stage_configs/echo.yaml").pipeline


def test_a_package_that_a_stage_needs_is_named_with_its_extra_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("omni_actors.launcher.preflight.MEDIA_PACKAGES", ("a_package_that_is_missing",))
    monkeypatch.setattr(launch.logs, "configure", lambda process: None)
    (tmp_path / "config.json").write_text("{}")
    assert launch.main(["tiny_qwen2_5_omni", "--model", str(tmp_path)]) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "The stage prompt needs packages that are not installed: a_package_that_is_missing." in line
    assert "pip install 'omni_actors[cuda]' or pip install 'omni_actors[cpu]'" in line
