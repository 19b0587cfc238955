"""Preparation before vLLM is imported: check its version, choose the platform, set the environment, keep bytecode.

Imports neither torch nor vLLM, so that the parent of a forkserver can import it cheaply.

Without bytecode Python compiles torch, transformers and vLLM at every start: 12 s on one core. An installation has none
if its folder is read-only or `PYTHONDONTWRITEBYTECODE` is set, as in many images.

vLLM's V2 runner is written in Triton kernels. The CUDA wheel of Triton is present even on CPU machines (xgrammar
requires it) and can interpret kernels in Python; vLLM only checks that a backend named "cpu" is registered.
`enable_interpreter` adds one and switches the interpreter on. It replaces no code, and does nothing at all if a real
`triton-cpu` backend is installed. See docs/decisions.md.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from omni_actors.host.run_directory import user_cache
from omni_actors.vllm_version import Platform, check_installed

logger = logging.getLogger(__name__)

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
    from triton.runtime import interpreter

    # Compiled kernels do not check integer sums for overflow either; here the checks take a third of a kernel's time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    return True


GIB = 1 << 30
MEMORY_SECONDS = 10.0
POLL_SECONDS = 0.05


def wait_for_memory(
    measure: Callable[[], tuple[int, int]],
    share: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until a share of a device's memory is free, at most `MEMORY_SECONDS`; whether it is.

    Does not raise if it is not: vLLM then refuses the start, with the figures and what to change.

    Args:
        measure: returns the free and the total bytes of the device; its first call may initialise it.
        share: of the total, from 0 to 1.
    """
    free, total = measure()
    if free >= share * total:
        return True
    text = "waiting for memory of the device: %.1f GiB are free, %.1f GiB needed"
    logger.warning(text, free / GIB, share * total / GIB)
    began = clock()
    while clock() < began + MEMORY_SECONDS:
        sleep(POLL_SECONDS)
        free, total = measure()
        if free >= share * total:
            logger.info("the device's memory was free after %.1f s", clock() - began)
            return True
    logger.error("the memory did not become free within %g s: another process holds it", MEMORY_SECONDS)
    return False


@functools.cache
def prepare() -> Platform:
    """Prepare this process to import vLLM; return the platform. Idempotent.

    Raises:
        ConfigError: vLLM is missing, or its version is not supported.
    """
    platform = check_installed().platform
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM has two runners; our hooks (ModelState, row emission) are written for V2 on every platform.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    # Tokens sampled from NaN look like any others; with this an engine can fail the request.
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
    # By default in /tmp, under a name that another user of the host can take first: what is compiled there is executed.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _in_cache("torch_inductor"))
    if platform is Platform.CPU:
        enable_interpreter()
    else:
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache())
        if importlib.util.find_spec("flashinfer") is None:
            # vLLM chooses flashinfer's sampler by the GPU alone, and would fail at the first sampled token.
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return platform


def triton_cache() -> str:
    """Folder for compiled Triton kernels: in vLLM's cache, and the same one in every start.

    Left alone, Inductor sets TRITON_CACHE_DIR when the first compiled graph is made or loaded, to a folder that depends
    on which of the two it is. A stage that loads for the first time what another start compiled would compile all
    kernels outside of the graphs again, in its warm-up.
    """
    return _in_cache("triton_cache")


def _in_cache(name: str) -> str:
    """Return the path of a folder in vLLM's cache."""
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "vllm"
    )
    return os.path.join(os.path.expanduser(root), name)


def preload_modules() -> list[str]:
    """Names of the modules that `omni_actors.engine.workers.preload` imports besides those of models.

    Importing them starts no thread and no device.
    """
    # vLLM's CPU worker patches torch.cuda when it is imported, so a CUDA process must never import it.
    worker = "omni_actors.engine.workers.cpu" if prepare() is Platform.CPU else "omni_actors.engine.workers.gpu"
    return [
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.model_loader.dummy_loader",
        "omni_actors.engine.prompt",
        "omni_actors.engine.autoregressive",
        worker,
        *(["ray"] if importlib.util.find_spec("ray") else []),  # vLLM imports it wherever it is installed
        "omni_actors.engine.diffusion",
    ]
