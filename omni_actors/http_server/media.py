"""Convert the content parts of OpenAI's messages to those of the client library, and check every limit."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any

import numpy
import soundfile
from numpy.typing import NDArray
from PIL import Image

from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fetch import Fetcher
from omni_actors.http_server.long_strings import base64_of, string_of
from omni_actors.http_server.schemas import (
    AnyMessage,
    AnyPart,
    AssistantMessage,
    AudioPart,
    AudioUrlPart,
    FilePart,
    ImageUrlPart,
    SystemMessage,
    TextPart,
    UserMessage,
)
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.stores import FileStore, Transcripts
from omni_actors.protocol.payloads import MEDIA_MODALITIES

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
MAX_URL = 2048  # bytes of a URL, or of a data: URI before its data
VIDEO_RATE = 2.0  # frames per second to keep, as Qwen2.5-Omni was trained
VIDEO_SIDE = 640  # longest side of a kept frame, in pixels


class MediaReader:
    """Converts chat messages, fetching and checking their media."""

    def __init__(self, settings: ServerSettings, fetcher: Fetcher, files: FileStore, transcripts: Transcripts) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._files = files
        self._transcripts = transcripts

    async def messages(self, messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
        """Messages as `AsyncOmniClient.submit` takes them.

        Raises:
            HttpError: 400 or 413, with the field at fault.
        """
        self._check_count(messages)
        return [await self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _check_count(self, messages: Sequence[AnyMessage]) -> None:
        parts = [part for message in messages for part in message.content or () if not isinstance(part, str)]
        count = sum(not isinstance(part, TextPart) for part in parts)
        if count > self._settings.media_parts:
            raise bad_field(
                "messages", f"The messages have {count} media; at most {self._settings.media_parts} are allowed."
            )

    async def _message(self, message: AnyMessage, where: str) -> dict[str, Any]:
        role = "user" if isinstance(message, UserMessage) else "assistant"
        if isinstance(message, SystemMessage):
            role = "system"
        if isinstance(message, AssistantMessage) and message.content is None:
            return {"role": role, "content": self._said(message, where)}
        content = message.content or ""
        if isinstance(content, str):
            return {"role": role, "content": content}
        parts = [await self._part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
        return {"role": role, "content": parts}

    def _said(self, message: AssistantMessage, where: str) -> str:
        if message.audio is None:
            return message.refusal or ""
        text = self._transcripts.find(message.audio.id)
        if text is None:
            raise bad_field(f"{where}.audio.id", "This audio is not known, or no longer: send its text as content.")
        return text

    async def _part(self, part: AnyPart, where: str) -> dict[str, Any]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if isinstance(part, AudioPart):
            param = f"{where}.input_audio.data"
            text = await asyncio.to_thread(string_of, part.input_audio.data, param)
            return await self._medium("audio", await self._base64(text, param), param)
        if isinstance(part, FilePart):
            return await self._file(part, f"{where}.file")
        if isinstance(part, ImageUrlPart):
            modality, url = "image", part.image_url.url
        elif isinstance(part, AudioUrlPart):
            modality, url = "audio", part.audio_url.url
        else:
            modality, url = "video", part.video_url.url
        param = f"{where}.{modality}_url.url"
        text = await asyncio.to_thread(string_of, url, param)
        return await self._medium(modality, await self._bytes(text, modality, param), param)

    async def _file(self, part: FilePart, where: str) -> dict[str, Any]:
        if (part.file.file_id is None) == (not part.file.is_inline):
            raise bad_field(where, "Give exactly one of file_id and file_data.")
        if part.file.is_inline:
            param = f"{where}.file_data"
            text = await asyncio.to_thread(string_of, part.file.file_data, param)
            modality = modality_of(text, param)
            return await self._medium(modality, await self._bytes(text, modality, param), param)
        param = f"{where}.file_id"
        file = self._files.find(part.file.file_id or "")
        if file is None:
            raise bad_field(
                param, f"There is no file {part.file.file_id!r}, or no longer: upload it again.", "file_not_found"
            )
        return await self._medium(await asyncio.to_thread(sniff, file.data, param), file.data, param)

    async def _bytes(self, url: memoryview, modality: str, param: str) -> bytes:
        start = bytes(url[:MAX_URL])
        if start[:5].lower() != b"data:":
            if len(url) > MAX_URL:
                raise bad_field(param, f"A URL is limited to {MAX_URL} bytes.", "invalid_url")
            return await self._fetcher.fetch(start.decode(errors="replace"), param)
        head, comma, _ = start.partition(b",")
        kind = head[5:].decode(errors="replace").lower()
        if not comma or not kind.endswith(";base64"):
            raise bad_field(param, "A data: URI must have the form data:TYPE;base64,DATA.", "invalid_url")
        if not kind.startswith(f"{modality}/") and not kind.startswith("application/octet-stream"):
            raise bad_field(param, f"The type {kind.partition(';')[0]!r} is not {modality}.", "invalid_url")
        return await self._base64(url[len(head) + 1 :], param)

    async def _base64(self, text: memoryview, param: str) -> bytes:
        if len(text) > self._settings.media_bytes * 4 // 3 + 4:
            raise HttpError(
                413,
                f"Each image, audio or video is limited to {self._settings.media_bytes} bytes.",
                param=param,
                code="media_too_large",
            )
        return await asyncio.to_thread(base64_of, text, param)

    async def _medium(self, modality: str, data: bytes, param: str) -> dict[str, Any]:
        if not data:
            raise bad_field(param, "The data is empty.")
        value: bytes | tuple[NDArray[numpy.uint8], float] = data
        # In a thread: headers of malicious files may take long, and video is decoded here.
        if modality == "audio":
            await asyncio.to_thread(check_audio, data, self._settings.audio_seconds, param)
        elif modality == "image":
            await asyncio.to_thread(check_image, data, self._settings.image_pixels, param)
        else:
            value = await asyncio.to_thread(read_video, data, self._settings.video_seconds, param)
        return {"type": modality, modality: value}


def modality_of(url: memoryview, param: str) -> str:
    """The modality that a data: URI declares: "audio", "image" or "video"."""
    scheme, _, kind = bytes(url[:MAX_URL]).partition(b"/")[0].decode(errors="replace").lower().partition(":")
    kind = kind if scheme == "data" else ""
    if kind not in MEDIA_MODALITIES:
        raise bad_field(param, "This must be a data: URI of an audio, image or video type.")
    return kind


def sniff(data: bytes, param: str) -> str:
    """The modality of an uploaded file, by its content."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS):
            return "image"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        pass  # not an image: the next reader decides
    try:
        with soundfile.SoundFile(io.BytesIO(data)):
            return "audio"
    except (soundfile.LibsndfileError, ValueError, RuntimeError):
        pass  # not audio either: PyAV decides whether it is a video, and reports what is wrong
    return "video"


