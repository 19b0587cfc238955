"""The thinker with any generation parameters answers as vLLM alone does, and speech ends where the text does."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.logprobs import PromptLogprobs
from vllm.outputs import CompletionOutput

from omni_actors.errors import InvalidRequest
from omni_actors.http_server.answer import prompt_logprobs
from omni_actors.protocol.payloads import PositionLogprobs, StructuredOutputs, TokenLogprob
from omni_actors.stage.engine_interface import EngineEvent, StreamEvent, TextEvent
from tests.support.bare_vllm import BareVllm
from tests.support.stage_driver import prompt_length, sample, token_inputs

pytestmark = pytest.mark.e2e

PLAIN = {"max_tokens": 20, "temperature": 0.0}
DRAWN = {"max_tokens": 20, "temperature": 0.9, "top_k": 20, "seed": 11}
FORMS = {
    "json": json.dumps(
        {
            "type": "object",
            "properties": {"calm": {"type": "boolean"}, "sea": {"enum": ["salt", "deep"]}},
            "required": ["calm", "sea"],
            "additionalProperties": False,
        }
    ),
    "json_object": True,
    "regex": "tide-[0-9]{3}",
    "choice": ["ebb", "flood"],
    "grammar": 'root ::= "high" | "low" root',
}
STOPS = ("across", "late", "several", "included", "one_character", "first")


def cases_of(text: str, tokens: list[int]) -> dict[str, dict[str, Any]]:
    """Parameters by name; the stop strings occur in `text`, the answer without any."""
    across = text[12:24]
    return {
        "drawn": {**DRAWN, "logprobs": 3, "prompt_logprobs": 2},
        "prompt": {**PLAIN, "prompt_logprobs": 0},
        "penalties": {**DRAWN, "frequency_penalty": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.2},
        "bias": {**PLAIN, "logit_bias": {tokens[0]: -100.0, tokens[1]: 3.5}},
        "allowed": {**DRAWN, "allowed_token_ids": [5, 60, 300, 301]},
        "bad_words": {**PLAIN, "bad_words": text.split()[:2]},
        "special": {**PLAIN, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        "stop_token": {**PLAIN, "stop_token_ids": [tokens[7]]},
        "stop_token_included": {**PLAIN, "stop_token_ids": [tokens[7]], "include_stop_str_in_output": True},
        "across": {**PLAIN, "stop": [across], "logprobs": 1},
        "late": {**PLAIN, "stop": [text[:6]], "min_tokens": 6},
        "several": {**PLAIN, "stop": ["never said", text[20:24], text[30:37]]},
        "included": {**PLAIN, "stop": [across], "include_stop_str_in_output": True},
        "one_character": {**PLAIN, "stop": [text[17]]},
        "first": {**PLAIN, "stop": [text[:2]]},
        **{
            f"structured {form}": {
                **DRAWN,
                "max_tokens": 60,
                "frequency_penalty": 2.0,
                "structured_outputs": {form: value},
            }
            for form, value in FORMS.items()
        },
    }


@pytest.fixture(scope="session")
def wanted(engines, tiny_checkpoint, answers):
    """By name: parameters, and vLLM's answer to them. Its engine ends with ours: all share groups of ranks."""
    prompt, bare = answers[0].prompt_token_ids, BareVllm(tiny_checkpoint)
    plain = bare.generate(prompt, **PLAIN)
    cases = {"plain": PLAIN, **cases_of(plain.text, list(plain.token_ids))}
    made = bare.generate_all(prompt, cases)
    assert {made[name].finish_reason for name in STOPS if name != "late"} == {"stop"}
    assert {type(made[name].stop_reason) for name in ("plain", "across", "stop_token")} == {type(None), str, int}
    for name, answer in made.items():
        answer.prompt_logprobs = bare.prompt_logprobs[name]
    yield {name: (params, made[name]) for name, params in cases.items()}
    bare.close()


