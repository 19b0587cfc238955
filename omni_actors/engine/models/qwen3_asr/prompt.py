"""Qwen3-ASR's prompts: a recording, what it may be about, and its language where that is known."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from transformers import PretrainedConfig
from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME
from vllm.config import VllmConfig

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import MAX_SENT_FRAMES, embeddings_of_seconds
from omni_actors.engine.models import PromptMedia
from omni_actors.engine.prompt_processors import PromptProcessor
from omni_actors.errors import InvalidRequest, suggest
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import AUTO, LANGUAGE, ChatMessage, ContentPart, HearingAbility, Prompt
from omni_actors.stage.engine_interface import StageInputs, StageRequest

TEXT_TAG = "<asr_text>"  # the model writes "language English<asr_text>" and then the text
LANGUAGE_WORD = "language "
NO_LANGUAGE = "None"  # as the model names it
MIN_SAMPLES = 320  # two frames of features; vLLM cannot encode the mask of a single one
LONGEST_SECONDS = 1205.0  # Qwen's package cuts longer recordings at a quiet place 5 s before or after 1200 s
FRAMES_PER_SECOND = 100
TOKENS_PER_SECOND = 20  # 13 of the sound, and more than anyone says


def audio_window(config: PretrainedConfig) -> int:
    """Frames between which the encoder of audio attends: 8 s."""
    frames: int = config.thinker_config.audio_config.n_window_infer
    return frames


MEDIA = PromptMedia(None, MIN_SAMPLES, audio_window, embeddings_of_seconds)


class AsrPrompts(PromptProcessor):
    """Turns a recording into token ids and encoded features, with texts of the system as what it may be about."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        super().__init__(arguments, config, limits, MEDIA)
        # vLLM takes no sound that is longer than what its encoder holds at a time; here it goes on in windows.
        self._input_processor.mm_encoder_cache_size = config.model_config.max_model_len
        known = tuple(config.model_config.hf_config.support_languages or LANGUAGE_CODE_TO_NAME.values())
        self.hearing: HearingAbility = HearingAbility(known, self.limits.audio_seconds)

    def render(self, prompt: Prompt) -> str:
        """The prompt as text, by the chat template, and after it how the answer begins: what the assistant says."""
        said = [part.text or "" for one in prompt.messages if one.role == "assistant" for part in one.content]
        rest = tuple(message for message in prompt.messages if message.role != "assistant")
        return super().render(msgspec.structs.replace(prompt, messages=rest)) + "".join(said)

    def _longest_sound(self, limits: MediaLimits, config: VllmConfig) -> float:
        """The longest recording in seconds, whose windows fit into a message, and whose text into the context, too."""
        windows = (MAX_SENT_FRAMES - 2) * audio_window(config.model_config.hf_config) / FRAMES_PER_SECOND
        return min(LONGEST_SECONDS, windows, config.model_config.max_model_len / TOKENS_PER_SECOND)

    def check(self, prompt: Prompt, inputs: StageInputs) -> list[HostTensor]:
        """See `TextPromptProcessor.check`.

        A prompt is one recording of the user, perhaps after texts of the system, and before the beginning of its text.
        """
        tensors = super().check(prompt, inputs)
        for place, message in enumerate(prompt.messages, 1):
            texts = [part for part in message.content if part.media is None]
            begins = place == len(prompt.messages) and message.role == "assistant"
            if not begins and (message.role not in ("system", "user") or (message.role == "user" and texts)):
                raise InvalidRequest(
                    "messages: this model writes down what it hears, and reads nothing besides.",
                    hint="Send a recording as the user's message, and names and terms in it as the system's. The "
                    "assistant's, at the end, is how the text begins.",
                    field="messages",
                )
        if not prompt.media:
            raise InvalidRequest("The prompt has no recording to write down.", hint="Send one.", field="prompt")
        return tensors

    def process(
        self, request: StageRequest, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None = None
    ) -> tuple[list[int], dict[str, HostTensor]]:
        """Return token ids and features.

        With a language, or with the beginning of the text, the answer begins with them and is the rest of the text.
        """
        named = request.information.get(LANGUAGE, AUTO)
        begins = bool(prompt.messages) and prompt.messages[-1].role == "assistant"
        if prompt.messages and (named != AUTO or begins):
            language = self._language(named) if named != AUTO else NO_LANGUAGE
            head = ContentPart(text=f"{LANGUAGE_WORD}{language}{TEXT_TAG}")
            prompt = msgspec.structs.replace(prompt, messages=(ChatMessage("assistant", (head,)), *prompt.messages))
        return super().process(request, prompt, tensors, decoder)

    def _language(self, given: object) -> str:
        """The model's name of a language that is given by name or by code, in any case."""
        known: dict[str, str] = {name.casefold(): name for name in self.hearing.languages}
        known |= {code: name for code, name in LANGUAGE_CODE_TO_NAME.items() if name in self.hearing.languages}
        if (name := known.get(str(given).casefold())) is None:
            names = ", ".join(self.hearing.languages)
            raise InvalidRequest(
                f"{LANGUAGE} must be one of {names}, or its code.{suggest(str(given)[:64], self.hearing.languages)}",
                hint="Leave it out, and the model finds it out by itself.",
                field=LANGUAGE,
            )
        return name
