"""Stages whose jobs have one step each: pictures to latents and latents to pictures, by a VAE of diffusers.

What they compute for one request fills the device by itself, so requests are computed one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from omni_actors.config.checks import check_parameters
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.diffusers_layout import (
    PartConfig,
    checkpoint_folder,
    diffusers_class,
    part_config,
    same_everywhere,
)
from omni_actors.engine.models.pictures import MAX_REFERENCES, picture, reference
from omni_actors.engine.models.pictures.denoising_stage import MAX_PIXELS, DenoisingStage, read_finite
from omni_actors.engine.models.pictures.denoising_stage import MAX_STEPS as DENOISING_STEPS
from omni_actors.engine.models.placeholder import diffusion_spec
from omni_actors.engine.rows import to_torch
from omni_actors.engine.workers.base import omni_options
from omni_actors.engine.workers.diffusion import (
    DiffusionJob,
    DiffusionModelRunner,
    DiffusionStream,
    KnownJobs,
    StepResult,
)
from omni_actors.errors import InvalidPayload, InvalidRequest, StartupError
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.messages import LATENTS
from omni_actors.protocol.payloads import Parameter
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPAQUE = "opaque"
BACKGROUND = Parameter(
    "background", "text", choices=("auto", OPAQUE, "transparent"), default="auto",
    about="opaque puts the picture on white; otherwise it keeps its alpha channel, which the prompt decides on",
)  # fmt: skip
TEXT_ENCODER = "text_encoder"  # folder of a checkpoint; vLLM reads its configuration
MAX_STEPS = 16  # vLLM wants some length; each job has one
# Activations in values per pixel of the picture and channel of the widest block at that size: the largest layers have
# two such inputs and an output, and a copy for the convolution.
ACTIVATIONS = 6
# What between its convolutions takes as long as they do, until it is compiled. Equal blocks share their code.
COMPILED = "ResnetBlock2D"


class OneStepStage(DiffusionModelRunner):
    """A stage whose jobs have one step; the payload of each is a tensor and what else is needed with it.

    Attributes:
        parameters: of requests.
    """

    parameters: ClassVar[tuple[Parameter, ...]] = ()

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.folder = checkpoint_folder(omni_options(vllm_config)["model"])
        self.dtype = cast("torch.dtype", vllm_config.model_config.dtype)

    @property
    def facts(self) -> EngineFacts:
        """What requests may set."""
        return EngineFacts(parameters=self.parameters)

    @abstractmethod
    def compute(self, given: torch.Tensor, detail: Any) -> Mapping[str, torch.Tensor]:
        """The result of a job with this payload, whose tensor is on the device."""

    def take(self, job: DiffusionJob) -> tuple[torch.Tensor, Any]:
        """Bring a job's tensor to the device."""
        given, detail = job.payload
        return given.to(self.device), detail

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Compute these jobs."""
        return {key: StepResult(self.compute(*self.held[key])) for key in request_ids}

    def omni_counts(self) -> dict[str, int]:
        """Jobs whose tensors are on the device."""
        return {"inputs": len(self.held)}


class PictureVae(ABC):
    """A VAE of diffusers, as the stages of a family use it.

    Attributes:
        class_name: of diffusers.
        latent_pixels: pixels along an edge of a latent pixel.
        multiple: pixels that the edges of pictures to encode are a multiple of.
        picture_channels: of those pictures.
        channels: of the latents.
        width: channels of the widest tensors at the size of a picture, by which memory is counted.
        model: diffusers' VAE, once it is loaded.

    Args:
        config: the VAE's config.json. Raises `ConfigError` for one of another class.
    """

    class_name: ClassVar[str]
    latent_pixels: ClassVar[int]
    multiple: ClassVar[int] = 0
    picture_channels: ClassVar[int] = 3
    channels: int
    width: int
    model: Any

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.configure(PartConfig("VAE", config, self.class_name))

    @abstractmethod
    def configure(self, config: PartConfig) -> None:
        """Take `channels`, `width` and what else is needed of the VAE's config.json. Raises `ConfigError`."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [3 or 4, height, width] from -1 to 1, of the denoising stage's latents in the VAE's type."""

    def encode(self, levels: torch.Tensor) -> torch.Tensor:
        """The latents of a picture [channels, height, width] from -1 to 1, as the denoising stage takes them."""
        raise NotImplementedError


