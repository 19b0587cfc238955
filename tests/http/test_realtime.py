"""Realtime sessions: the unchanged `openai` package against echo stages, access, limits, ends, client secrets."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy
import openai
import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_actors.http_server.connections import bounded_protocol
from omni_actors.http_server.realtime import connection as connections
from omni_actors.http_server.realtime import turns
from omni_actors.http_server.realtime.client_secrets import Secret, opened, sealed
from omni_actors.http_server.realtime.formats import RATE, SoundEncoder, WireFormat
from omni_actors.http_server.settings import ServerSettings
from tests.support.realtime import (
    MANUAL,
    SECOND,
    SILENCE,
    hear,
    in_flight,
    metric,
    no_request,
    openai_session,
    serving_sessions,
    speech,
    until_event,
)
from tests.support.servers import HttpPipeline, data_uri, openai_client, picture
from tests.support.waiting import PATIENCE, eventually

SAMPLES_PER_TOKEN = 480


async def say(connection: AsyncRealtimeConnection, *parts: dict[str, str] | str) -> None:
    content = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})


def latest_request(url: str) -> str:
    newest = httpx.get(f"{url}/v1/requests", params={"limit": 1}).json()["data"]
    return str(newest[0]["id"]) if newest else ""


def ws(url: str, path: str = "/v1/realtime", **options: Any) -> connect:
    return connect(url.replace("http", "ws", 1) + path, open_timeout=10 * PATIENCE, **options)


async def events_of(websocket: ClientConnection) -> list[dict[str, Any]]:
    found = []
    async with asyncio.timeout(10 * PATIENCE):
        try:
            while True:
                found.append(json.loads(await websocket.recv()))
        except ConnectionClosed:
            return found


async def refusal(url: str, path: str = "/v1/realtime", **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as caught:
        async with ws(url, path, **options):
            pass
    response = caught.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


# -- conversations ----------------------------------------------------------------------------------------------------


async def test_a_conversation_of_several_turns(echo: HttpPipeline) -> None:
    async with openai_session(echo.url) as connection:
        assert (await connection.recv()).type == "session.created"
        assert (await connection.recv()).type == "session.updated"
        await connection.input_audio_buffer.append(audio="???", event_id="bad")
        error = (await connection.recv()).error
        assert (error.event_id, error.param) == ("bad", "audio")
        await say(connection, "sea")
        await connection.response.create()
        events = await until_event(connection, "response.done")
        assert latest_request(echo.url) == events[-1].response.id, "the id of the response is that of its request"
        text = "".join(event.delta for event in events if event.type == "response.output_audio_transcript.delta")
        pcm = b"".join(base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta")
        assert text == "sea"
        samples = numpy.frombuffer(pcm, "<i2")
        assert len(samples) == 3 * SAMPLES_PER_TOKEN
        assert bytes(numpy.round(samples[::SAMPLES_PER_TOKEN] / 32767 * 256).astype(numpy.uint8)) == b"sea"
        assert events[-1].response.usage.output_token_details.text_tokens == 3

        await connection.session.update(session={**MANUAL, "output_modalities": ["text"]})
        await say(connection, "salt")
        await connection.response.create(response={"max_output_tokens": 8})
        events = await until_event(connection, "response.done")
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert done.text == "seaseasa", "the echo of all turns, to the limit"


async def test_the_speed_of_answers_changes_between_turns(echo: HttpPipeline) -> None:
    async with openai_session(echo.url) as connection:
        for speed in (1.5, 0.5):
            await connection.session.update(session={"type": "realtime", "audio": {"output": {"speed": speed}}})
            await say(connection, "sea " * 10)
            await connection.response.create()
            events = await until_event(connection, "response.done")
            *_, updated = (event for event in events if event.type == "session.updated")
            assert updated.session.audio.output.speed == speed
            said = "".join(event.delta for event in events if event.type == "response.output_audio_transcript.delta")
            deltas = [event for event in events if event.type == "response.output_audio.delta"]
            samples = sum(len(base64.b64decode(event.delta)) for event in deltas) // 2
            assert samples == pytest.approx(len(said) * SAMPLES_PER_TOKEN / speed, rel=0.05)
        end = samples * 1000 // RATE
        item_id = deltas[0].item_id
        await connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=end // 2)
        await until_event(connection, "conversation.item.truncated")
        await connection.conversation.item.retrieve(item_id=item_id)
        left = (await until_event(connection, "conversation.item.retrieved"))[-1].item.content[0].transcript
        assert len(left) == pytest.approx(len(said) / 2, abs=5), "what was heard is counted in sound as it was heard"


async def test_pictures_are_checked_as_in_a_chat(echo: HttpPipeline) -> None:
    async with openai_session(echo.url) as connection:
        await say(connection, {"type": "input_image", "image_url": data_uri("image/png", b"no picture")})
        error = (await until_event(connection, "error"))[-1].error
        assert (error.code, error.param) == ("malformed_media", "image_url")
        await say(connection, {"type": "input_image", "image_url": data_uri("image/png", picture(300, 200))})
        added = (await until_event(connection, "conversation.item.done"))[-1]
        assert added.item.content[0].type == "input_image"
        await say(connection, "sea")
        await connection.response.create()
        events = await until_event(connection, "response.done")
        assert events[-1].response.output[0].content[0].transcript == "sea"


async def test_the_server_finds_the_turns_of_the_user(echo: HttpPipeline) -> None:
    wire = WireFormat("audio/pcmu")
    names = [f"omni_realtime_{name}_seconds_count" for name in ("first_audio", "smooth_start", "detection_lag")]
    before = [metric(echo.url, name) for name in names]
    vad = {"type": "server_vad", "silence_duration_ms": 300}
    audio = {"input": {"turn_detection": vad, "format": msgspec.to_builtins(wire)}}
    async with openai_session(echo.url, instructions="hi", audio=audio) as connection:
        silence = numpy.zeros(24_000, numpy.int16)
        sound = SoundEncoder(wire.law, wire.hertz).encode(numpy.concatenate([silence, speech(1.0), silence]).tobytes())
        await hear(connection, sound, 4800)
        events = {event.type: event for event in await until_event(connection, "response.done")}
    started, stopped = events["input_audio_buffer.speech_started"], events["input_audio_buffer.speech_stopped"]
    assert 500 <= started.audio_start_ms <= 1000
    assert 2200 <= stopped.audio_end_ms <= 2800
    assert started.item_id == stopped.item_id == events["input_audio_buffer.committed"].item_id
    assert events["response.done"].response.status == "completed"
    first, smooth, lag = (metric(echo.url, name) - count for name, count in zip(names, before, strict=True))
    assert (first, smooth, lag > 10) == (1, 1, True)


@asynccontextmanager
async def early_session(pipeline: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, Any]]:
    """A server of its own, and a session whose answers are begun after 2 of the 4 s of silence that end a turn."""
    monkeypatch.setattr(turns, "HEAD_START_MS", 2000)
    audio = {"input": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 4000}}}
    with serving_sessions(ServerSettings(endpoint=pipeline.endpoint)) as url:
        async with openai_session(url, instructions="one ", audio=audio) as connection:
            yield url, connection


async def test_an_answer_is_begun_before_its_turn_is_over(slow: HttpPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    async with early_session(slow, monkeypatch) as (url, connection):
        await hear(connection, numpy.concatenate([speech(1.0), numpy.tile(SILENCE, 3)]))
        await eventually(lambda: in_flight(url) == 1)
        await hear(connection, speech(1.0))
        await no_request(url)
        dropped = latest_request(url)
        await hear(connection, numpy.tile(SILENCE, 3))
        await eventually(lambda: in_flight(url) == 1)
        await hear(connection, numpy.tile(SILENCE, 2))
        events = await until_event(connection, "response.done")
        assert "input_audio_buffer.speech_stopped" in [event.type for event in events]
        assert [event.type for event in events].count("response.created") == 1
        assert events[-1].response.status == "completed"
        assert latest_request(url) == events[-1].response.id != dropped


async def test_an_early_answer_is_not_kept_for_a_turn_that_does_not_end(
    slow: HttpPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client sends no more sound for a while. The turn is then answered by a request of its own."""
    monkeypatch.setattr(connections, "EARLY_SECONDS", 0.1)
    async with early_session(slow, monkeypatch) as (url, connection):
        before = latest_request(url)
        await hear(connection, numpy.concatenate([speech(1.0), numpy.tile(SILENCE, 3)]))
        await eventually(lambda: latest_request(url) != before)
        early = latest_request(url)
        await hear(connection, numpy.tile(SILENCE, 2))
        events = await until_event(connection, "response.done")
        assert events[-1].response.status == "completed"
        assert events[-1].response.id == early
        assert latest_request(url) == f"{early}-2"


