"""Qwen3-ForcedAligner: when the words of a text are said in a recording.

The model is that of Qwen3-ASR, with classes of time in the place of words: two marks follow each word, and the classes
at their places are when it begins and ends. The recording comes as the features that the prompt stage makes of it, and
the text as `TEXT`, so that any stage may have written it (`Sound2Words`).

Words and the order of their times are as in Qwen's package and in transformers, but for Japanese and Korean, which
those cut into words by packages that are not required here: a run of kana, and what stands between spaces, is a word.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal.inputs import PlaceholderRange
from vllm.tokenizers import cached_tokenizer_from_config

from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.encoded_requests import RequestReader, no_pictures
from omni_actors.engine.encoder import EncoderAdapter, EncoderSequence
from omni_actors.engine.models import ModelSpec, served_as
from omni_actors.engine.models.qwen3_asr.prompt import MEDIA
from omni_actors.engine.models.qwen3_asr.thinker import Qwen3Asr
from omni_actors.engine.models.thinkers import EncoderState
from omni_actors.errors import InvalidPayload, PromptTooLong
from omni_actors.protocol.messages import TEXT
from omni_actors.protocol.payloads import HearingAbility, WordTime
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, StageInputs, StageRequest, WordsEvent

ARCHITECTURE = "OmniActorsQwen3Aligner"
LONGEST_SECONDS = 185.0  # Qwen's package cuts longer recordings at a quiet place 5 s before or after 180 s
MARK = "<timestamp>"
# Each of them is a word.
IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
NEAREST = 2  # times in a row that take that of their neighbor; more are spread between the two


class Qwen3AlignerState(EncoderState):
    """Gives the class of each position in place of its state."""

    def tapped(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest class i64 [tokens]."""
        classes: torch.Tensor = cast("Qwen3Aligner", self.model).classifier(hidden).argmax(dim=-1)
        return classes


class Qwen3Aligner(Qwen3Asr):
    """vLLM's model with classes. What vLLM samples of a text is not used, so that it needs no layer of its own."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.lm_head.": "classifier.",
            "thinker.model.": "language_model.model.",
            "thinker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        classes, width = self.config.classify_num, self.config.text_config.hidden_size
        self.classifier = nn.Linear(width, classes, bias=False, dtype=vllm_config.model_config.dtype)

    # The class by which vLLM's runner prepares this model's inputs, and that gives the classes.
    get_model_state_cls = staticmethod(lambda: Qwen3AlignerState)


@served_as(ARCHITECTURE, "thinker_config")
def aligner_config(config: PretrainedConfig) -> PretrainedConfig:
    """The checkpoint's configuration with our own architecture name."""
    config.thinker_config.text_config.tie_word_embeddings = True
    return config


@dataclass(frozen=True)
class AlignedSequence(EncoderSequence):
    """A recording and a text, with the words of the text and their places."""

    words: Sequence[tuple[int, str]] = ()


