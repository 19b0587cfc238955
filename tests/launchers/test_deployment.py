"""Files for Docker and systemd have the right form."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omni_actors.launch import parser
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly


def test_the_dockerfile_has_no_known_faults():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert linter is not None, "hadolint is missing; it comes with the extra `test`"
    dockerfile = REPOSITORY / "deploy" / "Dockerfile"
    done = subprocess.run([linter, str(dockerfile)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    kept = [line[1:] for line in dockerfile.with_suffix(".dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((REPOSITORY / name).exists() for name in kept)
    assert not {"checkpoints", "keys", ".git"} & set(kept)
    script = (REPOSITORY / "scripts" / "setup.sh").read_text()
    read = set(re.findall(r"\$repo_root/(\w[\w.]*)", script))
    assert read >= {"pyproject.toml", "scripts"}
    assert read <= set(kept), "scripts/setup.sh, which the image runs, reads them"


def test_the_service_starts_what_there_is():
    unit = (REPOSITORY / "deploy" / "omni_actors.service").read_text()
    (command,) = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    python, *arguments = command.split()
    assert arguments[:2] == ["-m", "omni_actors.launch"]
    assert parser().parse_args(arguments[2:]).run_dir == "/run/omni_actors"
    assert python == "/opt/omni_actors/.venv/bin/python"  # where scripts/setup.sh makes it
