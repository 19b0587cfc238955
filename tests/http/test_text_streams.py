"""Texts that are spoken while they are written: /v1/audio/speech/stream."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
import soundfile
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidStatus

from omni_actors.http_server.settings import ServerSettings
from tests.support.realtime import serving_sessions
from tests.support.servers import HttpPipeline
from tests.support.spoken import SPOKEN, WRITTEN, said, text_socket, tokens

FLUSH, END, CANCEL = ({"type": f"input_text.{kind}"} for kind in ("flush", "end", "cancel"))


@pytest.fixture(params=["preset", "slow_speech"])
def speaking(request: pytest.FixtureRequest) -> HttpPipeline:
    """A pipeline that speaks sentences, and one that speaks a sentence while it is written."""
    pipeline: HttpPipeline = request.getfixturevalue(request.param)
    return pipeline


async def test_a_text_that_comes_token_by_token_is_spoken_once(speaking: HttpPipeline) -> None:
    async with text_socket(speaking.url) as client:
        await client.append(tokens(WRITTEN))
        await client.send(FLUSH)
        heard, done = await client.heard()
        assert heard == SPOKEN
        assert done["transcript"] == WRITTEN.strip()
        assert done["status"] == "completed"
        assert done["usage"]["output_tokens"] == len(SPOKEN)
        await client.append(["And ", "now"])
        await client.send(END)
        assert (await client.heard())[0] == "And now"
        with pytest.raises(ConnectionClosedOK):
            await client.connection.recv()


@pytest.mark.parametrize(
    ("pipeline", "written", "wanted"),
    [("slow_speech", "The tide is full. I", "The tide is full."), ("writing", "The tide is", "The tid")],
)
async def test_speech_begins_while_the_text_is_written(
    request: pytest.FixtureRequest, pipeline: str, written: str, wanted: str
) -> None:
    """With a sentence, or with a word where the model can. An echo stage keeps a character for its end."""
    async with text_socket(request.getfixturevalue(pipeline).url) as client:
        await client.append(tokens(written))
        heard = b""
        while len(heard) < 2 * len(wanted):
            heard += base64.b64decode((await client.message())["audio"])
        assert said(heard).startswith(wanted)
        await client.append([" is out."])
        await client.send(FLUSH)
        rest, done = await client.heard()
        assert done["transcript"] == f"{written} is out."
        assert (said(heard) + rest).replace(" ", "") == done["transcript"].replace(" ", "")


async def test_what_is_cancelled_is_not_spoken_and_what_follows_is(speaking: HttpPipeline) -> None:
    async with text_socket(speaking.url) as client:
        await client.append(["The tide is full. " * 5000])
        await client.send(FLUSH)
        await client.append(["It turns. "])
        await client.message()
        await client.send(CANCEL)
        heard, done = await client.heard()
        assert (done["status"], len(heard) < 80_000) == ("cancelled", True)
        heard, done = await client.heard()
        assert (heard, done["status"], done["transcript"]) == ("", "cancelled", "")
        speaking.assert_idle()
        await client.append(["It is low."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "It is low."
        await client.append(["Silence, please"])
        await client.send(END, CANCEL)
        assert (await client.heard())[1]["status"] in ("cancelled", "completed")
        with pytest.raises(ConnectionClosedOK):
            await client.connection.recv()


LONG_SENTENCE = "na" * 1500  # in pieces of 400 characters


async def test_the_manner_can_be_changed_between_texts(preset: HttpPipeline) -> None:
    async with text_socket(preset.url) as client:
        fields = {"voice": "Ryan", "language": "german", "response_format": "wav"}
        await client.send({"type": "session.update", "session": fields})
        assert (await client.message())["session"] == fields
        await client.append(["It turns."])
        await client.send({"type": "session.update", "session": {"voice": "vivian", "response_format": "pcm"}}, FLUSH)
        assert (await client.message())["session"] == {**fields, "voice": "vivian", "response_format": "pcm"}
        file = b""
        while (event := await client.message())["type"] == "speech.audio.delta":
            file += base64.b64decode(event["audio"])
        samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
        assert (said(samples.astype("<i2").tobytes()), rate) == ("language=German voice=ryan It turns.", 24_000)
        await client.append(["Again."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "language=German voice=vivian Again."
        await client.send({"type": "session.update", "session": {"speed": 2}})
        assert (await client.message())["session"]["speed"] == 2
        await client.append([LONG_SENTENCE])
        await client.send(FLUSH)
        heard, _ = await client.heard()
        assert len(heard) < 0.6 * len(LONG_SENTENCE)


async def test_wrong_events_are_refused_and_the_session_goes_on(slow_speech: HttpPipeline) -> None:
    async with text_socket(slow_speech.url) as client:
        for event, param, code in (
            ({"type": "input_text.apend", "text": "a"}, "type", "invalid_value"),
            ({"type": "session.update", "session": {"input": "a"}}, "session.input", "unknown_parameter"),
            ({"type": "session.update", "session": {"language": "Klingon"}}, "language", "invalid_value"),
            ({"type": "session.update", "session": {"model": "another"}}, "model", "model_not_found"),
            ({"type": "input_text.append", "text": "a" * (1 << 20)}, None, "body_too_large"),
        ):
            await client.send({**event, "event_id": "mine"})
            error = (await client.message())["error"]
            assert (error["param"], error["code"], error["event_id"]) == (param, code, "mine")
        await client.append(["It turns."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "It turns."
        await client.append(["The tide is full. " * 5000] * 2)  # more than may wait
        _, event = await client.heard("error")
        assert (event["error"]["param"], event["error"]["code"]) == ("text", "body_too_large")


async def test_a_failure_ends_its_text_and_not_the_session(preset: HttpPipeline) -> None:
    async with text_socket(preset.url) as client:
        await client.send({"type": "session.update", "session": {"voice": "alice"}})
        await client.message()
        await client.append(["The tide is full. ", "It turns. "])
        heard, event = await client.heard("error")
        assert (heard, event["error"]["code"], event["error"]["param"]) == ("", "unknown_voice", "voice")
        await client.append(["It is low."])
        await client.send(FLUSH)
        heard, done = await client.heard()
        assert (heard, done["status"], done["transcript"]) == ("", "failed", "")
        await client.send({"type": "session.update", "session": {"voice": "ryan"}})
        await client.message()
        await client.append(["It is low."])
        await client.send(FLUSH)
        assert (await client.heard())[0] == "voice=ryan It is low."


async def test_sessions_are_limited_in_number_and_time_as_realtime_sessions_are(preset: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=preset.endpoint, realtime_sessions=1, realtime_idle_seconds=0.5)
    with serving_sessions(settings) as url:
        async with text_socket(url) as client:
            with pytest.raises(InvalidStatus) as refused:
                await text_socket(url).__aenter__()
            assert refused.value.response.status_code == 429
            await client.append(["No end"])
            assert (await client.message())["error"]["code"] == "session_idle"
            with pytest.raises(ConnectionClosed) as closed:
                await client.connection.recv()
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "session_idle")


async def test_a_session_has_no_parameters_and_takes_the_key_as_elevenlabs_does(preset: HttpPipeline) -> None:
    settings = ServerSettings(endpoint=preset.endpoint, api_key="sesame", check_host=False)
    path = "/v1/audio/speech/stream"
    with serving_sessions(settings) as url:
        for where, key, status in ((path, "sesam", 401), (f"{path}?a=b", "sesame", 400)):
            with pytest.raises(InvalidStatus) as refused:
                await text_socket(url, where, additional_headers={"xi-api-key": key}).__aenter__()
            assert refused.value.response.status_code == status
        async with text_socket(url, additional_headers={"xi-api-key": "sesame"}) as client:
            await client.append(["It turns."])
            await client.send(FLUSH)
            assert (await client.heard())[0] == "It turns."


def test_without_an_upgrade_the_route_says_what_it_is(preset: HttpPipeline) -> None:
    """As a request arrives behind a proxy that does not pass upgrades on."""
    for path in ("realtime", "audio/speech/stream", "text-to-speech/vivian/stream-input"):
        answer = httpx.get(f"{preset.url}/v1/{path}")
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
        error = answer.json()["error"]
        assert error["code"] == "upgrade_required"
        assert error["message"].startswith(f"/v1/{path} is a WebSocket")
