"""What keeps the HTTP server's event loop free, and when the bytes of a request stop counting."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any, NoReturn, get_args, get_type_hints

import numpy
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from omni_actors.client import Audio, ChoiceStreams, RequestStream, Text
from omni_actors.errors import InvalidRequest, RequestTimeout
from omni_actors.http_server import state as server_state
from omni_actors.http_server.answer import Answer, AnswerResponse
from omni_actors.http_server.app import ENDPOINTS, Endpoint, RequestMiddleware, create_routes
from omni_actors.http_server.bodies import Submission, reserve
from omni_actors.http_server.encoders import encoded, encoder_of, fed
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.messages import Description, Done
from omni_actors.sharing import Budget

RATE = 24_000
SETTINGS = ServerSettings(endpoint="ipc:///tmp/nobody")
SCOPE: dict[str, Any] = {"type": "http", "state": {"request_id": "r"}}


def test_no_route_needs_a_thread_of_the_pool_for_every_request() -> None:
    """Starlette runs a route that is no coroutine in one."""
    routes = [route for route in create_routes(SETTINGS, Budget(0)).routes if isinstance(route, Route)]
    assert len(routes) > 20
    assert all(map(inspect.iscoroutinefunction, (route.endpoint for route in routes)))


def speech(seconds: float) -> Audio:
    return Audio(numpy.sin(numpy.arange(int(seconds * RATE)) / 17).astype(numpy.float32), RATE)


async def silent() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("never")


def answer_of(stream: RequestStream) -> Answer:
    return Answer(ChoiceStreams([stream]), Request(SCOPE, silent), {}, asyncio.Lock())


async def test_nothing_that_is_ready_waits_for_the_next_item() -> None:
    """Texts are not sent by routes that answer in sound alone, and must not keep the sound before them back."""
    stream = RequestStream("r", lambda request_id: None, lambda *_: None)
    answer = answer_of(stream)

    async def sound_only() -> AsyncIterator[bytes]:
        async for item in answer:
            if isinstance(item, Audio):
                yield b"sound"

    bodies: list[bytes] = []
    sent = asyncio.Event()

    async def send(message: Message) -> None:
        if message.get("body"):
            bodies.append(message["body"])
            sent.set()

    stream.deliver(speech(0.01))
    stream.deliver(Text("a text that came with it", [1]))
    response = asyncio.create_task(AnswerResponse(answer, sound_only(), "audio/pcm", 5.0)(SCOPE, silent, send))
    async with asyncio.timeout(20):
        await sent.wait()
        assert bodies == [b"sound"]
        stream.deliver(speech(0.01))
        stream.deliver(speech(0.01))
        stream.deliver(Done(usage={}))
        await response
    assert bodies == [b"sound", b"soundsound"], "what is ready at once goes in one write"


async def turns_of_the_loop(task: asyncio.Task[Any]) -> int:
    """How often the loop went round until a task was done."""
    count = 0
    while not task.done():
        await asyncio.sleep(0)
        count += 1
    return count


@pytest.mark.parametrize("name", ["opus", "mp3", "aac"])
async def test_a_codec_does_not_hold_up_the_loop(name: str) -> None:
    samples = speech(2.0).samples
    assert await turns_of_the_loop(asyncio.create_task(encoded(samples, name, RATE))) > 10
    assert await turns_of_the_loop(asyncio.create_task(fed(encoder_of(name, RATE), samples))) > 10


async def test_sound_of_many_answers_is_taken_one_at_a_time_with_turns_for_others_between() -> None:
    turns = asyncio.Lock()
    streams = [RequestStream(str(index), lambda request_id: None, lambda *_: None) for index in range(4)]
    rounds = 0
    seen: list[tuple[int, str]] = []

    async def listen(stream: RequestStream) -> None:
        async for _ in Answer(ChoiceStreams([stream]), Request(SCOPE, silent), {}, turns):
            seen.append((rounds, stream.request_id))

    for stream in streams:
        stream.deliver(speech(0.01))
        stream.deliver(Done(usage={}))
    listening = asyncio.gather(*map(listen, streams))
    while not listening.done():
        rounds += 1
        await asyncio.sleep(0)
    assert [request_id for _, request_id in seen] == ["0", "1", "2", "3"]
    assert len({number for number, _ in seen}) == len(streams), "no two in one turn of the loop"


class SlowPipeline:
    """Stands for the client: answers `describe` when the test lets it."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: asyncio.Queue[Description | RequestTimeout] = asyncio.Queue()

    async def describe(self, timeout: float) -> Description:
        self.asked += 1
        answer = await self.answers.get()
        if isinstance(answer, RequestTimeout):
            raise answer
        return answer


