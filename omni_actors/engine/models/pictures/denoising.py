"""Pictures in progress: their latents, the steps' moments, and any mix of pictures in one packed batch.

vLLM's attention is used where it is installed.
"""

from __future__ import annotations

import itertools
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models.diffusers_layout import Names, diffusers_class, fill
from omni_actors.engine.models.diffusion_layers import AdaptedLinear, rotation_at, rounded_rows
from omni_actors.engine.rows import moved
from omni_actors.errors import ConfigError
from omni_actors.stage.engine_interface import preview_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packing:
    """Sequences that lie one after the other in tensors [tokens, ...].

    Args:
        lengths: tokens of each sequence.
        offsets: i32 [sequences + 1] on the device; where each begins, and where the last ends.
        owner: i64 [tokens] on the device; the sequence that each token belongs to.
    """

    lengths: tuple[int, ...]
    offsets: torch.Tensor
    owner: torch.Tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)


class Attention(Protocol):
    """Attention of packed sequences."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
    ) -> torch.Tensor:
        """What each query finds in its own sequence: [tokens, heads, head_dim].

        Args:
            query: [tokens, heads, head_dim].
            key: [tokens of the keys, heads, head_dim]; so is `value`.
            packing: of the queries.
            keys: that of the keys; None if it is the same. A sequence may have more keys than queries.
        """


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of sequences with these lengths."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, out=offsets[1:])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    return Packing(tuple(lengths), moved(offsets, device), moved(owner, device))


def interleaved(*groups: Sequence[int]) -> torch.Tensor:
    """Where the tokens of sequences are if all of a group lie together: i64 [tokens].

    A sequence has the tokens of each group one after the other; `groups` are how many, for each sequence.
    """
    begin, begins = 0, []
    for lengths in groups:
        begins.append([begin + before for before in itertools.accumulate(lengths, initial=0)])
        begin = begins[-1].pop()
    pairs = zip(zip(*begins, strict=True), zip(*groups, strict=True), strict=True)
    return torch.cat([torch.arange(at, at + n) for ats, lengths in pairs for at, n in zip(ats, lengths, strict=True)])


def attend_each(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
) -> torch.Tensor:
    """`Attention` on every device: one call of PyTorch's for each run of sequences of the same lengths."""
    heads, head_dim = query.shape[1:]
    results = []
    begin = key_begin = 0
    for (length, key_length), count in _runs(packing.lengths, (keys or packing).lengths):
        end, key_end = begin + length * count, key_begin + key_length * count
        own_query = query[begin:end].view(count, length, heads, head_dim).transpose(1, 2)
        own_key, own_value = (
            each[key_begin:key_end].view(count, key_length, heads, head_dim).transpose(1, 2) for each in (key, value)
        )
        attended = F.scaled_dot_product_attention(own_query, own_key, own_value)
        results.append(attended.transpose(1, 2).reshape(-1, heads, head_dim))
        begin, key_begin = end, key_end
    return results[0] if len(results) == 1 else torch.cat(results)


def _runs(lengths: Sequence[int], key_lengths: Sequence[int]) -> list[tuple[tuple[int, int], int]]:
    """Pairs of lengths with the number of times that each stands in a row."""
    pairs = zip(lengths, key_lengths, strict=True)
    return [(pair, len(list(group))) for pair, group in itertools.groupby(pairs)]


def attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
) -> torch.Tensor:
    """`Attention` for CUDA in half precision: one call of PyTorch's flash attention for the whole batch."""
    from torch.nn.attention.varlen import varlen_attn

    keys = keys or packing
    output = varlen_attn(query, key, value, packing.offsets, keys.offsets, packing.longest, keys.longest)
    return output if isinstance(output, torch.Tensor) else output[0]


