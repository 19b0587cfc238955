"""The thinker of Qwen2.5-Omni: vLLM's own model, with an adapter for its requests.

Sends text to the client and, for requests that stream, one row per computed position to the talker: last hidden state
plus token embedding (see `Qwen2_5OmniThinkerState`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreOutput

from omni_actors.engine.models import ModelSpec, PromptMedia
from omni_actors.engine.models.qwen2_5_omni.thinker_state import Qwen2_5OmniThinkerState
from omni_actors.engine.models.qwen2_5_omni.video_positions import SoundedVideo, with_sound
from omni_actors.engine.models.thinker_adapter import ThinkerAdapter, ThinkerOutputs
from omni_actors.engine.tensors import to_host
from omni_actors.engine.worker_base import attachment_of
from omni_actors.errors import EngineError
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import StageRequest, StreamEvent

if TYPE_CHECKING:
    from vllm.model_executor.models.qwen2 import Qwen2Model

ARCHITECTURE = "OmniActorsQwen2_5OmniThinker"
MIN_AUDIO_SAMPLES = 321  # makes one frame: one window every 160 samples, then two convolutions with stride 2


def thinker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The checkpoint's configuration with our own architecture name, which is registered as a class object."""
    if hasattr(config, "thinker_config"):  # vLLM first calls the function with an empty configuration
        config.architectures = [ARCHITECTURE]
    return config


class Qwen2_5OmniThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's model, able to embed tokens on the rank of the last layers, too: a row contains a token's embedding."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        decoder = cast("Qwen2Model", self.language_model.model)
        if get_pp_group().is_last_rank and isinstance(decoder.embed_tokens, PPMissingLayer):
            config = decoder.config
            decoder.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Positions i64 [3, P] of a prompt, and what to add to a later token's place for its position."""
        positions, delta = super().get_mrope_input_positions(input_tokens, mm_features)
        videos = list(self._videos_with_sound(mm_features))
        if not videos:
            return positions, delta
        positions = with_sound(positions, videos)
        return positions, int(positions.max()) + 1 - len(input_tokens)

    def _videos_with_sound(self, features: list[MultiModalFeatureSpec]) -> Iterator[SoundedVideo]:
        config = self.config
        turn = int(positions_per_second_of(config) * config.seconds_per_chunk)
        for offset, modality, data in self.iter_mm_features(features):
            if modality == "video" and data["use_audio_in_video"]:
                times = (np.arange(data["grid_t"]) * data["t_factor"]).astype(np.int64)
                sounds = self._compute_audio_token_count(data["audio_feature_length"])
                yield SoundedVideo(offset, times, data["grid_h"], data["grid_w"], sounds, turn)

    @staticmethod
    def get_model_state_cls() -> type[Qwen2_5OmniThinkerState]:
        """The class by which vLLM's runner prepares this model's inputs, and that makes the rows."""
        return Qwen2_5OmniThinkerState


class RowOutputs(ThinkerOutputs):
    """Streams a row per position, in order, each position once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_row = 0
        self._held: list[torch.Tensor] = []  # rows from `_next_row` on whose text is kept back
        self._mrope_positions: torch.Tensor | None = None

    def stream(self, output: EngineCoreOutput, spoken: int, *, final: bool) -> StreamEvent | None:
        """The new rows of the prompt and of tokens that are certain to be spoken."""
        self._keep(attachment_of(output))
        start = self._next_row
        rows = torch.cat(self._held) if len(self._held) > 1 else self._held[0] if self._held else None
        tensors: dict[str, HostTensor] = {}
        if rows is not None:
            certain = len(self._prompt_token_ids) + spoken - start
            self._held = [rows[certain:]] if certain < len(rows) else []
            rows = rows[:certain]
            if len(rows):
                tensors["rows"] = to_host(rows)
                self._next_row += len(rows)
        if not tensors and not final:
            return None
        scalars: dict[str, int] = {}
        if start == 0:
            scalars["prompt_tokens"] = len(self._prompt_token_ids)
            if self._mrope_positions is not None:
                tensors["mrope_positions"] = to_host(self._mrope_positions)
        return StreamEvent(self._request_id, tensors=tensors, scalars=scalars, start=start, final=final)

    def _keep(self, emitted: Mapping[str, Any]) -> None:
        """Append the rows that have not come yet."""
        if not emitted:
            return
        end = self._next_row + sum(map(len, self._held))
        skip = end - emitted["start"]
        if skip < 0:
            raise EngineError(f"Rows {end} to {emitted['start']} of request {self._request_id!r} are missing.")
        rows = emitted["rows"][skip:]  # a preempted request computes its first positions again
        if len(rows):
            self._held.append(rows)
        if "mrope_positions" in emitted and not end:
            self._mrope_positions = emitted["mrope_positions"]


def audio_embeddings(frames: int) -> int:
    """Embeddings of this many frames of audio: a convolution of stride 2, then pooling by 2."""
    return ((frames - 1) // 2 - 1) // 2 + 1


def audio_window(config: PretrainedConfig) -> int:
    """Frames between which the encoder of audio attends: 2 s."""
    frames: int = 2 * config.thinker_config.audio_config.n_window
    return frames


class Qwen2_5OmniThinkerAdapter(ThinkerAdapter):
    """The thinker's requests and their rows."""

    outputs_class = RowOutputs
    row_per_position = True

    audio_embeddings = staticmethod(audio_embeddings)

    def reads_prefix_cache(self, request: StageRequest, features: Sequence[MultiModalFeatureSpec]) -> bool:
        """Always: the rows of cached positions were kept."""
        return True


def positions_per_second(config: PretrainedConfig) -> int:
    """How many of the thinker's time positions a second of video has."""
    return positions_per_second_of(config.thinker_config)


def positions_per_second_of(thinker: PretrainedConfig) -> int:
    """Likewise, from the part of the configuration that is the thinker's."""
    rate: int = getattr(thinker.vision_config, "tokens_per_second", 25)
    return rate


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=thinker_config,
    vllm_models={ARCHITECTURE: Qwen2_5OmniThinker},
    engine={"enable_prefix_caching": True, "enable_prompt_embeds": True},
    # The defaults of transformers' Qwen2_5OmniForConditionalGeneration.generate.
    params=StageParams(max_tokens=1024, temperature=0.0),
    adapter="omni_actors.engine.models.qwen2_5_omni.thinker.Qwen2_5OmniThinkerAdapter",
    media=PromptMedia(positions_per_second, MIN_AUDIO_SAMPLES, audio_window, audio_embeddings),
)
