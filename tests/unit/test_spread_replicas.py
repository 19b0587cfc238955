"""Replicas that are spread over several hosts: their placement, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_actors import config, launch
from omni_actors.config import placement
from omni_actors.config.devices import devices_by_replica, shared_devices
from omni_actors.config.spread import check_interface, meeting_port
from omni_actors.errors import ConfigError
from omni_actors.host.addresses import interface_address, interface_of
from tests.support.builders import chain, load, write


def spread(cluster: dict[str, Any] | None = None, **thinker: Any) -> dict[str, Any]:
    """The chain on three hosts, its thinker spread over the first two."""
    data = {**chain(), "cluster": {"nnodes": 3, **(cluster or {})}}
    data["stages"][1].update({"kind": "autoregressive", "nodes": [0, 1], **thinker})
    return data


def sizes(tensor: int = 2, pipeline: int = 1, **engine: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **engine}


def test_every_host_of_a_spread_replica_runs_it_and_the_first_one_is_reached(tmp_path: Path) -> None:
    pipeline = load(tmp_path, spread(nodes=[2, 1], replicas=2, engine=sizes())).pipeline
    thinker = pipeline.stage("thinker")
    assert thinker.hosts_of(1) == (2, 1)
    assert thinker.node_of(1) == 2
    assert placement.ranks(pipeline) == [0, 1, 2]
    assert placement.replicas_of(pipeline, 1) == placement.replicas_of(pipeline, 2) == [("thinker", 0), ("thinker", 1)]


def test_a_spread_replica_takes_its_share_of_gpus_on_every_host(tmp_path: Path) -> None:
    engine = sizes(2, 2, gpu_memory_utilization=0.6)
    pipeline = load(tmp_path, spread(replicas=2, devices=[0, 1, 2, 3], engine=engine), devices=4).pipeline
    thinker = pipeline.stage("thinker")
    assert [config.replica_devices(thinker, index, 4) for index in range(2)] == [[0, 1], [2, 3]]
    assert devices_by_replica(thinker, 4) == [[0, 1], [2, 3]]
    plan = config.memory_plan(pipeline, 4)
    assert sorted(plan) == [(rank, device) for rank in (0, 1) for device in range(4)]
    assert all(shares == [("thinker", 0.6)] for shares in plan.values())
    shared = load(
        tmp_path, spread(replicas=2, devices=[0, 1], engine={**engine, "gpu_memory_utilization": 0.4}), None, 4
    )
    both = [("thinker", 0), ("thinker", 1)]
    assert shared_devices(shared.pipeline, 1, 4) == {0: both, 1: both}


def test_each_spread_replica_has_its_port(tmp_path: Path) -> None:
    data = spread({"ranks_port": 4000}, replicas=2, engine=sizes())
    data["stages"][2].update({"nodes": [1, 2]})
    pipeline = load(tmp_path, data).pipeline
    ports = [meeting_port(pipeline, *replica) for replica in (("thinker", 0), ("thinker", 1), ("talker", 0))]
    assert ports == [4000, 4001, 4002]


def test_the_check_shows_where_ranks_run_and_meet(tmp_path: Path) -> None:
    loaded = load(tmp_path, spread(nodes=[1, 2], replicas=2, engine=sizes(2, 2)))
    line = next(line for line in config.describe(loaded, 0).splitlines() if line.startswith("  thinker:"))
    assert "on CPU of node 1, 2" in line
    assert "2 of its 4 ranks on each; they meet at ports 29700 to 29701 of node 1" in line


@pytest.mark.parametrize(
    ("cluster", "thinker", "match"),
    [
        ({}, {"engine": sizes(3)}, "names 2 nodes, but .* is 3, which 2 does not divide"),
        ({}, {"engine": sizes(1)}, "names 2 nodes, but .* is 1, which 2 does not divide"),
        ({}, {"engine": sizes(), "nodes": [0, 3]}, r"thinker\.nodes: there is no node 3; cluster.nnodes is 3"),
        ({}, {"engine": sizes(), "nodes": [1, 1]}, r"thinker\.nodes names a node twice"),
        ({}, {"engine": sizes(), "nodes": [1]}, r"thinker\.nodes"),
        ({}, {"engine": sizes(), "node": 0}, "both node and nodes"),
        ({}, {"engine": sizes(), "devices": [0, 1, 2], "replicas": 2, "nodes": [1, 2]}, None),
        ({}, {"engine": sizes(2, 2)}, "this host has no GPU, and vLLM runs one rank .* on a host's CPU, not 2"),
        ({}, {"engine": sizes(2, 2), "nodes": [1, 2]}, None),
        ({}, {"kind": "diffusion"}, "a stage of kind diffusion cannot be spread"),
        ({"ranks_port": 65535}, {"engine": sizes(), "replicas": 2}, "need the ports 65535 to 65536"),
        ({"ranks_port": 29599}, {"engine": sizes(), "replicas": 2}, "at the ports 29599 to 29600, and cluster.master"),
        ({"node_addr": "10.0.0.1"}, {"engine": sizes()}, "talk over 10.0.0.1 without encryption and without keys"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    tmp_path: Path, cluster: dict[str, Any], thinker: dict[str, Any], match: str | None
) -> None:
    data = spread(cluster, **thinker)
    if match is None:  # of the devices only the hosts that run ranks can tell
        load(tmp_path, data)
        return
    with pytest.raises(ConfigError, match=match):
        load(tmp_path, data)


def test_devices_are_those_of_each_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names 3 GPUs, but a replica takes 2 of each of its nodes"):
        load(tmp_path, spread(devices=[0, 1, 2], engine=sizes(4)), devices=4)


def test_ranks_leave_the_host_only_where_the_yaml_accepts_that_they_are_not_encrypted(tmp_path: Path) -> None:
    cluster = {"master_addr": "10.0.0.1"}
    data = {**spread(cluster, engine=sizes()), "coordinator": {"keys_dir": str(tmp_path)}}
    with pytest.raises(ConfigError, match="can run code on these hosts") as refused:
        load(tmp_path, data)
    assert "cluster.allow_unencrypted_ranks: true" in refused.value.hint
    data["cluster"]["allow_unencrypted_ranks"] = True
    load(tmp_path, data)
    data["stages"][1]["nodes"] = None
    data["stages"][1]["node"] = 1
    data["cluster"]["allow_unencrypted_ranks"] = False
    load(tmp_path, data)  # encrypted, as every other link


def test_an_interface_must_exist_and_have_an_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, {**chain(), "cluster": {"nnodes": 2}})
    assert launch.main([str(path), "--check", "--interface", "nosuch0"]) == launch.EXIT_USAGE
    assert "this host has no network interface 'nosuch0'; it has" in capsys.readouterr().err
    assert interface_address("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == interface_of("127.0.0.7") == "lo"
    with pytest.raises(ConfigError, match=r"No network interface of this host has the address 203\.0\.113\.9"):
        interface_of("203.0.113.9")
    interfaces = {"down0": [], "lan0": [address("10.9.9.9")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    with pytest.raises(ConfigError, match="down0 has no IPv4 address"):
        interface_address("down0")
    pipeline = load(tmp_path, spread({"interface": "lan0"}, engine=sizes())).pipeline
    with pytest.raises(ConfigError, match=r"talk over 10\.9\.9\.9 without encryption"):
        check_interface(pipeline)
    elsewhere = load(tmp_path, spread({"interface": "lan0"}, engine=sizes(), nodes=[1, 2])).pipeline
    check_interface(elsewhere)  # none of its ranks runs here


def address(text: str) -> Any:
    loopback = next(item for item in psutil.net_if_addrs()["lo"] if item.address == "127.0.0.1")
    return loopback._replace(address=text)
