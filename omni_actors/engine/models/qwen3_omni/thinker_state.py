"""What the talker of Qwen3-Omni takes from the thinker's steps: states of one layer where media are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d

from omni_actors.engine.models.thinker_state import ThinkerState
from omni_actors.engine.step_output import Attachments, Emission, Step


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
        requests = self.emitting(step)
        begun = {
            index: request.mm_features
            for index, request in enumerate(requests)
            if request is not None and request.mm_features and step.starts[index] == 0
        }
        media = self.media_mask(step)
        if media is None and not begun:
            return None
        places = np.flatnonzero(media) if media is not None else np.empty(0, np.int64)
        # Indexing makes a new tensor, which the next replay of a graph cannot overwrite.
        rows = step.aux[0][async_tensor_h2d(places, device=self.device)]
        tensors = {"media_rows": rows}
        for index, features in begun.items():
            tensors[f"positions/{index}"] = flat_where_sound_is_in_video(self.prompt_positions(step, index), features)
        cuts = np.searchsorted(places, step.offsets).tolist()

        def split(host: Mapping[str, torch.Tensor]) -> Attachments:
            parts: Attachments = []
            for index, request in enumerate(requests):
                if request is None or not request.mm_features:
                    parts.append(None)
                    continue
                start, row, end = step.starts[index], step.offsets[index], step.offsets[index + 1]
                mine = slice(cuts[index], cuts[index + 1])
                part: dict[str, Any] = {
                    "media_rows": host["media_rows"][mine],
                    "places": torch.from_numpy(places[mine] - row + start),  # of the rows in the prompt
                    "end": start + end - row,
                }
                if (positions := host.get(f"positions/{index}")) is not None:
                    part["mrope_positions"] = positions
                parts.append(part)
            return parts

        return Emission(tensors, split)


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
