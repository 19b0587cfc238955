"""Preparing a process for vLLM: environment, the CPU's Triton shim, bytecode where the installation has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_actors.engine import platform
from omni_actors.vllm_version import Platform
from tests.support.commands import python


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


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def double(values, count: tl.constexpr):
    places = values + tl.arange(0, count)
    tl.store(places, 2 * tl.load(places))
"""


@pytest.mark.nightly
def test_the_language_of_kernels_is_interpreted_from_the_first_kernel_on(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(KERNEL)
    code = f"""
import sys, omni_actors.engine, torch
from triton.runtime import interpreter
sys.path.append({str(tmp_path)!r})
import one, other
replaced, replace = [], interpreter._patch_builtin
interpreter._patch_builtin = lambda *arguments: (replaced.append(1), replace(*arguments))
values, counts = torch.arange(4.0), []
for kernel in (one.double, other.double, one.double):
    kernel[(1,)](values, 4)
    counts.append(len(replaced))
print(values.tolist(), counts[0] > 0, counts[0] == counts[2])
"""
    assert run(code) == "[0.0, 8.0, 16.0, 24.0] True True"


@pytest.mark.nightly
def test_preloading_has_all_models_and_leaves_nothing_that_forbids_a_fork():
    code = """
import sys, threading, torch, gc, omni_actors.engine.workers.preload
from omni_actors.engine.models import MODULES, find_model_spec
print(threading.active_count(), torch.cuda.is_initialized(), gc.get_freeze_count() > 100_000)
before = set(sys.modules)
for key in MODULES:
    spec = find_model_spec(*key)
    for path in filter(None, (spec.adapter, spec.runner)):
        __import__(path.rpartition('.')[0])
print(len(MODULES), set(sys.modules) - before)
"""
    *_, harmless, models = run(code).splitlines()
    assert harmless == "1 False True"
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
