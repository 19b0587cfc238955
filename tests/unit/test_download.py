"""What is said of a model that must be downloaded, with a hub of our own on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

MODEL = "someone/some-model"
PROGRAM = f"""
import sys
import msgspec
from omni_actors.config import PipelineConfig
from omni_actors.errors import ConfigError
from omni_actors.launcher.preflight import pending_download
from tests.support.builders import chain
data = {{**chain(), "model": {MODEL!r}}}
for stage, model in zip(data["stages"], [*sys.argv[1:], None, None], strict=False):
    stage |= {{"kind": "autoregressive", "model": model}}
try:
    print(pending_download(msgspec.convert(data, PipelineConfig)))
except ConfigError as error:
    print("refused:", error)
"""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[int]]]:
    """The address of a hub, and the sizes of the files of its only model."""
    sizes: list[int] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files = [{"rfilename": f"{index}.safetensors", "size": size} for index, size in enumerate(sizes)]
            body = json.dumps({"id": MODEL, "modelId": MODEL, "siblings": files}).encode()
            self.send_response(200 if self.path.startswith(f"/api/models/{MODEL}") and files else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sizes
    server.shutdown()
    thread.join()
    server.server_close()


def said(folder: Path, *models: str, **environment: str) -> str:
    """What is said of the pipeline's model, or of those that its first stages have of their own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HTTP", "http"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *models],
        env={**given, "HF_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_that_is_not_here_is_announced_with_its_size_and_the_room(
    hub: tuple[str, list[int]], tmp_path: Path
) -> None:
    address, sizes = hub
    assert f"{MODEL} is downloaded first (of unknown size, to {tmp_path}/hub, where " in said(
        tmp_path, HF_ENDPOINT=address
    )
    sizes += [3 << 30, 1 << 29]
    assert "(3.5 GiB, to " in said(tmp_path, HF_ENDPOINT=address)
    sizes.append(1 << 60)
    assert said(tmp_path, HF_ENDPOINT=address).startswith(f"refused: {MODEL} has 1073741827.5 GiB, and {tmp_path}/hub")


def test_without_a_network_it_is_refused_at_once_and_a_cached_one_needs_none(tmp_path: Path) -> None:
    refused = said(tmp_path, HF_HUB_OFFLINE="1")
    assert refused.startswith(
        f"refused: {MODEL} is neither a folder nor in the cache {tmp_path}/hub, and HF_HUB_OFFLINE"
    )
    repository = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    assert said(tmp_path, HF_HUB_OFFLINE="1") == ""
