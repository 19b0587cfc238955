"""MiniCPM-o's thinker: a Qwen3 that reads and hears, and gives the talker a row for each token of its answer.

A row is what the talker's layers take: the token's embedding in the talker's table, plus the projected hidden state of
the token. Both are computed here, because the talker's width is a fifth of the thinker's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.minicpmo import MiniCPMWhisperEncoder, MultiModalProjector
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d

from omni_actors.engine.adapter import Admission, TextAdapter, TextDecoder
from omni_actors.engine.encoded_requests import FEATURES, LENGTHS, RequestReader
from omni_actors.engine.models import ModelSpec, renamed
from omni_actors.engine.models.minicpm_o.config import POOLED, QUERIES, hearing_part, speech_part
from omni_actors.engine.models.minicpm_o.pictures import (
    FRAME_SIZES,
    FRAMES,
    PIXELS,
    SIZES,
    SOUND,
    SOUND_LENGTH,
    PictureEncoder,
    joined,
)
from omni_actors.engine.models.minicpm_o.prompt import (
    MEDIA,
    DummyInputs,
    Info,
    MarkedMedia,
    audio_embeddings,
    audio_window,
    media_embeddings,
)
from omni_actors.engine.models.thinkers import EmitRows, RowOutputs, ThinkerState, emission
from omni_actors.engine.workers.runner import Emission, Step
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageInputs, StageRequest

ARCHITECTURE = "OmniActorsMiniCpmOThinker"
SPEECH_BEGIN, SPEECH_END = "<|tts_bos|>", "<|tts_eos|>"
SECOND = 50  # positions of the encoder of sounds


class SpeechRows(nn.Module):
    """Tokens and hidden states to the rows that the talker takes."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        speech = speech_part(config)
        width = speech["hidden_size"]
        self.table = nn.Embedding(speech["num_text_tokens"], width)
        self.linear1, self.linear2 = nn.Linear(config.hidden_size, width), nn.Linear(width, width)
        self._normalizes: bool = speech.get("normalize_projected_hidden", False)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] of tokens [n] and their states [n, thinker's width]."""
        projected = self.linear2(F.relu(self.linear1(hidden)))
        if self._normalizes:
            projected = F.normalize(projected, dim=-1)
        rows: torch.Tensor = self.table(tokens) + projected
        return rows


@MULTIMODAL_REGISTRY.register_processor(MarkedMedia, info=Info, dummy_inputs=DummyInputs)
class MiniCpmOThinker(Qwen3ForCausalLM, SupportsMultiModal):
    """vLLM's Qwen3 and encoder, and what makes the talker's rows."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "llm.": "",
            "tts.emb_text.": "speech_rows.table.",
            "tts.projector_semantic.": "speech_rows.",
            "tts.": None,
            "vpm.": "pictures.vpm.",
            "resampler.": "pictures.resampler.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        hearing = hearing_part(config)
        self.speech_rows = SpeechRows(config)
        self.apm = MiniCPMWhisperEncoder(hearing)
        self.audio_projection_layer = MultiModalProjector(hearing.d_model, config.hidden_size)
        self.pictures = PictureEncoder(vllm_config, prefix)

    embed_input_ids = SupportsMultiModal.embed_input_ids

    def embed_multimodal(self, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Embeddings [n, width] of each sound or picture.

        Args:
            kwargs: features [mel bins, frames] of all sounds and their lengths, patches of all pictures and the sizes
                of each one's slices, or both of all videos.
        """
        if FRAMES in kwargs:
            seen = self._see(kwargs[FRAMES], list(kwargs[FRAME_SIZES]))
            heard = kwargs[SOUND].split(kwargs[SOUND_LENGTH].flatten().tolist(), dim=1)
            return tuple(joined(frames, self._hear(sound)) for frames, sound in zip(seen, heard, strict=True))
        if PIXELS in kwargs:
            return self._see(kwargs[PIXELS], list(kwargs[SIZES]))
        return tuple(map(self._hear, kwargs[FEATURES].split(kwargs[LENGTHS].flatten().tolist(), dim=1)))

    def _see(self, patches: torch.Tensor, sizes: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        seen = self.pictures(patches, torch.cat(sizes))
        each: tuple[torch.Tensor, ...] = seen.split([len(one) * QUERIES for one in sizes])
        return each

    def _hear(self, features: torch.Tensor) -> torch.Tensor:
        """Embeddings of one sound, half a minute at a time.

        It is encoded alone: padded beside a longer one, its end would sound different.
        """
        heard = [features.new_zeros(0, self.config.hidden_size, dtype=self.apm.conv1.weight.dtype)]
        for part in features.split(audio_window(self.config), dim=1):
            if audio_embeddings(part.shape[1]):
                heard.append(self._hear_part(part))
        return torch.cat(heard)

    def _hear_part(self, features: torch.Tensor) -> torch.Tensor:
        seconds = torch.arange((features.shape[1] + 1) // 2, device=features.device) // SECOND
        later = seconds[None, :] > seconds[:, None]
        mask = torch.zeros(later.shape, dtype=self.apm.conv1.weight.dtype, device=later.device)
        states = self.apm(features[None], mask.masked_fill(later, -torch.inf)[None, None]).last_hidden_state
        embeddings: torch.Tensor = self.audio_projection_layer(states).transpose(1, 2)
        return F.avg_pool1d(embeddings, POOLED)[0].T

    # The class by which vLLM's runner prepares this model's inputs, and that makes the rows.
    get_model_state_cls = staticmethod(lambda: MiniCpmOThinkerState)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the thinker's part of the checkpoint; return the names of the parameters that were set."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class MiniCpmOThinkerState(ThinkerState):
    """Emits a row [width] for each computed position of an answer."""

    model: MiniCpmOThinker

    def emit(self, step: Step) -> Emission | None:
        """The rows of the step's tokens that belong to answers."""
        requests = self.emitting(step)
        begun = [  # how far into its answer each request is; below 0, so far before it
            start - request.prompt_len if request is not None else 0
            for request, start in zip(requests, step.starts, strict=True)
        ]
        spans = [
            (min(row - min(place, 0), end), end) if request is not None else (end, end)
            for request, place, row, end in zip(requests, begun, step.offsets, step.offsets[1:], strict=False)
        ]
        places = np.concatenate([np.arange(*span) for span in spans])
        if not len(places):
            return None
        on_device = async_tensor_h2d(places, device=self.device)
        rows = self.model.speech_rows(step.batch.input_ids[on_device], step.hidden[on_device])
        cuts = np.cumsum([0, *(end - row for row, end in spans)]).tolist()
        return emission(requests, "rows", rows, cuts, lambda index: {"start": max(0, begun[index])})


class MiniCpmOThinkerAdapter(TextAdapter):
    """The thinker's requests. An answer that is spoken begins after `SPEECH_BEGIN` and ends at `SPEECH_END`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        begin, end = self._tokenizer.convert_tokens_to_ids([SPEECH_BEGIN, SPEECH_END])
        self._begin = int(begin)
        self._requests = RequestReader(media_embeddings, audio_embeddings)
        self.end_token_ids |= {int(end)}

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check tokens, features and parameters. Raises `OmniError` for what the model cannot take."""
        token_ids, features = self._requests.read(inputs.tensors, inputs.token_ids)
        # The model answers what it hears as if it spoke.
        if request.streams or any(map(_is_heard, features)):
            token_ids.append(self._begin)
        self.check_tokens(token_ids)
        calls = self.tool_calls(inputs, token_ids)
        payload = EmitRows() if request.streams else None
        core_request = self.make_request(request, token_ids, calls, payload=payload, mm_features=features or None)
        decoder = TextDecoder(self._tokenizer, core_request)
        outputs = RowOutputs(request.request_id, (), decoder, request.streams, calls)  # the prompt has no rows
        return Admission(core_request, outputs)


def _is_heard(feature: MultiModalFeatureSpec) -> bool:
    data: Any = feature.data
    return feature.modality == "audio" or (feature.modality == "video" and int(data[SOUND_LENGTH].data) > 0)


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=renamed(ARCHITECTURE, "tts_config"),
    vllm_models={ARCHITECTURE: MiniCpmOThinker},
    engine={"enable_prefix_caching": True},
    required={"enable_prompt_embeds": False},
    # What the model's own streaming takes for texts that are spoken.
    params=StageParams(max_tokens=1024, temperature=0.7, top_p=0.8, top_k=100, repetition_penalty=1.02),
    adapter="omni_actors.engine.models.minicpm_o.thinker.MiniCpmOThinkerAdapter",
    media=MEDIA,
    prompts="omni_actors.engine.models.minicpm_o.prompt.Prompts",
)
