"""Several processes of the HTTP server on one port: what they share, and what goes on when one of them is killed."""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from omni_actors.http_server.settings import ServerSettings
from tests.support.http_servers import http_servers
from tests.support.nightly import nightly
from tests.support.realtime import metric, serving_sessions
from tests.support.servers import HttpPipeline, launch, sound
from tests.support.waiting import PATIENCE, until

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


@pytest.mark.parametrize("body", [nightly({"input": "the sea " * 20}), {"input": "the sea " * 8, **SPOKEN}])
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
        """Ask for an answer; returns its text."""
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


WORKERS = 3
MANY = 40  # connections, so that no process is left out: that happens once in four million runs


def each(url: str, method: str = "GET", **options: object) -> list[httpx.Response]:
    """Answers to a request over so many new connections that all processes have given some."""
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda _: httpx.request(method, url, **options), range(MANY)))


@contextlib.contextmanager
def connected(pipeline: HttpPipeline) -> Iterator[tuple[list[socket.socket], dict[int, int]]]:
    """Connections that have been taken, and how many of them each process has."""
    parts = urlsplit(pipeline.url)
    with contextlib.ExitStack() as stack:
        address = (parts.hostname, parts.port)
        sockets = [stack.enter_context(socket.create_connection(address)) for _ in range(MANY)]

        def taken() -> dict[int, int]:
            listed = {process.pid: process.net_connections() for process in http_servers(pipeline)}
            return {
                pid: sum(one.raddr != () and one.laddr.port == parts.port for one in those)
                for pid, those in listed.items()
            }

        yield sockets, until(lambda: found if sum((found := taken()).values()) == MANY else None, what="connections")


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_connections_are_spread_over_all_processes(several: HttpPipeline) -> None:
    with connected(several) as (_, counts):
        assert len(counts) == WORKERS
        assert min(counts.values()) > 0, counts


def test_what_one_process_keeps_all_others_know(several: HttpPipeline) -> None:
    file = httpx.post(f"{several.url}/v1/files", files={"file": sound()}).json()["id"]
    assert {answer.status_code for answer in each(f"{several.url}/v1/files/{file}")} == {200}
    content = [{"type": "text", "text": "What is it?"}, {"type": "file", "file": {"file_id": file}}]
    asked = {"model": "echo", "messages": [{"role": "user", "content": content}]}
    heard = httpx.post(f"{several.url}/v1/chat/completions", json=asked)
    assert heard.status_code == 200, heard.text
    assert httpx.delete(f"{several.url}/v1/files/{file}").json()["deleted"]
    assert {answer.status_code for answer in each(f"{several.url}/v1/files/{file}")} == {404}

    first = httpx.post(f"{several.url}/v1/responses", json={"model": "echo", "input": "one"}).json()["id"]
    more = {"model": "echo", "input": " two", "previous_response_id": first}
    answers = each(f"{several.url}/v1/responses", "POST", json=more)
    assert {answer.json()["output"][0]["content"][0]["text"] for answer in answers} == {"oneone two"}

    spoken = {**asked, "messages": [{"role": "user", "content": "sea"}]}
    spoken |= {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
    said = httpx.post(f"{several.url}/v1/chat/completions", json=spoken).json()["choices"][0]["message"]["audio"]["id"]
    spoken["messages"] += [{"role": "assistant", "audio": {"id": said}}, {"role": "user", "content": "!"}]
    assert {answer.status_code for answer in each(f"{several.url}/v1/chat/completions", "POST", json=spoken)} == {200}


def test_any_process_counts_the_sessions_of_all(several: HttpPipeline) -> None:
    def sessions() -> set[float]:
        return {metric(several.url, "omni_realtime_sessions ") for _ in range(MANY // 4)}

    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(talking(several.url, model="echo"))
        until(lambda: sessions() == {12.0}, what="twelve sessions in the metrics of every process")
        top = [sys.executable, "-m", "omni_actors.cli.main", "top", several.endpoint, "--once"]
        shown = subprocess.run(top, capture_output=True, text=True, timeout=60 * PATIENCE)
        assert "12 realtime sessions" in " ".join(shown.stdout.split()), shown
    until(lambda: sessions() == {0.0}, what="the end of the sessions in the metrics")


def test_a_process_that_dies_ends_its_own_connections_only(several: HttpPipeline) -> None:
    kept = httpx.post(f"{several.url}/v1/responses", json={"model": "echo", "input": "sea"}).json()["id"]
    with connected(several) as (sockets, counts):
        pid, lost = counts.popitem()
        psutil.Process(pid).kill()
        until(lambda: sum(map(is_open, sockets)) == MANY - lost, what="the end of its connections")
    until(lambda: len(http_servers(several)) == WORKERS, 30, "the process that takes its place")
    assert {answer.status_code for answer in each(f"{several.url}/v1/responses/{kept}")} == {200}


@pytest.mark.nightly
def test_a_process_that_stands_still_is_replaced(several: HttpPipeline) -> None:
    (stopped, *_) = http_servers(several)
    stopped.suspend()
    until(
        lambda: len(http_servers(several)) == WORKERS and stopped not in http_servers(several),
        30,
        "the process in its place",
    )
    assert {answer.status_code for answer in each(f"{several.url}/health")} == {200}


def test_the_port_of_several_processes_is_taken_for_another_server_of_this_user(several: HttpPipeline) -> None:
    port = urlsplit(several.url).port
    done = launch("--http", f"127.0.0.1:{port}", "--http-workers", "2")
    assert done.returncode == 2, done.stderr
    assert "Cannot listen" in done.stderr