def test_answers_equal_those_of_vllm(thinker, answers, wanted):
    """All cases in one batch. At no time does the talker have a row of a token beyond the text that was given out."""
    inputs = token_inputs(answers[0].prompt_token_ids)
    for name, (params, _) in wanted.items():
        if "structured_outputs" in params:
            params = {**params, "structured_outputs": StructuredOutputs(**params["structured_outputs"])}
        thinker.start(name, inputs, **params)
    thinker.run()
    for name, (params, answer) in wanted.items():
        assert thinker.tokens(name) == list(answer.token_ids), name
        assert thinker.text(name) == answer.text, name
        finished = thinker.finished(name)
        assert (finished.reason, finished.stop_reason) == (answer.finish_reason, answer.stop_reason), name
        assert finished.output_tokens == len(answer.token_ids), name
        assert thinker.streams(name)[-1].final, name
        assert logprobs_of(thinker.events[name]) == vllm_logprobs(answer, params.get("logprobs")), name
        assert_prompt_logprobs(thinker.events[name], answer.prompt_logprobs)
    differing = {name for name, (_, answer) in wanted.items() if answer.text != wanted["plain"][1].text}
    assert differing >= set(wanted) - {"plain", "special", "late", "prompt"}, "the parameters matter"

    assert set(json.loads(thinker.text("structured json"))) == {"calm", "sea"}
    assert re.fullmatch(FORMS["regex"], thinker.text("structured regex"))
    assert thinker.text("structured choice") in FORMS["choice"]

    length = prompt_length(answers[0])
    everything = thinker.rows("plain")
    texts = [event.text for event in thinker.events["plain"] if isinstance(event, TextEvent)]
    starts = [len("".join(texts[:index])) for index in range(len(texts))]
    sizes = {}
    for name in STOPS:
        rows, answer = thinker.rows(name), wanted[name][1]
        torch.testing.assert_close(rows, everything[: len(rows)], atol=1e-4, rtol=1e-5)
        begun = sum(start < len(answer.text) for start in starts[: len(answer.token_ids)])
        sizes[name] = len(rows) - length
        assert sizes[name] == min(begun, len(answer.token_ids) - 1), name
        assert_text_leads(thinker.events[name], starts, length)
    assert sizes["first"] == 0
    assert 0 < sizes["across"] < sizes["included"]


def logprobs_of(events: list[EngineEvent]) -> list[PositionLogprobs]:
    return [position for event in events if isinstance(event, TextEvent) for position in rounded(event.logprobs)]


def assert_prompt_logprobs(events: list[EngineEvent], wanted: PromptLogprobs | None) -> None:
    """Those of vLLM for each position, in the form in which its server sends them."""
    made = [position for event in events if isinstance(event, TextEvent) for position in event.prompt_logprobs]
    assert bool(made) == bool(wanted)
    if wanted is None:
        return
    shown = prompt_logprobs(made)
    assert shown[0] is wanted[0] is None
    for position, of_vllm in zip(shown[1:], wanted[1:], strict=True):
        assert list(position) == [str(token) for token in of_vllm]
        for entry, other in zip(position.values(), of_vllm.values(), strict=True):
            assert (entry["rank"], entry["decoded_token"]) == (other.rank, other.decoded_token)
            assert entry["logprob"] == pytest.approx(other.logprob, abs=1e-3)


def vllm_logprobs(answer: CompletionOutput, wanted: int | None) -> list[PositionLogprobs]:
    """vLLM's, in our form: the token taken comes first there, and stays so if it is not among the likeliest."""
    positions = []
    for token_id, position in zip(answer.token_ids, answer.logprobs or (), strict=wanted is not None):
        entries = {token: TokenLogprob(token, entry.decoded_token, entry.logprob) for token, entry in position.items()}
        likeliest = sorted(position, key=lambda token: position[token].rank)[:wanted]
        positions.append(PositionLogprobs(entries[token_id], tuple(entries[token] for token in likeliest)))
    return rounded(positions)


