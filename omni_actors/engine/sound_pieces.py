"""Sounds of a prompt in pieces, each of which the model's audio encoder can encode on its own.

The encoder attends within windows of a fixed length, so the embeddings of a sound are those of its windows, one after
the other. With a feature for each window, vLLM's caches know the windows apart: of a sound that has grown since an
earlier prompt, only what is new is encoded and computed. A window is named by its content, so nothing has to be kept
in step, and one that is in no cache is encoded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

from omni_actors.engine.encoded_requests import MAX_SENT_FRAMES
from omni_actors.errors import EngineError

FEATURES, LENGTHS, MASK = "input_audio_features", "audio_feature_lengths", "feature_attention_mask"


def in_pieces(
    features: Sequence[MultiModalFeatureSpec], window: int, audio_embeddings: Callable[[int], int]
) -> list[MultiModalFeatureSpec]:
    """The features of a prompt, with one for each window of a sound.

    A sound that belongs to a video stays whole: its places lie between the pictures. So do the first sounds of a prompt
    whose pieces are too many for a message.

    Args:
        window: frames that the encoder encodes together.
        audio_embeddings: how many embeddings it makes of so many frames.
    """
    left = MAX_SENT_FRAMES - 1 - sum(1 if feature.modality == "audio" else 2 for feature in features)
    cut: list[list[MultiModalFeatureSpec]] = []
    for feature in reversed(features):
        pieces = [feature]
        if feature.modality == "audio":
            frames = _tensor(feature, FEATURES).shape[-1]
            whole = feature.mm_position.is_embed is not None or -(-frames // window) - 1 > left
            pieces = _pieces(feature, frames if whole else window, frames, audio_embeddings)
            left -= len(pieces) - 1
        cut.append(pieces)
    return [piece for pieces in reversed(cut) for piece in pieces]


def _pieces(
    feature: MultiModalFeatureSpec, step: int, frames: int, audio_embeddings: Callable[[int], int]
) -> list[MultiModalFeatureSpec]:
    pieces, offset = [], feature.mm_position.offset
    for start in range(0, frames, step):
        end = min(start + step, frames)
        length = audio_embeddings(end - start) if step < frames else feature.mm_position.length
        if length:  # the last frames may be too few for an embedding
            place = dataclasses.replace(feature.mm_position, offset=offset, length=length)
            pieces.append(_piece(feature, place, start, end))
        offset += length
    return pieces


def _piece(feature: MultiModalFeatureSpec, place: Any, start: int, end: int) -> MultiModalFeatureSpec:
    item = _item(feature).copy()
    values = _tensor(feature, FEATURES)[:, start:end].contiguous()
    item[FEATURES] = dataclasses.replace(item[FEATURES], data=values)
    frames = torch.full_like(_tensor(feature, LENGTHS), end - start)
    item[LENGTHS] = dataclasses.replace(item[LENGTHS], data=frames)
    # Frames of padding have been cut off. The model wants a mask, of the same shape for all, and does not read it.
    item[MASK] = dataclasses.replace(item[MASK], data=torch.ones(1, dtype=torch.bool))
    digest = hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=16).hexdigest()
    return dataclasses.replace(
        feature, data=item, identifier=f"sound-{end - start}-{digest}", mm_hash=None, mm_position=place
    )


def _item(feature: MultiModalFeatureSpec) -> MultiModalKwargsItem:
    if feature.data is None:  # vLLM leaves out what its cache holds, which is off (`arguments.py`)
        raise EngineError("vLLM left out the features of a sound.")
    return feature.data


def _tensor(feature: MultiModalFeatureSpec, name: str) -> torch.Tensor:
    return cast("torch.Tensor", _item(feature)[name].data)
