"""Preparation before vLLM is imported: check its version, choose the platform, set the environment.

Imports neither torch nor vLLM, so that the parent of a forkserver can import it cheaply.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

from omni_actors.vllm_version import Platform, check_installed


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
        from omni_actors.engine.cpu_triton import enable_interpreter

        enable_interpreter()
    else:
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache())
        if find_spec("flashinfer") is None:
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
    """Names of the modules that `omni_actors.engine.preload` imports besides those of models.

    Importing them starts no thread and no device.
    """
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
        worker,
        *(["ray"] if find_spec("ray") else []),  # vLLM imports it wherever it is installed
        "omni_actors.engine.diffusion",
        "omni_actors.engine.diffusion_scheduler",
        "omni_actors.engine.diffusion_worker",
    ]
