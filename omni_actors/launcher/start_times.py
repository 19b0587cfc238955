"""How long pipelines took to start, in a file of the user's cache: what the next start can announce."""

from __future__ import annotations

import contextlib
import hashlib
import os

import msgspec

from omni_actors.config import PipelineConfig
from omni_actors.host.paths import user_cache
from omni_actors.logs import get_logger

logger = get_logger(__name__)

FILE = "start_times.json"
MOST = 100  # pipelines that are remembered


def last(pipeline: PipelineConfig) -> float | None:
    """Seconds until all was ready at the last start of a pipeline; `None` if that is not known."""
    return _read().get(_key(pipeline))


def remember(pipeline: PipelineConfig, seconds: float) -> None:
    """Keep the time for the next start. Without a place to write, the next one announces nothing."""
    path = user_cache() / FILE
    times = _read()
    times.pop(key := _key(pipeline), None)
    times[key] = round(seconds, 1)
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(dict(list(times.items())[-MOST:])))
        os.replace(new, path)
    except OSError as error:
        logger.debug("the time of this start cannot be kept: %s", error)


def _read() -> dict[str, float]:
    with contextlib.suppress(OSError, msgspec.DecodeError):  # none yet, or not ours
        return msgspec.json.decode((user_cache() / FILE).read_bytes(), type=dict[str, float])
    return {}


def _key(pipeline: PipelineConfig) -> str:
    """Name of what starts: another model, or other options of an engine, take another time."""
    described = msgspec.json.encode((pipeline.name, pipeline.model, pipeline.stages), order="sorted")
    return f"{pipeline.name} {hashlib.sha256(described).hexdigest()[:12]}"
