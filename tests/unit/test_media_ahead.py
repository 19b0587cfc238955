"""Media are decoded while the body that holds them still arrives, and side by side."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy
import psutil
import pytest
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from omni_actors.errors import Aborted
from omni_actors.http_server.app import create_app
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.fetch import Fetcher
from omni_actors.http_server.json_body import JsonBody
from omni_actors.http_server.long_string_scan import LONG, MAX_QUOTES, LongStringScan
from omni_actors.http_server.media import MediaReader
from omni_actors.http_server.media_ahead import worth_decoding
from omni_actors.http_server.middleware import RequestMiddleware
from omni_actors.http_server.reservations import BodyBytes
from omni_actors.http_server.schemas import ChatRequest
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.stores import FileStore, Transcripts
from omni_actors.media.decoders import Decoder, DecoderThreads, Task
from tests.support.servers import film, picture, serving, sound, tone
from tests.support.waiting import PATIENCE, eventually, until

T = TypeVar("T")
BODY = JsonBody(ChatRequest)
PADDING = struct.pack(">I4s80000x", 80_008, b"free")  # a box of an MP4 that every reader skips
FILM = film(1.0) + PADDING
SOUND = sound(3.0)
PICTURE = picture(200, 200)
Pieces = Sequence[bytes | Callable[[], Any]]


class NotedDecoders(DecoderThreads):
    """Decoders that note what they are given, and begin with it once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task[Any]] = []
        self.at_work = 0
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, work: Callable[[Decoder], T]) -> Task[T]:
        def gated(decoder: Decoder) -> T:
            self.at_work += 1
            self.gate.wait(60)
            return work(decoder)

        task = super().submit(gated)
        self.tasks.append(task)
        return task

    def have_done(self, count: int) -> bool:
        return len(self.tasks) == count and all(task.future.done() for task in self.tasks)


class Server:
    """The server's own middleware, body and media, without a pipeline behind: it keeps the messages of a request."""

    def __init__(self, decoders: DecoderThreads, *, begins: bool = True, decoded: bool = True, **settings: Any) -> None:
        made = ServerSettings(endpoint="ipc:///nowhere", **settings)
        self.bodies = BodyBytes(made.bodies_bytes)
        reader = MediaReader(made, Fetcher([], 1), FileStore(1 << 20, 60.0), Transcripts(), decoders)
        self.messages: list[dict[str, Any]] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                body = await BODY(Request(scope, receive))
                self.messages = await reader.messages(body.messages, {"image": 3})
                raise HttpError(418, "The messages are there.")
            except HttpError as error:
                await error.response()(scope, receive, send)

        self._app = RequestMiddleware(
            app,
            made,
            [Mount("/", app)],
            self.bodies,
            lambda path, reservation: reader.ahead(reservation, decoded=decoded) if begins else None,
        )

    async def post(self, pieces: Pieces) -> tuple[int, bytes]:
        """Send a body; a function among its pieces must return true before the next one is sent."""
        left = iter(pieces)
        sent: list[Message] = []

        async def receive() -> Message:
            for piece in left:
                if isinstance(piece, bytes):
                    return {"type": "http.request", "body": piece, "more_body": True}
                await eventually(piece)
            return {"type": "http.request", "body": b"", "more_body": False}

        await self.handle(receive, _into(sent))
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def handle(self, receive: Receive, send: Send) -> None:
        await self._app(scope(), receive, send)

    @property
    def parts(self) -> list[dict[str, Any]]:
        return self.messages[0]["content"]


def scope() -> Scope:
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}


def _into(sent: list[Message]) -> Send:
    async def send(message: Message) -> None:
        sent.append(message)

    return send


@pytest.fixture(scope="module")
def running_decoders() -> Iterator[NotedDecoders]:
    threads = NotedDecoders()
    yield threads
    threads.gate.set()
    threads.close()


@pytest.fixture
def decoders(running_decoders: NotedDecoders) -> NotedDecoders:
    until(lambda: all(task.future.done() for task in running_decoders.tasks))
    running_decoders.tasks, running_decoders.at_work = [], 0
    running_decoders.gate.set()
    return running_decoders


