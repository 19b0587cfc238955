"""Responses and realtime sessions go on at another process of the server when their own is killed, or their line."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.support.processes import processes_titled
from tests.support.servers import HttpPipeline
from tests.support.waiting import until

WORKERS = 2
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan"}}
LOST = (httpx.ReadError, httpx.RemoteProtocolError)
Event = dict[str, Any]


@pytest.fixture(scope="module")
def several() -> Iterator[HttpPipeline]:
    """50 tokens a second."""
    overrides: dict[str, Any] = {f"stages.{stage}.engine.step_seconds": 0.02 for stage in ("thinker", "code2wav")}
    with HttpPipeline(overrides={**overrides, "http.workers": WORKERS}) as pipeline:
        yield pipeline


@pytest.fixture
def both(several: HttpPipeline) -> Iterator[HttpPipeline]:
    """All processes serve; all is idle again after the test."""
    until(lambda: len(servers(several)) == WORKERS, 30, "all processes")
    yield several
    several.assert_idle()


def servers(pipeline: HttpPipeline) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in processes_titled("omni:http", pipeline.process.pid)]


def kill_server_of(pipeline: HttpPipeline, client: tuple[str, int]) -> None:
    """Kill the process that has the connection of a client's address."""
    (process,) = [
        process
        for process in servers(pipeline)
        if any(tuple(one.raddr) == tuple(client) for one in process.net_connections())
    ]
    process.kill()
    process.wait()


# -- responses --------------------------------------------------------------------------------------------------------


@contextmanager
def streamed(url: str, **body: Any) -> Iterator[httpx.Response]:
    with httpx.stream("POST", f"{url}/v1/responses", json={"model": "echo", "stream": True, **body}) as answer:
        assert answer.status_code == 200
        yield answer


def events_of(answer: httpx.Response) -> Iterator[Event]:
    """The events of a stream; the id of each is its number."""
    number = ""
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            number = value
        elif name == "data":
            event = json.loads(value)
            assert number == str(event["sequence_number"])
            yield event


def undisturbed(url: str, **body: Any) -> list[Event]:
    with streamed(url, **body) as answer:
        return list(events_of(answer))


def content(events: list[Event]) -> tuple[list[str], dict[str, Any], Any]:
    """What events say, however they are cut: those that come once, the deltas of each type together, the response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events))), (
        "none is missing, none comes twice"
    )
    once = [event["type"] for event in events if "delta" not in event]
    deltas: dict[str, Any] = {}
    for event in events:
        if "delta" in event:
            sound = event["type"] == "response.audio.delta"
            deltas[event["type"]] = deltas.get(event["type"], b"" if sound else "") + (
                base64.b64decode(event["delta"]) if sound else event["delta"]
            )
    response = events[-1]["response"]
    return (
        once,
        deltas,
        [response["status"], [part["content"] for part in response["output"]], response["usage"]["output_tokens"]],
    )


@pytest.mark.parametrize(
    "body", [{"input": "the sea " * 20}, {"input": "the sea " * 8, **SPOKEN}], ids=["text", "sound"]
)
def test_a_stream_goes_on_when_its_process_is_killed(both: HttpPipeline, body: dict[str, Any]) -> None:
    """By the `openai` package's own call."""
    whole = undisturbed(both.url, **body)
    with streamed(both.url, **body) as answer:
        stream, seen = events_of(answer), []
        while sum("delta" in event for event in seen) < 10:
            seen.append(next(stream))
        kill_server_of(both, answer.extensions["network_stream"].get_extra_info("client_addr"))
        with pytest.raises(LOST):
            seen.extend(stream)
    assert len(seen) < len(whole)
    response_id = seen[0]["response"]["id"]
    rest = both.openai().responses.retrieve(response_id, stream=True, starting_after=seen[-1]["sequence_number"])
    seen.extend(event.to_dict() for event in rest)
    assert content(seen) == content(whole)
    assert both.openai().responses.retrieve(response_id).output_text == body["input"]
