"""Replicas that are spread over several hosts: where their ranks meet, and the checks of their placement."""

from __future__ import annotations

from typing import Any, NamedTuple

from omni_actors.config.devices import gpus_of_replica, stage_devices
from omni_actors.config.schema import PipelineConfig, StageConfig, StageKind
from omni_actors.errors import ConfigError
from omni_actors.host.addresses import interface_address, is_loopback, tcp_port

# An echo stage has no ranks; on its further hosts a process does nothing but live.
SPREADABLE = (StageKind.AUTOREGRESSIVE, StageKind.ENCODER, StageKind.ECHO)


class RankPlan(NamedTuple):
    """One host's part of a replica that is spread over several.

    Args:
        host: its place in the stage's `nodes`. The first one runs the engine core, too; the others only ranks.
        hosts: number of hosts.
        leader: address of the first host.
        port: where all ranks meet there.
        address: address of this host for the others.
        interface: network interface that has it.
    """

    host: int
    hosts: int
    leader: str
    port: int
    address: str
    interface: str

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments for it, by name."""
        return {"nnodes": self.hosts, "node_rank": self.host, "master_addr": self.leader, "master_port": self.port}

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which vLLM, gloo and NCCL listen where the plan says; the system would choose otherwise."""
        return {
            "VLLM_HOST_IP": self.address,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",  # without "=" NCCL takes it for the beginning of a name
        }


def spread_replicas(pipeline: PipelineConfig) -> list[tuple[str, int]]:
    """List the (stage, replica) that are spread over several hosts, in pipeline order."""
    return [
        (stage.name, index) for stage in pipeline.stages if stage.spread is not None for index in range(stage.processes)
    ]


def meeting_port(pipeline: PipelineConfig, stage: str, index: int) -> int:
    """Return the port on its first host at which the ranks of a spread replica meet."""
    return pipeline.cluster.ranks_port + spread_replicas(pipeline).index((stage, index))


def has_ranks_on(pipeline: PipelineConfig, rank: int) -> bool:
    """Whether a node runs ranks of a replica that is spread over several."""
    return any(rank in pipeline.stage(name).nodes for name, _ in spread_replicas(pipeline))


def check_spread(pipeline: PipelineConfig, devices: int) -> None:
    """Raise `ConfigError` for the first thing wrong with replicas that are spread over several hosts.

    Args:
        devices: number of GPUs of this host.
    """
    for stage in pipeline.stages:
        if stage.spread is not None:
            _check_stage(stage, f"stages.{stage.name}")
            if pipeline.cluster.node_rank in stage.nodes and not stage_devices(stage, devices):
                _check_cpu(stage, f"stages.{stage.name}")
    replicas = spread_replicas(pipeline)
    if replicas:
        _check_ports(pipeline, len(replicas))
        check_consent(pipeline, pipeline.cluster.master_addr, pipeline.cluster.node_addr)


def _check_stage(stage: StageConfig, where: str) -> None:
    if stage.node is not None:
        raise ConfigError(
            f"{where} has both node and nodes.",
            hint="`node` places whole replicas, `nodes` spreads each one over several hosts; leave one of them out.",
        )
    if stage.kind not in SPREADABLE:
        raise ConfigError(
            f"{where}.nodes: a stage of kind {stage.kind} cannot be spread over several hosts.",
            hint="Give it a `node`, and replicas instead.",
        )
    if stage.kind is StageKind.ECHO:
        return
    size, hosts = gpus_of_replica(stage), len(stage.nodes)
    if size % hosts:
        raise ConfigError(
            f"{where}.nodes names {hosts} nodes, but engine.tensor_parallel_size times pipeline_parallel_size is "
            f"{size}, which {hosts} does not divide.",
            hint="Every node runs the same number of ranks: change the sizes or the nodes.",
        )


def _check_cpu(stage: StageConfig, where: str) -> None:
    """A rank takes others for neighbours by the number of its host's devices, and a CPU is one."""
    ranks = gpus_of_replica(stage) // len(stage.nodes)
    if stage.kind is not StageKind.ECHO and ranks > 1:
        raise ConfigError(
            f"{where}.nodes: this host has no GPU, and vLLM runs one rank of a replica on a host's CPU, not {ranks}.",
            hint="Make engine.tensor_parallel_size times pipeline_parallel_size the number of nodes, or use GPUs.",
        )


def _check_ports(pipeline: PipelineConfig, count: int) -> None:
    first = pipeline.cluster.ranks_port
    last = first + count - 1
    if last > 65535:
        raise ConfigError(f"cluster.ranks_port: {count} replicas need the ports {first} to {last}; 65535 is the last.")
    listen = tcp_port(pipeline.coordinator.listen)
    for key, port in (("cluster.master_port", pipeline.cluster.master_port), ("coordinator.listen", listen)):
        if port is not None and first <= port <= last:
            raise ConfigError(
                f"cluster.ranks_port: the ranks of {count} replicas meet at the ports {first} to {last}, and {key} "
                f"is {port}.",
                hint="Choose other ports.",
            )


def check_consent(pipeline: PipelineConfig, *addresses: str | None) -> None:
    """Require that the YAML accepts what vLLM's own channels are, if it has ranks that talk off loopback."""
    replicas = spread_replicas(pipeline)
    for address in addresses if replicas and not pipeline.cluster.allow_unencrypted_ranks else ():
        if address is not None and not is_loopback(address):
            raise ConfigError(
                f"stages.{replicas[0][0]}.nodes: the ranks of a replica talk over {address} without encryption "
                "and without keys, and take pickled messages: anyone who can reach their ports can run code on these "
                "hosts.",
                hint="If only trusted hosts can reach them (docs/nodes.md), set cluster.allow_unencrypted_ranks: true.",
            )


def check_interface(pipeline: PipelineConfig) -> None:
    """Check the network interface for ranks, which only its own host knows.

    Raises:
        ConfigError: there is no such interface, or others can reach its ranks and the YAML does not accept that.
    """
    if pipeline.cluster.interface is not None:
        address = interface_address(pipeline.cluster.interface)
        check_consent(pipeline, address if has_ranks_on(pipeline, pipeline.cluster.node_rank) else None)
