"""The names and signatures of vLLM that the engine package relies on, in every supported release.

The installed release is described as it is; the others were recorded from their wheels (`scripts/vllm_signatures.py`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from packaging.version import Version

from omni_actors.vllm_version import SUPPORTED
from tests.support import vllm_contract
from tests.support.vllm_contract import Own, Release, problems
from tests.support.vllm_release import describe, describe_imported, recorded

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
AGAIN = "run python scripts/vllm_signatures.py WHEEL"


@pytest.fixture(scope="module")
def described() -> tuple[Release, Own]:
    return describe_imported()


@pytest.fixture
def installed(described: tuple[Release, Own]) -> Release:
    return described[0]


@pytest.fixture
def own(described: tuple[Release, Own]) -> Own:
    return described[1]


def read(path: Path) -> Release:
    return msgspec.json.decode(path.read_bytes(), type=Release)


def test_the_installed_release_has_what_the_engine_relies_on(installed: Release, own: Own) -> None:
    assert problems(installed, own, installed) == []
    assert sum(installed.overridden(kind, name) is not None for kind in own for name in own[kind]) > 30
    assert vllm_contract.untested(installed) == {}


@pytest.mark.parametrize("path", recorded(), ids=lambda path: path.stem)
def test_a_recorded_release_has_what_the_engine_relies_on(path: Path, installed: Release, own: Own) -> None:
    release = read(path)
    assert vllm_contract.untested(release) == {}, AGAIN
    assert problems(release, own, installed) == []


def test_every_supported_minor_release_is_checked(installed: Release) -> None:
    checked = {Version(version).release[:2] for version in (installed.version, *(path.stem for path in recorded()))}
    minors = {(0, minor) for minor in range(100) if SUPPORTED.contains(f"0.{minor}.0")}
    assert checked == minors
    assert len(minors) == 2


@pytest.mark.skipif("OMNI_TEST_VLLM_WHEEL" not in os.environ, reason="OMNI_TEST_VLLM_WHEEL names no wheel of vLLM")
def test_a_wheel_is_what_was_recorded_of_it(installed: Release, own: Own) -> None:
    release, own_there = describe(Path(os.environ["OMNI_TEST_VLLM_WHEEL"]))
    assert own_there == own
    if release.version != installed.version:
        (path,) = (path for path in recorded() if path.stem == release.version)
        assert release == read(path), AGAIN
    assert problems(release, own, installed) == []


# What a release can change, and the problem that it makes.
CHANGES: list[tuple[Callable[[Release], object], str]] = [
    (lambda release: release.callables.pop(f"{SCHEDULER}.make_stats"), "make_stats is missing"),
    (lambda release: release.contains[f"{SCHEDULER}.schedule"].reverse(), "schedule has another order"),
    (
        lambda release: release.methods["vllm.v1.worker.gpu_worker:Worker"].pop("_make_model_runner"),
        "OmniGPUWorker._make_model_runner overrides nothing any more",
    ),
    (
        lambda release: release.abstract["AttachedOutput"].append("get_timing"),
        "AttachedOutput does not define get_timing, which is abstract",
    ),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[words for _, words in CHANGES])
def test_what_a_release_changes_is_one_problem_with_its_name(
    change: Callable[[Release], object], expected: str, installed: Release, own: Own
) -> None:
    changed = copy.deepcopy(installed)
    change(changed)
    (problem,) = problems(changed, own, installed)
    assert expected in problem
