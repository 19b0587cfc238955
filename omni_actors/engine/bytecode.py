"""Keeps the bytecode of imported packages where their installation has none.

Without it Python compiles torch, transformers and vLLM at every start: 12 s on one core. An installation has none if
its folder is read-only or `PYTHONDONTWRITEBYTECODE` is set, as in many images.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from omni_actors.host.paths import user_cache

LARGE_PACKAGES = ("torch", "transformers", "vllm")


def keep_bytecode(packages: Sequence[str] = LARGE_PACKAGES) -> bool:
    """Let this process's imports read and write bytecode in the user's cache, if a package has none; returns whether.

    To be called before the packages are imported; it imports none of them. Python compares each file's date and size
    with its source's, so another version is compiled again.
    """
    if all(_has_bytecode(package) for package in packages):
        return False
    sys.pycache_prefix = str(user_cache() / "bytecode")
    sys.dont_write_bytecode = False
    return True


def _has_bytecode(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.has_location:
        return True  # nothing to compile
    return Path(importlib.util.cache_from_source(spec.origin)).exists()
