"""Qwen-Image's VAE encoder: the pictures that a prompt refers to become latents. Each is one job of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from omni_actors.config.checks import check_parameters
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.diffusers_layout import checkpoint_folder
from omni_actors.engine.models.pictures.denoising_stage import MAX_PIXELS
from omni_actors.engine.models.pictures.vae_stage import load_vae, vae_config
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.qwen_image.layout import (
    LATENT_PIXELS,
    MAX_REFERENCES,
    MULTIPLE,
    VAE_CLASS,
    Scaling,
    picture,
    reference,
)
from omni_actors.engine.rows import to_torch
from omni_actors.engine.workers.base import omni_options
from omni_actors.engine.workers.diffusion import (
    DiffusionJob,
    DiffusionModelRunner,
    DiffusionStream,
    KnownJobs,
    StepResult,
)
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_STEPS = MAX_REFERENCES
CHANNELS = 4  # of a picture: red, green, blue and alpha
# Activations of an encoding in values per pixel of the picture and channel of the first block, as in the decoder.
ACTIVATIONS = 6


class QwenImageVaeEncoder(DiffusionModelRunner):
    """Pictures u8 [height, width, 4] to latents f32 [channels, height / 16, width / 16]."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._folder = checkpoint_folder(omni_options(vllm_config)["model"])
        config = vae_config(self._folder, VAE_CLASS)
        self._scaling = Scaling.of(config)
        self._width: int = config.get("base_dim") or 1
        self._dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self._pictures: dict[str, tuple[str, torch.Tensor]] = {}

    @property
    def facts(self) -> EngineFacts:
        """It has no parameters."""
        return EngineFacts(parameters=())

    def load(self, *, dummy: bool) -> None:
        """Load the VAE. Raises `StartupError` if that fails."""
        self._vae: Any = load_vae(self._folder, VAE_CLASS, self.device, self._dtype, dummy=dummy)

    def warm_up(self) -> None:
        """Encode a small picture."""
        self._encode(torch.zeros(2 * MULTIPLE, 2 * MULTIPLE, CHANNELS, dtype=torch.uint8, device=self.device))

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
        name, shape = picture(index), tensor.shape
        tensor.validate(name)
        if tensor.dtype is not DType.U8 or len(shape) != 3 or shape[2] != CHANNELS or 0 in shape:
            raise InvalidPayload(f"{name} needs u8 [height, width, {CHANNELS}]; got {tensor.dtype} {list(shape)}.")
        if shape[0] % MULTIPLE or shape[1] % MULTIPLE or shape[0] * shape[1] > 2 * MAX_PIXELS:
            raise InvalidPayload(
                f"{name} has {shape[1]} x {shape[0]} pixels; edges are multiples of {MULTIPLE}, and at most "
                f"{2 * MAX_PIXELS} pixels fit."
            )
        pixels = shape[0] * shape[1]
        needed = pixels * self._width * ACTIVATIONS * self._dtype.itemsize
        payload = reference(index), to_torch(tensor, name)
        return DiffusionJob(payload, 1, needed, needed, held_bytes=pixels * CHANNELS, tokens=pixels // LATENT_PIXELS**2)

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Bring a picture to the device."""
        name, pixels = job.payload
        self._pictures[request_id] = name, pixels.to(self.device)

    def remove(self, request_id: str) -> None:
        """Free a picture. Unknown ids are ignored."""
        self._pictures.pop(request_id, None)

    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Encode these pictures, one after the other: a picture fills the device by itself."""
        results = {}
        for key in request_ids:
            name, pixels = self._pictures[key]
            results[key] = StepResult({name: self._encode(pixels)})
        return results

    @torch.inference_mode()
    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The mean of a picture's latents, as the diffusion transformer takes them."""
        levels = (pixels.permute(2, 0, 1).float() / 255 * 2 - 1).to(self._dtype)
        found = self._vae.encode(levels[None, :, None]).latent_dist.mode()
        return self._scaling.of_network(found[0, :, 0]).float().contiguous()

    def omni_counts(self) -> dict[str, int]:
        """Pictures on the device."""
        return {"pictures": len(self._pictures)}


SPEC = ModelSpec(
    kind="diffusion",
    folder="text_encoder",
    hf_overrides=placeholder_overrides("vision_config", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Tokens are latent pixels: four pictures of 1024 x 1024 at a time.
    engine={"max_num_seqs": 8, "max_num_batched_tokens": MAX_PIXELS // LATENT_PIXELS**2, "dtype": "bfloat16"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True, "enforce_eager": True},
    runner="omni_actors.engine.models.qwen_image.vae_encoder_stage.QwenImageVaeEncoder",
)
