"""Pipelines that the night runs: a spoken chat, a picture model of a plugin, a checkpoint that breaks while served."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from omni_actors.client import AsyncOmniClient, Image, OmniClient, Progress
from omni_actors.errors import InvalidRequest
from tests.support.paths import EXAMPLE_MODULES, REPOSITORY
from tests.support.pipelines import RunningPipeline
from tests.support.qwen3_tts_reference import Qwen3TtsReference
from tests.support.reference import one_thread

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SPEAKER = REPOSITORY / "examples" / "speaker"  # writes and says what follows "Say: "
SENTENCE = "The children found a small boat near the river."
ENGINE = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 33554432}
TOKENS = {"listener": 32, "chat": 8, "reader": 32, "talker": 64}


def test_a_chat_model_is_spoken_while_it_writes(tiny_spoken_chat, tiny_qwen3_tts):
    """The words reach the talker one by one, and sound as if all had been there."""
    with RunningPipeline(tiny_spoken_chat) as chat, OmniClient(chat.endpoint) as client:
        assert client.describe().speech is None, "it answers"
        first = {"role": "user", "content": SENTENCE}
        answer = {"role": "assistant", "content": "It was blue."}
        params = {"thinker": {"max_tokens": 24}, "talker": {"max_tokens": 15}}
        for messages in ([first], [first, answer, first]):
            given = {"modalities": ["text", "audio"], "voice": "vivian", "params": params, "seed": 3, "timeout": 120}
            output = client.generate({"messages": messages}, **given)
            said = Qwen3TtsReference(tiny_qwen3_tts).speak(
                output.text.strip(), frames=14, speaker="vivian", non_streaming_mode=False
            )
            assert output.usage["thinker"].output_tokens == 24
            assert np.abs(output.audio - said.waveform.numpy().clip(-1, 1)).max() < 1e-3
        chat.assert_idle()


LABELS = ["circle", "square", "star"]
WISHES = [("circle", 20, 1), ("star", 1, 2), ("square", 7, 3), ("star", 50, 4)]  # label, steps, seed


@torch.no_grad()
def painted(checkpoint, label, steps, seed):
    """What diffusers makes of the same, alone."""
    from diffusers import DDIMScheduler, UNet2DModel

    unet = UNet2DModel.from_pretrained(checkpoint / "unet")
    schedule = DDIMScheduler.from_pretrained(checkpoint / "scheduler")
    schedule.set_timesteps(steps)
    picture = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(seed))
    with one_thread():
        for moment in schedule.timesteps:
            noise = unet(picture, moment, torch.tensor([LABELS.index(label)])).sample
            picture = schedule.step(noise, moment, picture).prev_sample
    levels = (picture[0] / 2 + 0.5).clamp(0, 1) * 255
    return levels.round().to(torch.uint8).permute(1, 2, 0).numpy()


PAINTING = {**EXAMPLE_MODULES, "OMNI_ACTORS_ALLOW_IMPORTS": "custom_diffusion"}


@pytest.fixture
def painter(tmp_path):
    command = [sys.executable, "-m", "custom_diffusion.tiny", str(tmp_path / "painter")]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env={**os.environ, **PAINTING})
    return tmp_path / "painter"


async def test_pictures_of_a_plugins_model_that_share_their_steps_are_those_of_diffusers(painter):
    configuration = REPOSITORY / "examples" / "custom_diffusion" / "tiny.yaml"
    with RunningPipeline(configuration, {"model": painter}, environment=PAINTING) as pipeline:
        async with AsyncOmniClient(pipeline.endpoint) as client:

            async def items_of(label, steps, seed):
                params = {"painter": {"num_steps": steps}}
                return [
                    item async for item in await client.submit(label, modalities=["image"], seed=seed, params=params)
                ]

            answers = await asyncio.gather(*(items_of(*wish) for wish in WISHES))
            for label, params, field, message in [
                ("moon", {}, "prompt", "one of circle, square, star; got 'moon'"),
                ("star", {"num_steps": 501}, "num_steps", "from 1 to 500; got 501"),
                ("star", {"width": 64}, "width", "has no parameter 'width'"),
            ]:
                with pytest.raises(InvalidRequest, match=message) as caught:
                    await client.generate(label, modalities=["image"], params={"painter": params})
                assert caught.value.field == field
        pipeline.assert_idle()
    for wish, items in zip(WISHES, answers, strict=True):
        assert [item.step for item in items if isinstance(item, Progress)] == list(range(1, wish[1] + 1))
        (picture,) = [item for item in items if isinstance(item, Image)]
        assert np.abs(picture.pixels.astype(int) - painted(painter, *wish).astype(int)).max() <= 1, wish
