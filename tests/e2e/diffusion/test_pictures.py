"""Denoising stages, VAEs and VAE encoders of all families, in this process, against diffusers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.models.diffusers_layout import part_config
from omni_actors.engine.models.pictures.denoising import Denoiser, Picture
from omni_actors.engine.models.qwen_image.dit import Prefix, QwenImageNetwork
from omni_actors.engine.models.qwen_image.stages import QwenImageDit
from omni_actors.engine.models.z_image.stages import ZImageDit
from omni_actors.engine.rows import to_host, to_torch
from omni_actors.engine.workers.diffusion import StepResult
from omni_actors.errors import (
    ConfigError,
    InvalidPayload,
    InvalidRequest,
    ModelOutputInvalid,
    OmniError,
    PromptTooLong,
    StartupError,
)
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
from tests.support import flux2_klein, qwen_image, z_image_engine
from tests.support.picture_wishes import Wish, engine, equal, request, run
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE

FOX, EDIT, THREE = (qwen_image.WISHES[index] for index in (0, 3, 4))
BUDGET = 110  # tokens of a step, which takes one of the pictures that others are made from
PAINTED = {"z_image": Z_IMAGE, "qwen_image": QWEN_IMAGE, "flux2_klein": FLUX2_KLEIN}


class Family:
    """A family's checkpoint, what diffusers makes with it, and engines of its stages, each started once."""

    def __init__(self, name: str, checkpoint: Path, support: ModuleType) -> None:
        self.name, self.checkpoint, self.wishes = name, checkpoint, support.WISHES
        self.painter = support.Painter(PAINTED[name].tiny_pipeline())
        self.engines: dict[tuple, DiffusionEngine] = {}

    def engine(self, stage: str, **options) -> DiffusionEngine:
        key = (stage, *sorted((name, str(value)) for name, value in options.items()))
        if key not in self.engines:
            self.engines[key] = engine(self.checkpoint, stage, **options)
        return self.engines[key]

    @property
    def dit(self) -> DiffusionEngine:
        """A step takes two or three of the wishes' pictures."""
        return self.engine("dit", max_num_batched_tokens=1001)


@pytest.fixture(scope="module")
def guided_flux2(tiny_flux2_klein, tmp_path_factory) -> Path:
    """A checkpoint that is not distilled, so that it has guidance."""
    folder = tmp_path_factory.mktemp("checkpoint") / "guided_flux2"
    shutil.copytree(tiny_flux2_klein, folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": False}))
    return folder


@pytest.fixture(scope="module")
def families(tiny_z_image, tiny_qwen_image, guided_flux2) -> Iterator[dict[str, Family]]:
    made = {
        "flux2_klein": Family("flux2_klein", guided_flux2, flux2_klein),
        "z_image": Family("z_image", tiny_z_image, z_image_engine),
        "qwen_image": Family("qwen_image", tiny_qwen_image, qwen_image),
    }
    made["flux2_klein"].painter.pipeline.register_to_config(is_distilled=False)
    yield made
    for family in made.values():
        for each in family.engines.values():
            assert not any(each.counts().values())
            each.shutdown()


@pytest.fixture(params=["z_image", "qwen_image", "flux2_klein"])
def family(request, families):
    return families[request.param]


@pytest.fixture
def z_image(families):
    return families["z_image"]


@pytest.fixture
def qwen(families):
    return families["qwen_image"]


@pytest.fixture
def flux2(families):
    return families["flux2_klein"]


def ask(stage: DiffusionEngine, family: Family, *wishes: Wish) -> None:
    for wish in wishes:
        stage.start(request(wish), family.painter.inputs(wish))


def latents_of(events: list[EngineEvent], name: str) -> torch.Tensor:
    (latents,) = [e.latents for e in events if isinstance(e, LatentsEvent) and e.request_id == name and not e.preview]
    return to_torch(latents)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-5 * other.abs().max().clamp(min=1.0))