def vllm_attention() -> Attention | None:
    """`Attention` for CUDA in half precision by vLLM's kernels; None where they are not installed, or not for this GPU.

    With FlashAttention 3, on Hopper, a step of 2048 x 2048 pixels is 1.3 times as fast as with PyTorch's.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:  # no vLLM, or one that was built without these kernels, as for CPUs
        return None
    version = next((version for version in (3, 2) if is_fa_version_supported(version)), None)
    if version is None:
        return None

    def attend_vllm(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, keys: Packing | None = None
    ) -> torch.Tensor:
        keys = keys or packing
        output: torch.Tensor = flash_attn_varlen_func(
            query, key, value, cu_seqlens_q=packing.offsets, cu_seqlens_k=keys.offsets, max_seqlen_q=packing.longest,
            max_seqlen_k=keys.longest, fa_version=version,
        )  # fmt: skip
        return output

    return attend_vllm


def fastest_attention(device_type: str, dtype: torch.dtype) -> Attention:
    """The attention for a device and a type of numbers: on CUDA in half precision vLLM's, else PyTorch's packed one."""
    if device_type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return attend_each
    chosen = vllm_attention() or attend_varlen
    logger.info("attention of the packed batch: %s", getattr(chosen, "__name__", chosen))
    return chosen


Size = tuple[int, int]
"""Height and width of a picture in tokens."""
Network = TypeVar("Network", bound="PackedNetwork")


class PackedNetwork(nn.Module, ABC):
    """Predicts velocities from noise towards pictures, for any mix of requests, sizes, moments and conditions at once.

    A family's class is made of the transformer's config.json. It raises `ConfigError` for one that describes another
    network, or lacks a size.

    Attributes:
        model: its name, for errors.
        names: how its published weights become its parameters.
        adapters: names of its LoRA adapters, in their order.
        attend: the attention to compute with.

    Args:
        channels: of the latents.
        width: of a token.
        text_width: of the text encoder's states.
        turns: `axes` and what else `rotation_at` takes besides positions.
        patch: latent pixels along an edge of a token.
    """

    model: ClassVar[str]
    names: ClassVar[Names]
    adapters: tuple[str, ...] = ()

    def __init__(self, channels: int, width: int, text_width: int, turns: Mapping[str, Any], patch: int = 1) -> None:
        super().__init__()
        self.channels, self.width, self.text_width = channels, width, text_width
        self.turns, self.patch = turns, patch
        self.attend: Attention = attend_each

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of what is computed with them."""
        return next(self.parameters()).dtype

    @abstractmethod
    def condition(self, given: Sequence[Any]) -> list[Any]:
        """What conditions, as the stage's requests have them, contribute to every step of theirs."""

    @abstractmethod
    def lay_out(self, pictures: Sequence[Size], conditions: Sequence[Any]) -> Any:
        """Where everything lies in the batch of sequences with these pictures and what `condition` gave for each."""

    @abstractmethod
    def forward(self, patches: torch.Tensor, moments: torch.Tensor, batch: Any) -> torch.Tensor:
        """The velocities [tokens, patch_width] of packed latents of this shape, at f32 [sequences] moments.

        One that can be adapted also takes what `choose` gave, as `chosen`.
        """

    def compile(self, **options: Any) -> None:
        """Compute what is between products and attention in fewer kernels: layers' `before` and `after` attention.

        Equal layers share their code, for any batch. The options are those of `torch.compile`.
        """
        for block in self.modules():
            for half in ("before", "after"):
                if (compute := getattr(block, half, None)) is not None:
                    setattr(block, half, torch.compile(compute, dynamic=True, **options))
            if isinstance(block, AdaptedLinear) and block.scales is not None:
                block.round = torch.compile(rounded_rows, dynamic=True, **options)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy published weights. Raises `StartupError` if they do not fit."""
        fill(self, weights, f"{self.model}'s transformer", self.names)

    def quantize(self) -> None:
        """Keep the weights of the layers in FP8; other processes may have the memory."""
        for module in self.modules():
            if isinstance(module, AdaptedLinear):
                module.quantize()
        torch.cuda.empty_cache()

    def choose(self, names: Sequence[str | None]) -> torch.Tensor | None:
        """Which adapter each sequence has: [sequences, adapters] of ones and zeros. None if none has one."""
        if not any(names):
            return None
        rows = torch.tensor([[name == own for own in self.adapters] for name in names], dtype=self.dtype)
        return moved(rows, self.device)

    def draw(self) -> None:
        """Give the parameters random values that keep the size of what goes through the network."""
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """Factors f32 [tokens, 2, head_dim] for positions i64 [tokens, axes] along the axes."""
        return moved(rotation_at(positions, **self.turns), self.device)

    def patches_of(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [channels, height, width] as tokens [pixels / patch^2, patch^2 * channels]."""
        channels, height, width = latents.shape
        grid = latents.view(channels, height // self.patch, self.patch, width // self.patch, self.patch)
        return grid.permute(1, 3, 2, 4, 0).reshape(-1, self.patch**2 * channels)

    def latents_of(self, patches: torch.Tensor, size: Size) -> torch.Tensor:
        """The inverse of `patches_of`, for a picture of this size."""
        height, width = size
        grid = patches.view(height, width, self.patch, self.patch, -1)
        return grid.permute(4, 0, 2, 1, 3).reshape(-1, height * self.patch, width * self.patch)


def without_weights(make: Callable[[], Network], device: torch.device, dtype: torch.dtype) -> Network:
    """A network on a device whose parameters have any values; `draw` or a checkpoint gives them theirs."""
    with torch.device("meta"):
        network = make().to(dtype)
    return network.to_empty(device=device).requires_grad_(False).eval()


CLASS_NAME = "FlowMatchEulerDiscreteScheduler"
LogShift: TypeAlias = Callable[[int, int], float]


def _by_size(config: Mapping[str, Any]) -> LogShift:
    """The logarithm of a shift that grows with the picture, along a line between two numbers of tokens."""
    low, least = config["base_image_seq_len"], config["base_shift"]
    slope: float = (config["max_shift"] - least) / (config["max_image_seq_len"] - low)
    return lambda tokens, num_steps: tokens * slope + least - slope * low


@dataclass(frozen=True)
class FlowSchedule:
    """How the share of noise falls from step to step.

    Args:
        scheduler: of diffusers, which has the shares.
        log_shift: gives the logarithm of their shift for so many tokens and steps, if it depends on the picture.
        rising: whether the network takes the moments from 0 (noise) to 1; else it takes the shares of noise.
        fixed: the shares of noise before each step and before they are shifted, where the number of steps is fixed.
    """

    scheduler: Any
    log_shift: LogShift | None = None
    rising: bool = True
    fixed: tuple[float, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        rising: bool = True,
        fixed: tuple[float, ...] = (),
        log_shift: LogShift | None = None,
    ) -> FlowSchedule:
        """The schedule that a checkpoint's scheduler_config.json describes; for `rising` and `fixed` see the class.

        Args:
            log_shift: of schedules whose shift depends on the picture; None for what scheduler_config.json says.

        Raises:
            ConfigError: it asks for another kind of schedule.
            StartupError: diffusers is not installed.
        """
        name = config.get("_class_name", CLASS_NAME)
        if name != CLASS_NAME:
            raise ConfigError(f"The checkpoint's scheduler is {name}; this model is served with {CLASS_NAME} only.")
        if wrong := [key for key in ("invert_sigmas", "stochastic_sampling") if config.get(key)]:
            raise ConfigError(f"The checkpoint's scheduler sets {wrong[0]}, which is not supported.")
        scheduler = diffusers_class(CLASS_NAME).from_config(config)
        dynamic = scheduler.config["use_dynamic_shifting"]
        return cls(scheduler, (log_shift or _by_size(scheduler.config)) if dynamic else None, rising, fixed)

    def sigmas(self, num_steps: int, tokens: int) -> torch.Tensor:
        """The share of noise before each step and after the last: f32 [num_steps + 1], from 1 to 0.

        Args:
            tokens: of the picture.
        """
        line = self.fixed or torch.linspace(1.0, 1 / num_steps, num_steps).tolist()
        if line[-1] == 1:  # for a single step diffusers would divide by zero
            return torch.tensor([1.0, 0.0])
        shift = self.log_shift(tokens, num_steps) if self.log_shift is not None else None
        self.scheduler.set_timesteps(sigmas=line, mu=shift)
        sigmas: torch.Tensor = self.scheduler.sigmas
        return sigmas

    def moments(self, sigmas: torch.Tensor) -> torch.Tensor:
        """What the network is given for shares of noise, in [0, 1]."""
        unit = self.scheduler.config["num_train_timesteps"]
        return (unit - sigmas * unit) / unit if self.rising else sigmas


@dataclass(frozen=True)
class PictureSpec:
    """What a picture is made from; it stays the same from its first step to its last.

    Args:
        size: in tokens.
        num_steps: denoising steps.
        seed: of the noise.
        condition: what it is to show, as the network takes it: the states of a prompt, and whatever goes with them.
        guidance: how much further than its condition, away from the negative one; 0 for none.
        negative: the condition that it is not to show; None without guidance.
        previews: how many of its steps show what the picture would become.
        adapter: the LoRA adapter that it is made with.
    """

    size: Size
    num_steps: int
    seed: int
    condition: Any
    guidance: float = 0.0
    negative: Any = None
    previews: int = 0
    adapter: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the picture alone."""
        return self.size[0] * self.size[1]

    @property
    def conditions(self) -> list[Any]:
        """One for each sequence that it has in a batch: two with guidance."""
        return [self.condition] if self.negative is None else [self.condition, self.negative]


@dataclass
class Picture:
    """A picture in progress.

    Args:
        patches: its latents as tokens, f32 [tokens, patch_width], on the device.
        conditions: what each of its sequences contributes to every step.
        sigmas: f32 [num_steps + 1], on the CPU.
        done: steps.
    """

    spec: PictureSpec
    patches: torch.Tensor
    conditions: list[Any]
    sigmas: torch.Tensor
    done: int = 0


class Denoiser:
    """Takes pictures through their steps.

    Args:
        network: predicts velocities.
        schedule: of the shares of noise.
    """

    def __init__(self, network: PackedNetwork, schedule: FlowSchedule) -> None:
        self.network = network
        self.schedule = schedule
        self._members: list[Picture] = []  # of the last batch
        self._batch: Any = None
        self._chosen: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def begin(self, spec: PictureSpec) -> Picture:
        """A picture of pure noise. The noise is drawn on the CPU, so that it is the same on every device."""
        generator = torch.Generator().manual_seed(spec.seed)
        network = self.network
        height, width = (edge * network.patch for edge in spec.size)
        noise = torch.randn((network.channels, height, width), generator=generator)
        return Picture(
            spec,
            moved(network.patches_of(noise).contiguous(), network.device),
            network.condition(spec.conditions),
            self.schedule.sigmas(spec.num_steps, spec.tokens),
        )

    def latents(self, picture: Picture) -> torch.Tensor:
        """A picture's latents, f32 [channels, height, width]."""
        return self.network.latents_of(picture.patches, picture.spec.size)

    @torch.inference_mode()
    def step(self, pictures: Sequence[Picture]) -> list[torch.Tensor | None]:
        """Take each picture one step further; none is done yet.

        Returns:
            For each the latents of its preview, f32 [channels, height, width], if it is to show one now.
        """
        velocities = self._velocities(pictures) if pictures else []
        previews: list[torch.Tensor | None] = []
        for picture, velocity in zip(pictures, velocities, strict=True):
            before, after = picture.sigmas[picture.done].item(), picture.sigmas[picture.done + 1].item()
            shown = None
            if picture.done + 1 in preview_steps(picture.spec.num_steps, picture.spec.previews):
                shown = self.network.latents_of(picture.patches + before * velocity, picture.spec.size)
            picture.patches = picture.patches + (before - after) * velocity
            picture.done += 1
            previews.append(shown)
        return previews

    def _velocities(self, pictures: Sequence[Picture]) -> list[torch.Tensor]:
        """Towards the picture, f32 [tokens, patch_width] for each, with guidance applied."""
        branches = [(picture, condition) for picture in pictures for condition in picture.conditions]
        same = len(pictures) == len(self._members) and all(map(operator.is_, pictures, self._members))
        if self._batch is None or not same:  # most steps are of the same pictures as the one before
            sizes = [picture.spec.size for picture, _ in branches]
            self._batch = self.network.lay_out(sizes, [condition for _, condition in branches])
            chosen = self.network.choose([picture.spec.adapter for picture, _ in branches])
            self._chosen = {} if chosen is None else {"chosen": chosen}
            self._members = list(pictures)
        moments = self.schedule.moments(torch.stack([picture.sigmas[picture.done] for picture, _ in branches]))
        patches = torch.cat([picture.patches for picture, _ in branches])
        velocities = iter(
            self.network(patches, moved(moments, self.network.device), self._batch, **self._chosen)
            .float()
            .split([picture.spec.tokens for picture, _ in branches])
        )
        result = []
        for picture in pictures:
            velocity = next(velocities)
            if len(picture.conditions) == 2:
                velocity = velocity + picture.spec.guidance * (velocity - next(velocities))
            result.append(velocity)
        return result

    def forget(self) -> None:
        """Free the layout of the last batch; called when one of its pictures has ended."""
        self._batch, self._members, self._chosen = None, [], {}
