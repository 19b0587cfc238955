"""The routes /v1/live/sessions: sessions of the Live API, further connections to them, and forks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_actors.errors import OmniError
from omni_actors.host.processes import at_most
from omni_actors.http_server.bodies import JsonBody, Strict
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime import calls, config
from omni_actors.http_server.realtime.config import Event
from omni_actors.http_server.realtime.connection import (
    SessionConnection,
    WebSocketLine,
    begun,
    close,
    new_session,
    read_events,
    together,
)
from omni_actors.http_server.realtime.conversation import AnyItem
from omni_actors.http_server.realtime.formats import WireFormat, wire_format
from omni_actors.http_server.realtime.live import CLOSE_REQUESTED, LiveSession, live_error, realtime_fields, with_update
from omni_actors.http_server.realtime.live_events import (
    ForkFields,
    LiveAudio,
    LiveEvent,
    LiveFields,
    LiveOutput,
    ResponsesDelegation,
    SidebandEvent,
    StartFork,
    StartLive,
    StoredLive,
)
from omni_actors.http_server.realtime.playing import Loudspeaker
from omni_actors.http_server.realtime.requests import Outbox
from omni_actors.http_server.realtime.resuming import owner_of
from omni_actors.http_server.realtime.session import RealtimeSession
from omni_actors.http_server.state import ServerState, json_response

PATH = "/v1/live/sessions"
SESSION = f"{PATH}/{{session_id}}"
MAX_ATTACHED = 4  # connections to a session, besides its own
CLOSE_SECONDS = 2.0  # for the end of a session that is hung up


# ---------------------------------------------------------------------------------------------------------------------
# Sessions

Made = tuple[RealtimeSession, LiveSession]


async def made(
    start: StartLive, items: Sequence[AnyItem], state: ServerState, speaker: Loudspeaker | None = None
) -> Made:
    """A session that has not begun, whose conversation has these items. Raises `HttpError` or `OmniError`.

    Args:
        speaker: that of a call; `None` for a WebSocket.
    """
    fields, description = start.session, await state.describe()
    audio, delegation = fields.audio or LiveAudio(), fields.delegation
    if isinstance(delegation, ResponsesDelegation):
        state.model_name(delegation.responses.model, description)
    spoken = {"input": {"transcription": {}}, "output": msgspec.to_builtins(audio.output or LiveOutput())}
    asked = {"model": fields.model, "audio": spoken, **realtime_fields(fields, description.calls_tools)}
    settings, pipeline = begun(asked, state, description, called=True)
    if settings.turn_detection is None or settings.output != "audio":
        message = "A Live session needs a pipeline that speaks, and omni_actors[realtime] to find turns."
        raise bad_field("session.model", message, "unsupported_value")
    if speaker is not None and audio.format is not None:
        raise bad_field("session.audio.format", "A call has its own format: leave it out.", "unsupported_value")
    wire = wire_format(audio.format, WireFormat(), "session.audio.format")
    settings = msgspec.structs.replace(settings, input_format=wire, output_format=wire)
    session = new_session(settings, pipeline, state)
    session.restore(items)
    return session, LiveSession(start, wire, description.calls_tools, speaker)


def history(fields: LiveFields) -> list[AnyItem]:
    """The items of what was said before a session."""
    return [given.item() for given in fields.input or ()]


def forked(stored: StoredLive, given: ForkFields, called: bool) -> LiveFields:
    """What a fork is asked for. Raises `HttpError`."""
    fields, audio = with_update(stored.fields, given.delegation), stored.fields.audio or LiveAudio()
    wire = given.audio.format if given.audio is not None else audio.format
    audio = msgspec.structs.replace(audio, format=None if called and given.audio is None else wire)
    store = fields.store if given.store is None else given.store
    return msgspec.structs.replace(fields, audio=audio, store=store)


async def stored(session_id: str, connection: HTTPConnection, state: ServerState) -> StoredLive:
    """What is stored of the client's session. Raises `HttpError` 404."""
    owner = owner_of(connection, state)
    found: SessionConnection | None = state.live.get(session_id)
    data = b""
    if found is not None and found.owner == owner:
        data = found.stored or b""
    elif await asyncio.to_thread(state.live_sessions.find, session_id) == owner:
        data = await asyncio.to_thread(state.live_sessions.data, session_id)
    if data:
        return msgspec.msgpack.decode(data, type=StoredLive)
    message = f"No session {session_id[:100]!r} of yours is stored: it began without store, or was too long ago."
    raise HttpError(404, message, param="session_id", code="session_not_found")


def running(session_id: str, connection: HTTPConnection, state: ServerState) -> SessionConnection:
    """The connection of a session of the client's. Raises `HttpError` 404."""
    found: SessionConnection | None = state.live.get(session_id)
    over = found is not None and found.live is not None and found.live.closed.is_set()
    if found is None or over or found.owner != owner_of(connection, state):
        message = f"You have no session {session_id[:100]!r} here: it has ended, or another process has it."
        raise HttpError(404, message, param="session_id", code="session_not_found")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# WebSockets


async def live(websocket: WebSocket, state: ServerState) -> None:
    """Converse, with the events of OpenAI's Live API. A refusal before them is a plain HTTP response."""

    async def begin(data: bytes) -> Made:
        start = config.parse(data, LiveEvent)
        if not isinstance(start, StartLive):
            raise bad_field("type", "The first event is session.start.", "session_not_started")
        return await made(start, history(start.session), state)

    await _converse(websocket, state, begin)


