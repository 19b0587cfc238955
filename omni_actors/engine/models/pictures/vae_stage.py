"""The last stage of pictures: latents to pixels, by a VAE of diffusers. A job has one step; so have previews."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from omni_actors.config.checks import check_parameters
from omni_actors.engine.models.diffusers_layout import checkpoint_folder, part_config
from omni_actors.engine.models.pictures.denoising_stage import MAX_PIXELS
from omni_actors.engine.rows import to_torch
from omni_actors.engine.workers.base import omni_options
from omni_actors.engine.workers.diffusion import (
    DiffusionJob,
    DiffusionModelRunner,
    DiffusionStream,
    JobQueue,
    StepResult,
)
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, StartupError
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
MAX_STEPS = 16  # vLLM wants some length; each job has one
# Activations of a decode in values per pixel of the picture and channel of the last block: the largest layers have two
# such inputs and an output, and a copy for the convolution.
ACTIVATIONS = 6


class _PictureLatents(JobQueue):
    """The latents of a request: first those of previews, then those of the picture. Each becomes a job."""

    def __init__(self, runner: VaeStage, opaque: bool) -> None:
        super().__init__()
        self._runner = runner
        self._opaque = opaque
        self._complete = False
        self._seen = 0

    @property
    def input_tokens(self) -> int:
        """Values of the latents so far."""
        return self._seen

    def extend(self, token_ids: Sequence[int], *, complete: bool) -> None:
        """Refuse tokens; the end of the input has to come with the last latents."""
        if token_ids or not self._complete:
            raise InvalidRequest("This stage takes latents.")

    def extend_tensor(self, tensor: HostTensor, *, complete: bool) -> None:
        """Take the next latents; the last ones are those of the picture, the others make previews."""
        if self._complete:
            raise InvalidRequest("More latents came after the last ones.")
        self._jobs.append(self._runner.job(tensor, preview=not complete, opaque=self._opaque))
        self._complete = complete
        self._seen += len(tensor.data) // tensor.dtype.itemsize

    @property
    def finished(self) -> bool:
        """Whether the picture's job has been returned."""
        return self._complete and not self._jobs


