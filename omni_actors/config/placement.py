"""GPUs of this host, of stages and of their replicas, the shares of GPU memory, and the nodes on which replicas run."""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from omni_actors.config.checkpoint import MODEL_KINDS
from omni_actors.config.schema import DEFAULT_GPU_MEMORY_UTILIZATION, PipelineConfig, StageConfig, StageKind
from omni_actors.errors import ConfigError

DEVICE_FILES = Path("/dev")
MOST_GPUS = 1024  # of a host: above the highest number that `devices` can name
COMPUTING_KINDS = (
    StageKind.AUTOREGRESSIVE,
    StageKind.ENCODER,
    StageKind.DIFFUSION,
    StageKind.DIFFUSERS,
    StageKind.CUSTOM,
)  # those that may use a GPU


def memory_plan(pipeline: PipelineConfig, devices: int) -> dict[tuple[int, int], list[tuple[str, float]]]:
    """Map each (node, GPU) to [(stage, share of the memory)], for stages that vLLM sizes by `gpu_memory_utilization`.

    `devices` is the number of this host's GPUs. Other nodes are assumed to have GPUs if this one has any.
    """
    plan: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for stage in pipeline.stages:
        share = memory_share(stage)
        if share is None:
            continue
        replicas = collections.Counter(
            (stage.node_of(index), device)
            for index, taken in enumerate(devices_by_replica(stage, devices))
            for device in taken
        )
        for place, count in replicas.items():
            plan.setdefault(place, []).append((stage.name, share * count))
    return plan


def memory_share(stage: StageConfig) -> float | None:
    """Return the share of a GPU's memory that a replica takes; `None` if vLLM does not size the stage by a share."""
    if stage.kind not in (StageKind.AUTOREGRESSIVE, StageKind.ENCODER) or "kv_cache_memory_bytes" in stage.engine:
        return None
    share = stage.engine.get("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        where = f"stages.{stage.name}.engine.gpu_memory_utilization"
        raise ConfigError(f"{where} must be a number above 0 and up to 1, got {share!r}.")
    return float(share)


def gpus_of_replica(stage: StageConfig) -> int:
    """Return how many GPUs a replica takes. Raises `ConfigError` if no host has as many."""
    sizes = {
        f"engine.{how}_parallel_size": stage.engine.get(f"{how}_parallel_size", 1) for how in ("tensor", "pipeline")
    }
    for key, size in sizes.items():
        if isinstance(size, int) and size > MOST_GPUS:
            raise ConfigError(f"stages.{stage.name}.{key} is {size}; at most {MOST_GPUS} GPUs are possible.")
    # The engine reports sizes that are otherwise wrong.
    return math.prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes.values())


def replica_devices(stage: StageConfig, index: int, devices: int) -> list[int]:
    """Return the GPUs of one replica as configured: the replicas of a node take the stage's GPUs in turn."""
    return slot_devices(stage, slot_of(stage, index), devices)


def devices_by_replica(stage: StageConfig, devices: int) -> list[list[int]]:
    """Return `replica_devices` of all replicas; there may be thousands."""
    by_slot = devices_by_slot(stage, devices)
    return [by_slot[slot_of(stage, index) % len(by_slot)] for index in range(stage.processes)]


def slot_of(stage: StageConfig, index: int) -> int:
    """Return how many replicas of the stage are before this one on its node, as configured."""
    return index // len(stage.nodes)


def slot_devices(stage: StageConfig, slot: int, devices: int) -> list[int]:
    """Return the GPUs of a slot of a node: as many of the stage's as a replica needs, from the first ones again."""
    by_slot = devices_by_slot(stage, devices)
    return by_slot[slot % len(by_slot)]


def devices_by_slot(stage: StageConfig, devices: int) -> list[list[int]]:
    """The GPUs of each slot of a node: of the replicas that fit there before two of them share a GPU."""
    held, size = stage_devices(stage, devices), gpus_of_replica(stage)
    return [held[first : first + size] for first in range(0, max(1, len(held) // size) * size, size)]


def stage_devices(stage: StageConfig, devices: int) -> list[int]:
    """Return the GPUs of a stage: those configured, else the first ones, or none if the host has or it needs none.

    Those of `executor: ray` are Ray's to choose, on any host.
    """
    if stage.executor == "ray":
        return []
    if stage.devices is not None:
        return stage.devices
    needs_device = stage.kind in COMPUTING_KINDS and stage.kind is not StageKind.CUSTOM
    return list(range(gpus_of_replica(stage))) if devices and needs_device else []


def on_cpu(pipeline: PipelineConfig, devices: int) -> bool:
    """Whether stages that would take a GPU compute without one. `devices` is the number of GPUs of all hosts."""
    return not devices and any(stage_devices(stage, 1) for stage in pipeline.stages)


def shared_devices(pipeline: PipelineConfig, rank: int, devices: int) -> dict[int, list[tuple[str, int]]]:
    """Map each GPU of a node on which several replicas compute to these replicas, (stage, index), in pipeline order.

    Args:
        devices: number of GPUs of that node.
    """
    users: dict[int, list[tuple[str, int]]] = {}
    for stage in pipeline.stages:
        if stage.kind not in COMPUTING_KINDS:
            continue
        for index, taken in enumerate(devices_by_replica(stage, devices)):
            if rank == stage.node_of(index):
                for device in taken:
                    users.setdefault(device, []).append((stage.name, index))
    return {device: replicas for device, replicas in sorted(users.items()) if len(replicas) > 1}


def node_devices(devices: int) -> str:
    """Say how many GPUs a node has."""
    return {0: "no GPU", 1: "1 GPU"}.get(devices, f"{devices} GPUs")


def host_devices() -> int:
    """Count the NVIDIA GPUs that this process may use, without initialising CUDA."""
    present = len(list(DEVICE_FILES.glob("nvidia[0-9]*")))
    visible = _visible()
    return present if visible is None else min(present, len(visible))


def visible_devices(devices: Sequence[int]) -> list[str]:
    """Return GPUs as `CUDA_VISIBLE_DEVICES` must name them for a child process.

    `devices` are counted among the GPUs that this process may use. If a scheduler such as Slurm has left us only the
    GPUs 4 and 5, our GPU 0 is 4.
    """
    visible = _visible()
    return [str(device) if visible is None else visible[device] for device in devices]


def _visible() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names, numbers or UUIDs; `None` if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = (name.strip() for name in value.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA does


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


def threads_of(stage: StageConfig, placed: bool, replicas: int, cores: int) -> int:
    """Return the number of CPU threads that torch may use in a replica of a stage; 0 for as many as it likes.

    With a GPU the CPU only copies, and a prompt stage computes the features of some seconds of sound: threads that wait
    for each other take longer than that itself. Other stages share the cores.

    Args:
        placed: whether the replica has a GPU.
        replicas: those of the host that have a model.
    """
    if stage.kind not in MODEL_KINDS:
        return 0
    is_light = placed or stage.executor == "ray" or stage.kind is StageKind.PROMPT
    return 1 if is_light else max(1, cores // replicas)
