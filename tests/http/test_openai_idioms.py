"""The unchanged `openai` package with echo stages: its errors and names, cancellation, and what programs rely on."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
from collections.abc import Iterator

import httpx
import openai
import pytest
import soundfile

from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from tests.support.realtime import serving_sessions
from tests.support.servers import HttpPipeline, openai_client, serving, sound
from tests.support.waiting import PATIENCE, until

HELLO = [{"role": "user", "content": "hello, sea"}]


PART = "messages[0].content[0]"
UNKNOWN_SOUND = {"role": "assistant", "audio": {"id": "audio_unknown"}}
OLD_CALL = {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}


def part(kind: str, **field: str) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: field}]}]}


def wrong_picture(data: str) -> dict:
    return part("image_url", url=f"data:image/png;base64,{data}")


# What a body may hold is tested in tests/unit/test_decoding.py; here is what depends on the pipeline, and a few others.
ERRORS = [
    ({"model": "gpt-4o"}, "model", "model_not_found"),
    ({"modalities": ["smell"]}, "modalities", "unknown_modality"),
    ({**SPOKEN, "audio": {"voice": "alloy", "format": "wav"}}, "audio.voice", "unknown_voice"),
    ({**SPOKEN, "stream": True}, "audio.format", "unsupported_value"),
    ({"audio": SPOKEN["audio"]}, "audio", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": 3, "extra_body": {"min_tokens": 4}}, "min_tokens", "invalid_request"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", None),
    ({"extra_body": {"stage_params": {"thinkr": {}}}}, "stage_params", None),
    ({"extra_query": {"api-version": "1"}}, "api-version", "unknown_parameter"),
    ({"messages": [*HELLO, UNKNOWN_SOUND, *HELLO]}, "messages[1].audio.id", None),
    ({"messages": [*HELLO, OLD_CALL]}, "messages[1].function_call", None),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "prompt_too_long"),
    (wrong_picture("!!"), f"{PART}.image_url.url", "invalid_base64"),
    (wrong_picture("AAAA"), f"{PART}.image_url.url", "malformed_media"),
    (part("input_audio", data="AAAA", format="wav"), f"{PART}.input_audio.data", "malformed_media"),
]


@pytest.mark.parametrize(("change", "param", "code"), ERRORS, ids=[str(case[0])[:60] for case in ERRORS])
def test_errors_name_the_field(echo: HttpPipeline, change: dict, param: str, code: str | None) -> None:
    with pytest.raises(openai.NotFoundError if param == "model" else openai.BadRequestError) as caught:
        echo.openai().chat.completions.create(**{"model": "echo", "messages": HELLO, **change})
    assert caught.value.param == param
    assert code in (None, caught.value.code)
    assert caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_failure_before_the_first_token_is_a_status(echo: HttpPipeline) -> None:
    """FAIL_TOKEN: the stage fails this request alone."""
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            echo.openai().completions.create(model="echo", prompt=[0x7FFF0002], stream=stream)
        assert caught.value.code == "engine_error"


def test_a_deadline_is_an_event_of_a_stream_and_else_a_status(slow: HttpPipeline) -> None:
    """The deadline lies within the 25 s of the stream, and long after its beginning on a busy machine, too."""
    stream = slow.openai().chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "x" * 500}], stream=True, extra_body={"timeout": 6.0}
    )
    texts = []
    with pytest.raises(openai.APIError, match="deadline") as caught:
        texts.extend(chunk.choices[0].delta.content for chunk in stream)
    assert caught.value.code == "deadline_exceeded"
    assert "x" in texts
    with pytest.raises(openai.InternalServerError) as caught:
        slow.openai().chat.completions.create(model="echo", messages=LONG, extra_body={"timeout": 0.3})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


def wait_in_flight(pipeline: HttpPipeline, wanted: int, seconds: float = 5.0) -> None:
    until(lambda: httpx.get(f"{pipeline.url}/v1/status").json()["in_flight"] == wanted, seconds, f"{wanted} in flight")


LONG = [{"role": "user", "content": "x" * 2000}]  # 100 s at 20 tokens a second


def test_closing_a_stream_frees_every_stage(slow: HttpPipeline) -> None:
    audio = {"voice": "Ethan", "format": "pcm16"}
    stream = slow.openai().chat.completions.create(
        model="echo", messages=LONG, n=2, stream=True, modalities=["text", "audio"], audio=audio
    )
    next(iter(stream))
    wait_in_flight(slow, 2)
    stream.close()
    wait_in_flight(slow, 0)
    slow.assert_idle(timeout=10)
    assert "the client went away" in slow.log()


@pytest.mark.parametrize("more", [False, True], ids=["alone", "more requests in a row"])
def test_a_client_that_leaves_a_whole_answer_frees_every_stage(slow: HttpPipeline, more: bool) -> None:
    body = json.dumps({"model": "echo", "messages": LONG}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    host, port = slow.url.removeprefix("http://").split(":")
    before = len(slow.log())
    with socket.create_connection((host, int(port)), timeout=10 * PATIENCE) as connection:
        connection.sendall(asked)
        wait_in_flight(slow, 1)
        if more:
            connection.sendall(asked + asked[:100])
    wait_in_flight(slow, 0)
    slow.assert_idle(timeout=10)
    assert more or re.search(r"POST /v1/chat/completions 499 in \d", slow.log()[before:]), "only the log can show it"


def test_full_admission_is_429_with_retry_after(slow: HttpPipeline) -> None:
    streams = [slow.openai().chat.completions.create(model="echo", messages=LONG, stream=True) for _ in range(2)]
    try:
        with pytest.raises(openai.RateLimitError) as caught:
            slow.openai().chat.completions.create(model="echo", messages=HELLO)
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        for stream in streams:
            stream.close()
    wait_in_flight(slow, 0)
    # The client's own retries get through once there is room.
    assert slow.openai(max_retries=3).chat.completions.create(model="echo", messages=HELLO, max_tokens=2)


def test_other_routes_name_what_they_do_not_know(echo: HttpPipeline) -> None:
    client = echo.openai()
    file = ("a.wav", b"RIFF")
    for call, param in (
        (lambda: client.responses.create(model="echo", input=""), "input"),
        (lambda: client.responses.create(model="echo", input="x", extra_body={"audio": {"voice": "Ethan"}}), "audio"),
        (lambda: client.files.list(purpose="vision"), "purpose"),
        (lambda: client.files.create(file=file, purpose="vision", extra_body={"folder": "x"}), "folder"),
        (lambda: client.models.list(extra_query={"limit": 1}), "limit"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.param == param
    listed = httpx.get(f"{echo.url}/v1/requests", params={"limt": 3}).json()["error"]
    assert listed["message"] == "limt: /v1/requests has no such parameter of the query; it has limit."
    assert httpx.get(f"{echo.url}/health", params={"now": 1}).status_code == 200


@pytest.fixture(scope="module")
def renamed(echo_pipeline: HttpPipeline) -> Iterator[str]:
    """A server with names that many clients have built in."""
    settings = ServerSettings(
        endpoint=echo_pipeline.endpoint,
        served_names=["gpt-4o-audio-preview", "tts-1"],
        voice_aliases={"alloy": "Ethan", "verse": "default", "ash": "Nobody", "Chelsie": "Ethan"},
    )
    with serving(create_app(settings)) as url:
        yield url


def test_a_whole_answer_is_a_message_of_the_next_turn(echo: HttpPipeline) -> None:
    """As it came or as a dictionary; a spoken one whose id has expired is known by its transcript."""
    client = echo.openai()
    written, spoken, old = (
        client.chat.completions.create(model="echo", messages=HELLO, **options).choices[0].message
        for options in ({}, SPOKEN, SPOKEN)
    )
    old.audio.id = "audio_of_last_week"
    for message in (written, written.model_dump(), spoken, spoken.model_dump(), old):
        turns = [*HELLO, message, {"role": "user", "content": "!"}]
        again = client.chat.completions.create(model="echo", messages=turns).choices[0].message.content
        assert again == "hello, seahello, sea!", message


def test_a_model_has_all_the_names_it_is_served_under(renamed: str) -> None:
    client = openai_client(renamed)
    assert [model.id for model in client.models.list()] == ["gpt-4o-audio-preview", "tts-1", "pirate"]
    assert client.chat.completions.create(model="tts-1", messages=HELLO).model == "tts-1"
    with pytest.raises(openai.NotFoundError, match=r"has gpt-4o-audio-preview, tts-1. .*--served-name"):
        client.chat.completions.create(model="echo", messages=HELLO)
    for route, body in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})):
        unnamed = httpx.post(f"{renamed}/v1/{route}", json=body).json()
        assert unnamed["model"] == "gpt-4o-audio-preview", "without a model the first is meant"


def test_voices_have_aliases(renamed: str) -> None:
    client = openai_client(renamed)
    for voice in ("alloy", "verse", "Ethan", "Chelsie", "default"):
        assert client.audio.speech.create(model="tts-1", input="x", voice=voice, response_format="pcm").content
    spoken = {**SPOKEN, "audio": {"voice": {"id": "alloy"}, "format": "wav"}}
    answer = client.chat.completions.create(model="tts-1", messages=HELLO, **spoken)
    assert answer.choices[0].message.audio.transcript == "hello, sea"
    listed = httpx.get(f"{renamed}/v1/audio/voices").json()
    assert listed["voices"] == ["Chelsie", "Ethan"]
    assert listed["aliases"] == {"alloy": "Ethan", "verse": "default", "ash": "Nobody"}, "a voice keeps its own name"
    with pytest.raises(openai.BadRequestError, match=r"'ash' is an alias of 'Nobody'.*Chelsie, Ethan") as caught:
        client.audio.speech.create(model="tts-1", input="x", voice="ash")
    assert (caught.value.param, caught.value.code) == ("voice", "unknown_voice")


@pytest.fixture(scope="module")
def openais(echo_pipeline: HttpPipeline) -> Iterator[str]:
    """A server that takes all names of OpenAI's."""
    settings = ServerSettings(endpoint=echo_pipeline.endpoint, names="openai", voice_aliases={"nova": "Chelsie"})
    with serving_sessions(settings) as url:
        yield url


