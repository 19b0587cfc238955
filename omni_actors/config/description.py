"""Describes the effective configuration as text, for `--check`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from omni_actors.config.checks import device_name
from omni_actors.config.devices import devices_by_replica, gpus_of_replica, host_devices, memory_plan, shared_devices
from omni_actors.config.loading import LoadedConfig, flatten
from omni_actors.config.schema import Executor


def describe(loaded: LoadedConfig, devices: int | None = None) -> str:
    """List the effective configuration, one value per line with its source, then placement and memory plan."""
    devices = host_devices() if devices is None else devices
    pipeline = loaded.pipeline
    flat = {
        key: value
        for key, value in flatten(msgspec.to_builtins(pipeline)).items()
        if value is not None or key in loaded.sources
    }
    width = max(len(key) for key in flat)
    shown = {key: _show(value) for key, value in flat.items()}
    value_width = min(60, max(len(text) for text in shown.values()))
    lines = [f"pipeline {pipeline.name} ({loaded.path}), configuration {pipeline.digest()}"]
    lines += [
        f"  {key:<{width}}  {text:<{value_width}}  [{_source_of(key, loaded.sources)}]" for key, text in shown.items()
    ]
    lines.append("placement")
    for stage in pipeline.stages:
        taken = set(itertools.chain.from_iterable(devices_by_replica(stage, devices)))
        where = ", ".join(f"GPU {device}" for device in sorted(taken)) or "CPU"
        if stage.executor is Executor.RAY:
            where = f"{gpus_of_replica(stage)} x GPU of the Ray cluster, each with its process on a CPU"
        if pipeline.cluster.nnodes > 1:
            where += f" of node {', '.join(str(rank) for rank in stage.nodes)}"
        spares = f" and {stage.spares} spare{'s' if stage.spares > 1 else ''}" if stage.spares else ""
        lines.append(
            f"  {stage.name}: {stage.replicas} x {stage.kind}{spares} on {where}, takes input from "
            f"{', '.join(stage.source_names) or 'the client'}"
        )
    cluster = pipeline.cluster
    if cluster.nnodes > 1:
        master = f"tcp://{cluster.master_addr}:{cluster.master_port}"
        lines.append(f"node {cluster.node_rank} of {cluster.nnodes}; the coordinator listens for nodes at {master}")
    for (rank, device), shares in memory_plan(pipeline, devices).items():
        total = sum(share for _, share in shares)
        name = device_name(pipeline, rank, device)
        lines.append(f"memory of {name}: " + " + ".join(f"{n} {s:g}" for n, s in shares) + f" = {total:.2f}")
    for device, replicas in shared_devices(pipeline, cluster.node_rank, devices).items():
        how = "under CUDA MPS, where that works" if pipeline.mps == "auto" else "in turns (mps: off)"
        lines.append(f"GPU {device} is shared, {how}: {', '.join(f'{stage}/{index}' for stage, index in replicas)}")
    return "\n".join(lines)


def _show(value: Any) -> str:
    return str(msgspec.json.encode(value).decode())


def _source_of(key: str, sources: Mapping[str, str]) -> str:
    """Return the source of a key, or of the mapping that holds it."""
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return "default"
