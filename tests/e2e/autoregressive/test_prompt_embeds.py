"""Prompts that come as embeddings: the thinker answers as it does to the tokens whose embeddings they are."""

from __future__ import annotations

import random

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig, build_engine
from omni_actors.engine.rows import to_host
from omni_actors.errors import InvalidPayload, PromptTooLong
from omni_actors.protocol.fields import DType, HostTensor, TensorRef, pack_token_ids
from omni_actors.protocol.payloads import Prompt, PromptEmbedsPayload, StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest
from omni_actors.telemetry.metrics import VLLM_HITS
from tests.support.penalties import draw_parameters, recorded_sampling
from tests.support.stage_driver import SMALL, prompt_length, token_inputs

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def table(reference):
    """The checkpoint's embedding table [vocabulary, width]."""
    return reference.model.thinker.get_input_embeddings().weight.detach()


def embeds_inputs(table, token_ids, named=False):
    embeds = to_host(table[torch.tensor(token_ids)])
    return StageInputs(token_ids=token_ids if named else (), tensors={"prompt_embeds": embeds})


def test_embeddings_of_tokens_give_what_the_tokens_give(thinker, answers, table):
    """In one batch with prompts of tokens; with rows for the talker and without."""
    for number, answer in enumerate(answers):
        inputs = embeds_inputs(table, answer.prompt_token_ids, named=number == 1)
        thinker.start(f"embeds{number}", inputs, max_tokens=16)
        thinker.start(f"quiet{number}", inputs, max_tokens=16, streams=False)
        thinker.start(f"tokens{number}", token_inputs(answer.prompt_token_ids), max_tokens=16)
    thinker.run()
    for number, answer in enumerate(answers):
        for name in (f"embeds{number}", f"quiet{number}", f"tokens{number}"):
            assert thinker.tokens(name) == answer.thinker_tokens[:16]
            assert thinker.text(name) == thinker.text(f"tokens{number}")
            assert thinker.finished(name).input_tokens == prompt_length(answer)
        rows = thinker.rows(f"embeds{number}")
        torch.testing.assert_close(rows, answer.thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)
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
        before = thinker.engine.statistics()[VLLM_HITS]
        thinker.start(name, inputs, max_tokens=8, streams=False)
        thinker.run()
        assert thinker.tokens(name) == answer.thinker_tokens[:8]
        assert (thinker.engine.statistics()[VLLM_HITS] > before) == (name == "cached")
    thinker.start("rows", inputs, max_tokens=8)
    thinker.run()
    rows = thinker.rows("rows")
    torch.testing.assert_close(rows, answer.thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)


def test_embeddings_that_would_harm_the_model_are_refused_with_their_name(thinker, answers, table):
    width = table.shape[1]
    media = {"vllm.0": HostTensor(DType.U8, (1,), b"x")}
    for rows, token_ids, more, kind, words in [
        (torch.zeros(2, width + 1), (), {}, InvalidPayload, f"prompt_embeds: needs the shape [n >= 1, {width}]"),
        (torch.zeros(0, width), (), {}, InvalidPayload, "prompt_embeds: needs the shape [n >= 1"),
        (torch.zeros(2, width, dtype=torch.int32), (), {}, InvalidPayload, "floating dtype"),
        (torch.full((2, width), float("nan")), (), {}, InvalidPayload, "finite"),
        (torch.full((2, width), -float("inf")), (), {}, InvalidPayload, "finite"),
        (torch.full((2, width), 1e5), (), {}, InvalidPayload, "at most 10000"),
        (torch.zeros(512, width), (), {}, PromptTooLong, "512 tokens"),
        (torch.zeros(2, width), (1,), {}, InvalidPayload, "2 positions for 1 token ids"),
        (torch.zeros(2, width), (1, 10**6), {}, InvalidPayload, "outside the vocabulary"),
        (torch.zeros(2, width), (), media, InvalidPayload, "stand alone"),
    ]:
        inputs = StageInputs(token_ids=token_ids, tensors={"prompt_embeds": to_host(rows), **more})
        with pytest.raises(kind) as caught:
            thinker.start("bad", inputs, max_tokens=3)
        assert words in caught.value.message
    thinker.start("good", embeds_inputs(table, answers[0].prompt_token_ids), max_tokens=3)
    thinker.run()
    assert thinker.tokens("good") == answers[0].thinker_tokens[:3]


def test_the_prompt_stage_passes_embeddings_on_unless_the_operator_turns_them_off(tiny_checkpoint, table):
    model, width = OmniModelConfig(str(tiny_checkpoint), "prompt"), table.shape[1]
    off = build_engine(OmniEngineArgs(model, "prompt", {**SMALL, "enable_prompt_embeds": False}))
    assert off.facts.embeds_width == 0
    off.shutdown()
    engine = build_engine(OmniEngineArgs(model, "prompt", SMALL))
    assert engine.facts.embeds_width == width

    def start(name, tensor, **fields):
        prompt = Prompt(embeds=PromptEmbedsPayload(TensorRef(tensor.dtype, tensor.shape, 0)), **fields)
        engine.start(
            StageRequest(name, StageParams(), 0), StageInputs(prompt=prompt, tensors={"prompt_embeds": tensor})
        )

    tensor = to_host(table[:3].to(torch.bfloat16))
    start("r", tensor)
    start("named", tensor, token_ids=pack_token_ids([4, 5, 6]))
    for token_ids in ([], [4, 5, 6]):
        stream, end = engine.step()
        assert list(stream.token_ids) == token_ids
        assert stream.tensors == {"prompt_embeds": tensor}
        assert stream.final
        assert end.output_tokens == 3
    for rows, fields, kind, words in (
        (torch.zeros(1, width + 1), {}, InvalidPayload, "prompt_embeds: needs the shape"),
        (torch.zeros(512, width), {}, PromptTooLong, "512"),
        (torch.zeros(3, width), {"token_ids": pack_token_ids([1, 2, 10**6])}, InvalidPayload, "outside the vocabulary"),
    ):
        with pytest.raises(kind, match=words):
            start("bad", to_host(rows), **fields)
    assert not engine.counts()["requests"]
    engine.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("memory", ["enough", "too little"])
def test_penalties_count_the_tokens_that_embeddings_name_and_no_others(thinker, tight, table, answers, memory):
    """Embeddings without token ids have no prompt that a penalty could count."""
    stage = thinker if memory == "enough" else tight("thinker")
    generator = random.Random(4)
    drawn = {f"r{number}": draw_parameters(generator, range(len(table)), length=24) for number in range(8)}
    given = [answers[number % 2].prompt_token_ids for number in range(8)]
    with recorded_sampling(stage.engine) as sampled:
        for number, (name, params) in enumerate(drawn.items()):
            params |= {"bad_words": ["a", "the dog"]} if number % 2 else {}
            inputs = embeds_inputs(table, given[number], named=number % 4 < 2)
            stage.start(name, inputs, seed=number, streams=number % 3 == 0, **params)
        stage.run()
    for number, (name, params) in enumerate(drawn.items()):
        sampled.check(name, params, given[number] if number % 4 < 2 else [], stage.tokens(name))
    assert memory == "enough" or stage.preempted
