"""Answers of echo stages: what they must be, and how to read them from a bare socket."""

from __future__ import annotations

import numpy

from omni_actors.client.streams import OmniRequestOutput
from omni_actors.protocol.client import CoordinatorToClient, Done
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.common import Credit, Failed
from omni_actors.protocol.header import Header
from omni_actors.transport.credit import wire_size
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
