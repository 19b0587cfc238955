"""Picture models of drawn seeds and sizes, stage by stage, against diffusers: hidden states, latents, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.diffusion import DiffusionEngine
from omni_actors.engine.encoder import EncoderEngine
from omni_actors.engine.rows import to_host, to_torch
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StageParams
from omni_actors.stage.engine_interface import (
    EngineEvent,
    ImageEvent,
    LatentsEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
)
from tests.support import drawn_sizes, flux2_klein, qwen_image, z_image_engine
from tests.support.drawn_sizes import DRAWS, draw_text
from tests.support.picture_wishes import Wish, engine, equal, request, run
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

Painter = z_image_engine.Painter | qwen_image.Painter | flux2_klein.Painter


def wishes(
    generator: Random, step: int, guidance: Sequence[float], *, edits: bool, channels: Sequence[int] = (3, 4)
) -> list[Wish]:
    """Three pictures, whose sides are multiples of `step`, one of them made from others if `edits`."""
    made = []
    for number, strength in enumerate(guidance):
        width, height = (step * generator.randrange(1, 129 // step) for _ in range(2))
        references: tuple[tuple[int, int, int], ...] = ()
        if edits and number == 1:
            references = tuple(
                (generator.randrange(64, 160), generator.randrange(64, 160), generator.choice(channels))
                for _ in range(generator.choice((1, 2)))
            )
        steps, text = generator.choice((1, 4, 9, 20)), draw_text(generator, range(1, 12))
        negative = draw_text(generator, range(1, 4)) if edits and strength > 1 else None
        name = f"{number}-{generator.randrange(10_000)}"
        made.append(Wish(name, text, width, height, steps, strength, negative=negative, references=references))
    return made


@contextmanager
def running(made: DiffusionEngine | EncoderEngine) -> Iterator[DiffusionEngine | EncoderEngine]:
    try:
        yield made
        assert not any(made.counts().values())
    finally:
        made.shutdown()


def check_pictures(folder: Path, painter: Painter, wanted: Sequence[Wish]) -> None:
    """Compare the latents of all wishes, computed together, and the picture of the first."""
    with running(engine(folder, "dit")) as dit:
        for wish in wanted:
            dit.start(request(wish), painter.inputs(wish))
        events = run(dit)
        for wish in wanted:
            (latents,) = [e.latents for e in events if isinstance(e, LatentsEvent) and e.request_id == wish.name]
            close(to_torch(latents), painter.latents(wish), wish.name)
    first = wanted[0]
    with running(engine(folder, "vae")) as vae:
        latents = to_host(painter.latents(first).contiguous())
        vae.start(StageRequest("r", StageParams(), seed=0), StageInputs(tensors={"latents": latents}))
        (picture,) = [event for event in run(vae) if isinstance(event, ImageEvent)]
    assert equal(to_torch(picture.pixels).numpy(), painter.pixels(first))


def close(made: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    assert made.shape == wanted.shape, name
    assert float((made - wanted).abs().max()) < 1e-4 * float(wanted.abs().max().clamp(min=1.0)), name


@DRAWS
def test_z_image_equals_diffusers(draw: str, tmp_path: Path) -> None:
    generator = Random(f"z-image {draw}")
    sizes, seed = drawn_sizes.z_image_sizes(generator), generator.randrange(1 << 31)
    wanted = wishes(generator, 16, (0.0, 2.5, 5.0), edits=False)
    print(seed, sizes, wanted)
    pipeline = Z_IMAGE.tiny_pipeline(seed, sizes=sizes)
    pipeline.save_pretrained(tmp_path)
    painter = z_image_engine.Painter(pipeline)
    check_pictures(tmp_path, painter, wanted)

    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 25}
    arguments = OmniEngineArgs(OmniModelConfig(str(tmp_path), "text_encoder"), "encoder", options)
    with running(EncoderEngine(arguments)) as encoder:
        for wish in wanted:
            messages = (ChatMessage("user", (ContentPart(wish.prompt),)),)
            asked = StageRequest(wish.name, StageParams(negative_prompt=""), seed=0)
            encoder.start(asked, StageInputs(prompt=Prompt(messages=messages)))
        made = states_of(run(encoder))
    for wish in wanted:
        for name, states in painter.inputs(wish).tensors.items():
            close(made[wish.name][name], to_torch(states), wish.name)


def states_of(events: Sequence[EngineEvent]) -> Mapping[str, Mapping[str, torch.Tensor]]:
    streams = [event for event in events if isinstance(event, StreamEvent)]
    return {each.request_id: {name: to_torch(tensor) for name, tensor in each.tensors.items()} for each in streams}


@DRAWS
def test_qwen_image_equals_diffusers(draw: str, tmp_path: Path) -> None:
    generator = Random(f"qwen-image {draw}")
    sizes, seed = drawn_sizes.qwen_image_sizes(generator), generator.randrange(1 << 31)
    wanted = wishes(generator, 32, (1.0, 4.0, 2.0), edits=True)
    print(seed, sizes, wanted)
    pipeline = QWEN_IMAGE.tiny_pipeline(seed, sizes=sizes)
    pipeline.save_pretrained(tmp_path)
    painter = qwen_image.Painter(pipeline)
    check_pictures(tmp_path, painter, wanted)

    shape = tuple(32 * generator.randrange(1, 5) for _ in range(2))
    noise = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (*shape, 4), generator=noise, dtype=torch.uint8)
    with running(engine(tmp_path, "vae_encoder")) as encoder:
        encoder.start(StageRequest("r", StageParams(), seed=0), StageInputs(tensors={"picture_0": to_host(pixels)}))
        made = states_of(run(encoder))["r"]["reference_0"]
    close(made, painter.encoded(pixels.permute(2, 0, 1).float() / 255 * 2 - 1), "reference")


@DRAWS
def test_flux2_equals_diffusers(draw: str, tmp_path: Path) -> None:
    generator = Random(f"flux2 {draw}")
    sizes, seed = drawn_sizes.flux2_sizes(generator), generator.randrange(1 << 31)
    wanted = wishes(generator, 16, (1.0, 4.0, 2.0), edits=True, channels=(3,))
    print(seed, sizes, wanted)
    pipeline = FLUX2_KLEIN.tiny_pipeline(seed, sizes=sizes)
    pipeline.register_to_config(is_distilled=False)
    pipeline.save_pretrained(tmp_path)
    painter = flux2_klein.Painter(pipeline)
    check_pictures(tmp_path, painter, wanted)

    with running(engine(tmp_path, "text_encoder")) as encoder:
        for wish in wanted:
            text, negative = (token_ids(pipeline.tokenizer, prompt) for prompt in (wish.prompt, ""))
            tensors = {"negative_token_ids": to_host(torch.tensor(negative))}
            encoder.start(StageRequest(wish.name, StageParams(), seed=0), StageInputs(text, tensors))
        streams = [event for event in run(encoder) if isinstance(event, StreamEvent)]
    for wish in wanted:
        made = [tensors for each in streams if each.request_id == wish.name for tensors in each.tensors.items()]
        for name, states in made:
            close(to_torch(states), painter.states("" if name == "negative_states" else wish.prompt), wish.name)
        assert [name for name, _ in made] == ["states", "negative_states"]


def token_ids(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    found: list[int] = tokenizer(written)["input_ids"]
    return found
