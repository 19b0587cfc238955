"""Errors keep their meaning on the wire, through pickle-free copies, and for the reader."""

from __future__ import annotations

import pytest

from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError
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


def test_every_code_has_a_class_and_a_hint() -> None:
    assert set(ERROR_CLASSES) == set(ErrorCode)
    for code, cls in ERROR_CLASSES.items():
        assert cls.code is code
        assert cls.default_hint


def test_stage_of_the_error_wins_over_the_reporting_one() -> None:
    assert Failed.from_error(OmniError("x", stage="a"), "b").stage == "a"
    assert Failed.from_error(OmniError("x"), "b").stage == "b"


def test_long_texts_are_cut_to_what_may_travel() -> None:
    failed = Failed.from_error(OmniError("x" * 10_000, hint="y" * 10_000))
    assert Decoder(Failed).decode(encode(Header(""), failed)).body == failed
