"""Converts what users pass into messages: prompts, media, parameters."""

from __future__ import annotations

import array
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy
import soundfile
from numpy.typing import NDArray

from omni_actors.client.streams import OmniTokensPrompt
from omni_actors.errors import InvalidRequest, MalformedMedia, StageUnavailable, suggest
from omni_actors.protocol.codec import BufferList
from omni_actors.protocol.fields import DType, HostTensor, Scalar, pack_token_ids
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import (
    ADDITIONAL_INFORMATION,
    CLIP,
    CLIP_RATE,
    INSTRUCTIONS,
    LANGUAGE,
    MEDIA_MODALITIES,
    PROMPT_EMBEDS,
    TRANSCRIPT,
    USE_AUDIO_IN_VIDEO,
    AdditionalInformationPayload,
    ChatMessage,
    ContentPart,
    InformationValue,
    Media,
    MediaEncoding,
    Prompt,
    PromptEmbedsPayload,
    SpeechAbility,
    StageParams,
    ToolCall,
    Tools,
)

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
) -> tuple[Prompt, AdditionalInformationPayload]:
    """Convert a prompt and its additional information, and add the data of media and tensors to `buffers`.

    Raises:
        InvalidRequest, InvalidPayload, MalformedMedia: the prompt does not have one of the documented forms.
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
    return converted, AdditionalInformationPayload.of(values, buffers.add)


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
    for modality, items in _multi_modal_data(prompt.get(MULTI_MODAL_DATA)).items():
        if items and given[modality]:
            raise InvalidRequest(f"{modality} is given twice: in {MULTI_MODAL_DATA} and as an argument.")
        given[modality] += items
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
    payload = PromptEmbedsPayload(buffers.add(prompt_embeds(embeds))) if embeds is not None else None
    return Prompt(token_ids=packed, media=tuple(media), embeds=payload)


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
    """The media of each modality; a single one may be given without a list."""
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
    if isinstance(item, bytes | Path) and modality != "video":
        made = Media(modality, MediaEncoding.FILE, buffers.add(_file(item)))
    elif modality == "audio":
        samples, rate = item
        made = Media(modality, MediaEncoding.ARRAY, buffers.add(_samples(samples)), sample_rate=int(rate))
    elif modality == "video":
        frames, rate = item
        made = Media(modality, MediaEncoding.ARRAY, buffers.add(_pixels(frames)), frames_per_second=float(rate))
    else:
        made = Media(modality, MediaEncoding.ARRAY, buffers.add(_pixels(item)))
    media.append(made if sound is None else msgspec.structs.replace(made, sound=sound))
    return len(media) - 1


def _file(value: bytes | Path) -> HostTensor:
    try:
        data = value.read_bytes() if isinstance(value, Path) else value
    except OSError as error:
        raise MalformedMedia(f"Cannot read the file {str(value)!r}: {error.strerror}.") from error
    return HostTensor(DType.U8, (len(data),), data)


def _samples(value: Any) -> HostTensor:
    array = numpy.asarray(value)
    scale = numpy.float32(32768 if array.dtype == numpy.int16 else 1)
    return host_tensor(array.astype(numpy.float32) / scale, "audio")


def _pixels(value: Any) -> HostTensor:
    array = numpy.asarray(value)
    if array.dtype != numpy.uint8:
        raise MalformedMedia(f"Images and videos are arrays of uint8, got {array.dtype}.")
    return host_tensor(array, "pixels")


MAX_ENTRIES, MAX_NAME, MAX_LENGTH = 64, 128, 65536  # of additional information; checked again where it arrives
INTEGERS = range(-(2**63), 2**63)
_DTYPES = {
    "bfloat16": DType.BF16,  # a numpy dtype of ml_dtypes
    "float16": DType.F16,
    "float32": DType.F32,
    "int32": DType.I32,
    "int64": DType.I64,
    "uint8": DType.U8,
}
FLOATING = (DType.BF16, DType.F16, DType.F32)


def host_tensor(value: Any, where: str) -> HostTensor:
    """Copy an array into a `HostTensor`.

    Args:
        value: a numpy array, a torch tensor on any device, anything that numpy takes for an array, or a `HostTensor`.
        where: name of the field, for errors.

    Raises:
        InvalidRequest: it is not an array, or has a dtype that cannot be sent.
    """
    if isinstance(value, HostTensor):
        return value.validate(where)
    torch = sys.modules.get("torch")  # if not imported, there is no tensor
    if torch is not None and isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        data = value.detach().cpu().contiguous().reshape(-1)
        return HostTensor(_dtype(name, where), shape, data.view(torch.uint8).numpy().tobytes())
    found = numpy.asarray(value)
    if found.dtype.byteorder == ">":
        found = found.astype(found.dtype.newbyteorder("<"))
    return HostTensor(_dtype(found.dtype.name, where), found.shape, found.tobytes())


def prompt_embeds(value: Any) -> HostTensor:
    """Copy the embeddings of a prompt. Raises `InvalidRequest` unless they are finite floats [positions, width]."""
    tensor = host_tensor(value, PROMPT_EMBEDS)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise InvalidRequest(f"{PROMPT_EMBEDS} need the shape [positions, width]; got {list(tensor.shape)}.")
    if tensor.dtype not in FLOATING:
        raise InvalidRequest(f"{PROMPT_EMBEDS} must be float32, float16 or bfloat16; got {tensor.dtype}.")
    if not _finite(tensor):
        raise InvalidRequest(f"{PROMPT_EMBEDS} hold NaN or infinite values.")
    return tensor


def information_values(given: Mapping[str, Any]) -> dict[str, InformationValue]:
    """Check additional information and copy its arrays.

    Raises:
        InvalidRequest: there are too many entries, or one has a name or a value that cannot be sent.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{ADDITIONAL_INFORMATION} must be a mapping of names to values; got {_kind(given)}.")
    if len(given) > MAX_ENTRIES:
        raise InvalidRequest(f"{ADDITIONAL_INFORMATION} has {len(given)} entries; at most {MAX_ENTRIES} are allowed.")
    values: dict[str, InformationValue] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise InvalidRequest(f"{ADDITIONAL_INFORMATION}: a name has 1 to {MAX_NAME} characters; got {name!r:.80}.")
        where = f"{ADDITIONAL_INFORMATION}[{name!r}]"
        if isinstance(value, list | tuple) and not isinstance(value, HostTensor):
            if len(value) > MAX_LENGTH:
                raise InvalidRequest(f"{where} has {len(value)} items; send that many as an array.")
            values[name] = [_scalar(item, f"{where}[{index}]") for index, item in enumerate(value)]
        elif isinstance(value, Scalar | numpy.generic):
            values[name] = _scalar(value, where)
        elif isinstance(value, HostTensor | array.array | memoryview) or hasattr(value, "__array__"):
            values[name] = host_tensor(value, where)
        else:
            raise InvalidRequest(f"{where} must be a number, text, a list of these or an array; got {_kind(value)}.")
    return values


