"""What the routes share: the client, the pipeline's description, files and voices."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import itertools
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
import numpy
from msgspec import Meta, Struct
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import ConfigError, OmniError
from omni_actors.host.processes import end_tasks
from omni_actors.host.run_directory import check_own_folder, expanded
from omni_actors.http_server.bodies import Form, FormBody, FormFile, Strict
from omni_actors.http_server.ears import Ears
from omni_actors.http_server.errors import HttpError, bad_field, too_large
from omni_actors.http_server.generation import VoiceId, voice_name
from omni_actors.http_server.media import Fetcher, MediaReader
from omni_actors.http_server.realtime.turns import Realtime
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.store import (
    KEPT_SECONDS,
    MAX_BYTES,
    MAX_FILES,
    MAX_RESPONSES,
    MAX_TRANSCRIPTS,
    MAX_VIDEOS,
    SWEEP_SECONDS,
    Journals,
    KeptResponse,
    Store,
    UploadedFile,
    VideoJob,
    secret_of,
)
from omni_actors.logs import get_logger
from omni_actors.media.decoders import DecoderThreads
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget

logger = get_logger(__name__)

VOICES = "voices.db"
MAX_VOICES = 10_000  # that the key http.voices may allow
FOREVER = 1e9  # seconds
ID = "voice_"
ID_BYTES = 12
VOICE_ID = re.compile(rf"{ID}[0-9a-f]{{{2 * ID_BYTES}}}")


class Voice(Struct, frozen=True, forbid_unknown_fields=True):
    """A voice without its recording.

    Args:
        created: Unix time.
        rate: of the recording, in Hz.
        samples: their number.
        transcript: what is said in the recording, if the client knows it.
    """

    name: str
    created: int
    rate: int
    samples: int
    transcript: str | None = None

    @property
    def id(self) -> str:
        """The id of the voice, which depends on nothing but its name in lower case."""
        return id_of(self.name)

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return self.samples / self.rate


def id_of(name: str) -> str:
    """The id of the voice that has this name, in any case."""
    digest = hashlib.blake2b(name.casefold().encode(errors="surrogatepass"), digest_size=ID_BYTES)
    return f"{ID}{digest.hexdigest()}"


class VoiceStore:
    """Voices in a database. Its methods use files; call them on threads.

    Args:
        folder: where the database is, made with the first voice; `None` if this server keeps none.
        most: how many there may be.
    """

    def __init__(self, folder: str | None, most: int) -> None:
        self._folder = expanded(folder, "http.voices_dir") if folder is not None else None
        self._most = most
        self._opened: Store[Voice] | None = None

    def all(self) -> list[Voice]:
        """All voices, by name."""
        return sorted(self._store.values() if self._store is not None else (), key=lambda voice: voice.name)

    def find(self, name: str) -> Voice | None:
        """The voice with this name, in any case, or with this id."""
        ids = [name, id_of(name)] if VOICE_ID.fullmatch(name) else [id_of(name)]
        return next(filter(None, map(self._store.find, ids)), None) if self._store is not None else None

    def samples(self, voice: Voice) -> numpy.ndarray:
        """The recording: f32 [samples], mono. Raises `HttpError` 404 if another server has just deleted it."""
        data = self._store.data(voice.id) if self._store is not None else b""
        if not data:
            raise no_voice(voice.name)
        return numpy.frombuffer(data, numpy.float32)

    def add(self, voice: Voice, samples: numpy.ndarray) -> None:
        """Keep a voice with its recording.

        Raises:
            HttpError: 400 if the name is taken, 400 if there are too many, 500 if others may write to the folder, 507
                if it cannot be written.
        """
        if self._folder is None:
            message = "This server keeps no voices: its operator must name a folder with --http-voices-dir."
            raise HttpError(400, message, code="unsupported_parameter")
        kept, data = False, samples.astype(numpy.float32).tobytes()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own_folder(self._folder, "The folder of voices")
            os.close(os.open(self._folder / VOICES, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            if self.find(voice.name) is not None:
                raise bad_field("name", f"There is a voice {voice.name!r}: choose another name, or delete it.")
            if len(self.all()) >= self._most:
                message = f"There are {self._most} voices, as many as this server keeps: delete one."
                raise bad_field("name", message, "too_many_voices")
            kept = self._store is not None and self._store.add(voice.id, voice, 0, data, there=False) > 0
        except (OSError, sqlite3.Error) as error:
            logger.error("cannot write a voice to %s: %s", self._folder, error)
        except ConfigError as error:
            logger.error("cannot keep a voice: %s", error)
            message = "The server cannot keep the voice: its operator must give it another folder, as its log says."
            raise HttpError(500, message, code="internal_error") from error
        if not kept:
            message = "The server cannot write the voice: its operator must make room, as its log says."
            raise HttpError(507, message, code="internal_error")

    def remove(self, name: str) -> Voice | None:
        """Delete the voice with this name or id, and return it; `None` if there is none."""
        voice = self.find(name)
        return voice if voice is not None and self._store is not None and self._store.remove(voice.id) else None

    def close(self) -> None:
        """Close the database."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _store(self) -> Store[Voice] | None:
        """The database, once there is one that can be read."""
        if self._opened is None and self._folder is not None and (self._folder / VOICES).exists():
            try:
                self._opened = Store(str(self._folder), "voices", Voice, MAX_VOICES, 0, FOREVER, durable=True)
            except sqlite3.DatabaseError as error:
                logger.error("the voices cannot be read, move %s away: %s", self._folder / VOICES, error)
        return self._opened