def load_vae(folder: Path, class_name: str, device: torch.device, dtype: torch.dtype, *, dummy: bool) -> Any:
    """diffusers' VAE of a checkpoint; with `dummy`, one with random weights.

    Raises:
        StartupError: diffusers is not installed, has no such class, or cannot read the weights.
    """
    try:
        import diffusers

        vae_class: Any = getattr(diffusers, class_name)
    except (ImportError, AttributeError) as error:
        raise StartupError(
            f"The VAE needs {class_name} of diffusers, which is not installed or too old.",
            hint="Run pip install 'omni_actors[image]'.",
        ) from error
    if dummy:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            vae = vae_class.from_config(vae_class.load_config(folder, subfolder="vae"))
    else:
        try:
            vae = vae_class.from_pretrained(folder, subfolder="vae", low_cpu_mem_usage=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise StartupError(f"The VAE in {folder} cannot be loaded: {error}") from error
    return vae.to(device, dtype).requires_grad_(False).eval()


def vae_config(folder: Path, class_name: str) -> dict[str, Any]:
    """The configuration of a checkpoint's VAE. Raises `ConfigError` for one of another class."""
    config = part_config(folder, "vae")
    if config.get("_class_name") != class_name:
        raise ConfigError(f"The checkpoint's VAE is {config.get('_class_name')!r}, not {class_name}.")
    return config


class VaeStage(DiffusionModelRunner):
    """Latents f32 [channels, height, width] to pictures u8, each latent pixel `latent_pixels` wide.

    Attributes:
        class_name: of diffusers' VAE.
        latent_pixels: pixels along an edge of a latent pixel.
        parameters: of requests; with `BACKGROUND`, where pictures have an alpha channel, they may want none.
        channels: of the latents.
        width: channels of the decoder's widest tensors at the size of the picture, by which its memory is counted.
        vae: diffusers' VAE.
    """

    class_name: ClassVar[str]
    latent_pixels: ClassVar[int]
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    channels: int
    width: int
    vae: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._folder = checkpoint_folder(omni_options(vllm_config)["model"])
        self._dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self._latents: dict[str, tuple[torch.Tensor, bool]] = {}
        self.configure(vae_config(self._folder, self.class_name))

    @abstractmethod
    def configure(self, config: Mapping[str, Any]) -> None:
        """Take `channels`, `width` and what else is needed of the VAE's config.json. Raises `ConfigError`."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The picture [3 or 4, height, width] from -1 to 1, of latents in the VAE's type."""

    @property
    def facts(self) -> EngineFacts:
        """What requests may set."""
        return EngineFacts(parameters=self.parameters)

    def load(self, *, dummy: bool) -> None:
        """Load the VAE. Raises `StartupError` if diffusers is not installed or the weights cannot be read."""
        self.vae = load_vae(self._folder, self.class_name, self.device, self._dtype, dummy=dummy)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Decode a small picture."""
        self._pixels(torch.zeros(self.channels, 4, 4, device=self.device))

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request's first latents."""
        check_parameters("vae", self.facts.parameters, request.params)
        stream = _PictureLatents(self, (request.params.extra_args or {}).get(BACKGROUND.name) == OPAQUE)
        first = inputs.tensors.get(LATENTS)
        if first is None:
            raise InvalidPayload(f"This stage needs a tensor {LATENTS!r}.")
        stream.extend_tensor(first, complete=inputs.complete)
        return stream

    def job(self, tensor: HostTensor, *, preview: bool, opaque: bool) -> DiffusionJob:
        """A job that decodes these latents, without an alpha channel if `opaque`.

        Raises:
            InvalidPayload: they are none of this model's.
        """
        tensor.validate(LATENTS)
        shape = tensor.shape
        floating = tensor.dtype in (DType.BF16, DType.F16, DType.F32)
        if not floating or len(shape) != 3 or shape[0] != self.channels or not shape[1] or not shape[2]:
            raise InvalidPayload(
                f"{LATENTS}: needs floating-point numbers [{self.channels}, height, width]; got {tensor.dtype} "
                f"{list(shape)}."
            )
        pixels = shape[1] * shape[2] * self.latent_pixels**2
        if pixels > MAX_PIXELS:
            raise InvalidPayload(
                f"{LATENTS}: a picture of {pixels} pixels is larger than the {MAX_PIXELS} of this model."
            )
        latents = to_torch(tensor, LATENTS).float()
        if not torch.isfinite(latents).all():
            raise InvalidPayload(f"{LATENTS}: holds NaN or infinite values.")
        needed = pixels * self.width * ACTIVATIONS * self._dtype.itemsize
        return DiffusionJob(
            (latents, opaque),
            1,
            needed,
            needed,
            held_bytes=latents.numel() * 4,
            preview=preview,
            tokens=latents[0].numel(),
        )

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Bring latents to the device."""
        latents, opaque = job.payload
        self._latents[request_id] = latents.to(self.device), opaque

    def remove(self, request_id: str) -> None:
        """Free latents. Unknown ids are ignored."""
        self._latents.pop(request_id, None)

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Decode these latents, one after the other: a picture fills the device by itself."""
        return {key: StepResult({"image": self._pixels(*self._latents[key])}) for key in request_ids}

    def _pixels(self, latents: torch.Tensor, opaque: bool = False) -> torch.Tensor:
        picture = self.decode(latents.to(self._dtype))
        shares = (picture.float() / 2 + 0.5).clamp(0, 1)
        if opaque and len(shares) == 4:
            shares = 1 - shares[3] * (1 - shares[:3])  # on white
        levels: torch.Tensor = shares * 255
        return levels.round().to(torch.uint8).permute(1, 2, 0).contiguous()

    def omni_counts(self) -> dict[str, int]:
        """Latents on the device."""
        return {"latents": len(self._latents)}
