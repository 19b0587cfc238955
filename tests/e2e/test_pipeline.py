"""The whole pipeline as users run it: launcher, four processes, client; answers compared with transformers."""

from __future__ import annotations

import asyncio
import functools
import re

import numpy
import pytest
import torch
from PIL import Image

from omni_actors.client import AsyncOmniClient, Audio, OmniClient, Text
from omni_actors.errors import InvalidRequest, MalformedMedia, OmniError, PromptTooLong, UnknownModality, UnknownVoice
from omni_actors.telemetry import metrics as table
from tests.support.nightly import nightly
from tests.support.observations import LOG_LINE, STAGES, assert_causal, grown, reported, scrape_until, settled

pytestmark = pytest.mark.e2e

MODEL = "tiny-qwen2.5-omni"
TEXTS = [
    "Hi",
    "What is the capital of France?",
    "Tell me, in a few words, why the sea is salt and the rivers are not.",
    "One two three four five six seven eight nine ten eleven twelve. " * 3,
]
PEAK_TOLERANCE = 1e-4
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 12}}
OPTIONS = {"params": SHORT, "seed": 5, "voice": "Ethan", "timeout": 120}


def speech_like(seconds, rate=16_000):
    """A tone that glides: f32 [samples], and its rate."""
    time = numpy.arange(int(seconds * rate)) / rate
    return (0.3 * numpy.sin(2 * numpy.pi * (200 + 150 * time) * time)).astype(numpy.float32), rate


NOISE = numpy.random.default_rng(7)
PICTURE = NOISE.integers(0, 255, (112, 112, 3), dtype=numpy.uint8)
FILM = NOISE.integers(0, 255, (8, 112, 112, 3), dtype=numpy.uint8), 2.0  # the rate that the published processor assumes


@pytest.fixture
def client(tiny_pipeline):
    """Of a pipeline that holds nothing after the test."""
    with OmniClient(tiny_pipeline.endpoint) as client:
        yield client
    tiny_pipeline.assert_idle()


def assert_equal(output, wanted):
    assert output.token_ids == list(wanted.thinker_tokens)
    assert output.audio.shape == wanted.waveform.shape
    assert output.sample_rate == 24_000
    peak = float(wanted.waveform.abs().max())
    assert peak > 0.05, "a silent reference proves nothing"
    assert float(numpy.abs(output.audio - wanted.waveform.numpy()).max()) <= PEAK_TOLERANCE * peak


def asked_together(pipeline, requests):
    """The answers to requests that are sent at once: each a prompt and options."""

    async def ask():
        async with AsyncOmniClient(pipeline.endpoint) as client:
            return await asyncio.gather(
                *(client.generate(prompt, **{"timeout": 200, **options}) for prompt, options in requests)
            )

    return asyncio.run(ask())


def test_text_prompts_equal_transformers_six_at_once(tiny_pipeline, reference):
    """Mixed lengths, voices and seeds together: every answer is the one that the request gets alone."""
    cases = [(TEXTS[i % 4], ("Chelsie", "Ethan")[i % 2], 8 + 3 * (i % 5), 10 + 5 * (i % 3), 100 + i) for i in range(6)]
    outputs = asked_together(
        tiny_pipeline,
        [
            (
                text,
                {"voice": voice, "seed": seed, "params": {"thinker": {"max_tokens": t}, "talker": {"max_tokens": c}}},
            )
            for text, voice, t, c, seed in cases
        ],
    )
    for (text, voice, thinker, talker, seed), output in zip(cases, outputs, strict=True):
        inputs = reference.inputs([{"role": "user", "content": text}])
        limits = {"thinker_max_tokens": thinker, "talker_max_tokens": talker}
        assert_equal(output, reference.generate(inputs, voice=voice, seed=seed, **limits))
    assert len({tuple(output.token_ids) for output in outputs}) > 4


