"""Reads the config.json of a checkpoint, which a user may have cut off, mixed up or written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omni_actors.errors import ConfigError
from omni_actors.paths import check_readable

CONFIG_NAME = "config.json"
MAX_BYTES = 16 << 20
HINT = "Compare it with the config.json of the published checkpoint, or download that again."


def read_checkpoint_config(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ConfigError: it cannot be read, is too large, is no JSON object or does not name one architecture.
    """
    size = check_readable(path, "model")
    if size > MAX_BYTES:
        raise ConfigError(f"{path} has {size} bytes, more than {MAX_BYTES >> 20} MiB.", hint=HINT)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # RecursionError: ten thousand levels
        raise ConfigError(f"{path} is not valid JSON: {error}.", hint=HINT) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; it holds a {type(config).__name__}.", hint=HINT)
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise ConfigError(f"{path} must name one architecture in a list; `architectures` is {names!r}.", hint=HINT)
    for key, value in config.items():
        if key.endswith("_config") and value is not None and not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} must be an object; it is a {type(value).__name__}.", hint=HINT)
    return config
