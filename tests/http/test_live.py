"""OpenAI's Live API, on a bare socket and over WebRTC: a scripted model answers the turns that the server finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy
import pytest
from openai import AsyncOpenAI, NotFoundError
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_actors.http_server.realtime.formats import RATE, g711_codes, g711_levels
from omni_actors.http_server.realtime.live import LEAD_SECONDS, PIECE_SECONDS
from omni_actors.http_server.realtime.live_sessions import MAX_ATTACHED, PATH
from omni_actors.http_server.settings import ServerSettings
from tests.support.calls import Caller
from tests.support.live import PAUSE, LiveClient, conforms, live_session, prompt
from tests.support.realtime import serving_sessions, speech
from tests.support.scripted import NEXT, called
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, eventually

WORDS = "one two three four five six seven eight nine ten "
LONG = WORDS * 4  # 4 s
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
TURN = (speech(0.8), PAUSE)
WRITTEN = "Write down what is said"  # with which a scripted model writes down each turn


def answers(*texts: str) -> str:
    """Instructions by which the turns of the user are answered with these texts."""
    return NEXT.join(texts)


def responses(**fields: Any) -> dict[str, Any]:
    return {"type": "responses", "responses": {"model": "gpt-5.6-luna", **fields}}


async def test_speech_cuts_an_answer_to_what_was_heard(scripted: HttpPipeline) -> None:
    audio = {"format": {"type": "audio/pcm", "rate": 24000}, "output": {"voice": "marin"}}
    session = {"instructions": answers(LONG, "Yes?"), "audio": audio, "delegation": responses()}
    async with live_session(scripted.url, **session) as client:
        started = client.of_kind("session.started")[0]
        assert started["client_event_id"] == "the start"
        assert started["session"]["audio"]["format"] == audio["format"]
        assert started["session"]["capabilities"] == {"full_duplex": False, "delegation": True, "recording": False}
        await client.say(*TURN)
        await client.until_said("one two three four five six seven")
        await client.say(*TURN)
        await client.until_said("Yes?")
        heard = client.said.removesuffix("Yes?")
        assert LONG.startswith(heard), "of an answer that was cut short comes no more"
        assert len(heard) < len(LONG)
        assert client.ahead < LEAD_SECONDS + 2 * PIECE_SECONDS, "sound comes in real time"
        assert client.heard.startswith(WRITTEN), "what echo stages write down, as they write it"
        times = [(event["start_ms"], event["end_ms"]) for event in client.of_kind("session.output_transcript.delta")]
        assert times == sorted(times)
        assert times[-1][1] / 1000 < len(client.pcm) / 2 / RATE + PIECE_SECONDS, "silence is sound, too"
        known = (await prompt(client)).partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
        assert heard.startswith(known.rstrip())
        assert len(known) > len("one two three four five ")
        assert not client.of_kind("error")


async def test_what_a_client_tells_is_known_and_said_only_if_it_is_commentary(scripted: HttpPipeline) -> None:
    history = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"text": "Who are you?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A tide."}]},
    ]
    async with live_session(scripted.url, instructions="Rules.", input=history, delegation=responses()) as client:
        await client.send("session.thinking.append", event_id="a", delegation_id=None, content="It rains.")
        await client.send("session.instructions.append", delegation_id=None, content="Say thou.")
        await client.send("session.commentary.append", event_id="c", delegation_id=None, content=WORDS)
        await client.send("session.commentary.append", delegation_id=None, content="And eleven.")  # while it speaks
        await client.until_said(f"{WORDS}And eleven.")
        assert client.said == f"{WORDS}And eleven."
        asked = await prompt(client)
        texts = ["Rules.", "Be brief.", "Who are you?", "A tide.", "It rains.", "Say thou.", WORDS, WORDS]
        texts.append("And eleven.")
        places = [asked.index(text) for text in texts]
        assert places == sorted(places)
        for kind, event_id in (("thinking", "a"), ("commentary", "c")):
            done = client.of_kind(f"session.{kind}.appended")[0]
            assert done["client_event_id"] == event_id
            assert 0 <= done["start_ms"] <= done["end_ms"]


async def test_the_client_does_what_the_model_delegates(scripted: HttpPipeline) -> None:
    """It knows the task from the transcript, which comes first."""
    async with live_session(scripted.url, instructions=answers(f"One moment.{called('delegate')}")) as client:
        await client.say(*TURN)
        created = await client.until("session.delegation.created")
        assert created["delegation"]["target"] == "client"
        kinds = [event["type"] for event in client.events]
        assert kinds.index("session.input_transcript.delta") < kinds.index("session.delegation.created")
        own = {"delegation_id": created["delegation"]["id"]}
        await client.send("session.commentary.append", **own, content="It is 14 degrees.")
        await client.send("session.commentary.append", **own, content="It will rain.")
        await client.until_said("It will rain.")
        assert client.said == "One moment.It is 14 degrees.It will rain."
        assert not client.of_kind("error")


async def test_the_server_does_what_the_model_delegates_with_the_clients_tools(scripted: HttpPipeline) -> None:
    two = f"Let me look. {called('weather', city='Kiel')}{called('weather', city='Bonn')}"
    delegation = responses(tools=[WEATHER], instructions="Use tools.")
    async with live_session(scripted.url, instructions=answers("Moin.", two), delegation=delegation) as client:
        await client.send("session.update", event_id="u", session={"delegation": responses(tool_choice="auto")})
        updated = await client.until("session.updated")
        assert updated["client_event_id"] == "u"
        assert updated["session"]["delegation"]["responses"]["tools"][0]["name"] == "weather"
        await client.say(*TURN)
        await client.until_said("Moin.")
        await client.say(*TURN)
        await eventually(lambda: client.work("response.completed"))
        created = client.of_kind("session.delegation.created")[0]["delegation"]
        first, second = (event["item"] for event in client.work("response.output_item.done"))
        assert json.loads(first["arguments"]) == {"city": "Kiel"}
        assert created["target"] == "responses"
        assert created["response_id"] == client.work("response.created")[0]["response"]["id"]
        assert client.work("response.completed")[0]["response"]["usage"]["total_tokens"] > 0
        await client.send("response.item.create", item=result(first, "14 degrees, "))
        await client.send("response.create", event_id="too soon")
        refused = (await client.until("error"))["error"]
        assert (refused["code"], refused["client_event_id"]) == ("function_call_outputs_required", "too soon")
        await client.send("response.item.create", item=result(second, "and 15."))
        await client.send("response.create")
        await client.until_said("and 15.")
        await eventually(lambda: len(client.work("response.completed")) == 2)
        assert client.work("response.output_item.done")[-1]["item"]["content"][0]["text"] == "and 15."
        assert {event["delegation_id"] for event in client.of_kind("response.event")} == {created["id"]}
        await client.send("session.update", session={"delegation": responses(tool_choice="none")})
        assert "<tool_response>\n14 degrees, \n</tool_response>" in await prompt(client)


def result(call: dict[str, Any], output: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


async def test_a_telephone_hears_silence_and_speech_and_is_muted(scripted: HttpPipeline) -> None:
    """The other law: tests/unit/test_realtime_formats.py."""
    kind = "audio/pcmu"
    audio = {"format": {"type": kind, "rate": 8000}}
    voice = g711_codes(kind, speech(0.8)[::3]).tobytes()
    quiet = g711_codes(kind, numpy.zeros(8000, "<i2")).tobytes()
    async with live_session(scripted.url, instructions=answers(WORDS), audio=audio) as client:
        await client.send("session.input_audio.mute", event_id="m")
        await client.append(voice + quiet)
        await client.send("session.input_audio.unmute")
        await client.until("session.input_audio.unmuted")
        assert client.of_kind("session.input_audio.muted")[0]["client_event_id"] == "m"
        await client.append(voice + quiet)
        await client.until_said(WORDS)
        levels = numpy.abs(g711_levels(kind)[numpy.frombuffer(client.pcm, numpy.uint8)].astype(int))
        loud = numpy.flatnonzero(levels > 1000)
        assert (len(WORDS) - 1) * 160 - 8 * 160 < len(loud) <= len(WORDS) * 160  # 20 ms each; spaces are quieter
        assert levels[: loud[0] // 2].max() < 16
        await eventually(lambda: client.heard.startswith(WRITTEN))
        assert client.heard.count(WRITTEN) == 1, "not what was said while the microphone was muted"


MODEL = {"model": "gpt-live-1"}
CONTEXT = "session.thinking.append"


async def events_of(url: str, event: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a session of which the client says one thing, up to its end."""
    async with connect(f"{url.replace('http', 'ws', 1)}{PATH}", proxy=None) as socket:
        await socket.send(json.dumps({**event, "event_id": "mine"}))
        return [json.loads(text) async for text in socket]