@pytest.mark.parametrize("media", ["audio_44k", "image", *map(nightly, ("video", "audio_and_image")), "sound_in_video"])
def test_multimodal_prompts_equal_transformers(client, reference, media):
    ask, oracle, together = {}, {}, {}
    if media == "audio_44k":
        import soxr

        samples, rate = speech_like(1.0, 44_100)
        ask["audios"] = [(samples, rate)]
        oracle["audios"] = [(soxr.resample(samples, rate, 16_000), 16_000)]
    if "image" in media:
        ask["images"] = [PICTURE]
        oracle["images"] = [Image.fromarray(PICTURE)]
    if media == "audio_and_image":
        ask["audios"] = oracle["audios"] = [speech_like(0.7)]
    if media == "video":
        ask["videos"] = [FILM]
        oracle["videos"] = [FILM[0]]
    if media == "sound_in_video":
        ask["videos"] = [(*FILM, speech_like(3.0))]
        oracle |= {"videos": [FILM[0]], "audios": [speech_like(3.0)]}
        together = {"use_audio_in_video": True}
    output = client.generate("What is this?", **OPTIONS, **ask)
    kinds = (("image", "images"), ("video", "videos"), ("audio", "audios"))
    content = [{"type": kind} for kind, key in kinds if key in oracle and not (together and kind == "audio")]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]}]
    inputs = reference.inputs(messages, **oracle, **together)
    limits = {"thinker_max_tokens": 8, "talker_max_tokens": 12}
    assert_equal(output, reference.generate(inputs, voice="Ethan", seed=5, **limits, **together))


def test_text_streams_modalities_are_respected_and_the_talker_speaks_while_the_thinker_thinks(client):
    items = list(client.submit(TEXTS[0], modalities=["text"], params=SHORT, timeout=60))
    assert [type(item) for item in items] == [Text] * 8
    spoken = list(client.submit(TEXTS[0], modalities=["audio"], params=SHORT, timeout=60))
    assert {type(item) for item in spoken} == {Audio}
    assert sum(len(item.samples) for item in spoken) == 12 * 480
    long = {"thinker": {"max_tokens": 96}, "talker": {"max_tokens": 24}}
    usage = client.generate(TEXTS[1], params=long, seed=1, timeout=120).usage
    # Both clocks start when the coordinator announces the request to all stages at once. The talker first gives out
    # twelve tokens, a block of the vocoder, for which the thinker has to give as many of its 96.
    assert usage["talker"].first_output < usage["thinker"].finished
    assert usage["thinker"].output_tokens == 96


def test_embeddings_equal_the_tokens_whose_embeddings_they_are(client, reference):
    """Text and sound: what the talker gets of the prompt depends on its embeddings."""
    token_ids = reference.inputs([{"role": "user", "content": TEXTS[1]}])["input_ids"][0].tolist()
    rows = reference.model.thinker.get_input_embeddings().weight.detach()[torch.tensor(token_ids)]
    wanted = client.generate(TEXTS[1], **OPTIONS)
    output = client.generate({"prompt_embeds": rows, "prompt_token_ids": token_ids}, **OPTIONS)
    assert output.token_ids == wanted.token_ids
    assert output.usage["thinker"].input_tokens == len(token_ids)
    numpy.testing.assert_allclose(output.audio, wanted.audio, atol=1e-4 * float(numpy.abs(wanted.audio).max()))
    with pytest.raises(InvalidRequest, match=r"none of the stages .* wants 'style'"):
        client.generate("x", additional_information={"style": 1}, **OPTIONS)


def test_bad_requests_fail_alone_with_typed_errors_and_an_abort_frees_everything(client):
    healthy = [client.submit(text, params=SHORT, seed=3, timeout=120) for text in TEXTS[:2]]
    nan = (numpy.full(16000, numpy.nan, numpy.float32), 16000)
    cases: list[tuple[type[OmniError], str, dict, str]] = [
        (PromptTooLong, "word " * 3000, {}, "2047"),
        (UnknownVoice, "Hi", {"voice": "Nobody"}, "Chelsie"),
        (UnknownModality, "Hi", {"modalities": ["smell"]}, "text"),
        (InvalidRequest, "Hi", {"params": {"thinkr": {}}}, "thinker"),
        (InvalidRequest, "Hi", {"params": {"thinker": {"num_steps": 3}}}, "num_steps"),
        (InvalidRequest, "", {}, "empty"),
        (MalformedMedia, "Hi", {"audios": [b"no audio file"]}, "audio"),
        (MalformedMedia, "Hi", {"audios": [nan]}, "finite"),
        (MalformedMedia, "Hi", {"images": [b"no image file"]}, "image"),
    ]
    for kind, prompt, options, word in cases:
        with pytest.raises(kind, match=f"(?i){word}"):
            client.generate(prompt, **{"params": SHORT, "timeout": 120, **options})
    stream = client.submit(TEXTS[2], params={"thinker": {"max_tokens": 200}}, timeout=120)
    next(iter(stream))
    stream.abort()
    with pytest.raises(OmniError, match="abort"):
        stream.result()
    assert all(len(stream.result().audio) == 12 * 480 for stream in healthy)


