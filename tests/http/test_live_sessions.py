"""Live sessions over WebRTC, connections that are attached to them, and forks; with the `openai` package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_actors.http_server.realtime.live_sessions import MAX_ATTACHED, PATH
from tests.support.calls import Caller
from tests.support.live import PAUSE, LiveClient, conforms, live_session, prompt
from tests.support.realtime import speech
from tests.support.scripted import NEXT
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, eventually

WORDS = "one two three four five six seven eight nine ten "
LONG = WORDS * 4  # 4 s
MODEL = {"model": "gpt-live-1"}


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def said(caller: Caller) -> str:
    return "".join(event["delta"] for event in caller.of_kind("session.output_transcript.delta"))


@asynccontextmanager
async def live_call(client: AsyncOpenAI, **session: Any) -> AsyncIterator[tuple[Caller, str]]:
    """A call that is connected, and the id of its session."""
    caller = Caller(check=conforms)
    try:
        offer = {"type": "webrtc", "sdp": await caller.offer()}
        answer = await client.live.create(session={**MODEL, **session}, transport=offer)
        await caller.take_answer("", answer.transport.sdp, "session.started")
        yield caller, answer.session.id
    finally:
        await caller.close()


async def test_a_call_is_a_live_session_that_another_connection_watches_and_commands(scripted: HttpPipeline) -> None:
    async with (
        client_of(scripted.url) as client,
        live_call(client, instructions=NEXT.join((LONG, "Yes?"))) as (caller, session_id),
        client.live.sideband.connect(session_id=session_id) as sideband,
        asyncio.timeout(60 * PATIENCE),
    ):
        watched: list[Any] = []

        async def watch() -> None:
            async for event in sideband:
                watched.append(event)

        def seen(kind: str) -> list[Any]:
            return [event for event in watched if event.type == kind]

        eye = asyncio.create_task(watch())
        assert caller.of_kind("session.started")[0]["session"]["id"] == session_id
        caller.microphone.say(speech(1.0))
        await eventually(lambda: "two three" in said(caller), 20, lambda: str(caller.events))
        caller.microphone.say(speech(1.0))
        await eventually(lambda: said(caller).endswith("Yes?"), 20, lambda: str(caller.events))
        heard = said(caller).removesuffix("Yes?")
        assert LONG.startswith(heard)
        assert len(heard) < len(LONG)
        await sideband.session.commentary.append(content="It rains.", delegation_id=None)
        await eventually(lambda: said(caller).endswith("It rains."), 20, lambda: str(caller.events))
        assert abs(caller.sound).max() > 5000
        caller.send("session.input_audio.append", audio="AAAA")
        error = (await caller.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_value", "type")
        await client.live.sessions.hangup(session_id)
        assert (await caller.until("session.closed"))["reason"] == "close_requested"
        await eye
        assert "".join(event.delta for event in seen("session.output_transcript.delta")) == said(caller)
        assert len(seen("session.commentary.appended")) == len(seen("session.closed")) == 1
        assert len(seen("session.input_audio.append")) > len(seen("session.output_audio.delta")) > 20
        with pytest.raises(NotFoundError):
            await client.live.sessions.hangup(session_id)


async def test_what_is_attached_begins_no_session_sends_no_sound_and_outlives_none(scripted: HttpPipeline) -> None:
    where = scripted.url.replace("http", "ws", 1)
    async with live_session(scripted.url) as session:
        session_id = session.of_kind("session.started")[0]["session"]["id"]
        path = f"{where}{PATH}/{session_id}/attach"
        async with connect(path, proxy=None) as socket:
            attached = LiveClient(socket)
            ear = asyncio.create_task(attached.listen())
            for kind in ("session.start", "session.input_audio.append"):
                await attached.send(kind, event_id=kind, session=MODEL, audio="AAAA")
            await attached.until("error", 2)
            found = [(event["error"]["code"], event["client_event_id"]) for event in attached.of_kind("error")]
            assert found == [("invalid_value", "session.start"), ("invalid_value", "session.input_audio.append")]
            assert not session.of_kind("error"), "they are the other client's"
            others = [await connect(path, proxy=None) for _ in range(MAX_ATTACHED - 1)]
            with pytest.raises(InvalidStatus) as refused:
                await connect(path, proxy=None)
            assert refused.value.response.status_code == 429
            for other in others:
                await other.close()
            await attached.send("session.close", event_id="the end")
            await session.until("session.closed")
            await ear
            assert attached.events[-1]["client_event_id"] == "the end"


async def test_a_fork_goes_on_from_what_was_said(scripted: HttpPipeline) -> None:
    delegation = {"type": "responses", "responses": {"model": "gpt-5.6-luna", "instructions": "Be brief."}}
    rules = {"instructions": NEXT.join(("One.", "Two.", "Three.")), "delegation": delegation}
    turn = (speech(0.8), PAUSE)
    async with live_session(scripted.url, store=True, **rules) as session:
        started = session.of_kind("session.started")[0]["session"]
        assert started["store"]
        await session.say(*turn)
        await session.until_said("One.")
        async with live_session(scripted.url, fork_of=started["id"]) as early:  # of a session that goes on
            await early.say(*turn)
            await early.until_said("Two.")
        await session.say(*turn)
        await session.until_said("Two.")
    changed = {"type": "responses", "responses": {"model": "gpt-5.6-luna", "instructions": "Be long."}}
    async with live_session(scripted.url, fork_of=started["id"], store=False, delegation=changed) as fork:
        begun = fork.of_kind("session.started")[0]
        assert begun["client_event_id"] == "the start"
        assert begun["session"]["id"] != started["id"]
        assert not begun["session"]["store"]
        await fork.say(*turn)
        await fork.until_said("Three.")
        known = (await prompt(fork)).partition("assistant\n")
        assert "Be long." in known[0]
        assert "Be brief." not in known[0]
        assert known[2].index("One.") < known[2].index("Two.") < known[2].index("Three.")
    async with client_of(scripted.url) as client:
        caller = Caller(check=conforms)
        offer = {"type": "webrtc", "sdp": await caller.offer()}
        answer = await client.live.sessions.fork(started["id"], transport=offer)
        await caller.take_answer("", answer.transport.sdp, "session.started")
        assert caller.of_kind("session.started")[0]["session"]["store"], "as it was"
        caller.send("session.close")
        await caller.until("session.closed")
        await caller.close()
        with pytest.raises(NotFoundError, match="stored"):
            await client.live.sessions.fork(begun["session"]["id"], transport=offer)
    with pytest.raises(InvalidStatus) as refused:
        await live_session(scripted.url, fork_of="sess_none").__aenter__()
    assert refused.value.response.status_code == 404


@pytest.mark.parametrize(
    ("session", "transport", "param"),
    [
        ({**MODEL, "audio": {"format": {"type": "audio/pcm", "rate": 24000}}}, {}, "session.audio.format"),
        ({**MODEL, "client": {"data_channel": {}}}, {}, "session.client"),
        (MODEL, {"sdp": "v=0"}, "sdp"),
    ],
)
async def test_a_call_that_cannot_begin_says_why(
    scripted: HttpPipeline, session: dict[str, Any], transport: dict[str, Any], param: str
) -> None:
    body = {"session": session, "transport": {"type": "webrtc", "sdp": "", **transport}}
    async with httpx.AsyncClient(timeout=30) as client:
        answer = await client.post(f"{scripted.url}{PATH}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
