"""Runs a session over what carries it; the route /v1/realtime, where that is a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_actors.client import Audio, Text
from omni_actors.errors import OmniError
from omni_actors.host.processes import at_most, end_tasks
from omni_actors.http_server.answer import finish_reason, token_counts, usage_of
from omni_actors.http_server.bodies import BODIES, SHORT, Strict, take_bytes
from omni_actors.http_server.connections import EventRate
from omni_actors.http_server.encoders import Tempo, pcm16
from omni_actors.http_server.errors import HttpError, bad_field, internal_error
from omni_actors.http_server.generation import Turn
from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.client_secrets import (
    PREFIX,
    ExpiresAfter,
    Secret,
    SecretRequest,
    key_of,
    opened,
    sealed,
)
from omni_actors.http_server.realtime.config import Event, Pipeline, ServerVad, SessionConfig, error_event, new_id
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND, RATE
from omni_actors.http_server.realtime.live_events import AppendInput, LiveEvent, StoredLive
from omni_actors.http_server.realtime.playing import Loudspeaker
from omni_actors.http_server.realtime.requests import ANSWER_BYTES, Asker, Outbox, Transcriber
from omni_actors.http_server.realtime.resuming import SessionKeeper, find, owner_of
from omni_actors.http_server.realtime.session import Ask, Cancel, Instructions, RealtimeSession, Silence, Transcribe
from omni_actors.http_server.realtime.turns import SpeechWindow, VoiceActivity
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.logs import get_logger, trace_of
from omni_actors.protocol.messages import Description
from omni_actors.telemetry.metrics import (
    REALTIME_FIRST_AUDIO,
    REALTIME_INTERRUPTIONS,
    REALTIME_LAG,
    REALTIME_RESPONSES,
    REALTIME_SMOOTH_START,
)
from omni_actors.telemetry.request_log import Playback

if TYPE_CHECKING:
    from omni_actors.http_server.realtime.live import LiveSession
    from omni_actors.http_server.realtime.webrtc import Call

logger = get_logger(__name__)
T = TypeVar("T")
Work = Coroutine[Any, Any, None]

EVENT_BYTES = 4 << 20  # that may wait before no more events of the client are taken
SUBPROTOCOL = "realtime"  # that browsers ask for, besides the one that holds the key
NORMAL, GOING_AWAY = 1000, 1001  # codes that close a WebSocket
LEFT = (1000, 1005)  # codes of clients that have closed it: without an error, or without a code
ABNORMAL = 1006
EARLY_SECONDS = 1.0  # that an answer is kept whose turn may not be over
TURNS_IN_LINE = 16  # of a model that writes them down one after the other
INTERRUPTIONS = ("turn_detected", "client_cancelled")


class WebSocketLine:
    """A WebSocket as what carries a session: events alone. Raises `WebSocketDisconnect` when its client has left."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.live: LiveSession | None = None

    @property
    def speaker(self) -> Loudspeaker | None:
        """What plays answers in time, if anything does."""
        return self.live.speaker if self.live is not None else None

    async def accept(self) -> None:
        """Answer the handshake."""
        await self._websocket.accept(SUBPROTOCOL if SUBPROTOCOL in self._websocket.scope["subprotocols"] else None)

    async def receive(self) -> bytes:
        """The next event."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            # uvicorn names no reason where no close frame came, and then the code of one without a code.
            raise WebSocketDisconnect(message["code"] if "reason" in message else ABNORMAL)
        text = message.get("text")
        data: bytes = text.encode(errors="surrogatepass") if text is not None else message["bytes"]
        return data

    async def send(self, text: str) -> None:
        """Send an event."""
        await self._websocket.send_text(text)

    async def close(self, code: str) -> None:
        """Close the WebSocket; `code` says what went wrong, if anything did."""
        await self._websocket.close(GOING_AWAY if code and self.live is None else NORMAL, code)


async def read_events(
    receive: Callable[[], Awaitable[T]],
    take: Callable[[T], Awaitable[None]],
    busy: Callable[[], bool],
    settings: ServerSettings,
    idle: float,
    expires: float,
) -> HttpError:
    """Pass a client's events on, at the pace that it may have, until the session is over; returns why.

    Args:
        busy: whether the session does something, so that a client without an event is not idle.
        idle: seconds without an event.
        expires: when the session is over (monotonic clock).
    """
    pace = EventRate(settings.realtime_events_per_second, time.monotonic())
    while True:
        try:
            async with asyncio.timeout(min(idle, expires - time.monotonic())):
                given = await receive()
        except TimeoutError:
            if time.monotonic() >= expires:
                message = f"A session lasts {settings.realtime_session_seconds:g} s."
                return HttpError(408, message, code="session_expired")
            if busy():
                continue
            return HttpError(408, f"No event for {idle:g} s.", code="session_idle")
        await take(given)
        await asyncio.sleep(pace.wait(time.monotonic()))


async def together(tasks: asyncio.TaskGroup, works: Iterable[Work], what: str, about: Mapping[str, str]) -> None:
    """Run what a session consists of until one of it fails, as does what closes the session; logs a fault."""
    try:
        async with tasks:
            for work in works:
                tasks.create_task(work, name=what)
    except* TimeoutError:
        logger.warning("the client of %s does not read; it ends", what, extra=about)
    except* (WebSocketDisconnect, OSError):
        logger.debug("%s has ended", what, extra=about)
    except* Exception as group:  # noqa: BLE001 - of whatever kind, it is a fault of this session alone
        logger.error("%s failed: %s", what, trace_of(group.exceptions[0]), extra=about)


async def close(line: WebSocketLine | Call, outbox: Outbox, last: Event | None = None, code: str = "") -> NoReturn:
    """Close what carries a session once its client has the last event. Raises `WebSocketDisconnect`."""
    if last is not None:
        outbox.put(last)
    await outbox.room(0)
    await line.close(code)
    raise WebSocketDisconnect


class SessionConnection:
    """Runs one session until the client leaves, a limit is reached, or the server stops.

    Args:
        line: what carries the session, and holds its bytes of the budget.
        request: with which it began, of the client whose share of the slots its requests use.
    """

    def __init__(
        self, line: WebSocketLine | Call, request: HTTPConnection, state: ServerState, session: RealtimeSession
    ) -> None:
        self._line = line
        self.owner = owner_of(request, state)
        self._about = {"request_id": request.state.request_id}
        self._state = state
        self._session = session
        self._bodies = state.realtime.bodies
        self._asker = Asker(state, state.tenant(request), request.state.traceparent)
        self._keeper: SessionKeeper | None = None
        if line.speaker is None:  # a call cannot go on over a WebSocket
            self._keeper = SessionKeeper(session, self.owner, state.sessions)
        self.live = line.live
        told = self.live.told if self.live is not None else None
        self._outbox = Outbox(line.send, state.settings.write_timeout, self._keeper, told)
        if line.speaker is not None:
            line.speaker.tell = self._outbox.put
        self._transcriber = Transcriber(session, self._outbox, self._asker)
        self._activity: VoiceActivity | None = None
        self._heard = 0  # position up to which it was given the sound
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._early: dict[str, asyncio.Event] = {}  # of answers whose turn may not be over: set when it is
        self._sounds: dict[str, bytearray] = {}  # PCM of answers that are made, whose words are then looked for in it
        self._aligning: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[HttpError] = asyncio.get_running_loop().create_future()
        self._left = False  # nobody goes on with the session

    async def run(self) -> None:
        """Run the session to its end; at the end none of its requests is left."""
        if self.live is not None:
            self.live.begin(self._outbox, lambda event: self._carry_out(self._session.receive(event)), self.end)
            self._state.live[self._session.id] = self
        self._carry_out(self._session.opened())
        self._account()
        works = [self._read(), self._outbox.write(), self._transcriber.run(), self._close()]
        if self._keeper is not None:
            works.append(self._keep(self._keeper))
        if self.live is not None and isinstance(self._line, WebSocketLine):
            works.append(self.live.play())
        try:
            await together(asyncio.TaskGroup(), works, "a realtime session", self._about)
        finally:
            self._state.live.pop(self._session.id, None)
            if self._activity is not None:
                self._state.realtime.forget(self._activity)
            with contextlib.suppress(asyncio.CancelledError):
                await end_tasks(*self._answers.values(), *self._aligning)
            if self.live is not None and not self.live.closed.is_set():
                await self._store()
                self.live.close("connection_lost")
            if self._keeper is not None:
                await self._keeper.close(ended=self._left)

    async def _keep(self, keeper: SessionKeeper) -> None:
        await keeper.run()
        self.end(HttpError(408, "The session goes on over another connection.", code="session_resumed"), left=False)

    def end(self, why: HttpError, left: bool = True) -> None:
        """End the session; nobody goes on with one that its client has `left`."""
        if not self._over.done():
            self._over.set_result(why)
            self._left = left

    @property
    def stored(self) -> bytes | None:
        """What a fork of a Live session begins with, a `StoredLive`; `None` if it is not to be stored."""
        if self.live is None or not self.live.fields.store:
            return None
        return msgspec.msgpack.encode(StoredLive(self.live.fields, self._session.kept(self.owner).items))

    async def _store(self) -> None:
        if (stored := self.stored) is not None:
            add = self._state.live_sessions.add
            await asyncio.to_thread(add, self._session.id, self.owner, len(stored), stored)

    # -- events of the client -----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        BODIES.set((self._bodies, self))  # for what is fetched
        settings, session = self._state.settings, self._session
        idle, expires = settings.realtime_idle_seconds, time.monotonic() + session.expires - time.time()
        try:
            receive, busy = self._line.receive, lambda: session.answering
            self.end(await read_events(receive, self.take, busy, settings, idle, expires))
        except WebSocketDisconnect as error:
            self._left = self._left or (error.code in LEFT and not self._over.done())
            raise

    async def take(self, given: bytes | config.AppendAudio) -> None:
        """Let the session take an event, if it can be decoded and there is room for it."""
        if self._over.done():
            return
        data = given.audio if isinstance(given, config.AppendAudio) else given
        try:
            take_bytes(self._bodies, self, len(data))
            event: Any = given
            if isinstance(given, config.AppendAudio):  # from a microphone
                event = given if self.live is None else AppendInput(audio=given.audio)
            else:
                kind = config.AnyEvent if self.live is None else LiveEvent
                short = len(data) <= SHORT
                event = config.parse(data, kind) if short else await asyncio.to_thread(config.parse, data, kind)
                if isinstance(event, AppendInput) and not isinstance(self._line, WebSocketLine):
                    raise bad_field("type", "The sound of a call comes on its track.", "unsupported_value")
            if self.live is not None:
                event = self.live.meant(event)
            if event is not None:
                await self._receive(event)
        except (HttpError, OmniError) as error:
            self._outbox.put(error_event(HttpError.of(error), config.event_id_of(data)))
        finally:
            self._bodies.release(self)
            self._account()
        await self._outbox.room(EVENT_BYTES)

    async def _receive(self, event: config.AnyEvent) -> None:
        pictures = await self._read_pictures(config.pictures_of(event))
        if self._activity is not None and not isinstance(event, config.AppendAudio):
            await self._activity.caught_up.wait()  # what came before the event counts before it
        before = self._session.position
        self._carry_out(self._session.receive(event, pictures))
        if isinstance(event, config.AppendAudio) and self._session.position > before:
            await self._listen(self._session.sound_from(before), before)

    def _account(self) -> None:
        played = self._line.speaker.size if self._line.speaker is not None else 0
        self._bodies.release(self._line)
        sounds = sum(map(len, self._sounds.values()))
        self._bodies.take(self._line, self._session.held + played + sounds)

    async def _read_pictures(self, given: Sequence[config.ShownPicture]) -> Sequence[bytes]:
        """The files of pictures, fetched and checked as those of a chat. Raises `HttpError` or `OmniError`."""
        if not given:
            return ()
        description = await self._state.facts()
        (message,) = await self._state.media.messages({"image_url": Turn("user", given)}, description.max_media)
        return [part["image"] for part in message["content"]]

    async def _listen(self, pcm: bytes, position: int) -> None:
        """Have turns looked for in sound; wait if more than a second of it is not looked at yet."""
        realtime = self._state.realtime
        if not self._session.detecting:
            self._activity = None
            return
        if self._activity is None or self._heard != position:
            self._activity = VoiceActivity(position, self._on_windows)
        self._heard = position + len(pcm) // 2
        if realtime.listen(self._activity, pcm) > BYTES_PER_SECOND:
            await self._activity.caught_up.wait()

    def _on_windows(self, windows: Sequence[SpeechWindow], late: float) -> None:
        """Take what was found in sound, and how late that is."""
        self._carry_out(self._session.detect(windows))
        self._transcriber.listen()
        self._account()
        self._state.realtime.meters.histogram(REALTIME_LAG).observe(late)

    async def _close(self) -> None:
        """Say why the session is over, once it is, and end it."""
        why = await self._over
        await self._store()
        await close(self._line, self._outbox, error_event(why), why.code or "")

    # -- instructions -------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: Instructions) -> None:
        for instruction in instructions:
            match instruction:
                case dict() as event:
                    if self._line.speaker is None or not self._line.speaker.take(event):
                        self._outbox.put(event)
                    if event["type"] == "response.done":
                        self._count(response := event["response"])
                        if (pcm := self._sounds.pop(response["id"], None)) is not None:
                            self._aligning.add(task := asyncio.create_task(self._find_words(response, pcm)))
                            task.add_done_callback(self._aligning.discard)
                case Cancel(response_id):
                    if response_id in self._answers:
                        self._answers[response_id].cancel()
                case Silence():
                    for response_id, item_id, played in self._line.speaker.silence() if self._line.speaker else ():
                        self._outbox.put(config.event("output_audio_buffer.cleared", response_id=response_id))
                        self._carry_out(self._session.cut(item_id, played))
                case Transcribe():
                    self._transcriber.add(instruction)
                case Ask():
                    self._ask(instruction)

    def _ask(self, ask: Ask) -> None:
        """Begin an answer, or take one that was begun early, unless that has failed."""
        response_id, begun = ask.response_id, self._early.pop(ask.response_id, None)
        if begun is not None and not self._answers[response_id].done():
            begun.set()
            return
        wanted = asyncio.Event()
        if ask.early:
            self._early[response_id] = wanted
            self._transcriber.pause(ask.messages[-1]["content"][0])
        else:
            wanted.set()
        answer = self._answers[response_id] = asyncio.create_task(self._relay(ask, wanted))
        answer.add_done_callback(partial(self._answered, response_id, wanted))

    def _count(self, response: Mapping[str, Any]) -> None:
        meters = self._state.realtime.meters
        meters.count(REALTIME_RESPONSES, response["status"])
        reason = (response["status_details"] or {}).get("reason")
        if reason in INTERRUPTIONS:
            meters.count(REALTIME_INTERRUPTIONS, reason)

    async def _find_words(self, response: Mapping[str, Any], pcm: bytearray) -> None:
        """Find out when the words of an answer that has ended are said."""
        spoken = [item for item in response["output"] if item["type"] == "message"]
        whole = response["status"] in ("completed", "incomplete")
        if not pcm or not spoken:
            return
        item_id, text = spoken[0]["id"], spoken[0]["content"][0]["transcript"]
        pace = None if whole else self._session.pace or len(text) * BYTES_PER_SECOND / len(pcm)
        if words := await self._asker.word_times(text, bytes(pcm), pace):
            self._session.timed(item_id, text, words)
            if self._keeper is not None:
                self._keeper.note(config.event("conversation.item.truncated", item_id=item_id))
            if self._line.speaker is not None and whole:
                self._line.speaker.timed(item_id, words)

    def _answered(self, response_id: str, wanted: asyncio.Event, answer: asyncio.Task[None]) -> None:
        """Forget an answer. That it has failed is told, unless it is not wanted yet: then it is asked for again."""
        if self._answers.get(response_id) is answer:
            del self._answers[response_id]
            self._early.pop(response_id, None)
        error = None if answer.cancelled() else answer.exception()
        if error is not None and not isinstance(error, HttpError | OmniError):
            logger.error("a response failed: %s", trace_of(error), extra={"request_id": response_id})
            self._carry_out(self._session.failed(response_id, internal_error()))
        elif error is not None and wanted.is_set():
            self._carry_out(self._session.failed(response_id, HttpError.of(error)))

    async def _relay(self, ask: Ask, wanted: asyncio.Event) -> None:
        """Relay one answer, once it is wanted. When this task is cancelled, the request ends in all stages."""
        speech_ended, playback, meters = time.monotonic() - ask.silence, Playback(), self._state.realtime.meters
        description = await self._state.facts()
        speed = ask.config.speed
        async with await self._asker.answer(ask, description) as stream:
            await at_most(EARLY_SECONDS, wanted.wait())
            if not wanted.is_set():  # the client sends no more sound: the turn does not end
                return
            if self._state.ears is not None and ask.config.output == "audio":
                self._sounds[ask.response_id] = bytearray()
            async for item in stream if speed == 1 else (await asyncio.to_thread(Tempo, speed)).over(stream):
                if isinstance(item, Text):
                    self._carry_out(self._session.text(ask.response_id, item.text, item.tool_calls))
                elif isinstance(item, Audio):
                    if not playback.first:
                        meters.histogram(REALTIME_FIRST_AUDIO).observe(time.monotonic() - speech_ended)
                    playback.add(time.monotonic(), len(item.samples) / RATE)
                    pcm = pcm16(item.samples)
                    if (kept := self._sounds.get(ask.response_id)) is not None:
                        kept += pcm
                    self._carry_out(self._session.sound(ask.response_id, pcm))
                await self._outbox.room(ANSWER_BYTES)
                if self._line.speaker is not None:
                    await self._line.speaker.room()
        found = usage_of([stream.usage], description)
        details = {"output_token_details": found["completion_tokens_details"], "stages": found["stages"]}
        cut = finish_reason(stream.usage, description) == "length"
        self._carry_out(self._session.answered(ask.response_id, {**token_counts(found), **details}, cut))
        if playback.first:
            meters.histogram(REALTIME_SMOOTH_START).observe(playback.smooth_start - speech_ended)


class CallQuery(Strict, frozen=True):
    """The query of a call."""

    model: str | None = None
    intent: str | None = None


class SessionQuery(CallQuery, frozen=True):
    """The query of a WebSocket; `session` is one whose connection was lost."""

    session: str | None = None


async def realtime(websocket: WebSocket, state: ServerState, query: SessionQuery) -> None:
    """Converse, with OpenAI's realtime events. A refusal is a plain HTTP response.

    With `session` in the query, go on with a session whose connection was lost.
    """
    asked = asked_by(websocket, query, state.settings.api_key)
    session = new_session(*begun(asked, state, await state.describe()), state)
    if query.session is not None:
        kept = await find(query.session, owner_of(websocket, state), state.sessions)
        for name, has in (("model", kept.config.model), ("type", kept.config.kind)):
            if asked.get(name) not in (None, has):
                raise bad_field(name, f"The {name} of a session stays what it was at its start: {has}.")
        session.go_on(query.session, kept)
    line = WebSocketLine(websocket)
    with state.realtime.session(state.tenant(websocket), line):
        await state.realtime.load()
        await line.accept()
        await SessionConnection(line, websocket, state, session).run()


async def create_secret(request: Request, state: ServerState, body: SecretRequest) -> Response:
    """Make a key with which a browser or a phone can begin realtime sessions for a while."""
    asked = body.session or {}
    config, _ = begun(asked, state, await state.describe())
    now = int(time.time())
    expires = now + (body.expires_after or ExpiresAfter()).seconds
    value = sealed(Secret(expires, asked), state.settings.api_key)
    session = config.shown(new_id("sess"), now + int(state.settings.realtime_session_seconds))
    return json_response({"value": value, "expires_at": expires, "session": session})


def asked_by(connection: HTTPConnection, query: CallQuery, api_key: str | None) -> dict[str, Any]:
    """The `session` that a client asks for when it connects. Raises `HttpError` 401 for a wrong secret."""
    asked: dict[str, Any] = {"model": query.model}
    if query.intent == "transcription":
        asked["type"] = "transcription"
    if (given := key_of(connection.headers)).startswith(PREFIX):
        secret = opened(given, api_key)
        if secret is None:
            raise HttpError(401, "The client secret is wrong or has expired.", code="invalid_api_key")
        asked |= secret.session
    return asked


def begun(
    asked: dict[str, Any], state: ServerState, description: Description, called: bool = False
) -> tuple[SessionConfig, Pipeline]:
    """How a session begins. Raises `HttpError` for the first thing that it cannot have."""
    settings = state.settings
    pipeline = Pipeline(
        voices=description.voices,
        voice_aliases=state.voice_aliases(description.voices),
        stages=tuple(dict.fromkeys(status.stage for status in description.stages)),
        speaks="audio" in description.modalities and description.sample_rate == RATE,
        max_audios=TURNS_IN_LINE if description.hearing is not None else description.max_media.get("audio"),
        max_images=min(settings.media_parts, description.max_media.get("image", settings.media_parts)),
        audio_seconds=settings.audio_seconds,
        detects=state.realtime.detects,
        called=called,
    )
    model = asked.get("model")
    config = SessionConfig(
        model=state.model_name(model if isinstance(model, str) else None, description),
        output="audio" if pipeline.speaks else "text",
        turn_detection=ServerVad() if state.realtime.detects else None,
    )
    config, refused = config.updated(asked, pipeline)
    for error in refused:
        raise error
    return config, pipeline


def new_session(config: SessionConfig, pipeline: Pipeline, state: ServerState) -> RealtimeSession:
    """A session that has not begun."""
    return RealtimeSession(config, pipeline, int(time.time() + state.settings.realtime_session_seconds))
