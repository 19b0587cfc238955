"""Z-Image's last stage: latents to pictures, by the VAE of diffusers. Each is one job of one step; so are previews."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from omni_actors.config.parameters import check_parameters
from omni_actors.engine.diffusion_runner import DiffusionJob, DiffusionModelRunner, DiffusionStream, StepResult
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.diffusers_layout import checkpoint_folder, part_config
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.z_image.dit_stage import LATENT_PIXELS, MAX_PIXELS
from omni_actors.engine.tensors import to_torch
from omni_actors.engine.worker_base import omni_options
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, StartupError
from omni_actors.protocol.stage import LATENTS
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from vllm.config import VllmConfig

MAX_STEPS = 16  # vLLM wants some length; each job has one
# Activations of a decode in values per pixel of the picture and channel of the last block: the largest layers have two
# such inputs and an output, and a copy for the convolution.
ACTIVATIONS = 6


class _Latents(DiffusionStream):
    """The latents of a request: first those of previews, then those of the picture. Each becomes a job."""

    def __init__(self, runner: ZImageVae) -> None:
        self._runner = runner
        self._jobs: deque[DiffusionJob] = deque()
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
        self._jobs.append(self._runner.job(tensor, preview=not complete))
        self._complete = complete
        self._seen += len(tensor.data) // tensor.dtype.itemsize

    def next_job(self) -> DiffusionJob | None:
        """That of the oldest latents."""
        return self._jobs.popleft() if self._jobs else None

    @property
    def finished(self) -> bool:
        """Whether the picture's job has been returned."""
        return self._complete and not self._jobs

    @property
    def held_bytes(self) -> int:
        """Nothing is kept between the jobs."""
        return 0

    @property
    def job_bytes(self) -> int:
        """Of the jobs to come; all have the size of the first."""
        return 0

    def close(self) -> None:
        """Forget latents that no job was made of."""
        self._jobs.clear()


class ZImageVae(DiffusionModelRunner):
    """Latents f32 [channels, height, width] to pictures u8 [8 * height, 8 * width, 3]."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._folder = checkpoint_folder(omni_options(vllm_config)["model"])
        config = part_config(self._folder, "vae")
        if config.get("_class_name") != "AutoencoderKL":
            raise ConfigError(f"The checkpoint's VAE is {config.get('_class_name')!r}, not AutoencoderKL.")
        self._channels: int = config.get("latent_channels", 16)
        self._scale: float = config.get("scaling_factor", 1.0)
        self._shift: float = config.get("shift_factor") or 0.0
        blocks: list[int] = config.get("block_out_channels", [1])
        if 2 ** (len(blocks) - 1) != LATENT_PIXELS:
            raise ConfigError(f"The checkpoint's VAE has {len(blocks)} blocks; Z-Image's has 4.")
        self._width = max(blocks[0], 1)
        self._dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self._latents: dict[str, torch.Tensor] = {}

    @property
    def facts(self) -> EngineFacts:
        """It has no parameters."""
        return EngineFacts(parameters=())

    def load(self, *, dummy: bool) -> None:
        """Load the VAE. Raises `StartupError` if diffusers is not installed or the weights cannot be read."""
        try:
            from diffusers import AutoencoderKL
        except ImportError as error:
            raise StartupError(
                "The VAE needs diffusers, which is not installed.", hint="Run pip install 'omni_actors[image]'."
            ) from error
        if dummy:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                vae = AutoencoderKL.from_config(AutoencoderKL.load_config(self._folder, subfolder="vae"))
        else:
            try:
                vae = AutoencoderKL.from_pretrained(self._folder, subfolder="vae", low_cpu_mem_usage=False)
            except (OSError, ValueError, RuntimeError) as error:
                raise StartupError(f"The VAE in {self._folder} cannot be loaded: {error}") from error
        self._vae: AutoencoderKL = vae.to(self.device, self._dtype).requires_grad_(False).eval()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Decode a picture of 64 x 64 pixels."""
        self._decode(torch.zeros(self._channels, 8, 8, device=self.device))

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request's first latents."""
        check_parameters("vae", self.facts.parameters, request.params)
        stream = _Latents(self)
        first = inputs.tensors.get(LATENTS)
        if first is None:
            raise InvalidPayload(f"This stage needs a tensor {LATENTS!r}.")
        stream.extend_tensor(first, complete=inputs.complete)
        return stream

    def job(self, tensor: HostTensor, *, preview: bool) -> DiffusionJob:
        """A job that decodes these latents. Raises `InvalidPayload` if they are none of this model's."""
        tensor.validate(LATENTS)
        shape = tensor.shape
        floating = tensor.dtype in (DType.BF16, DType.F16, DType.F32)
        if not floating or len(shape) != 3 or shape[0] != self._channels or not shape[1] or not shape[2]:
            raise InvalidPayload(
                f"{LATENTS}: needs floating-point numbers [{self._channels}, height, width]; got {tensor.dtype} "
                f"{list(shape)}."
            )
        pixels = shape[1] * shape[2] * LATENT_PIXELS**2
        if pixels > MAX_PIXELS:
            raise InvalidPayload(
                f"{LATENTS}: a picture of {pixels} pixels is larger than the {MAX_PIXELS} of this model."
            )
        latents = to_torch(tensor, LATENTS).float()
        if not torch.isfinite(latents).all():
            raise InvalidPayload(f"{LATENTS}: holds NaN or infinite values.")
        needed = pixels * self._width * ACTIVATIONS * self._dtype.itemsize
        return DiffusionJob(
            latents, 1, needed, needed, held_bytes=latents.numel() * 4, preview=preview, tokens=latents[0].numel()
        )

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Bring latents to the device."""
        self._latents[request_id] = job.payload.to(self.device)

    def remove(self, request_id: str) -> None:
        """Free latents. Unknown ids are ignored."""
        self._latents.pop(request_id, None)

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Decode these latents, one after the other: a picture fills the device by itself."""
        return {key: StepResult({"image": self._decode(self._latents[key])}) for key in request_ids}

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        scaled = (latents.to(self._dtype) / self._scale) + self._shift
        picture = self._vae.decode(scaled[None], return_dict=False)[0][0]
        levels: torch.Tensor = (picture.float() / 2 + 0.5).clamp(0, 1) * 255
        return levels.round().to(torch.uint8).permute(1, 2, 0).contiguous()

    def omni_counts(self) -> dict[str, int]:
        """Latents on the device."""
        return {"latents": len(self._latents)}


SPEC = ModelSpec(
    kind="diffusion",
    folder="text_encoder",
    hf_overrides=placeholder_overrides("num_key_value_heads", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Tokens are latent pixels: one picture of 2048 x 2048, or four of 1024 x 1024 at a time.
    engine={"max_num_seqs": 8, "max_num_batched_tokens": MAX_PIXELS // LATENT_PIXELS**2, "dtype": "bfloat16"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True, "enforce_eager": True},
    runner="omni_actors.engine.models.z_image.vae_stage.ZImageVae",
)
