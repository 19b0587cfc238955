"""Prompts of models that make pictures from a text and other pictures: the base of their prompt stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.models.pictures import MAX_REFERENCES, NEGATIVE_TOKENS, layered_pictures, picture, text_of
from omni_actors.engine.prompt_processors import TextPromptProcessor
from omni_actors.engine.rows import to_host
from omni_actors.errors import InvalidRequest
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Parameter, Prompt
from omni_actors.stage.engine_interface import StageInputs

NEGATIVE_PROMPT = Parameter("negative_prompt", "text", most=65_536, about="what the picture should not show")


class PicturePrompts(TextPromptProcessor):
    """Reads one message of the user: a text, and up to ten pictures, whatever their places in the message."""

    def __init__(self, _arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        allowed = {"image": MAX_REFERENCES, "audio": 0, "video": 0}
        super().__init__(config, cached_tokenizer_from_config(config.model_config), self.render, limits, allowed)

    @abstractmethod
    def write(self, text: str, pictures: int) -> str:
        """What the model reads of a text that refers to n pictures."""

    def render(self, prompt: Prompt) -> str:
        """The text of a prompt. Raises `InvalidRequest` for one that this model does not take."""
        return self.write(text_of(prompt), len(prompt.media))

    def check(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """See `TextPromptProcessor.check`; a prompt is one message of the user, with a text."""
        tensors = super().check(prompt, inputs)
        if not text_of(prompt).strip():
            raise InvalidRequest("The prompt has no text.", hint="Say what the picture is to show.", field="prompt")
        return tensors

    def tokens(self, text: str, pictures: int) -> list[int]:
        """The token ids of a text that refers to n pictures."""
        token_ids: list[int] = self._tokenizer(self.write(text, pictures), add_special_tokens=False)["input_ids"]
        return token_ids

    def tensors(self, negative: list[int] | None, pictures: Sequence[Image.Image]) -> dict[str, HostTensor]:
        """What the next stages get besides the ids: those of a negative prompt, and pixels. Raises `PromptTooLong`."""
        found = {picture(index): to_host(torch.from_numpy(np.array(image))) for index, image in enumerate(pictures)}
        if negative is not None:
            self._check_length(len(negative))
            found[NEGATIVE_TOKENS] = to_host(torch.tensor(negative, dtype=torch.int64))
        return found

    def pictures(
        self, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None
    ) -> list[Image.Image]:
        """The pictures in the order of the message, with an alpha channel. Raises `OmniError`."""
        if not prompt.media or decoder is None:
            return []
        order = [part.media for message in prompt.messages for part in message.content if part.media is not None]
        given = [(prompt.media[index], tensors[index], f"media {index} (image)") for index in order]
        return layered_pictures(given, decoder, self.limits)
