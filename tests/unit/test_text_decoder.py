"""Tokens become text, which stop strings end, and log probabilities in the wire's form; without an engine."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from omni_actors.engine.adapter import TextDecoder
from omni_actors.engine.core import make_request
from omni_actors.protocol.payloads import TokenLogprob


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return get_tokenizer(str(tiny_checkpoint))


def decoder_of(tokenizer: Any, **params: Any) -> TextDecoder:
    return TextDecoder(tokenizer, make_request("r", [1, 2], SamplingParams(**params)))


def output(*tokens: int, end: FinishReason | None = None, logprobs: LogprobsLists | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("r", list(tokens), finish_reason=end, new_logprobs=logprobs)


def read(tokenizer: Any, text: str, **params: Any) -> tuple[str, list[int], bool]:
    """The text given out, the tokens released after each one, and whether a string stopped it."""
    decoder = decoder_of(tokenizer, **params)
    given, released = "", []
    for token in tokenizer.encode(text):
        piece, _ = decoder.decode(output(token))
        given += piece
        released.append(decoder.released)
        if decoder.stopped:
            break
    return given, released, decoder.stopped


def test_what_may_begin_a_stop_string_is_kept_back(tokenizer: Any) -> None:
    given, released, stopped = read(tokenizer, "The tide is full.", stop=["tide was"])
    assert "The tide is full.".startswith(given)
    assert len(given) == len("The tide is full.") - len("tide was") + 1
    assert released[-1] < len(released)
    assert not stopped


def test_the_tokens_of_the_string_that_stops_are_not_released(tokenizer: Any) -> None:
    before = len(tokenizer.encode("The tide"))
    given, released, stopped = read(tokenizer, "The tide is full.", stop=[" is full", " ebb"])
    assert given == "The tide"
    assert stopped
    assert max(released) == released[-1] == before


@pytest.mark.parametrize("stop", ["🌊", "🌊!"])
def test_a_token_within_a_character_waits_for_the_character(tokenizer: Any, stop: str) -> None:
    """The first bytes of a stop string have no text, and are not part of the answer either."""
    assert len(tokenizer.encode("🌊")) > 1
    given, released, stopped = read(tokenizer, "sea 🌊! more", stop=[stop])
    assert given == "sea "
    assert stopped
    assert max(released) == len(tokenizer.encode("sea "))


def test_the_token_that_stops_is_no_text_unless_it_is_wanted(tokenizer: Any) -> None:
    *before, last = tokenizer.encode("The tide")
    for included in (False, True):
        decoder = decoder_of(tokenizer, stop_token_ids=[last], include_stop_str_in_output=included)
        text = "".join(decoder.decode(output(token))[0] for token in before)
        text += decoder.decode(output(last, end=FinishReason.STOP))[0]
        assert (text == "The tide") == included
        assert not decoder.stopped
        assert decoder.released == len(before) + 1


def test_log_probabilities_name_the_token_taken_and_the_likeliest_in_order(tokenizer: Any) -> None:
    taken, first, second = tokenizer.encode("a")[0], tokenizer.encode("b")[0], tokenizer.encode("c")[0]
    decoder = decoder_of(tokenizer, logprobs=2)
    table = LogprobsLists(np.array([[taken, first, second]]), np.array([[-4.0, -0.5, -1.5]]), np.array([9]))
    made = output(taken, logprobs=table)
    decoder.decode(made)
    (position,) = decoder.logprobs(made, 1)
    assert position.token == TokenLogprob(taken, "a", -4.0)
    assert position.top == (TokenLogprob(first, "b", -0.5), TokenLogprob(second, "c", -1.5))
    table = LogprobsLists(np.array([[second, first, second]]), np.array([[-1.5, -0.5, -1.5]]), np.array([2]))
    (position,) = decoder.logprobs(output(second, logprobs=table), 1)
    assert position.token == TokenLogprob(second, "c", -1.5)
    assert [entry.text for entry in position.top] == ["b", "c"]
    assert decoder_of(tokenizer).logprobs(made, 1) == ()


def test_log_probabilities_that_were_given_out_are_forgotten(tokenizer: Any) -> None:
    """All but those from which a character is completed: an answer of 32,000 tokens would hold 150 MB."""
    tokens = tokenizer.encode("sea 🌊! " * 9)
    decoder = decoder_of(tokenizer, logprobs=1)
    before = sum(type(one) is Logprob for one in gc.get_objects())
    text = ""
    for token in tokens:
        made = output(token, logprobs=LogprobsLists(np.array([[token, 5]]), np.array([[-1.0, -2.0]]), np.array([1])))
        decoder.decode(made)
        (position,) = decoder.logprobs(made, 1)
        text += position.token.text
    assert text == "sea 🌊! " * 9
    assert sum(type(one) is Logprob for one in gc.get_objects()) < before + 18
