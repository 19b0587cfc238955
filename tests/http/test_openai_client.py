"""The unchanged `openai` package with echo stages, which send back what they receive."""

from __future__ import annotations

import base64
import io

import httpx
import numpy
import openai
import pytest
import soundfile

from tests.support.servers import HttpPipeline, sound

HELLO = [{"role": "user", "content": "hello, sea"}]
SAMPLES_PER_TOKEN = 480


def expected_samples(text: str) -> numpy.ndarray:
    return numpy.repeat(numpy.frombuffer(text.encode(), numpy.uint8) / 256.0, SAMPLES_PER_TOKEN)


def test_chat(echo: HttpPipeline) -> None:
    answer = echo.openai().chat.completions.create(model="echo", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == "hello, sea"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 10
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == 20
    assert set(answer.usage.stages) == {"prompt", "thinker"}, "text needs no talker"


def test_roles_and_content_parts(echo: HttpPipeline) -> None:
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "name": "x", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    assert echo.openai().chat.completions.create(model="echo", messages=messages).choices[0].message.content == "abcdef"


def test_max_tokens_both_names_and_stage_params(echo: HttpPipeline) -> None:
    client = echo.openai()
    for options in (
        {"max_tokens": 4},
        {"max_completion_tokens": 4},
        {"max_tokens": 7, "extra_body": {"stage_params": {"thinker": {"max_tokens": 4}}}},
        {"extra_body": {"stage_params": {"prompt": {"max_tokens": 4}}}},
    ):
        answer = client.chat.completions.create(model="echo", messages=HELLO, **options)
        assert answer.choices[0].message.content == "hell", options


def test_stream(echo: HttpPipeline) -> None:
    stream = echo.openai().chat.completions.create(
        model="echo", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    *deltas, last = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == "hello, sea"
    assert all(chunk.choices[0].finish_reason is None for chunk in deltas)
    assert last.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])
    chunks = list(echo.openai().chat.completions.create(model="echo", messages=HELLO, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks), "only on request"


def test_a_spoken_stream(echo: HttpPipeline) -> None:
    options = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
    stream = echo.openai().chat.completions.create(
        model="echo", messages=HELLO, stream=True, stream_options={"include_usage": True}, **options
    )
    audios, data, contents, usage = [], b"", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        created = chunk.created
        for choice in chunk.choices:
            contents.append(choice.delta.content)
            if choice.delta.audio:
                audios.append(choice.delta.audio)
                data += base64.b64decode(choice.delta.audio.data or "")
    assert "".join(audio.transcript or "" for audio in audios) == "hello, sea"
    assert not any(contents), "a spoken answer has its text in the transcript"
    assert {audio.id for audio in audios if audio.id} == {audios[0].id}
    assert audios[-1].expires_at > created
    samples = numpy.frombuffer(data, "<i2") / 32767.0
    numpy.testing.assert_allclose(samples, expected_samples("hello, sea"), atol=1e-4)
    assert usage.completion_tokens_details.audio_tokens == 10
    assert list(usage.stages) == ["prompt", "thinker", "talker", "code2wav"]


def test_a_spoken_answer(echo: HttpPipeline) -> None:
    """The other formats: tests/unit/test_audio_formats.py."""
    answer = echo.openai().chat.completions.create(
        model="echo", messages=HELLO, modalities=["text", "audio"], audio={"voice": "Chelsie", "format": "wav"}
    )
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == "hello, sea"
    assert message.audio.expires_at > answer.created
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)))
    assert rate == 24_000
    numpy.testing.assert_allclose(samples, expected_samples("hello, sea"), atol=1e-4)


def test_an_uploaded_file(echo: HttpPipeline) -> None:
    client = echo.openai()
    uploaded = client.files.create(file=("a.wav", sound()), purpose="user_data")
    assert uploaded.bytes == len(sound())
    assert client.files.retrieve(uploaded.id).filename == "a.wav"
    assert uploaded.id in [file.id for file in client.files.list()]
    parts = [{"type": "file", "file": {"file_id": uploaded.id}}, {"type": "text", "text": "what?"}]
    answer = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "what?"
    assert client.files.delete(uploaded.id).deleted
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[0].file.file_id"


def test_completions(echo: HttpPipeline) -> None:
    client = echo.openai()
    answer = client.completions.create(model="echo", prompt="hello", max_tokens=3)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "hel"
    assert answer.usage.completion_tokens == 3
    answer = client.completions.create(model="echo", prompt=[104, 105])
    assert answer.choices[0].text == "hi"
    options = {"stream_options": {"include_usage": True}, "max_tokens": 9}
    chunks = list(client.completions.create(model="echo", prompt=["hello"], stream=True, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hello"
    assert chunks[-1].usage.prompt_tokens == 5


def test_speech(echo: HttpPipeline) -> None:
    """The echo repeats the whole instruction, the text included; FLAC is streamed on request."""
    with echo.openai().audio.speech.with_streaming_response.create(
        model="echo", input="hello", voice="Chelsie", response_format="wav"
    ) as response:
        samples, rate = soundfile.read(io.BytesIO(b"".join(response.iter_bytes())))
        assert response.headers["content-type"].startswith("audio/")
    assert rate == 24_000
    spoken = bytes(numpy.round(samples[::SAMPLES_PER_TOKEN] * 256).astype(numpy.uint8)).decode()
    assert "<<<\nhello\n>>>" in spoken
    body = {"model": "echo", "input": "hi", "response_format": "flac", "stream_format": "audio"}
    with httpx.stream("POST", f"{echo.url}/v1/audio/speech", json=body) as response:
        assert "content-length" not in response.headers
        assert b"".join(response.iter_bytes()).startswith(b"fLaC")


def test_models_and_voices(echo: HttpPipeline) -> None:
    client = echo.openai()
    assert [model.id for model in client.models.list()] == ["echo", "pirate"]
    assert client.models.retrieve("echo").id == "echo"
    assert client.models.retrieve("echo").root == "echo", "what vLLM's tools ask for"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    voices = httpx.get(f"{echo.url}/v1/audio/voices").json()
    assert voices == {"voices": ["Chelsie", "Ethan"], "aliases": {}, "created": []}
    status = httpx.get(f"{echo.url}/v1/status").json()
    assert [stage["stage"] for stage in status["stages"]] == ["prompt", "thinker", "talker", "code2wav"]
    assert status["on_cpu"] is False, "echo stages compute nothing"