def test_models_of_openai_are_the_pipelines_and_no_others(openais: str) -> None:
    client = openai_client(openais)
    for name in ("gpt-4o-audio-preview", "gpt-5.1-mini-2026-02-01", "o3", "o4-mini", "chatgpt-4o-latest"):
        assert client.chat.completions.create(model=name, messages=HELLO).model == name
        assert client.models.retrieve(name).id == name
    assert [model.id for model in client.models.list()] == ["echo", "pirate"]
    for name in ("gtp-4o", "llama-3", "o", "gpt4", "o3\n", "echo2"):
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=name, messages=HELLO)


def test_every_voice_of_openai_is_one_of_the_pipelines(openais: str) -> None:
    client = openai_client(openais)
    aliases = httpx.get(f"{openais}/v1/audio/voices").json()["aliases"]
    assert set(aliases) >= {"alloy", "ash", "ballad", "coral", "echo", "fable", "marin", "onyx", "sage", "shimmer"}
    assert (aliases["alloy"], aliases["ash"], aliases["nova"]) == ("Chelsie", "Ethan", "Chelsie"), (
        "the operator's holds"
    )
    assert client.audio.speech.create(model="tts-1", input="x", voice="shimmer", response_format="pcm").content
    assert client.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound(0.2))).text


async def test_a_session_has_openais_names_too(openais: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{openais}/v1", api_key="none") as connecting,
        connecting.realtime.connect(model="gpt-realtime") as connection,
    ):
        assert (await connection.recv()).session.model == "gpt-realtime"
        audio = {"output": {"voice": "ash"}}
        await connection.session.update(session={"type": "realtime", "model": "gpt-realtime", "audio": audio})
        updated = (await connection.recv()).session
        assert (updated.model, updated.audio.output.voice) == ("gpt-realtime", "Ethan")


