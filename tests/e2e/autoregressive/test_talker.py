"""The talker in a real vLLM engine core, against transformers: streamed input, bursts, preemption, sampling."""

from __future__ import annotations

import random

import pytest
import torch

from omni_actors.engine.models import SpeechLimit
from omni_actors.engine.models.qwen2_5_omni.talker import SPEC
from omni_actors.engine.rows import to_host
from omni_actors.engine.workers.base import burst_of
from omni_actors.errors import ModelOutputInvalid
from omni_actors.protocol.messages import FinishReason
from tests.support.penalties import draw_parameters, recorded_sampling
from tests.support.stage_driver import VOICES, prompt_length, sample, talker_inputs

pytestmark = pytest.mark.e2e
CODES = 24
GREEDY = {"max_tokens": CODES, "temperature": 0.0}
SAMPLED = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.3}


class Late:
    """Rows of replies that come while their requests speak, none to three of them at a time."""

    def __init__(self, driver, seed):
        self.driver, self.generator, self.missing = driver, random.Random(seed), {}

    def start(self, name, answer, replies, **params):
        """Start a request with so many rows of its reply after the first; None: with all of them."""
        length = prompt_length(answer)
        self.driver.start(name, talker_inputs(answer.thinker_rows, length, replies=replies), **params)
        if replies is not None:
            self.missing[name] = list(answer.thinker_rows[length + 1 + replies :].split(1))

    def abort(self, name):
        self.driver.engine.abort(name)
        self.missing.pop(name, None)

    def feed(self, _step=0):
        for name, parts in list(self.missing.items()):
            count = self.generator.randrange(4)
            rows, parts[:count] = parts[:count], []
            self.driver.engine.extend(name, to_host(torch.cat(rows)) if rows else None, complete=not parts)
            if not parts:
                del self.missing[name]

    def run(self):
        while self.missing:
            self.driver.run(self.feed)
            self.feed()
        self.driver.run()


