"""Converts what users pass into messages: prompts, media, parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy
from numpy.typing import NDArray

from omni_actors.client.outputs import OmniTokensPrompt
from omni_actors.client.tensors import information_values, prompt_embeds
from omni_actors.errors import InvalidRequest, MalformedMedia, suggest
from omni_actors.protocol.codec import BufferList
from omni_actors.protocol.fields import TOKEN_BYTES, pack_token_ids
from omni_actors.protocol.payloads import (
    ADDITIONAL_INFORMATION,
    MEDIA_MODALITIES,
    PROMPT_EMBEDS,
    USE_AUDIO_IN_VIDEO,
    AdditionalInformationPayload,
    ChatMessage,
    ContentPart,
    Media,
    MediaEncoding,
    Prompt,
    PromptEmbedsPayload,
    StageParams,
)
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.protocol.tools import ToolCall, Tools

MULTI_MODAL_DATA = "multi_modal_data"
PROCESSOR_KEY = "mm_processor_kwargs"
TOOL_KEYS = ("tools", "tool_choice", "parallel_tool_calls")
MEDIA_KEYS = (MULTI_MODAL_DATA, PROCESSOR_KEY)
PROMPT_KEYS = ("prompt_token_ids", PROMPT_EMBEDS, "messages", *MEDIA_KEYS, ADDITIONAL_INFORMATION, *TOOL_KEYS)
STAGE_KEYS = ("tensors", "scalars", "lists")  # of an `OmniTokensPrompt` for a single stage
PART_KINDS = ("text", *MEDIA_MODALITIES)

Prompting = str | Sequence[Mapping[str, Any]] | OmniTokensPrompt | Mapping[str, Any]
AudioInput = tuple[NDArray[Any], int] | bytes | Path
ImageInput = NDArray[numpy.uint8] | bytes | Path
VideoInput = tuple[NDArray[numpy.uint8], float] | tuple[NDArray[numpy.uint8], float, AudioInput]


def to_params(given: Mapping[str, StageParams | Mapping[str, Any]]) -> dict[str, StageParams]:
    """Convert parameters by stage. Raises `InvalidRequest` for an unknown name or a wrong value."""
    params = {}
    for stage, value in given.items():
        try:
            fields = value.given() if isinstance(value, StageParams) else dict(value)
            for name in fields:
                if name not in StageParams.__struct_fields__:
                    nearest = suggest(str(name), StageParams.__struct_fields__)
                    raise InvalidRequest(f"Parameters of stage {stage!r}: there is no {name!r}.{nearest}")
            if isinstance(structured := fields.get("structured_outputs"), Mapping):
                fields["structured_outputs"] = with_json_text(structured)
            params[stage] = msgspec.convert(fields, StageParams, strict=True)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise InvalidRequest(f"Parameters of stage {stage!r}: {error}.") from error
    return params


def with_json_text(structured: Mapping[str, Any]) -> dict[str, Any]:
    """Return structured outputs with a schema or a tag that is an object as the text of its JSON."""
    texts = {
        name: msgspec.json.encode(structured[name]).decode()
        for name in ("json", "structural_tag")
        if isinstance(structured.get(name), Mapping)
    }
    return {**structured, **texts}


def to_prompt(
    prompt: Prompting,
    audios: Sequence[AudioInput],
    images: Sequence[ImageInput],
    videos: Sequence[VideoInput],
    information: Mapping[str, Any] | None,
    buffers: BufferList,
) -> tuple[Prompt, AdditionalInformationPayload | None]:
    """Convert a prompt and its additional information, and add the data of media and tensors to `buffers`.

    Raises:
        InvalidRequest, MalformedMedia: the prompt does not have one of the documented forms.
    """
    given: dict[str, list[Any]] = {"image": list(images), "video": list(videos), "audio": list(audios)}
    if isinstance(prompt, Mapping):
        refuse_unknown_keys(prompt, PROMPT_KEYS)
        if (of_prompt := prompt.get(ADDITIONAL_INFORMATION)) is not None:
            if information is not None:
                raise InvalidRequest(f"{ADDITIONAL_INFORMATION} is given twice: in the prompt and as an argument.")
            information = cast(Mapping[str, Any], of_prompt)
        converted = _prompt_of_mapping(prompt, given, buffers)
    else:
        converted = _chat(_messages_of(prompt, given), buffers)
    values = information_values(information) if information is not None else {}
    return converted, AdditionalInformationPayload.of(values, buffers.add) if values else None


def refuse_unknown_keys(given: Mapping[str, Any], known: Collection[str], what: str = "A prompt") -> None:
    """Raise `InvalidRequest` for a key that is none of `known`, naming the nearest one."""
    for key in given:
        if key in known:
            continue
        if key in STAGE_KEYS:
            raise InvalidRequest(f"{what} for a pipeline has no {key!r}; it is input of a single stage (StageLLM).")
        hint = "Pass a text as it is, or as messages; the chat template is applied to it." if key == "prompt" else ""
        raise InvalidRequest(f"{what} has no {key!r}.{suggest(str(key), known)}", hint=hint)


def _prompt_of_mapping(prompt: Mapping[str, Any], given: dict[str, list[Any]], buffers: BufferList) -> Prompt:
    token_ids, embeds, messages = (prompt.get(key) for key in ("prompt_token_ids", PROMPT_EMBEDS, "messages"))
    uses_sound = _uses_sound(prompt.get(PROCESSOR_KEY))
    if messages is not None:
        if token_ids is not None or embeds is not None:
            raise InvalidRequest(f"A prompt has either messages, or prompt_token_ids and {PROMPT_EMBEDS}.")
        if prompt.get(MULTI_MODAL_DATA) is not None or isinstance(messages, str | Mapping):
            raise InvalidRequest("messages must be a list of chat messages, which hold their media themselves.")
        chat = _chat(_messages_of(messages, given), buffers)
        if uses_sound and any(item.modality == "video" and item.sound is None for item in chat.media):
            raise InvalidRequest(
                "A video of the messages has no sound track.",
                hint="Give each video as (frames, rate, sound).",
                field=USE_AUDIO_IN_VIDEO,
            )
        return msgspec.structs.replace(chat, tools=_tools(prompt))
    if any(prompt.get(key) is not None for key in TOOL_KEYS):
        raise InvalidRequest("tools go with messages, which the chat template puts them into.")
    if embeds is None and (token_ids is None or not len(token_ids)):
        raise InvalidRequest("The prompt is empty: prompt_token_ids has no tokens.")
    for modality, items in _multi_modal_data(prompt.get(MULTI_MODAL_DATA)).items():
        if items and given[modality]:
            raise InvalidRequest(f"{modality} is given twice: in {MULTI_MODAL_DATA} and as an argument.")
        given[modality] += items
    if embeds is not None and any(given.values()):
        raise InvalidRequest(f"{PROMPT_EMBEDS} stand in for a whole prompt and cannot go with media.")
    if uses_sound:
        given = _with_tracks(given)
    media: list[Media] = []
    for modality, items in given.items():
        for item in items:
            _add(modality, item, media, buffers)
    try:
        packed = pack_token_ids(token_ids) if token_ids is not None else b""
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"prompt_token_ids must be 32-bit integers: {error}.") from error
    if embeds is None:
        return Prompt(token_ids=packed, media=tuple(media))
    tensor = prompt_embeds(embeds)
    if packed and len(packed) // TOKEN_BYTES != tensor.shape[0]:
        raise InvalidRequest(
            f"{PROMPT_EMBEDS} have {tensor.shape[0]} positions, but there are {len(packed) // TOKEN_BYTES} "
            "prompt_token_ids."
        )
    return Prompt(token_ids=packed, embeds=PromptEmbedsPayload(buffers.add(tensor)))


def _uses_sound(arguments: Any) -> bool:
    """Whether the sound of videos is used, which is all that vLLM's arguments for the processor can say here."""
    if arguments is None:
        return False
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{PROCESSOR_KEY} must be a mapping.", field=PROCESSOR_KEY)
    refuse_unknown_keys(arguments, (USE_AUDIO_IN_VIDEO,), PROCESSOR_KEY)
    used = arguments.get(USE_AUDIO_IN_VIDEO)
    if used not in (None, True, False):
        raise InvalidRequest(f"{USE_AUDIO_IN_VIDEO} must be True or False; got {used!r}.", field=USE_AUDIO_IN_VIDEO)
    return bool(used)


