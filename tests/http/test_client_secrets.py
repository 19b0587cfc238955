"""Client secrets: they open realtime sessions as they say, on each server with the same key, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_actors.http_server.realtime.client_secrets import Secret, opened, sealed
from omni_actors.http_server.settings import ServerSettings
from tests.support.realtime import serving_sessions
from tests.support.servers import HttpPipeline, openai_client

LATER = int(time.time()) + 3600
SESSION = {"type": "realtime", "model": "echo", "instructions": "hi", "audio": {"output": {"voice": "Ethan"}}}


@pytest.fixture(scope="module")
def servers(echo_pipeline: HttpPipeline) -> Iterator[list[str]]:
    """Two with the same key, and one with another."""
    keys = ("sesame", "sesame", "other")
    settings = [ServerSettings(endpoint=echo_pipeline.endpoint, api_key=key, check_host=False) for key in keys]
    with ExitStack() as stack:
        yield [stack.enter_context(serving_sessions(own)) for own in settings]


def ws(url: str, query: str = "", **options: Any) -> connect:
    return connect(f"{url.replace('http', 'ws', 1)}/v1/realtime{query}", **options)


async def begun(url: str, *, lose: bool = False, **options: Any) -> dict[str, Any]:
    """The session that a secret begins; then it is closed, or its connection is lost."""
    async with ws(url, **options) as websocket:
        session: dict[str, Any] = json.loads(await websocket.recv())["session"]
        if lose:
            websocket.transport.abort()
        return session


def test_the_secret_of_the_openai_package_is_made(servers: list[str]) -> None:
    client = openai_client(servers[0], api_key="sesame")
    made = client.realtime.client_secrets.create(session=SESSION, expires_after={"anchor": "created_at", "seconds": 60})
    assert made.value.startswith("ek_")
    assert made.session.type == "realtime"
    assert made.session.instructions == "hi"
    assert made.session.audio.output.voice == "Ethan"
    longer = client.realtime.client_secrets.create()
    assert abs(longer.expires_at - made.expires_at - 540) < 60, "600 s by default"


async def test_a_secret_opens_sessions_of_every_server_with_the_key(servers: list[str]) -> None:
    one, two, other = servers
    async with AsyncOpenAI(base_url=f"{one}/v1", api_key="sesame") as client:
        secret = (await client.realtime.client_secrets.create(session=SESSION)).value
    async with AsyncOpenAI(base_url=f"{two}/v1", api_key=secret) as client, client.realtime.connect() as connection:
        assert (await connection.recv()).session.instructions == "hi"
        await connection.session.update(session={"type": "realtime", "instructions": "ho"})
        assert (await connection.recv()).session.instructions == "ho"
    session = await begun(two, subprotocols=["realtime", f"openai-insecure-api-key.{secret}"])
    assert session["audio"]["output"]["voice"] == "Ethan"
    for headers in ({"authorization": f"Bearer {secret}"}, {"authorization": f"Basic {secret}"}):
        with pytest.raises(InvalidStatus) as caught:
            await begun(other if "Bearer" in str(headers) else two, additional_headers=headers)
        assert caught.value.response.status_code == 401


async def test_a_lost_session_goes_on_for_the_key_that_began_it(servers: list[str]) -> None:
    keys = [*(sealed(Secret(LATER + number, SESSION), "sesame") for number in range(2)), "sesame"]
    headers = [{"authorization": f"Bearer {key}"} for key in keys]
    session_id = (await begun(servers[0], additional_headers=headers[0], lose=True))["id"]
    for others in headers[1:]:
        with pytest.raises(InvalidStatus) as caught:
            await begun(servers[0], query=f"?session={session_id}", additional_headers=others)
        assert caught.value.response.status_code == 404
    session = await begun(servers[0], query=f"?session={session_id}", additional_headers=headers[0])
    assert session["id"] == session_id
    assert session["instructions"] == "hi"


def test_a_secret_opens_nothing_else(servers: list[str]) -> None:
    secret = sealed(Secret(LATER, {}), "sesame")
    for path in ("/v1/models", "/metrics", "/v1/files"):
        assert httpx.get(f"{servers[0]}{path}", headers={"authorization": f"Bearer {secret}"}).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        openai_client(servers[0], api_key=secret).realtime.client_secrets.create()


async def test_a_secret_may_be_for_transcripts_and_needs_no_key_where_none_is(echo: HttpPipeline) -> None:
    made = openai_client(echo.url).realtime.client_secrets.create(session={"type": "transcription"})
    assert made.session.type == "transcription"
    headers = {"authorization": f"Bearer {made.value}"}
    assert (await begun(echo.url, additional_headers=headers))["type"] == "transcription"
    with pytest.raises(InvalidStatus) as caught:
        await begun(echo.url, additional_headers={"authorization": f"Bearer {made.value}0"})
    assert caught.value.response.status_code == 401


def test_a_secret_for_what_cannot_be_is_refused(servers: list[str]) -> None:
    for body, param in (
        ({"session": {"type": "realtime", "audio": {"output": {"voice": "Nobody"}}}}, "session.audio.output.voice"),
        ({"session": {"model": "other"}}, "model"),
        ({"session": {"instructions": "x" * 9000}}, "session"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            openai_client(servers[0], api_key="sesame").realtime.client_secrets.create(**body)
        assert caught.value.status_code in (400, 404)
        assert caught.value.body["param"] == param


def test_a_secret_expires_and_cannot_be_changed() -> None:
    secret = sealed(Secret(LATER, SESSION), "sesame")
    found = opened(secret, "sesame")
    assert found.session == SESSION
    assert opened(sealed(Secret(LATER - 3600, SESSION), "sesame"), "sesame") is None
    text, _, signature = secret.partition(".")
    changed = (f"{text[:-1]}.{signature}", f"{text}.{signature[:-1]}", f"ek_é.{signature}")
    for wrong in (*changed, secret[3:], text, "ek_", "ek_."):
        assert opened(wrong, "sesame") is None
    assert opened(secret, None) is None
