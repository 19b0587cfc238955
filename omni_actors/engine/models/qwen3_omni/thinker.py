"""Qwen3-Omni's thinker.

Sends text to the client and, for requests that speak, token ids to the talker: those of the prompt and of the reply.
Rows go along only where a prompt has media (see `Qwen3OmniThinkerState`), so a text that is spoken may use the prefix
cache. Thinking and Captioner checkpoints have this part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerMultiModalProcessor
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.engine import EngineCoreOutput

from omni_actors.engine.encoded_requests import embeddings_of_seconds
from omni_actors.engine.models import ModelSpec, served_as
from omni_actors.engine.models.qwen3_asr.prompt import MEDIA
from omni_actors.engine.models.thinkers import ThinkerAdapter, ThinkerOutputs, ThinkerState, emission
from omni_actors.engine.rows import to_host
from omni_actors.engine.workers.base import attachment_of
from omni_actors.engine.workers.runner import Emission, Step
from omni_actors.errors import ConfigError
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import StageRequest, StreamEvent


class Qwen3OmniThinkerState(ThinkerState):
    """Emits, for prompts with media, the states of layer `accept_hidden_layer` at the places that media fill.

    Text needs none: the talker looks the token up in the thinker's table.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.model_config.hf_config
        if config.enable_audio_output:
            self.aux_layers = (config.talker_config.accept_hidden_layer,)

    def emit(self, step: Step) -> Emission | None:
        """The rows of the step's media places; with the first of a prompt also its M-RoPE positions."""
        requests = [request if request and request.mm_features else None for request in self.emitting(step)]
        begun = {
            index: request.mm_features
            for index, request in enumerate(requests)
            if request is not None and step.starts[index] == 0
        }
        media = self.media_mask(step)
        if media is None and not begun:
            return None
        places = np.flatnonzero(media) if media is not None else np.empty(0, np.int64)
        # Indexing makes a new tensor, which the next replay of a graph cannot overwrite.
        rows = step.aux[0][async_tensor_h2d(places, device=self.device)]
        positions = {
            index: flat_where_sound_is_in_video(self.prompt_positions(step, index), features)
            for index, features in begun.items()
        }
        cuts = np.searchsorted(places, step.offsets).tolist()

        def details(index: int) -> dict[str, Any]:
            before = step.offsets[index] - step.starts[index]
            in_prompt = torch.from_numpy(places[cuts[index] : cuts[index + 1]] - before)
            return {"places": in_prompt, "end": step.offsets[index + 1] - before}

        return emission(requests, "media_rows", rows, cuts, details, positions)


def flat_where_sound_is_in_video(positions: torch.Tensor, features: Sequence[MultiModalFeatureSpec]) -> torch.Tensor:
    """Positions i64 [3, P] as the talker counts them: one by one over a video with its own sound.

    transformers gives the talker no `use_audio_in_video`, so these places are text for it. What follows moves on.
    """
    sounds = {feature.mm_position.offset for feature in features if feature.modality == "audio"}
    shared = sorted(
        (feature.mm_position for feature in features if feature.modality == "video"), key=lambda place: place.offset
    )
    for place in shared:
        if place.offset not in sounds:
            continue
        end = place.offset + place.length
        flat = torch.arange(place.length) + positions[:, place.offset - 1].max() + 1
        behind = flat[-1] + 1 - positions[0, end] if end < positions.shape[1] else 0
        positions = torch.cat([positions[:, : place.offset], flat.expand(3, -1), positions[:, end:] + behind], dim=1)
    return positions


ARCHITECTURE = "OmniActorsQwen3OmniThinker"


@served_as(ARCHITECTURE, "thinker_config")
def thinker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The checkpoint's configuration with our own architecture name, which is registered as a class object."""
    # The model always interleaves the axes of its positions. vLLM knows only this name for it.
    config.thinker_config.text_config.rope_parameters["mrope_interleaved"] = True
    return config


class MediaProcessor(Qwen3OmniMoeThinkerMultiModalProcessor):
    """vLLM's processor, without its padding of sounds to whole windows, which transformers does not do.

    vLLM pads them for its cache of processed media, which is off here; a sound would get one more frame.
    """

    def _get_hf_mm_inputs(self, *args: Any, **kwargs: Any) -> Any:
        return Qwen2_5OmniThinkerMultiModalProcessor._get_hf_mm_inputs(self, *args, **kwargs)

    def _postprocess_hf_mm_data(self, *args: Any, **kwargs: Any) -> Any:
        return Qwen2_5OmniThinkerMultiModalProcessor._postprocess_hf_mm_data(self, *args, **kwargs)


