"""Which node runs which replica, and what of it must be reached from other nodes."""

from __future__ import annotations

from omni_actors.config import PipelineConfig, replica_devices


def replicas_of(pipeline: PipelineConfig, rank: int) -> list[tuple[str, int]]:
    """(stage, replica) of all that run on one node, in order of the pipeline."""
    return [
        (stage.name, index)
        for stage in pipeline.stages
        for index in range(stage.replicas)
        if stage.node_of(index) == rank
    ]


def ranks(pipeline: PipelineConfig) -> list[int]:
    """All nodes that run something, and node 0, which runs the coordinator."""
    return sorted({rank for stage in pipeline.stages for rank in stage.nodes} | {0})


def spans_hosts(pipeline: PipelineConfig) -> bool:
    """Whether anything runs on another host than the coordinator."""
    return len(ranks(pipeline)) > 1


def is_reached_from_afar(pipeline: PipelineConfig, stage: str, index: int) -> bool:
    """Whether a replica takes input or credit from other nodes, the coordinator's among them."""
    config = pipeline.stage(stage)
    neighbours = {rank for name in pipeline.downstream(stage) for rank in pipeline.stage(name).nodes}
    neighbours |= {rank for name in config.source_names for rank in pipeline.stage(name).nodes}
    return bool((neighbours | {0}) - {config.node_of(index)})


def goes_first(pipeline: PipelineConfig, stage: str, index: int, devices: int) -> list[tuple[str, int]]:
    """Replicas to which one gives way (`yields_to`): those that share a device with it, or its host's processor.

    Args:
        devices: of this host, where the replica runs.
    """
    config = pipeline.stage(stage)
    own = replica_devices(config, index, devices)

    def shares(other: str, number: int) -> bool:
        theirs = replica_devices(pipeline.stage(other), number, devices)
        return bool(set(own) & set(theirs)) or not (own or theirs)

    here = replicas_of(pipeline, config.node_of(index))
    return [(other, number) for other, number in here if other in config.yields_to and shares(other, number)]


def threads_of(has_device: bool, replicas: int, cores: int) -> int:
    """Threads that torch may use on the processor in one of the `replicas` with a model on a host.

    Beside a device the processor only copies: threads that wait for each other take longer than the copy, the more so
    as each stage has them. Without one, the replicas share the cores.
    """
    return 1 if has_device else max(1, cores // replicas)
