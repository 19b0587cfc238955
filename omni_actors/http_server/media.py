"""Media of requests: content parts of OpenAI's messages, stored files, and URLs, every limit checked.

The check is made on the very address that is then connected to, so a name that resolves differently the second time
gains nothing.
"""

from __future__ import annotations

import asyncio
import binascii
import dataclasses
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpcore
import msgspec
import numpy

from omni_actors.errors import InvalidRequest, MalformedMedia, OmniError
from omni_actors.host.processes import end_tasks
from omni_actors.http_server.bodies import FormFile, decode, reserve
from omni_actors.http_server.errors import HttpError, bad_field, too_large
from omni_actors.http_server.generation import Source, Turn, Turns
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.store import Store, UploadedFile
from omni_actors.media.decoders import DecoderThreads, MediaDecoder, Reply
from omni_actors.media.limits import (
    AUDIO_FILE,
    DEFAULT_VIDEO_RATE,
    DOCUMENT_FILE,
    IMAGE_FILE,
    UNKNOWN_FILE,
    VIDEO_FILE,
    Item,
    MediaLimits,
    MediaTooLarge,
    check_counts,
)

FETCH_SECONDS = 20.0
HTTPS_PORT = 443
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
RESOLVERS = 8  # names that are looked up at a time: a slow name server must not take the threads that decode
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class AddressRefused(Exception):
    """A host name resolves to an address that must not be reached from here."""


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, also when IPv4 is embedded in IPv6."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        embedded = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        if embedded is not None:
            return is_public(str(embedded))
        if parsed in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed not in GLOBAL_UNICAST:  # `is_global` is also true of site-local and unassigned addresses
            return False
    return parsed.is_global and not parsed.is_multicast


_resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolver")


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host name."""
    found = await asyncio.get_running_loop().run_in_executor(
        _resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return [str(entry[4][0]) for entry in found]


class Fetcher(httpcore.AsyncNetworkBackend):
    """Fetches media for requests, and connects only to addresses that are allowed.

    Args:
        hosts: allowed hosts in lower case; `.example.com` allows the subdomains of example.com too.
        limit: maximum size in bytes.
        ports: allowed ports.
        trust, resolve, allowed: certificates, name resolution and address check. Tests replace them.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        limit: int,
        *,
        ports: Sequence[int] = (HTTPS_PORT,),
        trust: ssl.SSLContext | None = None,
        resolve: Resolve = resolve,
        allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._hosts = hosts
        self._limit = limit
        self._ports = ports
        self._trust = trust or (ssl.create_default_context() if hosts else None)
        self._resolve = resolve
        self._allowed = allowed
        self._backend = httpcore.AnyIOBackend()

    def check(self, url: str, param: str) -> None:
        """Raise `HttpError` 400 unless this URL may be fetched."""
        if not self._hosts:
            message = "This server fetches no media by URL: send a data: URI, or have its operator set --media-host."
            raise bad_field(param, message, "url_not_allowed")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), HTTPS_PORT if parts.port is None else parts.port
        except ValueError:
            raise bad_field(param, "This is not a valid URL.", "invalid_url") from None
        if parts.scheme != "https":
            raise bad_field(param, "Media are fetched over https only.", "url_not_allowed")
        if parts.username is not None or parts.password is not None or port not in self._ports:
            raise bad_field(param, "The URL must have no credentials and no unusual port.", "url_not_allowed")
        if not url.isascii() or any(character.isspace() or character == "\\" for character in url):
            message = "This is not a valid URL: escape spaces, backslashes and non-ASCII characters."
            raise bad_field(param, message, "invalid_url")
        if not any(host == name.removeprefix(".") or (name[0] == "." and host.endswith(name)) for name in self._hosts):
            message = f"Media may not be fetched from {host!r}: its operator can allow that with --media-host."
            raise bad_field(param, message, "url_not_allowed")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the address that was checked, so that no second look-up can give another. httpcore calls this.

        Raises:
            AddressRefused: one of the host's addresses is not allowed.
            httpcore.ConnectError: the name does not resolve.
        """
        try:
            addresses = await self._resolve(host, port)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        # One private address among public ones is not an accident: refuse the name altogether.
        if not addresses or not all(self._allowed(address) for address in addresses):
            raise AddressRefused(host)
        return await self._backend.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def fetch(self, url: str, param: str) -> bytes:
        """Fetch `url`. What it holds counts towards the bytes of the request that this task handles.

        Raises:
            HttpError: 400 for any failure, with a message that reveals nothing about the network; 413 or 503 for size.
        """
        self.check(url, param)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._get(url, param)
        except AddressRefused:
            message = "This host resolves to an address that is not allowed."
            raise bad_field(param, message, "url_not_allowed") from None
        except (TimeoutError, OSError, httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError):
            raise bad_field(param, "The URL could not be fetched.", "media_not_fetched") from None

    async def _get(self, url: str, param: str) -> bytes:
        data = bytearray()
        async with (
            httpcore.AsyncConnectionPool(ssl_context=self._trust, network_backend=self) as pool,
            pool.stream("GET", url, headers={"Host": urlsplit(url).netloc, "User-Agent": "omni_actors"}) as response,
        ):
            if response.status != 200:
                detail = "Redirects are not followed." if 300 <= response.status < 400 else ""
                message = f"The URL's host answered {response.status}. {detail}".strip()
                raise bad_field(param, message, "media_not_fetched")
            async for piece in response.aiter_stream():
                if len(data) + len(piece) > self._limit:
                    raise too_large(f"The file at this URL exceeds {self._limit} bytes.", param)
                reserve(len(piece))
                data += piece
        return bytes(data)


T = TypeVar("T")

UNLIMITED = 1 << 62  # bytes
MAX_URL = 2048  # bytes of a URL, or of a data: URI before its data
MIN_BASE64 = 16  # characters; a shorter one may be anything
BASE64 = re.compile(rb"[A-Za-z0-9+/_-]+={0,2}\s*")
PIECE = 1 << 20  # characters of base64 decoded at once: each call holds the interpreter lock
KINDS = {"audio": AUDIO_FILE, "image": IMAGE_FILE}


class _Medium(NamedTuple):
    """A medium of a request: its bytes, the field that they came in, and the name of a file."""

    modality: str
    data: bytes
    param: str
    name: str = ""


class _Unread(NamedTuple):
    """A medium to read, and the empty part of a message that it will fill."""

    source: Source
    into: dict[str, Any]


class MediaReader:
    """Converts chat messages, fetching and checking their media."""

    def __init__(
        self, settings: ServerSettings, fetcher: Fetcher, files: Store[UploadedFile], decoders: DecoderThreads
    ) -> None:
        self._settings = settings
        self._limits = MediaLimits(
            audio_seconds=settings.audio_seconds,
            image_pixels=settings.image_pixels,
            video_seconds=settings.video_seconds,
        )
        self._decoders = decoders
        self._fetcher = fetcher
        self._files = files

    async def messages(
        self, turns: Turns, max_media: Mapping[str, int], calls: Collection[str] = (), *, sound_in_video: bool = False
    ) -> list[dict[str, Any]]:
        """Messages as `AsyncOmniClient.submit` takes them.

        Args:
            max_media: how many media a prompt may have, by modality; no limit for those that are missing.
            calls: ids of the tool calls of turns before these messages.
            sound_in_video: every video has a sound track, which the model hears.

        Raises:
            HttpError: 400 or 413, with the field at fault.
        """
        check_calls(turns, calls)
        unread: list[_Unread] = []
        converted = [self._message(turn, where, unread) for where, turn in turns.items()]
        param, most = next(iter(turns)).partition("[")[0], self._settings.media_parts
        if len(unread) > most:
            raise bad_field(param, f"The messages have {len(unread)} media; at most {most} are allowed.")
        found = await self._read_all(unread)
        tracks = ["audio" for medium in found if sound_in_video and medium.modality == "video"]
        try:
            check_counts([medium.modality for medium in found] + tracks, max_media)
        except InvalidRequest as error:
            raise bad_field(param, error.message) from None
        values = await self._checked(found, sound_in_video)
        for one, medium, value in zip(unread, found, values, strict=True):
            one.into.update({"type": medium.modality, medium.modality: value})
        return converted

    async def _read_all(self, unread: Sequence[_Unread]) -> list[_Medium]:
        """Read media side by side. Raises the error of the first one that has one, in the order of the request."""
        reading = [asyncio.create_task(self._read(one.source), name="medium") for one in unread]
        try:
            return [await task for task in reading]
        finally:
            await end_tasks(*reading)

    async def seconds(self, data: bytes, param: str) -> float:
        """The length of an uploaded sound in seconds, 0 if it does not say that.

        Raises:
            HttpError: 400 or 413, as for the media of messages.
        """
        self.check_file(data, param)
        return (await self._measured(AUDIO_FILE, "The file", data, param)).seconds

    async def samples(self, data: bytes, param: str, rate: int, most_seconds: float) -> numpy.ndarray:
        """Decode an uploaded sound: f32 [samples], mono, at `rate` Hz.

        Raises:
            HttpError: 400 or 413, as for the media of messages.
        """
        self.check_file(data, param)
        # Its seconds bound what a decoder holds: sound is averaged and resampled as it is read.
        limits = dataclasses.replace(self._limits, audio_seconds=most_seconds, audio_rate=rate, decoded_bytes=UNLIMITED)
        (samples,) = await self._decoded(AUDIO_FILE, "The recording", data, param, limits=limits)
        return samples

    async def pictures(self, files: Sequence[FormFile], max_media: Mapping[str, int]) -> list[dict[str, Any]]:
        """The parts of a message with uploaded pictures.

        Raises:
            HttpError: 400 or 413, as for the media of messages.
        """
        param, most = files[0].field, min(self._settings.media_parts, max_media.get("image", len(files)))
        if not most:
            raise bad_field(param, "This model takes no pictures, only a text.", "unsupported_parameter")
        if len(files) > most:
            raise bad_field(param, f"There are {len(files)} pictures; at most {most} are allowed.")
        for file in files:
            self.check_file(file.data, file.field)
        values = await self._checked([_Medium("image", file.data, file.field) for file in files])
        return [{"type": "image", "image": value} for value in values]

    def _message(self, turn: Turn, where: str, unread: list[_Unread]) -> dict[str, Any]:
        """A message whose media are empty parts: they are filled when what is added to `unread` has been read."""
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls:
            message["tool_calls"] = turn.calls
        if turn.answers is not None:
            message["tool_call_id"] = turn.answers[0]
        if not isinstance(turn.content, str):
            message["content"] = parts = []
            for index, part in enumerate(turn.content):
                source = part.source(f"{where}.content[{index}]")
                parts.append({"type": "text", "text": source} if isinstance(source, str) else {})
                if isinstance(source, Source):
                    unread.append(_Unread(source, parts[-1]))
        return message

    async def _read(self, source: Source) -> _Medium:
        modality, param, name = source.modality, source.param, source.name
        if source.file_id is not None:
            found = await asyncio.to_thread(self._files.find, source.file_id)
            data = await asyncio.to_thread(self._files.data, source.file_id)
            if found is None or not data:
                message = f"There is no file {source.file_id[:100]!r}, or no longer: upload it again."
                raise bad_field(param, message, "file_not_found")
            reserve(len(data))  # it is sent to the pipeline as if it were in the body
            name = name or found.name
        else:
            text = await asyncio.to_thread(_string_of, source.data, param)
            data = await (self._base64(text, param) if source.is_base64 else self._url(text, modality, param))
        if not modality:
            modality = (await self._measured(UNKNOWN_FILE, "The file", data, param)).modality
        return _Medium(modality, data, param, name or "")

    async def _url(self, url: memoryview, modality: str, param: str) -> bytes:
        """What is at a URL; raises `HttpError` if a data: URI declares another modality, unless that is empty."""
        start = bytes(url[:MAX_URL])
        if start[:5].lower() != b"data:":
            if len(start) >= MIN_BASE64 and BASE64.fullmatch(start):
                kind = f"{modality}/TYPE" if modality else "TYPE"
                message = f"This is base64 without its type: put data:{kind};base64, in front of it. A URL is "
                message += "https://, on a host that the operator allows with --media-host."
                raise bad_field(param, message, "invalid_url")
            if len(url) > MAX_URL:
                raise bad_field(param, f"A URL is limited to {MAX_URL} bytes.", "invalid_url")
            return await self._fetcher.fetch(start.decode(errors="replace"), param)
        head, comma, _ = start.partition(b",")
        kind = head[5:].decode(errors="replace").lower()
        if not comma or not kind.endswith(";base64"):
            raise bad_field(param, "A data: URI must have the form data:TYPE;base64,DATA.", "invalid_url")
        if modality and not kind.startswith((f"{modality}/", "application/octet-stream")):
            raise bad_field(param, f"The type {kind.partition(';')[0]!r} is not {modality}.", "invalid_url")
        return await self._base64(url[len(head) + 1 :], param)

    async def _base64(self, text: memoryview, param: str) -> bytes:
        self._check_size((len(text) - 4) * 3 // 4, param)
        return await asyncio.to_thread(_base64_of, text, param)

    def check_file(self, data: bytes, param: str) -> None:
        """Raise `HttpError` 400 or 413 for an uploaded file that is empty or too large."""
        if not data:
            raise bad_field(param, "The file is empty.")
        self._check_size(len(data), param)

    def _check_size(self, size: int, param: str) -> None:
        limit = self._settings.media_bytes
        if size > limit:
            raise too_large(f"Each file, image, audio or video is limited to {limit} bytes.", param)

    async def _checked(self, found: Sequence[_Medium], sound_in_video: bool = False) -> list[Any]:
        """Check audio and images by their headers and decode video and documents; what the client library takes.

        The stage that decodes audio and images checks them again, and more.
        """
        values: list[Any] = []
        used = 0
        for modality, data, param, name in found:
            if not data:
                raise bad_field(param, "The data is empty.")
            if modality == "text":
                (text,) = await self._decoded(DOCUMENT_FILE, "The file", data, param, used)
                used += text.nbytes
                values.append(f"{name}:\n\n{text.tobytes().decode(errors='replace')}".removeprefix(":\n\n"))
                continue
            if modality != "video":
                used += (await self._measured(KINDS[modality], f"The {modality}", data, param, used)).size
                values.append(data)
                continue
            (frames,) = await self._decoded(VIDEO_FILE, "The video", data, param, used)
            used += frames.nbytes
            if sound_in_video:
                track = "The sound track that use_audio_in_video asks for"
                used += (await self._measured(AUDIO_FILE, track, data, param, used)).size
            values.append((frames, DEFAULT_VIDEO_RATE, data) if sound_in_video else (frames, DEFAULT_VIDEO_RATE))
        return values

    async def _decoded(
        self, kind: str, what: str, data: bytes, param: str, used: int = 0, limits: MediaLimits | None = None
    ) -> list[numpy.ndarray]:
        items = [(Item(kind, what, len(data)), data)]
        return await self._on_decoder(lambda decoder: decoder.decode(items, limits or self._limits, used), param)

    async def _measured(self, kind: str, what: str, data: bytes, param: str, used: int = 0) -> Reply:
        items = [(Item(kind, what, len(data)), data)]
        return await self._on_decoder(lambda decoder: decoder.measure(items, self._limits, used), param)

    async def _on_decoder(self, work: Callable[[MediaDecoder], T], param: str) -> T:
        """Run `work` on a thread with a decoder: C code reads these files, in a process that it alone can break."""
        task = self._decoders.submit(work)
        try:
            result: T = await asyncio.wrap_future(task.future)
        except asyncio.CancelledError:
            task.cancel()
            raise
        except MediaTooLarge as error:
            raise too_large(str(error), param) from None
        except MalformedMedia as error:
            raise bad_field(param, error.message, "malformed_media") from None
        except InvalidRequest as error:
            raise bad_field(param, str(error)) from None
        except OmniError as error:
            raise HttpError.of(error) from None
        return result


def _string_of(value: msgspec.Raw, param: str) -> memoryview:
    """The UTF-8 of a JSON string, copied only if it holds escapes. Raises `HttpError` if it is not a string."""
    view = memoryview(value)
    if view[0] != ord('"'):
        raise bad_field(param, f"{param}: expected a string.")
    return memoryview(decode(value, str, param).encode()) if re.search(rb"\\", view) else view[1:-1]


def _base64_of(text: memoryview, param: str) -> bytes:
    """Decode base64. Raises `HttpError` if it is not valid."""
    pieces = []
    for start in range(0, len(text), PIECE):
        try:
            pieces.append(binascii.a2b_base64(text[start : start + PIECE], strict_mode=True))
        except binascii.Error as error:
            raise bad_field(param, f"This is not valid base64: {error}.", "invalid_base64") from None
        if len(pieces[-1]) < PIECE * 3 // 4 and start + PIECE < len(text):
            raise bad_field(param, "This is not valid base64: its end is followed by more.", "invalid_base64")
    return b"".join(pieces)


def check_calls(turns: Turns, calls: Collection[str]) -> None:
    """Raise `HttpError` 400 for the result of a call that no earlier message makes, and that is none of `calls`."""
    known = set(calls)
    for turn in turns.values():
        known |= {call["id"] for call in turn.calls}
        if turn.answers is not None and turn.answers[0] not in known:
            param = turn.answers[1]
            raise bad_field(param, f"{param}: no assistant's message before it has a tool call with this id.")