def _with_tracks(given: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Give the audios to the videos as their sound tracks, in order; without videos there is nothing to do."""
    silent = [video for video in given["video"] if len(video) == 2]
    if not given["video"]:
        return given
    if len(silent) != len(given["audio"]):
        raise InvalidRequest(
            f"There are {len(silent)} videos without a sound track, and {len(given['audio'])} audios for them.",
            hint="Give one audio for each video.",
            field=USE_AUDIO_IN_VIDEO,
        )
    tracks = iter(given["audio"])
    videos = [(*video, next(tracks)) if len(video) == 2 else video for video in given["video"]]
    return {**given, "video": videos, "audio": []}


def _multi_modal_data(data: Any) -> dict[str, list[Any]]:
    """The media of each modality, of which one may be given without a list."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{MULTI_MODAL_DATA} must be a mapping of {', '.join(MEDIA_MODALITIES)} to media.")
    refuse_unknown_keys(data, MEDIA_MODALITIES, MULTI_MODAL_DATA)
    return {modality: item if isinstance(item, list) else [item] for modality, item in data.items() if item is not None}


def _messages_of(prompt: str | Sequence[Mapping[str, Any]], given: Mapping[str, list[Any]]) -> Sequence[Any]:
    if not isinstance(prompt, str):
        if any(given.values()):
            raise InvalidRequest("audios, images and videos go with a text or tokens; put them into the messages.")
        return prompt
    if not prompt and not any(given.values()):
        raise InvalidRequest("The prompt is empty.")
    content = [{"type": modality, modality: item} for modality, items in given.items() for item in items]
    content += [{"type": "text", "text": prompt}] if prompt else []
    return [{"role": "user", "content": content}]


