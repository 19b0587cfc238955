"""Files for Kubernetes, Docker and systemd have the right form, and their shell parts run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from omni_actors.cli.keys import main as make_keys
from omni_actors.launch import parser
from omni_actors.transport.curve import load_keys
from tests.support.paths import REPOSITORY

MANIFEST = REPOSITORY / "launch" / "kubernetes.yaml"
KUBERNETES = "1.31"  # the oldest one that is still maintained when this was written


def resources() -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all(MANIFEST.read_text())}


def test_kubernetes_takes_the_manifest() -> None:
    found = resources()
    assert set(found) == {"Service", "StatefulSet"}
    for item in found.values():
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):  # the check is one
        kubernetes_validate.validate({**found["Service"], "spec": {"clusterIp": "None"}}, KUBERNETES, strict=True)


def test_kubernetes_parts_fit_together() -> None:
    service, pods = (resources()[kind] for kind in ("Service", "StatefulSet"))
    template = pods["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == template["metadata"]["labels"] == pods["spec"]["selector"]["matchLabels"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["NODES"] == str(pods["spec"]["replicas"])
    assert f"--master-addr {pods['metadata']['name']}-0.{service['metadata']['name']} " in container["args"][0]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pod_starts_its_node(tmp_path: Path, rank: int) -> None:
    """The container's own script, with a secret mounted as Kubernetes does it: flat, links, readable by others."""
    assert make_keys([str(tmp_path / "made"), "--client", "web"]) == 0
    mounted = tmp_path / "secrets"
    (mounted / "..data").mkdir(parents=True)
    for source in [*(tmp_path / "made").glob("cluster.*"), *(tmp_path / "made" / "allowed").iterdir()]:
        (mounted / "..data" / source.name).write_bytes(source.read_bytes())
        (mounted / "..data" / source.name).chmod(0o444)
        (mounted / source.name).symlink_to(f"..data/{source.name}")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/usr/bin/env bash\nprintf "<%s>" "$@"\n')
    python.chmod(0o755)
    (container,) = resources()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    script = container["args"][0].replace("/secrets/keys", str(mounted)).replace("/tmp/keys", str(tmp_path / "keys"))
    done = subprocess.run(
        [*container["command"], script],
        env={"PATH": f"{python.parent}:{os.environ['PATH']}", "HOSTNAME": f"omni-{rank}", "NODES": "2"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip("<>").split("><")
    last = ["--http", "0.0.0.0:8000"] if rank == 0 else ["--headless"]
    assert said == [
        "-m",
        "omni_actors.launch",
        "/config/pipeline.yaml",
        "--nnodes",
        "2",
        "--node-rank",
        str(rank),
        "--master-addr",
        "omni-0.omni",
        "--master-port",
        "29600",
        "--keys",
        str(tmp_path / "keys"),
        *last,
    ]
    keys = load_keys(tmp_path / "keys")  # which refuses what others can read
    assert keys is not None
    assert keys.is_member
    assert [path.name for path in (tmp_path / "keys" / "allowed").iterdir()] == ["web.key"]


def test_the_dockerfile_has_no_known_faults() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert linter is not None, "hadolint is missing; it comes with the extra `test`"
    dockerfile = REPOSITORY / "deploy" / "Dockerfile"
    done = subprocess.run([linter, str(dockerfile)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    kept = [line[1:] for line in dockerfile.with_suffix(".dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((REPOSITORY / name).exists() for name in kept)
    assert not {"checkpoints", "keys", ".git"} & set(kept)


def test_the_service_starts_what_there_is() -> None:
    unit = (REPOSITORY / "deploy" / "omni_actors.service").read_text()
    (command,) = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("ExecStart=")]
    python, *arguments = command.split()
    assert arguments[:2] == ["-m", "omni_actors.launch"]
    assert parser().parse_args(arguments[2:]).run_dir == "/run/omni_actors"
    assert python == "/opt/omni_actors/.venv/bin/python"  # where scripts/setup.sh makes it


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (REPOSITORY / "deploy" / "omni_actors.service").read_text()
    here = tmp_path / "omni_actors.service"
    unit = unit.replace("/opt/omni_actors/.venv/bin/python", sys.executable).replace("=omni\n", "=root\n")
    for text, fine in ((unit, True), (unit.replace("KillMode=mixed", "KillMode=nonsense"), False)):
        here.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (not done.stderr and done.returncode == 0) is fine, done.stderr