@MULTIMODAL_REGISTRY.register_processor(
    MediaProcessor, info=Qwen3OmniMoeThinkerProcessingInfo, dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder
)
class Qwen3OmniThinker(Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's model with a state of ours."""

    def iter_mm_features(self, mm_features: list[MultiModalFeatureSpec]) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Place, modality and sizes of each medium: a sound is one, though it has a feature for each of its pieces."""
        found: list[tuple[int, str, dict[str, Any]]] = []
        for offset, modality, data in super().iter_mm_features(mm_features):
            if found and found[-1][1] == modality == "audio":
                begin, _, before = found[-1]
                frames = before["audio_feature_length"]
                if begin + embeddings_of_seconds(frames) == offset:
                    found[-1] = begin, modality, {"audio_feature_length": frames + data["audio_feature_length"]}
                    continue
            found.append((offset, modality, data))
        return iter(found)

    # The class by which vLLM's runner prepares this model's inputs, and that makes the rows.
    get_model_state_cls = staticmethod(lambda: Qwen3OmniThinkerState)


class TokenOutputs(ThinkerOutputs):
    """Streams token ids, in order, each once; with the first ones the rows of the prompt's media.

    The last token of a reply is never fed to the thinker and never spoken.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reply: list[int] = []
        self._sent: int | None = None  # how many of the reply; None before the prompt is sent
        self._computed = 0  # positions of the prompt whose rows have come
        self._rows: list[torch.Tensor] = []
        self._mrope_positions: torch.Tensor | None = None

    def stream(self, output: EngineCoreOutput, spoken: int, *, final: bool) -> StreamEvent | None:
        """The new tokens that are certain to be spoken; the prompt with the first of them."""
        self._keep(attachment_of(output))
        self._reply += output.new_token_ids
        if self._sent is None and not self._reply:
            return None  # a part of the prompt
        ended = output.finish_reason is not None or self.stopped
        certain = min(spoken, len(self._reply) - ended)
        if self._sent is None:
            self._sent = certain
            return self._first(certain, final=final)
        news, start = self._reply[self._sent : certain], len(self._prompt_token_ids) + self._sent
        self._sent += len(news)
        if not news and not final:
            return None
        return StreamEvent(self._request_id, token_ids=news, start=start, final=final, generated=0)

    def _first(self, certain: int, *, final: bool) -> StreamEvent:
        tensors: dict[str, HostTensor] = {}
        if self._mrope_positions is not None:
            tensors["mrope_positions"] = to_host(self._mrope_positions)
            tensors["media_rows"] = to_host(torch.cat(self._rows))
            self._rows.clear()
        token_ids = [*self._prompt_token_ids, *self._reply[:certain]]
        scalars = {"prompt_tokens": len(self._prompt_token_ids)}
        return StreamEvent(
            self._request_id, tensors=tensors, scalars=scalars, token_ids=token_ids, start=0, final=final, generated=0
        )

    def _keep(self, emitted: Mapping[str, Any]) -> None:
        """Append the rows of places that have not come yet."""
        if not emitted or self._sent is not None:
            return
        fresh = emitted["places"] >= self._computed  # a preempted request computes its first positions again
        self._rows.append(emitted["media_rows"][fresh])
        self._computed = max(self._computed, emitted["end"])
        self._mrope_positions = emitted.get("mrope_positions", self._mrope_positions)


class Qwen3OmniThinkerAdapter(ThinkerAdapter):
    """The thinker's requests, and the token ids that are spoken.

    Raises:
        ConfigError: the talker takes states of a layer that does not give them.
    """

    outputs_class = TokenOutputs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.model_config.hf_config
        if not config.enable_audio_output:
            return
        layer, thinker = config.talker_config.accept_hidden_layer, config.thinker_config
        levels, layers = len(thinker.vision_config.deepstack_visual_indexes), thinker.text_config.num_hidden_layers
        if not levels < layer < layers:
            raise ConfigError(
                f"The talker takes the states of layer {layer}; it must be above the {levels} layers that pictures are "
                f"added to, and below {layers}.",
                hint="Correct talker_config.accept_hidden_layer in the checkpoint's config.json.",
            )
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError(
                "engine.pipeline_parallel_size: this thinker gives its talker states of a layer in the middle.",
                hint="Set engine.tensor_parallel_size instead.",
            )

    audio_embeddings = staticmethod(embeddings_of_seconds)

    def reads_prefix_cache(self, request: StageRequest, features: Sequence[MultiModalFeatureSpec]) -> bool:
        """Unless the talker needs rows of the prompt's media."""
        return not (request.streams and features)


def positions_per_second(config: PretrainedConfig) -> int:
    """How many of the thinker's time positions a second of video has."""
    rate: int = config.thinker_config.position_id_per_seconds
    return rate


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=thinker_config,
    vllm_models={ARCHITECTURE: Qwen3OmniThinker},
    engine={"enable_prefix_caching": True},
    required={"enable_prompt_embeds": False},  # the talker looks tokens up in a table
    # The defaults of transformers' Qwen3OmniMoeForConditionalGeneration.generate.
    params=StageParams(max_tokens=1024, temperature=0.0),
    adapter="omni_actors.engine.models.qwen3_omni.thinker.Qwen3OmniThinkerAdapter",
    media=replace(MEDIA, positions_per_second=positions_per_second),  # it hears as the recognizer does
)
