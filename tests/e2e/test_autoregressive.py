"""Thinker and talker in real vLLM engine cores, on the tiny checkpoint, against transformers."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.stage_llm import StageLLM
from omni_actors.engine.tensors import to_host, to_torch
from omni_actors.errors import (
    ConfigError,
    EngineError,
    InvalidPayload,
    InvalidRequest,
    OmniError,
    Overloaded,
    PromptTooLong,
    UnknownVoice,
)
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.results import FinishReason
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.engine_interface import StageInputs, StreamEvent, TextEvent
from tests.e2e.stage_driver import SMALL, Driver, encode_media_prompt, make_engine, talker_inputs, token_inputs
from tests.support.reference import Reference, ReferenceResult

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROMPTS = ("hello", "What is the capital of France?", "Tell me a story about a dog and a cat who sail the sea. " * 3)
VOICES = ("Chelsie", "Ethan")
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"], scope="module")


@pytest.fixture(scope="module")
def answers(reference: Reference) -> list[ReferenceResult]:
    """One answer per prompt, the voices in turn."""
    return [
        reference.generate(
            reference.inputs([{"role": "user", "content": prompt}]), voice=VOICES[index % 2], speaks=False
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def thinker(request, tiny_checkpoint):
    mode = request.param if hasattr(request, "param") else None
    engine = make_engine(tiny_checkpoint, "thinker", asynchronous=mode)
    yield Driver(engine)
    engine.shutdown()


@pytest.fixture(scope="module")
def talker(request, tiny_checkpoint):
    mode = request.param if hasattr(request, "param") else None
    engine = make_engine(tiny_checkpoint, "talker", asynchronous=mode)
    yield Driver(engine)
    engine.shutdown()


@pytest.fixture(autouse=True)
def clean(request):
    """Every test finds its engines idle and leaves them idle."""
    drivers = [request.getfixturevalue(name) for name in ("thinker", "talker") if name in request.fixturenames]
    for driver in drivers:
        driver.clear()
    yield
    for driver in drivers:
        driver.assert_idle()


BOTH_MODES = pytest.mark.parametrize("thinker", [False, True], indirect=True, ids=["sync", "async"])
BOTH_TALKER_MODES = pytest.mark.parametrize("talker", [False, True], indirect=True, ids=["sync", "async"])


def prompt_length(answer: ReferenceResult) -> int:
    return len(answer.prompt_token_ids)


# ---------------------------------------------------------------------------------------------------------------------
# Thinker


@BOTH_MODES
def test_thinker_equals_transformers_in_a_mixed_batch(thinker, answers, reference):
    """Nine requests of three lengths, joining one by one; some stop early, some stream no rows."""
    waiting = []
    for number in range(9):
        answer = answers[number % 3]
        limit = (32, 32, 11)[number // 3]
        waiting.append((f"r{number}", answer, limit, number < 6))

    def join(_step: int) -> None:
        if waiting:
            name, answer, limit, streams = waiting.pop(0)
            thinker.start(name, token_inputs(answer.prompt_token_ids), max_tokens=limit, streams=streams)

    join(0)
    thinker.run(join)
    assert not waiting
    tokenizer = reference.processor.tokenizer
    for number in range(9):
        name, answer, limit = f"r{number}", answers[number % 3], (32, 32, 11)[number // 3]
        assert thinker.tokens(name) == answer.thinker_tokens[:limit]
        assert thinker.text(name) == tokenizer.decode(answer.thinker_tokens[:limit], skip_special_tokens=True)
        finished = thinker.finished(name)
        assert (finished.input_tokens, finished.output_tokens) == (prompt_length(answer), limit)
        assert finished.reason is FinishReason.LENGTH
        if number < 6:
            torch.testing.assert_close(thinker.rows(name), answer.thinker_rows, atol=1e-4, rtol=1e-5)
            streams = thinker.streams(name)
            assert streams[0].scalars == {"prompt_tokens": prompt_length(answer)}
            assert [event.final for event in streams] == [False] * (len(streams) - 1) + [True]
        else:
            assert not thinker.streams(name)


@BOTH_MODES
def test_thinker_stops_at_end_tokens(thinker, answers):
    answer = answers[0]
    stop = answer.thinker_tokens[5]
    end = answer.thinker_tokens.index(stop)
    inputs = token_inputs(answer.prompt_token_ids)
    thinker.start("stop", inputs, max_tokens=32, stop_token_ids=(stop,))
    thinker.start("more", inputs, max_tokens=32, stop_token_ids=(stop,), min_tokens=end + 2)
    thinker.run()
    assert thinker.tokens("stop") == answer.thinker_tokens[: end + 1]
    assert thinker.finished("stop").reason is FinishReason.STOP
    assert len(thinker.rows("stop")) == prompt_length(answer) + end
    assert len(thinker.tokens("more")) > end + 1


def test_thinker_knows_the_checkpoints_end_tokens(thinker, reference):
    ends = set(reference.model.generation_config.eos_token_id)
    assert set(thinker.engine.adapter._ends) == ends
    assert len(ends) == 2


def test_long_prompts_are_computed_in_chunks(tiny_checkpoint, answers):
    engine = make_engine(tiny_checkpoint, "thinker", max_num_batched_tokens=32)
    try:
        driver = Driver(engine)
        longest = answers[2]
        assert prompt_length(longest) > 64
        driver.start("long", token_inputs(longest.prompt_token_ids), max_tokens=12)
        driver.start("short", token_inputs(answers[0].prompt_token_ids), max_tokens=12)
        driver.run()
        assert driver.tokens("long") == longest.thinker_tokens[:12]
        assert driver.tokens("short") == answers[0].thinker_tokens[:12]
        expected = longest.thinker_rows[: prompt_length(longest) + 11]
        torch.testing.assert_close(driver.rows("long"), expected, atol=1e-4, rtol=1e-5)
        assert len(driver.streams("long")) > 12
        driver.assert_idle()
    finally:
        engine.shutdown()


def test_a_preempted_thinker_gives_each_row_once(tiny_checkpoint, answers):
    # 3 layers, keys and values, 2 heads of 32 float32: 1536 bytes per token.
    engine = make_engine(
        tiny_checkpoint, "thinker", block_size=32, max_model_len=160, kv_cache_memory_bytes=9 * 32 * 1536
    )
    try:
        driver = Driver(engine)
        preemptions = count_preemptions(engine)
        for number in range(6):
            driver.start(f"r{number}", token_inputs(answers[number % 2].prompt_token_ids), max_tokens=32)
        driver.run()
        assert preemptions
        assert engine.statistics().preemptions == len(preemptions)
        scheduled = engine.take_scheduled()
        assert sorted(request_id for request_id, _ in scheduled) == [f"r{number}" for number in range(6)], "once each"
        assert engine.take_scheduled() == []
        for number in range(6):
            answer = answers[number % 2]
            assert driver.tokens(f"r{number}") == answer.thinker_tokens
            torch.testing.assert_close(driver.rows(f"r{number}"), answer.thinker_rows, atol=1e-4, rtol=1e-5)
        driver.assert_idle()
    finally:
        engine.shutdown()


def count_preemptions(engine) -> list[str]:
    """A list that gets the id of every request preempted from now on."""
    scheduler, seen = engine.core.scheduler, []
    original = scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        seen.append(request.request_id)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return seen


def test_requests_without_rows_share_a_prefix_and_those_with_rows_compute_it(thinker, answers):
    answer = answers[2]
    inputs = token_inputs(answer.prompt_token_ids)
    hits = []
    for number, streams in enumerate((False, False, True)):
        before = thinker.engine.statistics()
        thinker.start(f"r{number}", inputs, max_tokens=4, streams=streams)
        thinker.run()
        after = thinker.engine.statistics()
        assert after.prefix_queries - before.prefix_queries in (0, prompt_length(answer))
        hits.append(after.prefix_hits - before.prefix_hits)
        assert thinker.tokens(f"r{number}") == answer.thinker_tokens[:4]
    torch.testing.assert_close(
        thinker.rows("r2"), answer.thinker_rows[: prompt_length(answer) + 3], atol=1e-4, rtol=1e-5
    )
    assert hits[0] == hits[2] == 0
    assert 0 < hits[1] < prompt_length(answer)


# ---------------------------------------------------------------------------------------------------------------------
# Thinker: media


@pytest.fixture(scope="module")
def media_answer(reference, tiny_checkpoint):
    """A prompt with audio and an image: (inputs of the thinker, what transformers answers)."""
    from PIL import Image

    samples = (np.sin(np.arange(16000) * 0.05) * 0.3).astype(np.float32)
    pixels = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    content = [
        {"type": "audio", "audio": "a"},
        {"type": "image", "image": "b"},
        {"type": "text", "text": "What is this?"},
    ]
    text = reference.prompt([{"role": "user", "content": content}])
    answer = reference.generate(reference.inputs(text, audios=[(samples, 16000)], images=[image]), speaks=False)
    inputs = encode_media_prompt(tiny_checkpoint, text, {"audio": (samples, 16000), "image": image})
    return inputs, answer


def test_media_prompts_equal_transformers_through_thinker_and_talker(thinker, talker, answers, media_answer):
    inputs, answer = media_answer
    assert list(inputs.token_ids) == answer.prompt_token_ids
    thinker.start("media", inputs, max_tokens=32)
    thinker.start("text", token_inputs(answers[0].prompt_token_ids), max_tokens=32)
    thinker.run()
    assert thinker.tokens("media") == answer.thinker_tokens
    assert thinker.tokens("text") == answers[0].thinker_tokens
    rows = thinker.rows("media")
    torch.testing.assert_close(rows, answer.thinker_rows, atol=1e-4, rtol=1e-5)
    positions = to_torch(thinker.streams("media")[0].tensors["mrope_positions"])
    assert positions.shape == (3, prompt_length(answer))
    assert not torch.equal(positions[0], positions[1])
    talker.start(
        "media", talker_inputs(rows, prompt_length(answer), positions=positions), max_tokens=64, temperature=0.0
    )
    talker.run()
    assert talker.tokens("media") == answer.codec_tokens
    # The positions matter: as a text prompt the same rows speak differently.
    talker.start("flat", talker_inputs(rows, prompt_length(answer)), max_tokens=64, temperature=0.0)
    talker.run()
    assert talker.tokens("flat") != answer.codec_tokens


def test_parameters_inside_the_encoded_request_are_ignored(thinker, media_answer):
    """The frames ask for one token at temperature 1 under another id."""
    inputs, answer = media_answer
    thinker.start("mine", inputs, max_tokens=3)
    thinker.run()
    assert thinker.tokens("mine") == answer.thinker_tokens[:3]
    assert set(thinker.events) == {"mine"}


def test_bad_frames_are_refused(thinker, media_answer):
    inputs, answer = media_answer
    frame = bytes(inputs.tensors["vllm.0"].data)

    def frames(**changes):
        return dataclasses.replace(inputs, tensors={**inputs.tensors, **changes})

    def bytes_of(data: bytes) -> HostTensor:
        return HostTensor(DType.U8, (len(data),), data)

    generator = random.Random(0)
    bad = [
        StageInputs(tensors={"vllm.1": inputs.tensors["vllm.1"]}),
        StageInputs(tensors={"vllm.0": inputs.tensors["vllm.0"]}),
        StageInputs(tensors={"other": inputs.tensors["vllm.0"]}),
        frames(**{"vllm.0": bytes_of(b"\xc1")}),
        frames(**{"vllm.0": bytes_of(b"")}),
        frames(**{"vllm.0": bytes_of(b"\x91" * 100_000)}),
        frames(**{"vllm.0": bytes_of(frame[: len(frame) // 2])}),
        frames(**{"vllm.0": HostTensor(DType.U8, (len(frame) + 1,), frame)}),
        frames(**{"vllm.0": HostTensor(DType.I32, (1,), b"1234")}),
        dataclasses.replace(inputs, token_ids=[*inputs.token_ids[:-1], 1]),
    ]
    for number, case in enumerate(bad):
        with pytest.raises(InvalidPayload):
            thinker.start(f"bad{number}", case, max_tokens=3)
    for _ in range(200):  # whatever a broken sender makes of it, it is refused or served, and never worse
        broken = bytearray(frame)
        for _ in range(generator.randrange(1, 4)):
            broken[generator.randrange(len(broken))] = generator.randrange(256)
        try:
            thinker.engine.adapter._decode(frames(**{"vllm.0": bytes_of(bytes(broken))}).tensors, [])
        except InvalidPayload:
            continue
    thinker.start("good", inputs, max_tokens=3)
    thinker.run()
    assert thinker.tokens("good") == answer.thinker_tokens[:3]


# ---------------------------------------------------------------------------------------------------------------------
# Talker


@BOTH_TALKER_MODES
def test_talker_prompt_embeddings_equal_transformers(talker, answers):
    seen: list[torch.Tensor] = []
    model = talker.engine.core.worker.model_runner.model
    hook = model.decoder.text_projection.register_forward_pre_hook(
        lambda _module, arguments: seen.append(arguments[0].clone())
    )
    try:
        for index, answer in enumerate(answers):
            talker.start(
                f"r{index}",
                talker_inputs(answer.thinker_rows, prompt_length(answer)),
                voice=VOICES[index % 2],
                max_tokens=1,
            )
            talker.run()
            torch.testing.assert_close(seen[-1], answer.talker_prompt_embeds, atol=1e-5, rtol=1e-5)
    finally:
        hook.remove()


@BOTH_TALKER_MODES
def test_talker_equals_transformers_whole_and_streamed(talker, answers):
    """Nine requests: whole, with rows at random times, with none until later; voices mixed."""
    generator = random.Random(1)
    missing: dict[str, list[torch.Tensor]] = {}
    for number in range(9):
        answer = answers[number % 3]
        rows, length = answer.thinker_rows, prompt_length(answer)
        replies = (None, 0, 3)[number // 3]
        talker.start(
            f"r{number}",
            talker_inputs(rows, length, replies=replies),
            voice=VOICES[number % 3 % 2],
            max_tokens=64,
            temperature=0.0,
        )
        if replies is not None:
            missing[f"r{number}"] = list(rows[length + 1 + replies :].split(1))

    def feed(_step: int = 0) -> None:
        for name, parts in list(missing.items()):
            if generator.random() < 0.6:
                count = min(generator.randrange(3), len(parts))
                chunk = torch.cat(parts[:count]) if count else None
                del parts[:count]
                talker.engine.extend(name, None if chunk is None else to_host(chunk), complete=not parts)
                if not parts:
                    del missing[name]

    while missing:
        talker.run(feed)
        feed()
    talker.run()
    assert talker.engine.core.scheduler.held_steps > 0
    for number in range(9):
        name, answer = f"r{number}", answers[number % 3]
        assert talker.tokens(name) == answer.codec_tokens
        assert talker.finished(name).output_tokens == 64
        starts = [event.start for event in talker.streams(name) if event.token_ids]
        assert starts == sorted(set(starts))
        assert talker.streams(name)[-1].final


@BOTH_TALKER_MODES
def test_talker_leaves_out_the_token_that_ends(talker, answers):
    """With a token of the answer as the end token, the stream stops before it."""
    answer = answers[0]
    adapter = talker.engine.adapter
    end = answer.codec_tokens[20]
    first = answer.codec_tokens.index(end)
    ends, adapter._ends = adapter._ends, frozenset({end})
    try:
        talker.start("r", talker_inputs(answer.thinker_rows, prompt_length(answer)), max_tokens=64, temperature=0.0)
        talker.run()
    finally:
        adapter._ends = ends
    assert talker.tokens("r") == answer.codec_tokens[:first]
    assert talker.finished("r").reason is FinishReason.STOP
    assert talker.finished("r").output_tokens == first + 1


def test_talker_samples_what_sounds_or_ends_and_nothing_else(talker, reference, answers):
    config = reference.model.config.talker_config
    assert talker.engine.adapter._ends == {config.tts_codec_pad_token_id, config.tts_codec_end_token_id}
    model = talker.engine.core.worker.model_runner.model
    logits = model.compute_logits(torch.randn(3, config.hidden_size))
    assert torch.isinf(logits[:, config.tts_codec_start_token_id]).all()
    sounding = reference.model.config.token2wav_config.dit_config.num_embeds
    assert torch.isfinite(logits[:, :sounding]).all()
    assert torch.isfinite(logits).sum() == 3 * (sounding + 2)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_preempted_talkers_equal_transformers(tiny_checkpoint, answers, asynchronous):
    """A KV cache for half of the requests; some of them streamed, one aborted."""
    engine = make_engine(
        tiny_checkpoint,
        "talker",
        asynchronous=asynchronous,
        block_size=32,
        max_model_len=160,
        kv_cache_memory_bytes=11 * 32 * 1536,
    )
    try:
        driver = Driver(engine)
        preemptions = count_preemptions(engine)
        generator = random.Random(2)
        missing: dict[str, list[torch.Tensor]] = {}
        for number in range(7):
            answer = answers[number % 2]
            replies = None if number % 3 == 0 else number
            driver.start(
                f"r{number}",
                talker_inputs(answer.thinker_rows, prompt_length(answer), replies=replies),
                voice=VOICES[number % 2],
                max_tokens=64,
                temperature=0.0,
            )
            if replies is not None:
                missing[f"r{number}"] = list(answer.thinker_rows[prompt_length(answer) + 1 + replies :].split(1))

        def feed(step: int = 0) -> None:
            if step == 20:
                engine.abort("r5")
                missing.pop("r5", None)
            for name, parts in list(missing.items()):
                if generator.random() < 0.7:
                    part = parts.pop(0)
                    engine.extend(name, to_host(part), complete=not parts)
                    if not parts:
                        del missing[name]

        while missing:
            driver.run(feed)
            feed()
        driver.run()
        assert preemptions
        for number in range(7):
            if number != 5:
                assert driver.tokens(f"r{number}") == answers[number % 2].codec_tokens
        driver.assert_idle()
    finally:
        engine.shutdown()


@BOTH_TALKER_MODES
def test_held_requests_take_no_place_in_the_batch(talker, answers, monkeypatch):
    answer = answers[0]
    rows, length = answer.thinker_rows, prompt_length(answer)
    batches: list[set[str]] = []
    scheduler = talker.engine.core.scheduler
    original = scheduler.schedule

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        batches.append(set(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule)
    talker.start("held", talker_inputs(rows, length, replies=1), max_tokens=8, temperature=0.0)
    talker.start("free", talker_inputs(rows, length), max_tokens=8, temperature=0.0)
    talker.run()
    talker.finished("free")
    # The prompt and the step of the one reply row, then nothing more.
    assert sum("held" in batch for batch in batches) == 2
    assert talker.tokens("held") == [], "less than a block of the vocoder"
    counts = talker.engine.counts()
    assert (counts["requests"], counts["held"], counts["pending_rows"]) == (1, 1, 0)
    assert counts["row_bytes"] > 0
    assert not talker.engine.runnable()
    assert talker.engine.waits_for_input("held")
    steps = len(batches)
    assert talker.engine.step() == []
    assert len(batches) == steps
    talker.engine.extend("held", to_host(rows[length + 2 :]), complete=True)
    assert talker.engine.runnable()
    talker.run()
    assert talker.tokens("held") == answer.codec_tokens[:8]


def test_rows_that_end_early_are_followed_by_text_end_and_pad(talker, answers):
    """A reply of two rows: positions after it get the text-end embedding once, then text-pad."""
    answer = answers[0]
    length = prompt_length(answer)
    seen: list[torch.Tensor] = []
    model = talker.engine.core.worker.model_runner.model
    hook = model.decoder.text_projection.register_forward_pre_hook(
        lambda _module, arguments: seen.append(arguments[0].clone())
    )
    try:
        talker.start("r", talker_inputs(answer.thinker_rows[: length + 2], length), max_tokens=5, temperature=0.0)
        talker.run()
    finally:
        hook.remove()
    tokens = talker.tokens("r")
    codec = [model.codec_embedding(torch.tensor([token])) for token in tokens]
    added = [(step - embedding)[0] for step, embedding in zip(seen[1:], codec, strict=False)]
    expected = [answer.thinker_rows[length + 1], model.text_rows[0], model.text_rows[1], model.text_rows[1]]
    for have, want in zip(added, expected, strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def sample(driver, answer, name, **params):
    driver.start(name, talker_inputs(answer.thinker_rows, prompt_length(answer)), **params)


@BOTH_TALKER_MODES
def test_a_seed_gives_the_same_tokens_whatever_the_company(talker, answers):
    params = {"max_tokens": 16, "temperature": 1.2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    sample(talker, answers[0], "alone", seed=5, **params)
    talker.run()
    alone = talker.tokens("alone")
    for number in range(4):
        sample(talker, answers[1], f"before{number}", seed=number, max_tokens=4 + number, temperature=float(number % 2))
    talker.step()
    sample(talker, answers[0], "again", seed=5, **params)
    sample(talker, answers[0], "other", seed=6, **params)
    sample(talker, answers[0], "own", seed=9, **{**params, "min_p": 0.001})
    talker.start(  # a seed among the parameters wins over the request's
        "params", talker_inputs(answers[0].thinker_rows, prompt_length(answers[0])), seed=77, **{**params}
    )
    talker.run()
    assert talker.tokens("again") == alone
    assert talker.tokens("other") != alone
    assert talker.tokens("params") != alone
    assert len(set(alone)) > 4


def test_cuts_work(talker, answers):
    """At a high temperature each cut to a single token gives the greedy answer; without one it does not."""
    answer = answers[0]
    hot = {"max_tokens": 12, "temperature": 2.0, "seed": 3, "top_p": 1.0, "top_k": -1}
    sample(talker, answer, "free", **hot)
    sample(talker, answer, "top_k", **{**hot, "top_k": 1})
    sample(talker, answer, "top_p", **{**hot, "top_p": 1e-6})
    sample(talker, answer, "min_p", **{**hot, "min_p": 1.0})
    sample(talker, answer, "both", **{**hot, "top_k": 3, "top_p": 0.99})
    sample(talker, answer, "greedy", **{**hot, "temperature": 0.0})
    talker.run()
    greedy = answer.codec_tokens[:12]
    for name in ("top_k", "top_p", "min_p", "greedy"):
        assert talker.tokens(name) == greedy
    assert talker.tokens("free") != greedy
    assert talker.tokens("both") != talker.tokens("free")


def test_top_k_draws_only_from_the_k_likeliest(thinker, answers):
    """The first token's distribution, drawn with many seeds, in one batch with other requests."""
    inputs = token_inputs(answers[0].prompt_token_ids)
    runner = thinker.engine.core.worker.model_runner
    seen: list[torch.Tensor] = []
    original = runner.model.compute_logits

    def compute_logits(hidden_states):
        logits = original(hidden_states)
        seen.append(logits.clone())
        return logits

    runner.model.compute_logits = compute_logits
    try:
        thinker.start("greedy", inputs, max_tokens=1, streams=False)
        thinker.run()
        drawn = []
        for first in range(0, 48, 16):
            for seed in range(first, first + 16):
                thinker.start(f"s{seed}", inputs, seed=seed, max_tokens=1, temperature=2.0, top_k=3, streams=False)
            thinker.run()
            drawn += [thinker.tokens(f"s{seed}")[0] for seed in range(first, first + 16)]
    finally:
        del runner.model.compute_logits
    likeliest = set(seen[0][0].topk(3).indices.tolist())
    assert set(drawn) == likeliest


