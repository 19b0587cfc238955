"""Qwen-Image's stages after the text encoder: hidden states and latents of references to latents, and the VAE's two.

States and references come from two stages. The latents of each picture have a name of their own, so that `passthrough`
joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from omni_actors.config.checkpoint import INDEX_NAME, read_json_object
from omni_actors.engine.encoder import RUNS
from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES
from omni_actors.engine.models.pictures.denoising import FlowSchedule, PictureSpec
from omni_actors.engine.models.pictures.denoising_stage import DenoisingStage, read_finite
from omni_actors.engine.models.pictures.vae_stage import BACKGROUND, VaeEncoderStage, VaeStage, picture_specs
from omni_actors.engine.models.qwen_image import LATENT_PIXELS, MULTIPLE
from omni_actors.engine.models.qwen_image.dit import Part, Prefix, QwenImageNetwork, parts
from omni_actors.engine.models.qwen_image.vae import QwenImageVae
from omni_actors.engine.workers.diffusion import DiffusionJob, KnownJobs
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import StageInputs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_REACH = 8192  # positions that the model was made for


class QwenImageDit(DenoisingStage):
    """Hidden states and latents of pictures to latents, f32 [channels, height / 16, width / 16]."""

    network_class = QwenImageNetwork
    # Queries, keys, values, the wider layer's two halves with what is made of them, keys and values of whole sequences.
    activations = 18
    defaults = StageParams(width=1024, height=1024, num_steps=40, guidance_scale=1.0, previews=0)
    latent_pixels = LATENT_PIXELS
    multiple = MULTIPLE
    guidance = Parameter(
        "guidance_scale", "float", 1.0, 100.0, default=defaults.guidance_scale,
        about="how far the picture keeps from its negative prompt, without which it has to be 1; above 1, half as fast",
    )  # fmt: skip

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._step_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._prefixes: WeakSet[Prefix] = WeakSet()  # of all requests, to count them

    def read_schedule(self, config: Mapping[str, Any]) -> FlowSchedule:
        """The schedule that scheduler_config.json describes, with the steps that model_index.json may give."""
        fixed = read_json_object(self.folder / INDEX_NAME).get("sample_sigmas") or ()
        try:
            return FlowSchedule.from_config(config, rising=False, fixed=tuple(float(share) for share in fixed))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"sample_sigmas in the checkpoint's {INDEX_NAME} are no numbers: {error}.") from error

    def warm_up_condition(self) -> Prefix:
        """A prompt of two tokens."""
        return Prefix(torch.zeros(2, self.network.text_width))

    def conditions(self, inputs: StageInputs, guidance: float) -> tuple[Prefix, Prefix | None, float]:
        """Prompt and negative prompt, which both refer to the same pictures."""
        references = self.read_references(inputs.tensors)
        condition = self._condition(inputs.tensors, STATES, references)
        if guidance > 1.0 and NEGATIVE_STATES not in inputs.tensors:
            raise InvalidRequest(
                f"guidance_scale {guidance:g} needs a negative_prompt, from which this model keeps away.",
                hint='Send one, such as " ", or leave guidance_scale at 1.',
                field="guidance_scale",
            )
        if NEGATIVE_STATES not in inputs.tensors:
            return condition, None, 0.0
        if guidance <= 1.0:
            raise InvalidRequest(
                "A negative_prompt needs a guidance_scale above 1; at 1 this model does not read it.",
                hint="Set guidance_scale, to 4 for example.",
                field="negative_prompt",
            )
        return condition, self._condition(inputs.tensors, NEGATIVE_STATES, references), guidance - 1.0

    def _condition(self, tensors: Mapping[str, HostTensor], name: str, references: tuple[torch.Tensor, ...]) -> Prefix:
        states = self.read_states(tensors, name)
        given = tensors.get(name + RUNS)
        runs = tuple(read_finite(given, name + RUNS).flatten().tolist()) if given is not None else (len(states),)
        if len(runs) != len(references) + 1 or min(runs) < 0 or sum(runs) != len(states):
            raise InvalidPayload(
                f"{name}: {len(states)} states in runs of {list(runs)} do not go between {len(references)} pictures."
            )
        prefix = Prefix(states, runs, references)
        if prefix.reach > MAX_REACH:
            raise PromptTooLong(
                f"Prompt and pictures reach {prefix.reach} positions far; this model takes {MAX_REACH}.",
                hint="Send a shorter prompt, or fewer pictures.",
            )
        self._prefixes.add(prefix)
        return prefix

    def stream(self, spec: PictureSpec, input_tokens: int) -> KnownJobs:
        """The jobs of a picture: first those that compute its prefixes, whose keys and values are held to its end.

        What is left of the prefixes when a step would have room for it is computed with the picture's first step.
        """
        prefixes: list[Prefix] = spec.conditions
        kept = sum(map(len, prefixes))
        tokens = spec.tokens * len(prefixes)
        *before, (_, last) = cut = parts(prefixes, self._step_tokens)
        if last > self._step_tokens:  # a picture
            before, last = cut, 0
        later = tokens * spec.num_steps + last
        itemsize = self.dtype.itemsize
        needed = self.needed(max(tokens, last)) + 2 * kept * self.network.width * itemsize
        jobs = [self.picture_job(spec, tokens, needed, first=last)]
        for part, count in reversed(before):
            needed = self.needed(count)
            prepare = partial(self._extend, part)
            jobs.insert(0, DiffusionJob(prepare, 1, needed, needed, tokens=count, later_tokens=later))
            later += count
        return KnownJobs(jobs, input_tokens, kept * self.network.prefix_width * itemsize, partial(self._free, prefixes))

    def _extend(self, part: Part) -> None:
        for prefix, end in part:
            self.network.extend(prefix, end)

    def _free(self, prefixes: Sequence[Prefix]) -> None:
        for prefix in prefixes:
            prefix.free()

    def omni_counts(self) -> dict[str, int]:
        """Pictures in progress, and tokens of prefixes whose keys and values are on the device."""
        kept = sum(len(prefix) for prefix in self._prefixes if prefix.kept is not None)
        return {**super().omni_counts(), "prefix_tokens": kept}


class QwenImageVaeEncoder(VaeEncoderStage):
    """Pictures u8 [height, width, 4] to latents f32 [channels, height / 16, width / 16]."""

    vae_class = QwenImageVae


class QwenImageVaeDecoder(VaeStage):
    """Latents to pictures u8 [16 * height, 16 * width, 4], or 3 if they are to be opaque."""

    vae_class = QwenImageVae
    parameters = (BACKGROUND,)


# Tokens in a step: those of one picture of 512 x 512 with guidance, or of two without, and of a prompt.
SPEC = picture_specs("vision_config", QwenImageDit, 2560, QwenImageVaeDecoder, QwenImageVaeEncoder)
