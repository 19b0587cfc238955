"""Pipelines on a Ray cluster of two nodes: launch/ray.sh, the ends of a job, and stages with `executor: ray`."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from omni_actors.client import OmniClient
from omni_actors.transport.curve import make_client, make_cluster
from tests.support import ray_platform
from tests.support.answers import llama_answer
from tests.support.builders import write
from tests.support.launcher import READY
from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.ray_nodes import RayNodes, spread_chain
from tests.support.scripts import Started
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # each wait below alone may take minutes on a busy machine

API_KEY = "not-for-command-lines"


@pytest.fixture(scope="module")
def cluster():
    """The cluster that the tests share. Its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="or-", dir="/tmp") as folder:
        nodes = RayNodes(Path(folder))
        try:
            yield nodes
        finally:
            nodes.close()


@pytest.fixture
def job(cluster, start, short_path):
    config = write(short_path, spread_chain())

    def begin(*arguments: str, **environment: str) -> Started:
        return start("ray.sh", str(config), "--nnodes", "2", *arguments, RAY_ADDRESS=cluster.address, **environment)

    return begin


def serving(job: Started) -> str:
    job.until("node 1 serves", seconds=30.0)
    job.until("ready after", seconds=30.0)
    return READY.search(job.output)[1]


def test_a_request_goes_through_both_nodes_and_a_cancelled_job_leaves_nothing(cluster, job, short_path):
    keys = short_path / "keys"
    make_cluster(keys)
    make_client(keys, "someone")
    running, too_large = job("--keys", str(keys), OMNI_ACTORS_API_KEY=API_KEY), job("--nnodes", "3")
    endpoint = serving(running)
    with OmniClient(endpoint, keys=keys) as client:
        answer = client.generate("over two nodes", modalities=["text", "audio"], timeout=60 * PATIENCE)
    assert answer.text == "over two nodes"
    assert answer.audio is not None
    assert "starting talker/0, code2wav/0 on node 1" in running.output
    handed_out = list(cluster.run.glob("omni-keys-*"))
    assert len(handed_out) == 2
    assert {path.stat().st_mode & 0o777 for path in handed_out} == {0o700}
    assert all(not list(path.rglob("client.key_secret")) for path in handed_out)  # that is the client's own
    secrets = [API_KEY, re.findall(r'secret-key = "(.*)"', (keys / "cluster.key_secret").read_text())[0]]
    commands = " ".join(part for process in psutil.process_iter(["cmdline"]) for part in process.info["cmdline"] or ())
    files = [path for path in cluster.run.parent.rglob("*") if path.is_file() and path.parent not in handed_out]
    assert files
    assert [path for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)] == []
    assert [secret for secret in secrets if secret in commands + running.output] == []
    running.process.send_signal(signal.SIGTERM)
    assert running.end(seconds=30.0) == 0
    assert running.output.count("stopping (SIGTERM)") == 2
    assert too_large.end(seconds=60.0) == 2
    assert "The pipeline test: it needs 3 nodes, and the Ray cluster has 2." in too_large.output
    cluster.until_nothing_is_left()


@pytest.mark.e2e
def test_a_stage_on_two_of_rays_nodes_answers_as_in_one_process(cluster, tiny_llama, short_path):
    """A launcher of this host, whose stage has vLLM's Ray executor: two workers, each on a node of its own."""
    ray_platform.install(short_path)
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 33554432}
    overrides = {f"stages.thinker.engine.{name}": value for name, value in engine.items()}
    overrides |= {"stages.thinker.executor": "ray", "stages.thinker.engine.tensor_parallel_size": 2}
    environment = {
        "RAY_ADDRESS": cluster.address,
        "PYTHONPATH": f"{short_path}:{os.environ.get('PYTHONPATH', '')}:{REPOSITORY}",
        "VLLM_PLUGINS": ray_platform.NAME,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in sorted(os.sched_getaffinity(0))[-2:]),
    }
    given = {"model": tiny_llama, **overrides}
    wanted, *_ = llama_answer(tiny_llama, "The tide is full.", 16)
    with (
        RunningPipeline("stage_configs/chat.yaml", given, environment=environment, timeout=600.0) as chat,
        OmniClient(chat.endpoint) as client,
    ):
        workers = cluster.workers()
        assert len({parent for parent, _ in workers}) == 2
        params = {"thinker": {"max_tokens": 16, "temperature": 0.0}}
        answer = client.generate("The tide is full.", params=params, timeout=60 * PATIENCE)
        assert answer.token_ids == wanted
    cluster.until_no_workers_are_left()
