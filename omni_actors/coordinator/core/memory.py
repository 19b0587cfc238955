"""What the fleet must know after the coordinator was restarted and no node can tell: scale, seats and drains."""

from __future__ import annotations

import collections
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from omni_actors.config import PipelineConfig
from omni_actors.protocol.fields import Count, ReplicaIndex, StageName

VERSION = 1


class RememberedReplica(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica or spare of a pipeline, and what was ordered of its process `spawn_epoch`."""

    stage: StageName
    index: ReplicaIndex
    node: ReplicaIndex
    slot: ReplicaIndex
    spawn_epoch: Count
    spare: bool = False
    joining: bool = False
    drain: bool = False
    restart: bool = False


class FleetMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """All replicas that the stages of a pipeline are to have. `config` is the digest of its configuration."""

    version: int
    config: str
    replicas: Annotated[tuple[RememberedReplica, ...], Meta(max_length=65_536)]


def decode(data: bytes, pipeline: PipelineConfig) -> FleetMemory:
    """Read a memory of this pipeline. Raises `ValueError` with the reason if it is none."""
    try:
        memory = msgspec.json.decode(data, type=FleetMemory)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if memory.version != VERSION:
        raise ValueError(f"it has version {memory.version}, and this coordinator reads {VERSION}")
    if memory.config != pipeline.digest():
        raise ValueError("it belongs to another configuration")
    places = collections.Counter((item.stage, item.index) for item in memory.replicas)
    twice = [f"{stage}/{index}" for (stage, index), count in places.items() if count > 1]
    if twice:
        raise ValueError(f"it has {twice[0]} twice")
    counts = collections.Counter(item.stage for item in memory.replicas if not item.spare)
    unknown = {item.stage for item in memory.replicas} - {stage.name for stage in pipeline.stages}
    if unknown:
        raise ValueError(f"there is no stage {min(unknown)}")
    for stage in pipeline.stages:
        if not counts[stage.name]:
            raise ValueError(f"it has no replica of {stage.name}")
    return memory
