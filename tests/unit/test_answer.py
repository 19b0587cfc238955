"""Usage in HTTP responses."""

from __future__ import annotations

import numpy
import pytest

from omni_actors.http_server.answer import usage_of
from omni_actors.http_server.images import image_usage
from omni_actors.protocol.messages import Description, FinishReason, StageStatus, StageUsage

# Tokens read and written by each stage. A vocoder counts steps, a stage that changes audio counts pieces.
WORK = {"prompt": (0, 5), "thinker": (5, 7), "talker": (9, 40), "code2wav": (40, 100), "leveller": (3, 3)}


def description(order: list[str], outputs: dict[str, str]) -> Description:
    stages = tuple(StageStatus(name, replica, 1, "ready", 1, 0) for name in order for replica in (0, 1))
    return Description(
        "p", "m", tuple(outputs), (), 24_000, True, in_flight=1, max_in_flight=1, stages=stages, outputs=outputs
    )


def usage(order: list[str], outputs: dict[str, str], ran: list[str]) -> dict:
    reported = {
        name: StageUsage(FinishReason.STOP, input_tokens=WORK[name][0], output_tokens=WORK[name][1]) for name in ran
    }
    return usage_of([reported], description(order, outputs))


@pytest.mark.parametrize(
    ("order", "outputs", "audio_tokens"),
    [
        (["prompt", "thinker", "talker", "code2wav"], {"text": "thinker", "audio": "code2wav"}, 40),
        (["prompt", "thinker", "talker", "code2wav", "leveller"], {"text": "thinker", "audio": "leveller"}, 40),
        (["prompt", "talker", "code2wav"], {"audio": "code2wav"}, 40),
        (["prompt", "thinker", "code2wav"], {"text": "thinker", "audio": "code2wav"}, 0),
        (["prompt", "thinker"], {"text": "thinker"}, 0),
    ],
)
def test_audio_tokens_are_those_generated_for_the_audio(
    order: list[str], outputs: dict[str, str], audio_tokens: int
) -> None:
    shown = usage(order, outputs, order)
    text_tokens = 7 if "text" in outputs else 0
    assert shown["completion_tokens_details"] == {"text_tokens": text_tokens, "audio_tokens": audio_tokens}
    assert shown["completion_tokens"] == text_tokens + audio_tokens
    assert shown["prompt_tokens"] == (5 if "text" in outputs else 0)
    assert shown["total_tokens"] == shown["prompt_tokens"] + shown["completion_tokens"]
    assert list(shown["stages"]) == order


def test_an_answer_without_audio_has_no_audio_tokens() -> None:
    order = ["prompt", "thinker", "talker", "code2wav"]
    shown = usage(order, {"text": "thinker", "audio": "code2wav"}, ["prompt", "thinker"])
    assert shown["completion_tokens_details"] == {"text_tokens": 7, "audio_tokens": 0}
    assert list(shown["stages"]) == ["prompt", "thinker"]


def test_a_picture_counts_what_the_encoder_read_of_texts_and_of_pictures_apart() -> None:
    reported = {
        "prompt": StageUsage(FinishReason.STOP, output_tokens=30),
        "text_encoder": StageUsage(FinishReason.STOP, input_tokens=30, picture_tokens=16),
        "dit": StageUsage(FinishReason.STOP, input_tokens=90, output_tokens=8),
    }
    shown = image_usage(
        reported, [numpy.zeros((64, 40, 4), numpy.uint8)], description(list(reported), {"image": "dit"})
    )
    assert (shown["input_tokens"], shown["output_tokens"], shown["total_tokens"]) == (30, 12, 42)
    assert shown["input_tokens_details"] == {"text_tokens": 14, "image_tokens": 16}