async def fork(websocket: WebSocket, state: ServerState, session_id: str) -> None:
    """Go on from where a stored session is, in a session of its own."""
    found = await stored(session_id, websocket, state)

    async def begin(data: bytes) -> Made:
        start = config.parse(data, StartFork)
        fields = forked(found, start.session, called=False)
        return await made(StartLive(event_id=start.event_id, session=fields), found.items, state)

    await _converse(websocket, state, begin)


async def _converse(websocket: WebSocket, state: ServerState, begin: Callable[[bytes], Awaitable[Made]]) -> None:
    """Run the session that `begin` makes of the first event."""
    line = WebSocketLine(websocket)
    with state.realtime.session(state.tenant(websocket), line), contextlib.suppress(WebSocketDisconnect):
        await state.realtime.load()
        await line.accept()
        data = b""
        try:
            async with asyncio.timeout(state.settings.realtime_idle_seconds):
                data = await line.receive()
            session, line.live = await begin(data)
        except (HttpError, OmniError, TimeoutError) as error:
            idle = HttpError(408, "No session.start came in time.", code="session_idle")
            refusal = idle if isinstance(error, TimeoutError) else HttpError.of(error)
            await line.send(msgspec.json.encode(_shown(refusal, data)).decode())
            await line.close(refusal.code or "")
        else:
            await SessionConnection(line, websocket, state, session).run()


def _shown(error: HttpError, data: bytes) -> Event:
    return live_error(config.error_event(error, config.event_id_of(data))["error"])


class AttachQuery(Strict, frozen=True):
    """The query of a further connection to a session."""

    graceful_close: str | None = None  # without effect


async def attach(websocket: WebSocket, state: ServerState, query: AttachQuery, session_id: str) -> None:
    """Watch a session that runs over another connection, and tell it what to do."""
    connection = running(session_id, websocket, state)
    session = connection.live
    if session is None or len(session.listeners) == MAX_ATTACHED:
        raise HttpError(429, f"{MAX_ATTACHED} connections are attached to this session.", code="overloaded")
    line = WebSocketLine(websocket)
    outbox = Outbox(line.send, state.settings.write_timeout, None)
    session.listeners.add(outbox)
    try:
        await line.accept()
        works = (_command(line, connection, outbox, state), outbox.write(), _close(session, outbox, line))
        about = {"request_id": websocket.state.request_id}
        await together(asyncio.TaskGroup(), works, "a connection to a Live session", about)
    finally:
        session.listeners.discard(outbox)


async def _command(line: WebSocketLine, connection: SessionConnection, outbox: Outbox, state: ServerState) -> None:
    async def take(data: bytes) -> None:
        try:
            config.parse(data, SidebandEvent)
        except HttpError as error:
            outbox.append(_shown(error, data))
        else:
            await connection.take(data)

    await read_events(line.receive, take, lambda: True, state.settings, state.settings.realtime_idle_seconds, math.inf)


async def _close(session: LiveSession, outbox: Outbox, line: WebSocketLine) -> None:
    await session.closed.wait()
    await close(line, outbox)


# ---------------------------------------------------------------------------------------------------------------------
# Calls, and the end of a session


class SdpOffer(Strict, frozen=True, kw_only=True):
    """What a client offers to connect by."""

    type: Literal["webrtc"]
    sdp: Annotated[str, Meta(max_length=calls.MAX_SDP)]


class CreateLive(Strict, frozen=True, kw_only=True):
    """Body of POST /v1/live/sessions."""

    session: LiveFields
    transport: SdpOffer


class ForkLive(Strict, frozen=True, kw_only=True):
    """Body of POST /v1/live/sessions/ID/fork."""

    transport: SdpOffer
    session: ForkFields | None = None


BODY = JsonBody(CreateLive, {})
FORK_BODY = JsonBody(ForkLive, {})


async def create(request: Request, state: ServerState, body: CreateLive) -> Response:
    """Begin a session over WebRTC."""
    return await _call(request, state, body.transport, body.session, history(body.session))


async def fork_call(request: Request, state: ServerState, body: ForkLive, session_id: str) -> Response:
    """Go on from where a stored session is, over WebRTC."""
    found = await stored(session_id, request, state)
    fields = forked(found, body.session or ForkFields(), called=True)
    return await _call(request, state, body.transport, fields, found.items)


async def _call(
    request: Request, state: ServerState, offer: SdpOffer, fields: LiveFields, items: Sequence[AnyItem]
) -> Response:
    call = await calls.new_call()
    session, call.live = await made(StartLive(session=fields), items, state, call.speaker)
    sdp = await calls.begin(call, offer.sdp, request, state, session)
    answer = {"session": {"id": session.id}, "transport": {"type": "webrtc", "sdp": sdp}}
    return json_response(answer, 201, {"location": f"{PATH}/{session.id}"})


async def hang_up(request: Request, state: ServerState, session_id: str) -> Response:
    """End a session."""
    connection = running(session_id, request, state)
    connection.end(HttpError(400, "The session was hung up.", code=CLOSE_REQUESTED))
    if connection.live is not None:
        await at_most(CLOSE_SECONDS, connection.live.closed.wait())
    return Response()
