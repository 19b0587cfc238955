"""Leaves what is not ours out of the measurement of coverage: imports, and Triton's interpreter, which run for long.

Python imports this file when it starts with this folder on PYTHONPATH, as `scripts/test.sh` sets it. A process that
starts without it is measured all the same, only slower.
"""

from __future__ import annotations

import os

if "COVERAGE_PROCESS_CONFIG" in os.environ:  # coverage sets it for the processes that it measures
    import sysconfig
    from importlib.machinery import SourceFileLoader
    from types import ModuleType
    from typing import Any

    from untraced import untraced

    FOLDERS = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
    execute = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        """Execute a module as SourceFileLoader does, without coverage's tracer if it is not ours."""
        if not loader.path.startswith(FOLDERS):
            execute(loader, module)
            return
        untraced(execute)(loader, module)
        if module.__name__ == "triton.runtime.interpreter":
            module.GridExecutor.__call__ = without_kernels_of_others(module.GridExecutor.__call__)

    def without_kernels_of_others(call: Any) -> Any:
        """On the CPU, Triton's interpreter runs the kernels of vLLM, which take most of a step."""

        def run(executor: Any, *arguments: Any, **options: Any) -> Any:
            ours = executor.fn.__module__.startswith("omni_actors.")
            return (call if ours else untraced(call))(executor, *arguments, **options)

        return run

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]