def _chat(messages: Sequence[Mapping[str, Any]], buffers: BufferList) -> Prompt:
    media: list[Media] = []
    converted = tuple(_message(message, media, buffers) for message in messages)
    if not converted:
        raise InvalidRequest("The prompt is empty: there are no messages.")
    return Prompt(messages=converted, media=tuple(media))


def _message(message: Mapping[str, Any], media: list[Media], buffers: BufferList) -> ChatMessage:
    refuse_unknown_keys(message, ("role", "content", "tool_calls", "tool_call_id"), "A chat message")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or content is None:
        raise InvalidRequest(f"A chat message has role, a text, and content; this one has {sorted(message)}.")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return ChatMessage(
        role,
        tuple(_part(part, media, buffers) for part in parts),
        tuple(msgspec.convert(call, ToolCall) for call in message.get("tool_calls") or ()),
        message.get("tool_call_id") or "",
    )


def _tools(prompt: Mapping[str, Any]) -> Tools | None:
    """The tools of a prompt: functions as OpenAI describes them, by themselves or as `{"type": "function", ...}`."""
    given = prompt.get("tools")
    if not given:
        return None
    choice: Any = prompt.get("tool_choice") or "auto"
    named: Any = choice if isinstance(choice, Mapping) else None
    name = named.get("function", named).get("name") if named is not None else None
    functions = [tool.get("function", tool) for tool in given]
    try:
        tools = {
            "definitions": [msgspec.json.encode(function).decode() for function in functions],
            "choice": choice if named is None else "required",
            "name": name,
            "parallel": prompt.get("parallel_tool_calls") is not False,
        }
        return msgspec.convert(tools, Tools)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The tools of the prompt do not have the documented form: {error}.") from error


def _part(part: Mapping[str, Any], media: list[Media], buffers: BufferList) -> ContentPart:
    kind = part.get("type")
    if kind not in PART_KINDS:
        raise InvalidRequest(f"The type of a content part cannot be {kind!r}.{suggest(str(kind), PART_KINDS)}")
    refuse_unknown_keys(part, ("type", kind), f"A content part of the type {kind}")
    if kind not in part:
        raise InvalidRequest(f"A content part of the type {kind} needs its data under the key {kind!r}.")
    if kind == "text":
        if not isinstance(part["text"], str):
            raise InvalidRequest(f"The text of a content part must be a string; got {type(part['text']).__name__}.")
        return ContentPart(text=part["text"])
    return ContentPart(media=_add(kind, part[kind], media, buffers))


def _add(modality: str, item: Any, media: list[Media], buffers: BufferList) -> int:
    """Add a medium, and a video's sound track before it, to `media`; return its index."""
    sound = None
    if modality == "video" and isinstance(item, tuple) and len(item) == 3:
        *film, track = item
        item, sound = tuple(film), _add("audio", track, media, buffers)
    made = MAKERS[modality](item, buffers)
    media.append(made if sound is None else msgspec.structs.replace(made, sound=sound))
    return len(media) - 1


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


def _video(value: tuple[NDArray[numpy.uint8], float], buffers: BufferList) -> Media:
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


MAKERS: dict[str, Callable[[Any, BufferList], Media]] = {"audio": _audio, "image": _image, "video": _video}
