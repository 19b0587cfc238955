"""Qwen3-ASR's model, which is vLLM's, and what it writes: the language of a recording and the text."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.qwen3_asr import Qwen3ASRForConditionalGeneration

from omni_actors.engine.adapter import Admission, TextAdapter, TextDecoder, TextOutputs
from omni_actors.engine.encoded_requests import RequestReader, no_pictures
from omni_actors.engine.models import ModelSpec, renamed
from omni_actors.engine.models.qwen3_asr.prompt import LANGUAGE_WORD, MEDIA, NO_LANGUAGE, TEXT_TAG
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest, TextEvent

ARCHITECTURE = "OmniActorsQwen3Asr"
SECOND = 100  # frames that the encoder's convolutions take at a time
LONGEST_HEAD = 64  # characters before the text; a longer beginning is text


class Qwen3Asr(Qwen3ASRForConditionalGeneration):
    """vLLM's model, with sounds of less than a second encoded as transformers does it, whatever is beside them.

    vLLM pads the last second of each sound as the longest one of the batch is. The convolutions see that padding.
    """

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Embeddings [n, width] of each sound, from features [128, frames] of all of them and their lengths."""
        lengths, features = kwargs.get("audio_feature_lengths"), kwargs.get("input_audio_features")
        if lengths is None or features is None or int(lengths.max()) >= SECOND:
            return super().embed_multimodal(**kwargs)
        mask = kwargs["feature_attention_mask"]  # is not read, but counted
        silence = {"audio_feature_lengths": lengths.new_full((1,), SECOND), "feature_attention_mask": mask[:1]}
        kwargs |= {name: torch.cat([kwargs[name], more]) for name, more in silence.items()}
        kwargs["input_audio_features"] = torch.cat([features, features.new_zeros(len(features), SECOND)], dim=1)
        embeddings: Any = super().embed_multimodal(**kwargs)
        return embeddings[:-1]


class AsrOutputs(TextOutputs):
    """Gives out the text alone; the language before it goes with the end of the request.

    Args:
        begun: the text begins in the prompt, so that no language comes before it.
    """

    def __init__(self, request_id: str, decoder: TextDecoder, begun: bool) -> None:
        super().__init__(request_id, decoder)
        self._head: str | None = None if begun else ""

    def _text(self, text: str, token_ids: list[int], finished: bool) -> TextEvent:
        if self._head is not None:
            self._head += text
            before, tag, after = self._head.partition(TEXT_TAG)
            if tag:
                name = before.strip().removeprefix(LANGUAGE_WORD).strip()
                self.language, text = name if name != NO_LANGUAGE else "", after
            elif not finished and may_be_head(self._head):
                return TextEvent(self._request_id, "", token_ids)
            else:
                text = self._head
            self._head = None
        return TextEvent(self._request_id, text, token_ids)


def may_be_head(text: str) -> bool:
    """Whether the beginning of an answer may be that of a language before the text."""
    begun = text.lstrip()
    return len(text) <= LONGEST_HEAD and begun[: len(LANGUAGE_WORD)] == LANGUAGE_WORD[: len(begun)]


class AsrAdapter(TextAdapter):
    """Turns the encoded request of the prompt stage into a vLLM request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests = RequestReader(no_pictures, MEDIA.audio_embeddings)
        self._tag: int = self._tokenizer.convert_tokens_to_ids(TEXT_TAG)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check tokens and features. Raises `OmniError` for what the model cannot take."""
        token_ids, features = self._requests.read(inputs.tensors, inputs.token_ids)
        self.check_tokens(token_ids)
        core_request = self.make_request(request, token_ids, None, mm_features=features or None)
        decoder = TextDecoder(self._tokenizer, core_request)
        heard = features[-1].mm_position.offset if features else 0
        return Admission(core_request, AsrOutputs(request.request_id, decoder, self._tag in token_ids[heard:]))


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=renamed(ARCHITECTURE, "thinker_config"),
    vllm_models={ARCHITECTURE: Qwen3Asr},
    engine={"enable_prefix_caching": True, "limit_mm_per_prompt": {"audio": 1}},
    required={"enable_prompt_embeds": False},
    params=StageParams(max_tokens=8192, temperature=0.0),  # twice that of Qwen's package: 20 minutes of a fast speaker
    adapter="omni_actors.engine.models.qwen3_asr.thinker.AsrAdapter",
    media=MEDIA,
    prompts="omni_actors.engine.models.qwen3_asr.prompt.AsrPrompts",
)
