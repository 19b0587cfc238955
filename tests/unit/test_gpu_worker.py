"""Preparing a process for vLLM, and the worker of autoregressive stages on a GPU, as far as it needs none."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import fused_moe

from omni_actors.engine import platform
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.platform import wait_for_memory
from omni_actors.engine.workers.gpu import (
    GIB,
    OUTSIDE_TORCH_BYTES,
    Experts,
    OmniGPURunner,
    OmniGPUWorker,
    check_products,
    kv_cache_bytes,
    prompt_sizes,
)
from omni_actors.engine.workers.runner import OmniRunnerBase
from omni_actors.errors import ConfigError, StartupError
from omni_actors.vllm_version import Platform
from tests.support.commands import python


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
    assert run(code) == "False False"


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

    monkeypatch.setattr("omni_actors.engine.workers.gpu.experts_of", lambda _model: {THINKER})
    monkeypatch.setattr(worker, "get_model", lambda: None)
    config = worker.vllm_config
    config.scheduler_config.max_num_batched_tokens = 2048
    config.compilation_config.cudagraph_capture_sizes = GRAPHS
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert worker.omni_prompt_sizes() == prompt_sizes([THINKER], GRAPHS, 2048)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    assert worker.omni_prompt_sizes() == prompt_sizes([THINKER], [], 2048)
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


GRAPHS = [1, 2, 4, *range(8, 257, 8)]
THINKER = Experts((128, 1536, 2048), (128, 2048, 768), 8)
TALKER = Experts((128, 768, 1024), (128, 1024, 384), 6)
Tuned = Callable[[str], None]


@pytest.fixture
def tuned_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuned]:
    """Has vLLM look for its tables of a device; of a name that it does not know, it takes its defaults."""

    def use(device: str) -> None:
        fused_moe.get_moe_configs.cache_clear()
        monkeypatch.setattr(
            fused_moe,
            "get_config_file_name",
            lambda experts, width, *_: f"E={experts},N={width},device_name={device}.json",
        )

    yield use
    fused_moe.get_moe_configs.cache_clear()


def all_kernels(kinds: list[Experts], sizes: range | list[int]) -> set[object]:
    return {kind.kernels(size) for kind in kinds for size in sizes}


@pytest.mark.parametrize(
    ("kind", "graphs", "largest"), [(THINKER, GRAPHS, 2048), (TALKER, GRAPHS[:19], 4096)], ids=["thinker", "talker"]
)
@pytest.mark.parametrize("device", ["NVIDIA_H200", "one that nobody has tuned"])
def test_every_kernel_that_a_prompt_can_need_is_compiled_once(
    kind: Experts, graphs: list[int], largest: int, device: str, tuned_for: Tuned
) -> None:
    tuned_for(device)
    sizes = prompt_sizes([kind], graphs, largest)
    begun = [*graphs, largest]
    assert all_kernels([kind], [*begun, *sizes]) == all_kernels([kind], [*graphs, *range(graphs[-1], largest + 1)])
    for size in sizes:
        assert graphs[-1] < size < largest
        assert kind.kernels(size) not in all_kernels([kind], [*begun, *(other for other in sizes if other < size)])


def test_several_kinds_of_experts_share_their_sizes(tuned_for: Tuned) -> None:
    tuned_for("NVIDIA_H200")
    kinds = [THINKER, TALKER]
    sizes = prompt_sizes(kinds, GRAPHS, 2048)
    assert all_kernels(kinds, [*GRAPHS, 2048, *sizes]) == all_kernels(kinds, [*GRAPHS, *range(256, 2049)])
    assert len(sizes) < len(prompt_sizes([THINKER], GRAPHS, 2048)) + len(prompt_sizes([TALKER], GRAPHS, 2048))
    assert prompt_sizes(kinds, GRAPHS, 256) == [], "a batch that fits a graph needs nothing"


def test_a_start_waits_until_the_memory_of_a_killed_process_is_free(caplog: pytest.LogCaptureFixture) -> None:
    now, free = 100.0, iter([10 * GIB, 10 * GIB, 45 * GIB])

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    assert wait_for_memory(lambda: (next(free), 80 * GIB), 0.5, clock=lambda: now, sleep=sleep)
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


def test_no_cuda_process_preloads_the_cpu_worker(monkeypatch):
    """vLLM's CPU worker patches torch.cuda when it is imported."""
    monkeypatch.setattr(platform, "prepare", lambda: Platform.CUDA)
    names = platform.preload_modules()
    assert "omni_actors.engine.workers.gpu" in names
    assert not [name for name in names if "cpu" in name]


def run(code: str) -> str:
    return python("-c", code, check=True).stdout.strip()


@pytest.mark.nightly
def test_compiled_code_is_not_kept_where_other_users_may_write() -> None:
    code = """
import os
for name in ('TORCHINDUCTOR_CACHE_DIR', 'VLLM_CACHE_ROOT', 'XDG_CACHE_HOME'): os.environ.pop(name, None)
os.environ['HOME'] = '/somewhere'
import omni_actors.engine.platform
omni_actors.engine.platform.prepare()
from torch._inductor.runtime.cache_dir_utils import cache_dir
os.makedirs = lambda *_, **__: None
print(cache_dir())
"""
    assert run(code) == "/somewhere/.cache/vllm/torch_inductor"


@pytest.mark.nightly
def test_preloading_has_all_models_and_leaves_nothing_that_forbids_a_fork():
    code = """
import omni_actors.engine.workers.preload, gc, sys, threading, torch
from omni_actors.engine.models import MODULES, find_model_spec
print(threading.active_count(), torch.cuda.is_initialized(), gc.get_freeze_count() > 100_000)
print(gc.isenabled(), gc.get_stats()[2]['collections'])
before = set(sys.modules)
for key in MODULES:
    spec = find_model_spec(*key)
    for path in filter(None, (spec.adapter, spec.runner)):
        __import__(path.rpartition('.')[0])
print(len(MODULES), set(sys.modules) - before)
"""
    *_, harmless, garbage, models = run(code).splitlines()
    assert (harmless, garbage) == ("1 False True", "True 0")
    count, later = models.split(maxsplit=1)
    assert int(count) > 9
    assert later == "set()", "every stage of every model is imported before the fork"


SCRIPT = """
import sys
from omni_actors.engine.platform import keep_bytecode
print(keep_bytecode(["plain_package"]), sys.pycache_prefix)
import plain_package
print(plain_package.__cached__)
"""


def import_it(tmp_path: Path, *flags: str) -> list[str]:
    (package := tmp_path / "site" / "plain_package").mkdir(parents=True, exist_ok=True)
    if not (module := package / "__init__.py").exists():  # a new date would be another version
        module.write_text("VALUE = 1\n")
    environment = {"PYTHONPATH": f"{tmp_path / 'site'}:{Path.cwd()}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, *flags, "-c", SCRIPT]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


def test_a_package_without_bytecode_gets_it_in_the_users_cache(tmp_path: Path):
    kept, prefix, cached = import_it(tmp_path, "-B")
    assert (kept, prefix) == ("True", str(tmp_path / "cache" / "omni_actors" / "bytecode"))
    assert cached.startswith(prefix)
    first = Path(cached).stat().st_mtime_ns
    assert import_it(tmp_path, "-B") == [kept, prefix, cached]
    assert Path(cached).stat().st_mtime_ns == first, "compiled again"


def test_a_package_with_bytecode_is_read_where_it_is(tmp_path: Path):
    package = tmp_path / "site" / "plain_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 1\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True, timeout=60)
    assert import_it(tmp_path)[:2] == ["False", "None"]
    assert not (tmp_path / "cache").exists()