def no_voice(name: str) -> HttpError:
    """The refusal of a voice that is not there."""
    message = f"There is no voice {name[:100]!r} that a client has made; GET /v1/audio/voices lists those there are."
    return HttpError(404, message, param="voice", code="voice_not_found")


DESCRIBE_SECONDS = 3.0  # a coordinator that needs longer is not healthy
FRESH_SECONDS = 0.2  # for which a description may be used again
REPORT_SECONDS = 1.0  # between reports of metrics to the coordinator, and between its descriptions
REMEMBERED_SECONDS = 30.0  # the same for what does not change while a pipeline runs
OPENAI_MODEL = re.compile(r"(chatgpt|dall-e|gpt|o\d|tts|whisper)(-[\w.:-]{1,100})?")
# A new one goes to the end: the others keep their voices.
OPENAI_VOICES = "alloy ash ballad coral echo fable nova onyx sage shimmer verse marin cedar "
OPENAI_VOICES += "beacon bossa cinder delta gleam meridian quartz ripple shida stone tempo vesper willow"
IPV6_NETWORK = 64  # bits; who has one of its addresses usually has them all


class ServerState:
    """One per application, in `app.state.server`."""

    def __init__(self, settings: ServerSettings, bodies: Budget, fetcher: Fetcher | None = None) -> None:
        self.settings = settings
        self.realtime = Realtime(settings, bodies)
        self.calls: dict[str, asyncio.Task[None]] = {}  # over WebRTC, by id
        self.live: dict[str, Any] = {}  # connections of Live sessions, by the id of the session
        self.client = AsyncOmniClient(settings.endpoint, keys=settings.keys)
        self.ears = Ears(settings.transcriber, settings.keys) if settings.transcriber is not None else None
        self.deaf = False  # the model does not hear: sounds of prompts go to the ears
        folder = settings.shared_dir
        self.files = Store(folder, "files", UploadedFile, MAX_FILES, settings.files_bytes, settings.file_seconds)
        self.videos = Store(folder, "videos", VideoJob, MAX_VIDEOS, settings.files_bytes, settings.file_seconds)
        self.video_jobs: dict[str, asyncio.Task[None]] = {}  # of this process, by id
        self.transcripts = Store(folder, "transcripts", str, MAX_TRANSCRIPTS, MAX_BYTES, KEPT_SECONDS)
        self.responses = Store(folder, "responses", KeptResponse, MAX_RESPONSES, MAX_BYTES, KEPT_SECONDS)
        self.live_sessions = Store(folder, "live", str, MAX_RESPONSES, MAX_BYTES, KEPT_SECONDS)  # the owner of each
        self.streams = Journals(folder, "streams")  # of responses
        self.sessions = Journals(folder, "sessions")
        self.secret = secret_of(folder)
        self.voices = VoiceStore(settings.voices_dir, settings.voices)
        self._decoders = DecoderThreads()
        fetcher = fetcher or Fetcher(settings.media_hosts, settings.media_bytes)
        self.media = MediaReader(settings, fetcher, self.files, self._decoders)
        self.turns = asyncio.Lock()  # held for a turn of the loop by each answer that has sound to encode
        self.started = int(time.time())
        self._description: Description | None = None
        self._described = 0.0
        self._whole = False  # whether this coordinator has had all stages ready, and so knows all of them
        self._asking: asyncio.Task[Description] | None = None
        self._tasks: list[asyncio.Task[NoReturn]] = []

    async def __aenter__(self) -> ServerState:
        for client in (self.client, *([self.ears.client] if self.ears is not None else [])):
            await client.__aenter__()
        self._tasks = [asyncio.create_task(work(), name=work.__name__) for work in (self.refresh, self.sweep)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def describe(self) -> Description:
        """The pipeline's state, at most `FRESH_SECONDS` old. Raises `RequestTimeout` if there is no answer.

        Concurrent requests share one question.
        """
        if self._description is not None and self._whole and time.monotonic() < self._described + FRESH_SECONDS:
            return self._description
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="describe")
            self._asking.add_done_callback(_note)
        return await asyncio.shield(self._asking)

    async def facts(self, model: str | None = None) -> Description:
        """The same for names, outputs and stages, which stay once all have been ready: as `refresh` has found it last.

        A busy coordinator, which does not answer for a while, refuses requests itself, or takes its time. An unknown
        `model` is waited for, because the pipeline may have been started again with more names.
        """
        known = self._description
        if known is None or not self._whole or time.monotonic() >= self._described + REMEMBERED_SECONDS:
            return await self.describe()
        is_named = model in (None, *self.model_names(known), *known.adapters) or self._is_openais(model)
        return known if is_named else await self.describe()

    async def _ask(self) -> Description:
        description = await self.client.describe(DESCRIBE_SECONDS)
        most = dict(description.max_media)
        self.deaf = most.get("audio") == 0
        if self.deaf and self.ears is not None:  # which hear for it
            del most["audio"]
        same = self._description is not None and self._description.coordinator == description.coordinator
        self._whole = description.healthy or (self._whole and same)
        self._description = msgspec.structs.replace(description, max_media=most)
        self._described = time.monotonic()
        return self._description

    async def transcriber(self) -> tuple[AsyncOmniClient, Description]:
        """The pipeline that writes down what is said. Raises `RequestTimeout`."""
        if self.ears is not None:
            return self.ears.client, await self.ears.describe()
        return self.client, await self.facts()

    async def aligner(self) -> Ears | None:
        """The pipeline that knows when words are said, if there is one."""
        return self.ears if self.ears is not None and await self.ears.aligns() else None

    async def heard(self, prompt: Any, **options: Any) -> Any:
        """A prompt as the model takes it: see `Ears.heard`. Raises `OmniError`."""
        return prompt if self.ears is None or not self.deaf else await self.ears.heard(prompt, **options)

    async def refresh(self) -> NoReturn:
        """Keep the coordinator informed of this process's metrics, and this process of the pipeline."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report()
            with contextlib.suppress(OmniError):  # it is away; requests go on with the last description for a while
                await self.describe()

    async def sweep(self) -> NoReturn:
        """Remove the journals of responses and sessions that nobody goes on with."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for journals in (self.streams, self.sessions):
                await asyncio.to_thread(journals.sweep)

    def _report(self) -> None:
        with contextlib.suppress(OmniError):  # it is away; the next report has all of this one
            self.client.report(self.realtime.meters.snapshot())

    async def close(self) -> None:
        """End calls and jobs, the connection to the pipeline, and the decoders."""
        await end_tasks(*self._tasks, *self.calls.values(), *self.video_jobs.values(), self._asking)
        self._report()
        if self.ears is not None:
            await self.ears.close()
        await self.client.close()
        await self.realtime.close()
        await asyncio.to_thread(self._decoders.close)
        stores = (self.files, self.videos, self.transcripts, self.responses, self.live_sessions)
        for store in (*stores, self.voices, self.streams, self.sessions):
            store.close()

    def tenant(self, connection: HTTPConnection) -> str:
        """A name for the client's address, by which slots are shared and from which nobody else can tell the address.

        16 hexadecimal digits, empty without an address.
        """
        try:
            address = ipaddress.ip_address(connection.client.host.partition("%")[0] if connection.client else "")
        except ValueError:
            return ""
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or ipaddress.ip_network((address, IPV6_NETWORK), strict=False).network_address
        return hashlib.blake2b(address.packed, digest_size=8, key=self.secret).hexdigest()

    # -- names --------------------------------------------------------------------------------------------------------

    def model_names(self, description: Description) -> list[str]:
        """The names that /v1/models lists, the preferred one first. Paths on this host are not disclosed."""
        names = self.settings.served_names or [description.pipeline, description.model]
        return [name for name in dict.fromkeys(names) if not name.startswith("/")]

    def model_name(self, name: str | None, description: Description) -> str:
        """The name of the model that a request asks for, the preferred one if it names none.

        Raises `HttpError` 404 for a model that this server does not have.
        """
        names = [*self.model_names(description), *description.adapters]
        if name is None:
            return names[0]
        if self._is_openais(name):
            return name
        if name not in names and (self.settings.served_names or name != description.model):
            message = f"The model {name[:200]!r} does not exist; this server has {', '.join(names)}. "
            message += "Its operator can add names with --served-name, and those of OpenAI with --openai-names."
            raise HttpError(404, message, param="model", code="model_not_found")
        return name

    async def model(self, name: str | None) -> tuple[Description, str]:
        """The pipeline, and its name of the model that a request asks for. Raises `HttpError` 404."""
        description = await self.facts(name)
        return description, self.model_name(name, description)

    def _is_openais(self, name: str | None) -> bool:
        return self.settings.names == "openai" and name is not None and OPENAI_MODEL.fullmatch(name) is not None

    def voice(self, given: str | VoiceId | None, description: Description, param: str) -> str | None:
        """The pipeline's name of a requested voice, as `voice_name`."""
        return voice_name(given, description.voices, self.voice_aliases(description.voices), param)

    def voice_aliases(self, voices: Sequence[str]) -> dict[str, str]:
        """Further names of the pipeline's voices."""
        theirs = OPENAI_VOICES if self.settings.names == "openai" else ""
        found = zip(theirs.split(), itertools.cycle(voices or ("default",)), strict=False)
        return {**dict(found), **self.settings.voice_aliases}

    def stage_params(
        self,
        model: str | None,
        given: Mapping[str, StageParams],
        description: Description,
        text_fields: Mapping[str, Any],
    ) -> dict[str, StageParams]:
        """Parameters by stage: `text_fields` and the adapter that `model` may be for the text stage, then `given`.

        Raises:
            HttpError: there are some for the text stage, and none produces text.
        """
        if model in description.adapters:
            text_fields = {**text_fields, "adapter": model}
        stage = description.outputs.get("text")
        if text_fields and stage is None:
            raise bad_field("modalities", "This pipeline produces no text.", "unknown_modality")
        params = {stage: StageParams(**text_fields)} if text_fields and stage is not None else {}
        for stage, fields in given.items():
            params[stage] = fields.merged_over(params.get(stage, StageParams()))
        return params


