"""What a response of /v1/responses keeps of the request that it answers."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from omni_actors.http_server.bodies import decode
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.responses.events import ResponseReply, SentEvents
from omni_actors.http_server.responses.items import ResponsesRequest
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORM = {"type": "json_schema", "name": "city", "schema": SCHEMA}


def request(**fields: Any) -> ResponsesRequest:
    return decode(json.dumps({"input": "hi", **fields}).encode(), ResponsesRequest)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputs(json_object=True)),
        (FORM, StructuredOutputs(json=json.dumps(SCHEMA))),
    ],
)
def test_a_form_is_that_of_the_text_stage(form: dict[str, Any], wanted: StructuredOutputs | None) -> None:
    assert request(text={"format": form}).stage_fields().get("structured_outputs") == wanted


def test_a_schema_that_is_too_long_is_refused() -> None:
    form = {**FORM, "schema": {"title": "x" * 70_000}}
    with pytest.raises(HttpError, match="limited to 65536 bytes") as caught:
        request(text={"format": form}).stage_fields()
    assert caught.value.param == "text.format.schema"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
    ],
)
def test_log_probabilities_are_those_of_the_text_stage(fields: dict[str, Any], wanted: int | None) -> None:
    assert request(**fields).stage_fields().get("logprobs") == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
    ],
)
def test_log_probabilities_that_cannot_come_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        request(**fields).stage_fields()
    assert caught.value.param == param


def test_a_kept_response_holds_nothing_of_the_body() -> None:
    """A part of the body would hold all of it, with its media, and would not be counted."""
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    body = request(text={"format": FORM}, tools=[tool], metadata={"a": "b"})
    description = Description("p", "m", ("text",), (), 0, True, 1, 9, ())
    kept = ResponseReply(SentEvents("resp_1", 0), "echo", None, body, description).object("completed")
    assert kept["text"] == {"format": FORM}
    assert kept["tools"][0]["parameters"] == SCHEMA
    plain = (str, int, float, bool, type(None), dict, list)

    def check(value: Any) -> None:
        assert isinstance(value, plain)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in inner:
            check(item)

    check(kept)


def sent_before(*deltas: str) -> SentEvents:
    """The events of a response whose text came in these pieces."""
    sent = SentEvents("resp_1", 0)
    call = {"id": "fc_1_0", "call_id": "call_first"}
    events = [{"type": "response.created"}, {"type": "response.output_item.added", "output_index": 1, "item": call}]
    events += [{"type": "response.output_text.delta", "output_index": 0, "delta": delta} for delta in deltas]
    events += [{"type": "response.audio.delta", "delta": base64.b64encode(b"abcd").decode()}]
    for number, event in enumerate(events):
        data = json.dumps({**event, "sequence_number": number}).encode()
        assert sent.add(b"id: %d\nevent: x\ndata: %b\n\n" % (number, data)) == number
    assert sent.number == len(events)
    return sent


def test_what_was_sent_is_left_out_of_an_answer_that_is_made_again_in_other_pieces() -> None:
    sent = sent_before("the s", "ea")
    assert not sent.rest("response.created")
    assert sent.rest("response.in_progress")
    assert not sent.rest("response.output_item.added", output_index=1)
    assert sent.rest("response.output_item.added", output_index=0)
    texts = [
        sent.rest("response.output_text.delta", output_index=0, delta=piece) for piece in ("th", "e sea is", " salt")
    ]
    assert texts == ["", " is", " salt"]
    sounds = [sent.rest("response.audio.delta", delta=piece) for piece in (b"Abc", b"d", b"ef")]
    assert sounds == [b"", b"", b"ef"], "the last bits of sound may differ"
    assert sent.call_id("fc_1_0", "call_other") == "call_first"
    assert sent.call_id("fc_1_1", "call_other") == "call_other"


def test_another_answer_is_not_sent_as_the_rest_of_the_first() -> None:
    with pytest.raises(HttpError, match="became another one") as caught:
        sent_before("the sea").rest("response.output_text.delta", output_index=0, delta="the lake")
    assert caught.value.code == "stage_lost"