def part(modality: str, data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    if modality == "sound":
        return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    return {"type": f"{modality}_url", f"{modality}_url": {"url": f"data:{modality}/any;base64,{text}"}}


def chat(*parts: dict[str, Any]) -> bytes:
    content = [{"type": "text", "text": 'Say "\\" and then: "url":"'}, *parts]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def after(body: bytes, data: bytes) -> tuple[bytes, bytes]:
    """A body in two pieces, the first of which ends with the string that has this medium."""
    end = base64.b64encode(data) + b'"'
    cut = body.index(end) + len(end)
    return body[:cut], body[cut:]


# ---------------------------------------------------------------------------------------------------------------------
# While the body arrives


async def test_media_are_decoded_before_the_body_is_complete(decoders: NotedDecoders) -> None:
    body = chat(part("video", FILM), part("sound", SOUND), part("image", PICTURE))
    first, rest = after(body, FILM)
    second, last = after(rest, SOUND)
    server = Server(decoders)
    ends = [lambda: decoders.have_done(1), second, lambda: decoders.have_done(2), last[:-1]]
    status, _ = await server.post([first, *ends, lambda: decoders.have_done(3), last[-1:]])
    assert status == 418
    _, video, audio, image = server.parts
    assert video["video"][0].shape == (2, 64, 64, 3)
    samples, rate = audio["audio"]
    assert rate == 16_000
    numpy.testing.assert_allclose(samples, tone(3.0), atol=1e-4)
    wanted = numpy.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=numpy.uint8)
    numpy.testing.assert_array_equal(image["image"], wanted)
    assert decoders.have_done(3), "nothing was decoded a second time"
    assert server.bodies.used == 0


async def test_a_body_is_handled_while_its_media_are_still_decoded(decoders: NotedDecoders) -> None:
    server = Server(decoders)
    decoders.gate.clear()
    posting = asyncio.create_task(server.post(after(chat(part("video", FILM)), FILM)))
    await eventually(lambda: decoders.at_work)
    decoders.gate.set()
    assert (await posting)[0] == 418
    assert server.parts[1]["video"][0].shape == (2, 64, 64, 3)
    assert decoders.have_done(1)


async def test_a_response_that_is_kept_has_files_of_sound_and_pictures(decoders: NotedDecoders) -> None:
    server = Server(decoders, decoded=False)
    await server.post([chat(part("sound", SOUND), part("image", PICTURE))])
    assert [server.parts[1]["audio"], server.parts[2]["image"]] == [SOUND, PICTURE]
    assert decoders.have_done(2)


def test_what_grows_much_is_sent_on_as_a_file() -> None:
    assert worth_decoding(b"x", 4 << 20)
    assert not worth_decoding(bytes(2 << 20), (4 << 20) + 1)
    assert worth_decoding(bytes(9 << 20), 18 << 20)
    assert not worth_decoding(bytes(9 << 20), (18 << 20) + 1)


BROKEN_FILM = b"\0" * 90_000
WRONG: dict[str, bytes] = {
    "malformed": chat(part("image", PICTURE), part("video", BROKEN_FILM), part("sound", b"\0" * 90_000)),
    "the first of two": chat(part("sound", b"no sound"), part("video", BROKEN_FILM)),
    "not base64": chat(part("image", PICTURE)).replace(b";base64,", b";base64,!"),
    "another type": chat(part("image", PICTURE)).replace(b"image/any", b"video/any"),
    "no type": chat(part("image", PICTURE)).replace(b"data:image/any;base64,", b""),
    "too many": chat(*[part("image", PICTURE)] * 4),
    "too large": chat(part("sound", sound(60.0, 48_000))),
    "an unknown field": chat(part("image", PICTURE))[:-1] + b',"modle":1}',
    "no JSON": chat(part("image", PICTURE))[:-2],
    "a later message": chat(part("video", BROKEN_FILM))[:-2] + b',{"role":"assistant","audio":{"id":"gone"}}]}',
}


@pytest.mark.parametrize("name", WRONG)
async def test_errors_are_those_of_a_body_that_is_read_whole(name: str, decoders: NotedDecoders) -> None:
    body = WRONG[name]
    answers = []
    for begins in (False, True):
        server = Server(decoders, begins=begins, media_bytes=4_000_000)
        answers.append(await server.post([body[:200_000], body[200_000:]]))
        assert server.bodies.used == 0
    assert answers[0] == answers[1]
    assert answers[0][0] in (400, 413)


async def test_nothing_is_begun_where_there_is_no_room_for_it(decoders: NotedDecoders) -> None:
    body = chat(part("video", FILM))
    server = Server(decoders, bodies_bytes=len(body) + 1000, body_bytes=len(body) + 1000)
    first, last = after(body, FILM)
    tasks_before_the_end: list[int] = []

    def note() -> bool:
        tasks_before_the_end.append(len(decoders.tasks))
        return True

    assert (await server.post([first, note, last]))[0] == 418
    assert tasks_before_the_end == [0]
    assert decoders.have_done(1)


async def test_no_more_media_are_begun_than_a_request_may_have(decoders: NotedDecoders) -> None:
    body = chat(*[part("image", picture(side, 200)) for side in (150, 160, 170)])
    server = Server(decoders, media_parts=2)
    status, answer = await server.post([body[:-1], lambda: decoders.have_done(2), body[-1:]])
    assert status == 400
    assert b"3 media; at most 2" in answer
    assert len(decoders.tasks) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Side by side