def _note(asking: asyncio.Task[Description]) -> None:
    """Read how a question ended that perhaps no request waits for; asyncio reports errors that nothing has read."""
    if not asking.cancelled() and (error := asking.exception()) is not None:
        logger.debug("no description: %s", error)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with JSON, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


MAX_NAME_BYTES = 255
PICTURE_PATH = re.compile(r"/v1/files/picture-[0-9a-f]{32}/content")


class UploadForm(Strict, frozen=True):
    """The fields of POST /v1/files besides the file."""

    purpose: Annotated[str, Meta(max_length=64)] = "user_data"


BODY = FormBody(UploadForm, {})


async def upload(request: Request, state: ServerState, form: Form[UploadForm]) -> Response:
    """Upload an image, audio or video for `{"type": "file", "file": {"file_id": ...}}`."""
    file = form.files[0]
    state.media.check_file(file.data, file.field)
    if len(file.name.encode()) > MAX_NAME_BYTES:
        raise bad_field("file", f"The file's name has more than {MAX_NAME_BYTES} bytes.")
    return json_response(_file(await _keep(state, f"file-{uuid.uuid4().hex}", file, form.fields.purpose)))


async def _keep(state: ServerState, file_id: str, given: FormFile, purpose: str) -> UploadedFile:
    """Keep a file. Raises `HttpError` 413 if it is larger than all may be together, 507 if it cannot be written."""
    now, data = time.time(), given.data
    if len(data) > state.settings.files_bytes:
        raise too_large(f"All files together are limited to {state.settings.files_bytes} bytes.", given.field)
    file = UploadedFile(file_id, given.name, purpose, len(data), int(now), int(now + state.settings.file_seconds))
    await state.files.keep(file.id, file, len(data), data)
    return file


