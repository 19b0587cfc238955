"""Sizes that a replica's first process measured and the next ones reuse, in a file of the run directory.

The file lasts as long as the launch, for which configuration and devices are the same. A process takes it away when it
starts and puts it back when it is ready: one that fails on the way leaves nothing, and the next measures again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from omni_actors.host.run_directory import SIZES_PREFIX
from omni_actors.logs import get_logger

logger = get_logger(__name__)


def take(run_dir: str, replica: str) -> dict[str, int]:
    """Return the sizes that are remembered for a replica, named as talker/0, and forget them; empty for none."""
    path = _file(run_dir, replica)
    try:
        content = path.read_bytes()
        path.unlink()
        return msgspec.json.decode(content, type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("measuring again, as the sizes of the last start cannot be used: %s", error)
        return {}


def keep(run_dir: str, replica: str, sizes: Mapping[str, int]) -> None:
    """Remember the sizes of a replica that is ready. Without room on the disk the next start measures again."""
    if not sizes:
        return
    path = _file(run_dir, replica)
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(sizes))
        os.replace(new, path)
    except OSError as error:
        logger.warning("the next start will measure again, as its sizes cannot be kept: %s", error)


def _file(run_dir: str, replica: str) -> Path:
    return Path(run_dir) / f"{SIZES_PREFIX}{replica.replace('/', '-')}"
