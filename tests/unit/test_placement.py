"""Which node and GPU runs what, and what shares a GPU under MPS: YAML, command line, environment, SLURM."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from omni_actors import config, launch
from omni_actors.config import placement
from omni_actors.config.placement import devices_by_replica, shared_devices, threads_of
from omni_actors.config.schema import StageConfig, StageKind
from omni_actors.coordinator.core.replicas import ReplicaTable
from omni_actors.errors import ConfigError
from omni_actors.host import addresses
from omni_actors.host.addresses import resolve, resolve_eventually, source_address
from omni_actors.launcher.mps import NO_MPS, MpsClients, answers, daemon_gpus
from tests.support.builders import chain, load, write
from tests.support.other_user import AS_ROOT, NOBODY, python

OF_THREE_GPUS = {"kind": "autoregressive", "devices": [0, 1, 2]}


def spread(nnodes: int = 2, **stages: Any) -> dict[str, Any]:
    data = {**chain(), "cluster": {"nnodes": nnodes}}
    for stage in data["stages"]:
        stage.update(stages.get(stage["name"], {}))
    return data


def test_replicas_take_the_nodes_one_after_the_other(tmp_path: Path) -> None:
    data = spread(3, talker={"replicas": 3, "node": [1, 2]}, code2wav={"node": 2})
    pipeline = load(tmp_path, data).pipeline
    assert placement.replicas_of(pipeline, 0) == [("prompt", 0), ("thinker", 0)]
    assert placement.replicas_of(pipeline, 1) == [("talker", 0), ("talker", 2)]
    assert placement.replicas_of(pipeline, 2) == [("talker", 1), ("code2wav", 0)]
    assert placement.ranks(pipeline) == [0, 1, 2]
    assert placement.spans_hosts(pipeline)
    assert placement.spans_hosts(load(tmp_path, spread(3)).pipeline), "others may join"
    assert not placement.spans_hosts(load(tmp_path, spread(1)).pipeline)


def test_senders_use_the_network_only_to_other_nodes() -> None:
    table = ReplicaTable()
    talker = table.add("talker", 0, 1, node=1)
    talker.inbox, talker.remote = "ipc:///talker", "tcp://10.0.0.2:5"
    assert [table.peers(("talker",), node)[0].inbox for node in (0, 1)] == ["tcp://10.0.0.2:5", "ipc:///talker"]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"talker": {"node": 2}}, r"stages\.talker\.node: there is no node 2; cluster\.nnodes is 2"),
        ({"talker": {"node": [0, 1]}}, r"names 2 nodes, but there are 1 replicas"),
        ({"talker": {"node": [1, 1], "replicas": 2}}, "names a node twice"),
        ({"talker": {"node": []}}, "node"),
        *(
            (
                {"talker": {**OF_THREE_GPUS, "engine": {f"{how}_parallel_size": 2}}},
                "names 3 GPUs, but a replica takes 2",
            )
            for how in ("tensor", "pipeline")
        ),
    ],
)
def test_wrong_placement(tmp_path: Path, stages: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, spread(2, **stages), devices=4)


def test_nodes_agree_on_the_pipeline_and_not_on_what_is_their_own(tmp_path: Path) -> None:
    def digest(**values: str) -> str:
        return load(tmp_path, spread(2), {key.replace("__", "."): v for key, v in values.items()}).pipeline.digest()

    first = digest()
    assert digest(cluster__node_rank="1", cluster__node_addr="10.0.0.2", coordinator__run_dir="/x") == first
    assert digest(cluster__nnodes="3") == first, "a node may join that the others were not told of"


def shown(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[str, str]]:
    """What --check says of the cluster: key -> (value, source)."""
    assert launch.main([str(path), "--check", *arguments]) == launch.EXIT_OK
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line.startswith("  cluster.")]
    return {key.removeprefix("cluster."): (value.strip('"'), source.strip("[]")) for key, value, source in lines}


def test_each_value_has_one_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, {**chain(), "cluster": {"nnodes": 2, "master_port": 1234, "master_addr": "from.yaml"}})
    assert shown(path, capsys)["master_addr"] == ("from.yaml", "yaml pipeline.yaml")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in (("SLURM_NNODES", "4"), ("SLURM_NODEID", "3"), ("SLURM_JOB_NODELIST", "n[3-4]")):
        monkeypatch.setenv(name, value)
    seen = shown(path, capsys)
    assert seen["nnodes"] == ("4", "SLURM SLURM_NNODES")
    assert seen["node_rank"] == ("3", "SLURM SLURM_NODEID")
    assert seen["master_addr"] == ("n3", "SLURM SLURM_JOB_NODELIST")
    assert seen["master_port"] == ("1234", "yaml pipeline.yaml")
    monkeypatch.setenv("OMNI_ACTORS_NODE_RANK", "2")
    monkeypatch.setenv("OMNI_ACTORS_MASTER_ADDR", "from.env")
    seen = shown(path, capsys)
    assert seen["node_rank"] == ("2", "env OMNI_ACTORS_NODE_RANK")
    assert seen["master_addr"] == ("from.env", "env OMNI_ACTORS_MASTER_ADDR")
    arguments = ["--nnodes", "5", "--node-rank", "1", "--master-addr", "h", "--master-port", "9", "--node-addr", "a"]
    values = {key: value for key, (value, source) in shown(path, capsys, *arguments).items() if "command" in source}
    assert values == {"nnodes": "5", "node_rank": "1", "master_addr": "h", "master_port": "9", "node_addr": "a"}


def test_addresses() -> None:
    assert resolve("localhost") == "127.0.0.1"
    assert resolve("127.0.0.3") == "127.0.0.3"
    assert source_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no IPv4 address"):
        resolve("nowhere.invalid")


async def test_a_name_may_appear_late(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[str] = []
    words: list[str] = []

    def resolving(host: str) -> str:
        if not words:
            raise ConfigError(f"no one knows {host}")
        return known[0]

    monkeypatch.setattr(addresses, "resolve", resolving)
    known.append("10.0.0.1")
    assert await resolve_eventually("pod-0", 5, words.append) == "10.0.0.1"
    assert words[0].startswith("no one knows pod-0")
    words.clear()
    with pytest.raises(ConfigError):
        await resolve_eventually("pod-0", -1, words.append)


@pytest.mark.parametrize(
    ("replicas", "devices", "size", "nodes", "expected"),
    [
        (1, [0, 1], 1, 0, [[0]]),
        (2, [0, 1], 1, 0, [[0], [1]]),
        (3, [0, 1], 1, 0, [[0], [1], [0]]),
        (2, [0], 1, 0, [[0], [0]]),
        (1, [2, 3], 2, 0, [[2, 3]]),
        (2, [0, 1, 2, 3], 2, 0, [[0, 1], [2, 3]]),
        (4, [0, 1], 1, [0, 1], [[0], [0], [1], [1]]),  # each node has a GPU 0 and a GPU 1
        (2, None, 1, 0, [[0], [0]]),
    ],
)
def test_replicas_of_a_node_take_its_devices_one_after_the_other(
    tmp_path: Path, replicas: int, devices: list[int] | None, size: int, nodes: Any, expected: list[list[int]]
) -> None:
    stage = {
        "kind": "autoregressive",
        "devices": devices,
        "replicas": replicas,
        "node": nodes,
        "engine": {"gpu_memory_utilization": 0.3, "tensor_parallel_size": size},
    }
    pipeline = load(tmp_path, spread(2, talker=stage), devices=4).pipeline
    talker = pipeline.stage("talker")
    assert [config.replica_devices(talker, index, 4) for index in range(replicas)] == expected
    assert [config.replica_devices(talker, index, 0) for index in range(replicas)] == (
        expected if devices else [[]] * replicas
    )
    assert devices_by_replica(talker, 4) == expected
    shares = config.memory_plan(pipeline, 4)
    assert sum(share for place in shares.values() for name, share in place if name == "talker") == pytest.approx(
        0.3 * replicas * size
    )


@pytest.mark.parametrize(
    ("stage", "placed", "threads"),
    [
        (StageConfig("it", StageKind.PROMPT), False, 1),
        (StageConfig("it", StageKind.AUTOREGRESSIVE), True, 1),
        (StageConfig("it", StageKind.AUTOREGRESSIVE), False, 5),
        (StageConfig("it", StageKind.ECHO), False, 0),
    ],
)
def test_stages_share_the_cores_unless_threads_would_wait_for_each_other(
    stage: StageConfig, placed: bool, threads: int
) -> None:
    assert threads_of(stage, placed, replicas=3, cores=16) == threads


KINDS = {"thinker": "autoregressive", "talker": "autoregressive", "code2wav": "diffusion"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMNI_ACTORS_MPS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def models(**stages: dict[str, Any]) -> dict[str, Any]:
    """The chain with models that fit on one GPU, and further fields by stage."""
    data = chain()
    for stage in data["stages"]:
        stage["kind"] = KINDS.get(stage["name"], "prompt")
        if stage["kind"] == "autoregressive":
            stage["engine"] = {"gpu_memory_utilization": 0.2}
        stage.update(stages.get(stage["name"], {}))
    return data


def shared(folder: Path, data: dict[str, Any], devices: int = 2, rank: int = 0) -> dict[int, list[tuple[str, int]]]:
    return shared_devices(load(folder, data, devices=devices).pipeline, rank, devices)


def test_stages_on_one_gpu_share_it_and_what_computes_alone_or_on_none_shares_nothing(tmp_path: Path) -> None:
    assert shared(tmp_path, models()) == {0: [("thinker", 0), ("talker", 0), ("code2wav", 0)]}
    assert daemon_gpus(load(tmp_path, models(), devices=2).pipeline, 2) == [0]
    assert shared(tmp_path, models(), devices=0) == {}
    apart = models(talker={"devices": [1]}, code2wav={"devices": [2]})
    assert shared(tmp_path, apart, devices=3) == {}
    echo = chain()
    for stage in echo["stages"]:
        stage["devices"] = [0]
    assert shared(tmp_path, echo) == {}, "echo stages never touch it"
    only_one = models(code2wav={"devices": [1]}, talker={"kind": "echo", "devices": [0], "engine": {}})
    only_one["stages"][0]["devices"] = [0]  # the prompt stage computes on the CPU
    assert shared(tmp_path, only_one) == {}


LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@AS_ROOT
@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_daemon_of_another_user_is_not_used(short_path: Path, user: int) -> None:
    short_path.chmod(0o777)
    command = [python(), "-S", "-c", LISTENER, str(short_path / "control")]
    with subprocess.Popen(command, user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout.readline() == b"listens\n"
        assert answers(str(short_path)) is (user == 0)
        daemon.communicate()


@pytest.mark.parametrize(
    ("there", "most", "percent"), [(132, 32, "25"), (132, 64, "49"), (114, 32, "29"), (32, 32, None)]
)
def test_a_stage_gets_the_part_of_the_gpu_that_holds_its_multiprocessors(
    there: int, most: int, percent: str | None
) -> None:
    expected = {} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent}
    assert MpsClients("", {}, there).apply(["0"], {}, most) == (["0"], expected), "of another's daemon"
    if percent is not None:
        assert int(there * int(percent) / 100) // 2 * 2 == most, "as the driver rounds it"


def test_a_part_is_given_to_autoregressive_stages_on_hosts_with_mps_that_name_none(tmp_path: Path) -> None:
    own = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert MpsClients("", {}, 132).apply(["0"], own, 32) == (["0"], own)
    assert MpsClients("", {}, 132).apply(["0"], {}) == (["0"], {})
    assert MpsClients("", {}, 132).apply([], {}, 32) == ([], {}), "on no GPU"
    assert NO_MPS.apply(["0"], {}, 32) == (["0"], {})
    assert load(tmp_path, models(talker={"multiprocessors": 32})).pipeline.stage("talker").multiprocessors == 32
    with pytest.raises(ConfigError, match=r"code2wav\.multiprocessors does not apply to a stage of kind diffusion"):
        load(tmp_path, models(code2wav={"multiprocessors": 32}))


def test_it_is_switched_off_in_the_yaml_the_environment_or_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, mode in (({}, "auto"), ({"mps": False}, "off"), ({"mps": "off"}, "off")):  # YAML reads off as False
        assert load(tmp_path, {**chain(), **given}).pipeline.mps == mode
    monkeypatch.setenv("OMNI_ACTORS_MPS", "off")
    off, auto = (load(tmp_path, chain(), given).pipeline for given in (None, {"mps": "auto"}))
    assert (off.mps, auto.mps) == ("off", "auto")
    assert auto.digest() == off.digest(), "each host may choose"
    for wrong in ("on", True, 1):
        with pytest.raises(ConfigError, match="mps"):
            load(tmp_path, chain(), {"mps": str(wrong)})
