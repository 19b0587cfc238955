"""Errors and cancellation as the unchanged `openai` package sees them, with echo stages."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, until

HELLO = [{"role": "user", "content": "hello, sea"}]


PART = "messages[0].content[0]"
UNKNOWN_SOUND = {"role": "assistant", "audio": {"id": "audio_unknown"}}
OLD_CALL = {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}


def part(kind: str, **field: str) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: field}]}]}


def wrong_picture(data: str) -> dict:
    return part("image_url", url=f"data:image/png;base64,{data}")


# What a body may hold is tested in tests/unit/test_decoding.py; here is what depends on the pipeline, and a few others.
ERRORS = [
    ({"model": "gpt-4o"}, "model", "model_not_found"),
    ({"modalities": ["smell"]}, "modalities", "unknown_modality"),
    ({**SPOKEN, "audio": {"voice": "alloy", "format": "wav"}}, "audio.voice", "unknown_voice"),
    ({**SPOKEN, "stream": True}, "audio.format", "unsupported_value"),
    ({"audio": SPOKEN["audio"]}, "audio", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": 3, "extra_body": {"min_tokens": 4}}, "min_tokens", "invalid_request"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", None),
    ({"extra_body": {"stage_params": {"thinkr": {}}}}, "stage_params", None),
    ({"extra_query": {"api-version": "1"}}, "api-version", "unknown_parameter"),
    ({"messages": [*HELLO, UNKNOWN_SOUND, *HELLO]}, "messages[1].audio.id", None),
    ({"messages": [*HELLO, OLD_CALL]}, "messages[1].function_call", None),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "prompt_too_long"),
    (wrong_picture("!!"), f"{PART}.image_url.url", "invalid_base64"),
    (wrong_picture("AAAA"), f"{PART}.image_url.url", "malformed_media"),
    (part("input_audio", data="AAAA", format="wav"), f"{PART}.input_audio.data", "malformed_media"),
]


@pytest.mark.parametrize(("change", "param", "code"), ERRORS, ids=[str(case[0])[:60] for case in ERRORS])
def test_errors_name_the_field(echo: HttpPipeline, change: dict, param: str, code: str | None) -> None:
    with pytest.raises(openai.NotFoundError if param == "model" else openai.BadRequestError) as caught:
        echo.openai().chat.completions.create(**{"model": "echo", "messages": HELLO, **change})
    assert caught.value.param == param
    assert code in (None, caught.value.code)
    assert caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_failure_before_the_first_token_is_a_status(echo: HttpPipeline) -> None:
    """FAIL_TOKEN: the stage fails this request alone."""
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            echo.openai().completions.create(model="echo", prompt=[0x7FFF0002], stream=stream)
        assert caught.value.code == "engine_error"


def test_a_deadline_is_an_event_of_a_stream_and_else_a_status(slow: HttpPipeline) -> None:
    """The deadline lies within the 25 s of the stream, and long after its beginning on a busy machine, too."""
    stream = slow.openai().chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "x" * 500}], stream=True, extra_body={"timeout": 6.0}
    )
    texts = []
    with pytest.raises(openai.APIError, match="deadline") as caught:
        texts.extend(chunk.choices[0].delta.content for chunk in stream)
    assert caught.value.code == "deadline_exceeded"
    assert "x" in texts
    with pytest.raises(openai.InternalServerError) as caught:
        slow.openai().chat.completions.create(model="echo", messages=LONG, extra_body={"timeout": 0.3})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


def wait_in_flight(pipeline: HttpPipeline, wanted: int, seconds: float = 5.0) -> None:
    until(lambda: httpx.get(f"{pipeline.url}/v1/status").json()["in_flight"] == wanted, seconds, f"{wanted} in flight")


LONG = [{"role": "user", "content": "x" * 2000}]  # 100 s at 20 tokens a second


def test_closing_a_stream_frees_every_stage(slow: HttpPipeline) -> None:
    audio = {"voice": "Ethan", "format": "pcm16"}
    stream = slow.openai().chat.completions.create(
        model="echo", messages=LONG, n=2, stream=True, modalities=["text", "audio"], audio=audio
    )
    next(iter(stream))
    wait_in_flight(slow, 2)
    stream.close()
    wait_in_flight(slow, 0)
    slow.assert_idle(timeout=10)
    assert "the client went away" in slow.log()


def test_a_client_that_leaves_with_more_requests_in_a_row_frees_every_stage(slow: HttpPipeline) -> None:
    body = json.dumps({"model": "echo", "messages": LONG}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10 * PATIENCE) as connection:
        connection.sendall(asked)
        wait_in_flight(slow, 1)
        connection.sendall(asked + asked[:100])
    wait_in_flight(slow, 0)


def test_cancelling_a_whole_answer_frees_every_stage(slow: HttpPipeline) -> None:
    async def run() -> None:
        client = AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0)
        task = asyncio.create_task(client.chat.completions.create(model="echo", messages=LONG))
        await asyncio.to_thread(wait_in_flight, slow, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()

    asyncio.run(run())
    wait_in_flight(slow, 0)
    slow.assert_idle(timeout=10)
    assert re.search(r"POST /v1/chat/completions 499 in \d", slow.log()), "only the log can show it"


def test_full_admission_is_429_with_retry_after(slow: HttpPipeline) -> None:
    streams = [slow.openai().chat.completions.create(model="echo", messages=LONG, stream=True) for _ in range(2)]
    try:
        with pytest.raises(openai.RateLimitError) as caught:
            slow.openai().chat.completions.create(model="echo", messages=HELLO)
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        for stream in streams:
            stream.close()
    wait_in_flight(slow, 0)
    # The client's own retries get through once there is room.
    assert slow.openai(max_retries=3).chat.completions.create(model="echo", messages=HELLO, max_tokens=2)


def test_other_routes_name_what_they_do_not_know(echo: HttpPipeline) -> None:
    client = echo.openai()
    file = ("a.wav", b"RIFF")
    for call, param in (
        (lambda: client.responses.create(model="echo", input=""), "input"),
        (lambda: client.responses.create(model="echo", input="x", extra_body={"audio": {"voice": "Ethan"}}), "audio"),
        (lambda: client.files.list(purpose="vision"), "purpose"),
        (lambda: client.files.create(file=file, purpose="vision", extra_body={"folder": "x"}), "folder"),
        (lambda: client.models.list(extra_query={"limit": 1}), "limit"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.param == param
    listed = httpx.get(f"{echo.url}/v1/requests", params={"limt": 3}).json()["error"]
    assert listed["message"] == "limt: /v1/requests has no such parameter of the query; it has limit."
    assert httpx.get(f"{echo.url}/health", params={"now": 1}).status_code == 200
