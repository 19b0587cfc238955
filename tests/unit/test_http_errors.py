"""Errors of the pipeline as HTTP clients receive them."""

from __future__ import annotations

import json

import pytest

from omni_actors.errors import ERROR_CLASSES, ErrorCode
from omni_actors.http_server.errors import HttpError

WANTED = {
    400: {
        "invalid_request",
        "invalid_payload",
        "prompt_too_long",
        "unknown_voice",
        "unknown_modality",
        "malformed_media",
    },
    429: {"overloaded", "slow_client"},
    499: {"aborted"},
    500: {"poison", "engine_error", "protocol_error", "config_error", "startup_error", "unauthorized"},
    503: {"stage_unavailable", "stage_lost", "timeout"},
    504: {"deadline_exceeded"},
}
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_status(code: ErrorCode) -> None:
    (status,) = [status for status, codes in WANTED.items() if code.value in codes]
    response = HttpError.of(ERROR_CLASSES[code]("what", hint="do this"), {code: "field"}).response()
    assert response.status_code == status
    assert json.loads(response.body)["error"] == {
        "message": "what do this",
        "type": KINDS.get(status, "invalid_request_error"),
        "param": "field",
        "code": code.value,
    }
    # Clients that retry automatically need to know when; other errors must not invite a retry.
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_the_field_that_the_error_names_wins_over_that_of_its_code() -> None:
    error = ERROR_CLASSES[ErrorCode.INVALID_REQUEST]("too many", field="stop")
    assert HttpError.of(error).param == "stop"
    assert HttpError.of(error, {"invalid_request": "messages"}).param == "stop"
    assert HttpError.of(error, {"stop": "stop[0]"}).param == "stop[0]"


def test_retry_after_is_that_of_the_pipeline_rounded_up() -> None:
    error = ERROR_CLASSES[ErrorCode.OVERLOADED]("full", retry_after=2.3)
    assert HttpError.of(error).response().headers["retry-after"] == "3"
