"""Errors keep their meaning on the wire, through pickle-free copies, and for the reader."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError, Overloaded, UnknownVoice
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.common import Failed
from omni_actors.protocol.header import Header


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


def test_text_has_place_message_and_hint() -> None:
    error = UnknownVoice("No voice 'X'.", stage="talker")
    assert str(error) == "[talker] No voice 'X'. Choose one of the voices listed."
    assert str(UnknownVoice("No.", hint="")) == "No."


def test_only_some_are_retryable() -> None:
    retryable = {code.value for code, cls in ERROR_CLASSES.items() if cls.retryable}
    assert retryable == {"overloaded", "slow_client", "stage_unavailable", "stage_lost", "timeout"}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_keep_everything(copied: Callable[[OmniError], OmniError]) -> None:
    error = Overloaded("full", hint="h", stage="s", retry_after=1.0)
    again = copied(error)
    assert type(again) is Overloaded
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_stage_of_the_error_wins_over_the_reporting_one() -> None:
    assert Failed.from_error(OmniError("x", stage="a"), "b").stage == "a"
    assert Failed.from_error(OmniError("x"), "b").stage == "b"


def test_long_texts_are_cut_to_what_may_travel() -> None:
    failed = Failed.from_error(OmniError("x" * 10_000, hint="y" * 10_000))
    assert Decoder(Failed).decode(encode(Header(""), failed)).body == failed