SECRET = "my bank account is 4711-0815"
OTHER_LOG = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b|\[transformers\]|Traceback")  # besides progress bars and C++


async def test_a_spoken_answer_is_timed_and_counted_and_no_log_quotes_it(tiny_http):
    async with AsyncOmniClient(tiny_http.endpoint) as client:
        before = await settled(client)
        params = {"thinker": {"max_tokens": 24, "ignore_eos": True}, "talker": {"max_tokens": 24}}
        stream = await client.submit(f"{SECRET}: why is the sea salt?", params=params)
        answer = await stream.result()
        timeline = await client.timeline(stream.request_id)
        now = await scrape_until(client, functools.partial(reported, before, done=1))
        with pytest.raises(InvalidRequest):
            await client.generate(f"<|AUDIO|> {SECRET}", timeout=60)
    assert sorted(stage.stage for stage in timeline.stages) == sorted(STAGES)
    assert_causal(timeline)
    assert all(stage.first_step for stage in timeline.stages), "vLLM reports when it schedules a request"
    for stage, at_a_time in {"thinker": 1, "talker": 4}.items():  # tokens for one scheduling
        assert {each.stage: each.output_tokens for each in timeline.stages}[stage] == 24
        assert grown(before, now, table.OUTPUT_TOKENS, stage, "0") == 24
        assert grown(before, now, table.STEP_SECONDS, stage, "0", suffix="_count") >= 24 / at_a_time
        assert grown(before, now, table.QUEUE_SECONDS, stage, "0", suffix="_count") == 1
    assert grown(before, now, table.STAGE_AUDIO, "code2wav", "0") == pytest.approx(24 * 480 / 24_000)
    assert grown(before, now, table.EDGE_BYTES, "thinker/0", "talker/0") > 24 * 64 * 4, "rows of hidden size 64"
    with pytest.raises(Exception, match="AUDIO"):
        tiny_http.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"<|AUDIO|> {SECRET}"}]
        )
    logs = {path.name: path.read_text() for path in (tiny_http.run_dir / "logs").rglob("*.log")}
    assert set(logs) == {"http.log", *(f"{stage}-0.log" for stage in STAGES)}
    for name, text in logs.items():
        assert SECRET not in text, name
        assert answer.text not in text, name
        other = [line for line in text.splitlines() if not LOG_LINE.match(line)]
        assert not [line for line in other if OTHER_LOG.search(line)], name
        assert " vllm." in text or name in ("http.log", "prompt-0.log"), "its lines are there, in our format"


@pytest.mark.nightly
async def test_metrics_that_vllm_and_the_vocoders_budget_report(tiny_pipeline):
    async with AsyncOmniClient(tiny_pipeline.endpoint) as client:
        params = {"thinker": {"max_tokens": 1500, "ignore_eos": True}, "talker": {"max_tokens": 1500}}
        streams = [await client.submit("Tell me a long story.", params=params) for _ in range(3)]
        busy = await scrape_until(client, lambda now: now.value(table.VLLM_RUNNING, "thinker", "0") == 3)
        assert 0 < busy.value(table.VLLM_KV, "thinker", "0") <= 1
        assert busy.value(table.STAGE_HELD, "thinker", "0") == 3
        busy = await scrape_until(client, lambda now: now.value(table.BUDGET_HELD, "code2wav", "0") > 0)
        assert (
            busy.value(table.BUDGET_HELD, "code2wav", "0") < busy.value(table.BUDGET_BYTES, "code2wav", "0") == 2 << 30
        )
        assert busy.value(table.BUDGET_DEFERRALS, "code2wav", "0") == 0
        for stream in streams:
            await stream.abort()
        gone = ((table.VLLM_RUNNING, "thinker"), (table.BUDGET_HELD, "code2wav"), (table.BUDGET_STEP, "code2wav"))
        idle = await scrape_until(client, lambda now: not any(now.value(each, stage, "0") for each, stage in gone))
        assert idle.value(table.VLLM_KV, "thinker", "0") == 0