def test_repetition_penalty_and_stop_tokens(thinker, answers):
    answer = answers[0]
    inputs = token_inputs(answer.prompt_token_ids)
    thinker.start("plain", inputs, max_tokens=24)
    thinker.start("penalty", inputs, max_tokens=24, repetition_penalty=10.0)
    thinker.run()
    tokens = thinker.tokens("penalty")
    assert tokens != thinker.tokens("plain")
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(answer.prompt_token_ids)
    thinker.start("stop", inputs, max_tokens=24, temperature=1.0, seed=4)
    thinker.run()
    stop = thinker.tokens("stop")[7]
    thinker.start("again", inputs, max_tokens=24, temperature=1.0, seed=4, stop_token_ids=(stop,))
    thinker.run()
    expected = thinker.tokens("stop")[: thinker.tokens("stop").index(stop) + 1]
    assert thinker.tokens("again") == expected


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@BOTH_TALKER_MODES
def test_abort_leaves_nothing(talker, answers):
    answer = answers[0]
    length = prompt_length(answer)
    for number in range(5):
        replies = None if number % 2 else 1
        talker.start(
            f"r{number}", talker_inputs(answer.thinker_rows, length, replies=replies), max_tokens=64, temperature=0.0
        )
    for _ in range(4):
        talker.step()
    for name in ("r0", "r1", "r2", "unknown", "r1"):
        talker.engine.abort(name)
    talker.start("late", talker_inputs(answer.thinker_rows, length, replies=0), max_tokens=64)
    talker.engine.abort("late")  # before its first step
    talker.engine.extend("r0", to_host(answer.thinker_rows[:1]), complete=True)  # rows that were on their way
    talker.engine.abort("r4")
    talker.run()
    assert talker.tokens("r3") == answer.codec_tokens
    assert not any("late" in name for name in talker.events)


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_warm_up_runs_whole_batches_and_leaves_nothing(stage, thinker, talker, monkeypatch):
    engine = (thinker if stage == "thinker" else talker).engine
    steps: list[int] = []
    original = engine.core.step

    def step():
        steps.append(len(engine.core.scheduler.running))
        return original()

    monkeypatch.setattr(engine.core, "step", step)
    engine.warm_up([1, 3])
    assert max(steps) == 3
    assert 1 in steps
    assert not any(engine.counts().values())
    assert not engine.runnable()


