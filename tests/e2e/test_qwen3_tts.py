"""Qwen3-TTS as users run it, with a client and over HTTP, of all kinds; sound is compared with Qwen's package."""

from __future__ import annotations

import asyncio
import io

import httpx
import numpy
import psutil
import pytest
import soundfile

from omni_actors.client import AsyncOmniClient, Audio, OmniClient, spoken
from tests.support.qwen3_tts_reference import Qwen3TtsReference
from tests.support.servers import HttpPipeline

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

MODEL = "tiny-qwen3-tts"
TEXT = "The tide is full, and they are to be at one with it."
FRAME, RATE = 1920, 24_000
TOLERANCE = 1e-3  # another code in one of the 16 codebooks of one frame changes the sound by far more


@pytest.fixture(scope="module")
def kind(request, tiny_qwen3_tts_kinds):
    """A pipeline of a checkpoint of another kind."""
    folder = tiny_qwen3_tts_kinds[request.param]
    with HttpPipeline("stage_configs/tiny_qwen3_tts.yaml", {"model": folder}) as running:
        running.reference = Qwen3TtsReference(folder)
        yield running
        running.assert_idle()


def greedy(frames):
    return {"talker": {"max_tokens": frames + 1, "temperature": 0.0}}


def assert_sounds(heard, wanted, frames):
    assert heard.shape == wanted.shape == (frames * FRAME,)
    assert numpy.abs(wanted).max() > 0.05, "a silent reference proves nothing"
    numpy.testing.assert_allclose(heard, wanted.clip(-1, 1), atol=TOLERANCE)


def ask(http, text=TEXT, **fields):
    body = {"input": text, "response_format": "pcm", **fields}
    return httpx.post(f"{http.url}/v1/audio/speech", json=body, timeout=60)


def sound_of(answer):
    assert answer.status_code == 200, answer.text
    return numpy.frombuffer(answer.content, "<i2") / 32767.0


async def test_texts_at_once_sound_as_the_reference_speaks_each(qwen3_tts_http, tiny_qwen3_tts):
    """Whole chain, by sound that only the right codes of all 16 codebooks make."""
    asked = [
        ("vivian", 30, {"language": "english"}, {"language": "english"}),
        ("eric", 12, {}, {}),
        ("ryan", 21, {"instructions": "Softly."}, {"instruct": "Softly."}),
    ]
    async with AsyncOmniClient(qwen3_tts_http.endpoint) as client:
        description = await client.describe()
        assert description.speech.instructions == "optional"
        assert (description.voices, description.sample_rate) == (("vivian", "ryan", "eric"), RATE)
        outputs = await asyncio.gather(
            *(
                client.generate(
                    TEXT, voice=voice, additional_information=information, params=greedy(frames), timeout=120
                )
                for voice, frames, information, _ in asked
            )
        )
    reference = Qwen3TtsReference(tiny_qwen3_tts)
    for (voice, frames, _, given), output in zip(asked, outputs, strict=True):
        wanted = reference.speak(TEXT, frames=frames, speaker=voice, **given).waveform.numpy()
        assert_sounds(output.audio, wanted, frames)
    usages = [output.usage for output in outputs]
    assert any(usage["code2wav"].first_output < usage["talker"].finished for usage in usages), "sound streams"
    qwen3_tts_http.assert_idle()


