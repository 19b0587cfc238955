"""What the routes share: the client, the pipeline's description, stored files and transcripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError, RequestTimeout
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fetch import Fetcher
from omni_actors.http_server.media import MediaReader
from omni_actors.http_server.realtime.shared import Realtime
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.shares import BodyBytes, TenantNames, Turns
from omni_actors.http_server.stores import (
    KEPT_SECONDS,
    MAX_BYTES,
    MAX_FILES,
    MAX_RESPONSES,
    MAX_TRANSCRIPTS,
    KeptResponse,
    Store,
    UploadedFile,
)
from omni_actors.http_server.voice_store import VoiceStore
from omni_actors.logs import get_logger
from omni_actors.media.decoders import DecoderThreads
from omni_actors.protocol.client import Description
from omni_actors.protocol.payloads import StageParams

logger = get_logger(__name__)

DESCRIBE_SECONDS = 3.0  # a coordinator that needs longer is not healthy
FRESH_SECONDS = 0.2  # for which a description may be used again
KNOWN_SECONDS = 2.0  # the same for what does not change while a pipeline runs
REMEMBERED_SECONDS = 30.0  # the same while the coordinator is too busy to answer


class ServerState:
    """One per application, in `app.state.server`."""

    def __init__(self, settings: ServerSettings, bodies: BodyBytes, fetcher: Fetcher | None = None) -> None:
        self.settings = settings
        self.realtime = Realtime(settings, bodies)
        self.client = AsyncOmniClient(settings.endpoint, keys=settings.keys)
        self.files: Store[UploadedFile] = Store(MAX_FILES, settings.files_bytes, settings.file_seconds)
        self.transcripts: Store[str] = Store(MAX_TRANSCRIPTS, MAX_BYTES, KEPT_SECONDS)
        self.responses: Store[KeptResponse] = Store(MAX_RESPONSES, MAX_BYTES, KEPT_SECONDS)
        self.voices = VoiceStore(settings.voices_dir, settings.voices)
        self._decoders = DecoderThreads()
        fetcher = fetcher or Fetcher(settings.media_hosts, settings.media_bytes)
        self.media = MediaReader(settings, fetcher, self.files, self.transcripts, self._decoders)
        self.tenants = TenantNames()
        self.turns = Turns()
        self.started = int(time.time())
        self._description: Description | None = None
        self._described = 0.0
        self._asking: asyncio.Task[Description] | None = None

    async def describe(self) -> Description:
        """The pipeline's state, at most `FRESH_SECONDS` old. Raises `RequestTimeout` if there is no answer.

        Concurrent requests share one question.
        """
        if self._description is not None and time.monotonic() < self._described + FRESH_SECONDS:
            return self._description
        return await asyncio.shield(self._ask_once())

    async def facts(self, model: str | None = None) -> Description:
        """The same for names, outputs and stages, which stay while a pipeline runs; rarely waits for an answer.

        An unknown `model` is waited for, because the pipeline may have been started again with more names.

        A description that is older than `FRESH_SECONDS` is asked for again, and used until the answer is there, but
        not for longer than `KNOWN_SECONDS`. If then no answer comes, requests go on with the last one for a while: a
        busy coordinator refuses them itself, or takes its time.
        """
        if self._description is None:
            return await self.describe()
        if time.monotonic() >= self._described + KNOWN_SECONDS:
            known, until = self._description, self._described + REMEMBERED_SECONDS
            try:
                return await self.describe()
            except RequestTimeout:
                if time.monotonic() >= until:
                    raise
                return known
        if time.monotonic() >= self._described + FRESH_SECONDS:
            self._ask_once()
        if model is not None and model not in {*self.model_names(self._description), *self._description.adapters}:
            return await self.describe()
        return self._description

    def _ask_once(self) -> asyncio.Task[Description]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="describe")
            self._asking.add_done_callback(_note)
        return self._asking

    async def _ask(self) -> Description:
        self._description = await self.client.describe(DESCRIBE_SECONDS)
        self._described = time.monotonic()
        return self._description

    async def close(self) -> None:
        """Close the connection to the pipeline, and end the decoders."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.client.close()
        self.realtime.close()
        await asyncio.to_thread(self._decoders.close)

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
        if name not in names and (self.settings.served_names or name != description.model):
            message = f"The model {name[:200]!r} does not exist; this server has {', '.join(names)}. "
            message += "Its operator can add names with --served-name."
            raise HttpError(404, message, param="model", code="model_not_found")
        return name

    async def model(self, name: str | None) -> tuple[Description, str]:
        """The pipeline, and its name of the model that a request asks for. Raises `HttpError` 404."""
        description = await self.facts(name)
        return description, self.model_name(name, description)

    def voice(self, name: str | None, description: Description, param: str) -> str | None:
        """The pipeline's name of a requested voice, `None` for its default.

        A name that is neither a voice nor an alias is left to the pipeline, which knows what to say.

        Raises:
            HttpError: 400 for an alias of a voice that the pipeline does not have.
        """
        known = {*description.voices, "default"}
        alias_of = self.settings.voice_aliases.get(name) if name is not None and name not in known else None
        if alias_of is not None and alias_of not in known:
            message = (
                f"{name!r} is an alias of {alias_of!r}, which this pipeline does not have: its operator must change "
            )
            message += f"http.voice_aliases. The voices are {', '.join(description.voices) or 'none'}."
            raise bad_field(param, message, "unknown_voice")
        found = alias_of or name
        return None if found == "default" else found

    def text_stage(self, description: Description) -> str:
        """The stage that max_tokens, temperature and so on apply to. Raises `HttpError` if no stage produces text."""
        stage = description.outputs.get("text")
        if stage is None:
            raise HttpError(400, "This pipeline produces no text.", param="modalities", code="unknown_modality")
        return stage

    def stage_params(
        self,
        model: str | None,
        given: Mapping[str, StageParams],
        description: Description,
        text_fields: Mapping[str, Any],
    ) -> dict[str, StageParams]:
        """Parameters by stage: `text_fields` and the adapter that `model` may be for the text stage, then `given`."""
        stages = {status.stage for status in description.stages}
        if model in description.adapters:
            text_fields = {**text_fields, "adapter": model}
        params = {self.text_stage(description): StageParams(**text_fields)} if text_fields else {}
        for stage, fields in given.items():
            if stage not in stages:
                known = ", ".join(sorted(stages))
                raise bad_field("stage_params", f"There is no stage {stage[:64]!r}; the stages are {known}.")
            if fields.max_tokens == 0 and stage != self.text_stage(description):
                param = f"stage_params.{stage}.max_tokens"
                raise bad_field(param, f"{param} must be at least 1: {stage} makes no text.")
            params[stage] = fields.merged_over(params.get(stage, StageParams()))
        return params


def _note(asking: asyncio.Task[Description]) -> None:
    """Read how a question ended that perhaps no request waits for; asyncio reports errors that nothing has read."""
    if not asking.cancelled() and (error := asking.exception()) is not None:
        logger.debug("no description: %s", error)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with JSON, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def readiness(state: ServerState) -> tuple[Description | None, list[str]]:
    """The description and the replicas that are not ready; (`None`, [reason]) if the coordinator does not answer."""
    try:
        description = await state.describe()
    except OmniError as error:
        return None, [error.message]
    return description, [
        f"{status.stage}/{status.replica} ({status.state})"
        for status in description.stages
        if status.state != "ready" and not status.leaving and not (status.joining and status.state != "dead")
    ]
