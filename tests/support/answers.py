"""Answers of echo stages and of tiny Llamas: what they must be, and how to read them from a bare socket."""

from __future__ import annotations

from pathlib import Path

import numpy

from omni_actors.client.streams import OmniRequestOutput
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import CoordinatorToClient, Credit, Done, Failed
from omni_actors.transport.link import wire_size
from omni_actors.transport.sockets import drain, try_send
from tests.support.waiting import until

SAMPLES = 480  # of audio for each token


def assert_echo(output: OmniRequestOutput, text: str) -> None:
    """Checks that text and audio repeat the prompt, in order."""
    assert output.text == text
    assert output.token_ids == list(text.encode())
    levels = numpy.frombuffer(text.encode(), numpy.uint8) / 256
    assert numpy.array_equal(output.audio, numpy.repeat(levels, SAMPLES).astype(numpy.float32))
    assert output.sample_rate == 24_000


def collect(dealer: object, got: list, ends: int = 1, seconds: float = 10.0) -> list:
    """Receives messages into `got` until `ends` terminal ones have come, granting credit for them."""
    decoder: Decoder = Decoder(CoordinatorToClient)

    def enough() -> bool:
        messages = drain(dealer, 10_000)
        if messages:
            credit = Credit(messages=len(messages), bytes=sum(wire_size(frames) for frames in messages))
            try_send(dealer, encode(Header(""), credit))
        got.extend(decoder.decode(frames) for frames in messages)
        return sum(isinstance(envelope.body, Done | Failed) for envelope in got) >= ends

    until(enough, seconds, f"{ends} terminal messages")
    return got


def llama_answer(checkpoint: Path, text: str, count: int) -> tuple[list[int], str, int]:
    """What transformers answers to a user with so many tokens: tokens, text, and the length of the prompt."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    made = LlamaForCausalLM.from_pretrained(checkpoint).generate(ids, max_new_tokens=count, do_sample=False)
    tokens = made[0, ids.shape[1] :].tolist()
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True), ids.shape[1]
