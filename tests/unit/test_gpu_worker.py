"""The worker of autoregressive stages on a GPU, as far as it needs none: its runner, and the size of its KV cache."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.workers.gpu import (
    GIB,
    OUTSIDE_TORCH_BYTES,
    OmniGPURunner,
    OmniGPUWorker,
    check_products,
    kv_cache_bytes,
)
from omni_actors.engine.workers.runner import OmniRunnerBase
from omni_actors.errors import ConfigError, StartupError


@pytest.fixture
def worker(tiny_checkpoint: Path, tmp_path: Path) -> OmniGPUWorker:
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "talker"), "autoregressive")
    made = OmniGPUWorker(arguments.create_engine_config(), 0, 0, f"file://{tmp_path}/rendezvous", is_driver_worker=True)
    made.device = torch.device("cpu")
    made.init_snapshot = SimpleNamespace(free_memory=80 * GIB)  # vLLM's log line shows it
    return made


@pytest.fixture
def groups(worker: OmniGPUWorker, tmp_path: Path) -> Iterator[None]:
    """vLLM's process groups, which every runner asks for; of one process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(worker.vllm_config):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield
    parallel_state.cleanup_dist_env_and_memory()


class Device:
    """What torch counts on the GPU, and the order of what happens there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: OmniGPUWorker, peak: int) -> None:
        self.happened: list[str] = []
        self.worker = worker
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.happened.append("reset"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.happened.append("emptied"))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
        worker.model_runner = self

    def profile_run(self, **options: object) -> None:
        reserved = self.worker.cache_config.kv_cache_memory_bytes
        self.happened.append(f"largest batch, {reserved} bytes reserved")


@pytest.mark.nightly
def test_importing_it_touches_no_device() -> None:
    code = """
import sys
import omni_actors.engine, omni_actors.engine.workers.gpu, torch
print(torch.cuda.is_initialized(), "vllm.v1.worker.cpu_worker" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.split() == ["False", "False"]


def test_the_worker_makes_our_runner(worker: OmniGPUWorker, groups: None) -> None:
    import omni_actors.engine.workers.cpu  # noqa: F401 - gives torch.cuda streams that do nothing

    runner = worker._make_model_runner()
    assert type(runner) is OmniGPURunner
    assert isinstance(runner, OmniRunnerBase)
    assert runner.vllm_config is worker.vllm_config


def test_the_cache_gets_what_this_process_leaves_of_its_share(
    worker: OmniGPUWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself would compare the free memory of the whole device, which other stages change at the same time."""
    device = Device(monkeypatch, worker, peak=3 * GIB)
    worker.requested_memory = 8 * GIB
    assert worker.determine_available_memory() == 8 * GIB - 3 * GIB - OUTSIDE_TORCH_BYTES
    assert worker.cache_config.kv_cache_memory_bytes == 8 * GIB - 3 * GIB - OUTSIDE_TORCH_BYTES
    assert device.happened == ["reset", f"largest batch, {8 * GIB} bytes reserved", "emptied"]


def test_a_share_without_room_for_a_cache_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_cache_bytes(8 * GIB, 8 * GIB - OUTSIDE_TORCH_BYTES, 0.1)
    assert "gpu_memory_utilization 0.1 is 8.0 GiB" in str(caught.value)
    assert "takes 8.0 GiB" in str(caught.value)
    assert "Raise gpu_memory_utilization" in caught.value.hint
    assert kv_cache_bytes(8 * GIB, 8 * GIB - OUTSIDE_TORCH_BYTES - 1, 0.1) == 1


def test_prompts_that_fit_a_graph_of_prompts_are_not_run_again(
    worker: OmniGPUWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.config.lora import LoRAConfig

    from omni_actors.engine.workers.gpu import Experts, prompt_sizes

    experts, graphs = Experts((128, 1536, 2048), (128, 2048, 768), 8), [1, 2, 4, *range(8, 257, 8)]
    monkeypatch.setattr("omni_actors.engine.workers.gpu.experts_of", lambda _model: {experts})
    monkeypatch.setattr(worker, "get_model", lambda: None)
    config = worker.vllm_config
    config.scheduler_config.max_num_batched_tokens = 2048
    config.compilation_config.cudagraph_capture_sizes = graphs
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert worker.omni_prompt_sizes() == prompt_sizes([experts], graphs, 2048)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert worker.omni_prompt_sizes() == prompt_sizes([experts], [], 2048)
    assert worker.omni_prompt_sizes()[0] < 256
    config.lora_config = LoRAConfig(max_loras=1)
    assert worker.omni_prompt_sizes() == [], "adapters would be gone"


@pytest.mark.parametrize("wrong", [0.0, math.nan])
def test_wrong_products_on_a_part_of_a_gpu_end_the_start(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 96)).to(torch.bfloat16)
    model.append(nn.Linear(96, 8))  # in float32: no library is asked for less than that
    check_products(model)
    right = functional.linear

    def one_tile_is_wrong(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = right(given, weight)
        if given.dtype is torch.bfloat16 and given.shape == (32, 512):
            product[:, 64:] = wrong
        return product

    monkeypatch.setattr(functional, "linear", one_tile_is_wrong)
    with pytest.raises(StartupError, match="32 x 512 by 512 x 96 wrongly"):
        check_products(model)
