"""Realtime sessions over WebRTC: a client of aiortc against echo stages."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable
from typing import Any

import aioice.ice
import httpx
import numpy
import pytest
from openai import AsyncOpenAI

from omni_actors.http_server.connections import bounded_protocol
from omni_actors.http_server.realtime import calls, webrtc
from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.settings import ServerSettings
from tests.support.calls import Caller, call, post_offer
from tests.support.realtime import kinds, no_request, no_session, serving_sessions, speech
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE, eventually

SENTENCE = "hello sea "
LONG = SENTENCE * 5  # 10 s
MILLISECONDS_PER_CHARACTER = 200  # of what `drawling` speaks
MANUAL = {"turn_detection": None}
ALLOWANCE = 0.4  # seconds of sound that may be on its way
KEY = "sesame"


def session_of(instructions: str, **audio_input: Any) -> dict[str, Any]:
    """The configuration of a session in which the echo stages repeat the instructions, and what they said before."""
    return {"type": "realtime", "instructions": instructions, "audio": {"input": audio_input}}


async def hang_up(url: str, location: str, key: str = "none") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await asyncio.to_thread(httpx.post, f"{url}{location}/hangup", headers=headers)


async def ends(caller: Caller) -> None:
    async with asyncio.timeout(15 * PATIENCE):
        await caller.closed.wait()


async def test_a_spoken_turn_is_answered_in_sound(drawling: HttpPipeline) -> None:
    async with call(drawling.url, session=session_of(SENTENCE)) as caller:
        assert caller.of_kind("session.created")[0]["session"]["instructions"] == SENTENCE
        caller.microphone.say(speech(1.0))
        await caller.until("output_audio_buffer.started")
        await caller.until("output_audio_buffer.stopped")
        seconds = MILLISECONDS_PER_CHARACTER * len(SENTENCE) / 1000
        assert seconds - ALLOWANCE < len(caller.sound) / RATE < seconds + ALLOWANCE
        assert numpy.abs(caller.sound).max() > 3000
        found = kinds(caller.events)
        assert "response.output_audio.delta" not in found
        assert found.index("response.content_part.added") < found.index("output_audio_buffer.started")
        assert found.index("response.done") < found.index("output_audio_buffer.stopped")
        assert caller.of_kind("response.output_audio_transcript.done")[0]["transcript"] == SENTENCE
        candidates = re.findall(r"a=candidate:\S+ \d \S+ \d+ (\S+)", caller.answer)
        assert set(candidates) == {"127.0.0.1"}  # the address that the client knows, and no other one of this host


async def test_speech_cuts_the_answer_to_what_was_sent(drawling: HttpPipeline) -> None:
    async with call(drawling.url, session=session_of(LONG)) as caller:
        caller.microphone.say(speech(1.0))
        await caller.until("response.done")
        await eventually(lambda: len(caller.sound) > RATE)
        caller.microphone.say(speech(2.0, seed=1))
        await caller.until("output_audio_buffer.cleared")
        heard = len(caller.sound) / RATE
        cut = await caller.until("conversation.item.truncated")
        assert heard - ALLOWANCE < cut["audio_end_ms"] / 1000 < heard + ALLOWANCE
        answer = caller.of_kind("response.output_item.done")[0]["item"]
        assert cut["item_id"] == answer["id"]
        caller.send("conversation.item.retrieve", item_id=answer["id"])
        text = (await caller.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
        spoken = cut["audio_end_ms"] / MILLISECONDS_PER_CHARACTER
        assert spoken - len("hello ") - 1 <= len(text) <= spoken
        assert LONG.startswith(text)
        await caller.until("output_audio_buffer.started", count=2)
        assert len(caller.sound) / RATE < heard + ALLOWANCE + 1  # nothing of the first answer came after that


async def test_a_client_silences_the_server(slow: HttpPipeline) -> None:
    async with call(slow.url, session=session_of(LONG, **MANUAL)) as caller:
        caller.send("output_audio_buffer.clear")  # of which there is nothing yet
        caller.send("response.create")
        await caller.until("output_audio_buffer.started")
        caller.send("output_audio_buffer.clear")
        await caller.until("output_audio_buffer.cleared")
        assert (await caller.until("response.done"))["response"]["status"] == "cancelled"
        await caller.until("conversation.item.truncated")
        await no_request(slow.url)
        assert not caller.of_kind("error")


async def test_the_openai_package_calls_and_hangs_up(echo: HttpPipeline) -> None:
    caller = Caller()
    async with AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="none") as client:
        session = session_of(SENTENCE)
        response = await client.realtime.calls.with_raw_response.create(sdp=await caller.offer(), session=session)
        assert response.status_code == 201
        await caller.take_answer(response.headers["location"], response.text)
        assert caller.of_kind("session.created")[0]["session"]["instructions"] == SENTENCE
        await client.realtime.calls.hangup(caller.location.rpartition("/")[2])
    await ends(caller)
    await no_session(echo.url)
    again = await hang_up(echo.url, caller.location)
    assert again.status_code == 404
    assert again.json()["error"]["code"] == "call_not_found"
    await caller.close()


async def test_an_event_that_the_client_cannot_take_is_told(echo: HttpPipeline) -> None:
    async with call(echo.url, session=session_of("sea", **MANUAL)) as caller:
        sound = base64.b64encode(bytes(3 * 2 * RATE)).decode()
        for _ in range(2):
            caller.send("input_audio_buffer.append", audio=sound)
        caller.send("input_audio_buffer.commit")
        item = (await caller.until("conversation.item.done"))["item"]
        caller.send("conversation.item.retrieve", item_id=item["id"])
        assert (await caller.until("error"))["error"]["code"] == "event_too_large"
        caller.send("conversation.item.delete", item_id=item["id"])
        await caller.until("conversation.item.deleted")  # the call goes on


async def test_a_client_that_vanishes_ends_its_call(slow: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word, as where a battery is empty. aioice asks every 5 s whether a peer is there; here more often."""
    monkeypatch.setattr(aioice.ice, "CONSENT_INTERVAL", 0.2)
    with serving_sessions(ServerSettings(endpoint=slow.endpoint)) as url:
        async with call(url, session=session_of(LONG, **MANUAL)) as caller:
            caller.send("response.create")
            await caller.until("output_audio_buffer.started")
            caller.vanish()
            await no_request(slow.url)
            await no_session(url)


