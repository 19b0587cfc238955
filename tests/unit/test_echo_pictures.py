"""Echo stages that draw: the same picture in one stage or two, whatever else runs, and after a new start."""

from __future__ import annotations

import pytest

from omni_actors.config import Modality, StageConfig, StageKind
from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.stage import LATENTS
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.echo import EchoEngine
from omni_actors.stage.echo_pictures import preview_steps
from omni_actors.stage.engine_interface import (
    EngineEvent,
    FinishedEvent,
    ImageEvent,
    LatentsEvent,
    ProgressEvent,
    StageInputs,
    StageRequest,
)


def engine(*outputs: Modality, **options: object) -> EchoEngine:
    return EchoEngine(StageConfig(name="dit", kind=StageKind.ECHO, outputs=list(outputs), engine=options))


def events_of(stage: EchoEngine, name: str = "r1", text: str = "fox", seed: int = 3, **params: object) -> list:
    request = StageRequest(name, StageParams(**params), seed)
    stage.start(request, StageInputs(token_ids=list(text.encode())))
    return finished(stage)


def finished(stage: EchoEngine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while stage.runnable():
        events += stage.step()
    return events


def pictures(events: list[EngineEvent]) -> list[HostTensor]:
    return [event.pixels for event in events if isinstance(event, ImageEvent) and not event.preview]


@pytest.mark.parametrize(
    ("steps", "previews", "places"),
    [(8, 3, {2, 4, 6}), (8, 0, set()), (1, 3, set()), (2, 5, {1}), (50, 1, {25}), (3, 2, {1, 2})],
)
def test_previews_are_spread_over_the_steps_and_leave_out_the_last(steps: int, previews: int, places: set) -> None:
    assert preview_steps(steps, previews) == places


def test_every_step_is_progress_and_the_last_makes_the_picture() -> None:
    events = events_of(engine(Modality.IMAGE), num_steps=4, previews=1, width=16, height=8)
    progress = [event for event in events if isinstance(event, ProgressEvent)]
    assert [(event.step, event.steps) for event in progress] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [type(event) for event in events] == [
        ProgressEvent,
        ProgressEvent,
        ImageEvent,
        ProgressEvent,
        ProgressEvent,
        ImageEvent,
        FinishedEvent,
    ]
    (picture,) = pictures(events)
    assert picture.validate().shape == (8, 16, 3)
    assert events[-1].output_tokens == 2


def test_two_stages_make_the_picture_that_one_makes() -> None:
    options = {"num_steps": 4, "previews": 1, "width": 16}
    (alone,) = pictures(events_of(engine(Modality.IMAGE), **options))
    latents = [event for event in events_of(engine(latents=True), **options) if isinstance(event, LatentsEvent)]
    assert [event.preview for event in latents] == [True, False]
    decoder = engine(Modality.IMAGE)
    first, last = latents
    decoder.start(StageRequest("r1", StageParams(), 3), StageInputs(tensors={LATENTS: first.latents}, complete=False))
    (preview,) = decoder.step()
    assert isinstance(preview, ImageEvent)
    assert preview.preview
    assert not decoder.runnable()
    assert decoder.waits_for_input("r1"), "for more latents"
    decoder.extend("r1", last.latents, complete=True)
    assert pictures(finished(decoder)) == [alone]
    assert decoder.counts() == {"requests": 0}


def test_pictures_differ_with_what_is_asked_for_and_not_with_what_runs_at_the_same_time() -> None:
    stage = engine(Modality.IMAGE)
    alone = pictures(events_of(stage))
    assert pictures(events_of(stage)) == alone
    for change in ({"text": "fix"}, {"seed": 4}, {"guidance_scale": 2.0}, {"negative_prompt": "fog"}):
        assert pictures(events_of(stage, **change)) != alone
    stage.start(StageRequest("other", StageParams(num_steps=9), 1), StageInputs(token_ids=[1]))
    assert alone[0] in pictures(events_of(stage))


def test_bad_sizes_and_latents_are_refused_and_leave_nothing_behind() -> None:
    stage = engine(Modality.IMAGE)
    with pytest.raises(InvalidRequest, match="must be a multiple of 8 from 8 to 4096; got 100"):
        events_of(stage, width=100)
    with pytest.raises(InvalidRequest, match="An echo stage takes its input at once"):
        stage.extend("r1", HostTensor(DType.F32, (4, 1, 1), bytes(16)), complete=True)
    wrong = StageInputs(tensors={LATENTS: HostTensor(DType.F32, (3, 1, 1), bytes(12))})
    with pytest.raises(InvalidPayload, match=r"decodes f32 \[4, height, width\]; got \[3, 1, 1\]"):
        stage.start(StageRequest("r1", StageParams(), 3), wrong)
    assert stage.counts() == {"requests": 0}
