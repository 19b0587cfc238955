"""The whole pipeline as users run it: launcher, four processes, client; answers compared with transformers."""

from __future__ import annotations

import asyncio

import numpy
import pytest
from PIL import Image

from omni_actors.client import AsyncOmniClient, Audio, OmniClient, Text
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.errors import InvalidRequest, MalformedMedia, OmniError, PromptTooLong, UnknownModality, UnknownVoice
from tests.support.pipelines import RunningPipeline
from tests.support.reference import Reference, ReferenceResult, vocoder_noise

pytestmark = pytest.mark.e2e

TEXTS = [
    "Hi",
    "What is the capital of France?",
    "Tell me, in a few words, why the sea is salt and the rivers are not.",
    "One two three four five six seven eight nine ten eleven twelve. " * 3,
]
PEAK_TOLERANCE = 1e-4


def speech_like(seconds: float, rate: int) -> numpy.ndarray:
    """A tone that glides, f32 [samples]."""
    time = numpy.arange(int(seconds * rate)) / rate
    return (0.3 * numpy.sin(2 * numpy.pi * (200 + 150 * time) * time)).astype(numpy.float32)


def picture(seed: int = 0) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 255, (112, 112, 3), dtype=numpy.uint8)


def film() -> numpy.ndarray:
    return numpy.random.default_rng(7).integers(0, 255, (8, 112, 112, 3), dtype=numpy.uint8)


def expected(
    reference: Reference, inputs: object, voice: str, thinker: int, talker: int, seed: int, **processing: bool
) -> ReferenceResult:
    return reference.generate(
        inputs, voice=voice, thinker_max_tokens=thinker, talker_max_tokens=talker, seed=seed, num_steps=10, **processing
    )


def assert_equal(output: OmniRequestOutput, wanted: ReferenceResult) -> None:
    assert output.token_ids == list(wanted.thinker_tokens)
    assert output.audio.shape == wanted.waveform.shape
    assert output.sample_rate == 24_000
    peak = float(numpy.abs(numpy.asarray(wanted.waveform)).max())
    assert peak > 0.05, "a silent reference proves nothing"
    assert float(numpy.abs(output.audio - numpy.asarray(wanted.waveform)).max()) <= PEAK_TOLERANCE * peak


def test_text_prompts_equal_transformers_eight_at_once(tiny_pipeline: RunningPipeline, reference: Reference) -> None:
    """Mixed lengths, voices and seeds together: every answer is the one that the request gets alone."""
    cases = [
        (TEXTS[i % len(TEXTS)], ("Chelsie", "Ethan")[i % 2], 8 + 3 * (i % 5), 10 + 5 * (i % 3), 100 + i)
        for i in range(10)
    ]

    async def ask_all() -> list[OmniRequestOutput]:
        async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
            return await asyncio.gather(
                *(
                    client.generate(
                        text,
                        voice=voice,
                        seed=seed,
                        params={"thinker": {"max_tokens": thinker}, "talker": {"max_tokens": talker}},
                        timeout=200,
                    )
                    for text, voice, thinker, talker, seed in cases
                )
            )

    outputs = asyncio.run(ask_all())
    for (text, voice, thinker, talker, seed), output in zip(cases, outputs, strict=True):
        inputs = reference.inputs([{"role": "user", "content": text}])
        assert_equal(output, expected(reference, inputs, voice, thinker, talker, seed))
    assert len({tuple(output.token_ids) for output in outputs}) > 4


@pytest.mark.parametrize("media", ["audio_16k", "audio_44k", "image", "video", "audio_and_image", "sound_in_video"])
def test_multimodal_prompts_equal_transformers(
    tiny_pipeline: RunningPipeline, reference: Reference, media: str
) -> None:
    text = "What is this?"
    ask: dict = {}
    oracle: dict = {}
    if media == "audio_16k":
        ask["audios"] = [(speech_like(1.0, 16_000), 16_000)]
        oracle["audios"] = [(speech_like(1.0, 16_000), 16_000)]
    if media == "audio_44k":
        import soxr

        samples = speech_like(1.0, 44_100)
        ask["audios"] = [(samples, 44_100)]
        oracle["audios"] = [(soxr.resample(samples, 44_100, 16_000), 16_000)]
    if media in ("image", "audio_and_image"):
        ask["images"] = [picture()]
        oracle["images"] = [Image.fromarray(picture())]
    if media == "audio_and_image":
        ask["audios"] = [(speech_like(0.7, 16_000), 16_000)]
        oracle["audios"] = [(speech_like(0.7, 16_000), 16_000)]
    if media == "video":
        ask["videos"] = [(film(), 2.0)]  # the rate that the published processor assumes
        oracle["videos"] = [film()]
    together: dict = {}
    if media == "sound_in_video":
        ask["videos"] = [(film(), 2.0, (speech_like(3.0, 16_000), 16_000))]
        oracle |= {"videos": [film()], "audios": [(speech_like(3.0, 16_000), 16_000)]}
        together = {"use_audio_in_video": True}
    with OmniClient(tiny_pipeline.endpoint) as client:
        output = client.generate(
            text,
            voice="Ethan",
            seed=5,
            params={"thinker": {"max_tokens": 10}, "talker": {"max_tokens": 20}},
            timeout=120,
            **ask,
        )
    kinds = (("image", "images"), ("video", "videos"), ("audio", "audios"))
    content = [{"type": kind} for kind, key in kinds if key in oracle and not (together and kind == "audio")]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
    inputs = reference.inputs(messages, **oracle, **together)
    assert_equal(output, expected(reference, inputs, "Ethan", 10, 20, 5, **together))


