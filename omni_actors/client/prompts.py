"""Converts what users pass into messages: prompts, media, parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy
from numpy.typing import NDArray

from omni_actors.client.outputs import OmniTokensPrompt
from omni_actors.errors import InvalidRequest, MalformedMedia
from omni_actors.protocol.codec import BufferList
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.protocol.tensors import DType, HostTensor

Prompting = str | Sequence[Mapping[str, Any]] | OmniTokensPrompt
AudioInput = tuple[NDArray[Any], int] | bytes | Path
ImageInput = NDArray[numpy.uint8] | bytes | Path
VideoInput = tuple[NDArray[numpy.uint8], float]


def to_params(given: Mapping[str, StageParams | Mapping[str, Any]]) -> dict[str, StageParams]:
    """Convert parameters by stage. Raises `InvalidRequest` for an unknown name or a wrong value."""
    params = {}
    for stage, value in given.items():
        try:
            fields = value.given() if isinstance(value, StageParams) else dict(value)
            params[stage] = msgspec.convert(fields, StageParams, strict=True)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise InvalidRequest(f"Parameters of stage {stage!r}: {error}.") from error
    return params


def to_prompt(
    prompt: Prompting,
    audios: Sequence[AudioInput],
    images: Sequence[ImageInput],
    videos: Sequence[VideoInput],
    buffers: BufferList,
) -> Prompt:
    """Convert a prompt and add the data of its media to `buffers`.

    Raises:
        InvalidRequest, MalformedMedia: the prompt does not have one of the documented forms.
    """
    media: list[Media] = []
    if isinstance(prompt, str):
        if not prompt and not (audios or images or videos):
            raise InvalidRequest("The prompt is empty.")
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content += [{"type": "video", "video": video} for video in videos]
        content += [{"type": "audio", "audio": audio} for audio in audios]
        content += [{"type": "text", "text": prompt}] if prompt else []
        prompt = [{"role": "user", "content": content}]
    elif audios or images or videos:
        raise InvalidRequest("audios, images and videos go with a text prompt only; put them into the messages.")
    if isinstance(prompt, Mapping):
        token_ids = prompt.get("prompt_token_ids") or ()
        if not token_ids:
            raise InvalidRequest("The prompt is empty: prompt_token_ids has no tokens.")
        try:
            return Prompt(token_ids=pack_token_ids(token_ids))
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"prompt_token_ids must be 32-bit integers: {error}.") from error
    messages = tuple(_message(message, media, buffers) for message in prompt)
    if not messages:
        raise InvalidRequest("The prompt is empty: there are no messages.")
    return Prompt(messages=messages, media=tuple(media))


def _message(message: Mapping[str, Any], media: list[Media], buffers: BufferList) -> ChatMessage:
    unknown = set(message) - {"role", "content"}
    if unknown or "role" not in message:
        raise InvalidRequest(f"A chat message has role and content; this one has {sorted(message)}.")
    content = message.get("content", "")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return ChatMessage(str(message["role"]), tuple(_part(part, media, buffers) for part in parts))


def _part(part: Mapping[str, Any], media: list[Media], buffers: BufferList) -> ContentPart:
    kind = part.get("type")
    if kind == "text":
        return ContentPart(text=str(part.get("text", "")))
    makers: dict[str, Callable[[Any, BufferList], Media]] = {"audio": _audio, "image": _image, "video": _video}
    if not isinstance(kind, str) or kind not in makers or kind not in part:
        raise InvalidRequest(f"A content part is text, audio, image or video with its data; got {sorted(part)}.")
    media.append(makers[kind](part[kind], buffers))
    return ContentPart(media=len(media) - 1)


def _file(modality: str, value: bytes | Path, buffers: BufferList) -> Media:
    if isinstance(value, Path):
        try:
            value = value.read_bytes()
        except OSError as error:
            raise MalformedMedia(f"Cannot read the file {str(value)!r}: {error.strerror}.") from error
    return Media(modality, MediaEncoding.FILE, buffers.add(HostTensor(DType.U8, (len(value),), value)))


def _audio(value: AudioInput, buffers: BufferList) -> Media:
    if isinstance(value, bytes | Path):
        return _file("audio", value, buffers)
    samples, rate = value
    array = numpy.asarray(samples)
    if array.dtype == numpy.int16:
        array = array.astype(numpy.float32) / 32768.0
    return Media(
        "audio", MediaEncoding.ARRAY, buffers.add(_host(array, numpy.float32, DType.F32)), sample_rate=int(rate)
    )


def _image(value: ImageInput, buffers: BufferList) -> Media:
    if isinstance(value, bytes | Path):
        return _file("image", value, buffers)
    return Media("image", MediaEncoding.ARRAY, buffers.add(_host(numpy.asarray(value), numpy.uint8, DType.U8)))


def _video(value: VideoInput, buffers: BufferList) -> Media:
    frames, rate = value
    tensor = buffers.add(_host(numpy.asarray(frames), numpy.uint8, DType.U8))
    return Media("video", MediaEncoding.ARRAY, tensor, frames_per_second=float(rate))


def _host(array: NDArray[Any], kind: type[numpy.generic], dtype: DType) -> HostTensor:
    if array.dtype != kind:
        if dtype is DType.U8:
            raise MalformedMedia(f"Images and videos are arrays of uint8, got {array.dtype}.")
        array = array.astype(kind)
    array = numpy.ascontiguousarray(array)
    return HostTensor(dtype, array.shape, array.tobytes())
