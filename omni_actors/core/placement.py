"""Which node runs which replica."""

from __future__ import annotations

from omni_actors.config import PipelineConfig, StageConfig


def node_of(stage: StageConfig, index: int) -> int:
    """The rank of the node on which a replica runs."""
    return 0


def replicas_of(pipeline: PipelineConfig, rank: int) -> list[tuple[str, int]]:
    """(stage, replica) of all that run on one node, in order of the pipeline."""
    return [
        (stage.name, index)
        for stage in pipeline.stages
        for index in range(stage.replicas)
        if node_of(stage, index) == rank
    ]


def ranks(pipeline: PipelineConfig) -> list[int]:
    """All nodes that run something, and node 0, which runs the coordinator."""
    used = {node_of(stage, index) for stage in pipeline.stages for index in range(stage.replicas)}
    return sorted(used | {0})
