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
from tests.support.vllm_release import describe, recorded

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
AGAIN = "run python scripts/vllm_signatures.py WHEEL"


@pytest.fixture(scope="module")
def described() -> tuple[Release, Own]:
    return describe()


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


# -- what a release can change, and the problem that it makes


def lose_a_function(release: Release) -> str:
    del release.callables[f"{SCHEDULER}.make_stats"]
    return "make_stats is missing"


def lose_an_argument(release: Release) -> str:
    name = "vllm.sampling_params:SamplingParams"
    release.callables[name] = release.callables[name].replace("extra_args=", "")
    return "SamplingParams takes no extra_args"


def want_another_argument(release: Release) -> str:
    release.callables[f"{SCHEDULER}.finish_requests"] += " reason"
    return "finish_requests needs reason, which we do not pass"


def lose_a_field(release: Release) -> str:
    release.fields["vllm.v1.engine:EngineCoreOutput"].remove("pooling_output")
    return "EngineCoreOutput has no pooling_output"


def lose_an_attribute(release: Release) -> str:
    release.contains["vllm.v1.request:Request.__init__"].remove("self.num_computed_tokens")
    return "Request.__init__ does not contain 'self.num_computed_tokens'"


def change_an_order(release: Release) -> str:
    release.contains[f"{SCHEDULER}.schedule"].reverse()
    return "schedule has another order"


def pass_more_to_an_override(release: Release) -> str:
    release.methods["vllm.v1.worker.gpu.sample.sampler:Sampler"]["_sample_random"] = "more processed_logits"
    return "CPUSampler._sample_random(processed_logits"


def rename_what_is_overridden(release: Release) -> str:
    del release.methods["vllm.v1.worker.gpu_worker:Worker"]["_make_model_runner"]
    return "OmniGPUWorker._make_model_runner overrides nothing any more"


def add_an_abstract_method(release: Release) -> str:
    release.abstract["EmittedOutput"].append("get_timing")
    return "EmittedOutput does not define get_timing, which is abstract"


@pytest.mark.parametrize(
    "change",
    [
        lose_a_function,
        lose_an_argument,
        want_another_argument,
        lose_a_field,
        lose_an_attribute,
        change_an_order,
        pass_more_to_an_override,
        rename_what_is_overridden,
        add_an_abstract_method,
    ],
)
def test_what_a_release_changes_is_one_problem_with_its_name(
    change: Callable[[Release], str], installed: Release, own: Own
) -> None:
    changed = copy.deepcopy(installed)
    expected = change(changed)
    (problem,) = problems(changed, own, installed)
    assert expected in problem


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("a b", "a b", True),
        ("a b=", "a", True),
        ("*args **kwargs", "a b=", True),
        ("a *rest", "a b c", True),
        ("a", "a b=", False),
        ("b a", "a b", False),
        ("a b", "a", False),
    ],
)
def test_an_override_fits_if_it_takes_every_call(ours: str, theirs: str, fits: bool) -> None:
    assert vllm_contract.takes(ours, theirs) is fits
