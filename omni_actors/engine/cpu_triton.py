"""CPU only: lets vLLM's V2 model runner run where no CPU backend of Triton is installed.

The V2 runner is written in Triton kernels. The CUDA wheel of Triton is present even on CPU machines (xgrammar requires
it) and can interpret kernels in Python; vLLM only checks that a backend named "cpu" is registered. This module adds
one and switches the interpreter on. It replaces no code of vLLM, one function of the interpreter, and nothing at all if
a real `triton-cpu` backend is installed. See docs/decisions.md.
"""

from __future__ import annotations

import os
import types
from importlib import metadata
from typing import Any


class _InterpreterDriver:
    """The part of a Triton driver that vLLM uses."""

    @staticmethod
    def is_active() -> bool:
        return True


class _LanguageKeptInterpreted:
    """Replaces Triton's language by interpreted functions once, not before every kernel, and leaves it replaced.

    Nothing is compiled in a process that interprets, so nothing needs the language as it was. Replacing and restoring
    its functions takes a quarter of a small kernel's time.

    Args:
        replace: the interpreter's own; it replaces what a kernel can name, and its result can restore that.
    """

    def __init__(self, replace: Any) -> None:
        self._replace = replace
        self._replaced: set[frozenset[str]] = set()

    def __call__(self, kernel: Any) -> _LanguageKeptInterpreted:
        modules = (value for value in kernel.__globals__.values() if isinstance(value, types.ModuleType))
        names = frozenset(name for module in modules if (name := module.__name__).startswith("triton.language"))
        if names not in self._replaced:
            self._replace(kernel)
            self._replaced.add(names)
        return self

    def restore(self) -> None:
        """Do nothing."""


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
    from triton.runtime import interpreter

    # Compiled kernels do not check integer sums for overflow either; here the checks take a third of a kernel's time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang = _LanguageKeptInterpreted(interpreter._patch_lang)
    return True