def test_speech_and_spoken_answers_are_as_fast_as_is_asked_for(echo: HttpPipeline) -> None:
    speech = {"model": "echo", "input": "x", "voice": "Ethan"}
    for form in ("pcm", "flac"):
        lengths = {}
        for speed in (1, 2, 0.5):
            data = echo.openai().audio.speech.create(**speech, response_format=form, speed=speed).content
            lengths[speed] = len(data) / 2 if form == "pcm" else soundfile.info(io.BytesIO(data)).frames
        assert lengths[2] == pytest.approx(lengths[1] / 2, rel=0.02)
        assert lengths[0.5] == pytest.approx(lengths[1] * 2, rel=0.02)
    with pytest.raises(openai.BadRequestError, match="speed: must be a number of at most 4") as caught:
        echo.openai().audio.speech.create(**speech, speed=4.5)
    assert caught.value.param == "speed"
    chat = {"model": "echo", "messages": [{"role": "user", "content": "sea " * 10}], "modalities": ["text", "audio"]}
    slow, fast = ({**chat, "audio": {"voice": "Ethan", "format": "pcm16", "speed": speed}} for speed in (1, 2))
    client = echo.openai()
    whole, half = (
        len(base64.b64decode(client.chat.completions.create(**body).choices[0].message.audio.data))
        for body in (slow, fast)
    )
    assert half == pytest.approx(whole / 2, rel=0.05)
    chunks = client.chat.completions.create(**fast, stream=True)
    sounds = [chunk.choices[0].delta.audio for chunk in chunks]
    assert sum(len(base64.b64decode(sound.data or "")) for sound in sounds if sound is not None) == half
    short = {**fast, "messages": [{"role": "user", "content": "s"}], "modalities": ["audio"]}
    (*_, end) = client.chat.completions.create(**short, stream=True)
    assert end.choices[0].finish_reason == "stop", "sound that comes with the end does not replace it"