def test_talker_equals_transformers_whole_and_streamed(talker, answers):
    """Nine requests: whole, with rows at random times, with none until later; voices mixed."""
    late = Late(talker, 1)
    for number in range(9):
        voice = VOICES[number % 3 % 2]
        late.start(f"r{number}", answers[number % 3], (None, 0, 3)[number // 3], voice=voice, **GREEDY)
    late.run()
    assert talker.engine.core.scheduler.held_steps > 0
    for number in range(9):
        assert talker.tokens(f"r{number}") == answers[number % 3].codec_tokens[:CODES]
        assert talker.finished(f"r{number}").output_tokens == CODES
        starts = [event.start for event in talker.streams(f"r{number}") if event.token_ids]
        assert starts == sorted(set(starts))
        assert talker.streams(f"r{number}")[-1].final


def test_the_token_that_ends_is_left_out_and_what_does_not_sound_is_never_sampled(talker, answers, reference):
    answer, adapter, config = answers[0], talker.engine.adapter, reference.model.config
    ends = {config.talker_config.tts_codec_pad_token_id, config.talker_config.tts_codec_end_token_id}
    assert adapter.end_token_ids == ends
    end = answer.codec_tokens[20]
    first = answer.codec_tokens.index(end)
    adapter.end_token_ids = frozenset({end})
    try:
        sample(talker, answer, "r", **GREEDY)
        talker.run()
    finally:
        adapter.end_token_ids = frozenset(ends)
    assert talker.tokens("r") == answer.codec_tokens[:first]
    assert talker.finished("r").reason is FinishReason.STOP
    assert talker.finished("r").output_tokens == first + 1
    states = torch.randn(3, config.talker_config.hidden_size)
    logits = talker.engine.core.worker.model_runner.model.compute_logits(states)
    sounding = config.token2wav_config.dit_config.num_embeds
    assert torch.isfinite(logits[:, :sounding]).all()
    assert torch.isfinite(logits).sum() == 3 * (sounding + 2)


def test_a_talker_that_ignores_its_end_never_draws_it(talker, answers):
    wanted = dict.fromkeys(talker.engine.adapter.end_token_ids, 100.0)
    sample(talker, answers[0], "r", max_tokens=9, temperature=0.0, ignore_eos=True, logit_bias=wanted)
    talker.run()
    assert len(talker.tokens("r")) == 9
    assert wanted.keys().isdisjoint(talker.tokens("r"))


def test_a_talker_that_does_not_stop_ends_where_its_text_allows(talker, answers, monkeypatch):
    """Two tokens of text and three, the latter complete after the start; both are preempted on the way."""
    rows, length = answers[0].thinker_rows, prompt_length(answers[0])
    scheduler = talker.engine.core.scheduler
    assert scheduler.speech_limit == SPEC.speech_limit
    monkeypatch.setattr(scheduler, "speech_limit", SpeechLimit(20, 10))
    unending = {"temperature": 0.0, "logit_bias": dict.fromkeys(talker.engine.adapter.end_token_ids, -100.0)}
    two = talker_inputs(rows[: length + 2], length)
    talker.start("two", two, max_tokens=400, **unending)
    talker.start("three", talker_inputs(rows, length, replies=0), max_tokens=400, **unending)
    talker.start("asked for less", two, max_tokens=5, **unending)
    talker.start("asked for more", two, max_tokens=60, min_tokens=60)
    interrupted = []

    def interrupt(step):
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


def test_what_is_compiled_reads_its_input_at_one_place(talker, answers, monkeypatch):
    """A piecewise CUDA graph, replayed, reads the addresses of its capture; another tensor there is not noticed."""
    runner = talker.engine.core.worker.model_runner
    compiled, places = type(runner.model.decoder), set()
    original = compiled.__call__

    def note(self, *arguments, **named):
        places.add(named["inputs_embeds"].data_ptr())
        return original(self, *arguments, **named)

    monkeypatch.setattr(compiled, "__call__", note)
    kept = []
    for number in range(6):
        sample(talker, answers[number % 3], f"r{number}", max_tokens=6, temperature=0.0)
        talker.step()
        kept.append(torch.empty(1 << (10 + number)))  # moves whatever every step allocates again
    talker.run()
    assert places == {runner.model_state.inputs_embeds.data_ptr()}


def test_rows_that_are_nan_fail_their_request_and_no_other_of_the_batch(talker, answers):
    answer, length = answers[0], prompt_length(answers[0])
    broken = answer.thinker_rows.clone()
    broken[length // 2] = torch.nan
    sample(talker, answer, "whole", **GREEDY)
    talker.start("broken", talker_inputs(broken, length), **GREEDY)
    talker.run()
    assert isinstance(talker.error("broken"), ModelOutputInvalid)
    sample(talker, answer, "next", **GREEDY)
    talker.run()
    assert talker.tokens("whole") == answer.codec_tokens[:CODES]
    assert talker.tokens("next") == answer.codec_tokens[:CODES], "in the cache blocks of the one that failed"


# -- who runs ---------------------------------------------------------------------------------------------------------


def test_the_least_urgent_lose_their_blocks_and_equal_transformers(tight, answers):
    """Few KV blocks, priorities against the order of arrival; some with rows that come while they run, one aborted."""
    tight = tight("talker", blocks=11)
    late = Late(tight, 2)
    for number in range(7):
        replies = 2 if number % 3 else None
        late.start(f"r{number}", answers[number % 2], replies, voice=VOICES[number % 2], priority=-number, **GREEDY)
    for _ in range(8):
        tight.step()
        late.feed()
    late.abort("r5")
    late.run()
    assert tight.preempted
    assert "r6" not in tight.preempted, "the most urgent one keeps its blocks"
    for number in (0, 1, 2, 3, 4, 6):
        assert tight.tokens(f"r{number}") == answers[number % 2].codec_tokens[:CODES]


# -- several steps for one scheduling ---------------------------------------------------------------------------------

REQUESTS = (
    {"temperature": 0.0, "max_tokens": 19},
    {**SAMPLED, "max_tokens": 22},
    {**SAMPLED, "max_tokens": 23, "min_p": 0.001},
    {**SAMPLED, "max_tokens": 40, "min_tokens": 9},
    {"temperature": 0.0, "max_tokens": 1},
    {**SAMPLED, "max_tokens": 26, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.7, "max_tokens": 2},
)


def play(driver, answers, steps):
    """Requests that join one after the other, some with rows that come while they speak; one is aborted."""
    driver.clear()
    driver.engine.core.scheduler.steps_per_schedule = steps
    late, waiting = Late(driver, steps), list(enumerate(REQUESTS))

    def go_on(step):
        if waiting and late.generator.random() < 0.7:
            number, params = waiting.pop(0)
            replies = number if number % 3 else None
            late.start(f"r{number}", answers[number % 3], replies, voice=VOICES[number % 2], seed=number, **params)
        if step == 4:
            late.abort("r2")
        late.feed()

    while waiting:
        go_on(0)
        driver.run(go_on)
    late.run()
    ended = {name: driver.finished(name) for name in driver.events if name != "r2"}
    return {name: (driver.tokens(name), event.reason, event.output_tokens) for name, event in ended.items()}


def test_bursts_give_the_tokens_of_single_steps(talker, answers, monkeypatch):
    """Speech that ends with any of a third of the tokens ends within bursts."""
    usual, adapter = talker.engine.core.scheduler.steps_per_schedule, talker.engine.adapter
    monkeypatch.setattr(adapter, "end_token_ids", frozenset(range(0, adapter.vocabulary, 24)))
    try:
        single = play(talker, answers, 1)
        taken = talker.steps
        assert play(talker, answers, 7) == single
    finally:
        talker.engine.core.scheduler.steps_per_schedule = usual
    assert talker.steps < taken
    assert {reason for _, reason, _ in single.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for tokens, reason, counted in single.values():
        assert counted == len(tokens) + (reason is FinishReason.STOP), "what follows the end is not counted"


def test_a_burst_ends_for_each_request_where_its_input_does(talker, answers, monkeypatch):
    """A request without its next row takes no place in the batch."""
    scheduler, bursts = talker.engine.core.scheduler, []
    original = scheduler.schedule

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        bursts.append({name: burst_of(output).get(name, 1) for name in output.num_scheduled_tokens})
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule)
    rows, length = answers[0].thinker_rows, prompt_length(answers[0])
    talker.start("rows", talker_inputs(rows, length, replies=2), max_tokens=9, temperature=0.0)
    sample(talker, answers[0], "all", max_tokens=9, temperature=0.0)
    talker.run()
    prompts, *decoding = [burst for burst in bursts if burst]
    assert prompts == {"rows": 1, "all": 1}
    assert decoding == [{"all": 3, "rows": 2}, {"all": 4}, {"all": 1}], "up to multiples of four"
    assert len(talker.tokens("all")) == 9
    assert talker.tokens("rows") == []  # three tokens, less than a block of the vocoder
    counts = talker.engine.counts()
    assert (counts["requests"], counts["held"], counts["pending_rows"]) == (1, 1, 0)
    assert talker.engine.waits_for_input("rows")
    assert talker.engine.step() == []
    talker.engine.extend("rows", to_host(rows[length + 3 :]), complete=True)
    talker.run()
    assert talker.tokens("rows") == talker.tokens("all") == answers[0].codec_tokens[:9]


@pytest.mark.nightly
def test_preempted_bursts_give_the_tokens_of_single_steps(tight, answers):
    tight = tight("talker", blocks=11)
    usual, given = tight.engine.core.scheduler.steps_per_schedule, []
    try:
        for steps in (1, 4):
            tight.clear()
            tight.preempted.clear()
            tight.engine.core.scheduler.steps_per_schedule = steps
            for number in range(6):
                sample(tight, answers[number % 2], f"r{number}", seed=number, max_tokens=40 + number, **SAMPLED)
            tight.run()
            names = [f"r{number}" for number in range(6)]
            given.append([(tight.tokens(name), tight.finished(name).output_tokens) for name in names])
            assert tight.preempted
    finally:
        tight.engine.core.scheduler.steps_per_schedule = usual
    assert given[1] == given[0]


# -- sampling ---------------------------------------------------------------------------------------------------------


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
    talker.run()
    assert talker.tokens("again") == alone
    assert talker.tokens("other") != alone
    assert len(set(alone)) > 4


@pytest.mark.nightly
@pytest.mark.parametrize("memory", ["enough", "too little"])
def test_penalties_count_what_was_said_and_the_prompt_that_transformers_has(talker, tight, answers, memory):
    """Eight requests with drawn parameters; the prompt counts as transformers' does: masks, pad and start."""
    stage = talker if memory == "enough" else tight("talker", blocks=11)
    config = stage.engine.core.worker.model_runner.model.config
    generator = random.Random(3)
    drawn = {f"r{number}": draw_parameters(generator, range(config.vocab_size), length=24) for number in range(8)}
    with recorded_sampling(stage.engine) as sampled:
        for number, (name, params) in enumerate(drawn.items()):
            sample(stage, answers[number % 2], name, seed=number, **params)
        stage.run()
    prompt = [config.tts_codec_mask_token_id, config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
    for name, params in drawn.items():
        sampled.check(name, params, prompt, stage.tokens(name))
    assert memory == "enough" or stage.preempted