async def test_a_client_that_does_not_come_leaves_its_place_and_an_idle_call_has_an_end(
    echo: HttpPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webrtc, "CONNECT_SECONDS", 0.5)
    settings = ServerSettings(endpoint=echo.endpoint, realtime_sessions=1, realtime_idle_seconds=0.5)
    with serving_sessions(settings) as url:
        caller = Caller()
        offer = await caller.offer()
        assert [(await post_offer(url, offer)).status_code for _ in range(2)] == [201, 429]
        await no_session(url)
        await caller.close()
        async with call(url, hears=False) as caller:
            assert (await caller.until("error"))["error"]["code"] == "session_idle"
            await ends(caller)
            await no_session(url)


async def test_a_client_secret_opens_a_call_and_ends_none_and_the_end_of_the_server_does(echo: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=echo.endpoint, api_key=KEY, check_host=False)
    with serving_sessions(settings, http=bounded_protocol(settings, 4)) as url:
        body = {"session": session_of(SENTENCE)}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:
            made = await client.post(f"{url}/v1/realtime/client_secrets", json=body, timeout=30 * PATIENCE)
        secret = made.json()["value"]
        await no_session(url, KEY)
        async with call(url, key=secret) as caller:
            assert caller.of_kind("session.created")[0]["session"]["instructions"] == SENTENCE
            assert (await hang_up(url, caller.location, secret)).status_code == 401
            assert (await hang_up(url, caller.location, KEY)).status_code == 200
            await ends(caller)
        last = Caller()
        await last.connect(url, key=KEY)
    await ends(last)
    await last.close()


async def test_an_offer_sends_the_server_nowhere(echo: HttpPipeline) -> None:
    """It opens no connection to the addresses that an offer names, but waits for checks from them."""
    loop, came = asyncio.get_running_loop(), asyncio.Event()

    class Victim(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, source: Any) -> None:
            came.set()

    transport, _ = await loop.create_datagram_endpoint(Victim, local_addr=("127.0.0.1", 0))
    caller = Caller()
    offer = await caller.offer()
    port = transport.get_extra_info("sockname")[1]
    named = re.sub(r"(a=candidate:\S+ \d \S+ \d+) \S+ \d+", rf"\1 127.0.0.1 {port}", offer)
    assert f"127.0.0.1 {port}" in named
    response = await post_offer(echo.url, named)
    await caller.take_answer(response.headers["location"], response.text)
    assert not came.is_set()
    await caller.close()
    transport.close()


async def test_an_event_that_never_ends_ends_the_call(echo: HttpPipeline) -> None:
    async with call(echo.url) as caller:
        caller.send_beyond_the_limit("x" * 2_000_000)
        await ends(caller)
        await no_session(echo.url)


def without(part: str) -> Callable[[str], str]:
    return lambda offer: re.sub(rf"(?m)^{part}.*\n", "", offer)


WRONG_OFFERS: list[Callable[[str], str]] = [
    lambda offer: "",
    lambda offer: "v=0",
    lambda offer: "\0" + offer[::-1],
    lambda offer: offer * 40,
    lambda offer: offer.partition("m=application")[0],
    lambda offer: offer[: offer.index("m=audio")] + offer[offer.index("m=application") :],
    lambda offer: offer + offer[offer.index("m=audio") :].replace("m=audio", "m=video"),
    lambda offer: offer.replace("opus/48000/2", "telephone-event/8000"),
    lambda offer: offer.replace("BUNDLE 0", "BUNDLE 7"),
    lambda offer: offer.replace("a=mid:1", "a=mid:0").replace("BUNDLE 0 1", "BUNDLE 0"),
    *(without(part) for part in ("a=fingerprint", "a=setup", "a=ice-ufrag", "a=rtcp-mux")),
    lambda offer: re.sub(r"a=max-message-size:\d+", "a=max-message-size:many", offer),
]


async def test_what_is_no_call_is_refused_and_leaves_no_session(echo: HttpPipeline) -> None:
    caller = Caller()
    offer = await caller.offer()
    for number, change in enumerate(WRONG_OFFERS):
        refused = await post_offer(echo.url, change(offer))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_sdp"), (number, refused.text)
    wrong = {"type": "realtime", "temperature": 1}
    for refused, param in (
        (await post_offer(echo.url, offer, voice="alloy"), "voice"),
        (await post_offer(echo.url, offer, session=wrong), "session.temperature"),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    await no_session(echo.url)
    await caller.close()


def test_a_server_without_the_extra_says_so(echo: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(f"{echo.url}/v1/status").json()["webrtc"] is True
    monkeypatch.setattr(calls, "available", lambda: False)
    with serving_sessions(ServerSettings(endpoint=echo.endpoint)) as url:
        assert httpx.get(f"{url}/v1/status").json()["webrtc"] is False
        headers = {"content-type": "application/sdp"}
        refused = httpx.post(f"{url}/v1/realtime/calls", content="v=0", headers=headers)
        assert refused.status_code == 404
        assert "omni_actors[webrtc]" in refused.json()["error"]["message"]
