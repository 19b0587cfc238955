"""What the prompt stage does with a prompt of text: chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.chat_template import ChatTemplate
from omni_actors.engine.tensors import check_rows, embeds_width
from omni_actors.errors import InvalidPayload, InvalidRequest, PromptTooLong
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaBudget, MediaLimits, check_counts, check_media
from omni_actors.protocol.fields import unpack_token_ids
from omni_actors.protocol.payloads import MEDIA_MODALITIES, PROMPT_EMBEDS, Parameter, Prompt, StageParams
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import StageInputs

NO_PARAMS = StageParams()


class Template(Protocol):
    """Writes the text of a prompt."""

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, with one placeholder per medium. Raises `InvalidRequest` for what has no place there."""


class TextPromptProcessor:
    """Turns a prompt into token ids.

    Attributes:
        parameters: what requests may set for the stage; None for the parameters of its kind.

    Args:
        config: of the stage that takes the result.
        limits: for media.
        max_media: how many media a prompt may have, by modality.
    """

    parameters: tuple[Parameter, ...] | None = None

    def __init__(
        self, config: VllmConfig, tokenizer: Any, template: Template, limits: MediaLimits, max_media: Mapping[str, int]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocabulary: int = config.model_config.get_vocab_size()
        self.embeds_width = embeds_width(config.model_config)
        self.max_tokens: int = config.model_config.max_model_len - 1  # leaves room for one token of reply
        self.limits = limits
        self.max_media = dict(max_media)
        self.by_priority = config.scheduler_config.policy == "priority"

    @classmethod
    def of(cls, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> TextPromptProcessor:
        """The processor of a model that takes text only. Raises `ConfigError` if its tokenizer has no chat template."""
        model = arguments.model_config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        template = ChatTemplate(tokenizer, model.tool_call_parser, model.tool_chat_template, text_only=True)
        return cls(config, tokenizer, template, limits, dict.fromkeys(MEDIA_MODALITIES, 0))

    def shutdown(self) -> None:
        """End what it has started: nothing."""

    # -- checks

    def check(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """Check a prompt with its media before anything is decoded; return its tensors, as `process` takes them.

        Raises:
            OmniError: something is wrong with it.
        """
        if len(inputs.media) != len(prompt.media):
            raise InvalidPayload(f"The prompt names {len(prompt.media)} media, but has {len(inputs.media)} tensors.")
        budget = MediaBudget(self.limits)
        for index, (media, tensor) in enumerate(zip(prompt.media, inputs.media, strict=True)):
            check_media(media, tensor, self.limits, budget, index)
        check_counts((media.modality for media in prompt.media), self.max_media)
        self._check_prompt(prompt)
        return [*inputs.media, *self._embeds(prompt, inputs)]

    def _check_prompt(self, prompt: Prompt) -> None:
        if prompt.token_ids:
            token_ids = unpack_token_ids(prompt.token_ids)
            if wrong := [token for token in token_ids if not 0 <= token < self._vocabulary]:
                raise InvalidPayload(f"Token id {wrong[0]} is outside the vocabulary 0..{self._vocabulary - 1}.")
        if prompt.length:
            self._check_length(prompt.length)
            return
        parts = [part for message in prompt.messages for part in message.content]
        if not any(part.media is not None or (part.text and part.text.strip()) for part in parts):
            raise InvalidRequest("The prompt is empty.", hint="Send some text, audio, image or video.", field="prompt")
        named = {part.media for part in parts} | prompt.sounds
        if unused := [index for index in range(len(prompt.media)) if index not in named]:
            raise InvalidRequest(f"No message refers to media {unused}.")

    def _embeds(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """The embeddings of a prompt, if it came as such. The thinker checks their values."""
        if prompt.embeds is None:
            return []
        if PROMPT_EMBEDS not in inputs.tensors or not self.embeds_width:
            raise InvalidRequest(f"{PROMPT_EMBEDS}: this stage takes none.", hint="Set engine.enable_prompt_embeds.")
        embeds = inputs.tensors[PROMPT_EMBEDS]
        check_rows(embeds, self.embeds_width, PROMPT_EMBEDS, minimum=1)
        return [embeds]

    def _check_length(self, n_tokens: int) -> None:
        if n_tokens > self.max_tokens:
            raise PromptTooLong(f"The prompt has {n_tokens} tokens; at most {self.max_tokens} fit.")

    # -- processing

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        tensors: Sequence[HostTensor],
        decoder: MediaDecoder | None = None,
        params: StageParams = NO_PARAMS,
    ) -> tuple[list[int], dict[str, HostTensor]]:
        """Return the token ids of a checked prompt, and its embeddings if it came as such.

        Args:
            decoder: for prompts with media.
            params: of the stage, for models that declare any.

        Raises:
            OmniError: the request is at fault.
            ValueError, VLLMClientError, jinja2.TemplateError: likewise, as vLLM and transformers report it.
        """
        if prompt.embeds is not None:  # nothing to process: there are neither texts nor media
            return unpack_token_ids(prompt.token_ids), {PROMPT_EMBEDS: tensors[0]}
        return self._tokenize(prompt), {}

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids:
            token_ids = unpack_token_ids(prompt.token_ids)
        else:  # the template has written the special tokens
            token_ids = self._tokenizer(self._template.render(prompt), add_special_tokens=False)["input_ids"]
        self._check_length(len(token_ids))
        return token_ids
