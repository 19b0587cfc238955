"""What the thinker of Qwen3-Omni streams to its talker: each id and each row of media once."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from omni_actors.engine.models.qwen3_omni.thinker import SPEC, TokenOutputs
from omni_actors.engine.rows import to_torch
from omni_actors.engine.workers.base import attach

PROMPT = [5, 9, 9, 9, 6, 9, 7]
PLACES = [1, 2, 3, 5]  # of media


def output(start: int, end: int, *tokens: int, finished: bool = False) -> EngineCoreOutput:
    """Positions `start` to `end` of the prompt have been computed; row k of media has the value of its place."""
    places = torch.tensor([place for place in PLACES if start <= place < end], dtype=torch.int64)
    part: dict[str, Any] = {"media_rows": places[:, None].float(), "places": places, "end": end}
    if start == 0:
        part["mrope_positions"] = torch.arange(len(PROMPT)).expand(3, -1)
    reason = FinishReason.LENGTH if finished else None
    made = EngineCoreOutput(request_id="r", new_token_ids=list(tokens), finish_reason=reason)
    attach(made, part)
    return made


def test_rows_of_positions_that_are_computed_twice_come_once():
    outputs = TokenOutputs("r", PROMPT, decoder=None, streams=True)
    assert outputs.stream(output(0, 3), 0, final=False) is None
    assert outputs.stream(output(0, 2), 0, final=False) is None, "preempted, and computed again"
    assert outputs.stream(output(2, 6), 0, final=False) is None
    event = outputs.stream(output(6, 7, 20), 1, final=False)
    assert to_torch(event.tensors["media_rows"]).flatten().tolist() == PLACES
    assert list(event.token_ids) == [*PROMPT, 20]
    assert event.scalars == {"prompt_tokens": len(PROMPT)}
    assert outputs.stream(output(7, 8, 21), 1, final=False) is None, "its text is held back"
    last = outputs.stream(output(8, 9, 22, finished=True), 3, final=True)
    assert (list(last.token_ids), last.start, last.final) == ([21], len(PROMPT) + 1, True)


def test_a_second_of_video_has_the_positions_that_the_checkpoint_says(tiny_qwen3_checkpoint):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_qwen3_checkpoint)
    assert SPEC.media.positions_per_second(config) == config.thinker_config.position_id_per_seconds == 13