async def test_media_of_one_request_are_decoded_side_by_side(decoders: NotedDecoders) -> None:
    server = Server(decoders, begins=False)
    decoders.gate.clear()
    posting = asyncio.create_task(server.post([chat(part("video", film(1.0)), part("video", film(2.0)))]))
    await eventually(lambda: decoders.at_work == 2, what="both films to be decoded")
    decoders.gate.set()
    await posting
    assert [len(one["video"][0]) for one in server.parts[1:]] == [2, 4]


class MeetingFetcher(Fetcher):
    """Every fetch waits until another one is under way."""

    def __init__(self) -> None:
        super().__init__([], 1)
        self._meeting = asyncio.Barrier(2)

    async def fetch(self, url: str, param: str) -> bytes:
        async with asyncio.timeout(5 * PATIENCE):
            await self._meeting.wait()
        return PICTURE if url.endswith("1") else SOUND


async def test_media_of_one_request_are_fetched_side_by_side(decoders: NotedDecoders) -> None:
    reader = MediaReader(
        ServerSettings(endpoint="ipc:///nowhere"), MeetingFetcher(), FileStore(1 << 20, 60.0), Transcripts(), decoders
    )
    parts = [
        {"type": "image_url", "image_url": {"url": "https://a.example/1"}},
        {"type": "audio_url", "audio_url": {"url": "https://a.example/2"}},
    ]
    request = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    body = await BODY(Request(scope(), _whole(request)))
    (message,) = await reader.messages(body.messages, {})
    assert message["content"] == [{"type": "image", "image": PICTURE}, {"type": "audio", "audio": SOUND}]


def _whole(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def test_what_was_begun_ends_with_the_connection(decoders: NotedDecoders) -> None:
    server = Server(decoders)
    decoders.gate.clear()

    pieces = [after(chat(part("video", FILM), part("image", PICTURE)), FILM)[0]]

    async def receive() -> Message:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}
        await eventually(lambda: decoders.at_work)
        return {"type": "http.disconnect"}

    sent: list[Message] = []
    await server.handle(receive, _into(sent))
    assert sent[0]["status"] == 400
    assert server.bodies.used == 0
    decoders.gate.set()
    (task,) = decoders.tasks
    await eventually(task.future.done)
    assert isinstance(task.future.exception(), Aborted)


def decoders_that_run() -> set[int]:
    return {child.pid for child in psutil.Process().children() if "omni_actors.media.worker" in child.cmdline()}


def test_the_server_begins_with_media_while_a_body_arrives_over_a_socket() -> None:
    before = decoders_that_run()
    first, rest = after(chat(part("video", FILM)), FILM)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(first) + len(rest)}\r\n\r\n"
    with serving(create_app(ServerSettings(endpoint="ipc:///nowhere")), lifespan="on") as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(head.encode() + first)
            until(lambda: decoders_that_run() - before, what="a decoder, before the body is complete")
            connection.sendall(b"!" * len(rest))
            answer = connection.makefile("rb").read()
        assert b"400 Bad Request" in answer
        assert b"invalid_json" in answer
    assert decoders_that_run() <= before


# ---------------------------------------------------------------------------------------------------------------------
# Finding the strings


def found_in(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    scan = LongStringScan()
    return [(one.key, b"".join(one.pieces)) for piece in pieces for one in scan.feed(piece)]


def test_long_strings_are_found_wherever_the_body_is_cut() -> None:
    long = b"a" * LONG
    strings = [long + b"\\\\", long + b'\\"url\\":\\"' + long, long + b"\\/" * 9, long]
    body = b'{"text":"' + long + b'","a\\"":"b\\\\","url" : "' + strings[0] + b'","data":"short","data":"'
    body += strings[1] + b'","file_data":"' + strings[2] + b'","url":[' + b'"' + long + b'"],"x":{"url":"'
    body += strings[3] + b'"}}'
    wanted = list(zip((b"url", b"data", b"file_data", b"url"), strings, strict=True))
    assert found_in([body]) == wanted
    special = [index for index, character in enumerate(body) if character in b'"\\:/']
    chance = random.Random(0)
    for first in (*special, *(index + 1 for index in special)):
        cuts = sorted({0, first, *chance.sample(special, 6), len(body)})
        assert found_in([body[a:b] for a, b in itertools.pairwise(cuts)]) == wanted


def test_a_body_of_quotation_marks_is_not_walked_to_its_end() -> None:
    medium = b',"url":"' + b"a" * LONG + b'"'
    assert len(found_in([b'{"a":"b"' + medium])) == 1
    assert found_in([b'"' * MAX_QUOTES, medium]) == []