def _scalar(value: Any, where: str) -> Scalar:
    value = value.item() if isinstance(value, numpy.generic) else value
    if not isinstance(value, Scalar):
        raise InvalidRequest(f"{where} must be a number or text; got {_kind(value)}.")
    if isinstance(value, str) and len(value) > MAX_LENGTH:
        raise InvalidRequest(f"{where} has {len(value)} characters; at most {MAX_LENGTH} are allowed.")
    if isinstance(value, int) and value not in INTEGERS:
        raise InvalidRequest(f"{where} does not fit 64 bits.")
    return value


def _dtype(name: str, where: str) -> DType:
    if name not in _DTYPES:
        raise InvalidRequest(f"{where} has the dtype {name}, which cannot be sent; convert it to {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _finite(tensor: HostTensor) -> bool:
    if tensor.dtype is DType.BF16:  # numpy has none: infinite and NaN have all bits of the exponent set
        bits = numpy.frombuffer(tensor.data, "<u2")
        return not bool(((bits & 0x7F80) == 0x7F80).any())
    kind = "<f2" if tensor.dtype is DType.F16 else "<f4"
    return bool(numpy.isfinite(numpy.frombuffer(tensor.data, kind)).all())


def _kind(value: Any) -> str:
    return type(value).__name__


Clip = tuple[NDArray[numpy.float32], int] | Path | str


def spoken(
    text: str,
    *,
    language: str | None = None,
    instructions: str | None = None,
    clip: Clip | None = None,
    transcript: str | None = None,
) -> dict[str, Any]:
    """Make the prompt of a text to speak; the voice by name is an argument of `submit` and `generate`.

    Args:
        language: one of `describe().speech.languages`, or "auto", which is the default.
        instructions: how to speak, in words.
        clip: a recording of the voice to speak with: (f32 [samples], Hz), or a WAV, FLAC, Ogg or MP3 file.
        transcript: what is said in the recording; the model then keeps the manner of speaking, too.

    Raises:
        InvalidRequest: a transcript without a clip, or samples that are none.
        MalformedMedia: the file cannot be read.
    """
    if transcript is not None and clip is None:
        raise InvalidRequest("transcript: it says what is heard in a clip, and there is none.", field="transcript")
    values: dict[str, Any] = {LANGUAGE: language, INSTRUCTIONS: instructions, TRANSCRIPT: transcript}
    if clip is not None:
        values[CLIP], values[CLIP_RATE] = _recording(clip)
    given = {name: value for name, value in values.items() if value is not None}
    return {"messages": [{"role": "user", "content": text}], ADDITIONAL_INFORMATION: given}


def read_aloud(text: str, instructions: str | None = None) -> str:
    """Ask a model that answers to speak a text: it repeats the text as its answer, nearly always word for word."""
    style = f" Speak like this: {instructions}." if instructions else ""
    return (
        "Read the text between the marks aloud, word for word, in its own language. "
        f"Say nothing else: no greeting, no comment, no translation.{style}\n\n<<<\n{text}\n>>>"
    )


def speech_ability(description: Description) -> SpeechAbility | None:
    """What a pipeline can do if it speaks the text that it is given; `None` if it answers.

    Raises:
        StageUnavailable: that is not known yet, because stages of a pipeline without text still load.
    """
    if description.speech is not None or "text" in description.outputs:
        return description.speech
    ready = {stage.stage for stage in description.stages if stage.state == "ready"}
    missing = [f"{stage.stage} ({stage.state})" for stage in description.stages if stage.stage not in ready]
    if missing:
        raise StageUnavailable(
            f"The pipeline is not ready to speak: {', '.join(missing)}.", hint="Try again when it is ready."
        )
    return None


def _recording(clip: Clip) -> tuple[NDArray[numpy.float32], int]:
    """The samples of a recording, with all channels averaged, and their rate."""
    if isinstance(clip, Path | str):
        try:
            samples, rate = soundfile.read(Path(clip).expanduser(), dtype="float32", always_2d=True)
        except (OSError, soundfile.SoundFileError) as error:
            raise MalformedMedia(f"The clip {str(clip)[:200]!r} cannot be read: {error}.", field=CLIP) from error
        return samples.mean(axis=1), int(rate)
    samples, rate = clip
    samples = numpy.asarray(samples, numpy.float32)
    if samples.ndim != 1 or not len(samples) or not numpy.isfinite(samples).all():
        raise InvalidRequest("The clip must be finite samples of one channel, with their rate.", field=CLIP)
    return samples, rate
