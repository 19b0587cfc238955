"""What is decided about a Ray cluster before anything starts: versions, addresses, room, bundles and keys."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from omni_actors.cli import ray_job
from omni_actors.errors import ConfigError
from omni_actors.host import ray_cluster
from omni_actors.launcher.ray_node import RayNode
from omni_actors.transport.curve import make_client, make_cluster
from tests.support.builders import load
from tests.support.commands import python

CPU, GPUS = {"CPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}


def with_thinker(**fields: Any) -> dict[str, Any]:
    """A chain of two stages, whose thinker is a model on Ray's GPUs."""
    prompt, thinker = {"name": "prompt", "kind": "prompt"}, {"name": "thinker", "kind": "autoregressive"}
    thinker |= {"inputs": {"from": "prompt"}, "outputs": ["text"], "executor": "ray", **fields}
    return {"name": "test", "model": "a/model", "stages": [prompt, thinker]}


def installed(folder: Path, version: str) -> None:
    """What pip leaves of a distribution, as far as its version is concerned."""
    info = folder / f"ray-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "known"), [("2.42.1", False), ("2.43.0", True), ("2.99.0", True), ("3.0.0", False)]
)
def test_a_version_of_ray_that_vllm_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, known: bool
) -> None:
    installed(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    if known:
        ray_cluster.check_installed()
        return
    with pytest.raises(ConfigError, match=rf"Ray {version} is installed; .* take .*2\.43") as caught:
        ray_cluster.check_installed()
    assert f"pip install ray=={ray_cluster.TESTED}" in caught.value.hint


def test_the_range_is_that_of_the_extra_and_begins_with_what_vllm_asks_for() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from vllm.v1.executor import ray_executor

    from tests.support.paths import REPOSITORY

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["ray"][0]).specifier == ray_cluster.SUPPORTED
    assert 'version.parse("2.43.0")' in Path(ray_executor.__file__).read_text()
    assert ray_cluster.TESTED in ray_cluster.SUPPORTED


def test_an_address_of_a_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="the address of a client"):
        ray_cluster.connect({})


def test_a_cluster_that_does_not_answer_ends_the_process_with_an_error() -> None:
    """In a process of its own, which waits inside Ray."""
    command = "from omni_actors.host import ray_cluster; ray_cluster.connect({}, seconds=0.2)"
    with socket.create_server(("", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = python("-c", command, env={**os.environ, "RAY_ADDRESS": address})
    assert done.returncode == 1
    assert f"the Ray cluster at {address} did not answer within 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "bundles", "strategy", "said"),
    [
        ([CPU, CPU], [{"CPU": 1.0}] * 2, "STRICT_SPREAD", ""),
        ([GPUS], [{"GPU": 1.0}] * 2, "PACK", ""),
        ([GPUS], [{"GPU": 1.0}] * 3, "PACK", "it needs 3 x GPU, and the Ray cluster has 2."),
        ([CPU], [{"CPU": 1.0}] * 2, "STRICT_SPREAD", "it needs 2 nodes, and the Ray cluster has 1."),
        ([GPUS, CPU], [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0}], "STRICT_SPREAD", ""),
        ([], [{"CPU": 1.0}], "PACK", "it needs 1 x CPU, and the Ray cluster has 0."),
    ],
)
def test_a_cluster_that_is_too_small_even_when_idle_is_known_at_once(nodes, bundles, strategy, said) -> None:
    problem = ray_cluster.too_small(nodes, bundles, strategy)
    assert problem.startswith(said)
    assert bool(problem) == bool(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"devices": [0]}, "stages.thinker.devices does not go with executor: ray"),
        ({"kind": "diffusion", "outputs": ["audio"]}, "stages.thinker.executor: ray is for autoregressive stages"),
        ({"executor": "rya"}, "stages.thinker.executor"),
    ],
)
def test_what_does_not_go_with_the_executor_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, with_thinker(**fields), devices=1)


def test_nodes_get_the_keys_of_the_pipeline_and_no_secret_of_a_client(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_cluster(folder)
    handed = make_client(folder, "someone")
    make_client(folder, "boss", operator=True)
    files = ray_job.key_files(str(folder))
    assert sorted(files) == ["allowed/someone.key", "cluster.key", "cluster.key_secret", "operators/boss.key"]
    assert files["cluster.key_secret"] == (folder / "cluster.key_secret").read_text()
    with pytest.raises(ConfigError, match="a client's folder"):
        ray_job.key_files(str(handed))


def test_an_actor_passes_on_what_its_launcher_prints_and_holds_it_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getppid()))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    node = RayNode()
    node.start(["--help"], {"COLUMNS": "80"}, {"cluster.key": "a key"})
    lines, code = [], None
    while code is None:
        report = node.follow()
        lines, code = [*lines, *report.lines], report.code
    assert code == 0
    assert any(line.startswith("usage:") for line in lines)
    assert list(tmp_path.glob("omni-keys-*")) == []
    node.stop()
    node.stop()
