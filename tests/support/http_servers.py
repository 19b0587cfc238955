"""The processes of a pipeline's HTTP server."""

from __future__ import annotations

import psutil

from tests.support.processes import processes_titled
from tests.support.servers import HttpPipeline


def http_servers(pipeline: HttpPipeline) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in processes_titled("omni:http", pipeline.process.pid)]


def http_server(pipeline: HttpPipeline) -> psutil.Process:
    """The only one."""
    (server,) = http_servers(pipeline)
    return server
