"""What a start takes, and what a restart need not do again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

from omni_actors.engine import platform
from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.device_memory import GIB, MEMORY_SECONDS, wait_for_memory
from omni_actors.engine.factory import with_known_sizes
from omni_actors.engine.gpu import OmniGPUWorker
from omni_actors.host.run_directory import RunDirectory
from omni_actors.stage import remembered_sizes, start_phases
from omni_actors.vllm_version import Platform

# -- phases -----------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only by `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_phase_does_not_count_what_phases_within_it_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("omni_actors.stage.start_phases.time.monotonic", clock)

    @start_phases.phase("inner of a test")
    def inner() -> None:
        clock.sleep(3.0)

    @start_phases.phase("failing of a test")
    def fail() -> None:
        clock.sleep(2.0)
        raise ValueError("wrong")

    with start_phases.phase("outer of a test"):
        clock.sleep(1.0)
        inner()
        inner()
        with pytest.raises(ValueError, match="wrong"):
            fail()
    seconds = start_phases.seconds()
    names = ("outer of a test", "inner of a test", "failing of a test")
    assert [seconds[name] for name in names] == pytest.approx([1.0, 6.0, 2.0])
    assert "inner of a test 6.00" in start_phases.listed()


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_are_taken_once_and_kept_again(tmp_path: Path) -> None:
    assert remembered_sizes.take(str(tmp_path), "talker/0") == {}
    remembered_sizes.keep(str(tmp_path), "talker/0", {"kv_cache_bytes": 5})
    assert remembered_sizes.take(str(tmp_path), "talker/1") == {}
    assert remembered_sizes.take(str(tmp_path), "talker/0") == {"kv_cache_bytes": 5}
    assert remembered_sizes.take(str(tmp_path), "talker/0") == {}, "a start that fails with them is not repeated"
    assert not list(tmp_path.iterdir())


def test_an_engine_without_sizes_leaves_no_file(tmp_path: Path) -> None:
    remembered_sizes.keep(str(tmp_path), "talker/0", {})
    assert not list(tmp_path.iterdir())


def test_sizes_that_cannot_be_read_or_kept_are_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered_sizes.keep(str(tmp_path), "talker/0", {"kv_cache_bytes": 5})
    next(tmp_path.iterdir()).write_text('{"kv_cache_bytes": "many"}')
    assert remembered_sizes.take(str(tmp_path), "talker/0") == {}
    assert "measuring again" in caplog.text
    remembered_sizes.keep(str(tmp_path / "gone"), "talker/0", {"kv_cache_bytes": 5})
    assert "the next start will measure again" in caplog.text


def test_the_next_launch_knows_nothing_of_them(short_path: Path) -> None:
    """Its configuration or devices may be others."""
    first = RunDirectory(str(short_path))
    remembered_sizes.keep(str(short_path), "talker/0", {"kv_cache_bytes": 5})
    first.close()
    second = RunDirectory(str(short_path))
    assert remembered_sizes.take(str(short_path), "talker/0") == {}
    second.close()


def test_a_restart_has_the_same_cache_and_the_same_compiled_code(tiny_checkpoint: Path) -> None:
    """What is compiled is found by a hash of the configuration; an option that changed it would compile everything."""
    from vllm.config import CompilationConfig  # after the engine package has prepared the process

    model = OmniModelConfig(str(tiny_checkpoint), "thinker")
    arguments = OmniEngineArgs(model, "autoregressive", {"gpu_memory_utilization": 0.3})
    first = arguments.create_engine_config()
    second = with_known_sizes(arguments, {"kv_cache_bytes": 5 * GIB}).create_engine_config()
    assert second.cache_config.kv_cache_memory_bytes == 5 * GIB
    assert second.model_config.multimodal_config is not None
    assert second.model_config.multimodal_config.skip_mm_profiling
    assert second.compute_hash() == first.compute_hash()
    other = dataclasses.replace(arguments, model_config=dataclasses.replace(model, row_budget_bytes=GIB))
    assert other.create_engine_config().compute_hash() != first.compute_hash(), "our own options would change it"
    few, many = (CompilationConfig(cudagraph_capture_sizes=sizes) for sizes in ([1, 2], [1, 2, 4]))
    assert few.compute_hash() != many.compute_hash(), "and so would fewer graphs (ADR 0025)"


# -- memory of the device ---------------------------------------------------------------------------------------------


def test_a_start_waits_until_the_memory_of_a_killed_process_is_free(caplog: pytest.LogCaptureFixture) -> None:
    clock, free = Clock(), iter([10 * GIB, 10 * GIB, 45 * GIB])
    assert wait_for_memory(lambda: (next(free), 80 * GIB), 0.5, clock=clock, sleep=clock.sleep)
    assert next(free, None) is None
    assert "waiting for memory of the device: 10.0 GiB are free, 40.0 GiB needed" in caplog.text


def test_the_wait_for_memory_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    assert not wait_for_memory(lambda: (1, 80 * GIB), 0.5, clock=clock, sleep=clock.sleep)
    assert 100.0 + MEMORY_SECONDS <= clock.now < 101.0 + MEMORY_SECONDS
    assert "another process holds it" in caplog.text


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


# -- compiled kernels -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({"XDG_CACHE_HOME": "/xdg"}, "/xdg/vllm/triton_cache"), ({"HOME": "/home"}, "/home/.cache/vllm/triton_cache")],
)
def test_kernels_are_cached_where_vllm_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert platform.triton_cache() == folder
