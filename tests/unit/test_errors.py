"""Errors keep their meaning on the wire, over HTTP, and for the reader."""

from __future__ import annotations

import json

import pytest

from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError
from omni_actors.http_server.errors import HttpError
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import Failed


@pytest.mark.parametrize("code", list(ErrorCode))
def test_failed_round_trip(code: ErrorCode) -> None:
    error = ERROR_CLASSES[code]("what", hint="do this", stage="talker", retry_after=2.5, field="stop")
    frames = encode(Header("", request_id="r"), Failed.from_error(error))
    back = Decoder(Failed).decode(frames).body.to_error()
    assert type(back) is type(error)
    assert vars(back) == {"message": "what", "hint": "do this", "stage": "talker", "retry_after": 2.5, "field": "stop"}
    assert back.code is code
    assert back.retryable == error.retryable
    assert Failed.from_error(error, "thinker").stage == "talker", "that of the error wins over the reporting one"
    assert Failed.from_error(ERROR_CLASSES[code]("what"), "thinker").stage == "thinker"


def test_every_code_has_a_class_and_a_hint() -> None:
    assert set(ERROR_CLASSES) == set(ErrorCode)
    for code, cls in ERROR_CLASSES.items():
        assert cls.code is code
        assert cls.default_hint


def test_long_texts_are_cut_to_what_may_travel() -> None:
    failed = Failed.from_error(OmniError("x" * 10_000, hint="y" * 10_000))
    assert Decoder(Failed).decode(encode(Header(""), failed)).body == failed


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


def test_what_an_error_says_of_its_field_and_of_trying_again_wins_over_its_code() -> None:
    error = ERROR_CLASSES[ErrorCode.INVALID_REQUEST]("too many", field="stop")
    assert HttpError.of(error).param == "stop"
    assert HttpError.of(error, {"invalid_request": "messages"}).param == "stop"
    assert HttpError.of(error, {"stop": "stop[0]"}).param == "stop[0]"
    error = ERROR_CLASSES[ErrorCode.OVERLOADED]("full", retry_after=2.3)
    assert HttpError.of(error).response().headers["retry-after"] == "3", "that of the pipeline, rounded up"
