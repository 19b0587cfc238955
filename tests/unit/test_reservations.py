"""When the bytes of a request stop counting against the bound on those of all requests."""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from omni_actors.http_server.app import RequestMiddleware
from omni_actors.http_server.bodies import reserve
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget

BODY = b"x" * 90_000
SCOPE = {
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
            await server(dict(SCOPE), receive, second)

    await server(dict(SCOPE), receive, first)
    assert statuses == [200, 200]
