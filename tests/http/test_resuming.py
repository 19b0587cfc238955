"""Responses and realtime sessions go on at another process of the server when their own is killed, or their line."""

from __future__ import annotations

import base64
import collections
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from omni_actors.http_server.settings import ServerSettings
from tests.support.http_servers import http_servers
from tests.support.realtime import serving_sessions
from tests.support.servers import HttpPipeline

SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan"}}
LOST = (httpx.ReadError, httpx.RemoteProtocolError)
Event = dict[str, Any]


def kill_server_of(pipeline: HttpPipeline, client: tuple[str, int]) -> None:
    for process in http_servers(pipeline):
        if any(tuple(one.raddr) == tuple(client) for one in process.net_connections()):
            process.kill()
            process.wait()
            return
    raise AssertionError(f"no process has the connection of {client}")


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


def content(events: list[Event]) -> tuple[list[str], dict[str, bytes], list[Any]]:
    """What events say, however they are cut: those that come once, the deltas of each type together, the response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events))), "each comes once"
    once = [event["type"] for event in events if "delta" not in event]
    deltas: dict[str, bytes] = collections.defaultdict(bytes)
    for event in events:
        if "delta" in event:
            sound = event["type"] == "response.audio.delta"
            deltas[event["type"]] += base64.b64decode(event["delta"]) if sound else event["delta"].encode()
    response = events[-1]["response"]
    texts = [part["content"] for part in response["output"]]
    return once, deltas, [response["status"], texts, response["usage"]["output_tokens"]]


def kept_request(pipeline: HttpPipeline, response_id: str) -> Event:
    """The request of a stream, as another process would find it."""
    (journal,) = pipeline.run_dir.glob(f"*/streams/{response_id}")
    head = json.loads(journal.read_bytes().partition(b"\n\n")[0])
    request: Event = json.loads(base64.b64decode(head["body"]))
    return request


@pytest.mark.parametrize(
    "body", [{"input": "the sea " * 20}, {"input": "the sea " * 8, **SPOKEN}], ids=["text", "sound"]
)
def test_a_stream_goes_on_when_its_process_is_killed(several: HttpPipeline, body: dict[str, Any]) -> None:
    """By the `openai` package's own call."""
    whole = undisturbed(several.url, **body)
    with streamed(several.url, **body) as answer:
        stream, seen = events_of(answer), []
        while sum("delta" in event for event in seen) < 10:
            seen.append(next(stream))
        kill_server_of(several, answer.extensions["network_stream"].get_extra_info("client_addr"))
        with pytest.raises(LOST):
            seen.extend(stream)
    assert len(seen) < len(whole)
    response_id = seen[0]["response"]["id"]
    assert isinstance(kept_request(several, response_id)["seed"], int), "made again, it is the same answer"
    rest = several.openai().responses.retrieve(response_id, stream=True, starting_after=seen[-1]["sequence_number"])
    seen.extend(event.to_dict() for event in rest)
    assert content(seen) == content(whole)
    assert several.openai().responses.retrieve(response_id).output_text == body["input"]


def rest_of(url: str, response_id: str, **options: Any) -> list[Event]:
    with httpx.stream("GET", f"{url}/v1/responses/{response_id}?stream=true", timeout=60, **options) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events_of(answer))


def test_a_stream_that_its_client_has_lost_goes_on_for_all_who_ask(several: HttpPipeline) -> None:
    """Browsers name the last event in a header."""
    body = {"input": "the sea " * 20}
    with streamed(several.url, **body) as answer:
        stream = events_of(answer)
        seen = [next(stream) for _ in range(10)]
        response_id = seen[0]["response"]["id"]
        beside = rest_of(several.url, response_id)
        whole = seen + list(stream)
        assert beside == whole, "it follows what the first one is sent"
    with streamed(several.url, **body) as answer:
        stream = events_of(answer)
        seen = [next(stream) for _ in range(10)]
        response_id = seen[0]["response"]["id"]
    with ThreadPoolExecutor() as threads:
        header = {"Last-Event-ID": str(seen[-1]["sequence_number"])}
        asked = [threads.submit(rest_of, several.url, response_id, headers=header) for _ in range(4)]
    first, *others = [one.result() for one in asked]
    assert content(seen + first) == content(whole)
    assert others == [first] * 3
    assert rest_of(several.url, response_id) == seen + first, "also after its end"


def test_a_server_of_one_process_keeps_streams_too(several: HttpPipeline) -> None:
    with serving_sessions(ServerSettings(endpoint=several.endpoint)) as alone:
        whole = undisturbed(alone, input="sea")
        assert rest_of(alone, whole[0]["response"]["id"]) == whole