async def test_a_session_begins_when_its_turns_can_be_found(
    echo: HttpPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sound does not wait until the model is loaded: its turns would be found too late."""
    loaded: list[turns.SpeechModel] = []
    make = turns.SpeechModel
    monkeypatch.setattr(turns, "SpeechModel", lambda: loaded.append(make()) or loaded[-1])
    with serving_sessions(ServerSettings(endpoint=echo.endpoint)) as url:
        for _ in range(2):
            async with ws(url) as websocket:
                await websocket.recv()
                assert len(loaded) == 1


async def test_the_turns_of_the_user_are_written_down(echo: HttpPipeline) -> None:
    """The echo stages answer with the question that they are asked about the sound."""
    audio = {"input": {"turn_detection": None, "transcription": {"language": "en"}}}
    async with openai_session(echo.url, audio=audio) as connection:
        await hear(connection, SECOND)
        await connection.input_audio_buffer.commit()
        events = await until_event(connection, "conversation.item.input_audio_transcription.completed")
        deltas = [event for event in events if event.type == "conversation.item.input_audio_transcription.delta"]
        assert "".join(event.delta for event in deltas) == events[-1].transcript
        assert events[-1].transcript.startswith("Write down what is said")
        assert "(en)" in events[-1].transcript
        assert events[-1].usage.output_tokens == len(events[-1].transcript)
        assert {event.item_id for event in (*deltas, events[-1])} == {latest_request(echo.url)}

        await connection.session.update(
            session={"type": "realtime", "audio": {"input": {"transcription": {"prompt": "x" * 5000}}}}
        )
        await hear(connection, SECOND)
        await connection.input_audio_buffer.commit()  # the echo stages do not take a question of that length
        events = await until_event(connection, "conversation.item.input_audio_transcription.failed")
        assert events[-1].error.code == "prompt_too_long"


async def test_interruption_ends_the_answer_in_every_stage(slow: HttpPipeline) -> None:
    """By the client; speech does the same. What was not heard is no part of the next prompt."""
    name = 'omni_realtime_interruptions_total{reason="client_cancelled"}'
    before = metric(slow.url, name)
    async with openai_session(slow.url) as connection:
        await say(connection, "one two three four " * 3)  # three seconds of text, then three of sound, which are enough
        await connection.response.create()
        events = await until_event(connection, "response.output_audio.delta")
        await connection.response.cancel()
        events += await until_event(connection, "response.done")
        assert events[-1].response.status == "cancelled"
        await no_request(slow.url)
        item = events[-1].response.output[0]
        await connection.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=0)
        await connection.conversation.item.retrieve(item_id=item.id)
        assert (await until_event(connection, "conversation.item.retrieved"))[-1].item.content[0].transcript == ""
    assert metric(slow.url, name) == before + 1


# -- access and limits ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(echo_pipeline: HttpPipeline) -> Iterator[str]:
    settings = ServerSettings(endpoint=echo_pipeline.endpoint, api_key="sesame", check_host=False, body_bytes=100_000)
    with serving_sessions(settings, http=bounded_protocol(settings, 4)) as url:
        yield url


async def test_strangers_are_refused(limited: str, echo: HttpPipeline) -> None:
    wrong = ["realtime", "openai-insecure-api-key.sesam"]
    assert await refusal(limited) == await refusal(limited, subprotocols=wrong) == (401, "invalid_api_key")
    assert await refusal(echo.url, origin="https://evil.example") == (403, "origin_not_allowed")
    assert await refusal(echo.url, additional_headers={"sec-fetch-site": "cross-site"}) == (403, "origin_not_allowed")
    assert await refusal(echo.url, "/v1/chat/completions") == (404, "not_found")
    assert await refusal(echo.url, "/v1/realtime?model=gpt-realtime") == (404, "model_not_found")
    sessions = ("/v1/realtime", "/v1/live/sessions", "/v1/live/sessions/s/attach", "/v1/audio/speech/stream")
    for path in (*sessions, "/v1/text-to-speech/v/stream-input"):
        assert await refusal(echo.url, f"{path}?voice=Ethan") == (400, "unknown_parameter")


async def test_a_page_of_the_server_itself_may_converse(limited: str, echo: HttpPipeline) -> None:
    async with ws(echo.url, origin=echo.url) as websocket:
        assert json.loads(await websocket.recv())["type"] == "session.created"
    subprotocols = ["realtime", "openai-insecure-api-key.sesame"]
    async with ws(limited, subprotocols=subprotocols) as websocket:
        assert websocket.subprotocol == "realtime"
        await websocket.send(json.dumps({"type": "input_audio_buffer.append", "audio": "A" * 200_000}))
        await events_of(websocket)
        assert websocket.close_code == 1009, "an event that is too large ends the session"


@pytest.mark.parametrize(
    ("limit", "code"), [("realtime_session_seconds", "session_expired"), ("realtime_idle_seconds", "session_idle")]
)
async def test_a_session_has_an_end(echo: HttpPipeline, tmp_path: Path, limit: str, code: str) -> None:
    """After which nobody can go on with it."""
    settings = ServerSettings(endpoint=echo.endpoint, shared_dir=str(tmp_path), **{limit: 0.3})
    with serving_sessions(settings) as url:
        async with ws(url) as websocket:
            events = await events_of(websocket)
        await eventually(lambda: not any((tmp_path / "sessions").iterdir()), what="the end of its journal")
    assert [event["type"] for event in events] == ["session.created", "error"]
    assert events[-1]["error"]["code"] == code


async def test_the_end_of_the_server_ends_its_sessions(echo: HttpPipeline) -> None:
    with serving_sessions(ServerSettings(endpoint=echo.endpoint)) as url:
        websocket = await ws(url)
        await websocket.recv()
    await events_of(websocket)
    assert websocket.close_code == 1012


LATER = int(time.time()) + 3600
SESSION = {"type": "realtime", "model": "echo", "instructions": "hi", "audio": {"output": {"voice": "Ethan"}}}


@pytest.fixture(scope="module")
def servers(echo_pipeline: HttpPipeline) -> Iterator[list[str]]:
    """Two with the same key, and one with another."""
    keys = ("sesame", "sesame", "other")
    settings = [ServerSettings(endpoint=echo_pipeline.endpoint, api_key=key, check_host=False) for key in keys]
    with ExitStack() as stack:
        yield [stack.enter_context(serving_sessions(own)) for own in settings]


async def begun(url: str, query: str = "", lose: bool = False, **options: Any) -> dict[str, Any]:
    """The session that a secret begins; then it is closed, or its connection is lost."""
    async with ws(url, f"/v1/realtime{query}", **options) as websocket:
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
    for url, scheme in ((other, "Bearer"), (two, "Basic")):
        assert (await refusal(url, additional_headers={"authorization": f"{scheme} {secret}"}))[0] == 401


async def test_a_lost_session_goes_on_for_the_key_that_began_it(servers: list[str]) -> None:
    keys = [*(sealed(Secret(LATER + number, SESSION), "sesame") for number in range(2)), "sesame"]
    headers = [{"authorization": f"Bearer {key}"} for key in keys]
    session_id = (await begun(servers[0], additional_headers=headers[0], lose=True))["id"]
    for others in headers[1:]:
        refused = await refusal(servers[0], f"/v1/realtime?session={session_id}", additional_headers=others)
        assert refused[0] == 404
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
    assert (await refusal(echo.url, additional_headers={"authorization": f"Bearer {made.value}0"}))[0] == 401


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
