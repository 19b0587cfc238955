"""A denoising stage: what a picture is to show becomes latents, any mix of pictures in one packed batch.

One step is one denoising step of every picture in it, whatever its size, its number of steps or its guidance.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from safetensors import SafetensorError, safe_open

from omni_actors.config.checks import check_parameters, unknown_adapter
from omni_actors.engine.models.diffusers_layout import (
    WEIGHTS,
    checkpoint_folder,
    part_config,
    read_tensors,
    same_everywhere,
)
from omni_actors.engine.models.diffusion_layers import AdaptedLinear
from omni_actors.engine.models.pictures import ADAPTER, MAX_REFERENCES, PREVIEWS, reference
from omni_actors.engine.models.pictures.denoising import (
    Denoiser,
    FlowSchedule,
    PackedNetwork,
    Picture,
    PictureSpec,
    fastest_attention,
    without_weights,
)
from omni_actors.engine.rows import check_rows, is_finite, to_torch
from omni_actors.engine.workers.base import omni_options
from omni_actors.engine.workers.diffusion import DiffusionJob, DiffusionModelRunner, DiffusionStream, StepResult
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FP8 = "fp8_per_channel"  # vLLM's name for weights with a scale for each output, rounded while they are loaded
MAX_STEPS = 1000
MAX_PIXELS = 2048 * 2048


class DenoisingStage(DiffusionModelRunner):
    """Makes latents, f32 [channels, height, width], of what `spec` reads from a request's input.

    Attributes:
        network_class: of the network.
        activations: of a step, in values of the network's width per token.
        defaults: parameters of the published model.
        latent_pixels: pixels along an edge of a latent pixel.
        multiple: pixels that a picture's edges are a multiple of.
        adaptable: whether the network takes LoRA adapters.
        guidance: the parameter of guidance.
    """

    network_class: ClassVar[Any]
    activations: ClassVar[int]
    defaults: ClassVar[StageParams]
    latent_pixels: ClassVar[int]
    multiple: ClassVar[int]
    adaptable: ClassVar[bool] = False
    quantizations = (FP8,)
    guidance: Parameter

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.folder = checkpoint_folder(omni_options(vllm_config)["model"])
        self.schedule = self.read_schedule(part_config(self.folder, "scheduler", "scheduler_config.json"))
        self.dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self._adapters: dict[str, str] = omni_options(vllm_config)["adapters"]
        if self._adapters and not self.adaptable:
            raise ConfigError("This model takes no LoRA adapters.", hint="Remove `adapters`.")
        self._compiled = device.type == "cuda" and not vllm_config.model_config.enforce_eager

    # -- the model's

    @property
    def network(self) -> Any:
        """The network, once it is loaded."""
        return self.denoiser.network

    @property
    def longest_edge(self) -> int:
        """Of a picture, in pixels."""
        return 4096

    def read_schedule(self, config: Mapping[str, Any]) -> FlowSchedule:
        """The schedule that scheduler_config.json describes. Raises `ConfigError` for one of another kind."""
        return FlowSchedule.from_config(config)

    @abstractmethod
    def warm_up_condition(self) -> Any:
        """The condition of the picture that is drawn to warm up."""

    @abstractmethod
    def conditions(self, inputs: StageInputs, guidance: float) -> tuple[Any, Any, float]:
        """What the picture is to show, what it is not to (None without guidance), and how much further than it.

        The length of each is the number of its tokens.

        Args:
            guidance: as the request has it.

        Raises:
            OmniError: the input is not this model's.
        """

    @abstractmethod
    def stream(self, spec: PictureSpec, input_tokens: int) -> DiffusionStream:
        """The jobs of a picture, with the memory that they take: its `PictureSpec`, and functions to call before it.

        A function computes a part of what the picture's conditions contribute, in a step of its own.

        Args:
            input_tokens: for the usage report.
        """

    # -- for the model

    def needed(self, tokens: int) -> int:
        """Bytes of activations of a step of n tokens, and of their rotations."""
        return self.bytes_of(tokens, self.activations)

    def bytes_of(self, tokens: int, values: int = 1) -> int:
        """Bytes of n tokens, of as many values of the network's width each, with their rotations."""
        bytes_of_one: int = values * self.network.width * self.dtype.itemsize + 8 * sum(self.network.turns["axes"])
        return tokens * bytes_of_one

    def picture_job(self, spec: PictureSpec, tokens: int, needed: int, held: int = 0, first: int = 0) -> DiffusionJob:
        """The job of a picture.

        Args:
            tokens: of each of its steps.
            needed: bytes of a step.
            held: bytes from the first step to the last, besides the latents.
            first: tokens that the first step computes besides.
        """
        network = self.network
        return DiffusionJob(
            spec,
            spec.num_steps,
            step_bytes=needed,
            final_bytes=needed,
            held_bytes=4 * network.channels * network.patch**2 * spec.tokens + held,
            tokens=tokens,
            first_tokens=first,
            reports_progress=spec.num_steps > 1,
        )

    def read_states(self, tensors: Mapping[str, HostTensor], name: str) -> torch.Tensor:
        """The hidden states of a prompt [tokens, text_width]. Raises `InvalidPayload` for anything else."""
        if name not in tensors:
            raise InvalidPayload(f"This stage needs the hidden states {name!r} of a prompt.")
        check_rows(tensors[name], self.network.text_width, name, minimum=1)
        return read_finite(tensors[name], name)

    def read_references(self, tensors: Mapping[str, HostTensor]) -> tuple[torch.Tensor, ...]:
        """The latents of the pictures that a prompt refers to. Raises `InvalidPayload` for anything else."""
        found, channels = [], self.network.channels
        for name in map(reference, range(MAX_REFERENCES)):
            if (given := tensors.get(name)) is None:
                break
            given.validate(name)
            if len(given.shape) != 3 or given.shape[0] != channels or 0 in given.shape:
                raise InvalidPayload(f"{name} needs the shape [{channels}, height, width].")
            found.append(read_finite(given, name).float())
        return tuple(found)

    # -- DiffusionModelRunner

    @property
    def facts(self) -> EngineFacts:
        """The parameters of a picture."""
        defaults, edge, fixed = self.defaults, self.longest_edge, len(self.schedule.fixed)
        return EngineFacts(
            parameters=(
                _number("width", self.multiple, edge, defaults.width, "of the picture, in pixels", self.multiple),
                _number("height", self.multiple, edge, defaults.height, "of the picture, in pixels", self.multiple),
                _number("num_steps", fixed or 1, fixed or MAX_STEPS, fixed or defaults.num_steps, "denoising steps"),
                self.guidance,
                PREVIEWS,
                *([ADAPTER] if self._adapters else []),
            )
        )

    def load(self, *, dummy: bool) -> None:
        """Load the network.

        Raises:
            StartupError: a file of the weights is missing, or they do not fit the configuration.
        """
        config = part_config(self.folder, "transformer")
        network: PackedNetwork = without_weights(lambda: self.network_class(config), self.device, self.dtype)
        if dummy:
            with same_everywhere(), torch.inference_mode():
                network.draw()
        else:
            network.load(read_tensors(str(self.folder), "", "transformer", WEIGHTS))
        load_adapters(network, self._adapters)
        if self.vllm_config.model_config.quantization:
            network.quantize()
        network.attend = fastest_attention(self.device.type, self.dtype)
        if self._compiled:
            network.compile()
        self.denoiser = Denoiser(network, self.schedule)

    def warm_up(self) -> None:
        """Take a step of one picture, and one of two sequences, for which there is other compiled code."""
        condition = self.warm_up_condition()
        steps = len(self.schedule.fixed) or 1
        for negative in (None, condition) if self.device.type == "cuda" else (None,):
            for adapter in (None, *list(self._adapters)[:1]):
                spec = PictureSpec((8, 8), steps, 0, condition, 1.0, negative, adapter=adapter)
                self.denoiser.step([self.denoiser.begin(spec)])
        self.denoiser.forget()

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check a request: its parameters and what its picture is to show."""
        check_parameters("dit", self.facts.parameters, request.params)
        params = request.params.merged_over(self.defaults)
        width, height = params.width or 0, params.height or 0
        if width * height > MAX_PIXELS:
            raise InvalidRequest(
                f"A picture of {width} x {height} pixels is larger than this model makes: at most {MAX_PIXELS} pixels.",
                field="width",
            )
        if params.adapter is not None and params.adapter not in self._adapters:
            raise unknown_adapter(params.adapter, self._adapters)
        condition, negative, guidance = self.conditions(inputs, params.guidance_scale or 0.0)
        edge = self.latent_pixels * self.network.patch
        spec = PictureSpec(
            size=(height // edge, width // edge),
            num_steps=len(self.schedule.fixed) or params.num_steps or 1,
            seed=request.effective_seed,
            condition=condition,
            guidance=guidance,
            negative=negative,
            previews=params.previews or 0,
            adapter=params.adapter,
        )
        return self.stream(spec, sum(map(len, spec.conditions)))

    def take(self, job: DiffusionJob) -> Picture | Callable[[], None]:
        """Bring a picture's noise to the device, and what its conditions contribute, as far as it is not there."""
        given: PictureSpec | Callable[[], None] = job.payload
        return self.denoiser.begin(given) if isinstance(given, PictureSpec) else given

    def remove(self, request_id: str) -> None:
        """Free a picture's latents and conditions. Unknown ids are ignored."""
        if isinstance(self.held.pop(request_id, None), Picture):
            self.denoiser.forget()

    def step(self, request_ids: Sequence[str]) -> Mapping[str, StepResult]:
        """Take these pictures a step further; the latents of those that are done come with it."""
        moving: dict[str, Picture] = {}
        for key in request_ids:
            match self.held[key]:
                case Picture() as picture:
                    moving |= {key: picture} if picture.done < picture.spec.num_steps else {}
                case prepare:
                    prepare()
        results = dict.fromkeys(request_ids, StepResult())
        previews = self.denoiser.step(list(moving.values()))
        for (key, picture), preview in zip(moving.items(), previews, strict=True):
            if picture.done == picture.spec.num_steps:
                results[key] = StepResult({"latents": self.denoiser.latents(picture)})
            elif preview is not None:
                results[key] = StepResult({"preview": preview})
        return results

    def omni_counts(self) -> dict[str, int]:
        """Pictures in progress."""
        return {"latents": sum(isinstance(job, Picture) for job in self.held.values())}


