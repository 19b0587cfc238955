"""Small pipelines and messages for unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from omni_actors import config
from omni_actors.config import PipelineConfig
from omni_actors.protocol.fields import Header, ReplicaId, pack_token_ids
from omni_actors.protocol.messages import StageDone, StageUsage, Submit
from omni_actors.protocol.payloads import Prompt

CHAIN: dict[str, Any] = {
    "name": "test",
    "model": "echo",
    "stages": [
        {"name": "prompt", "kind": "echo"},
        {"name": "thinker", "kind": "echo", "inputs": {"from": "prompt"}, "outputs": ["text"]},
        {"name": "talker", "kind": "echo", "inputs": {"from": "thinker"}},
        {"name": "code2wav", "kind": "echo", "inputs": {"from": "talker"}, "outputs": ["audio"]},
    ],
}


def chain() -> dict[str, Any]:
    """A fresh copy of the echo chain's YAML data, to be changed by a test."""
    return yaml.safe_load(yaml.safe_dump(CHAIN))


def flow_chain(flow: dict[str, Any], **engines: dict[str, Any]) -> dict[str, Any]:
    """The echo chain with these settings of flow control and options of engines, by stage."""
    made = chain()
    for stage in made["stages"]:
        stage["engine"] = engines.get(stage["name"], {})
    made["coordinator"] = {"heartbeat_interval": 0.05, "max_in_flight": 10_000}
    made["flow"] = {"arena_bytes": 16 << 20, **flow}
    return made


def write(folder: Path, data: Any) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return path


def load(folder: Path, data: Any, overrides: dict[str, str] | None = None, devices: int = 0) -> config.LoadedConfig:
    return config.load(write(folder, data), overrides, devices=devices)


def pipeline(**coordinator: Any) -> PipelineConfig:
    """The echo chain, checked by msgspec only."""
    return msgspec.convert({**chain(), "coordinator": coordinator}, PipelineConfig)


def submit(*modalities: str, **fields: Any) -> Submit:
    fields.setdefault("prompt", Prompt(token_ids=pack_token_ids([1, 2, 3])))
    fields.setdefault("seed", 77)
    return Submit(modalities=modalities or ("text", "audio"), **fields)


def header_from(replica_id: ReplicaId, request_id: str, seq: int = 0, attempt: int = 0) -> Header:
    return Header("", request_id, replica_id.stage, replica_id.replica, replica_id.epoch, attempt, seq)


def done(reason: str = "stop") -> StageDone:
    return StageDone(usage=msgspec.convert({"finish_reason": reason}, StageUsage))
