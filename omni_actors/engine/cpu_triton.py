"""CPU only: lets vLLM's V2 model runner run where no CPU backend of Triton is installed.

The V2 runner is written in Triton kernels. The CUDA wheel of Triton is present even on CPU machines (xgrammar requires
it) and can interpret kernels in Python; vLLM only asks whether a backend named "cpu" is registered. This module answers
yes and switches the interpreter on. It replaces no code of vLLM or Triton. Where a real `triton-cpu` backend is
installed it does nothing. See docs/adr/0003-v2-runner-on-cpu.md.
"""

from __future__ import annotations

import os
import types
from importlib import metadata


class _InterpreterDriver:
    """The two facts vLLM asks of a Triton driver."""

    @staticmethod
    def is_active() -> bool:
        return True


def enable_interpreter() -> bool:
    """Register the interpreter as Triton's CPU backend. Returns whether it was needed. Must precede `import vllm`."""
    if metadata.entry_points(group="triton.backends", name="cpu"):
        return False
    # Before Triton is imported: its own library functions decide then whether they are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
    # Inductor would ask this "backend" for a compiler, also for the few functions that vLLM compiles in eager mode.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    from triton.backends import backends

    backends["cpu"] = types.SimpleNamespace(driver=_InterpreterDriver, compiler=None)  # type: ignore[assignment]
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    # As in compiled kernels: checking every sum of two integers for overflow takes a third of a kernel's time.
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    return True
