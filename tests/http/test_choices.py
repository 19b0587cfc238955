"""Several answers to one prompt (`n`), and LoRA adapters as models, with the unchanged `openai` package."""

from __future__ import annotations

import asyncio
import base64

import numpy
import openai
import pytest

from omni_actors.client import AsyncOmniClient, OmniClient
from omni_actors.errors import Aborted, InvalidRequest
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget
from tests.support.realtime import no_request
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE

HELLO = [{"role": "user", "content": "hello, sea"}]
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
SAMPLES_PER_TOKEN = 480
CONTENT_BYTES = SAMPLES_PER_TOKEN * 2 * len("hello, sea")


def test_each_choice_has_text_and_speech_of_its_own(echo: HttpPipeline) -> None:
    one = echo.openai().chat.completions.create(model="echo", messages=HELLO, **SPOKEN).usage
    answer = echo.openai().chat.completions.create(model="echo", messages=HELLO, n=3, **SPOKEN)
    three = answer.usage
    assert three.prompt_tokens == one.prompt_tokens == 10, "the prompt counts once, and answers add up"
    assert three.completion_tokens == 3 * one.completion_tokens
    assert three.total_tokens == three.prompt_tokens + three.completion_tokens
    assert three.completion_tokens_details.text_tokens == three.stages["thinker"]["output_tokens"] == 30
    assert three.completion_tokens_details.audio_tokens == 3 * one.completion_tokens_details.audio_tokens > 0
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    sounds = [choice.message.audio for choice in answer.choices]
    assert [sound.transcript for sound in sounds] == ["hello, sea"] * 3
    assert [len(base64.b64decode(sound.data)) for sound in sounds] == [CONTENT_BYTES] * 3
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


def test_text_completions_have_choices_too(echo: HttpPipeline) -> None:
    options: dict = {"model": "echo", "prompt": "abc", "n": 2}
    whole = echo.openai().completions.create(**options)
    found = [(choice.index, choice.text, choice.finish_reason) for choice in whole.choices]
    assert found == [(0, "abc", "stop"), (1, "abc", "stop")]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
    texts = ["", ""]
    for chunk in echo.openai().completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["abc", "abc"]


def test_more_answers_than_slots_are_refused(slow: HttpPipeline) -> None:
    with pytest.raises(openai.BadRequestError, match="2 requests at a time") as caught:
        slow.openai().chat.completions.create(model="echo", messages=HELLO, n=3)
    assert caught.value.param == "n"


def test_the_client_library_returns_all_answers(echo: HttpPipeline) -> None:
    with OmniClient(echo.endpoint) as client:
        outputs = client.generate_choices("hello", 4, request_id="four", timeout=60)
        assert [output.request_id for output in outputs] == ["four", "four-1", "four-2", "four-3"]
        assert [output.text for output in outputs] == ["hello"] * 4
        expected = numpy.repeat(numpy.frombuffer(b"hello", numpy.uint8) / 256.0, SAMPLES_PER_TOKEN)
        for output in outputs:
            numpy.testing.assert_allclose(output.audio, expected, atol=1e-6)
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