def test_what_is_compiled_reads_its_input_at_one_place(talker, answers, monkeypatch):
    """A piecewise CUDA graph, replayed, reads the addresses of its capture; another tensor there is not noticed."""
    runner = talker.engine.core.worker.model_runner
    compiled = type(runner.model.decoder)
    original, places = compiled.__call__, set()

    def note(self, *arguments, **named):
        places.add(named["inputs_embeds"].data_ptr())
        return original(self, *arguments, **named)

    monkeypatch.setattr(compiled, "__call__", note)
    kept = []
    for number in range(6):
        inputs = talker_inputs(answers[number % 3].thinker_rows, prompt_length(answers[number % 3]))
        talker.start(f"r{number}", inputs, max_tokens=6, temperature=0.0)
        talker.step()
        kept.append(torch.empty(1 << (10 + number)))  # moves whatever is allocated anew in every step
    talker.run()
    assert places == {runner.model_state.inputs_embeds.data_ptr()}


def test_a_model_that_cannot_run_fails_its_start(talker, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(talker.engine.core.worker.model_runner, "execute_model", fail)
    with pytest.raises(EngineError, match="no kernel for this device"):
        talker.engine.warm_up([1])
    monkeypatch.undo()
    talker.run()
    assert not any(talker.engine.counts().values())


@BOTH_TALKER_MODES
def test_a_failing_step_ends_its_requests_and_no_others(talker, answers):
    answer = answers[0]
    inputs = talker_inputs(answer.thinker_rows, prompt_length(answer))
    model = talker.engine.core.worker.model_runner.model
    calls = 0

    def fail_once(_module, _arguments):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("the model is unwell")

    hook = model.decoder.text_projection.register_forward_pre_hook(fail_once)
    try:
        for number in range(20):  # more than fit: four wait and must survive
            talker.start(f"r{number}", inputs, max_tokens=8, temperature=0.0)
        talker.run()
    finally:
        hook.remove()
    for number in range(16):
        error = talker.error(f"r{number}")
        assert isinstance(error, EngineError)
        assert "the model is unwell" in str(error)
    for number in range(16, 20):
        assert talker.tokens(f"r{number}") == answer.codec_tokens[:8]
    talker.assert_idle()
    talker.clear()
    talker.start("after", inputs, max_tokens=64, temperature=0.0)
    talker.run()
    assert talker.tokens("after") == answer.codec_tokens


@pytest.mark.parametrize(
    ("error", "inputs", "params"),
    [
        (InvalidRequest, StageInputs(), {}),
        (PromptTooLong, token_inputs([1] * 512), {}),
        (InvalidPayload, token_inputs([1, 512]), {}),
        (InvalidPayload, token_inputs([-1]), {}),
        (InvalidRequest, token_inputs([1]), {"stop_token_ids": (512,)}),
        (InvalidRequest, token_inputs([1]), {"max_tokens": 2, "min_tokens": 3}),
        (InvalidRequest, token_inputs([1]), {"num_steps": 3}),
        (InvalidRequest, token_inputs([1]), {"temperature": 50.0}),
    ],
)
def test_bad_thinker_requests(thinker, error, inputs, params):
    with pytest.raises(error):
        thinker.start("bad", inputs, **params)
    with pytest.raises(OmniError):
        thinker.engine.adapter.read_rows(HostTensor(DType.F32, (1, 128), bytes(512)))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> HostTensor:
    return to_host(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("error", "tensors", "options"),
    [
        (InvalidPayload, {}, {}),
        (InvalidPayload, {"prompt_rows": tensor(1, 128)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 127)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 1, 128)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128, dtype=torch.int32)}, {}),
        (InvalidPayload, {"prompt_rows": HostTensor(DType.F32, (3, 128), bytes(3 * 128 * 4 - 1))}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128), "reply_rows": tensor(128)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128), "mrope_positions": tensor(3, 2)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128), "mrope_positions": tensor(3, 3, dtype=torch.int64)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128), "mrope_positions": to_host(torch.full((3, 2), -1))}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128), "mrope_positions": to_host(torch.full((3, 2), 2**40))}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 128), "extra": tensor(1, 128)}, {}),
        (PromptTooLong, {"prompt_rows": tensor(511, 128)}, {}),
        (UnknownVoice, {"prompt_rows": tensor(3, 128)}, {"voice": "Nobody"}),
    ],
)
def test_bad_talker_requests(talker, error, tensors, options):
    with pytest.raises(error) as caught:
        talker.start("bad", StageInputs(tensors=tensors), **options)
    if error is UnknownVoice:
        assert "Chelsie" in str(caught.value)
        assert "Ethan" in str(caught.value)


