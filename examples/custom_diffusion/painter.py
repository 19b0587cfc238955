"""A U-Net of diffusers that paints what a label says, step by step; any mix of requests, at any steps, in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from diffusers import DDIMScheduler, UNet2DModel

from custom_diffusion import LABELS
from omni_actors.config.checks import check_parameters
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.diffusers_layout import checkpoint_folder
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.workers.base import omni_options
from omni_actors.engine.workers.diffusion import (
    DiffusionJob,
    DiffusionModelRunner,
    DiffusionStream,
    SingleJob,
    StepResult,
)
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_STEPS = 500


@dataclass(frozen=True)
class Order:
    """What a request wants."""

    label: int
    num_steps: int
    seed: int


@dataclass
class Canvas:
    """A picture in progress: its pixels with what is left of the noise, f32 [3, size, size], and its own schedule."""

    order: Order
    pixels: torch.Tensor
    schedule: DDIMScheduler
    done: int = 0


# --8<-- [start:runner]


class Painter(DiffusionModelRunner):
    """Labels to pictures, u8 [size, size, 3]."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._folder = checkpoint_folder(omni_options(vllm_config)["model"])
        self._canvases: dict[str, Canvas] = {}

    @property
    def facts(self) -> EngineFacts:
        """What requests may set."""
        steps = Parameter("num_steps", "int", 1, MAX_STEPS, default=SPEC.params.num_steps, about="denoising steps")
        return EngineFacts(parameters=(steps,))

    def load(self, *, dummy: bool) -> None:
        """Load the U-Net; with `dummy`, one with random weights."""
        folder = self._folder / "unet"
        unet = (
            UNet2DModel.from_config(UNet2DModel.load_config(folder)) if dummy else UNet2DModel.from_pretrained(folder)
        )
        if unet.config.num_class_embeds != len(LABELS):
            raise ConfigError(f"The U-Net knows {unet.config.num_class_embeds} labels, not {len(LABELS)}.")
        self._unet = unet.to(self.device).requires_grad_(False).eval()
        self._schedule = DDIMScheduler.load_config(self._folder / "scheduler")

    def warm_up(self) -> None:
        """Take a step."""
        self._predict([self._begin(Order(label=0, num_steps=1, seed=0))])

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request, and say what it will take of the device."""
        check_parameters("painter", self.facts.parameters, request.params)
        messages = inputs.prompt.messages if inputs.prompt is not None else ()
        text = " ".join(part.text or "" for message in messages for part in message.content).strip()
        if text not in LABELS:
            raise InvalidRequest(f"This model paints one of {', '.join(LABELS)}; got {text[:40]!r}.", field="prompt")
        steps = request.params.merged_over(SPEC.params).num_steps or 1
        pixels = self._unet.config.sample_size**2
        activations = 4 * pixels * 8 * max(self._unet.config.block_out_channels)
        job = DiffusionJob(
            Order(LABELS.index(text), steps, request.effective_seed),
            num_steps=steps,
            step_bytes=activations,
            final_bytes=activations,
            held_bytes=4 * 3 * pixels,
            tokens=pixels,  # a step of the stage takes `max_num_batched_tokens` of these
            reports_progress=True,
        )
        return SingleJob(job, input_tokens=1)

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Begin a picture."""
        self._canvases[request_id] = self._begin(job.payload)

    def remove(self, request_id: str) -> None:
        """Drop a picture, done or not."""
        self._canvases.pop(request_id, None)

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Take these pictures a step further, each at a step of its own."""
        # Asynchronous scheduling may ask for one more step of a picture that is done.
        moving = {key: canvas for key in request_ids if (canvas := self._canvases[key]).done < canvas.order.num_steps}
        noise = self._predict(list(moving.values())) if moving else ()
        results = dict.fromkeys(request_ids, StepResult())
        for (key, canvas), predicted in zip(moving.items(), noise, strict=True):
            moment = canvas.schedule.timesteps[canvas.done]
            canvas.pixels = canvas.schedule.step(predicted, moment, canvas.pixels).prev_sample
            canvas.done += 1
            if canvas.done == canvas.order.num_steps:
                levels = (canvas.pixels / 2 + 0.5).clamp(0, 1) * 255
                results[key] = StepResult({"image": levels.round().to(torch.uint8).permute(1, 2, 0)})
        return results

    def omni_counts(self) -> dict[str, int]:
        """Pictures in progress; zero when idle."""
        return {"latents": len(self._canvases)}

    def _begin(self, order: Order) -> Canvas:
        """A picture of pure noise, which a CPU draws by the request's seed: the same when it is made again."""
        size = self._unet.config.sample_size
        noise = torch.randn((3, size, size), generator=torch.Generator().manual_seed(order.seed))
        schedule = DDIMScheduler.from_config(self._schedule)
        schedule.set_timesteps(order.num_steps)
        return Canvas(order, noise.to(self.device), schedule)

    def _predict(self, canvases: Sequence[Canvas]) -> torch.Tensor:
        """The noise in each picture, f32 [pictures, 3, size, size], in one call of the network."""
        moments = torch.stack([canvas.schedule.timesteps[canvas.done] for canvas in canvases])
        labels = torch.tensor([canvas.order.label for canvas in canvases])
        pixels = torch.stack([canvas.pixels for canvas in canvases])
        predicted: torch.Tensor = self._unet(pixels, moments.to(self.device), labels.to(self.device)).sample
        return predicted


# --8<-- [end:runner]
# --8<-- [start:spec]

SPEC = ModelSpec(
    kind="diffusion",
    folder=str(Path(__file__).parent),  # the checkpoint has no language model whose config.json vLLM could read
    hf_overrides=placeholder_overrides("num_key_value_heads", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    engine={"max_num_seqs": 32, "max_num_batched_tokens": 8192, "dtype": "float32"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True, "enforce_eager": True},
    params=StageParams(num_steps=50),
    runner="custom_diffusion.painter.Painter",
)

# --8<-- [end:spec]
