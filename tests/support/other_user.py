"""Programs that run as another user of this host; only root can start them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")


@functools.cache
def python() -> str:
    """A Python that the other user may run; the tests' own may lie in root's home."""
    for program in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run([program, "-S", "-c", ""], user=NOBODY, check=True, timeout=30)
        except OSError:
            continue
        return program
    pytest.skip("another user can run no Python here")
