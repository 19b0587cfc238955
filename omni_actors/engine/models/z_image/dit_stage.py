"""Z-Image's denoising stage: hidden states of prompts to latents, any mix of pictures in one packed batch.

One step is one denoising step of every picture in it, whatever its size, its number of steps or its guidance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from omni_actors.config.parameters import check_parameters
from omni_actors.engine.diffusion_runner import (
    DiffusionJob,
    DiffusionModelRunner,
    DiffusionStream,
    SingleJob,
    StepResult,
)
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.models.diffusers_layout import checkpoint_folder, part_config, part_tensors
from omni_actors.engine.models.placeholder import ARCHITECTURE, PlaceholderModel, placeholder_overrides
from omni_actors.engine.models.z_image.denoising import Denoiser, Picture, PictureSpec
from omni_actors.engine.models.z_image.dit import PATCH, Dit, DitConfig, filled
from omni_actors.engine.models.z_image.packing import fastest_attention
from omni_actors.engine.models.z_image.schedule import FlowSchedule
from omni_actors.engine.models.z_image.weights import load
from omni_actors.engine.tensors import check_rows, to_torch
from omni_actors.engine.worker_base import omni_options
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.protocol.parameters import Parameter
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STATES, NEGATIVE_STATES = "states", "negative_states"  # names of the prompts' hidden states [tokens, text_width]
MAX_STEPS = 1000
MAX_PIXELS = 2048 * 2048
LATENT_PIXELS = 8  # along an edge of a latent pixel
MULTIPLE = LATENT_PIXELS * PATCH
MAX_PREVIEWS = 16
DUMMY_SEED = 0
# Activations of a step in values of `width` per token: queries, keys and values, the two halves of the wider layer and
# what they are made from.
ACTIVATIONS = 16


class ZImageDit(DiffusionModelRunner):
    """Hidden states to latents, f32 [channels, height / 8, width / 8]."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._folder = checkpoint_folder(omni_options(vllm_config)["model"])
        self.config = dit_config(part_config(self._folder, "transformer"))
        self.schedule = FlowSchedule.from_config(part_config(self._folder, "scheduler", "scheduler_config.json"))
        self._dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self._compiled = device.type == "cuda" and not vllm_config.model_config.enforce_eager
        self._pictures: dict[str, Picture] = {}

    @property
    def facts(self) -> EngineFacts:
        """The parameters of a picture."""
        edge = min(self.config.lengths[1:]) * MULTIPLE
        defaults = SPEC.params
        return EngineFacts(
            parameters=(
                _number("width", MULTIPLE, edge, defaults.width, "of the picture, in pixels", MULTIPLE),
                _number("height", MULTIPLE, edge, defaults.height, "of the picture, in pixels", MULTIPLE),
                _number("num_steps", 1, MAX_STEPS, defaults.num_steps, "denoising steps"),
                Parameter(
                    "guidance_scale", "float", 0.0, 100.0, default=defaults.guidance_scale,
                    about="how strongly the picture follows its prompt; 0 for none, twice as fast",
                ),
                _number("previews", 0, MAX_PREVIEWS, 0, "pictures to show of the way to the final one"),
            )
        )  # fmt: skip

    def load(self, *, dummy: bool) -> None:
        """Load the network.

        Raises:
            StartupError: a file of the weights is missing.
            ConfigError: the weights do not fit the configuration.
        """
        dit = Dit.without_weights(self.config, self.device, self._dtype)
        if dummy:
            with torch.random.fork_rng(), torch.inference_mode():
                torch.manual_seed(DUMMY_SEED)  # the same in every process, so that a replayed request goes on
                dit.draw()
        else:
            load(dit, part_tensors(self._folder, "transformer"))
        dit.attend = fastest_attention(self.device.type, self._dtype)
        if self._compiled:
            dit.compile()
        self.denoiser = Denoiser(dit, self.schedule)

    def warm_up(self) -> None:
        """Take a step of one picture, and one of two sequences, for which there is other compiled code."""
        states = torch.zeros(2, self.config.text_width)
        for negative in (None, states) if self.device.type == "cuda" else (None,):
            self.denoiser.step([self.denoiser.begin(PictureSpec(16, 16, 1, 0, states, 1.0, negative))])
        self.denoiser.forget()

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request: its parameters and the hidden states of its prompts."""
        check_parameters("dit", self.facts.parameters, request.params)
        params = request.params.merged_over(SPEC.params)
        width, height, guidance = params.width or 0, params.height or 0, params.guidance_scale or 0.0
        if width * height > MAX_PIXELS:
            raise InvalidRequest(
                f"A picture of {width} x {height} pixels is larger than this model makes: at most {MAX_PIXELS} pixels.",
                field="width",
            )
        states = self._states(inputs.tensors.get(STATES), STATES)
        negative = self._states(inputs.tensors.get(NEGATIVE_STATES), NEGATIVE_STATES) if guidance > 0 else None
        spec = PictureSpec(
            height=height // LATENT_PIXELS,
            width=width // LATENT_PIXELS,
            num_steps=params.num_steps or 1,
            seed=request.effective_seed,
            states=states,
            guidance=guidance,
            negative_states=negative,
            previews=params.previews or 0,
        )
        return SingleJob(self._job(spec), len(states) + (0 if negative is None else len(negative)))

    def _states(self, given: HostTensor | None, name: str) -> torch.Tensor:
        if given is None:
            raise InvalidPayload(f"This stage needs the hidden states {name!r} of a prompt.")
        check_rows(given, self.config.text_width, name, minimum=1)
        if filled(given.shape[0]) + 2 > self.config.lengths[0]:
            raise PromptTooLong(
                f"The prompt has {given.shape[0]} tokens; this model takes {self.config.lengths[0] - 2}."
            )
        states = to_torch(given, name)
        if not torch.isfinite(states).all():
            raise InvalidPayload(f"{name} holds NaN or infinite values.")
        return states

    def _job(self, spec: PictureSpec) -> DiffusionJob:
        texts = [filled(len(each)) for each in (spec.states, spec.negative_states) if each is not None]
        tokens = sum(filled(spec.tokens) + text for text in texts)
        width, itemsize = self.config.width, self._dtype.itemsize
        rotation = 4 * sum(self.config.axes)
        return DiffusionJob(
            spec,
            spec.num_steps,
            step_bytes=tokens * (ACTIVATIONS * width * itemsize + rotation),
            final_bytes=tokens * (ACTIVATIONS * width * itemsize + rotation),
            held_bytes=4 * self.config.patch_width * spec.tokens + sum(texts) * (width * itemsize + rotation),
            tokens=tokens,
            reports_progress=spec.num_steps > 1,
        )

    def add(self, request_id: str, job: DiffusionJob) -> None:
        """Bring a picture's noise and its prompts to the device."""
        self._pictures[request_id] = self.denoiser.begin(job.payload)

    def remove(self, request_id: str) -> None:
        """Free a picture's latents and prompts. Unknown ids are ignored."""
        if self._pictures.pop(request_id, None) is not None:
            self.denoiser.forget()

    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Take these pictures a step further; the latents of those that are done come with it."""
        moving = [key for key in request_ids if self._pictures[key].done < self._pictures[key].spec.num_steps]
        results = dict.fromkeys(request_ids, StepResult())
        for key, preview in zip(moving, self.denoiser.step([self._pictures[key] for key in moving]), strict=True):
            picture = self._pictures[key]
            if picture.done == picture.spec.num_steps:
                results[key] = StepResult({"latents": picture.latents()})
            elif preview is not None:
                results[key] = StepResult({"preview": preview})
        return results

    def omni_counts(self) -> dict[str, int]:
        """Pictures in progress."""
        return {"latents": len(self._pictures)}


def _number(name: str, least: int, most: int, default: int | None, about: str, multiple: int = 0) -> Parameter:
    return Parameter(name, "int", least, most, multiple_of=multiple, default=default, about=about)


def dit_config(config: Mapping[str, Any]) -> DitConfig:
    """The sizes that a transformer's config.json describes.

    Raises:
        ConfigError: it describes another network, or lacks a size.
    """
    name = config.get("_class_name")
    if name != "ZImageTransformer2DModel":
        raise ConfigError(f"The checkpoint's transformer is {name!r}, not ZImageTransformer2DModel.")
    expected = {"all_patch_size": [PATCH], "all_f_patch_size": [1], "qk_norm": True, "siglip_feat_dim": None}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ConfigError(f"The checkpoint's transformer has {key} {config[key]!r}; only {value!r} is supported.")
    try:
        if config["n_kv_heads"] != config["n_heads"]:
            raise ConfigError("The checkpoint's transformer shares keys between heads, which is not supported.")
        return DitConfig(
            channels=config["in_channels"],
            width=config["dim"],
            layers=config["n_layers"],
            refiners=config["n_refiner_layers"],
            heads=config["n_heads"],
            text_width=config["cap_feat_dim"],
            theta=config["rope_theta"],
            axes=tuple(config["axes_dims"]),
            lengths=tuple(config["axes_lens"]),
            time_scale=config["t_scale"],
            eps=config["norm_eps"],
        )
    except KeyError as error:
        raise ConfigError(f"The config.json of the checkpoint's transformer has no {error}.") from error


SPEC = ModelSpec(
    kind="diffusion",
    folder="text_encoder",
    hf_overrides=placeholder_overrides("num_key_value_heads", MAX_STEPS),
    vllm_models={ARCHITECTURE: PlaceholderModel},
    # Tokens in a step: with those of one picture of 512 x 512 an H200 is full, so more would only let pictures wait.
    engine={"max_num_seqs": 32, "max_num_batched_tokens": 2560, "dtype": "bfloat16"},
    required={"max_model_len": MAX_STEPS + 1, "skip_tokenizer_init": True},
    params=StageParams(width=1024, height=1024, num_steps=50, guidance_scale=5.0, previews=0),
    runner="omni_actors.engine.models.z_image.dit_stage.ZImageDit",
)
