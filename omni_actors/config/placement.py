"""Places replicas on nodes, as configured."""

from __future__ import annotations

from omni_actors.config import PipelineConfig
from omni_actors.config.checkpoint import MODEL_KINDS


def replicas_of(pipeline: PipelineConfig, rank: int) -> list[tuple[str, int]]:
    """List the (stage, replica) that have a process on one node, in pipeline order."""
    return [
        (stage.name, index)
        for stage in pipeline.stages
        for index in range(stage.processes)
        if rank == stage.node_of(index)
    ]


def runs_models(pipeline: PipelineConfig, rank: int) -> bool:
    """Whether one node runs a stage whose engine uses vLLM, or may come to: a node on which nothing is placed yet."""
    placed = {name for name, _ in replicas_of(pipeline, rank)} or {stage.name for stage in pipeline.stages}
    return any(pipeline.stage(name).kind in MODEL_KINDS for name in placed)


def ranks(pipeline: PipelineConfig) -> list[int]:
    """List the nodes that run something, including node 0, which runs the coordinator."""
    return sorted({rank for stage in pipeline.stages for rank in stage.nodes} | {0})


def spans_hosts(pipeline: PipelineConfig) -> bool:
    """Whether anything may run on a host other than the coordinator's."""
    return pipeline.cluster.nnodes > 1


def threads_of(has_device: bool, replicas: int, cores: int) -> int:
    """Return the number of CPU threads that torch may use in one of a host's `replicas` with a model.

    With a GPU the CPU only copies, and threads that wait for each other take longer than the copy itself. Without one,
    the replicas share the cores.
    """
    return 1 if has_device else max(1, cores // replicas)
