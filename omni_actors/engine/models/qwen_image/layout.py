"""Qwen-Image's latents, pictures to edit, and the template of its prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.messages import PICTURE
from omni_actors.protocol.payloads import Prompt

VAE_CLASS = "AutoencoderKLQwenImage21"


@dataclass(frozen=True)
class Scaling:
    """Mean and spread of each channel of the VAE's latents; the diffusion transformer's have 0 and 1."""

    mean: tuple[float, ...]
    spread: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Of the latents."""
        return len(self.mean)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Scaling:
        """As the VAE's config.json says. Raises `ConfigError` if it does not, or is of another size of latents."""
        mean, spread = (tuple(config.get(name) or ()) for name in ("latents_mean", "latents_std"))
        if not mean or not len(mean) == len(spread) == config.get("z_dim"):
            raise ConfigError("The checkpoint's VAE needs z_dim values in latents_mean and in latents_std.")
        if config.get("scale_factor_spatial", LATENT_PIXELS) != LATENT_PIXELS or config.get("patch_size") is not None:
            raise ConfigError(f"The checkpoint's VAE must make a latent pixel of {LATENT_PIXELS} x {LATENT_PIXELS}.")
        return cls(mean, spread)

    def of_vae(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [channels, height, width] as the VAE has them."""
        mean, spread = self._like(latents)
        return latents * spread + mean

    def of_network(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [channels, height, width] as the diffusion transformer has them."""
        mean, spread = self._like(latents)
        return (latents - mean) / spread

    def _like(self, latents: torch.Tensor) -> list[torch.Tensor]:
        return [latents.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.spread)]


LATENT_PIXELS = 16  # along an edge of a latent pixel
MULTIPLE = 32  # pixels; the text encoder has one token where the diffusion transformer has 2 x 2
MAX_REFERENCES = 10
REFERENCE_SIZE = 1024  # edge of the square whose area a picture is scaled to, as the model was trained


def picture(index: int) -> str:
    """The name of a picture's pixels, u8 [height, width, 4], from the prompt stage to the VAE encoder."""
    return f"{PICTURE}{index}"


def reference(index: int) -> str:
    """The name of its latents, f32 [channels, height, width], from there to the denoising stage."""
    return f"reference_{index}"


def scaled_size(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height that a picture is scaled to: its own proportions, the area of a square of edge `size`."""
    ratio = width / height
    new_width = math.sqrt(size * size * ratio)
    return tuple(max(1, round(edge / MULTIPLE)) * MULTIPLE for edge in (new_width, new_width / ratio))  # type: ignore[return-value]


NEGATIVE_TOKENS = "negative_token_ids"  # name of the negative prompt's token ids, i64 [tokens]
PICTURE_TOKEN = "<|image_pad|>"
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"


def written(text: str, pictures: int) -> str:
    """The text of a prompt that refers to n pictures, each with one placeholder. A space stands for no text."""
    shown = " ".join(
        f"<image{number}><|vision_start|>{PICTURE_TOKEN}<|vision_end|>" for number in range(1, pictures + 1)
    )
    return f"{SYSTEM}<|im_start|>user\n{shown}{text or ' '}<|im_end|>\n<|im_start|>assistant\n"


def text_of(prompt: Prompt) -> str:
    """The text of a prompt, which is that of one message of the user.

    Raises:
        InvalidRequest: it is a conversation, token ids or embeddings.
    """
    if prompt.length:
        raise InvalidRequest(
            "This model takes its prompt as text.", hint="Send a text instead of tokens or embeddings."
        )
    if prompt.uses_tools:
        raise InvalidRequest("This model calls no tools.", field="tools")
    if [message.role for message in prompt.messages] != ["user"]:
        raise InvalidRequest(
            "The prompt of a picture is one message of the user.",
            hint="Say all of it in one message.",
            field="messages",
        )
    return "\n".join(part.text for part in prompt.messages[0].content if part.text is not None)


class PictureTemplate:
    """Renders prompts as the model was trained with them; pictures come first, whatever their place in the message."""

    def render(self, prompt: Prompt) -> str:
        """The text of a prompt. Raises `InvalidRequest` for one that this model does not take."""
        return written(text_of(prompt), len(prompt.media))
