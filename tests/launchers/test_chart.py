"""The Helm chart renders what Kubernetes takes and refuses what makes no sense; Docker's and systemd's files fit."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import omni_actors
from omni_actors.cli.keys import main as make_keys
from omni_actors.launch import parser
from omni_actors.telemetry.metrics import TABLE
from omni_actors.transport.curve import load_keys
from tests.support.paths import REPOSITORY
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.nightly

CHART = REPOSITORY / "launch" / "chart"
VERSIONS = ("1.31", "1.35")  # of Kubernetes: from the oldest that was maintained when this was written
PIPELINE = "name: x\nmodel: y\nstages: []\n"
ROLES = [
    {"name": "head", "pods": 1, "gpus": 0, "cpu": "2", "memory": "8Gi"},
    {"name": "talkers", "pods": 2, "gpus": 4, "cpu": "16", "memory": "64Gi", "sharedMemory": "8Gi"},
]
FULL: dict[str, Any] = {
    "pipeline": PIPELINE,
    "roles": [
        ROLES[0],
        {**ROLES[1], "nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    ],
    "image": {"tag": "test", "pullSecrets": ["registry"]},
    "runtimeClassName": "nvidia",
    "http": {"tlsSecret": "omni-tls", "serviceType": "LoadBalancer"},
    "models": {"claim": "weights"},
    "cacheHostPath": "/var/cache/vllm",
    "env": {"OMNI_ACTORS_MPS": "off", "OMP_NUM_THREADS": 4},
    "arguments": ["--voice-alias", "alloy=Chelsie"],
    "termination": {"serviceSeconds": 3, "drainSeconds": 40, "stopSeconds": 9},
    "disruption": {"maxUnavailable": "50%"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
SCALED: dict[str, Any] = {**FULL, "autoscaling": {"enabled": True, "maxPods": 6}}
SMALL: dict[str, Any] = {"pipelineConfigMap": "made", "roles": [{**ROLES[0], "name": "all"}], "keys": {"secret": ""}}

NO_PART = {"ServiceMonitor", "ScaledObject"}  # of Kubernetes


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"properties": properties, "required": required.split(), "additionalProperties": False}


# What KEDA 2.18 takes, by its documentation, of the fields that the chart uses; nothing else may be there.
SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion={"const": "apps/v1"}, kind={"const": "StatefulSet"}, name={}),
    pollingInterval={"type": "integer", "minimum": 1},
    minReplicaCount={"type": "integer", "minimum": 0},
    maxReplicaCount={"type": "integer", "minimum": 1},
    advanced=_object(horizontalPodAutoscalerConfig=_object(behavior={"type": "object"})),  # of Kubernetes
    triggers={
        "minItems": 1,
        "items": _object(
            "type metadata",
            type={"const": "prometheus"},
            name={"type": "string"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=_object(
                "serverAddress query threshold",
                serverAddress={"type": "string", "format": "uri"},
                query={"type": "string"},
                threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
            ),
        ),
    },
)


def tool(name: str, source: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, f"{name} is missing; {source}"
    return found


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [tool("helm", "scripts/install_helm.sh brings it"), *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)


def rendered(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    done = helm("template", "omni", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item is not None]


def of_kind(items: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in items if item["kind"] == kind]


def container_of(item: dict[str, Any]) -> dict[str, Any]:
    (container,) = item["spec"]["template"]["spec"]["containers"]
    return container


def environment_of(item: dict[str, Any], pod: int = 0) -> dict[str, str]:
    """The variables of a pod of a set, with the name that Kubernetes gives it."""
    variables = {entry["name"]: entry["value"] for entry in container_of(item)["env"] if "value" in entry}
    return {**variables, "HOSTNAME": f"{item['metadata']['name']}-{pod}"}


@pytest.fixture(scope="module")
def full():
    return rendered(FULL)


@pytest.fixture(scope="module")
def plain():
    return rendered({"pipeline": PIPELINE})


# -- what is rendered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{"pipeline": PIPELINE}, SCALED, SMALL], ids=["plain", "full", "small"])
def test_kubernetes_takes_what_is_rendered(values):
    items = rendered(values)
    for item in items:
        if item["kind"] in NO_PART:
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)
    (pods, *_) = of_kind(items, "StatefulSet")
    with pytest.raises(kubernetes_validate.ValidationError):  # the check is one
        kubernetes_validate.validate({**pods, "spec": {**pods["spec"], "replica": 2}}, VERSIONS[0], strict=True)
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(set(names)) == len(names)
    assert len(of_kind(items, "ScaledObject")) == (values is SCALED)
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == omni_actors.__version__


@pytest.mark.parametrize("which", ["plain", "full"])
def test_the_parts_fit_together(which, request):
    items = request.getfixturevalue(which)
    nodes, web = sorted(of_kind(items, "Service"), key=lambda item: item["metadata"]["name"])
    sets = of_kind(items, "StatefulSet")
    pods = [(item, number) for item in sets for number in range(item["spec"]["replicas"])]
    first = f"{sets[0]['metadata']['name']}-0"
    assert nodes["spec"]["publishNotReadyAddresses"] is True
    assert web["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == first
    ranks = []
    for item, number in pods:
        spec, labels = item["spec"]["template"]["spec"], item["spec"]["template"]["metadata"]["labels"]
        environment = environment_of(item, number)
        ranks.append(int(environment["FIRST_RANK"]) + number)
        assert environment["NODES"] == str(len(pods))
        assert environment["HEAD"] == f"{first}.{nodes['metadata']['name']}"
        assert item["spec"]["serviceName"] == nodes["metadata"]["name"]
        assert item["spec"]["updateStrategy"] == {"type": "OnDelete"}, "nodes must agree on the pipeline"
        (budget,) = of_kind(items, "PodDisruptionBudget")
        selected = [each["spec"]["selector"]["matchLabels"] for each in (item, budget)]
        assert all(selector.items() <= labels.items() for selector in (nodes["spec"]["selector"], *selected))
        assert {m["name"] for m in container_of(item)["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    assert ranks == list(range(len(pods))), "each rank once"


def test_keda_scales_the_pods_of_the_last_role_by_our_metrics():
    items = rendered(SCALED)
    (scaled,) = of_kind(items, "ScaledObject")
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    spec = scaled["spec"]
    jsonschema.validate(spec, SCALED_OBJECT)
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    scaling = {"scaleTargetRef": spec["scaleTargetRef"], "maxReplicas": spec["maxReplicaCount"], "behavior": behavior}
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "keda"}}
    autoscaler = {**kind, "spec": scaling}
    for version in VERSIONS:
        kubernetes_validate.validate(autoscaler, version, strict=True)
    heads, talkers = of_kind(items, "StatefulSet")
    assert spec["scaleTargetRef"]["name"] == talkers["metadata"]["name"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (ROLES[1]["pods"], 6)
    assert "replicas" not in talkers["spec"], "an upgrade would end the pods that KEDA has started"
    assert heads["spec"]["replicas"] == 1
    assert environment_of(talkers)["NODES"] == "7", "a rank for each pod that may come"
    (web,) = [item for item in of_kind(items, "Service") if item["metadata"]["name"].endswith("-http")]
    for trigger in spec["triggers"]:
        query = trigger["metadata"]["query"]
        named = re.findall(r"\bomni_[a-z_]+(?={)", query)
        assert named
        assert all(re.sub("_(bucket|count)$", "", name) in TABLE for name in named), query
        assert query.count(f'service="{web["metadata"]["name"]}"') == len(named)
        assert query.count("(") == query.count(")")


# -- what is refused --------------------------------------------------------------------------------------------------

SCALING = {"enabled": True, "maxPods": 1}
REFUSED = {
    "unknown key": ({"replicas": 2}, "replicas"),
    "a name that no pod can have": ({"roles": [{**ROLES[0], "name": "Head_1"}]}, "/roles/0/name"),
    "a role without memory": ({"roles": [{"name": "a", "pods": 1, "gpus": 0, "cpu": "1"}]}, "memory"),
    "two roles of one name": ({"roles": [ROLES[0], ROLES[0]]}, "two are called"),
    "no keys between pods": ({"keys": {"secret": ""}}, "keys.secret"),
    "no pipeline": ({"pipeline": ""}, "--set-file pipeline"),
    "two pipelines": ({"pipelineConfigMap": "made"}, "both given"),
    "a variable of the chart's own": ({"env": {"HEAD": "x"}}, "env.HEAD"),
    "no secret for the API key": ({"http": {"apiKeySecret": ""}}, "/http/apiKeySecret"),
    "scaling by metrics that no one reads": ({"autoscaling": {"enabled": True}}, "reads metrics from Prometheus"),
    "fewer pods at most than at least": (
        {"autoscaling": SCALING, "serviceMonitor": {"enabled": True}},
        "autoscaling.maxPods is less than the 2 pods of the role nodes",
    ),
    "one pod now, more later, and no keys": (
        {"roles": [ROLES[0]], "keys": {"secret": ""}, "autoscaling": {**SCALING, "maxPods": 2}},
        "keys.secret: 2 pods",
    ),
    "a relative path": ({"models": {"hostPath": "models"}}, "/models/hostPath"),
}


@pytest.mark.parametrize(("values", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_values_are_refused_by_name(values, said):
    done = helm("template", "omni", str(CHART), values={"pipeline": PIPELINE, **values})
    assert done.returncode != 0
    assert said.replace("/", ".") in done.stderr.replace("/", "."), done.stderr


# -- what runs --------------------------------------------------------------------------------------------------------


def run(command: list[str], environment: Mapping[str, str], path: str = "") -> subprocess.CompletedProcess[str]:
    variables = {"PATH": f"{path}:{os.environ['PATH']}", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=20 * PATIENCE)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_pod_starts_its_node(tmp_path, full, rank):
    """The container's own script, with a secret mounted as Kubernetes does it: flat, links, readable by others."""
    assert make_keys([str(tmp_path / "made"), "--client", "web"]) == 0
    mounted = tmp_path / "secrets"
    (mounted / "keys" / "..data").mkdir(parents=True)
    for source in [*(tmp_path / "made").glob("cluster.*"), *(tmp_path / "made" / "allowed").iterdir()]:
        (mounted / "keys" / "..data" / source.name).write_bytes(source.read_bytes())
        (mounted / "keys" / "..data" / source.name).chmod(0o444)
        (mounted / "keys" / source.name).symlink_to(f"..data/{source.name}")
    (mounted / "tls").mkdir()
    (mounted / "tls" / "tls.key").write_text("the key")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/usr/bin/env bash\nprintf "<%s>" "$@"\n')
    python.chmod(0o755)
    pods = of_kind(full, "StatefulSet")[rank > 0]
    container = container_of(pods)
    script, *arguments = container["args"]
    script = script.replace("/tmp/", f"{tmp_path}/").replace("/secrets/", f"{mounted}/")
    done = run([*container["command"], script, *arguments], environment_of(pods, max(0, rank - 1)), str(python.parent))
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip("<>").split("><")
    assert said[:2] == ["-m", "omni_actors.launch"]
    given = parser().parse_args(said[2:])  # which has all of these flags
    assert (given.nnodes, given.node_rank, given.master_port) == ("3", str(rank), "29600")
    assert given.master_addr == "omni-omni-actors-head-0.omni-omni-actors"
    assert given.headless is (rank > 0)
    assert given.http == ("0.0.0.0:8000" if rank == 0 else None)
    assert said[-2:] == ["--voice-alias", "alloy=Chelsie"]
    if rank == 0:
        assert (tmp_path / "tls.key").stat().st_mode & 0o077 == 0
    keys = load_keys(tmp_path / "keys")  # which refuses what others can read
    assert keys.is_member
    assert [path.name for path in (tmp_path / "keys" / "allowed").iterdir()] == ["web.key"]


