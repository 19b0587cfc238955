"""What a wheel holds, what is locked, and what is said where packages, configurations or models are missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from omni_actors import launch
from omni_actors.config import load
from omni_actors.config.loading import find_config, shipped
from omni_actors.host.processes import EXIT_USAGE
from scripts import audit, lock
from tests.support.commands import python
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
    assert "Warning:" not in done.stderr, done.stderr
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
        done = python(*command, cwd=tmp_path, env=environment)
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


PROJECT = (REPOSITORY / "pyproject.toml").read_text()
LOCK = (REPOSITORY / "constraints.txt").read_text()


def test_every_direct_requirement_is_locked_at_a_version_that_it_allows() -> None:
    assert len(lock.direct_requirements(PROJECT)) > 40
    assert lock.disagreements(PROJECT, LOCK) == []


def test_a_package_with_another_licence_is_named_unless_it_is_an_exception() -> None:
    packages = [
        {"Name": "Good", "Version": "1", "License": "MIT"},
        {"Name": "Bad", "Version": "2", "License": "AGPL-3.0\nthe text"},
        {"Name": "soxr", "Version": "3", "License": "LGPL-2.1-or-later"},
        {"Name": "NVIDIA-cublas", "Version": "4", "License": "Other/Proprietary License"},
    ]
    assert audit.refused_licences(packages) == ["Bad 2: AGPL-3.0"]


MODEL = "someone/some-model"
PROGRAM = f"""
import msgspec
from omni_actors.config import PipelineConfig
from omni_actors.errors import ConfigError
from omni_actors.launcher.preflight import pending_download
from tests.support.builders import chain
data = {{**chain(), "model": {MODEL!r}}}
for stage in data["stages"][:2]:
    stage["kind"] = "autoregressive"
try:
    print(pending_download(msgspec.convert(data, PipelineConfig)))
except ConfigError as error:
    print("refused:", error)
"""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[int]]]:
    """The address of a hub, and the sizes of the files of its only model."""
    sizes: list[int] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files = [{"rfilename": f"{index}.safetensors", "size": size} for index, size in enumerate(sizes)]
            body = json.dumps({"id": MODEL, "modelId": MODEL, "siblings": files}).encode()
            self.send_response(200 if self.path.startswith(f"/api/models/{MODEL}") and files else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sizes
    server.shutdown()
    thread.join()
    server.server_close()


def said(folder: Path, **environment: str) -> str:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HTTP", "http"))}
    done = python("-c", PROGRAM, env={**given, "HF_HOME": str(folder), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_that_is_not_here_is_announced_with_its_size_and_the_room(
    hub: tuple[str, list[int]], tmp_path: Path
) -> None:
    address, sizes = hub
    assert f"{MODEL} is downloaded first (of unknown size, to {tmp_path}/hub, where " in said(
        tmp_path, HF_ENDPOINT=address
    )
    sizes += [3 << 30, 1 << 29]
    assert "(3.5 GiB, to " in said(tmp_path, HF_ENDPOINT=address)
    sizes.append(1 << 60)
    assert said(tmp_path, HF_ENDPOINT=address).startswith(f"refused: {MODEL} has 1073741827.5 GiB, and {tmp_path}/hub")


def test_without_a_network_it_is_refused_at_once_and_a_cached_one_needs_none(tmp_path: Path) -> None:
    refused = said(tmp_path, HF_HUB_OFFLINE="1")
    assert refused.startswith(
        f"refused: {MODEL} is neither a folder nor in the cache {tmp_path}/hub, and HF_HUB_OFFLINE"
    )
    repository = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    assert said(tmp_path, HF_HUB_OFFLINE="1") == ""
