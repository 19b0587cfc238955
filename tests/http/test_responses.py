"""/v1/responses with the unchanged `openai` package; what it does not check itself, its own types check here."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.servers import HttpPipeline, data_uri, pdf, picture, sound

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}


def texts(url: str, **body: Any) -> Iterator[str]:
    """The data of the events of a stream."""
    given = {"model": "echo", "stream": True, **body}
    with httpx.stream("POST", f"{url}/v1/responses", json=given, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def test_a_response(echo: HttpPipeline) -> None:
    answer = echo.openai().responses.create(model="echo", input="hello, sea", metadata={"a": "b"})
    assert answer.output_text == "hello, sea"
    assert answer.status == "completed"
    assert answer.usage.output_tokens == 10
    assert answer.metadata == {"a": "b"}
    Response.model_validate(answer.model_dump(), strict=True)
    short = echo.openai().responses.create(model="echo", input="hello, sea", max_output_tokens=4, temperature=0.5)
    assert short.output_text == "hell"


def test_instructions_and_parts_are_messages(echo: HttpPipeline) -> None:
    wav = base64.b64encode(sound()).decode()
    url = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    parts = [
        {"type": "input_text", "text": "b"},
        {"type": "input_image", "image_url": url, "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}},
        {"type": "input_file", "file_data": url, "filename": "a.png"},
        {"type": "input_file", "file_data": data_uri("application/pdf", pdf("salt")), "filename": "b.pdf"},
    ]
    items = [
        {"role": "user", "content": parts},
        {"type": "message", "role": "assistant", "content": "c"},
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    answer = echo.openai().responses.create(model="echo", input=items, instructions="a")
    assert answer.output_text == "abb.pdf:\n\nsaltcde"


def test_a_response_continues_an_earlier_one(echo: HttpPipeline) -> None:
    client = echo.openai()
    first = client.responses.create(model="echo", input="one", instructions="only once ")
    assert first.output_text == "only once one"
    second = client.responses.create(model="echo", input=" two", previous_response_id=first.id)
    assert second.output_text == "oneonly once one two"
    items = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "!"}]
    assert client.responses.create(model="echo", input=items).output_text == "oneonly once one!", "items as they came"
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(model="echo", input="x", previous_response_id=second.id, store=False)
    for gone in (first.id, third.id):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="echo", input="x", previous_response_id=gone)
        assert caught.value.param == "previous_response_id"


def test_a_stream_has_the_events_that_the_package_puts_together(echo: HttpPipeline) -> None:
    with echo.openai().responses.stream(model="echo", input="hello, sea") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "hello, sea"
    assert len(deltas) > 1
    assert final.status == "completed"
    events = [EVENTS.validate_json(text, strict=True) for text in texts(echo.url, input="hello, sea")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_response_is_spoken(echo: HttpPipeline) -> None:
    client = echo.openai()
    answer = client.responses.create(model="echo", input="hello", extra_body=SPOKEN)
    assert answer.output_text == "hello"
    assert base64.b64decode(answer.output[0].audio["data"])[:4] == b"RIFF"
    assert answer.output[0].audio["transcript"] == "hello"
    again = client.responses.create(model="echo", input=[*answer.output, {"role": "user", "content": "!"}])
    assert again.output_text == "hello!"
    stream = {**SPOKEN, "audio": {"voice": "Ethan"}}
    events = [EVENTS.validate_json(text, strict=True) for text in texts(echo.url, input="hello", **stream)]
    data = b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.audio.delta")
    assert len(numpy.frombuffer(data, "<i2")) == 5 * 480
    said = [event.delta for event in events if event.type == "response.audio.transcript.delta"]
    assert "".join(said) == "hello"
    assert events[-1].type == "response.completed"


def wrong_item(*parts: dict) -> dict:
    return {"input": [{"role": "user", "content": list(parts)}]}


def test_errors_name_the_field(echo: HttpPipeline) -> None:
    not_base64 = {"type": "input_image", "image_url": "data:image/png;base64,!!"}
    for changes, param in (
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (wrong_item({"type": "input_image"}), "input[0].content[0]"),
        (wrong_item(not_base64), "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": []}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"temprature": 1}, "temprature"),
        ({"input": "x" * 5000}, "input"),
    ):
        answer = httpx.post(f"{echo.url}/v1/responses", json={"model": "echo", "input": "x", **changes})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), changes


@pytest.mark.nightly
def test_a_failure_during_a_stream_is_an_event(slow: HttpPipeline) -> None:
    """The deadline lies within the 25 s of the stream, and long after its beginning on a busy machine, too."""
    seen, body = [], {"timeout": 6.0}
    with pytest.raises(openai.APIError, match="deadline"):
        seen.extend(slow.openai().responses.create(model="echo", input="x" * 500, stream=True, extra_body=body))
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.message
