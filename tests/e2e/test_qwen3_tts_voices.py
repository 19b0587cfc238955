"""Qwen3-TTS Base as users run it: a voice made over HTTP from a clip, spoken with, while stages die, and deleted."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy
import psutil
import pytest
import soundfile

from omni_actors.client import AsyncOmniClient, Audio
from omni_actors.client.prompts import spoken
from tests.support.qwen3_tts_reference import Qwen3TtsReference
from tests.support.servers import HttpPipeline, close_clients

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TEXT = "The tide is full."
TRANSCRIPT = "One."
FRAMES, FRAME, RATE = 20, 1920, 24_000
# As a file with 16 bits a sample holds it: 16 frames, more than the text has tokens.
NOISE = numpy.random.default_rng(0).normal(scale=3000, size=30_001)
CLIP = NOISE.astype(numpy.int16) / numpy.float32(32768)
PEAK_TOLERANCE = 1e-3  # another code in one of the 16 codebooks of one frame changes the sound by far more
GREEDY = {"talker": {"max_tokens": FRAMES + 1, "temperature": 0.0}}
SAMPLED = {"talker": {"max_tokens": 40, "min_tokens": 40, "temperature": 0.9, "top_k": 50}}


@pytest.fixture(scope="module")
def folder(tiny_qwen3_tts_kinds: dict[str, Path]) -> Path:
    return tiny_qwen3_tts_kinds["base"]


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[HttpPipeline]:
    with HttpPipeline("stage_configs/tiny_qwen3_tts.yaml", {"model": folder}) as running:
        yield running


def test_a_voice_made_of_a_clip_speaks_as_the_reference_clones_it(http: HttpPipeline, folder: Path) -> None:
    """Alone and continued from its transcript, until it is deleted."""
    recording = io.BytesIO()
    soundfile.write(recording, CLIP, RATE, format="WAV", subtype="PCM_16")
    reference = Qwen3TtsReference(folder)
    cases = [("mara", {}, {"x_vector_only_mode": True}), ("mira", {"transcript": TRANSCRIPT}, {"ref_text": TRANSCRIPT})]
    heard = []
    for name, fields, asked in cases:
        made = httpx.post(
            f"{http.url}/v1/audio/voices",
            files={"audio_sample": ("a.wav", recording.getvalue())},
            data={"name": name, "consent": "mine", **fields},
            timeout=30,
        )
        assert made.status_code == 200, made.text
        answer = http.openai().audio.speech.create(
            model="tiny-qwen3-tts", input=TEXT, voice=name, response_format="pcm", extra_body={"stage_params": GREEDY}
        )
        heard.append(numpy.frombuffer(answer.content, "<i2") / 32767.0)
        wanted = reference.speak(TEXT, frames=FRAMES, ref_audio=(CLIP, RATE), **asked).waveform.numpy()
        assert heard[-1].shape == wanted.shape == (FRAMES * FRAME,)
        assert numpy.abs(wanted).max() > 0.05, "a silent reference proves nothing"
        numpy.testing.assert_allclose(heard[-1], wanted.clip(-1, 1), atol=PEAK_TOLERANCE)
        assert httpx.delete(f"{http.url}/v1/audio/voices/{name}").status_code == 200
        gone = httpx.post(f"{http.url}/v1/audio/speech", json={"input": TEXT, "voice": name}, timeout=30)
        assert gone.json()["error"]["code"] == "unknown_voice"
    close_clients()
    assert numpy.abs(heard[0] - heard[1]).max() > 0.05, "the transcript matters"
    http.assert_idle()


async def said(client: AsyncOmniClient, kill: str = "") -> numpy.ndarray:
    """A sampled continuation of the clip, while whose stage `kill` dies after the first sound."""
    prompt = spoken(TEXT, clip=(CLIP, RATE), transcript=TRANSCRIPT)
    stream = await client.submit(prompt, seed=11, params=SAMPLED, timeout=120)
    pieces: list[numpy.ndarray] = []
    async for item in stream:
        if isinstance(item, Audio):
            pieces.append(item.samples)
        if kill and pieces:
            (pid,) = [each.pid for each in (await client.describe()).stages if each.stage == kill]
            psutil.Process(pid).kill()
            kill = ""
    assert not kill, "the answer ended before its stage could die"
    return numpy.concatenate(pieces)


async def test_a_stage_that_dies_while_a_clip_is_continued_changes_nothing_of_what_is_heard(http: HttpPipeline) -> None:
    """A vocoder that starts again decodes the clip again, and plays none of it."""
    async with AsyncOmniClient(http.endpoint) as client:
        undisturbed = await said(client)
        assert len(undisturbed) == 39 * FRAME
        for stage in ("code2wav", "talker"):
            replays = (await client.describe()).counts["replays"]
            made = await said(client, stage)
            assert (await client.describe()).counts["replays"] == replays + 1
            assert made.shape == undisturbed.shape
            assert float(numpy.abs(made - undisturbed).max()) <= 1e-4
            while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
                await asyncio.sleep(0.1)
    http.assert_idle()