def test_bad_rows_end_their_request_alone(talker, answers):
    answer = answers[0]
    length = prompt_length(answer)
    inputs = talker_inputs(answer.thinker_rows, length, replies=1)
    for name in ("wide", "late", "good"):
        talker.start(name, inputs, max_tokens=16, temperature=0.0)
    with pytest.raises(InvalidRequest, match="already running"):
        talker.start("good", inputs)
    talker.run()
    with pytest.raises(InvalidPayload):
        talker.engine.extend("wide", tensor(1, 64), complete=False)
    talker.engine.extend("late", None, complete=True)
    with pytest.raises(InvalidRequest):
        talker.engine.extend("late", to_host(answer.thinker_rows[:1]), complete=False)
    talker.engine.extend("good", to_host(answer.thinker_rows[length + 2 :]), complete=True)
    talker.run()
    assert talker.tokens("good") == answer.codec_tokens[:16]


def test_the_row_budget_refuses_and_recovers(talker, answers, monkeypatch):
    answer = answers[0]
    length = prompt_length(answer)
    inputs = talker_inputs(answer.thinker_rows, length, replies=0)
    row_bytes = 128 * 4
    # A request holds its prompt embeddings (two rows more than the prompt) and its first reply row.
    monkeypatch.setattr(talker.engine.core.scheduler, "row_budget_bytes", (length + 3 + 2) * row_bytes)
    talker.start("first", inputs, max_tokens=8, temperature=0.0)
    with pytest.raises(Overloaded) as caught:
        talker.start("second", inputs, max_tokens=8)
    assert caught.value.retry_after
    talker.run()
    talker.engine.extend("first", to_host(answer.thinker_rows[length + 1 : length + 3]), complete=False)
    with pytest.raises(Overloaded):
        talker.engine.extend("first", to_host(answer.thinker_rows[length + 3 : length + 4]), complete=False)
    talker.run()
    talker.start("third", inputs, max_tokens=1, temperature=0.0)
    talker.run()
    assert talker.tokens("third") == answer.codec_tokens[:1]