async def keep_picture(request: Request, state: ServerState, data: bytes, kind: str) -> str:
    """Keep a picture as a file, and return its URL. Whoever has that needs no key: nobody can guess it.

    Raises:
        HttpError: as for other files.
    """
    made = FormFile("response_format", f"picture.{kind}", data)
    file = await _keep(state, f"picture-{uuid.uuid4().hex}", made, "assistants_output")
    return f"{request.base_url}v1/files/{file.id}/content"


async def files(request: Request, state: ServerState) -> Response:
    """All uploaded files."""
    found = [_file(file) for file in await asyncio.to_thread(state.files.values)]
    return json_response({"object": "list", "data": found, "has_more": False})


async def file(request: Request, state: ServerState, file_id: str) -> Response:
    """One file, without its content."""
    return json_response(_file(await state.files.get(file_id)))


async def content(request: Request, state: ServerState, file_id: str) -> Response:
    """The content of a file: a picture that was made as such, what was uploaded as a download."""
    found = await state.files.get(file_id)
    made = PICTURE_PATH.fullmatch(request.url.path) is not None
    kind = f"image/{found.name.rpartition('.')[2]}" if made else "application/octet-stream"
    headers = {"x-content-type-options": "nosniff", "content-disposition": "inline" if made else "attachment"}
    headers["content-length"] = str(found.bytes)
    return StreamingResponse(state.files.pieces(found.id, found.bytes), 200, headers, kind)


async def delete(request: Request, state: ServerState, file_id: str) -> Response:
    """Delete a file."""
    return json_response(await state.files.delete(file_id))


def _file(file: UploadedFile) -> dict[str, Any]:
    times = {"created_at": file.created, "expires_at": file.expires}
    about = {"filename": file.name, "purpose": file.purpose, "status": "processed"}
    return {"id": file.id, "object": "file", "bytes": file.bytes, **times, **about}
