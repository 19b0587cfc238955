"""Tests of Z-Image's denoising stage and its VAE, in this process, against diffusers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_actors.engine import diffusion_scheduler
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.diffusion_runner import StepResult
from omni_actors.engine.diffusion_worker import DiffusionOutput
from omni_actors.engine.models.pictures.denoising import Denoiser, Picture
from omni_actors.engine.models.z_image.dit_stage import ZImageDit
from omni_actors.engine.tensors import to_host, to_torch
from omni_actors.errors import (
    ConfigError,
    ErrorCode,
    InvalidPayload,
    InvalidRequest,
    ModelOutputInvalid,
    OmniError,
    StartupError,
)
from omni_actors.protocol.codec import Envelope
from omni_actors.protocol.header import Header
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.stage import OpenRequest
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import (
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    ImageEvent,
    LatentsEvent,
    ProgressEvent,
    StageInputs,
    StageRequest,
)
from tests.support.picture_wishes import Wish, engine, request, run
from tests.support.reference import one_thread
from tests.support.stage import ROUTE, StageUnderTest, failed
from tests.support.z_image_engine import WISHES, Painter
from tools.checkpoints.pictures import Z_IMAGE

FOX = WISHES[0]


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(Z_IMAGE.tiny_pipeline())


@pytest.fixture(scope="module")
def dit(tiny_z_image: Path) -> Iterator[DiffusionEngine]:
    # A step takes two or three of the wishes' sequences.
    made = engine(tiny_z_image, "dit", max_num_batched_tokens=1100)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def vae(tiny_z_image: Path) -> Iterator[DiffusionEngine]:
    made = engine(tiny_z_image, "vae")
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def together(dit: DiffusionEngine, painter: Painter) -> list[EngineEvent]:
    """The events of all wishes, one of which joins before every third step."""
    waiting = list(WISHES)

    def join(step: int) -> None:
        if waiting and step % 3 == 0:
            wish = waiting.pop(0)
            dit.start(request(wish), painter.inputs(wish))

    return run(dit, join)


def latents_of(events: list[EngineEvent], name: str) -> list[HostTensor]:
    return [e.latents for e in events if isinstance(e, LatentsEvent) and e.request_id == name and not e.preview]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-5 * other.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: f"{wish.steps} steps")
def test_mixed_pictures_that_join_one_after_the_other_are_those_of_diffusers(wish, together, painter):
    (latents,) = latents_of(together, wish.name)
    assert close(to_torch(latents), painter.latents(wish))


def test_each_picture_reports_every_step_and_shows_the_previews_it_was_asked_for(together):
    for wish in WISHES:
        own = [event for event in together if event.request_id == wish.name]
        steps = [(event.step, event.steps) for event in own if isinstance(event, ProgressEvent)]
        assert steps == ([(step, wish.steps) for step in range(1, wish.steps + 1)] if wish.steps > 1 else [])
        assert sum(isinstance(event, LatentsEvent) and event.preview for event in own) == wish.previews
        assert isinstance(own[-1], FinishedEvent)


def test_a_picture_is_the_same_alone(dit, painter, together):
    dit.start(request(FOX), painter.inputs(FOX))
    (alone,) = latents_of(run(dit), FOX.name)
    (packed,) = latents_of(together, FOX.name)
    assert close(to_torch(alone), to_torch(packed))


def test_an_aborted_picture_leaves_nothing_behind_and_the_others_go_on(dit, painter):
    doomed = Wish("doomed", "the end", 96, 96, 40, 3.0)
    dit.start(request(doomed), painter.inputs(doomed))
    dit.start(request(FOX), painter.inputs(FOX))

    def stop(step: int) -> None:
        if step == 3:
            dit.abort("doomed")
            assert dit.counts()["requests"] == 1

    events = run(dit, stop)
    assert not latents_of(events, "doomed")
    (latents,) = latents_of(events, FOX.name)
    assert close(to_torch(latents), painter.latents(FOX))
    assert not any(dit.counts().values())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which requests the device computes, step by step."""
    computed: list[list[str]] = []
    step = ZImageDit.step

    def watched(self: ZImageDit, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        computed.append([job_id.partition("/")[0] for job_id in request_ids])
        return step(self, request_ids)

    monkeypatch.setattr(ZImageDit, "step", watched)
    return computed


def test_an_aborted_picture_is_in_no_further_step(dit, painter, steps):
    doomed = Wish("doomed", "the end", 32, 32, 100, 3.0)
    for wish in (doomed, FOX):
        dit.start(request(wish), painter.inputs(wish))
    run(dit, lambda step: dit.abort("doomed") if step == 3 else None)
    assert steps == [["doomed", "fox"]] * 3 + [["fox"]] * (FOX.steps - 3)
    assert not any(dit.counts().values())


def test_a_picture_past_its_deadline_is_in_no_further_step(dit, painter, steps):
    wish = Wish("late", "the end", 32, 32, 100, 3.0)
    stage = StageUnderTest("code2wav", engine=dit)
    opened = OpenRequest(route=ROUTE, params=request(wish).params, seed=wish.seed)
    assert not stage.actor.receive(Envelope(Header("expect", "late", deadline=1010.0), opened))
    stage.chunk("late", tensors=dict(painter.inputs(wish).tensors), final=True)
    with one_thread():
        for _ in range(3):
            assert not stage.actor.tick()
            stage.actor.step()
        stage.clock.now = 1010.0
        assert failed(stage.actor.tick()).code is ErrorCode.DEADLINE_EXCEEDED
        stage.actor.step()
    assert steps == [["late"]] * 3
    assert not any(dit.counts().values())


def test_a_picture_that_comes_during_a_long_step_is_in_the_next_one(tiny_z_image, painter, steps, monkeypatch):
    """Nothing is queued behind a long step, so what comes while the engine waits for it is considered at its end."""
    monkeypatch.setattr(diffusion_scheduler, "LONG_STEP_TOKENS", 100)
    awaited = []
    attachments = DiffusionOutput.attachments
    monkeypatch.setattr(DiffusionOutput, "attachments", lambda self: (awaited.append(self), attachments(self))[1])
    large, small = Wish("large", "the blue ship", 256, 128, 6, 0.0), Wish("small", "x", 32, 32, 2, 0.0)
    ahead = engine(tiny_z_image, "dit", asynchronous=True, max_num_batched_tokens=100)
    ahead.start(request(large), painter.inputs(large))

    def join(step: int) -> None:
        if len(awaited) == 3 and "small" not in itertools.chain(*steps):
            ahead.start(dataclasses.replace(request(small), priority=-1), painter.inputs(small))

    events = run(ahead, join)
    assert steps == [["large"]] * 3 + [["small"]] * 2 + [["large"]] * 3
    for wish in (large, small):
        (latents,) = latents_of(events, wish.name)
        assert close(to_torch(latents), painter.latents(wish))
    assert not any(ahead.counts().values())
    ahead.shutdown()


def test_a_picture_that_begins_again_between_two_steps_of_others_is_the_same(dit, painter, steps):
    lost = Wish("lost", "A red fox in the snow", 64, 64, 12, 2.0)
    for wish in (lost, FOX):
        dit.start(request(wish), painter.inputs(wish))

    def replay(step: int) -> None:
        if step == 5:
            dit.abort("lost")
            dit.start(request(lost), painter.inputs(lost))

    events = run(dit, replay)
    assert sum("lost" in together for together in steps) == 5 + 12, "from its first step"
    for wish in (lost, FOX):
        (latents,) = latents_of(events, wish.name)
        assert close(to_torch(latents), painter.latents(wish))


@pytest.mark.parametrize("previews", [0, 10])
def test_latents_that_turn_into_nan_fail_their_request_alone(dit, painter, monkeypatch, previews):
    sick = Wish("sick", "x", 48, 48, 20, 3.0, previews)
    step = Denoiser.step

    def poisoned(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        for picture in pictures:
            if picture.spec.num_steps == sick.steps and picture.done == 4:
                picture.patches = torch.full_like(picture.patches, torch.nan)
        return step(self, pictures)

    monkeypatch.setattr(Denoiser, "step", poisoned)
    for wish in (sick, FOX):
        dit.start(request(wish), painter.inputs(wish))
    events = run(dit)
    (error,) = [event.error for event in events if isinstance(event, ErrorEvent)]
    assert isinstance(error, ModelOutputInvalid)
    assert not latents_of(events, "sick")
    shown = [event for event in events if isinstance(event, LatentsEvent) and event.request_id == "sick"]
    assert all(torch.isfinite(to_torch(event.latents)).all() for event in shown)
    (latents,) = latents_of(events, FOX.name)
    assert close(to_torch(latents), painter.latents(FOX))
    assert not any(dit.counts().values())


def test_where_memory_is_for_one_picture_they_come_one_after_the_other(tiny_z_image, painter):
    small = engine(tiny_z_image, "dit", budget=1)
    for wish in WISHES[:2]:
        small.start(request(wish), painter.inputs(wish))
    events = list(small.step())
    assert small.counts()["deferred"] == 1
    events += run(small)
    assert len([event for event in events if isinstance(event, FinishedEvent)]) == 2
    assert not any(small.counts().values())
    small.shutdown()


@pytest.mark.parametrize(
    ("params", "inputs", "kind", "field", "message"),
    [
        ({"width": 100}, None, InvalidRequest, "width", "multiple of 16"),
        ({"height": 50_000}, None, InvalidRequest, "height", "from 16 to 1024"),
        ({"num_steps": 100_000}, None, InvalidRequest, "num_steps", "from 1 to 1000"),
        ({"negative_prompt": "no"}, None, InvalidRequest, "negative_prompt", "no parameter"),
        ({}, {"states": torch.full((3, 64), float("nan"))}, InvalidPayload, None, "NaN"),
        ({}, {"states": torch.zeros(3, 63)}, InvalidPayload, None, r"\[n >= 1, 64\]"),
        ({}, {}, InvalidPayload, None, "needs the hidden states 'states'"),
        ({"guidance_scale": 2.0}, {"states": torch.zeros(3, 64)}, InvalidPayload, None, "'negative_states'"),
        ({}, {"states": torch.zeros(255, 64)}, OmniError, None, "has 255 tokens"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(dit, painter, params, inputs, kind, field, message):
    given = painter.inputs(FOX)
    if inputs is not None:
        given = StageInputs(tensors={name: to_host(tensor) for name, tensor in inputs.items()})
    with pytest.raises(kind, match=message) as caught:
        dit.start(request(FOX, **params), given)
    assert caught.value.field == field
    assert not any(dit.counts().values())


def decoded(vae: DiffusionEngine, name: str, latents: list[torch.Tensor]) -> list[EngineEvent]:
    """Events of a request with these latents, all but the last of which are previews'."""
    first, *rest = map(to_host, latents)
    vae.start(StageRequest(name, StageParams(), seed=0), StageInputs(tensors={"latents": first}, complete=not rest))
    for index, each in enumerate(rest):
        vae.extend(name, each, complete=index == len(rest) - 1)
    return run(vae)


def test_the_vae_makes_the_pictures_of_diffusers_and_previews_before_them(vae, painter):
    events = decoded(vae, "fox", [torch.zeros(4, 12, 8), painter.latents(FOX)])
    pictures = [event for event in events if isinstance(event, ImageEvent)]
    assert [picture.preview for picture in pictures] == [True, False]
    pixels = to_torch(pictures[1].pixels).numpy().astype(int)
    expected = painter.pixels(FOX).astype(int)
    assert pixels.shape == (96, 64, 3)
    assert np.abs(pixels - expected).max() <= 1
    assert isinstance(events[-1], FinishedEvent)
    assert not any(vae.counts().values())


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (torch.full((4, 8, 8), float("inf")), "NaN or infinite"),
        (torch.zeros(16, 8, 8), r"\[4, height, width\]"),
        (torch.zeros(4, 6250, 6250), "a picture of 2500000000 pixels"),
    ],
)
def test_the_vae_refuses_latents_that_are_not_its_own(vae, latents, message):
    with pytest.raises(InvalidPayload, match=message):
        decoded(vae, "bad", [latents])
    assert not any(vae.counts().values())


def test_stages_without_weights_make_pictures_all_the_same(tiny_z_image, painter):
    # That is how a GPU is measured without a published checkpoint.
    for stage in ("dit", "vae"):
        made = engine(tiny_z_image, stage, load_format="dummy")
        if stage == "dit":
            made.start(request(FOX), painter.inputs(FOX))
            (latents,) = latents_of(run(made), FOX.name)
            assert to_torch(latents).std() > 0.1
        else:
            assert isinstance(decoded(made, "fox", [painter.latents(FOX)])[0], ImageEvent)
        made.shutdown()


@pytest.mark.parametrize("part", ["transformer", "scheduler", "vae", "text_encoder"])
def test_a_checkpoint_without_one_of_its_folders_is_refused_before_anything_is_loaded(tiny_z_image, tmp_path, part):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_z_image, damaged, ignore=shutil.ignore_patterns(part))
    with pytest.raises((ConfigError, StartupError), match=part):
        engine(damaged, "vae" if part == "vae" else "dit")


def test_a_checkpoint_of_another_pipeline_is_refused_with_what_there_is(tiny_z_image, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"}))
    with pytest.raises(ConfigError, match=r"'OtherPipeline'; known are .*ZImagePipeline"):
        engine(tmp_path, "dit")