# ---------------------------------------------------------------------------------------------------------------------
# Around the engines


def test_stage_llm_runs_one_stage(tiny_checkpoint, answers):
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "thinker"), "autoregressive", SMALL)
    with StageLLM(arguments) as stage:
        results = stage.generate(
            [
                {"prompt_token_ids": answers[0].prompt_token_ids},
                token_inputs(answers[1].prompt_token_ids),
                {"prompt_token_ids": []},
            ],
            StageParams(max_tokens=8),
        )
        with pytest.raises(InvalidRequest):
            stage.generate([{"prompt_token_ids": [1]}], [])
    assert [result.token_ids for result in results[:2]] == [answer.thinker_tokens[:8] for answer in answers[:2]]
    assert results[0].finish_reasons == {"thinker": "length"}
    assert results[0].text
    rows = to_torch(results[0].tensors["rows"])
    torch.testing.assert_close(rows, answers[0].thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)
    assert isinstance(results[2].error, InvalidRequest)


def test_dummy_weights_run(tiny_checkpoint, answers):
    """Also where no weights are read, every buffer is defined and nothing becomes NaN."""
    engine = make_engine(tiny_checkpoint, "talker", load_format="dummy")
    try:
        driver = Driver(engine)
        answer = answers[0]
        driver.start("r", talker_inputs(answer.thinker_rows, prompt_length(answer)), max_tokens=4, temperature=0.0)
        driver.run()
        assert len(driver.tokens("r")) == 4
        assert torch.isfinite(engine.core.worker.model_runner.model.text_rows).all()
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("stage", "kind", "engine", "match"),
    [
        ("thinker", "autoregressive", {"max_num_seq": 3}, "max_num_seqs"),
        ("thinker", "autoregressive", {"worker_cls": "x"}, "worker_cls"),
        ("talker", "autoregressive", {"enable_prompt_embeds": False}, "enable_prompt_embeds"),
        ("talker", "autoregressive", {"max_model_len": -5}, "talker"),
        ("talking", "autoregressive", {}, "talker"),
        ("talker", "diffusion", {}, "autoregressive"),
    ],
)
def test_wrong_arguments(tiny_checkpoint, stage, kind, engine, match):
    with pytest.raises(ConfigError, match=match):
        OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), stage), kind, engine).create_engine_config()


def test_events_come_in_order(thinker, answers):
    """Text, then rows, then the end; no event after it."""
    thinker.start("r", token_inputs(answers[0].prompt_token_ids), max_tokens=3)
    thinker.run()
    kinds = [type(event) for event in thinker.events["r"]]
    assert kinds == [TextEvent, StreamEvent] * 3 + [type(thinker.finished("r"))]
