"""Qwen2.5-Omni's thinker.

vLLM takes the token before the first picture for a picture and the token after the last sound for text, so its
positions are off by a few where a video has sound. These are transformers', with which the model was trained.

Sends text to the client and, for requests that stream, one row per computed position to the talker: last hidden state
plus token embedding (see `Qwen2_5OmniThinkerState`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData

from omni_actors.engine.models import ModelSpec, PromptMedia, renamed
from omni_actors.engine.models.thinkers import RowOutputs, ThinkerAdapter, ThinkerState, emission
from omni_actors.engine.workers.runner import Emission, Step
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageRequest

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.model_executor.models.qwen2 import Qwen2Model


class SoundedVideo(NamedTuple):
    """A video with sound: begin of sound, pictures and sound in turns of some seconds each, end of sound.

    Args:
        offset: of its first token, before which is the begin of the video; after its last token is the end of it.
        times: i64 [pictures], positions after the first.
        height: rows of a picture; `width` are its columns.
        sounds: tokens of sound.
        turn: positions in a turn.
    """

    offset: int
    times: NDArray[np.int64]
    height: int
    width: int
    sounds: int
    turn: int

    def positions(self) -> tuple[NDArray[np.int64], int]:
        """Positions [3, tokens] of pictures and sound from 0 on, and the next one after the last turn."""
        rows, columns = np.indices((self.height, self.width)).reshape(2, -1)
        frames = len(self.times)
        times = np.repeat(self.times, self.height * self.width)
        pictures = np.stack([times, np.tile(rows, frames), np.tile(columns, frames)])
        sound = np.broadcast_to(np.arange(self.sounds), (3, self.sounds))
        turns = np.concatenate([times // self.turn * 2, sound[0] // self.turn * 2 + 1])
        both, last = np.concatenate([pictures, sound], axis=1), turns == turns.max()
        return both[:, np.argsort(turns, kind="stable")], int(both[:, last].max()) + 1


def with_sound(positions: torch.Tensor, videos: Iterable[SoundedVideo]) -> torch.Tensor:
    """Positions i64 [3, P] of a prompt with those of its videos with sound, in order, replaced; what follows moves."""
    for video in videos:
        begin = positions[:, video.offset - 1].max() + 1 if video.offset else torch.tensor(0)
        inner, after = video.positions()
        end = video.offset + inner.shape[1] + 2  # after the end of the sound
        mark = (begin - 1).expand(3, 1)  # the begin of the sound has the position of the begin of the video
        finish = (begin + after).expand(3, min(2, positions.shape[1] - end + 1))  # and so have the two ends
        pieces = [positions[:, : video.offset], mark, torch.from_numpy(inner) + begin, finish]
        rest = positions[:, end + 1 :]
        if rest.shape[1]:
            pieces.append(rest + (begin + after + 1 - rest[:, 0].min()))
        positions = torch.cat(pieces, dim=1)
    return positions


class Qwen2_5OmniThinkerState(ThinkerState):
    """Emits one row [width] for each computed position: last hidden state + token embedding.

    At places that media fill there is no embedding, and where a prompt came as embeddings it is the given one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unplaced: set[str] = set()  # requests with media whose M-RoPE positions were not emitted yet

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption."""
        super().add_request(req_index, new_req_data)
        if new_req_data.mm_features:
            self._unplaced.add(new_req_data.req_id)

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        super().drop_request(request_id)
        self._unplaced.discard(request_id)

    def emit(self, step: Step) -> Emission | None:
        """The rows of the step; with the first of a prompt that has media also its M-RoPE positions.

        The first need not be those of the first position, which may come from the prefix cache.
        """
        requests = self.emitting(step)
        if not any(requests):
            return None
        n_tokens = step.batch.num_tokens  # without the padding of CUDA graphs
        embeddings = cast("VllmModel", self.model).embed_input_ids(step.batch.input_ids[:n_tokens])
        self._put_given(embeddings, step)
        media = self.media_mask(step)
        if media is not None:
            embeddings = embeddings.masked_fill(async_tensor_h2d(media, device=self.device).unsqueeze(-1), 0)
        # A new tensor, so that the next replay of a graph, which reuses the static hidden states, cannot overwrite it.
        rows = step.hidden[:n_tokens] + embeddings
        positions = {}
        for index, request in enumerate(requests):
            if request is not None and request.req_id in self._unplaced:
                self._unplaced.remove(request.req_id)
                positions[index] = self.prompt_positions(step, index)
        return emission(requests, "rows", rows, step.offsets, lambda index: {"start": step.starts[index]}, positions)

    def _put_given(self, embeddings: torch.Tensor, step: Step) -> None:
        """Put embeddings that came with a prompt in the place of those of its tokens, in `embeddings` [n_tokens, H]."""
        for index, request in enumerate(self.emitting(step)):
            given = request.prompt_embeds if request is not None else None
            start, first, last = step.starts[index], step.offsets[index], step.offsets[index + 1]
            if given is not None and start < len(given):
                rows = given[start : start + last - first]
                on_device = async_tensor_h2d(rows, device=embeddings.device, dtype=embeddings.dtype)
                embeddings[first : first + len(rows)] = on_device


ARCHITECTURE = "OmniActorsQwen2_5OmniThinker"
MIN_AUDIO_SAMPLES = 321  # makes one frame: one window every 160 samples, then two convolutions with stride 2


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
        turn = int(positions_per_second(config) * config.seconds_per_chunk)
        for offset, modality, data in self.iter_mm_features(features):
            if modality == "video" and data["use_audio_in_video"]:
                times = (np.arange(data["grid_t"]) * data["t_factor"]).astype(np.int64)
                sounds = self._compute_audio_token_count(data["audio_feature_length"])
                yield SoundedVideo(offset, times, data["grid_h"], data["grid_w"], sounds, turn)

    # The class by which vLLM's runner prepares this model's inputs, and that makes the rows.
    get_model_state_cls = staticmethod(lambda: Qwen2_5OmniThinkerState)


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
    """How many of the thinker's time positions a second of video has; of its configuration, or of the whole one."""
    rate: int = getattr(getattr(config, "thinker_config", config).vision_config, "tokens_per_second", 25)
    return rate


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=renamed(ARCHITECTURE, "thinker_config"),
    vllm_models={ARCHITECTURE: Qwen2_5OmniThinker},
    engine={"enable_prefix_caching": True, "enable_prompt_embeds": True},
    # The defaults of transformers' Qwen2_5OmniForConditionalGeneration.generate.
    params=StageParams(max_tokens=1024, temperature=0.0),
    adapter="omni_actors.engine.models.qwen2_5_omni.thinker.Qwen2_5OmniThinkerAdapter",
    media=PromptMedia(positions_per_second, MIN_AUDIO_SAMPLES, audio_window, audio_embeddings),
)