def test_mixed_pictures_that_join_one_after_the_other_are_those_of_diffusers_and_the_same_alone(family):
    """Each reports every step, and shows the previews that it was asked for."""
    dit, waiting = family.dit, list(family.wishes)

    def join(step: int) -> None:
        if waiting and step % 3 == 0:
            ask(dit, family, waiting.pop(0))

    together = run(dit, join)
    for wish in family.wishes:
        latents = latents_of(together, wish.name)
        assert close(latents, family.painter.latents(wish)), wish
        own = [event for event in together if event.request_id == wish.name]
        steps = [(event.step, event.steps) for event in own if isinstance(event, ProgressEvent)]
        assert steps == ([(step, wish.steps) for step in range(1, wish.steps + 1)] if wish.steps > 1 else [])
        assert sum(isinstance(event, LatentsEvent) and event.preview for event in own) == wish.previews
        assert isinstance(own[-1], FinishedEvent)
        if wish.steps <= 50:
            ask(dit, family, wish)
            assert close(latents_of(run(dit), wish.name), latents), wish


@pytest.fixture
def steps(monkeypatch):
    """Which requests of Z-Image's stage the device computes, step by step."""
    computed, step = [], ZImageDit.step

    def watched(self: ZImageDit, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        computed.append([job_id.partition("/")[0] for job_id in request_ids])
        return step(self, request_ids)

    monkeypatch.setattr(ZImageDit, "step", watched)
    return computed


@pytest.mark.parametrize("again", [False, True], ids=["aborted", "begun again"])
def test_a_picture_that_is_aborted_between_two_steps_of_others(z_image, steps, again):
    """It is in no further step; as after a loss it may begin again, and is the same."""
    lost, fox = Wish("lost", "A red fox in the snow", 32, 32, 40, 2.0), z_image.wishes[0]
    ask(z_image.dit, z_image, lost, fox)

    def stop(step: int) -> None:
        if step == 3:
            z_image.dit.abort("lost")
            assert z_image.dit.counts()["requests"] == 1
            if again:
                ask(z_image.dit, z_image, lost)

    events = run(z_image.dit, stop)
    assert sum("lost" in together for together in steps) == 3 + lost.steps * again
    for wish in (fox, *[lost] * again):
        assert close(latents_of(events, wish.name), z_image.painter.latents(wish))


def test_latents_that_turn_into_nan_fail_their_request_alone(family, monkeypatch):
    sick = Wish("sick", "x", 64, 64, 20, 3.0 if family.name == "z_image" else 1.0, previews=10)
    step = Denoiser.step

    def poisoned(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        for picture in pictures:
            if picture.spec.num_steps == sick.steps and picture.done == 4:
                picture.patches = torch.full_like(picture.patches, torch.nan)
        return step(self, pictures)

    monkeypatch.setattr(Denoiser, "step", poisoned)
    fox = family.wishes[0]
    ask(family.dit, family, sick, fox)
    events = run(family.dit)
    (error,) = [event.error for event in events if isinstance(event, ErrorEvent)]
    assert isinstance(error, ModelOutputInvalid)
    shown = [event for event in events if isinstance(event, LatentsEvent) and event.request_id == "sick"]
    assert all(event.preview and torch.isfinite(to_torch(event.latents)).all() for event in shown)
    assert close(latents_of(events, fox.name), family.painter.latents(fox))
    assert not any(family.dit.counts().values())


def test_where_memory_is_for_one_picture_they_come_one_after_the_other(family):
    small = family.engine("dit", budget=1, max_num_batched_tokens=BUDGET)
    wishes = family.wishes[2:4] if family.name == "z_image" else family.wishes[3:5]
    ask(small, family, *wishes)
    kept: list[int] = []

    def account(step: int) -> None:
        counts = small.counts()
        kept.append(counts.get("prefix_tokens", 0))
        if kept[-1]:
            token_bytes = 4 * QwenImageNetwork(part_config(family.checkpoint, "transformer")).prefix_width
            assert counts["held_bytes"] >= kept[-1] * token_bytes

    events = run(small, account)
    assert family.name != "qwen_image" or max(kept) > 2 * 3 * 64, "the pictures of both prompts"
    order = [event.request_id for event in events if isinstance(event, ProgressEvent | FinishedEvent)]
    assert order == sorted(order, key=order.index), "none begins while another holds the memory"
    assert set(order) == {wish.name for wish in wishes}


def pixels(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def ids(*given: int) -> torch.Tensor:
    return torch.tensor(given)


@pytest.mark.parametrize(
    ("name", "stage", "params", "change", "kind", "message"),
    [
        ("z_image", "dit", {"width": 100}, {}, InvalidRequest, "multiple of 16"),
        ("z_image", "dit", {"height": 50_000}, {}, InvalidRequest, "from 16 to 1024"),
        ("z_image", "dit", {"num_steps": 100_000}, {}, InvalidRequest, "from 1 to 1000"),
        ("z_image", "dit", {"negative_prompt": "no"}, {}, InvalidRequest, "no parameter"),
        ("z_image", "dit", {}, {"states": torch.full((3, 64), float("nan"))}, InvalidPayload, "NaN"),
        ("z_image", "dit", {}, {"states": torch.zeros(3, 63)}, InvalidPayload, r"\[n >= 1, 64\]"),
        ("z_image", "dit", {}, {"states": None}, InvalidPayload, "needs the hidden states 'states'"),
        ("z_image", "dit", {"guidance_scale": 2.0}, {"negative_states": None}, InvalidPayload, "'negative_states'"),
        ("z_image", "dit", {}, {"states": torch.zeros(255, 64)}, OmniError, "has 255 tokens"),
        ("qwen_image", "dit", {}, {"states": torch.full((20, 64), float("nan"))}, InvalidPayload, "NaN"),
        ("qwen_image", "dit", {}, {"reference_0": torch.full((16, 8, 8), torch.inf)}, InvalidPayload, "_0 holds NaN"),
        ("qwen_image", "dit", {}, {"reference_0": torch.zeros(4, 8, 8)}, InvalidPayload, r"\[16, height, width\]"),
        ("qwen_image", "dit", {}, {"reference_1": torch.zeros(16, 4, 4)}, InvalidPayload, "not go between 2 pictures"),
        ("qwen_image", "dit", {}, {"states_runs": torch.tensor([1, 2])}, InvalidPayload, r"in runs of \[1, 2\]"),
        ("qwen_image", "dit", {}, {"reference_0": torch.zeros(16, 2, 9000)}, OmniError, "far; this model takes 8192"),
        ("qwen_image", "dit", {}, {"negative_states": torch.zeros(3, 64)}, InvalidRequest, "guidance_scale above 1"),
        ("flux2_klein", "dit", {}, {"reference_0": torch.zeros(4, 8, 8)}, InvalidPayload, r"\[16, height, width\]"),
        ("flux2_klein", "dit", {}, {"states": torch.zeros(3, 64)}, InvalidPayload, r"\[n >= 1, 192\]"),
        ("flux2_klein", "vae_encoder", {}, {"picture_0": pixels(32, 32, 4)}, InvalidPayload, r"\[height, width, 3\]"),
        ("flux2_klein", "vae_encoder", {}, {"picture_0": pixels(32, 40, 3)}, InvalidPayload, "multiples of 16"),
        ("flux2_klein", "text_encoder", {}, {"negative_token_ids": pixels(3)}, InvalidPayload, r"i64 \[tokens\]"),
        ("flux2_klein", "text_encoder", {}, {"negative_token_ids": ids(512)}, InvalidPayload, "from 0 to 511"),
        ("flux2_klein", "text_encoder", {}, {"negative_token_ids": ids(*[0] * 513)}, PromptTooLong, "at most 512"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(families, name, stage, params, change, kind, message):
    family, wish = families[name], EDIT if name == "qwen_image" else families[name].wishes[0]
    used, tensors, asked = family.dit, {}, request(wish, **params)
    if stage == "dit":
        tensors = dict(family.painter.inputs(wish).tensors)
    else:
        used, asked = family.engine(stage), StageRequest("r", StageParams(), seed=0)
    for tensor_name, tensor in change.items():
        tensors.pop(tensor_name, None)
        if tensor is not None:
            tensors[tensor_name] = to_host(tensor)
    with pytest.raises(kind, match=message) as caught:
        used.start(asked, StageInputs([1], tensors) if stage != "dit" else StageInputs(tensors=tensors))
    assert not params or caught.value.field == next(iter(params.keys() - {"guidance_scale"}), None)
    assert not any(used.counts().values())


def test_a_distilled_checkpoint_ignores_guidance(flux2, tiny_flux2_klein):
    distilled, fox = engine(tiny_flux2_klein, "dit"), flux2.wishes[0]
    (about,) = [one.about for one in distilled.facts.parameters if one.name == "guidance_scale"]
    assert "ignored" in about
    distilled.start(request(fox, guidance_scale=4.0), flux2.painter.inputs(fox))
    assert close(latents_of(run(distilled), fox.name), flux2.painter.latents(fox))
    distilled.shutdown()


# -- FP8 --------------------------------------------------------------------------------------------------------------


def test_layers_in_fp8_make_almost_the_same_latents_in_steps_of_any_mix(family):
    """The products are rounded to three bits behind the point, for each token and each output alone."""
    latents = {}
    for name, options in {"wide": {}, "fp8": {"quantization": "fp8_per_channel"}}.items():
        dit = family.engine("dit", dtype="bfloat16", **options)
        ask(dit, family, *family.wishes[:2])
        events = run(dit)
        latents[name] = [latents_of(events, wish.name) for wish in family.wishes[:2]]
        ask(dit, family, family.wishes[1])
        alone = latents_of(run(dit), family.wishes[1].name)
        assert (alone - latents[name][1]).std() < 0.05 * alone.std()
    for wide, rounded in zip(*latents.values(), strict=True):
        assert 0 < (wide - rounded).std() < 0.25 * wide.std()


def test_stages_that_have_no_fp8_refuse_it(z_image):
    with pytest.raises(StartupError, match=r"no quantization 'fp8_per_channel'.*Remove it"):
        engine(z_image.checkpoint, "vae", dtype="bfloat16", quantization="fp8_per_channel")
    with pytest.raises(StartupError, match=r"no quantization 'fp8'.*has fp8_per_channel"):
        engine(z_image.checkpoint, "dit", dtype="bfloat16", quantization="fp8")


# -- LoRA adapters ----------------------------------------------------------------------------------------------------

ATTENTION = ("attn.to_q", "attn.to_v", "attn.add_k_proj", "attn.to_out.0", "to_qkv_mlp_proj")
ALL = (
    *ATTENTION,
    "single_transformer_blocks.1.attn.to_out",
    "attn.to_add_out",
    "ff.linear_in",
    "ff_context.linear_out",
)


@pytest.fixture(scope="module")
def adapters_of_flux2(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    flux2_klein.write_adapter(folder / "red", 1, ATTENTION)
    flux2_klein.write_adapter(folder / "blue", 2, ALL)
    return {name: str(folder / name) for name in ("red", "blue")}


def test_pictures_of_several_adapters_in_one_batch_are_those_of_diffusers_with_one(flux2, adapters_of_flux2):
    dit, (fox, *_, one, two) = flux2.engine("dit", adapters=adapters_of_flux2), flux2.wishes
    asked = {
        "red": (fox, "red"),
        "guided": (one, "red"),
        "blue": (two, "blue"),
        "none": (replace(fox, name="none"), None),
    }
    asked = {name: (replace(wish, name=name), adapter) for name, (wish, adapter) in asked.items()}
    for wish, adapter in asked.values():
        dit.start(request(wish, adapter=adapter), flux2.painter.inputs(wish))
    events = run(dit)
    plain = flux2.painter.latents(asked["red"][0])
    for wish, adapter in asked.values():
        with flux2.painter.adapted(adapters_of_flux2[adapter]) if adapter else nullcontext():
            expected = flux2.painter.latents(wish)
        assert close(latents_of(events, wish.name), expected), wish
    assert not close(latents_of(events, "red"), plain), "the adapter changes something"
    with pytest.raises(InvalidRequest, match=r"no adapter 'reed'.*red"):
        dit.start(request(fox, adapter="reed"), flux2.painter.inputs(fox))


def test_adapters_that_do_not_fit_are_refused_when_the_stage_starts(flux2, z_image, adapters_of_flux2, tmp_path):
    with pytest.raises(StartupError, match="This model takes no LoRA adapters"):
        engine(z_image.checkpoint, "dit", adapters=adapters_of_flux2)
    for target, message in ((None, "holds no LoRA adapter"), ("x_embedder", "x_embedder cannot be adapted in FLUX.2")):
        if target is not None:
            flux2_klein.write_adapter(tmp_path, 1, [target])
        with pytest.raises(StartupError, match=message):
            engine(flux2.checkpoint, "dit", adapters={"odd": str(tmp_path)})


# -- pictures made from others ----------------------------------------------------------------------------------------


def test_with_one_place_every_picture_is_computed_alone_and_has_the_same_bits(qwen, monkeypatch):
    batches, step = [], Denoiser.step

    def watched(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        batches.append(len(pictures))
        return step(self, pictures)

    monkeypatch.setattr(Denoiser, "step", watched)
    fixed, found = qwen.engine("dit", max_num_seqs=1), []
    for wishes in ([EDIT], [FOX, EDIT, THREE]):
        ask(fixed, qwen, *wishes)
        found.append(latents_of(run(fixed), EDIT.name))
    assert set(batches) == {1}
    assert torch.equal(*found)


@pytest.fixture
def computed(qwen, monkeypatch):
    """For each step of the stage, jobs' names with the tokens that it computes of each; the last one is under way."""
    qwen.engine("dit", max_num_batched_tokens=BUDGET)  # whose warm-up does not count
    steps: list[list[tuple[str, int]]] = [[]]
    step, extend, denoise = QwenImageDit.step, QwenImageNetwork.extend, Denoiser.step

    def counted(self: QwenImageDit, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        results = step(self, request_ids)
        steps.append([])
        return results

    def extended(self: QwenImageNetwork, prefix: Prefix, end: int) -> None:
        if end > prefix.done:
            steps[-1].append(("edit" if prefix.references else "text", end - prefix.done))
        extend(self, prefix, end)

    def denoised(self: Denoiser, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        steps[-1].extend((str(each.spec.seed), each.spec.tokens * len(each.conditions)) for each in pictures)
        return denoise(self, pictures)

    monkeypatch.setattr(QwenImageDit, "step", counted)
    monkeypatch.setattr(QwenImageNetwork, "extend", extended)
    monkeypatch.setattr(Denoiser, "step", denoised)
    return steps


def test_what_pictures_are_made_from_is_computed_in_steps_of_the_budget_between_those_of_others(
    qwen, computed, monkeypatch
):
    small, long = qwen.engine("dit", max_num_batched_tokens=BUDGET), replace(FOX, steps=200)
    now = small.core.scheduler.clock()
    monkeypatch.setattr(small.core.scheduler, "clock", lambda: now)  # so that none is overdue
    ask(small, qwen, THREE)
    waiting = [msgspec.structs.replace(request(long), priority=-1)]

    def join(step: int) -> None:
        if waiting and small.counts()["prefix_tokens"]:
            small.start(waiting.pop(), qwen.painter.inputs(long))

    events = run(small, join)
    for wish in (long, THREE):
        assert close(latents_of(events, wish.name), qwen.painter.latents(wish))
    tensors = qwen.painter.inputs(THREE).tensors
    whole = sum(inputs.shape[0] for name, inputs in tensors.items() if name.endswith("states"))
    prepared = [sum(tokens for name, tokens in step if name == "edit") for step in computed]
    assert sum(prepared) == whole + 2 * sum(one[0].numel() for one in qwen.painter.references(THREE))
    assert all(sum(tokens for _, tokens in step) <= BUDGET for step in computed)
    parts = [number for number, tokens in enumerate(prepared) if tokens]
    begins = next(number for number, step in enumerate(computed) if str(long.seed) in dict(step))
    assert parts[0] < begins < parts[-1], "what comes meanwhile need not wait for all of it"


def test_an_edit_that_ends_while_it_is_prepared_leaves_nothing_and_the_others_go_on(qwen, monkeypatch):
    small, extend = qwen.engine("dit", max_num_batched_tokens=BUDGET), QwenImageNetwork.extend
    ask(small, qwen, FOX, THREE)

    def leave(step: int) -> None:
        if small.counts()["prefix_tokens"] > 100:
            small.abort(THREE.name)

    events = run(small, leave)
    assert not [event for event in events if event.request_id == THREE.name]

    def failing(self: QwenImageNetwork, prefix: Prefix, end: int) -> None:
        if prefix.done and prefix.references:
            raise RuntimeError("no more")
        extend(self, prefix, end)

    monkeypatch.setattr(QwenImageNetwork, "extend", failing)
    ask(small, qwen, FOX, THREE)
    events += run(small)
    (error,) = [event for event in events if isinstance(event, ErrorEvent)]
    assert error.request_id == THREE.name
    assert "no more" in str(error.error)
    made = [event.latents for event in events if isinstance(event, LatentsEvent)]
    assert len(made) == 2
    assert all(close(to_torch(latents), qwen.painter.latents(FOX)) for latents in made)


# -- from pictures and to pictures ------------------------------------------------------------------------------------


def encode(family: Family, pictures: dict[str, torch.Tensor]) -> list[EngineEvent]:
    inputs = StageInputs(tensors={name: to_host(pixels) for name, pixels in pictures.items()})
    encoder = family.engine("vae_encoder")
    encoder.start(StageRequest("edit", StageParams(), seed=0), inputs)
    return run(encoder)


@pytest.mark.parametrize(("name", "channels"), [("qwen_image", 4), ("flux2_klein", 3)])
def test_the_vae_encoder_makes_the_latents_of_diffusers_picture_by_picture(families, name, channels):
    noise, large, family = torch.Generator().manual_seed(0), qwen_image.REFERENCE_SIZE, families[name]
    pictures = {
        f"picture_{index}": torch.randint(0, 256, (*size, channels), generator=noise, dtype=torch.uint8)
        for index, size in enumerate([(96, 64), (large, large), (64, 32)])
    }
    events = encode(family, pictures)
    streams = [event for event in events if isinstance(event, StreamEvent)]
    assert [event.final for event in streams] == [False, False, True]
    found = {name: to_torch(tensor) for event in streams for name, tensor in event.tensors.items()}
    for index, pixels in enumerate(pictures.values()):
        levels = pixels.permute(2, 0, 1).float() / 255 * 2 - 1
        assert close(found.pop(f"reference_{index}"), family.painter.encoded(levels))
    assert not found
    assert isinstance(events[-1], FinishedEvent)


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ({}, "needs the tensors picture_0"),
        ({"picture_1": pixels(32, 32, 4)}, "needs the tensors picture_0"),
        ({f"picture_{index}": pixels(32, 32, 4) for index in range(11)}, "at most 10"),
        ({"picture_0": pixels(32, 32, 3)}, r"\[height, width, 4\]"),
        ({"picture_0": pixels(32, 33, 4)}, "multiples of 32"),
    ],
)
def test_the_vae_encoder_refuses_pictures_that_the_prompt_stage_does_not_send(qwen, pictures, message):
    with pytest.raises(InvalidPayload, match=message):
        encode(qwen, pictures)


def decoded(vae: DiffusionEngine, *latents: torch.Tensor) -> list[EngineEvent]:
    """Events of a request with these latents, all but the last of which are previews'."""
    first, *rest = (to_host(each.contiguous()) for each in latents)
    vae.start(StageRequest("r", StageParams(), seed=0), StageInputs(tensors={"latents": first}, complete=not rest))
    for index, each in enumerate(rest):
        vae.extend("r", each, complete=index == len(rest) - 1)
    return run(vae)


def test_the_vae_makes_the_pictures_of_diffusers_and_previews_before_them(family):
    wish = family.wishes[0] if family.name == "z_image" else family.wishes[-1]
    latents = family.painter.latents(wish)
    events = decoded(family.engine("vae"), torch.zeros_like(latents), latents)
    pictures = [event for event in events if isinstance(event, ImageEvent)]
    assert [picture.preview for picture in pictures] == [True, False]
    pixels = to_torch(pictures[1].pixels).numpy()
    assert equal(pixels, family.painter.pixels(wish))
    assert pixels.shape == (wish.height, wish.width, 4 if family.name == "qwen_image" else 3)
    assert pixels.shape[2] == 3 or len(np.unique(pixels[..., 3])) > 1, "not opaque"
    assert isinstance(events[-1], FinishedEvent)


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (torch.full((4, 8, 8), float("inf")), "NaN or infinite"),
        (torch.zeros(16, 8, 8), r"\[4, height, width\]"),
        (torch.zeros(4, 6250, 6250), "a picture of 2500000000 pixels"),
    ],
)
def test_the_vae_refuses_latents_that_are_not_its_own(z_image, latents, message):
    with pytest.raises(InvalidPayload, match=message):
        decoded(z_image.engine("vae"), latents)


@pytest.mark.parametrize("name", ["z_image", "flux2_klein"])
def test_stages_without_weights_make_pictures_all_the_same(families, name):
    # That is how a GPU is measured without a published checkpoint.
    family = families[name]
    dit, fox = family.engine("dit", load_format="dummy"), family.wishes[0]
    ask(dit, family, fox)
    latents = latents_of(run(dit), fox.name)
    assert latents.std() > 0.1
    assert isinstance(decoded(family.engine("vae", load_format="dummy"), latents)[0], ImageEvent)
    if name == "flux2_klein":
        encoder = family.engine("text_encoder", load_format="dummy")
        encoder.start(StageRequest("r", StageParams(), seed=0), StageInputs([1, 2, 3]))
        (stream,) = [event for event in run(encoder) if isinstance(event, StreamEvent)]
        assert to_torch(stream.tensors["states"]).shape == (512, 192)


@pytest.mark.parametrize(
    ("name", "stage", "part"),
    [
        *(("tiny_z_image", "dit", part) for part in ("transformer", "scheduler", "text_encoder")),
        ("tiny_z_image", "vae", "vae"),
        ("tiny_qwen_image", "dit", "transformer"),
        ("tiny_qwen_image", "vae_encoder", "text_encoder"),
        ("tiny_qwen_image", "text_encoder", "processor"),
    ],
)
def test_a_checkpoint_without_one_of_its_folders_is_refused_before_anything_is_loaded(
    request, tmp_path, name, stage, part
):
    damaged = tmp_path / "damaged"
    shutil.copytree(request.getfixturevalue(name), damaged, ignore=shutil.ignore_patterns(part))
    text = OmniEngineArgs(OmniModelConfig(str(damaged), "text_encoder"), "encoder")
    start = text.create_engine_config if stage == "text_encoder" else partial(engine, damaged, stage)
    with pytest.raises((ConfigError, StartupError), match=part):
        start()


def test_a_checkpoint_of_another_pipeline_is_refused_with_what_there_is(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "OtherPipeline"}))
    with pytest.raises(ConfigError, match=r"'OtherPipeline'; known are .*ZImagePipeline"):
        engine(tmp_path, "dit")