def test_the_first_pod_is_ready_when_its_server_says_so_and_lives_as_long_as_it_listens(plain):
    status = 503

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_): ...

    (pods,) = of_kind(plain, "StatefulSet")
    ready, alive = (container_of(pods)[name]["exec"]["command"] for name in ("readinessProbe", "livenessProbe"))

    def codes(probe):
        command = [re.sub(r"([:/])8000", rf"\g<1>{server.server_port}", part) for part in probe]
        python = str(Path(sys.executable).parent)
        return [run(command, environment_of(pods, pod), python).returncode for pod in (0, 1)]  # one serves no HTTP

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert codes(ready) == [1, 0]
        status = 200
        assert codes(ready) == codes(alive) == [0, 0]
        server.shutdown()
    assert codes(alive)[0] != 0


def test_the_other_pods_serve_until_the_first_is_gone_or_drains():
    (pods,) = of_kind(rendered({"pipeline": PIPELINE, "termination": {"serviceSeconds": 600}}), "StatefulSet")
    command = container_of(pods)["lifecycle"]["preStop"]["exec"]["command"]
    assert "exec sleep 600" in command[-1]
    assert "until ((SECONDS >= 602))" in command[-1]
    with socket.create_server(("127.0.0.1", 0)) as head:
        script = command[-1].replace("/29600", f"/{head.getsockname()[1]}")
        environment = {"PATH": os.environ["PATH"], **environment_of(pods, 1), "HEAD": "127.0.0.1"}
        waiting = subprocess.Popen([*command[:-1], script], env=environment)
        try:
            head.settimeout(10 * PATIENCE)
            head.accept()[0].close()  # it has looked
            assert waiting.poll() is None
            head.close()
            assert waiting.wait(10 * PATIENCE) == 0
        finally:
            waiting.kill()
            waiting.wait()


# -- other files of deploy/ --------------------------------------------------------------------------------------------


def test_the_dockerfile_has_no_known_faults():
    dockerfile = REPOSITORY / "deploy" / "Dockerfile"
    done = run([tool("hadolint", "it comes with the extra `test`"), str(dockerfile)], os.environ)
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
