"""Prompts that come as embeddings: the thinker answers as it does to the tokens whose embeddings they are."""

from __future__ import annotations

import random

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.factory import build_engine
from omni_actors.engine.tensors import to_host
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.payloads import Prompt, PromptEmbedsPayload, StageParams
from omni_actors.protocol.tensors import DType, HostTensor, TensorRef
from omni_actors.stage.engine_interface import FinishedEvent, StageInputs, StageRequest, StreamEvent
from tests.support.penalties import draw_parameters, recorded_sampling
from tests.support.stage_driver import (
    BOTH_MODES,
    SMALL,
    Driver,
    count_preemptions,
    kv_cache,
    make_engine,
    prompt_length,
    token_inputs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def table(reference) -> torch.Tensor:
    """The checkpoint's embedding table [vocabulary, width]."""
    return reference.model.thinker.get_input_embeddings().weight.detach()


def embeds_inputs(table: torch.Tensor, token_ids: list[int], named: bool = False) -> StageInputs:
    return StageInputs(
        token_ids=token_ids if named else (), tensors={"prompt_embeds": to_host(table[torch.tensor(token_ids)])}
    )


@BOTH_MODES
def test_embeddings_of_tokens_give_what_the_tokens_give(thinker, answers, table):
    """In one batch with prompts of tokens; with rows for the talker and without."""
    for number, answer in enumerate(answers):
        inputs = embeds_inputs(table, answer.prompt_token_ids, named=number == 1)
        thinker.start(f"embeds{number}", inputs, max_tokens=32)
        thinker.start(f"quiet{number}", inputs, max_tokens=32, streams=False)
        thinker.start(f"tokens{number}", token_inputs(answer.prompt_token_ids), max_tokens=32)
    thinker.run()
    for number, answer in enumerate(answers):
        for name in ("embeds", "quiet", "tokens"):
            assert thinker.tokens(f"{name}{number}") == answer.thinker_tokens
            assert thinker.text(f"{name}{number}") == thinker.text(f"tokens{number}")
            assert thinker.finished(f"{name}{number}").input_tokens == prompt_length(answer)
        torch.testing.assert_close(thinker.rows(f"embeds{number}"), answer.thinker_rows, atol=1e-4, rtol=1e-5)
        assert not thinker.streams(f"quiet{number}")


def test_the_embeddings_count_and_not_the_tokens_that_they_name(thinker, answers, table):
    """Rows for the talker, and what the prefix cache finds, belong to the embeddings, too."""
    answer = answers[2]
    wrong = list(reversed(answer.prompt_token_ids))
    inputs = StageInputs(token_ids=wrong, tensors=embeds_inputs(table, answer.prompt_token_ids).tensors)
    thinker.start("tokens", token_inputs(wrong), max_tokens=8, streams=False)
    thinker.run()
    assert thinker.tokens("tokens") != answer.thinker_tokens[:8]
    for name in ("first", "cached"):
        before = thinker.engine.statistics().prefix_hits
        thinker.start(name, inputs, max_tokens=8, streams=False)
        thinker.run()
        assert thinker.tokens(name) == answer.thinker_tokens[:8]
        hits = thinker.engine.statistics().prefix_hits - before
        assert (hits > 0) == (name == "cached")
    thinker.start("rows", inputs, max_tokens=8)
    thinker.run()
    rows = thinker.rows("rows")
    torch.testing.assert_close(rows, answer.thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)


def answer_to_embeddings(driver: Driver, table: torch.Tensor, answers: list) -> None:
    for number, answer in enumerate(answers):
        driver.start(f"r{number}", embeds_inputs(table, answer.prompt_token_ids), max_tokens=32)
    driver.run()
    for number, answer in enumerate(answers):
        assert driver.tokens(f"r{number}") == answer.thinker_tokens
        torch.testing.assert_close(driver.rows(f"r{number}"), answer.thinker_rows, atol=1e-4, rtol=1e-5)
    driver.assert_idle()


def test_long_embeddings_are_computed_in_chunks(tiny_checkpoint, answers, table):
    engine = make_engine(tiny_checkpoint, "thinker", max_num_batched_tokens=32)
    try:
        assert prompt_length(answers[2]) > 64
        answer_to_embeddings(Driver(engine), table, [answers[2], answers[0]])
    finally:
        engine.shutdown()


def test_embeddings_are_computed_again_after_a_preemption(tiny_checkpoint, answers, table):
    engine = make_engine(tiny_checkpoint, "thinker", max_model_len=160, **kv_cache(tiny_checkpoint, "thinker", 9))
    try:
        preemptions = count_preemptions(engine)
        answer_to_embeddings(Driver(engine), table, answers[:2] * 3)
        assert preemptions
    finally:
        engine.shutdown()


def test_embeddings_that_would_harm_the_model_are_refused_with_their_name(thinker, answers, table):
    width = table.shape[1]

    def rows(tensor: torch.Tensor, token_ids: tuple[int, ...] = (), **more: HostTensor) -> StageInputs:
        return StageInputs(token_ids=token_ids, tensors={"prompt_embeds": to_host(tensor), **more})

    good = torch.zeros(2, width)
    bad = [
        (rows(torch.zeros(2, width + 1)), InvalidPayload, f"{width}]; got [2, {width + 1}]"),
        (rows(torch.zeros(0, width)), InvalidPayload, "n >= 1"),
        (rows(torch.zeros(2, width, dtype=torch.int32)), InvalidPayload, "floating dtype"),
        (rows(torch.full((2, width), float("nan"))), InvalidPayload, "finite"),
        (rows(torch.full((2, width), -float("inf"))), InvalidPayload, "finite"),
        (rows(torch.full((2, width), 1e5)), InvalidPayload, "at most 10000"),
        (rows(torch.zeros(512, width)), PromptTooLong, "512 tokens"),
        (rows(good, (1,)), InvalidPayload, "2 positions for 1 token ids"),
        (rows(good, (1, 10**6)), InvalidPayload, "outside the vocabulary"),
        (rows(good, **{"vllm.0": HostTensor(DType.U8, (1,), b"x")}), InvalidPayload, "stand alone"),
    ]
    for number, (inputs, kind, words) in enumerate(bad):
        with pytest.raises(kind) as caught:
            thinker.start(f"bad{number}", inputs, max_tokens=3)
        assert words in caught.value.message
        if kind is InvalidPayload and number not in (8,):
            assert "prompt_embeds" in caught.value.message
    thinker.start("good", embeds_inputs(table, answers[0].prompt_token_ids), max_tokens=3)
    thinker.run()
    assert thinker.tokens("good") == answers[0].thinker_tokens[:3]


@pytest.fixture(scope="module")
def prompt_engine(tiny_checkpoint):
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "prompt"), "prompt", SMALL)
    engine = build_engine(arguments)
    yield engine
    engine.shutdown()


