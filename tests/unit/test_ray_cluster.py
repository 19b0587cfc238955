"""What is decided about a Ray cluster before anything starts: versions, addresses, room, bundles and keys."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_actors.cli import ray_job
from omni_actors.config import Executor, describe
from omni_actors.engine import ray_check
from omni_actors.engine.executor import executor_backend
from omni_actors.errors import ConfigError, StartupError
from omni_actors.host import ray_cluster
from omni_actors.launcher import ray_room
from omni_actors.launcher.ray_node import RayNode
from omni_actors.transport.curve import make_client, make_cluster
from tests.support.builders import load, write
from tests.support.ray_nodes import spread_chain

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


def test_a_launch_with_another_version_of_ray_ends_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load(tmp_path, with_thinker(), devices=0).pipeline
    installed(tmp_path, "2.42.1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ray_room, "CHECK", "no_such_module")  # which would be the next error
    with pytest.raises(ConfigError, match=r"Ray 2\.42\.1 is installed"):
        ray_room.check_room(pipeline)


def test_the_range_is_that_of_the_extra_and_begins_with_what_vllm_asks_for() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from vllm.v1.executor import ray_executor

    from tests.support.paths import REPOSITORY

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["ray"][0]).specifier == ray_cluster.SUPPORTED
    assert 'version.parse("2.43.0")' in Path(ray_executor.__file__).read_text()
    assert ray_cluster.TESTED in ray_cluster.SUPPORTED


@pytest.mark.parametrize(
    ("address", "said"),
    [("ray://head:10001", "the address of a client"), ("http://head:8265", "the address of a client")],
)
def test_an_address_of_a_client_is_refused(monkeypatch: pytest.MonkeyPatch, address: str, said: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=said):
        ray_cluster.connect({})


def test_an_address_at_which_nothing_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"no Ray cluster to reach at 127\.0\.0\.1:.* refused"):
            ray_cluster.connect({})


def test_a_cluster_that_does_not_answer_ends_the_process_with_an_error() -> None:
    """In a process of its own, which waits inside Ray."""
    command = "from omni_actors.host import ray_cluster; ray_cluster.connect({}, seconds=0.2)"
    with socket.create_server(("", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"the Ray cluster at {address} did not answer within 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "bundles", "strategy", "said"),
    [
        ([CPU, CPU], [{"CPU": 1.0}] * 2, "STRICT_SPREAD", ""),
        ([GPUS], [{"GPU": 1.0}] * 2, "PACK", ""),
        ([GPUS], [{"GPU": 1.0}] * 3, "PACK", "it needs 3 x GPU, and the Ray cluster has 2."),
        ([CPU], [{"CPU": 1.0}] * 2, "STRICT_SPREAD", "it needs 2 nodes, and the Ray cluster has 1."),
        ([GPUS, CPU], [{"CPU": 1.0, "GPU": 1.0}] * 2, "STRICT_SPREAD", "2 nodes need {CPU: 1, GPU: 1} each"),
        ([GPUS, CPU], [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0}], "STRICT_SPREAD", ""),
        ([], [{"CPU": 1.0}], "PACK", "it needs 1 x CPU, and the Ray cluster has 0."),
    ],
)
def test_a_cluster_that_is_too_small_even_when_idle_is_known_at_once(nodes, bundles, strategy, said) -> None:
    problem = ray_cluster.too_small(nodes, bundles, strategy)
    assert problem.startswith(said)
    assert bool(problem) == bool(said)


def test_every_node_reserves_the_gpus_that_its_stages_name(tmp_path: Path) -> None:
    data = spread_chain() | {"cluster": {"nnodes": 3}}
    assert ray_job.bundles_of(load(tmp_path, data).pipeline, with_gpus=True) == [{"CPU": 1.0}] * 3
    data["stages"][2] |= {"kind": "custom", "engine_class": "omni_actors.stage.echo.EchoEngine", "devices": [2]}
    pipeline = load(tmp_path, data, devices=3).pipeline
    assert ray_job.bundles_of(pipeline, with_gpus=False) == [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 3.0}, {"CPU": 1.0}]


def test_a_stage_on_ray_takes_no_gpu_of_its_host(tmp_path: Path) -> None:
    model = tmp_path / "a"
    model.mkdir()
    loaded = load(tmp_path, with_thinker(engine={"tensor_parallel_size": 4}), devices=1)
    assert ray_job.bundles_of(loaded.pipeline, with_gpus=True) == [{"CPU": 1.0}]
    assert "thinker: 1 x autoregressive on 4 x GPU of the Ray cluster" in describe(loaded, devices=1)
    assert "memory of" not in describe(loaded, devices=1)


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


def test_vllm_gets_its_own_executor_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert executor_backend(1, Executor.RAY) == "ray"
    assert envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
    assert executor_backend(2) == "mp"


def test_the_cpu_platform_of_vllm_has_no_ray_executor() -> None:
    from vllm.platforms import current_platform

    from omni_actors.engine.ray_workers import device_key

    assert current_platform.ray_device_key == ""
    with pytest.raises(ConfigError, match="platform of the vLLM here, 'cpu', has no Ray executor"):
        device_key()


def test_a_launcher_hands_on_what_the_check_of_rays_room_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ray_check.main(2, "thinker") == 1
    found = ray_room.failure_of(capsys.readouterr().out, "")
    assert isinstance(found, ConfigError)
    assert "has no Ray executor" in found.message
    assert "omni_actors[cuda,ray]" in found.hint
    monkeypatch.setattr(ray_room, "CHECK", "no_such_module")  # a check that breaks is an error, too
    with pytest.raises(StartupError, match="No module named no_such_module"):
        ray_room.check_room(load(tmp_path, with_thinker(), devices=0).pipeline)


def test_stages_without_ray_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_room, "CHECK", "no_such_module")
    ray_room.check_room(load(tmp_path, with_thinker(executor="host"), devices=0).pipeline)


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


def test_without_keys_a_job_makes_its_own() -> None:
    first, second = ray_job.key_files(None), ray_job.key_files(None)
    assert sorted(first) == ["cluster.key", "cluster.key_secret"]
    assert first["cluster.key_secret"] != second["cluster.key_secret"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--node-rank", "1"], "--node-rank is set by this job itself"),
        (["--master-addr", "10.0.0.1"], "--master-addr is set by this job itself"),
        (["--set", "stages.talker.node=2"], "there is no node 2"),
        (["--keys", "/nowhere"], "/nowhere"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_ray_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    config = write(tmp_path, spread_chain())
    assert ray_job.main([str(config), "--nnodes", "2", *arguments]) == 2
    assert said in capsys.readouterr().err


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


def test_check_describes_the_pipeline_and_asks_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ray_job.main([str(write(tmp_path, spread_chain())), "--nnodes", "2", "--check"]) == 0
    assert "talker: 1 x echo on CPU of node 1" in capsys.readouterr().out