def read_finite(given: HostTensor, name: str) -> torch.Tensor:
    """A tensor on the CPU. Raises `InvalidPayload` if a value is not finite."""
    tensor = to_torch(given, name)
    if not is_finite(tensor):
        raise InvalidPayload(f"{name} holds NaN or infinite values.")
    return tensor


def _number(name: str, least: int, most: int, default: int | None, about: str, multiple: int = 0) -> Parameter:
    return Parameter(name, "int", least, most, multiple_of=multiple, default=default, about=about)


FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
METADATA = "lora_adapter_metadata"
UNSUPPORTED = ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora")


def load_adapters(network: PackedNetwork, folders: Mapping[str, str]) -> None:
    """Give a network its adapters, folders by name.

    Raises:
        ConfigError: a folder holds none, or one that changes other parts than the products of layers.
    """
    changes: dict[AdaptedLinear, list[tuple[int, int, int, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    modules = dict(network.named_modules())
    for number, (name, folder) in enumerate(folders.items()):
        for published, down, up in _matrices(name, Path(folder)):
            ours, part, parts = network.names.place(f"{published}.weight")
            module = modules.get(ours.removesuffix(".weight"))
            if not isinstance(module, AdaptedLinear) or down.shape[1] != module.in_features:
                raise ConfigError(f"adapters.{name}: {published} cannot be adapted in {network.model}.")
            changes[module].append((number, part, parts, down, up))
    for module, own in changes.items():
        ups, begin = torch.zeros(module.out_features, sum(len(down) for *_, down, _ in own)), 0
        for _, part, parts, down, up in own:
            ups.chunk(parts)[part][:, begin : begin + len(down)] = up
            begin += len(down)
        numbers = [number for number, _, _, down, _ in own for _ in down]
        module.adapter_of = torch.tensor(numbers, device=module.weight.device)
        module.down = torch.cat([down for *_, down, _ in own]).to(module.weight)
        module.up = ups.to(module.weight)
    network.adapters = tuple(folders)


def _matrices(name: str, folder: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """What an adapter changes, by published name: f32 [rank, in] and [out, rank], of which the latter is scaled."""
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 - not a mapping
            written = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"adapters.{name}: {folder} holds no LoRA adapter: {error}.",
            hint=f"Name the folder with {FILE}, as diffusers' save_lora_weights writes it.",
        ) from error
    if odd := [key for key in UNSUPPORTED if written.get(PREFIX + key)]:
        raise ConfigError(f"adapters.{name} has {odd[0]}, which is not supported.")
    for key, down in tensors.items():
        if not key.startswith(PREFIX) or not key.endswith((DOWN, UP)):
            raise ConfigError(f"adapters.{name}: {key} is no matrix of a LoRA adapter of the transformer.")
        if key.endswith(DOWN):
            up = tensors.get(key.replace(DOWN, UP))
            if up is None or up.shape[1] != len(down):
                raise ConfigError(f"adapters.{name}: {key} lacks its second matrix.")
            scale = written.get(f"{PREFIX}lora_alpha", len(down)) / len(down)
            yield key.removeprefix(PREFIX).removesuffix(DOWN), down, up * scale