def rounded(positions: Sequence[PositionLogprobs]) -> list[PositionLogprobs]:
    """Different batches add up in different orders."""

    def short(entry: TokenLogprob) -> TokenLogprob:
        return TokenLogprob(entry.token_id, entry.text, round(entry.logprob, 3))

    return [PositionLogprobs(short(entry.token), tuple(map(short, entry.top))) for entry in positions]


def assert_text_leads(events: list[EngineEvent], starts: list[int], length: int) -> None:
    """The text of each token begins in the text given out before its row."""
    given = 0
    for event in events:
        if isinstance(event, TextEvent):
            given += len(event.text)
        elif isinstance(event, StreamEvent) and "rows" in event.tensors:
            last = event.start + event.tensors["rows"].shape[0] - 1 - length
            assert last < 0 or starts[last] < given


def test_wrong_values_name_their_parameter(thinker, answers):
    inputs = token_inputs(answers[0].prompt_token_ids)
    for field, params in {
        "logit_bias": {"logit_bias": {10**6: 1.0}},
        "allowed_token_ids": {"allowed_token_ids": (10**6,)},
        "stop_token_ids": {"min_tokens": 2, "stop_token_ids": tuple(range(128))},
        "bad_words": {"bad_words": tuple(f"{'word ' * 150}{number}" for number in range(9))},
        "min_tokens": {"min_tokens": 9, "max_tokens": 3},
        "temperature": {"temperature": 9.0},
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            thinker.start("wrong", inputs, **params)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("json", '{"type": "sea"}'),
        ("json", "{"),
        ("json", '{"items": ' * 70 + "{}" + "}" * 70),
        ("regex", "(("),
        ("grammar", "root ::= nothing"),
        ("structural_tag", "{}"),
    ],
)
def test_a_form_that_cannot_be_used_fails_its_request_alone(thinker, answers, form, value):
    inputs = token_inputs(answers[0].prompt_token_ids)
    thinker.start("other", inputs, max_tokens=4)
    thinker.start("wrong", inputs, max_tokens=4, structured_outputs=StructuredOutputs(**{form: value}))
    thinker.run()
    assert isinstance(thinker.error("wrong"), InvalidRequest)
    assert thinker.error("wrong").field == f"structured_outputs.{form}"
    assert len(thinker.tokens("other")) == 4


def test_a_grammar_that_takes_too_long_of_each_token_fails_its_request_alone(thinker, answers):
    """There are ever more ways to read the text."""
    inputs = token_inputs(answers[0].prompt_token_ids)
    ambiguous = StructuredOutputs(grammar='root ::= a "\\u20ac"\na ::= [a-z ] | a a | a a a')
    thinker.start("slow", inputs, max_tokens=200, structured_outputs=ambiguous)
    thinker.start("other", inputs, max_tokens=60, ignore_eos=True)
    thinker.run()
    assert isinstance(thinker.error("slow"), InvalidRequest)
    assert thinker.error("slow").field == "structured_outputs.grammar"
    assert len(thinker.tokens("other")) == 60


def test_a_request_that_ends_while_its_grammar_is_compiled_leaves_nothing(thinker, answers):
    """Its id may be used again at once, with another form."""
    inputs = token_inputs(answers[0].prompt_token_ids)
    for choice in (("ebb", "flood"), ("spring", "neap")):
        thinker.start("again", inputs, structured_outputs=StructuredOutputs(choice=choice))
        if choice[0] == "ebb":
            assert thinker.engine.counts()["compiling"] == 1
            thinker.engine.abort("again")
    thinker.run()
    assert thinker.text("again") in ("spring", "neap")


def test_a_stage_without_text_refuses_parameters_about_text(talker, answers):
    with pytest.raises(InvalidRequest, match="without text") as caught:
        sample(talker, answers[0], "wrong", stop=(".",))
    assert caught.value.field == "stop"
