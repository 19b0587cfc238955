"""CPU only: lets vLLM's V2 model runner run where no CPU backend of Triton is installed.

The V2 runner is written in Triton kernels. The CUDA wheel of Triton is present even on CPU machines (xgrammar requires
it) and can interpret kernels in Python; vLLM only checks that a backend named "cpu" is registered. This module adds
one and switches the interpreter on. It replaces no code of vLLM or Triton, and does nothing if a real `triton-cpu`
backend is installed. See docs/adr/0003-v2-runner-on-cpu.md.
"""

from __future__ import annotations

import os
import types
from importlib import metadata


class _InterpreterDriver:
    """The part of a Triton driver that vLLM uses."""

    @staticmethod
    def is_active() -> bool:
        return True


def enable_interpreter() -> bool:
    """Register the interpreter as Triton's CPU backend. Returns whether it was needed. Must precede `import vllm`."""
    if metadata.entry_points(group="triton.backends", name="cpu"):
        return False
    # Triton's library functions decide when they are imported whether they are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
    # Otherwise Inductor would ask this "backend" for a compiler, even in eager mode, for a few functions of vLLM.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    from triton.backends import backends

    backends["cpu"] = types.SimpleNamespace(driver=_InterpreterDriver, compiler=None)
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    # Compiled kernels do not check integer sums for overflow either; here the checks take a third of a kernel's time.
    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    return True