def test_the_talker_speaks_while_the_thinker_thinks(tiny_pipeline: RunningPipeline) -> None:
    with OmniClient(tiny_pipeline.endpoint) as client:
        output = client.generate(
            TEXTS[1], params={"thinker": {"max_tokens": 96}, "talker": {"max_tokens": 24}}, seed=1, timeout=120
        )
    # Both clocks start when the coordinator announces the request to all stages at once. The talker first gives out
    # twelve tokens, a block of the vocoder, for which the thinker has to give as many of its 96.
    assert output.usage["talker"].first_output < 0.8 * output.usage["thinker"].finished
    assert output.usage["thinker"].output_tokens == 96


def test_text_streams_and_modalities_are_respected(tiny_pipeline: RunningPipeline) -> None:
    params = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 6}}
    with OmniClient(tiny_pipeline.endpoint) as client:
        items = list(client.submit(TEXTS[0], modalities=["text"], params=params, timeout=60))
        assert len([item for item in items if isinstance(item, Text)]) == 8
        assert not [item for item in items if isinstance(item, Audio)]
        spoken = list(client.submit(TEXTS[0], modalities=["audio"], params=params, timeout=60))
        assert spoken
        assert all(isinstance(item, Audio) for item in spoken)
        assert sum(len(item.samples) for item in spoken) == 6 * 480


def test_same_seed_same_answer_whatever_else_runs(tiny_pipeline: RunningPipeline) -> None:
    """Sampled decoding in both AR stages: alone, then among others."""
    sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    params = {"thinker": {"max_tokens": 10, **sampled}, "talker": {"max_tokens": 12, **sampled}}

    async def ask(seeds: list[int]) -> list[OmniRequestOutput]:
        async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
            return await asyncio.gather(
                *(client.generate(TEXTS[seed % 4], seed=seed, params=params, timeout=200) for seed in seeds)
            )

    alone = asyncio.run(ask([41]))[0]
    among = asyncio.run(ask([40, 41, 42, 43, 41 + 4]))
    assert among[1].token_ids == alone.token_ids
    numpy.testing.assert_allclose(among[1].audio, alone.audio, atol=1e-4)
    assert among[4].token_ids != alone.token_ids, "another seed must matter"


def test_bad_requests_fail_alone_with_typed_errors(tiny_pipeline: RunningPipeline) -> None:
    good = {"params": {"thinker": {"max_tokens": 6}, "talker": {"max_tokens": 8}}, "timeout": 120}
    cases: list[tuple[type[OmniError], str, dict, str]] = [
        (PromptTooLong, "word " * 3000, {}, "2047"),
        (UnknownVoice, "Hi", {"voice": "Nobody"}, "Chelsie"),
        (UnknownModality, "Hi", {"modalities": ["smell"]}, "text"),
        (InvalidRequest, "Hi", {"params": {"thinkr": {}}}, "thinker"),
        (InvalidRequest, "Hi", {"params": {"thinker": {"num_steps": 3}}}, "num_steps"),
        (InvalidRequest, "Hi", {"params": {"thinker": {"max_tokens": -1}}}, "max_tokens"),
        (MalformedMedia, "Hi", {"audios": [b"no audio file"]}, "audio"),
        (MalformedMedia, "Hi", {"audios": [(numpy.full(16000, numpy.nan, numpy.float32), 16000)]}, "finite"),
        (MalformedMedia, "Hi", {"images": [b"no image file"]}, "image"),
    ]

    async def run() -> None:
        async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
            healthy = [asyncio.create_task(client.generate(text, seed=3, **good)) for text in TEXTS[:2]]
            for kind, prompt, options, word in cases:
                with pytest.raises(kind) as caught:
                    await client.generate(prompt, **{**good, **options})
                assert word.lower() in str(caught.value).lower()
            outputs = await asyncio.gather(*healthy)
            assert all(len(output.audio) == 8 * 480 for output in outputs)
            with pytest.raises(InvalidRequest):
                await client.generate("")

    asyncio.run(run())


def test_abort_frees_everything(tiny_pipeline: RunningPipeline) -> None:
    async def run() -> None:
        async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
            stream = await client.submit(TEXTS[2], params={"thinker": {"max_tokens": 200}}, timeout=120)
            async for _ in stream:
                await stream.abort()
                break
            with pytest.raises(OmniError, match="abort"):
                async for _ in stream:
                    pass

    asyncio.run(run())
    tiny_pipeline.assert_idle()


def test_noise_is_the_documented_one() -> None:
    first, again = vocoder_noise(3, 10, 80), vocoder_noise(3, 10, 80)
    assert first.shape == (1, 10, 80)
    assert bool((first == again).all())
