"""The unchanged `openai` package with echo stages, which send back what they receive; several answers, adapters."""

from __future__ import annotations

import asyncio
import base64
import io

import httpx
import numpy
import openai
import pytest
import soundfile

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import Aborted, InvalidRequest
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget
from tests.support.realtime import no_request
from tests.support.servers import HttpPipeline, sound
from tests.support.waiting import PATIENCE

HELLO = [{"role": "user", "content": "hello, sea"}]
SAMPLES_PER_TOKEN = 480
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
CONTENT_BYTES = SAMPLES_PER_TOKEN * 2 * len("hello, sea")


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
    stream = echo.openai().chat.completions.create(
        model="echo", messages=HELLO, stream=True, stream_options={"include_usage": True}, **SPOKEN
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
    whole = client.completions.create(model="echo", prompt="abc", n=2)
    found = [(choice.index, choice.text, choice.finish_reason) for choice in whole.choices]
    assert found == [(0, "abc", "stop"), (1, "abc", "stop")]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    options = {"stream_options": {"include_usage": True}, "max_tokens": 9, "n": 2}
    texts = ["", ""]
    for chunk in client.completions.create(model="echo", prompt=["hello"], stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["hello", "hello"]
    assert chunk.usage.prompt_tokens == 5


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


def test_each_choice_has_text_and_speech_of_its_own(echo: HttpPipeline) -> None:
    one = echo.openai().chat.completions.create(model="echo", messages=HELLO, **SPOKEN).usage
    wav = {**SPOKEN, "audio": {"voice": "Ethan", "format": "wav"}}
    answer = echo.openai().chat.completions.create(model="echo", messages=HELLO, n=3, **wav)
    three = answer.usage
    assert three.prompt_tokens == one.prompt_tokens == 10, "the prompt counts once, and answers add up"
    assert three.completion_tokens == 3 * one.completion_tokens
    assert three.total_tokens == three.prompt_tokens + three.completion_tokens
    assert three.completion_tokens_details.text_tokens == three.stages["thinker"]["output_tokens"] == 30
    assert three.completion_tokens_details.audio_tokens == 3 * one.completion_tokens_details.audio_tokens > 0
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    sounds = [choice.message.audio for choice in answer.choices]
    for choice, spoken in zip(answer.choices, sounds, strict=True):
        assert (choice.message.content, spoken.transcript) == (None, "hello, sea")
        assert spoken.expires_at > answer.created
        samples, rate = soundfile.read(io.BytesIO(base64.b64decode(spoken.data)))
        assert rate == 24_000
        numpy.testing.assert_allclose(samples, expected_samples("hello, sea"), atol=1e-4)
    assert len({sound.id for sound in sounds}) == 3
    follow_up = [*HELLO, {"role": "assistant", "audio": {"id": sounds[2].id}}, {"role": "user", "content": "!"}]
    later = echo.openai().chat.completions.create(model="echo", messages=follow_up)
    assert later.choices[0].message.content == "hello, seahello, sea!"


def test_streamed_choices_carry_their_index(echo: HttpPipeline) -> None:
    texts, sounds, finished, usage = [""] * 3, [b""] * 3, [], None
    for chunk in echo.openai().chat.completions.create(
        model="echo", messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}, **SPOKEN
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in finished, "nothing follows the end of an answer"
            if (audio := choice.delta.audio) is not None:
                texts[choice.index] += audio.transcript or ""
                sounds[choice.index] += base64.b64decode(audio.data or "")
            if choice.finish_reason:
                assert choice.finish_reason == "stop"
                finished.append(choice.index)
    assert texts == ["hello, sea"] * 3
    assert [len(sound) for sound in sounds] == [CONTENT_BYTES] * 3
    assert sorted(finished) == [0, 1, 2]
    assert usage.prompt_tokens == 10


def test_more_answers_than_slots_are_refused(slow: HttpPipeline) -> None:
    with pytest.raises(openai.BadRequestError, match="2 requests at a time") as caught:
        slow.openai().chat.completions.create(model="echo", messages=HELLO, n=3)
    assert caught.value.param == "n"


def test_the_client_library_returns_all_answers(echo: HttpPipeline) -> None:
    with OmniClient(echo.endpoint) as client:
        outputs = client.generate_choices("hello", 4, request_id="four", timeout=60)
        assert [output.request_id for output in outputs] == ["four", "four-1", "four-2", "four-3"]
        assert [output.text for output in outputs] == ["hello"] * 4
        for output in outputs:
            numpy.testing.assert_allclose(output.audio, expected_samples("hello"), atol=1e-6)
        for wrong in (0, 17):
            with pytest.raises(InvalidRequest, match="1 to 16 answers") as caught:
                client.generate_choices("hello", wrong)
            assert caught.value.field == "n"


async def test_when_one_answer_fails_the_others_end_too(slow: HttpPipeline) -> None:
    """Each answer would take a hundred seconds; the one that fails is not the first. Whole, and one by one."""
    async with AsyncOmniClient(slow.endpoint) as client, asyncio.timeout(40 * PATIENCE):
        for whole in (True, False):
            streams = await client.submit_choices("x" * 2000, 2, modalities=["text"])
            await anext(streams)
            await streams.streams[1].abort()
            with pytest.raises(Aborted):
                _ = await streams.results() if whole else [item async for item in streams]
            await no_request(slow.url)


def test_an_adapter_is_a_model_whose_parent_is_the_pipelines(echo: HttpPipeline) -> None:
    client = echo.openai()
    parents = {model.id: model.parent for model in client.models.list()}
    assert parents["pirate"] == "echo"
    assert client.models.retrieve("pirate").parent == "echo"
    answer = client.chat.completions.create(model="pirate", messages=HELLO)
    assert (answer.model, answer.choices[0].message.content) == ("pirate", "hello, sea")
    assert client.completions.create(model="pirate", prompt="abc").model == "pirate"
    with pytest.raises(openai.NotFoundError, match="pirate") as caught:
        client.chat.completions.create(model="poet", messages=HELLO)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_the_text_stage_runs_the_adapter_that_a_request_names(echo: HttpPipeline) -> None:
    with OmniClient(echo.endpoint) as client:
        description = client.describe()
        assert client.generate("hello", params={"thinker": {"adapter": "pirate"}}, timeout=60).text == "hello"
        with pytest.raises(InvalidRequest, match="no adapter 'poet'") as caught:
            client.generate("hello", params={"thinker": {"adapter": "poet"}}, timeout=60)
        assert caught.value.field == "adapter"
    assert description.adapters == ("pirate",)
    state = ServerState(ServerSettings(endpoint=echo.endpoint), Budget(1 << 20))
    adapted = state.stage_params("pirate", {}, description, {"top_p": 0.5})
    assert adapted == {"thinker": StageParams(top_p=0.5, adapter="pirate")}
    assert state.stage_params("echo", {}, description, {"top_p": 0.5}) == {"thinker": StageParams(top_p=0.5)}
