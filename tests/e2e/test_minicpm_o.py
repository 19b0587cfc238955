"""MiniCPM-o 4.5 as users run it; text and sound are compared with transformers' parts and the vocoder's package."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.engine.models.s3_vocoder.voices import VoiceEncoder
from tests.support.code2wav import difference
from tests.support.minicpm_reference import ENDING, MiniCpmReference, SlicedPicture
from tests.support.realtime import spoken_turn
from tests.support.s3_reference import S3Reference, growing
from tests.support.servers import HttpPipeline, film, picture, tone
from tools.checkpoints.s3 import TINY

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TOLERANCE = 1e-3  # of the peak
CASES = {"alto": ("the sea", 6, 40), "bass": ("you are with the tide", 28, 60)}  # text, and tokens of text and speech


@pytest.fixture(scope="module")
def pipeline(tiny_minicpm_o: Path):
    with HttpPipeline("stage_configs/tiny_minicpm_o.yaml", {"model": tiny_minicpm_o}) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def expected(tiny_minicpm_o: Path) -> dict[str, tuple[str, np.ndarray]]:
    reference, assets = MiniCpmReference(tiny_minicpm_o), tiny_minicpm_o / "assets"
    vocoder, encoder = S3Reference(assets / "token2wav", TINY), VoiceEncoder(assets / "token2wav")
    made = {}
    for name, (text, tokens, codes) in CASES.items():
        answer = reference.answer(text, tokens, codes)
        voice = encoder(*soundfile.read(assets / f"{name}.wav", dtype="float32"))
        written = reference.tokenizer.decode(answer.answer, skip_special_tokens=True)
        made[name] = written, vocoder.stream(growing(answer.codes), voice).numpy()
    return made


def asked(name: str) -> dict[str, Any]:
    text, tokens, codes = CASES[name]
    params = {
        "thinker": {"max_tokens": tokens},
        "talker": {"max_tokens": codes, "min_tokens": codes, "logit_bias": ENDING},
    }
    return {"prompt": text, "voice": name, "params": params, "timeout": 120}


async def test_answers_at_once_read_and_sound_as_the_reference_gives_them(pipeline, expected):
    async with AsyncOmniClient(pipeline.endpoint) as client:
        assert (await client.describe()).voices == ("alto", "bass")
        outputs = await asyncio.gather(*(client.generate(**asked(name)) for name in CASES))
        silent = await client.generate(
            "the sea", modalities=["text"], params={"thinker": {"max_tokens": 4}}, timeout=120
        )
    for output, (text, sound) in zip(outputs, expected.values(), strict=True):
        assert output.text == text
        assert difference(output.audio, sound) < TOLERANCE
    assert silent.text
    assert silent.audio is None or not len(silent.audio)


async def test_a_recording_is_answered_over_http_and_in_a_session(pipeline, tiny_minicpm_o):
    """With one at 16 kHz as the reference does it; a session's turn as the same recording in a chat message."""
    stages = {"thinker": {"max_tokens": 9}, "talker": {"max_tokens": 10, "min_tokens": 10}}
    tones = {rate: (tone(1.3, rate) * 32767).astype("<i2") for rate in (16_000, 24_000)}
    told = {}
    for rate, samples in tones.items():
        file = io.BytesIO()
        soundfile.write(file, samples, rate, format="WAV")
        audio = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
        answer = pipeline.openai().chat.completions.create(
            model="tiny-minicpm-o",
            messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]}],
            extra_body={"stage_params": stages, "modalities": ["text"]},
        )
        told[rate] = answer.choices[0].message.content
    reference = MiniCpmReference(tiny_minicpm_o)
    wanted = reference.answer("", 9, 0, tones[16_000].astype(np.float32) / 32768).answer
    assert told[16_000] == reference.tokenizer.decode(wanted, skip_special_tokens=True)
    turn = await spoken_turn(
        pipeline.url, "tiny-minicpm-o", tones[24_000].tobytes(), "alto", seed=5, stage_params=stages
    )
    assert turn.text == told[24_000], turn.response
    assert len(turn.pcm) == 2 * 9600


def test_a_picture_and_a_video_are_seen_over_http(pipeline, tiny_minicpm_o):
    """The picture as the reference sees it; what is said of a video depends on its sound."""

    def ask(*parts: dict[str, Any], **more: Any) -> Any:
        answer = pipeline.openai().chat.completions.create(
            model="tiny-minicpm-o",
            messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}],
            extra_body={"stage_params": {"thinker": {"max_tokens": 9}, "talker": {"max_tokens": 10}}, **more},
        )
        return answer.choices[0].message, answer.usage.prompt_tokens

    def sent(kind: str, name: str, data: bytes) -> dict[str, Any]:
        return {"type": name, name: {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}

    png = picture(175, 287)
    voice = {"voice": "alto", "format": "wav"}
    seen, _ = ask(sent("image/png", "image_url", png), modalities=["text", "audio"], audio=voice)
    reference = MiniCpmReference(tiny_minicpm_o)
    shown = SlicedPicture(Image.open(io.BytesIO(png)).convert("RGB"), (350, 574))
    wanted = reference.answer("what is it", 9, 0, shown).answer
    assert seen.audio.transcript == reference.tokenizer.decode(wanted, skip_special_tokens=True)
    sound, _ = soundfile.read(io.BytesIO(base64.b64decode(seen.audio.data)))
    assert len(sound) == 10 * 960
    filmed = sent("video/mp4", "video_url", film(3.0, side=112, with_sound=True))
    mute, fewer = ask(filmed, modalities=["text"])
    heard, more = ask(filmed, modalities=["text"], mm_processor_kwargs={"use_audio_in_video": True})
    assert more - fewer == 3 * (10 + 2) + 1, "ten a second, their begin and end, and the begin of speech"
    assert fewer > 3 * 66
    assert heard.content != mute.content


async def test_the_first_sound_comes_while_the_thinker_stands_still_in_the_middle_of_the_text(pipeline):
    written, pieces, heard_at = "", 0, 0
    params = {"thinker": {"max_tokens": 400}, "talker": {"max_tokens": 60, "logit_bias": ENDING}}
    async with AsyncOmniClient(pipeline.endpoint) as client:
        status = (await client.describe()).stages
        thinker = psutil.Process(next(each.pid for each in status if each.stage == "thinker"))
        async for item in await client.submit("the sea", voice="alto", params=params, timeout=120):
            if isinstance(item, Text):
                written, pieces = written + item.text, pieces + 1
                if pieces == 14:  # so many tokens at least; the rows of eleven have left
                    thinker.suspend()
            elif isinstance(item, Audio) and not heard_at:
                heard_at = len(written)
                with contextlib.suppress(psutil.NoSuchProcess):  # it may have been given up by now
                    thinker.resume()
        while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.1)
    assert 0 < heard_at < len(written)


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_stage_that_dies_mid_answer_changes_nothing_of_it(pipeline, expected, stage):
    heard, written = [], ""
    async with AsyncOmniClient(pipeline.endpoint) as client:
        victim = next(status.pid for status in (await client.describe()).stages if status.stage == stage)
        async for item in await client.submit(**asked("bass")):
            if isinstance(item, Audio):
                heard.append(item.samples)
            elif isinstance(item, Text):
                written += item.text
            if victim and isinstance(item, Audio if stage == "code2wav" else Text):
                psutil.Process(victim).kill()
                victim = 0
        while not (await client.describe()).healthy:  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.1)
    text, sound = expected["bass"]
    assert written == text
    assert difference(np.concatenate(heard), sound) < TOLERANCE