class _VaeStage(OneStepStage):
    """Attributes: `vae_class` is the family's VAE."""

    vae_class: ClassVar[type[PictureVae]]

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.vae = self.vae_class(part_config(self.folder, "vae"))

    def load(self, *, dummy: bool) -> None:
        """Load the VAE; with `dummy`, one with random weights.

        Raises:
            StartupError: diffusers is not installed, has no such class, or cannot read the weights.
        """
        model_class = diffusers_class(self.vae.class_name)
        if dummy:
            with same_everywhere():
                vae = model_class.from_config(model_class.load_config(self.folder, subfolder="vae"))
        else:
            try:
                vae = model_class.from_pretrained(self.folder, subfolder="vae", low_cpu_mem_usage=False)
            except (OSError, ValueError, RuntimeError) as error:
                raise StartupError(f"The VAE in {self.folder} cannot be loaded: {error}") from error
        self.vae.model = vae.to(self.device, self.dtype).requires_grad_(False).eval()
        if self.device.type == "cuda":
            for block in vae.decoder.modules():
                if type(block).__name__ == COMPILED:
                    block.compile(dynamic=True)

    def needed(self, pixels: int) -> int:
        """Bytes of activations for a picture of n pixels."""
        return pixels * self.vae.width * ACTIVATIONS * self.dtype.itemsize


class VaeEncoderStage(_VaeStage):
    """Pictures u8 [height, width, channels] to latents, f32; those of each have a name of their own (`reference`)."""

    def warm_up(self) -> None:
        """Encode a small picture."""
        shape = (2 * self.vae.multiple, 2 * self.vae.multiple, self.vae.picture_channels)
        self.compute(torch.zeros(shape, dtype=torch.uint8, device=self.device), "warm_up")

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request's pictures, which the prompt stage has scaled."""
        check_parameters("vae_encoder", self.facts.parameters, request.params)
        count = len(inputs.tensors)
        if not 1 <= count <= MAX_REFERENCES or set(inputs.tensors) != {picture(index) for index in range(count)}:
            raise InvalidPayload(
                f"This stage needs the tensors picture_0, picture_1, ..., at most {MAX_REFERENCES} of them; it got "
                f"{sorted(inputs.tensors)[:16]}."
            )
        jobs = [self._job(inputs.tensors[picture(index)], index) for index in range(count)]
        return KnownJobs(jobs, sum(job.tokens for job in jobs))

    def _job(self, tensor: HostTensor, index: int) -> DiffusionJob:
        name, shape, multiple = picture(index), tensor.shape, self.vae.multiple
        tensor.validate(name)
        if tensor.dtype is not DType.U8 or len(shape) != 3 or shape[2] != self.vae.picture_channels or 0 in shape:
            raise InvalidPayload(
                f"{name} needs u8 [height, width, {self.vae.picture_channels}]; got {tensor.dtype} {list(shape)}."
            )
        pixels = shape[0] * shape[1]
        if shape[0] % multiple or shape[1] % multiple or pixels > 2 * MAX_PIXELS:
            raise InvalidPayload(
                f"{name} has {shape[1]} x {shape[0]} pixels; edges are multiples of {multiple}, and at most "
                f"{2 * MAX_PIXELS} pixels fit."
            )
        return DiffusionJob(
            (to_torch(tensor, name), reference(index)),
            1,
            self.needed(pixels),
            self.needed(pixels),
            held_bytes=pixels * shape[2],
            tokens=pixels // self.vae.latent_pixels**2,
        )

    @torch.inference_mode()
    def compute(self, given: torch.Tensor, detail: str) -> dict[str, torch.Tensor]:
        """The latents of a picture, by the name that `detail` is."""
        levels = (given.permute(2, 0, 1).float() / 255 * 2 - 1).to(self.dtype)
        return {detail: self.vae.encode(levels).float().contiguous()}


