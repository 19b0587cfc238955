"""The talker in a real vLLM engine core, against transformers: whole and streamed input, preemption, its own input."""

from __future__ import annotations

import random

import pytest
import torch

from omni_actors.engine.models import SpeechLimit
from omni_actors.engine.models.qwen2_5_omni.talker import SPEC
from omni_actors.engine.tensors import to_host
from omni_actors.errors import ModelOutputInvalid
from omni_actors.protocol.results import FinishReason
from tests.support.nightly import nightly
from tests.support.penalties import draw_parameters, recorded_sampling
from tests.support.stage_driver import (
    BOTH_TALKER_MODES,
    VOICES,
    Driver,
    count_preemptions,
    kv_cache,
    make_engine,
    prompt_length,
    talker_inputs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


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
    ends, adapter.end_token_ids = adapter.end_token_ids, frozenset({end})
    try:
        talker.start("r", talker_inputs(answer.thinker_rows, prompt_length(answer)), max_tokens=64, temperature=0.0)
        talker.run()
    finally:
        adapter.end_token_ids = ends
    assert talker.tokens("r") == answer.codec_tokens[:first]
    assert talker.finished("r").reason is FinishReason.STOP
    assert talker.finished("r").output_tokens == first + 1


@BOTH_TALKER_MODES
def test_a_talker_that_does_not_stop_ends_where_its_text_allows(talker, answers, monkeypatch):
    """Two tokens of text and three, the latter complete after the start; both are preempted on the way."""
    answer = answers[0]
    rows, length = answer.thinker_rows, prompt_length(answer)
    scheduler = talker.engine.core.scheduler
    assert scheduler.speech_limit == SPEC.speech_limit
    monkeypatch.setattr(scheduler, "speech_limit", SpeechLimit(20, 10))
    unending = {"temperature": 0.0, "logit_bias": dict.fromkeys(talker.engine.adapter.end_token_ids, -100.0)}
    talker.start("two", talker_inputs(rows[: length + 2], length), max_tokens=400, **unending)
    talker.start("three", talker_inputs(rows, length, replies=0), max_tokens=400, **unending)
    talker.start("asked for less", talker_inputs(rows[: length + 2], length), max_tokens=5, **unending)
    talker.start("asked for more", talker_inputs(rows[: length + 2], length), max_tokens=60, min_tokens=60)
    interrupted: list[str] = []

    def interrupt(step: int) -> None:
        if step == 2:
            talker.engine.extend("three", to_host(rows[length + 1 : length + 3]), complete=True)
        if step == 6:
            interrupted.extend(request.request_id for request in scheduler.running)
            scheduler.reset_prefix_cache(reset_running_requests=True)

    talker.run(interrupt)
    assert {"two", "three", "asked for more"} <= set(interrupted)
    for name, count in {"two": 40, "three": 50, "asked for less": 5, "asked for more": 60}.items():
        assert talker.finished(name).reason is FinishReason.LENGTH
        assert talker.finished(name).output_tokens == len(talker.tokens(name)) == count


def test_talker_samples_what_sounds_or_ends_and_nothing_else(talker, reference, answers):
    config = reference.model.config.talker_config
    assert talker.engine.adapter.end_token_ids == {config.tts_codec_pad_token_id, config.tts_codec_end_token_id}
    model = talker.engine.core.worker.model_runner.model
    logits = model.compute_logits(torch.randn(3, config.hidden_size))
    assert torch.isinf(logits[:, config.tts_codec_start_token_id]).all()
    sounding = reference.model.config.token2wav_config.dit_config.num_embeds
    assert torch.isfinite(logits[:, :sounding]).all()
    assert torch.isfinite(logits).sum() == 3 * (sounding + 2)


@pytest.mark.parametrize("asynchronous", [nightly(False), True], ids=["sync", "async"])
def test_preempted_talkers_equal_transformers(tiny_checkpoint, answers, asynchronous):
    """A KV cache for half of the requests; some of them streamed, one aborted."""
    engine = make_engine(
        tiny_checkpoint,
        "talker",
        asynchronous=asynchronous,
        max_model_len=160,
        **kv_cache(tiny_checkpoint, "talker", 11),
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
    assert counts["requests"] == 1
    assert counts["held"] == 1
    assert counts["pending_rows"] == 0
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
        kept.append(torch.empty(1 << (10 + number)))  # moves whatever every step allocates again
    talker.run()
    assert places == {runner.model_state.inputs_embeds.data_ptr()}


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


@BOTH_TALKER_MODES
def test_rows_that_are_nan_fail_their_request_and_no_other_of_the_batch(talker, answers):
    answer = answers[0]
    length = prompt_length(answer)
    broken = answer.thinker_rows.clone()
    broken[length // 2] = torch.nan
    talker.start("whole", talker_inputs(answer.thinker_rows, length), max_tokens=64, temperature=0.0)
    talker.start("broken", talker_inputs(broken, length), max_tokens=64, temperature=0.0)
    talker.run()
    assert isinstance(talker.error("broken"), ModelOutputInvalid)
    assert talker.tokens("whole") == answer.codec_tokens
    talker.start("next", talker_inputs(answer.thinker_rows, length), max_tokens=64, temperature=0.0)
    talker.run()
    assert talker.tokens("next") == answer.codec_tokens, "in the cache blocks of the one that failed"


def check_penalties(driver: Driver, config, answers) -> None:
    """Twelve requests with drawn parameters; the prompt counts as transformers' does: masks, pad and start."""
    generator = random.Random(3)
    tokens = range(config.vocab_size)
    drawn = {f"r{number}": draw_parameters(generator, tokens, length=24) for number in range(12)}
    with recorded_sampling(driver.engine) as sampled:
        for number, (name, params) in enumerate(drawn.items()):
            answer = answers[number % len(answers)]
            driver.start(name, talker_inputs(answer.thinker_rows, prompt_length(answer)), seed=number, **params)
        driver.run()
    prompt = [config.tts_codec_mask_token_id, config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
    for name, params in drawn.items():
        sampled.check(name, params, prompt, driver.tokens(name))


@BOTH_TALKER_MODES
def test_penalties_count_what_was_said_and_the_prompt_that_transformers_has(talker, answers):
    check_penalties(talker, talker.engine.core.worker.model_runner.model.config, answers)


def test_penalties_are_the_same_after_a_preemption(tiny_checkpoint, answers):
    engine = make_engine(tiny_checkpoint, "talker", max_model_len=160, **kv_cache(tiny_checkpoint, "talker", 11))
    try:
        preemptions = count_preemptions(engine)
        check_penalties(Driver(engine), engine.core.worker.model_runner.model.config, answers[:2])
        assert preemptions
    finally:
        engine.shutdown()