def description(name: str, *, healthy: bool = True, coordinator: str = "") -> Description:
    sizes = {"in_flight": 0, "max_in_flight": 1}
    return Description(name, "m", ("text",), (), RATE, healthy, **sizes, stages=(), coordinator=coordinator)


async def test_what_a_pipeline_is_said_to_take_while_it_starts_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process of the server that had asked shortly before refused what the last stage takes."""
    state, pipeline = ServerState(SETTINGS, Budget(SETTINGS.bodies_bytes)), SlowPipeline()
    monkeypatch.setattr(state, "client", pipeline)
    said = [
        ("starts", False, "one"),
        ("whole", True, "one"),
        ("starts again", False, "two"),
        ("whole again", True, "two"),
    ]
    async with asyncio.timeout(20):
        for name, healthy, coordinator in said:
            if name == "starts again":
                monkeypatch.setattr(server_state, "FRESH_SECONDS", 0.0)
            pipeline.answers.put_nowait(description(name, healthy=healthy, coordinator=coordinator))
            assert (await (state.describe() if name == "starts again" else state.facts())).pipeline == name
        monkeypatch.setattr(server_state, "FRESH_SECONDS", 0.0)
        pipeline.answers.put_nowait(description("degraded", healthy=False, coordinator="two"))
        await state.describe()
        assert (await state.facts()).pipeline == "degraded", "a stage that was lost is known all the same"


async def test_requests_do_not_wait_for_a_description_while_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_state, "FRESH_SECONDS", 0.0)
    state, pipeline = ServerState(SETTINGS, Budget(SETTINGS.bodies_bytes)), SlowPipeline()
    monkeypatch.setattr(state, "client", pipeline)
    async with asyncio.timeout(20):
        asking = [asyncio.create_task(state.facts()) for _ in range(3)]
        await asyncio.sleep(0)
        pipeline.answers.put_nowait(description("first"))
        assert [(await each).pipeline for each in asking] == ["first"] * 3
        assert pipeline.asked == 1, "one question for all"
        assert (await state.facts()).pipeline == "first", "a busy coordinator is not one that is gone"
        pipeline.answers.put_nowait(description("second"))
        assert (await state.facts("second")).pipeline == "second", "it may have been started again with this name"
        assert (await state.facts()).pipeline == "second"
        monkeypatch.setattr(server_state, "REMEMBERED_SECONDS", 0.0)
        pipeline.answers.put_nowait(RequestTimeout("no answer"))
        with pytest.raises(RequestTimeout):  # an old description does not stand in for a coordinator that is gone
            await state.facts()


async def test_a_request_has_the_priority_seed_and_time_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Client:
        async def submit_choices(self, prompt: str, count: int, **options: Any) -> NoReturn:
            asked.update(options)
            raise InvalidRequest("enough")

    state = ServerState(SETTINGS, Budget(0))
    monkeypatch.setattr(state, "client", Client())
    request = Request({**SCOPE, "headers": [], "state": {"request_id": "r", "traceparent": ""}})
    with pytest.raises(HttpError):
        await Answer.begin(request, state, Submission(priority=-3, seed=7, timeout=5.0), "hello", {})
    assert (asked["priority"], asked["seed"], asked["timeout"]) == (-3, 7, 5.0)


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one.body is not None], ids=lambda one: one.path)
def test_a_body_is_decoded_into_what_its_handler_takes(endpoint: Endpoint) -> None:
    taken = list(get_type_hints(endpoint.handler).values())[2]
    (kind,) = get_args(taken) or (taken,)  # that of a Form[...]
    assert issubclass(endpoint.body.kind, kind)


BODY = b"x" * 90_000
POSTED = {
    "type": "http",
    "method": "POST",
    "path": "/v1/chat/completions",
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
}


async def receive() -> Message:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def test_a_client_that_has_its_answer_may_send_as_much_again_at_once() -> None:
    """The second request comes while the server still sends the last piece of the first one's answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reserve(len((await receive())["body"]))
        await PlainTextResponse("answer")(scope, receive, send)

    settings = ServerSettings(endpoint="ipc:///tmp/none", bodies_bytes=100_000)
    server = RequestMiddleware(app, settings, Budget(settings.bodies_bytes))
    statuses: list[int] = []

    async def second(message: Message) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    async def first(message: Message) -> None:
        await second(message)
        if message["type"] == "http.response.body":
            await server(dict(POSTED), receive, second)

    await server(dict(POSTED), receive, first)
    assert statuses == [200, 200]
