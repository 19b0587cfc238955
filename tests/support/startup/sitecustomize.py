"""Leaves the imports of what is not ours out of the measurement of coverage: measured, vLLM's take a third longer.

Python imports this file when it starts with this folder on PYTHONPATH, as `scripts/test.sh` sets it. A process that
starts without it is measured all the same, only slower.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.machinery import SourceFileLoader
from types import ModuleType

NOT_OURS = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
execute = SourceFileLoader.exec_module


def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
    """Execute a module as SourceFileLoader does, without coverage's tracer if it is not ours."""
    tracer = sys.gettrace() if loader.path.startswith(NOT_OURS) else None
    if tracer is None:
        execute(loader, module)
        return
    sys.settrace(None)
    try:
        execute(loader, module)
    finally:
        sys.settrace(tracer)


if "COVERAGE_PROCESS_CONFIG" in os.environ:  # coverage sets it for the processes that it measures
    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]