def test_the_text_that_is_given_is_spoken_from_the_first_frame_on(qwen3_tts_http):
    """In several pieces, which together are the sound that the client library gets."""
    with OmniClient(qwen3_tts_http.endpoint) as client:
        prompt = spoken(TEXT, language="english", instructions="Softly.")
        wanted = client.generate(prompt, voice="ryan", params=greedy(8), timeout=120).audio
    with qwen3_tts_http.openai().audio.speech.with_streaming_response.create(
        model=MODEL,
        input=TEXT,
        voice="Ryan",
        instructions="Softly.",
        response_format="pcm",
        extra_body={"language": "English", "stage_params": greedy(8)},
    ) as response:
        pieces = list(response.iter_bytes())
    assert len(pieces) > 1, "it streams"
    assert_sounds(numpy.frombuffer(b"".join(pieces), "<i2") / 32767.0, wanted, 8)
    for fields, param, code in [
        ({"voice": "alice"}, "voice", "unknown_voice"),
        ({"language": "Klingon"}, "language", "invalid_value"),
        ({"text": " "}, "input", "invalid_value"),
        ({"text": "tide " * 800, "instructions": "slow " * 800}, "input", "prompt_too_long"),
    ]:
        answer = ask(qwen3_tts_http, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"].items() >= {"param": param, "code": code}.items()
    qwen3_tts_http.assert_idle()


@pytest.mark.parametrize("kind", ["voice_design"], indirect=True)
def test_described_voices_sound_as_the_reference_speaks_with_them(kind):
    heard = []
    for instructions, fields in (("A low, calm voice.", {}), ("A child who laughs.", {"language": "french"})):
        heard.append(sound_of(ask(kind, instructions=instructions, stage_params=greedy(12), **fields)))
        wanted = kind.reference.speak(TEXT, frames=12, instruct=instructions, **fields).waveform.numpy()
        assert_sounds(heard[-1], wanted, 12)
    assert numpy.abs(heard[0] - heard[1]).max() > 0.05, "the description matters"
    assert httpx.get(f"{kind.url}/v1/audio/voices", timeout=30).json()["voices"] == []
    for given, field, code in (
        ({}, "instructions", "missing_required_parameter"),
        ({"instructions": "A child.", "voice": "vivian"}, "voice", "unknown_voice"),
    ):
        refused = ask(kind, **given)
        assert refused.status_code == 400
        assert refused.json()["error"].items() >= {"param": field, "code": code}.items()


# As a file with 16 bits a sample holds it: 16 frames, more than the text has tokens.
CLIP = numpy.random.default_rng(0).normal(scale=3000, size=30_001).astype(numpy.int16) / numpy.float32(32768)
TRANSCRIPT = "One."


@pytest.mark.parametrize("kind", ["base"], indirect=True)
def test_a_voice_made_of_a_clip_speaks_as_the_reference_clones_it(kind):
    """Alone and continued from its transcript, until it is deleted."""
    recording = io.BytesIO()
    soundfile.write(recording, CLIP, RATE, format="WAV", subtype="PCM_16")
    cases = [("mara", {}, {"x_vector_only_mode": True}), ("mira", {"transcript": TRANSCRIPT}, {"ref_text": TRANSCRIPT})]
    heard = []
    for name, fields, asked in cases:
        made = httpx.post(
            f"{kind.url}/v1/audio/voices",
            files={"audio_sample": ("a.wav", recording.getvalue())},
            data={"name": name, "consent": "mine", **fields},
            timeout=30,
        )
        assert made.status_code == 200, made.text
        heard.append(sound_of(ask(kind, voice=name, stage_params=greedy(20))))
        wanted = kind.reference.speak(TEXT, frames=20, ref_audio=(CLIP, RATE), **asked).waveform.numpy()
        assert_sounds(heard[-1], wanted, 20)
        assert httpx.delete(f"{kind.url}/v1/audio/voices/{name}").status_code == 200
        assert ask(kind, voice=name).json()["error"]["code"] == "unknown_voice"
    assert numpy.abs(heard[0] - heard[1]).max() > 0.05, "the transcript matters"


async def said(client, kill=""):
    """A sampled continuation of the clip, while whose stage `kill` dies after the first sound."""
    params = {"talker": {"max_tokens": 40, "min_tokens": 40, "temperature": 0.9, "top_k": 50}}
    prompt, pieces = spoken(TEXT, clip=(CLIP, RATE), transcript=TRANSCRIPT), []
    async for item in await client.submit(prompt, seed=11, params=params, timeout=120):
        if isinstance(item, Audio):
            pieces.append(item.samples)
        if kill and pieces:
            (pid,) = [each.pid for each in (await client.describe()).stages if each.stage == kill]
            psutil.Process(pid).kill()
            kill = ""
    assert not kill, "the answer ended before its stage could die"
    return numpy.concatenate(pieces)


@pytest.mark.parametrize("kind", ["base"], indirect=True)
async def test_a_stage_that_dies_while_a_clip_is_continued_changes_nothing_of_what_is_heard(kind):
    """A vocoder that starts again decodes the clip again, and plays none of it."""
    async with AsyncOmniClient(kind.endpoint) as client:
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
