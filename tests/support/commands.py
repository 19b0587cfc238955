"""Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.support.paths import REPOSITORY


def python(*arguments: object, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it on these arguments in the repository's folder; its output is captured as text."""
    given = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 600, **options}
    done = subprocess.run([sys.executable, *map(str, arguments)], **given)
    assert not (check and done.returncode), f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    return done