def prompt_of(tensor: HostTensor, **fields: bytes) -> StageInputs:
    prompt = Prompt(embeds=PromptEmbedsPayload(TensorRef(tensor.dtype, tensor.shape, 0)), **fields)
    return StageInputs(prompt=prompt, tensors={"prompt_embeds": tensor})


def test_the_prompt_stage_passes_embeddings_on_and_knows_their_width(prompt_engine, table):
    width = table.shape[1]
    assert prompt_engine.facts.embeds_width == width
    tensor = to_host(table[:3].to(torch.bfloat16))
    prompt_engine.start(StageRequest("r", StageParams(), 0), prompt_of(tensor))
    prompt_engine.start(StageRequest("named", StageParams(), 0), prompt_of(tensor, token_ids=pack_token_ids([4, 5, 6])))
    for token_ids in ([], [4, 5, 6]):
        stream, end = prompt_engine.step()
        assert isinstance(stream, StreamEvent)
        assert list(stream.token_ids) == token_ids
        assert stream.tensors == {"prompt_embeds": tensor}
        assert stream.final
        assert isinstance(end, FinishedEvent)
        assert end.output_tokens == 3
    assert not prompt_engine.runnable()
    request = StageRequest("bad", StageParams(), 0)
    with pytest.raises(InvalidPayload, match="prompt_embeds: needs the shape"):
        prompt_engine.start(request, prompt_of(to_host(torch.zeros(1, width + 1))))
    with pytest.raises(PromptTooLong):
        prompt_engine.start(request, prompt_of(to_host(torch.zeros(512, width))))
    with pytest.raises(InvalidPayload, match="outside the vocabulary"):
        prompt_engine.start(request, prompt_of(tensor, token_ids=pack_token_ids([1, 2, 10**6])))
    assert not prompt_engine.counts()["requests"]


def test_an_operator_may_turn_embeddings_off(tiny_checkpoint, table):
    off = {"enable_prompt_embeds": False}
    engine = make_engine(tiny_checkpoint, "thinker", **off)
    try:
        with pytest.raises(InvalidRequest, match="prompt_embeds: this stage takes none"):
            Driver(engine).start("r", embeds_inputs(table, [1, 2]))
    finally:
        engine.shutdown()
    arguments = OmniEngineArgs(OmniModelConfig(str(tiny_checkpoint), "prompt"), "prompt", {**SMALL, **off})
    engine = build_engine(arguments)
    assert engine.facts.embeds_width == 0
    engine.shutdown()


def check_penalties(driver: Driver, table: torch.Tensor, answers: list) -> None:
    """Twelve requests with drawn parameters; embeddings without token ids have no prompt that a penalty could count."""
    generator = random.Random(4)
    tokens = range(len(table))
    drawn = {f"r{number}": draw_parameters(generator, tokens, length=16) for number in range(12)}
    with recorded_sampling(driver.engine) as sampled:
        for number, (name, params) in enumerate(drawn.items()):
            params |= {"bad_words": ["a", "the dog"]} if number % 2 else {}
            inputs = embeds_inputs(table, answers[number % len(answers)].prompt_token_ids, named=number % 4 < 2)
            driver.start(name, inputs, seed=number, streams=number % 3 == 0, **params)
        driver.run()
    for number, (name, params) in enumerate(drawn.items()):
        prompt = answers[number % len(answers)].prompt_token_ids
        sampled.check(name, params, prompt if number % 4 < 2 else [], driver.tokens(name))


@BOTH_MODES
def test_penalties_count_the_tokens_that_embeddings_name_and_no_others(thinker, table, answers):
    """The second time the prompts come from the prefix cache."""
    hits = []
    for _ in range(2):
        before = thinker.engine.statistics().prefix_hits
        check_penalties(thinker, table, answers)
        hits.append(thinker.engine.statistics().prefix_hits - before)
        thinker.clear()
    assert hits[1]


def test_penalties_of_embeddings_are_the_same_after_a_preemption(tiny_checkpoint, table, answers):
    engine = make_engine(tiny_checkpoint, "thinker", max_model_len=160, **kv_cache(tiny_checkpoint, "thinker", 11))
    try:
        preemptions = count_preemptions(engine)
        check_penalties(Driver(engine), table, answers[:2])
        assert preemptions
    finally:
        engine.shutdown()