def check_audio(data: bytes, limit: float, param: str) -> None:
    """Raise `HttpError` unless this is audio of at most `limit` seconds. The engine checks again on decoding."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            seconds = file.frames / file.samplerate
    except (soundfile.LibsndfileError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise bad_field(param, f"The audio cannot be read: {error}", "malformed_media") from None
    if seconds > limit:
        message = f"The audio is {seconds:.1f} s long; at most {limit:g} s are allowed."
        raise HttpError(413, message, param=param, code="media_too_large")


def check_image(data: bytes, limit: int, param: str) -> None:
    """Raise `HttpError` unless this is an image of at most `limit` pixels. Reads the header only."""
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        width, height = limit, 2
    except (OSError, ValueError, SyntaxError):  # what Pillow's readers raise for files that they cannot read
        raise bad_field(
            param, f"The image cannot be read; it must be one of {', '.join(IMAGE_FORMATS)}.", "malformed_media"
        ) from None
    if width * height > limit:
        raise HttpError(413, f"The image has more than {limit} pixels.", param=param, code="media_too_large")


def read_video(data: bytes, limit: float, param: str) -> tuple[NDArray[numpy.uint8], float]:
    """Decode a video file to frames, u8 [frames, height, width, 3], and their rate, `VIDEO_RATE` per second.

    Raises:
        HttpError: 400 if it cannot be read or PyAV is not installed, 413 if it is longer than `limit` seconds.
    """
    try:
        import av
    except ImportError:
        raise bad_field(
            param, "The server cannot read video: its operator must install PyAV (pip install 'omni_actors[http]')."
        ) from None
    frames: list[NDArray[numpy.uint8]] = []
    try:
        with av.open(io.BytesIO(data), "r") as container:
            for frame in container.decode(video=0):
                seconds = float(frame.time or 0.0)
                if seconds > limit:
                    raise HttpError(413, f"The video is longer than {limit:g} s.", param=param, code="media_too_large")
                if seconds * VIDEO_RATE < len(frames):
                    continue
                scale = min(1.0, VIDEO_SIDE / max(frame.width, frame.height))
                size = (max(2, round(frame.width * scale)), max(2, round(frame.height * scale)))
                small = frame.reformat(width=size[0], height=size[1], format="rgb24")
                picture = numpy.ascontiguousarray(small.to_ndarray(), dtype=numpy.uint8)
                if frames and picture.shape != frames[0].shape:
                    raise bad_field(param, "The frames of the video differ in size.", "malformed_media")
                frames.append(picture)
    except (av.FFmpegError, ValueError, IndexError, MemoryError) as error:
        raise bad_field(param, f"The video cannot be read: {error}", "malformed_media") from None
    if not frames:
        raise bad_field(param, "The video has no frames.", "malformed_media")
    if len(frames) % 2:
        frames.append(frames[-1])  # the model takes frames in pairs
    return numpy.stack(frames), VIDEO_RATE
