"""What is installed for CI: the lock file, licences, known vulnerabilities."""

from __future__ import annotations

from scripts import audit, lock
from tests.support.paths import REPOSITORY

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
LOCK = (REPOSITORY / "constraints.txt").read_text()


def test_every_direct_requirement_is_locked_at_a_version_that_it_allows() -> None:
    assert len(lock.direct_requirements(PROJECT)) > 40
    assert lock.disagreements(PROJECT, LOCK) == []


def test_a_package_with_another_licence_is_named_unless_it_is_an_exception() -> None:
    packages = [
        {"Name": "Good", "Version": "1", "License": "MIT"},
        {"Name": "Bad", "Version": "2", "License": "AGPL-3.0\nthe text"},
        {"Name": "soxr", "Version": "3", "License": "LGPL-2.1-or-later"},
        {"Name": "NVIDIA-cublas", "Version": "4", "License": "Other/Proprietary License"},
    ]
    assert audit.refused_licences(packages) == ["Bad 2: AGPL-3.0"]
