"""Turns the prompts of a stage that runs alone into its inputs, with the prompt stage's engine where media need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_actors.client.prompts import (
    MULTI_MODAL_DATA,
    PROMPT_KEYS,
    STAGE_KEYS,
    information_values,
    prompt_embeds,
    refuse_unknown_keys,
    to_prompt,
)
from omni_actors.client.streams import OmniTokensPrompt
from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.prompt import PromptEngine
from omni_actors.errors import InvalidRequest, suggest
from omni_actors.protocol.codec import BufferList
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, PROMPT_EMBEDS, InformationValue, StageParams
from omni_actors.protocol.tensors import HostTensor, TensorRef
from omni_actors.stage.engine_interface import EngineFacts, ErrorEvent, StageInputs, StageRequest, StreamEvent

StagePrompt = StageInputs | OmniTokensPrompt


class StagePrompts:
    """Reads prompts for one stage.

    Args:
        arguments: of the stage.
        facts: of its engine, which says what additional information it wants.
    """

    def __init__(self, arguments: OmniEngineArgs, facts: EngineFacts) -> None:
        self._arguments = arguments
        self._stage = arguments.model_config.model_stage
        self._wanted = facts.wants_information
        self._prompt_engine: PromptEngine | None = None

    def read(self, prompt: StagePrompt) -> tuple[StageInputs, dict[str, InformationValue]]:
        """Return a prompt's stage inputs and additional information. Raises `OmniError` for what cannot be read."""
        if isinstance(prompt, StageInputs):
            return prompt, {}
        if not isinstance(prompt, Mapping):
            raise InvalidRequest(f"A prompt of one stage is a mapping or StageInputs; got {type(prompt).__name__}.")
        refuse_unknown_keys(prompt, OmniTokensPrompt.__annotations__)
        given: Mapping[str, Any] = prompt
        information = self._information(given.get(ADDITIONAL_INFORMATION))
        own = {name: given[name] for name in STAGE_KEYS if name in given}
        if self._arguments.kind == "prompt":
            if own:
                raise InvalidRequest(f"The prompt stage has no input called {', '.join(own)}.")
            return self._prompt_inputs(given), information
        if given.get(MULTI_MODAL_DATA) is not None:
            prepared = self._prepare(given)
            own["tensors"] = {**own.get("tensors", {}), **prepared.tensors}
            return StageInputs(token_ids=prepared.token_ids, **own), information
        if given.get(PROMPT_EMBEDS) is not None:
            own["tensors"] = {**own.get("tensors", {}), PROMPT_EMBEDS: prompt_embeds(given[PROMPT_EMBEDS])}
        return StageInputs(token_ids=given.get("prompt_token_ids", ()), **own), information

    def _information(self, given: Any) -> dict[str, InformationValue]:
        values = information_values(given) if given is not None else {}
        for name in values:
            if name not in self._wanted:
                raise InvalidRequest(
                    f"{ADDITIONAL_INFORMATION}: the stage {self._stage!r} does not want {name!r}."
                    f"{suggest(name, self._wanted)}"
                )
        return values

    def _prompt_inputs(self, given: Mapping[str, Any]) -> StageInputs:
        """The inputs of a prompt stage."""
        buffers = BufferList()
        of_prompt = {key: given[key] for key in PROMPT_KEYS if key in given and key != ADDITIONAL_INFORMATION}
        prompt, _ = to_prompt(of_prompt, (), (), (), None, buffers)

        def tensor(ref: TensorRef) -> HostTensor:
            return HostTensor(ref.dtype, ref.shape, buffers.buffers[ref.buffer])

        media = [tensor(item.tensor) for item in prompt.media]
        tensors = {PROMPT_EMBEDS: tensor(prompt.embeds.tensor)} if prompt.embeds is not None else {}
        return StageInputs(prompt=prompt, media=media, tensors=tensors)

    def _prepare(self, given: Mapping[str, Any]) -> StreamEvent:
        """What the prompt stage would send to this one for a prompt with media."""
        if self._prompt_engine is None:
            arguments = OmniEngineArgs(self._arguments.model_config, "prompt", self._arguments.engine)
            if arguments.model_spec() is not self._arguments.model_spec():
                raise InvalidRequest(f"{MULTI_MODAL_DATA}: the stage {self._stage!r} takes no media.")
            self._prompt_engine = PromptEngine(arguments)
        self._prompt_engine.start(StageRequest("prompt", StageParams(), 0), self._prompt_inputs(given))
        events = self._prompt_engine.step()
        while not events:
            events = self._prompt_engine.step()
        event = events[0]
        if isinstance(event, ErrorEvent):
            raise event.error
        if not isinstance(event, StreamEvent):
            raise TypeError(f"The prompt stage gave {type(event).__name__}.")
        return event

    def close(self) -> None:
        """Free the prompt stage's engine."""
        if self._prompt_engine is not None:
            self._prompt_engine.shutdown()