def test_a_stream_that_cannot_go_on_says_what_to_do(several: HttpPipeline) -> None:
    def refusal(response_id: str, query: str = "stream=true", **headers: str) -> tuple[int, str, str]:
        answer = httpx.get(f"{several.url}/v1/responses/{response_id}?{query}", headers=headers)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    kept, gone = (undisturbed(several.url, input="sea", store=store)[0]["response"]["id"] for store in (True, False))
    whole = httpx.post(f"{several.url}/v1/responses", json={"model": "echo", "input": "sea"}).json()["id"]
    assert refusal("resp_0") == refusal(gone) == (404, "response_not_found", "response_id")
    assert refusal(whole) == (400, "response_not_resumable", "stream")
    assert refusal(kept, "starting_after=1") == (400, "invalid_value", "starting_after")
    assert refusal(kept, **{"Last-Event-ID": "x"}) == (400, "invalid_value", "Last-Event-ID")
    assert httpx.delete(f"{several.url}/v1/responses/{kept}").json()["deleted"]
    assert refusal(kept) == (404, "response_not_found", "response_id")


class Talk:
    """A session over a WebSocket, without detection of turns."""

    def __init__(self, line: ClientConnection) -> None:
        self._line = line
        self.address = line.socket.getsockname()
        self.created = self.until("session.created")[0]["session"]

    def send(self, kind: str, **fields: Any) -> None:
        self._line.send(json.dumps({"type": kind, **fields}))

    def until(self, kind: str, times: int = 1) -> list[Event]:
        found: list[Event] = []
        while sum(event["type"] == kind for event in found) < times:
            found.append(json.loads(self._line.recv(timeout=40)))
        return found

    def lose(self) -> None:
        self._line.socket.shutdown(socket.SHUT_RDWR)

    def say(self, text: str) -> None:
        parts = [{"type": "input_text", "text": text}]
        self.send("conversation.item.create", item={"type": "message", "role": "user", "content": parts})

    def hear(self, seconds: float) -> None:
        self.send("input_audio_buffer.append", audio=base64.b64encode(bytes(int(48_000 * seconds))).decode())
        self.send("input_audio_buffer.commit")

    def answered(self) -> str:
        self.send("response.create")
        events = self.until("response.done")
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@contextmanager
def talking(url: str, key: str = "none", **query: str) -> Iterator[Talk]:
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime?{urlencode(query)}"
    with connect(address, open_timeout=60, additional_headers={"Authorization": f"Bearer {key}"}) as line:
        yield Talk(line)


SESSION = {"type": "realtime", "output_modalities": ["text"], "audio": {"input": {"turn_detection": None}}}


def test_a_session_goes_on_when_its_process_is_killed(several: HttpPipeline) -> None:
    """With its configuration and its items, of the answer that was being made with none."""
    with talking(several.url, model="echo") as first:
        first.send("session.update", session={**SESSION, "instructions": "hi, "})
        first.hear(1.0)
        first.say("sea")
        assert first.answered() == "hi, sea"
        first.say("salt " * 40)
        first.send("response.create")
        first.until("response.output_text.delta", 5)
        first.say("!")
        first.until("conversation.item.done")
        kill_server_of(several, first.address)
        with pytest.raises(ConnectionClosed):
            first.until("never")
    with talking(several.url, session=first.created["id"]) as second:
        assert second.created["id"] == first.created["id"]
        assert second.created["expires_at"] == first.created["expires_at"]
        assert second.created["instructions"] == "hi, "
        shown = second.until("conversation.item.done", 5)
        items = [event["item"] for event in shown if event["type"] == "conversation.item.added"]
        assert [item["role"] for item in items] == ["user", "user", "assistant", "user", "user"]
        second.send("conversation.item.retrieve", item_id=items[0]["id"])
        (heard,) = second.until("conversation.item.retrieved")[-1]["item"]["content"]
        assert base64.b64decode(heard["audio"]) == bytes(48_000)
        assert second.answered() == "hi, seahi, sea" + "salt " * 40 + "!"


def test_a_session_whose_line_broke_goes_on_at_once_and_once(several: HttpPipeline) -> None:
    with talking(several.url, model="echo") as first:
        first.send("session.update", session=SESSION)
        first.say("sea")
        first.until("conversation.item.done")
        with talking(several.url, session=first.created["id"]) as second:
            assert second.answered() == "sea"
            first.say("?")
            closed = first.until("error")[-1]["error"]
            assert closed["code"] == "session_resumed"
            second.lose()
        with talking(several.url, session=first.created["id"]) as third:
            assert [event["type"] for event in third.until("conversation.item.done", 2)].count("error") == 0
            assert third.answered() == "seasea"


def test_a_session_goes_on_for_its_owner_until_it_is_closed(several: HttpPipeline) -> None:
    def refusal(**query: str) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as caught, talking(several.url, **query):
            pass
        response = caught.value.response
        return response.status_code, json.loads(response.body)["error"]["code"]

    with talking(several.url, model="echo") as session:
        session_id = session.created["id"]
        assert refusal(session=session_id, intent="transcription") == (400, "invalid_value")
    assert refusal(session=session_id) == (404, "session_not_found")
    assert refusal(session="sess_0") == (404, "session_not_found")
