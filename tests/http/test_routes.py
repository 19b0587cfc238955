"""Which routes need the key and which hosts they answer: every route of the application, so that none is forgotten."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from starlette.routing import Route

from omni_actors.http_server.app import create_app, create_routes
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget
from tests.support.servers import HttpPipeline, serving

PAGE_FILES = re.compile(r"/(vendor/)?\w+\.(js|css)")
KEY = {"authorization": "Bearer sesame"}
LOOPBACK = {"host": "localhost"}
FOREIGN = {"host": "pipeline.example"}
ROUTES = sorted(
    (method, re.sub(r"{\w+(:path)?}", "x", route.path))
    for route in create_routes(ServerSettings(endpoint="ipc:///nowhere"), Budget(0)).routes
    if isinstance(route, Route)
    for method in route.methods or ()
)


@pytest.fixture(scope="module")
def servers(echo_pipeline: HttpPipeline) -> Iterator[dict[str, str]]:
    """As they are started: with a key (on any address), without one (on loopback), and with --http-insecure."""
    endpoint = echo_pipeline.endpoint
    with (
        serving(create_app(ServerSettings(endpoint=endpoint, api_key="sesame", check_host=False))) as keyed,
        serving(create_app(ServerSettings(endpoint=endpoint))) as loopback,
        serving(create_app(ServerSettings(endpoint=endpoint, check_host=False))) as insecure,
    ):
        yield {"keyed": keyed, "loopback": loopback, "insecure": insecure}


def test_there_are_routes() -> None:
    assert {("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/v1/requests"), ("POST", "/v1/files")} < set(ROUTES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_key_or_a_loopback_name(servers: dict[str, str], method: str, path: str) -> None:
    """Metrics, timelines and the schema, too. `None` stands for an answer of the route itself."""
    is_open = path in ("/", "/health") or PAGE_FILES.fullmatch(path)
    needs_key = None if is_open else 401
    wrong = {"authorization": "Bearer sesam"}
    for server, headers, wanted in (
        ("keyed", LOOPBACK, needs_key),
        ("keyed", FOREIGN, needs_key),
        ("keyed", {**LOOPBACK, **wrong}, needs_key),
        ("keyed", {**FOREIGN, **KEY}, None),
        ("loopback", LOOPBACK, None),
        ("loopback", FOREIGN, 403),
        ("loopback", {**FOREIGN, **KEY}, 403),
        ("insecure", FOREIGN, None),
    ):
        status = httpx.request(method, f"{servers[server]}{path}", headers=headers).status_code
        assert (status if status in (401, 403) else None) == wanted, (server, headers)
