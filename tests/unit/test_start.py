"""What a start takes, and what a restart need not do again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from omni_actors.engine import platform
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.platform import GIB, wait_for_memory
from omni_actors.engine.workers.gpu import OmniGPUWorker
from omni_actors.vllm_version import Platform


class Clock:
    """Time that passes only by `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_start_waits_until_the_memory_of_a_killed_process_is_free(caplog: pytest.LogCaptureFixture) -> None:
    clock, free = Clock(), iter([10 * GIB, 10 * GIB, 45 * GIB])
    assert wait_for_memory(lambda: (next(free), 80 * GIB), 0.5, clock=clock, sleep=clock.sleep)
    assert next(free, None) is None
    assert "waiting for memory of the device: 10.0 GiB are free, 40.0 GiB needed" in caplog.text


def test_the_worker_looks_at_its_own_device_before_vllm_does(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "talker"), "autoregressive")
    worker = OmniGPUWorker(arguments.create_engine_config(), 1, 1, f"file://{tmp_path}/rendezvous")
    happened: list[Any] = []

    def measure(device: int) -> tuple[int, int]:
        happened.append(device)
        return 80 * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", measure)
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.init_device", lambda self: happened.append("vLLM"))
    worker.init_device()
    assert happened == [1, "vLLM"]


@pytest.mark.parametrize("given", ["", "/elsewhere"])
def test_kernels_are_cached_in_one_place_whether_graphs_are_compiled_or_loaded(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Compiling and loading set Inductor's folder to different ones, below which Triton's would be."""
    monkeypatch.setattr(platform, "check_installed", lambda: SimpleNamespace(platform=Platform.CUDA))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")  # both are set below, and restored with this
    monkeypatch.setenv("TRITON_CACHE_DIR", given)
    if not given:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    platform.prepare.__wrapped__()
    for inductor in ("/made", "/loaded"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", inductor)
        assert triton_cache_dir(0) == (given or "/cache/triton_cache")
