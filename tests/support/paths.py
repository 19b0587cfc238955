"""Folders that tests refer to."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# The environment in which a process finds the modules of the examples.
EXAMPLE_MODULES = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY / "examples"), os.environ.get("PYTHONPATH")]))
}


def import_path(*more: str) -> str:
    """PYTHONPATH of a process that imports from the repository, from `more` and from where this one does."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), *more, os.environ.get("PYTHONPATH")]))
