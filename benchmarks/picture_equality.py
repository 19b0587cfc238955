"""Measures how close our pictures are to those of diffusers, and those of a batch to those made alone, in decibels.

    python benchmarks/picture_equality.py
    python benchmarks/picture_equality.py --model qwen-image --size published --steps 8 40 --float32

Both get the same weights, hidden states and noise; the VAE is the same, in the same precision. `ours` is how far our
pictures are from diffusers', `batch` how far those are that were made together (three sizes, joining one after the
other) from those made alone: the peak signal-to-noise ratio (PSNR) of pictures with 255 levels, the worst of the three.
`decoder` is the same for latents that our own decoder makes pictures of, and the VAE, where we have one. With
`--float32`, `truth` and `theirs` are how far ours and diffusers' are from what diffusers makes in float32: a correct
implementation is as far from it as another. `contrast` is the standard deviation of the pictures' levels, which the
PSNR depends on: photographs have 50 to 70.

The weights are random. As drawn for tests they make networks that amplify a difference more than trained ones; so at
published sizes those matrices whose output is added to a layer's input are smaller by the root of twice the number of
layers, as networks are initialised for training. Without a GPU, `--size tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_actors.engine.platform import prepare

prepare()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import workload  # noqa: E402
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu  # noqa: E402

from omni_actors.engine.models.flux2.dit import Flux2Condition, Flux2Network  # noqa: E402
from omni_actors.engine.models.pictures.denoising import (  # noqa: E402
    Denoiser,
    FlowSchedule,
    Picture,
    PictureSpec,
    fastest_attention,
    without_weights,
)
from omni_actors.engine.models.qwen_image.dit import Prefix, QwenImageNetwork  # noqa: E402
from omni_actors.engine.models.qwen_image.vae import QwenImageVae  # noqa: E402
from omni_actors.engine.models.z_image.dit import ZImageNetwork  # noqa: E402
from tools.checkpoints.pictures import FLUX2_KLEIN, QWEN_IMAGE, Z_IMAGE, PictureFamily  # noqa: E402

SIZES = {"tiny": ((64, 96), (128, 64), (96, 96)), "published": ((512, 512), (256, 384), (512, 768))}  # height, width
PROMPTS = (40, 77, 100)  # tokens
JOINS = (0, 1, 3)  # steps after which a picture joins the batch
PEAK = 255.0
BEGAN = time.monotonic()


@dataclass(frozen=True)
class Wanted:
    """A picture: its size in pixels, its steps, the states of its prompt f32 [tokens, width], and its seed."""

    height: int
    width: int
    steps: int
    states: torch.Tensor
    seed: int


class Family(ABC):
    """diffusers' parts of a model, and ours with the same weights.

    Attributes:
        schedule: arguments of our schedule beside diffusers' own.
        latent_pixels: pixels along an edge of a latent pixel.
        branches: parts of the names of the matrices whose output is added to a layer's input.
    """

    network_class: type[Any]
    tools: PictureFamily
    latent_pixels: int
    branches: tuple[str, ...]
    schedule: Mapping[str, Any] = {}

    def __init__(self, transformer: Any, vae: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.reference, self.vae = transformer, vae
        self.device, self.dtype = device, dtype
        self.config = json.loads(transformer.to_json_string())
        with torch.device("meta"):
            sizes = self.network_class(self.config)
        self.text_width, self.channels = sizes.text_width, sizes.channels
        self.pipeline = self.tools.pipeline_of(transformer, vae)
        self.pipeline.set_progress_bar_config(disable=True)

    def denoiser(self) -> Denoiser:
        """Ours with the weights of diffusers', in the type of numbers that is measured."""
        network = without_weights(lambda: self.network_class(self.config), self.device, self.dtype)
        network.load(self.reference.state_dict().items())
        network.attend = fastest_attention(self.device.type, self.dtype)
        return Denoiser(network, FlowSchedule.from_config(self.pipeline.scheduler.config, **self.schedule))

    def spec(self, wanted: Wanted) -> PictureSpec:
        """What our denoiser takes."""
        size = wanted.height // 16, wanted.width // 16
        return PictureSpec(size, wanted.steps, wanted.seed, self.condition(wanted.states))

    @abstractmethod
    def condition(self, states: torch.Tensor) -> Any:
        """What our network takes of a prompt."""

    @abstractmethod
    def paint(self, transformer: Any, vae: Any, wanted: Wanted, noise: torch.Tensor) -> torch.Tensor:
        """diffusers' latents [channels, height, width] of a transformer with its VAE, from noise of the same shape."""

    @abstractmethod
    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """The picture [channels, height, width], -1 to 1."""

    def painted(self, transformer: Any, vae: Any, wanted: Wanted, *prompt: str, **given: Any) -> Any:
        """diffusers' own latents, as its pipeline gives them."""
        self.pipeline.register_modules(transformer=transformer, vae=vae)
        size = {"height": wanted.height, "width": wanted.width, "num_inference_steps": wanted.steps}
        return self.pipeline(*prompt, **size, **given, output_type="latent").images[0]

    def noise(self, wanted: Wanted) -> torch.Tensor:
        """The noise that our denoiser draws for a picture, f32 [channels, height, width]."""
        edges = (wanted.height // self.latent_pixels, wanted.width // self.latent_pixels)
        return torch.randn((self.channels, *edges), generator=torch.Generator().manual_seed(wanted.seed))

    def decoder(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Decodes as our pipeline does; None where that takes diffusers' VAE."""
        return None

    def levels(
        self, vae: Any, latents: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> np.ndarray:
        """The picture u8 [height, width, channels]."""
        given = latents.to(self.device, next(vae.parameters()).dtype)
        picture = (self.decode(vae, given) if decode is None else decode(given)).float() / 2 + 0.5
        return (picture.clamp(0, 1) * PEAK).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()


class ZImage(Family):
    """Z-Image and Z-Image-Turbo, which have the same sizes."""

    network_class, tools, latent_pixels = ZImageNetwork, Z_IMAGE, 8
    branches = ("attention.to_out", "feed_forward.w2")

    def condition(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def paint(self, transformer: Any, vae: Any, wanted: Wanted, noise: torch.Tensor) -> torch.Tensor:
        states = [wanted.states.to(self.device, next(transformer.parameters()).dtype)]
        given = {"guidance_scale": 0.0, "latents": noise[None].to(self.device)}
        latents: torch.Tensor = self.painted(transformer, vae, wanted, prompt_embeds=states, **given)
        return latents

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        picture: torch.Tensor = vae.decode(scaled[None], return_dict=False)[0][0]
        return picture


class QwenImage(Family):
    """Qwen-Image-2.1."""

    network_class, tools, latent_pixels = QwenImageNetwork, QWEN_IMAGE, 16
    branches = ("attn.to_out", "img_mlp.out")
    schedule: Mapping[str, Any] = {"rising": False}

    def condition(self, states: torch.Tensor) -> Prefix:
        return Prefix(states)

    def paint(self, transformer: Any, vae: Any, wanted: Wanted, noise: torch.Tensor) -> torch.Tensor:
        states = wanted.states[None].to(self.device, next(transformer.parameters()).dtype)
        shown = torch.zeros(states.shape[:2], dtype=torch.bool, device=self.device)
        self.pipeline.encode_prompt = lambda **_: (states, None, shown)
        given = noise.flatten(1).T[None].to(self.device)
        tokens: torch.Tensor = self.painted(transformer, vae, wanted, "", latents=given)
        return tokens.T.reshape(noise.shape)

    def decoder(self) -> Callable[[torch.Tensor], torch.Tensor]:
        ours = QwenImageVae({**self.vae.config, "_class_name": QwenImageVae.class_name})
        ours.model = copy.deepcopy(self.vae)
        return ours.decode

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        mean, spread = (latents.new_tensor(vae.config[name]).view(-1, 1, 1) for name in ("latents_mean", "latents_std"))
        picture: torch.Tensor = vae.decode((latents * spread + mean)[None, :, None], return_dict=False)[0][0, :, 0]
        return picture


class Flux2Klein(Family):
    """FLUX.2 klein."""

    network_class, tools, latent_pixels = Flux2Network, FLUX2_KLEIN, 16
    branches = ("attn.to_out", "attn.to_add_out", "linear_out")
    schedule: Mapping[str, Any] = {"rising": False, "log_shift": compute_empirical_mu}

    def condition(self, states: torch.Tensor) -> Flux2Condition:
        return Flux2Condition(states)

    def paint(self, transformer: Any, vae: Any, wanted: Wanted, noise: torch.Tensor) -> torch.Tensor:
        dtype = next(transformer.parameters()).dtype
        states, given = wanted.states[None].to(self.device, dtype), noise[None].to(self.device, dtype)
        latents: torch.Tensor = self.painted(
            transformer, vae, wanted, prompt_embeds=states, latents=given, guidance_scale=1.0
        )
        return latents  # as the VAE has them, which `decode` takes

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        if len(latents) == self.channels:  # ours, as the network has them
            mean, spread = (each.view(-1, 1, 1).to(latents) for each in (vae.bn.running_mean, vae.bn.running_var))
            spread = torch.sqrt(spread + vae.config.batch_norm_eps)
            latents = torch.nn.functional.pixel_shuffle(latents * spread + mean, 2)
        picture: torch.Tensor = vae.decode(latents[None], return_dict=False)[0][0]
        return picture


@torch.no_grad()
def drawn(model: Any, branches: Sequence[str], layers: int) -> Any:
    """Random weights that keep the size of what goes through a network."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "norm" in name or name.endswith("gamma"):
            parameter.fill_(0.0 if name.endswith(("bias", "text_norm.weight")) else 1.0)
            continue
        spread = parameter[0].numel() ** -0.5
        parameter.normal_(0.0, spread / math.sqrt(2 * layers) if any(part in name for part in branches) else spread)
    return model.eval().requires_grad_(False)


FAMILIES: dict[str, type[Family]] = {"z-image": ZImage, "qwen-image": QwenImage, "flux2-klein": Flux2Klein}


def family(model: str, size: str, device: torch.device, dtype: torch.dtype) -> Family:
    """The parts of a model; its weights can be written in bfloat16, whatever their type."""
    chosen = FAMILIES[model]
    module = chosen.tools
    if size == "tiny":
        parts = module.tiny_transformer().to(device), module.tiny_vae().to(device)
    else:
        with torch.random.fork_rng(), device, default_dtype(torch.bfloat16):
            torch.manual_seed(0)
            transformer, vae = module.full_transformer(), module.full_vae()
            layers = len(getattr(transformer, "layers", None) or transformer.transformer_blocks)
            parts = drawn(transformer, chosen.branches, layers), drawn(vae, (), 1)
    transformer, vae = (rounded(rounded(part, torch.bfloat16), dtype) for part in parts)
    return chosen(transformer, vae, device, dtype)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters are of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """The model with weights of this type. Buffers stay as they are, as when diffusers loads a checkpoint."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.inference_mode()
def made(denoiser: Denoiser, specs: Sequence[PictureSpec], joins: Sequence[int]) -> list[torch.Tensor]:
    """Latents of pictures in one batch, which each joins after so many steps."""
    pictures: list[Picture | None] = [None] * len(specs)
    step = 0
    while any(one is None or one.done < one.spec.num_steps for one in pictures):
        for index, spec in enumerate(specs):
            if pictures[index] is None and step >= joins[index]:
                pictures[index] = denoiser.begin(spec)
        denoiser.step([one for one in pictures if one is not None and one.done < one.spec.num_steps])
        step += 1
    denoiser.forget()
    return [denoiser.latents(one) for one in pictures if one is not None]


def tell(what: str) -> None:
    """Say how far it is, and when."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {what}", file=sys.stderr, flush=True)


def decibels(one: np.ndarray, other: np.ndarray) -> float:
    """The peak signal-to-noise ratio of two pictures u8; infinite if they are equal."""
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return math.inf if error == 0 else 10 * math.log10(PEAK**2 / error)


@torch.inference_mode()
def compared(models: Family, denoiser: Denoiser, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """A row of the table."""
    generator = torch.Generator().manual_seed(1)
    wanted = [
        Wanted(height, width, steps, torch.randn(tokens, models.text_width, generator=generator), seed)
        for seed, ((height, width), tokens) in enumerate(zip(SIZES[options.size], PROMPTS, strict=True))
    ]

    def levels(latents: Sequence[torch.Tensor]) -> list[np.ndarray]:
        return [models.levels(models.vae, one) for one in latents]

    def worst(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
        return round(min(map(decibels, first, second)), 1)

    latents = [made(denoiser, [models.spec(one)], [0])[0] for one in wanted]
    alone = levels(latents)
    tell(f"{steps} steps: made alone")
    together = levels(made(denoiser, [models.spec(one) for one in wanted], JOINS))
    tell(f"{steps} steps: made together")
    pairs = [(one, models.noise(one)) for one in wanted]
    theirs = levels([models.paint(models.reference, models.vae, one, noise) for one, noise in pairs])
    tell(f"{steps} steps: made by diffusers")
    row = {
        "model": options.model, "size": options.size, "steps": steps, "dtype": options.dtype,
        "ours": worst(alone, theirs), "batch": worst(together, alone),
        "contrast": round(float(np.mean([one.std() for one in theirs])), 1),
    }  # fmt: skip
    if decode := models.decoder():
        row["decoder"] = worst([models.levels(models.vae, one, decode) for one in latents], alone)
    if options.float32:
        transformer, vae = (rounded(copy.deepcopy(part), torch.float32) for part in (models.reference, models.vae))
        exact = [models.paint(transformer, vae, one, noise) for one, noise in pairs]
        truth = [models.levels(vae, one) for one in exact]
        row |= {"truth": worst(alone, truth), "theirs": worst(theirs, truth)}
    return row


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures, prints the table, and returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(FAMILIES), default="z-image")
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="of the networks, and of the pictures")
    parser.add_argument("--steps", type=int, nargs="+", default=[8])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile our network")
    parser.add_argument("--float32", action="store_true", help="also compare with diffusers in float32")
    options = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    models = family(options.model, options.size, torch.device(options.device), getattr(torch, options.dtype))
    tell("diffusers' parts are made")
    denoiser = models.denoiser()
    tell("ours has their weights")
    if models.device.type == "cuda" and not options.eager:
        denoiser.network.compile()
    rows = []
    for steps in options.steps:
        rows.append(compared(models, denoiser, options, steps))
        print(rows[-1], flush=True)
    print(workload.table(rows))
    return rows


if __name__ == "__main__":
    main()
