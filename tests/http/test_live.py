"""OpenAI's Live API, on a bare socket: a scripted model answers the turns that the server finds."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
from websockets.asyncio.client import connect

from omni_actors.http_server.realtime.formats import RATE, g711_codes, g711_levels
from omni_actors.http_server.realtime.live import LEAD_SECONDS, PIECE_SECONDS
from omni_actors.http_server.realtime.live_sessions import PATH
from omni_actors.http_server.settings import ServerSettings
from tests.support.live import PAUSE, live_session, prompt
from tests.support.realtime import serving_sessions, speech
from tests.support.scripted import NEXT, called
from tests.support.servers import HttpPipeline
from tests.support.waiting import eventually

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


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
async def test_a_telephone_hears_silence_and_speech_and_is_muted(scripted: HttpPipeline, kind: str) -> None:
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


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ({"type": "session.close"}, "session_not_started", "type"),
        ({"type": "session.start", "session": {"model": "none"}}, "model_not_found", "model"),
        (
            {"type": "session.start", "session": {**MODEL, "delegation": responses(tool_choice="required")}},
            "invalid_value",
            "session.delegation.responses.tool_choice",
        ),
        (
            {"type": "session.start", "session": {**MODEL, "audio": {"output": {"voice": "nobody"}}}},
            "unknown_voice",
            "session.audio.output.voice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_session_that_cannot_begin_says_why(
    scripted: HttpPipeline, event: dict[str, Any], code: str, param: str
) -> None:
    async with connect(f"{scripted.url.replace('http', 'ws', 1)}{PATH}", proxy=None) as socket:
        await socket.send(json.dumps({**event, "event_id": "mine"}))
        (refusal,) = [json.loads(text) async for text in socket]
        assert refusal["error"] | {"message": "", "type": ""} == {
            **{"code": code, "param": param, "client_event_id": "mine", "message": "", "type": ""}
        }


async def test_what_a_session_refuses_leaves_it_as_it_is(scripted: HttpPipeline) -> None:
    refused = [
        ({"type": "session.start", "session": MODEL}, "session_already_started", "type"),
        ({"type": "decision.create"}, "invalid_value", "type"),
        ({"type": CONTEXT, "content": "x", "delegation_id": "y"}, "delegation_not_found", "delegation_id"),
        ({"type": "response.create"}, "invalid_value", "type"),
        (
            {"type": "session.update", "session": {"delegation": responses()}},
            "invalid_value",
            "session.delegation.type",
        ),
    ]
    async with live_session(scripted.url) as client:
        for event, _, _ in refused:
            await client.send(**{"kind" if name == "type" else name: value for name, value in event.items()})
        await client.until("error", count=len(refused))
        assert [(event["error"]["code"], event["error"]["param"]) for event in client.of_kind("error")] == [
            (code, param) for _, code, param in refused
        ]


async def test_a_session_that_expires_is_closed(scripted: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=scripted.endpoint, realtime_session_seconds=1.0, names="openai")
    with serving_sessions(settings) as url:
        async with connect(f"{url.replace('http', 'ws', 1)}{PATH}", proxy=None) as socket:
            await socket.send(json.dumps({"type": "session.start", "session": MODEL}))
            events = [json.loads(text) async for text in socket]
    assert events[-1]["type"] == "session.closed"
    assert events[-1]["reason"] == "expired"
    assert events[-1]["session"]["id"] == events[0]["session"]["id"]
    assert events[-1]["usage"]["seconds"] > 0