class AlignerAdapter(EncoderAdapter):
    """Lays out a recording and a text for the model, and makes times of its classes."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig) -> None:
        super().__init__(arguments, config)
        hf_config = config.model_config.hf_config
        self._requests = RequestReader(no_pictures, MEDIA.audio_embeddings)
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        self._sound: int = hf_config.thinker_config.audio_token_id
        self._mark: int = hf_config.timestamp_token_id
        self._milliseconds = float(hf_config.timestamp_segment_time)
        self._most: int = config.model_config.max_model_len - 1
        self._seconds = min(LONGEST_SECONDS, hf_config.thinker_config.classify_num * self._milliseconds / 1000)

    @property
    def facts(self) -> EngineFacts:
        """The longest input, and the longest recording. It has no parameters."""
        hearing = HearingAbility(max_seconds=self._seconds)
        return EngineFacts(max_input_tokens=self._most, parameters=(), hearing=hearing)

    def sequences(self, request: StageRequest, inputs: StageInputs) -> Mapping[str, EncoderSequence]:
        """One sequence: the recording, then each word and its two marks."""
        _, features = self._requests.read(inputs.tensors, [])
        text = inputs.scalars.get(TEXT)
        words = words_of(text) if isinstance(text, str) else []
        if not words or not features:
            raise InvalidPayload("An aligner needs a recording, and a text with a word in it.")
        said = "".join(f"{word}{MARK}{MARK}" for _, word in words)
        begin, sound, end = (
            self._tokenizer(each, add_special_tokens=False)["input_ids"]
            for each in ("<|audio_start|>", "<|audio_pad|>", f"<|audio_end|>{said}")
        )
        placed, at = [], len(begin)
        for feature in features:
            length = feature.mm_position.length
            placed.append(replace(feature, mm_position=PlaceholderRange(offset=at, length=length)))
            at += length
        token_ids = [*begin, *sound * (at - len(begin)), *end]
        if len(token_ids) > self._most:
            raise PromptTooLong(f"Recording and text have {len(token_ids)} tokens; at most {self._most} fit.")
        marks = [(place, place + 1) for place, token in enumerate(token_ids) if token == self._mark]
        return {TEXT: AlignedSequence(token_ids, placed, marks, words)}

    def events(
        self, request_id: str, sequences: Mapping[str, EncoderSequence], tensors: Mapping[str, torch.Tensor]
    ) -> list[EngineEvent]:
        """The words with their times; of the sequence that warms the model up there are none."""
        events: list[EngineEvent] = []
        for name, sequence in sequences.items():
            if isinstance(sequence, AlignedSequence):
                found = in_order((tensors[name].double() * self._milliseconds).long().numpy())
                seconds = [round(time / 1000, 3) for time in found.tolist()]
                pairs = zip(sequence.words, seconds[::2], seconds[1::2], strict=True)
                words = tuple(WordTime(word, start, end, place) for (place, word), start, end in pairs)
                events.append(WordsEvent(request_id, words))
        return events


def words_of(text: str) -> list[tuple[int, str]]:
    """The words of a text without the marks between and in them, each with the place of its first character."""
    words: list[tuple[int, str]] = []
    inside = False
    for place, character in enumerate(text):
        alone = IDEOGRAPH.match(character) is not None
        if alone or character == "'" or unicodedata.category(character)[0] in "LN":
            if inside and not alone:
                words[-1] = (words[-1][0], words[-1][1] + character)
            else:
                words.append((place, character))
            inside = not alone
        elif character.isspace():
            inside = False
    return words


def in_order(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Times [n] of which none is before the one before it: those outside the longest row in order are replaced."""
    n = len(times)
    length, before = np.ones(n, np.int64), np.full(n, -1)
    for place in range(1, n):
        earlier = np.flatnonzero(times[:place] <= times[place])
        if len(earlier):
            before[place] = earlier[np.argmax(length[earlier])]
            length[place] = length[before[place]] + 1
    kept = [int(np.argmax(length))]
    while before[kept[0]] >= 0:
        kept.insert(0, int(before[kept[0]]))
    ordered = times.copy()
    for left, right in itertools.pairwise([-1, *kept, n]):
        count = right - left - 1
        low = times[left if left >= 0 else right] if count else 0
        high = times[right] if right < n else low
        steps = np.arange(1, count + 1)
        near = np.where(steps <= count + 1 - steps, low, high)
        spread = low + (high - low) / (count + 1) * steps
        ordered[left + 1 : right] = near if count <= NEAREST else spread  # fractions of a millisecond are cut off
    return ordered


SPEC = ModelSpec(
    kind="encoder",
    hf_overrides=aligner_config,
    vllm_models={ARCHITECTURE: Qwen3Aligner},
    engine={"max_num_seqs": 64, "max_num_batched_tokens": 8192, "limit_mm_per_prompt": {"audio": 1}},
    required={"enable_prompt_embeds": False, "enable_prefix_caching": False},
    adapter="omni_actors.engine.models.qwen3_asr.aligner.AlignerAdapter",
)