def test_speech_is_asked_for_as_other_servers_of_speech_are(echo: HttpPipeline) -> None:
    body = {"model": "echo", "input": "a b", "voice": "Ethan", "response_format": "pcm"}
    plain = httpx.post(f"{echo.url}/v1/audio/speech", json=body)
    for more in ({"stream": True, "non_streaming_mode": False}, {"stream": False, "ref_audio": None, "task_type": ""}):
        answer = httpx.post(f"{echo.url}/v1/audio/speech", json=body | more)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/pcm")
        assert answer.content == plain.content != b""
    for field, value, instead in (
        ("non_streaming_mode", True, "A text is read while it is spoken."),
        ("ref_audio", "https://example.com/a.wav", "/v1/audio/voices"),
        ("task_type", "Base", "Each checkpoint has one"),
        ("max_new_tokens", 2048, "stage_params"),
    ):
        error = httpx.post(f"{echo.url}/v1/audio/speech", json=body | {field: value}).json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert instead in error["message"]


def test_a_path_that_is_nearly_right_is_told_which_one_is_meant(echo: HttpPipeline) -> None:
    for path, meant in (
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/audio/speach", "/v1/audio/speech"),
    ):
        for headers in ({}, {"content-type": "application/json"}, {"content-type": "text/plain"}):
            answer = httpx.post(f"{echo.url}{path}", content=b"{}", headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_found")
            assert f"Did you mean {meant}?" in error["message"]
            assert "/v1/models, " in error["message"]
    assert httpx.get(f"{echo.url}/v1/embeddings").status_code == 404
    answer = httpx.put(f"{echo.url}/v1/chat/completions", content=b"x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "/v1/chat/completions takes POST, not PUT."
    body = {"model": "echo", "messages": HELLO}
    answer = httpx.post(f"{echo.url}/v1/chat/completions/", json=body, follow_redirects=True)
    assert answer.json()["choices"][0]["message"]["content"] == "hello, sea", "with a slash too many it is redirected"


def test_base64_where_a_url_belongs_is_said_to_be_that(echo: HttpPipeline) -> None:
    data = base64.b64encode(sound()).decode()
    part = {"type": "audio_url", "audio_url": {"url": data}}
    with pytest.raises(openai.BadRequestError, match=r"data:audio/TYPE;base64, .*--media-host") as caught:
        echo.openai().chat.completions.create(model="echo", messages=[{"role": "user", "content": [part]}])
    assert caught.value.code == "invalid_url"
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="--media-host"):
        echo.openai().chat.completions.create(model="echo", messages=[{"role": "user", "content": [part]}])


def test_parameters_of_paths_and_queries_are_refused_in_plain_words(echo: HttpPipeline) -> None:
    for limit, said in ((0, " of at least 1"), (201, " of at most 200"), ("many", ", not a text")):
        error = httpx.get(f"{echo.url}/v1/requests", params={"limit": limit}).json()["error"]
        assert error["message"] == f"limit: must be a whole number{said}."
    error = httpx.post(f"{echo.url}/v1/files", files={"file": (None, "x")}).json()["error"]
    assert error["message"] == "file: must be a file."