def starting(**session: Any) -> dict[str, Any]:
    return {"type": "session.start", "session": {**MODEL, **session}}


async def test_a_session_that_cannot_begin_says_why_and_one_that_expires_is_closed(scripted: HttpPipeline) -> None:
    required = responses(tool_choice="required")
    for event, code, param in (
        ({"type": "session.close"}, "session_not_started", "type"),
        (starting(model="none"), "model_not_found", "model"),
        (starting(delegation=required), "invalid_value", "session.delegation.responses.tool_choice"),
        (starting(audio={"output": {"voice": "nobody"}}), "unknown_voice", "session.audio.output.voice"),
    ):
        (refusal,) = await events_of(scripted.url, event)
        assert refusal["error"].items() >= {"code": code, "param": param, "client_event_id": "mine"}.items()
        assert set(refusal["error"]) == {"code", "param", "client_event_id", "message", "type"}
    settings = ServerSettings(endpoint=scripted.endpoint, realtime_session_seconds=1.0, names="openai")
    with serving_sessions(settings) as url:
        first, *_, last = await events_of(url, starting())
    assert (last["type"], last["reason"]) == ("session.closed", "expired")
    assert last["session"]["id"] == first["session"]["id"]
    assert last["usage"]["seconds"] > 0


async def test_what_a_session_refuses_leaves_it_as_it_is(scripted: HttpPipeline) -> None:
    update = {"type": "session.update", "session": {"delegation": responses()}}
    refused = [
        (starting(), "session_already_started", "type"),
        ({"type": "decision.create"}, "invalid_value", "type"),
        ({"type": CONTEXT, "content": "x", "delegation_id": "y"}, "delegation_not_found", "delegation_id"),
        ({"type": "response.create"}, "invalid_value", "type"),
        (update, "invalid_value", "session.delegation.type"),
    ]
    async with live_session(scripted.url) as client:
        for event, _, _ in refused:
            await client.send(event["type"], **{name: value for name, value in event.items() if name != "type"})
        await client.until("error", count=len(refused))
        found = [(event["error"]["code"], event["error"]["param"]) for event in client.of_kind("error")]
        assert found == [(code, param) for _, code, param in refused]


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def said(caller: Caller) -> str:
    return "".join(event["delta"] for event in caller.of_kind("session.output_transcript.delta"))


