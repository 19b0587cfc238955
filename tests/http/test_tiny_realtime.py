"""A spoken turn that the tiny Qwen2.5-Omni pipeline computes while the user speaks."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import numpy
import pytest
from openai import AsyncOpenAI

from omni_actors.client import OmniClient
from omni_actors.http_server.realtime.config import RATE
from omni_actors.http_server.realtime.turns import MARGIN
from tests.support.paths import REPOSITORY
from tests.support.realtime import answer_on, speech
from tests.support.servers import HttpPipeline, data_uri, picture
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.e2e

MODEL = "tiny-qwen2.5-omni"
STAGES = {"thinker": {"max_tokens": 12}, "talker": {"max_tokens": 20}}
BLOCK = 128  # tokens of a block of the key/value cache on a CPU
STEP = 2 * RATE  # of sound that is computed at a time


@pytest.fixture
def tiny(tiny_http: HttpPipeline) -> Iterator[HttpPipeline]:
    yield tiny_http
    tiny_http.assert_idle()


def value(url: str, name: str) -> float:
    """A counter, with its labels in order."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(name, line))


def computed(url: str) -> float:
    return value(url, r'omni_realtime_preparations_total\{outcome="computed"\}')


def cached(url: str) -> float:
    return value(url, r"omni_vllm_prefix_cache_hits_total\{[^}]*thinker")


@pytest.mark.nightly
async def test_a_turn_that_was_computed_while_the_user_spoke_has_the_same_answer(tiny: HttpPipeline) -> None:
    """Also if the end of the turn is its loudest part, which changes the features of the rest."""
    for seed, loudness in ((3, 0.1), (4, 10.0)):
        voice = (speech(7.5, seed) * min(loudness, 1.0)).astype("<i2")
        voice[3 * STEP :] = (voice[3 * STEP :] / loudness).astype("<i2")
        with OmniClient(tiny.endpoint) as client:
            before, hits = computed(tiny.url), cached(tiny.url)
            text, pcm = await spoken(tiny, voice, before)
            if loudness > 1.0:  # what came before the end is as it was
                await eventually(lambda hits=hits: cached(tiny.url) >= hits + BLOCK, 10)
            content = [{"type": "audio", "audio": (voice, RATE)}]
            wanted = client.generate(
                [{"role": "user", "content": content}], voice="Ethan", seed=5, params=STAGES, timeout=120
            )
        assert text == wanted.text
        numpy.testing.assert_allclose(numpy.frombuffer(pcm, "<i2") / 32767, wanted.audio, atol=1e-3)


async def spoken(tiny: HttpPipeline, voice: numpy.ndarray, before: float) -> tuple[str, bytes]:
    """The answer to a turn of which each piece is sent once the one before was computed."""
    async with (
        AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client,
        client.realtime.connect(model=MODEL) as connection,
        asyncio.timeout(60 * PATIENCE),
    ):
        audio = {"input": {"turn_detection": None}, "output": {"voice": "Ethan"}}
        fields = {"seed": 5, "stage_params": STAGES}
        await connection.session.update(session={"type": "realtime", "audio": audio, **fields})
        for number in range(4):
            piece = voice[number * STEP : (number + 1) * STEP] if number < 3 else voice[3 * STEP :]
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece.tobytes()).decode())
            if number:  # what follows a piece has come with the next one
                await eventually(lambda number=number: computed(tiny.url) >= before + number, 30)
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        answer = await answer_on(connection)
    assert answer.response.status == "incomplete", "the limit of tokens ends it"
    return answer.text, answer.pcm


async def test_a_picture_is_seen(tiny: HttpPipeline) -> None:
    item = {"type": "message", "role": "user"}
    item["content"] = [{"type": "input_image", "image_url": data_uri("image/png", picture(112, 112))}]
    async with (
        AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client,
        client.realtime.connect(model=MODEL) as connection,
        asyncio.timeout(60 * PATIENCE),
    ):
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"], "seed": 5})
        await connection.conversation.item.create(item=item)
        await connection.response.create(response={"max_output_tokens": 12})
        usage = (await answer_on(connection)).response.usage
    with OmniClient(tiny.endpoint) as client:
        content = [{"type": "image", "image": picture(112, 112)}]
        wanted = client.generate(
            [{"role": "user", "content": content}], modalities=["text"], params={"thinker": {"max_tokens": 1}}
        )
    assert usage.input_tokens == wanted.usage["thinker"].input_tokens > 16, "a token for 28 x 28 pixels"


async def test_what_is_discarded_or_left_leaves_no_request(tiny: HttpPipeline) -> None:
    """The fixture waits until no stage holds a request."""
    sound = base64.b64encode(speech(2.5)[: STEP + MARGIN].tobytes()).decode()
    everything = r"omni_realtime_preparations_total"
    before = value(tiny.url, everything)
    async with (
        AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        await connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        await connection.input_audio_buffer.append(audio=sound)
        await connection.input_audio_buffer.clear()
        await eventually(lambda: value(tiny.url, everything) == before + 1, 30)
        await connection.input_audio_buffer.append(audio=sound)
    await eventually(lambda: value(tiny.url, everything) == before + 2, 30)


@pytest.mark.nightly
def test_the_documented_sound_that_grows_is_answered(tiny: HttpPipeline) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if '"max_tokens": 0' in block]
    done = subprocess.run(
        [sys.executable, "-c", block.replace("ipc:///tmp/omni-x/client", tiny.endpoint)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
