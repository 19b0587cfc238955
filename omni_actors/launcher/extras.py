"""The optional packages that a launch needs, looked for before it starts anything."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from omni_actors.errors import ConfigError

HTTP_PACKAGES = ("httpcore", "httptools", "multipart", "uvicorn", "uvloop", "websockets")  # of the extra `http`
MEDIA_PACKAGES = ("soxr",)  # of the extras `cuda` and `cpu`, for prompts with sound
IMAGE_PACKAGES = ("PIL",)  # of the extra `http`


def check_platform() -> None:
    """Raise `ConfigError` unless this system can run pipelines."""
    if sys.platform != "linux":
        raise ConfigError(
            f"Pipelines run on Linux only, and this is {sys.platform}.",
            hint="The client library works here: connect it to a pipeline on another host, by tcp:// or HTTP.",
        )


def check_packages(what: str, names: Sequence[str], *extras: str) -> None:
    """Raise `ConfigError` if one of these modules is missing, and name the extras that have it."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{what} needs packages that are not installed: {', '.join(missing)}.",
            hint=f"Run {' or '.join(map(pip_install, extras))}.",
        )


def pip_install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'omni_actors[{extra}]'"
