"""Requests generated from the OpenAPI schema: server errors are typed, and all errors have one format."""

from __future__ import annotations

import collections
import functools
import re

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS

from omni_actors.http_server.app import ENDPOINTS
from tests.support.servers import HttpPipeline, picture, sound

TYPED = {
    500: {"engine_error"},
    503: {"overloaded", "stage_unavailable", "stage_lost", "timeout"},
    504: {"deadline_exceeded"},
}

NAMES = ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
# No text that is made up is an offer of a call or the id of a response, and echo stages take no recordings of voices.
NOT_MADE_UP = re.compile(r"\w+ /v1/(realtime/calls|live/sessions|responses/)|POST /v1/audio/voices")
PATHS = {endpoint.path.replace(":path}", "}") for endpoint in ENDPOINTS}
OPERATIONS = [
    (endpoint.method, endpoint.path.replace(":path}", "}"))
    for endpoint in ENDPOINTS
    if not NOT_MADE_UP.match(f"{endpoint.method} {endpoint.path}")
]
RECORDINGS = ("/v1/audio/transcriptions", "/v1/audio/translations")
SOUND = sound(0.1)
PICTURE = picture(8, 8)
SAID = {  # most conversations that are made up contradict themselves
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello."}]},
    "/v1/responses": {"input": "Hello.", "previous_response_id": None, "tool_choice": "auto"},
}
CASES = [(*operation, schemathesis.GenerationMode.POSITIVE) for operation in OPERATIONS]
CASES += [(*operation, schemathesis.GenerationMode.NEGATIVE) for operation in OPERATIONS if operation[0] == "POST"]


@functools.cache
def schema_of(url: str) -> schemathesis.schemas.BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_generated_requests(
    request: pytest.FixtureRequest, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    """In both of the generator's modes: requests that fit the schema, and requests that do not."""
    name = "pictures" if path.startswith("/v1/images/") else "videos" if path.startswith("/v1/videos") else "echo"
    url = request.getfixturevalue(name).url
    operation = schema_of(url)[path][method]
    statuses: collections.Counter[int] = collections.Counter()

    examples = settings().max_examples // (6 if method == "POST" else 15)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        # A made-up model ends every request at once, so most are sent for the model that is there.
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and case.body["model"][:1] != "0":
            case.body["model"] = "echo"
        # No bytes that are made up are a sound.
        if mode is schemathesis.GenerationMode.POSITIVE and path in RECORDINGS:
            case.body["file"] = SOUND
        if mode is schemathesis.GenerationMode.POSITIVE and path in SAID and statuses.total() % 2:
            case.body |= SAID[path]
        if mode is schemathesis.GenerationMode.POSITIVE and path == "/v1/images/edits":
            case.body["image"] = [PICTURE]
        if mode is schemathesis.GenerationMode.POSITIVE and method == "POST":
            case.body |= {name: PICTURE for name in ("mask", "input_reference") if name in case.body}
        response = case.call(timeout=60)
        statuses[response.status_code] += 1
        if response.status_code >= 400 and path != "/health":
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            if response.status_code >= 500:
                assert error["code"] in TYPED[response.status_code], error
        case.validate_response(response, checks=CHECKS.get_by_names(NAMES))

    check()
    print(f"{mode.value} {method} {path}: {dict(statuses)}")
    if mode is schemathesis.GenerationMode.POSITIVE and "{" not in path:
        assert statuses[200], "a schema none of whose requests is answered proves nothing"


def test_the_schema_describes_the_routes_and_their_errors(echo: HttpPipeline) -> None:
    schema = httpx.get(f"{echo.url}/openapi.json").json()
    assert set(schema["paths"]) == PATHS
    for path in schema["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            assert {"400", "401", "429", "503"} <= set(operation["responses"])
