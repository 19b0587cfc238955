"""Prompts with media between two stages: a request as vLLM's own front end makes it, in vLLM's own encoding.

The encoder attends within windows of a fixed length, so the embeddings of a sound are those of its windows, one after
the other. With a feature for each window, vLLM's caches know the windows apart: of a sound that has grown since an
earlier prompt, only what is new is encoded and computed. A window is named by its content, so nothing has to be kept
in step, and one that is in no cache is encoded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from omni_actors.engine.rows import FRAME_PREFIX
from omni_actors.errors import EngineError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import MEDIA_MODALITIES

MAX_SENT_FRAMES = 256  # tensors in one message
MAX_FRAMES = 4096
FEATURES, LENGTHS, MASK = "input_audio_features", "audio_feature_lengths", "feature_attention_mask"
PictureEmbeddings = Callable[[str, Mapping[str, Any]], int]


def request_tensors(request: EngineCoreRequest) -> dict[str, HostTensor]:
    """A request as tensors for `RequestReader`, which share the memory of its features; nothing may change these.

    Raises:
        InvalidRequest: its media are too many.
    """
    frames = MsgpackEncoder().encode(request)
    if len(frames) > MAX_SENT_FRAMES:
        raise InvalidRequest(
            f"The media of the prompt make {len(frames)} tensors; at most {MAX_SENT_FRAMES} are allowed."
        )
    encoded = {}
    for index, frame in enumerate(frames):
        data = memoryview(cast("bytes | bytearray | memoryview", frame)).cast("B")  # never the frame of a socket
        encoded[f"{FRAME_PREFIX}{index}"] = HostTensor(DType.U8, (data.nbytes,), data)
    return encoded


class RequestReader:
    """Reads requests, and trusts nothing in them.

    Args:
        picture_embeddings: number of embeddings that the encoder makes of a medium of the modality `image` or `video`,
            from its features; -1 if they contradict one another.
        audio_embeddings: number of embeddings that the encoder makes of n frames of audio.
    """

    def __init__(self, picture_embeddings: PictureEmbeddings, audio_embeddings: Callable[[int], int]) -> None:
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._picture_embeddings = picture_embeddings
        self._audio_embeddings = audio_embeddings

    def read(
        self, tensors: Mapping[str, HostTensor], token_ids: Sequence[int]
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Prompt ids and media features of an encoded EngineCoreRequest; the rest of it is ignored.

        Without tensors there are no media, and the prompt is `token_ids`.

        Raises:
            InvalidPayload: it cannot be read, or its features do not fit its prompt.
        """
        if not tensors:
            return list(token_ids), []
        names = [f"{FRAME_PREFIX}{index}" for index in range(len(tensors))]
        if len(tensors) > MAX_FRAMES or set(names) != set(tensors):
            raise InvalidPayload(f"This stage needs the tensors vllm.0, vllm.1, ...; it got {sorted(tensors)[:8]}.")
        frames = []
        for name in names:
            frame = tensors[name].validate(name)
            if frame.dtype is not DType.U8 or len(frame.shape) != 1:
                raise InvalidPayload(f"{name}: needs u8 [bytes]; got {frame.dtype} {list(frame.shape)}.")
            frames.append(bytearray(frame.data))  # a copy: decoded tensors share its memory, and the frame's is reused
        try:
            decoded = self._decoder.decode(frames)
        except Exception as error:
            # Hostile frames make the decoder raise anything from IndexError to RuntimeError.
            raise InvalidPayload(f"The encoded request cannot be read: {type(error).__name__}: {error}") from error
        prompt = decoded.prompt_token_ids
        if prompt is None or decoded.prompt_embeds is not None:
            raise InvalidPayload("The encoded request must hold prompt_token_ids and no prompt_embeds.")
        if token_ids and list(token_ids) != prompt:
            raise InvalidPayload("The encoded request and token_ids disagree about the prompt.")
        features = decoded.mm_features or []
        for feature in features:
            check_feature(feature, len(prompt), self._picture_embeddings, self._audio_embeddings)
        return list(prompt), features


def check_feature(
    feature: MultiModalFeatureSpec,
    prompt_tokens: int,
    picture_embeddings: PictureEmbeddings,
    audio_embeddings: Callable[[int], int],
) -> None:
    """Raise `InvalidPayload` unless one medium's features fit its place in the prompt.

    If the encoder gave more or fewer embeddings than the prompt has places, the step would fail, and with it every
    request of the batch.
    """
    place = feature.mm_position
    if feature.modality not in MEDIA_MODALITIES:
        raise InvalidPayload(
            f"The modality of a medium is one of {', '.join(MEDIA_MODALITIES)}; got {feature.modality!r}."
        )
    if place.offset < 0 or place.length < 1 or place.offset + place.length > prompt_tokens:
        raise InvalidPayload(
            f"{feature.modality}: the placeholder [{place.offset}, {place.offset + place.length}) is outside the "
            f"prompt of {prompt_tokens} tokens."
        )
    mask = place.is_embed
    if mask is not None and (mask.dtype is not torch.bool or tuple(mask.shape) != (place.length,)):
        raise InvalidPayload(f"{feature.modality}: is_embed must be bool [{place.length}].")
    if feature.data is None or not feature.identifier:
        raise InvalidPayload(f"{feature.modality}: features or identifier are missing.")
    try:
        data: dict[str, Any] = {name: item.data for name, item in feature.data.items()}
        if feature.modality == "audio":
            frames = int(data[LENGTHS])
            expected = audio_embeddings(frames) if frames == data[FEATURES].shape[-1] and frames >= 1 else -1
        else:
            expected = picture_embeddings(feature.modality, data)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise InvalidPayload(f"{feature.modality}: the features are incomplete ({error!r}).") from error
    if expected != (places := place.get_num_embeds()):
        raise InvalidPayload(f"{feature.modality}: the features give {expected} embeddings for {places} places.")


def merged_patches(merge_size: int) -> PictureEmbeddings:
    """Embeddings of an encoder that merges squares of patches, `merge_size` along an edge."""

    def count(modality: str, data: Mapping[str, Any]) -> int:
        suffix = "_videos" if modality == "video" else ""
        time, height, width = (int(size) for size in data[f"{modality}_grid_thw"])
        patches: int = data[f"pixel_values{suffix}"].shape[0]
        fits = time * height * width == patches and not height % merge_size and not width % merge_size
        return patches // merge_size**2 if fits and min(time, height, width) >= 1 else -1

    return count


def no_pictures(_modality: str, _data: Mapping[str, Any]) -> int:
    """Of a model that sees nothing."""
    return -1


def embeddings_of_seconds(frames: int) -> int:
    """Embeddings that an encoder by seconds makes of frames: 13 of 100, what three convolutions leave of the rest."""
    rest = frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return frames // 100 * 13 + rest


def in_pieces(
    features: Sequence[MultiModalFeatureSpec], window: int, audio_embeddings: Callable[[int], int]
) -> list[MultiModalFeatureSpec]:
    """The features of a prompt, with one for each window of a sound.

    A sound that belongs to a video stays whole: its places lie between the pictures. So do the first sounds of a prompt
    whose pieces are too many for a message.

    Args:
        window: frames that the encoder encodes together.
        audio_embeddings: number of embeddings that it makes of n frames.
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
    if feature.data is None:  # vLLM leaves out what its cache for two processes holds
        raise EngineError("vLLM left out the features of a sound.")
    return feature.data


def _tensor(feature: MultiModalFeatureSpec, name: str) -> torch.Tensor:
    return cast("torch.Tensor", _item(feature)[name].data)
