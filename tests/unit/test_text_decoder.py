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
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from omni_actors.engine.adapter import TextDecoder
from omni_actors.engine.core import make_request


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return get_tokenizer(str(tiny_checkpoint))


def decoder_of(tokenizer: Any, **params: Any) -> TextDecoder:
    return TextDecoder(tokenizer, make_request("r", [1, 2], SamplingParams(**params)))


def output(token: int, logprobs: LogprobsLists | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("r", [token], new_logprobs=logprobs)


@pytest.mark.parametrize("stop", ["🌊", "🌊!"])
def test_a_token_within_a_character_waits_for_the_character(tokenizer: Any, stop: str) -> None:
    """The first bytes of a stop string have no text, and are not part of the answer either."""
    assert len(tokenizer.encode("🌊")) > 1
    decoder = decoder_of(tokenizer, stop=[stop])
    given, released = "", 0
    for token in tokenizer.encode("sea 🌊! more"):
        given += decoder.decode(output(token))[0]
        released = max(released, decoder.released)
        if decoder.stopped:
            break
    assert decoder.stopped
    assert given == "sea "
    assert released == len(tokenizer.encode("sea "))


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