class VaeStage(_VaeStage):
    """Latents f32 [channels, height, width] to pictures u8, first those of previews."""

    def warm_up(self) -> None:
        """Decode pictures: no squares, for which code of their own would be compiled, and not only a small one."""
        for edge in (4, 64) if self.device.type == "cuda" else (4,):
            self.compute(torch.zeros(self.vae.channels, edge, edge * 3 // 2, device=self.device), False)

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request's first latents."""
        check_parameters("vae", self.facts.parameters, request.params)
        first = inputs.tensors.get(LATENTS)
        if first is None:
            raise InvalidPayload(f"This stage needs a tensor {LATENTS!r}.")
        stream = _PictureLatents(self, (request.params.extra_args or {}).get(BACKGROUND.name) == OPAQUE)
        stream.extend_tensor(first, complete=inputs.complete)
        return stream

    def job(self, tensor: HostTensor, *, preview: bool, opaque: bool) -> DiffusionJob:
        """A job that decodes these latents, without an alpha channel if `opaque`.

        Raises:
            InvalidPayload: they are none of this model's.
        """
        tensor.validate(LATENTS)
        shape, channels = tensor.shape, self.vae.channels
        floating = tensor.dtype in (DType.BF16, DType.F16, DType.F32)
        if not floating or len(shape) != 3 or shape[0] != channels or not shape[1] or not shape[2]:
            raise InvalidPayload(
                f"{LATENTS}: needs floating-point numbers [{channels}, height, width]; got {tensor.dtype} "
                f"{list(shape)}."
            )
        pixels = shape[1] * shape[2] * self.vae.latent_pixels**2
        if pixels > MAX_PIXELS:
            raise InvalidPayload(
                f"{LATENTS}: a picture of {pixels} pixels is larger than the {MAX_PIXELS} of this model."
            )
        latents = read_finite(tensor, LATENTS).float()
        return DiffusionJob(
            (latents, opaque),
            1,
            self.needed(pixels),
            self.needed(pixels),
            held_bytes=latents.numel() * 4,
            preview=preview,
            tokens=latents[0].numel(),
        )

    @torch.inference_mode()
    def compute(self, given: torch.Tensor, detail: bool) -> dict[str, torch.Tensor]:
        """The picture, on white if `detail` says that it is to be opaque."""
        shares = (self.vae.decode(given.to(self.dtype)).float() / 2 + 0.5).clamp(0, 1)
        if detail and len(shares) == 4:
            shares = 1 - shares[3] * (1 - shares[:3])
        return {"image": (shares * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()}


class _PictureLatents(KnownJobs):
    """The latents of a request: first those of previews, then those of the picture. Each becomes a job."""

    complete = False

    def __init__(self, runner: VaeStage, opaque: bool) -> None:
        super().__init__((), 0)
        self._runner, self._opaque = runner, opaque

    def extend_tensor(self, tensor: HostTensor, *, complete: bool) -> None:
        """Take the next latents; the last ones are those of the picture, the others make previews."""
        if self.complete:
            raise InvalidRequest("More latents came after the last ones.")
        job = self._runner.job(tensor, preview=not complete, opaque=self._opaque)
        self._jobs.append(job)
        self.complete = complete
        self.input_tokens += len(tensor.data) // tensor.dtype.itemsize


def picture_specs(
    part: str, dit: type[DenoisingStage], tokens: int, vae: type[VaeStage], encoder: type[VaeEncoderStage] | None = None
) -> dict[str, ModelSpec]:
    """The specs of the stages after the text encoder.

    Tokens of the VAE's are latent pixels: one picture of 2048 x 2048, or four of 1024 x 1024 at a time.

    Args:
        part: see `diffusion_spec`.
        tokens: in a step of the denoising stage.
    """

    def spec(runner: type, steps: int, at_a_time: int, tokens: int, **options: Any) -> ModelSpec:
        engine = {"dtype": "bfloat16", "max_num_seqs": at_a_time, "max_num_batched_tokens": tokens}
        return diffusion_spec(runner, part, steps, engine, folder=TEXT_ENCODER, **options)

    found = {"dit": spec(dit, DENOISING_STEPS, 32, tokens, params=dit.defaults, required={})}
    for stage, runner in (("vae", vae), ("vae_encoder", encoder)):
        if runner is not None:
            found[stage] = spec(runner, MAX_STEPS, 8, MAX_PIXELS // runner.vae_class.latent_pixels**2)
    return found
