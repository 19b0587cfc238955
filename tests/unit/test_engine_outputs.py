"""What the tensors of a picture's step become, and what a stage counts as generated: a frame of codes is one token."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason

from omni_actors.engine.diffusion import picture_events
from omni_actors.engine.models.frame_talker import FrameOutputs
from omni_actors.engine.models.qwen3_omni.thinker import TokenOutputs
from omni_actors.engine.rows import to_torch
from omni_actors.engine.workers.base import attach
from omni_actors.errors import ModelOutputInvalid
from omni_actors.protocol.fields import ReplicaId
from omni_actors.stage.engine_interface import ImageEvent, LatentsEvent, OutputEvent, StreamEvent, TextEvent
from omni_actors.stage.meter import StageMeter


def test_a_step_shows_latents_as_a_preview_and_the_last_one_gives_those_of_the_picture():
    (shown,) = picture_events("a", {"preview": torch.zeros(4, 2, 2)}, preview=False)
    (last,) = picture_events("a", {"latents": torch.ones(4, 2, 2)}, preview=False)
    assert isinstance(shown, LatentsEvent)
    assert shown.preview
    assert isinstance(last, LatentsEvent)
    assert not last.preview
    assert torch.equal(to_torch(last.latents), torch.ones(4, 2, 2))


def test_a_picture_is_a_preview_if_its_job_is_one():
    for preview in (True, False):
        (event,) = picture_events("a", {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}, preview=preview)
        assert isinstance(event, ImageEvent)
        assert event.preview is preview


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"latents": torch.tensor([1.0, float("nan")])}, "NaN or infinite"),
        ({"preview": torch.tensor([1.0, float("inf")])}, "NaN or infinite"),
        ({"preview": torch.tensor([float("-inf"), 1.0], dtype=torch.bfloat16)}, "NaN or infinite"),
        ({"image": torch.zeros(8, 8, 3)}, "float32"),
        ({"image": torch.zeros(8, 8, dtype=torch.uint8)}, r"\[8, 8\]"),
    ],
)
def test_what_cannot_be_shown_is_an_error_of_the_model(result, message):
    with pytest.raises(ModelOutputInvalid, match=message):
        picture_events("a", result, preview=False)


END = 99
SAMPLED = 14  # tokens of a request, with the last, which has neither frame nor sound


def steps(*, frames: bool = False) -> Iterable[EngineCoreOutput]:
    for index in range(SAMPLED):
        last = index == SAMPLED - 1
        output = EngineCoreOutput("r", [END if last else index], finish_reason=FinishReason.STOP if last else None)
        if frames:
            attach(output, {"codes": [index, *range(15)]})
        yield output


def counted(events: Iterable[OutputEvent], outputs: tuple[str, ...] = ()) -> int:
    meter = StageMeter(ReplicaId("talker", 0, 1))
    timings = meter.opened(0, has_input=True)
    for event in events:
        meter.output(timings, event, outputs)
    return meter.output_tokens


@pytest.mark.parametrize("lead", [0, 3], ids=["a text", "a clip that is continued"])
def test_a_frame_counts_once_and_the_frames_of_a_clip_do_not(lead: int) -> None:
    outputs = FrameOutputs("r")
    outputs.lead([7] * 16 * lead)
    events = [event for output in steps(frames=True) for event in outputs.convert(output)]
    assert sum(len(event.token_ids) for event in events if isinstance(event, StreamEvent)) == 16 * (SAMPLED - 1 + lead)
    assert counted(events) == SAMPLED


@pytest.mark.parametrize("modalities", [("text",), ()])
def test_a_thinker_that_streams_its_text_counts_it_once_and_not_its_prompt(modalities: tuple[str, ...]) -> None:
    outputs = TokenOutputs("r", [1, 2, 3], decoder=None, streams=True)
    stream: list[OutputEvent] = []
    for number, output in enumerate(steps()):
        stream.append(TextEvent("r", "x", output.new_token_ids))
        event = outputs.stream(output, number + 1, final=number == SAMPLED - 1)
        stream += [event] if event is not None else []
    assert counted(stream, modalities) == SAMPLED
