"""Requests made to cost much: what they hold is bounded, and other clients are served meanwhile."""

from __future__ import annotations

import base64
import contextlib
import socket

import httpx

from tests.support.http_servers import http_server
from tests.support.servers import HttpPipeline, sound
from tests.support.waiting import PATIENCE, until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LARGE = 600_000  # bytes, of a megabyte that all requests may hold


def test_clients_that_do_not_read_a_long_answer_hold_little_and_are_cut_off(talker: HttpPipeline) -> None:
    spoken = {"model": "echo", "input": "x" * 600, "modalities": ["text", "audio"]}
    answer = httpx.post(f"{talker.url}{RESPONSES}", json=spoken, timeout=60)
    path = f"{RESPONSES}/{answer.json()['id']}"
    assert httpx.get(f"{talker.url}{path}").content == answer.content
    assert len(answer.content) > 7 << 20
    server = http_server(talker)
    memory, files = server.memory_info().rss, server.num_fds()
    host, port = talker.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            connection.settimeout(10 * PATIENCE)
            assert connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        assert server.memory_info().rss - memory < 4 * len(answer.content)
        until(lambda: server.num_fds() <= files, 20, "the connections are closed")


def test_what_is_kept_counts_as_if_it_were_in_the_body(talker: HttpPipeline) -> None:
    recording = sound(LARGE / 2 / 16_000)
    with httpx.Client(base_url=talker.url, timeout=60) as client:
        uploaded = client.post("/v1/files", files={"file": ("a.wav", recording)}).json()["id"]
        file = {"type": "file", "file": {"file_id": uploaded}}

        def chat(*parts: object) -> httpx.Response:
            content = [{"type": "text", "text": "hi"}, *parts]
            return client.post(CHAT, json={"model": "echo", "messages": [{"role": "user", "content": content}]})

        assert chat(file).status_code == 200
        assert chat(file, file).status_code == 503
        audio = {"data": base64.b64encode(recording).decode(), "format": "wav"}
        heard = [{"type": "input_text", "text": "hi"}, {"type": "input_audio", "input_audio": audio}]
        begun = [{"role": "user", "content": heard}]
        first = client.post(RESPONSES, json={"model": "echo", "input": begun}).json()

        def continued(*parts: object) -> httpx.Response:
            turn = {"role": "user", "content": [{"type": "input_text", "text": "and?"}, *parts]}
            return client.post(
                RESPONSES, json={"model": "echo", "input": [turn], "previous_response_id": first["id"], "store": False}
            )

        assert continued().status_code == 200
        refused = continued({"type": "input_file", "file_id": uploaded})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert chat(file).status_code == 200, "all is free again"


def test_the_servers_process_has_the_settings_of_the_yaml(talker: HttpPipeline) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "echo", "messages": [{"role": "user", "content": 3 * [part]}]}
    answer = httpx.post(f"{talker.url}{CHAT}", json=body)
    assert (answer.status_code, "at most 2 are allowed" in answer.text) == (400, True), answer.text
    answer = httpx.post(f"{talker.url}{CHAT}", json={**body, "user": "x" * (1 << 20)})
    assert (answer.status_code, f"limit of {1 << 20} bytes" in answer.text) == (413, True), answer.text
