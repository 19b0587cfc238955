"""Tests of Qwen-Image's denoising stage, its VAE and its VAE encoder, in this process, against diffusers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.diffusion_runner import StepResult
from omni_actors.engine.models.diffusers_layout import part_config
from omni_actors.engine.models.pictures.denoising import Denoiser, Picture
from omni_actors.engine.models.qwen_image.dit import QwenImageNetwork
from omni_actors.engine.models.qwen_image.dit_stage import QwenImageDit, dit_config
from omni_actors.engine.models.qwen_image.prefix import Prefix
from omni_actors.engine.tensors import to_host, to_torch
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, ModelOutputInvalid, OmniError, StartupError
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import (
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    ImageEvent,
    LatentsEvent,
    ProgressEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
)
from tests.support.picture_wishes import engine, equal, request, run
from tests.support.qwen_image import REFERENCE_SIZE, WISHES, Painter
from tools.checkpoints.pictures import QWEN_IMAGE

FOX, EDIT, THREE = WISHES[0], WISHES[3], WISHES[4]
BUDGET = 110  # tokens of a step


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(QWEN_IMAGE.tiny_pipeline())


@pytest.fixture(scope="module")
def dit(tiny_qwen_image: Path) -> Iterator[DiffusionEngine]:
    # A step takes two or three of the wishes' pictures.
    made = engine(tiny_qwen_image, "dit", max_num_batched_tokens=1001)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def small_steps(tiny_qwen_image: Path) -> Iterator[DiffusionEngine]:
    # A step takes one of the pictures that others are made from.
    made = engine(tiny_qwen_image, "dit", max_num_batched_tokens=BUDGET)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def encoder(tiny_qwen_image: Path) -> Iterator[DiffusionEngine]:
    made = engine(tiny_qwen_image, "vae_encoder")
    yield made
    made.shutdown()


def latents_of(events: list[EngineEvent], name: str) -> torch.Tensor:
    (latents,) = [e.latents for e in events if isinstance(e, LatentsEvent) and e.request_id == name and not e.preview]
    return to_torch(latents)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-5 * other.abs().max().clamp(min=1.0))


def test_mixed_pictures_that_join_one_after_the_other_are_those_of_diffusers_and_the_same_alone(dit, painter):
    waiting = list(WISHES)

    def join(step: int) -> None:
        if waiting and step % 3 == 0:
            wish = waiting.pop(0)
            dit.start(request(wish), painter.inputs(wish))

    together = run(dit, join)
    for wish in WISHES:
        latents = latents_of(together, wish.name)
        assert close(latents, painter.latents(wish)), wish
        dit.start(request(wish), painter.inputs(wish))
        assert close(latents_of(run(dit), wish.name), latents), wish
    assert not any(dit.counts().values())


def test_with_one_place_every_picture_is_computed_alone_and_has_the_same_bits(tiny_qwen_image, painter, monkeypatch):
    batches: list[int] = []
    step = Denoiser.step

    def watched(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        batches.append(len(pictures))
        return step(self, pictures)

    fixed = engine(tiny_qwen_image, "dit", max_num_seqs=1)
    monkeypatch.setattr(Denoiser, "step", watched)
    found = []
    for wishes in ([EDIT], [FOX, EDIT, THREE]):
        for wish in wishes:
            fixed.start(request(wish), painter.inputs(wish))
        found.append(latents_of(run(fixed), EDIT.name))
    assert set(batches) == {1}
    assert torch.equal(*found)
    fixed.shutdown()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """For each step of the stage, jobs' names with the tokens that it computes of each; the last one is under way."""
    steps: list[list[tuple[str, int]]] = [[]]
    step, extend, denoise = QwenImageDit.step, QwenImageNetwork.extend, Denoiser.step

    def counted(self: QwenImageDit, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        results = step(self, request_ids)
        steps.append([])
        return results

    def extended(self: QwenImageNetwork, prefix: Prefix, end: int) -> None:
        if end > prefix.done:
            steps[-1].append(("edit" if prefix.given.references else "text", end - prefix.done))
        extend(self, prefix, end)

    def denoised(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        steps[-1].extend((str(each.spec.seed), each.spec.tokens * len(each.conditions)) for each in pictures)
        return denoise(self, pictures)

    monkeypatch.setattr(QwenImageDit, "step", counted)
    monkeypatch.setattr(QwenImageNetwork, "extend", extended)
    monkeypatch.setattr(Denoiser, "step", denoised)
    return steps


def test_what_pictures_are_made_from_is_computed_in_steps_of_the_budget_between_those_of_others(
    small_steps, painter, computed
):
    long = replace(FOX, steps=200)
    waiting = [replace(request(long), priority=-1)]
    small_steps.start(request(THREE), painter.inputs(THREE))

    def join(step: int) -> None:
        if waiting and small_steps.counts()["prefix_tokens"]:
            small_steps.start(waiting.pop(), painter.inputs(long))

    events = run(small_steps, join)
    for wish in (long, THREE):
        assert close(latents_of(events, wish.name), painter.latents(wish))
    whole = sum(inputs.shape[0] for name, inputs in painter.inputs(THREE).tensors.items() if name.endswith("states"))
    prepared = [sum(tokens for name, tokens in step if name == "edit") for step in computed]
    assert sum(prepared) == whole + 2 * sum(one[0].numel() for one in painter.references(THREE))
    assert all(sum(tokens for _, tokens in step) <= BUDGET for step in computed)
    parts = [number for number, tokens in enumerate(prepared) if tokens]
    begins = next(number for number, step in enumerate(computed) if str(long.seed) in dict(step))
    assert parts[0] < begins < parts[-1], "what comes meanwhile need not wait for all of it"
    assert not any(small_steps.counts().values())


def test_an_edit_that_ends_while_it_is_prepared_leaves_nothing_and_the_others_go_on(
    small_steps, painter, computed, monkeypatch
):
    for wish in (FOX, THREE):
        small_steps.start(request(wish), painter.inputs(wish))

    def leave(step: int) -> None:
        if small_steps.counts()["prefix_tokens"] > 100:
            small_steps.abort(THREE.name)

    events = run(small_steps, leave)
    assert not [event for event in events if event.request_id == THREE.name]
    assert close(latents_of(events, FOX.name), painter.latents(FOX))
    extend = QwenImageNetwork.extend

    def failing(self: QwenImageNetwork, prefix: Prefix, end: int) -> None:
        if prefix.done and prefix.given.references:
            raise RuntimeError("no more")
        extend(self, prefix, end)

    monkeypatch.setattr(QwenImageNetwork, "extend", failing)
    for wish in (FOX, THREE):
        small_steps.start(request(wish), painter.inputs(wish))
    events = run(small_steps)
    (error,) = [event for event in events if isinstance(event, ErrorEvent)]
    assert error.request_id == THREE.name
    assert "no more" in str(error.error)
    assert close(latents_of(events, FOX.name), painter.latents(FOX))
    assert not any(small_steps.counts().values())


def test_where_memory_is_for_one_edit_they_come_one_after_the_other(tiny_qwen_image, painter):
    small = engine(tiny_qwen_image, "dit", budget=1, max_num_batched_tokens=BUDGET)
    for wish in (THREE, EDIT):
        small.start(request(wish), painter.inputs(wish))
    token_bytes = 4 * dit_config(part_config(tiny_qwen_image, "transformer")).prefix_width
    kept: list[int] = []

    def account(step: int) -> None:
        counts = small.counts()
        kept.append(counts["prefix_tokens"])
        assert counts["held_bytes"] >= kept[-1] * token_bytes

    events = run(small, account)
    assert max(kept) > 2 * 3 * 64, "the pictures of both prompts"
    order = [event.request_id for event in events if isinstance(event, ProgressEvent | FinishedEvent)]
    assert order == sorted(order, reverse=order[0] == THREE.name), "none begins while another holds the memory"
    assert set(order) == {THREE.name, EDIT.name}
    assert not any(small.counts().values())
    small.shutdown()


def test_latents_that_turn_into_nan_fail_their_request_alone(dit, painter, monkeypatch):
    step = Denoiser.step

    def poisoned(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        for picture in pictures:
            if picture.spec.seed == EDIT.seed and picture.done == 4:
                picture.patches = torch.full_like(picture.patches, torch.nan)
        return step(self, pictures)

    monkeypatch.setattr(Denoiser, "step", poisoned)
    for wish in (EDIT, FOX):
        dit.start(request(wish), painter.inputs(wish))
    events = run(dit)
    (error,) = [event.error for event in events if isinstance(event, ErrorEvent)]
    assert isinstance(error, ModelOutputInvalid)
    assert close(latents_of(events, FOX.name), painter.latents(FOX))
    assert not any(dit.counts().values())


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"states": torch.full((20, 64), float("nan"))}, InvalidPayload, "NaN"),
        ({"reference_0": torch.full((16, 8, 8), float("inf"))}, InvalidPayload, "reference_0 holds NaN"),
        ({"reference_0": torch.zeros(4, 8, 8)}, InvalidPayload, r"\[16, height, width\]"),
        ({"reference_1": torch.zeros(16, 4, 4)}, InvalidPayload, "do not go between 2 pictures"),
        ({"states_runs": torch.tensor([1, 2])}, InvalidPayload, r"in runs of \[1, 2\]"),
        ({"reference_0": torch.zeros(16, 2, 9000)}, OmniError, "positions far; this model takes 8192"),
        ({"negative_states": torch.zeros(3, 64)}, InvalidRequest, "needs a guidance_scale above 1"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(dit, painter, change, kind, message):
    tensors = {**painter.inputs(EDIT).tensors, **{name: to_host(tensor) for name, tensor in change.items()}}
    with pytest.raises(kind, match=message):
        dit.start(request(EDIT), StageInputs(tensors=tensors))
    assert not any(dit.counts().values())


def pixels_of(painter: Painter, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {
        f"picture_{index}": torch.randint(0, 256, (height, width, 4), generator=noise, dtype=torch.uint8)
        for index, (width, height) in enumerate(sizes)
    }


def encode(encoder: DiffusionEngine, pictures: dict[str, torch.Tensor]) -> list[EngineEvent]:
    inputs = StageInputs(tensors={name: to_host(pixels) for name, pixels in pictures.items()})
    encoder.start(StageRequest("edit", StageParams(), seed=0), inputs)
    return run(encoder)


def test_the_vae_encoder_makes_the_latents_of_diffusers_picture_by_picture(encoder, painter):
    pictures = pixels_of(painter, [(64, 96), (REFERENCE_SIZE, REFERENCE_SIZE), (32, 64)])
    events = encode(encoder, pictures)
    streams = [event for event in events if isinstance(event, StreamEvent)]
    assert [event.final for event in streams] == [False, False, True]
    found = {name: to_torch(tensor) for event in streams for name, tensor in event.tensors.items()}
    for index, pixels in enumerate(pictures.values()):
        levels = pixels.permute(2, 0, 1).float() / 255 * 2 - 1
        assert close(found.pop(f"reference_{index}"), painter.encoded(levels))
    assert not found
    assert isinstance(events[-1], FinishedEvent)
    assert not any(encoder.counts().values())


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ({}, "needs the tensors picture_0"),
        ({"picture_1": torch.zeros(32, 32, 4, dtype=torch.uint8)}, "needs the tensors picture_0"),
        ({f"picture_{index}": torch.zeros(32, 32, 4, dtype=torch.uint8) for index in range(11)}, "at most 10"),
        ({"picture_0": torch.zeros(32, 32, 3, dtype=torch.uint8)}, r"\[height, width, 4\]"),
        ({"picture_0": torch.zeros(32, 33, 4, dtype=torch.uint8)}, "multiples of 32"),
    ],
)
def test_the_vae_encoder_refuses_pictures_that_the_prompt_stage_does_not_send(encoder, pictures, message):
    with pytest.raises(InvalidPayload, match=message):
        encode(encoder, pictures)
    assert not any(encoder.counts().values())


def test_the_vae_makes_the_pictures_of_diffusers_with_their_alpha_channel(tiny_qwen_image, painter):
    vae = engine(tiny_qwen_image, "vae")
    latents = to_host(painter.latents(THREE).contiguous())
    vae.start(StageRequest("three", StageParams(), seed=0), StageInputs(tensors={"latents": latents}))
    (picture,) = [event for event in run(vae) if isinstance(event, ImageEvent)]
    pixels = to_torch(picture.pixels).numpy()
    assert equal(pixels, painter.pixels(THREE))
    assert len(np.unique(pixels[..., 3])) > 1, "not opaque"
    vae.shutdown()


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("dit", "transformer"),
        ("dit", "scheduler"),
        ("vae", "vae"),
        ("vae_encoder", "text_encoder"),
        ("text_encoder", "text_encoder"),
        ("text_encoder", "processor"),
    ],
)
def test_a_checkpoint_without_one_of_its_folders_is_refused_before_anything_is_loaded(
    tiny_qwen_image, tmp_path, stage, part
):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_qwen_image, damaged, ignore=shutil.ignore_patterns(part))
    text = OmniEngineArgs(OmniModelConfig(str(damaged), "text_encoder"), "encoder")
    start = text.create_engine_config if stage == "text_encoder" else partial(engine, damaged, stage)
    with pytest.raises((ConfigError, StartupError), match=f"has no folder '{part}'"):
        start()