@asynccontextmanager
async def live_call(client: AsyncOpenAI, fork_of: str = "", **session: Any) -> AsyncIterator[tuple[Caller, str]]:
    """A call that is connected, and the id of its session."""
    caller = Caller(check=conforms)
    try:
        offer = {"type": "webrtc", "sdp": await caller.offer()}
        if fork_of:
            answer = await client.live.sessions.fork(fork_of, transport=offer)
        else:
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
    async with live_session(scripted.url, store=True, **rules) as session:
        started = session.of_kind("session.started")[0]["session"]
        assert started["store"]
        await session.say(*TURN)
        await session.until_said("One.")
        async with live_session(scripted.url, fork_of=started["id"]) as early:  # of a session that goes on
            await early.say(*TURN)
            await early.until_said("Two.")
        await session.say(*TURN)
        await session.until_said("Two.")
    changed = {"type": "responses", "responses": {"model": "gpt-5.6-luna", "instructions": "Be long."}}
    async with live_session(scripted.url, fork_of=started["id"], store=False, delegation=changed) as fork:
        begun = fork.of_kind("session.started")[0]
        assert begun["client_event_id"] == "the start"
        assert begun["session"]["id"] != started["id"]
        assert not begun["session"]["store"]
        await fork.say(*TURN)
        await fork.until_said("Three.")
        known = (await prompt(fork)).partition("assistant\n")
        assert "Be long." in known[0]
        assert "Be brief." not in known[0]
        assert known[2].index("One.") < known[2].index("Two.") < known[2].index("Three.")
    async with client_of(scripted.url) as client, live_call(client, started["id"]) as (caller, _):
        assert caller.of_kind("session.started")[0]["session"]["store"], "as it was"
        caller.send("session.close")
        await caller.until("session.closed")
        with pytest.raises(NotFoundError, match="stored"):
            await client.live.sessions.fork(begun["session"]["id"], transport={"type": "webrtc", "sdp": ""})
    with pytest.raises(InvalidStatus) as refused:
        await live_session(scripted.url, fork_of="sess_none").__aenter__()
    assert refused.value.response.status_code == 404


async def test_a_call_that_cannot_begin_says_why(scripted: HttpPipeline) -> None:
    telephone = {"audio": {"format": {"type": "audio/pcm", "rate": 24000}}}
    for session, sdp, param in (
        (telephone, "", "session.audio.format"),
        ({"client": {"data_channel": {}}}, "", "session.client"),
        ({}, "v=0", "sdp"),
    ):
        body = {"session": {**MODEL, **session}, "transport": {"type": "webrtc", "sdp": sdp}}
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.post(f"{scripted.url}{PATH}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
