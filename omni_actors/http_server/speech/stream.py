"""WebSockets that take texts while they are written and give their sound, in any dialect.

That of the route /v1/audio/speech/stream has events named as those of OpenAI's realtime sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, assert_never

import msgspec
from msgspec import Meta
from starlette.websockets import WebSocket

from omni_actors.client import StreamItem
from omni_actors.errors import OmniError
from omni_actors.http_server.bodies import MAX_VALUES, check_bounds, decode, take_bytes
from omni_actors.http_server.encoders import Encoder, made_encoder
from omni_actors.http_server.errors import HttpError, too_large
from omni_actors.http_server.realtime.config import ClientEvent, Event, UpdateSession, error_event, event, event_id_of
from omni_actors.http_server.realtime.connection import EVENT_BYTES, WebSocketLine, close, read_events, together
from omni_actors.http_server.realtime.requests import ANSWER_BYTES, Outbox
from omni_actors.http_server.speech.recital import (
    FIELDS,
    Manner,
    Recital,
    TextPiece,
    TextSpeaker,
    Utterance,
    request_ids,
    speakable,
    times_of,
)
from omni_actors.http_server.speech.texts import MAX_TEXT
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.payloads import WordTime

MAX_EVENT_BYTES = 1 << 20
CHARACTER_BYTES = 4  # at most, of a text in memory
TOO_LONG = f"At most {MAX_TEXT} characters may wait to be spoken: send more when sound has come."


class Dialect(Protocol):
    """What a client and the server call what they send."""

    idle: float  # seconds without an event and without sound that end the session

    async def take(self, data: bytes, session: SpeechSession) -> None:
        """Do what an event of the client asks for. Raises `HttpError`."""

    def sound(self, utterance: Utterance, data: bytes) -> Event:
        """Some sound of an utterance."""

    def spoken(self, utterance: Utterance, text: str, seconds: float, words: Sequence[WordTime]) -> Event | None:
        """The sound of a piece is complete; `words` is empty if nobody knows when they are said."""

    def ended(self, utterance: Utterance) -> Event:
        """Nothing more of an utterance comes."""

    def error(self, error: HttpError, data: bytes = b"", utterance: Utterance | None = None) -> Event:
        """An event of the client is refused, the rest of an utterance cannot be spoken, or the session is over."""


class Narrator:
    """Speaks the utterances of a client, one after the other, and sends what comes of them."""

    def __init__(self, outbox: Outbox, dialect: Dialect) -> None:
        self.recital = Recital(grows=True)
        self._outbox = outbox
        self._dialect = dialect

    async def append(self, utterance: Utterance, text: str) -> None:
        """Add to the text of an utterance. Raises `HttpError` 413 if too much of it would wait."""
        cutter = utterance.cutter
        if self.recital.waiting + len(cutter.rest) + len(text) > MAX_TEXT:
            raise too_large(TOO_LONG, "text", "body_too_large")
        for sentence in cutter.append(text):
            await self._say(utterance, sentence, whole=True)
        if utterance.speaker.in_parts:
            await self._say(utterance, cutter.rest, whole=False)

    async def flush(self, utterance: Utterance, last: bool) -> None:
        """End the sentence that is being written, and with `last` the utterance."""
        for rest in utterance.cutter.flush():
            await self._say(utterance, rest, whole=True)
        if last:
            self.recital.add(TextPiece(utterance, "", last=True))

    async def _say(self, utterance: Utterance, text: str, whole: bool) -> None:
        text = speakable(text)
        if utterance.growing is not None:
            await self.recital.grow(utterance.growing, text, whole)
        elif text and not utterance.over:
            utterance.growing = TextPiece(utterance, text, whole=whole)
            self.recital.add(utterance.growing)
        if whole or utterance.over:
            utterance.growing = None

    async def run(self) -> None:
        """Send sound until the recital ends. When this is cancelled, its requests end in all stages."""
        try:
            while True:
                try:
                    item = (await anext(self.recital)).item
                    await self._pass_on(self.recital.piece, item)
                except StopAsyncIteration:
                    return
                except (HttpError, OmniError) as error:
                    utterance = self.recital.piece.utterance
                    await self.recital.stop(utterance, "failed")
                    self._outbox.put(self._dialect.error(HttpError.of(error, FIELDS), utterance=utterance))
        finally:
            await self.recital.abort()

    async def _pass_on(self, piece: TextPiece, item: StreamItem | None) -> None:
        if item is None:
            await self._end(piece)
        elif not piece.utterance.over:
            self._send(piece.utterance, await piece.take(item))
        await self._outbox.room(ANSWER_BYTES)

    async def _end(self, piece: TextPiece) -> None:
        utterance = piece.utterance
        if piece.text and not utterance.over:
            words = await piece.complete()
            if (event := self._dialect.spoken(utterance, utterance.texts[-1], piece.seconds, words)) is not None:
                self._outbox.put(event)
        if piece.last:
            if not utterance.over:
                self._send(utterance, utterance.encoder.finish())
            self._outbox.put(self._dialect.ended(utterance))

    def _send(self, utterance: Utterance, data: bytes) -> None:
        if data:
            self._outbox.put(self._dialect.sound(utterance, data))


class SpeechSession:
    """Runs one session until the client leaves, a limit is reached, or all is spoken once `complete` is set."""

    def __init__(self, websocket: WebSocket, state: ServerState, dialect: Dialect) -> None:
        self._websocket = websocket
        self.state = state
        self._dialect = dialect
        self._line = WebSocketLine(websocket)
        self.outbox = Outbox(self._line.send, state.settings.write_timeout, None)
        self._tasks = asyncio.TaskGroup()
        self._narrators: dict[Narrator, asyncio.Task[None]] = {}
        # Is set when no more text comes: the WebSocket is closed once all narrators have ended.
        self.complete = asyncio.Event()

    async def run(self) -> None:
        """Take a place and run. Raises `HttpError` 429 if there is none; at the end none of its requests is left."""
        about = {"request_id": self._websocket.state.request_id}
        with self.state.realtime.session(self.state.tenant(self._websocket), self._line):
            await self._line.accept()
            works = (self._read(), self.outbox.write(), self._close())
            await together(self._tasks, works, "a session of speech", about)

    def narrator(self) -> Narrator:
        """One more that speaks at the same time as the others."""
        narrator = Narrator(self.outbox, self._dialect)
        task = self._narrators[narrator] = self._tasks.create_task(narrator.run(), name="narrator")
        task.add_done_callback(lambda _: self._narrators.pop(narrator))
        return narrator

    async def _close(self) -> None:
        await self.complete.wait()
        while self._narrators:
            await asyncio.wait(self._narrators.values())
        await close(self._line, self.outbox)

    async def _read(self) -> None:
        settings = self.state.settings
        expires = time.monotonic() + settings.realtime_session_seconds
        why = await read_events(self._line.receive, self._take, self._busy, settings, self._dialect.idle, expires)
        await close(self._line, self.outbox, self._dialect.error(why), why.code or "")

    def _busy(self) -> bool:
        return any(narrator.recital.busy for narrator in self._narrators)

    async def _take(self, data: bytes) -> None:
        bodies = self.state.realtime.bodies
        try:
            take_bytes(bodies, self, len(data))
            if len(data) > MAX_EVENT_BYTES:
                raise too_large(f"An event is limited to {MAX_EVENT_BYTES} bytes.", code="body_too_large")
            check_bounds(data, MAX_VALUES)
            await self._dialect.take(data, self)
        except (HttpError, OmniError) as error:
            self.outbox.put(self._dialect.error(HttpError.of(error, FIELDS), data))
        finally:
            bodies.release(self)
            bodies.release(self._line)
            bodies.take(self._line, CHARACTER_BYTES * sum(narrator.recital.waiting for narrator in self._narrators))
        await self.outbox.room(EVENT_BYTES)


# ---------------------------------------------------------------------------------------------------------------------
# The route /v1/audio/speech/stream

PATH = "/v1/audio/speech/stream"


class AppendText(ClientEvent, frozen=True, kw_only=True, tag="input_text.append"):
    """Add to the text."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class FlushText(ClientEvent, frozen=True, kw_only=True, tag="input_text.flush"):
    """Say that the text is complete. What follows is another one."""


class EndText(ClientEvent, frozen=True, kw_only=True, tag="input_text.end"):
    """The same, and end the session once all is spoken."""


class CancelText(ClientEvent, frozen=True, kw_only=True, tag="input_text.cancel"):
    """Speak nothing more of any text."""


AnyEvent = UpdateSession | AppendText | FlushText | EndText | CancelText


async def stream(websocket: WebSocket, state: ServerState) -> None:
    """Speak a text while it is written. A refusal is a plain HTTP response."""
    await SpeechSession(websocket, state, StreamEvents(websocket, state)).run()


class StreamEvents:
    """The events of the route: a `Dialect`."""

    def __init__(self, websocket: WebSocket, state: ServerState) -> None:
        self.idle = state.settings.realtime_idle_seconds
        self._websocket = websocket
        self._state = state
        self._ids = request_ids(websocket.state.request_id)
        self._given: dict[str, Any] = {"response_format": "pcm"}
        self._speaker: TextSpeaker | None = None  # until it is needed
        self._narrator: Narrator | None = None
        self._utterance: Utterance | None = None  # that is being written
        self._spoken: list[Utterance] = []  # that have not ended

    async def take(self, data: bytes, session: SpeechSession) -> None:
        """See `Dialect.take`."""
        found: AnyEvent = decode(data, AnyEvent)  # type: ignore[arg-type]  # a union is not a class
        complete = session.complete.is_set()
        if complete and not isinstance(found, CancelText):
            raise HttpError(400, "The text of this session has ended.", param="type", code="invalid_value")
        narrator = self._narrator = self._narrator or session.narrator()
        match found:
            case UpdateSession(session=fields):
                given = {**self._given, **fields}
                self._speaker = await self._speaker_of(given)
                self._given = given
                session.outbox.put(event("session.updated", session=given))
            case AppendText(text=text):
                await narrator.append(await self._written(), text)
            case FlushText() | EndText():
                await self._flush(narrator)
            case CancelText():
                if self._utterance is None and not complete:
                    await self._written()
                for utterance in self._spoken:
                    await narrator.recital.stop(utterance, "cancelled")
                if not complete:
                    await self._flush(narrator)
            case _:
                assert_never(found)
        if isinstance(found, EndText):
            narrator.recital.end()
            session.complete.set()

    async def _speaker_of(self, given: dict[str, Any]) -> TextSpeaker:
        manner = decode(msgspec.json.encode(given), Manner, "session")
        speaker = await TextSpeaker.of(self._websocket, self._state, manner, self._ids)
        await _encoder_of(speaker, given)  # which may refuse the rate
        return speaker

    async def _written(self) -> Utterance:
        if self._utterance is None:
            speaker = self._speaker = self._speaker or await self._speaker_of(self._given)
            self._utterance = Utterance(speaker, await _encoder_of(speaker, self._given))
            self._spoken.append(self._utterance)
        return self._utterance

    async def _flush(self, narrator: Narrator) -> None:
        await narrator.flush(await self._written(), last=True)
        self._utterance = None

    # -- events of the server -----------------------------------------------------------------------------------------

    def sound(self, utterance: Utterance, data: bytes) -> Event:
        """See `Dialect.sound`."""
        return event("speech.audio.delta", audio=data)

    def spoken(self, utterance: Utterance, text: str, seconds: float, words: Sequence[WordTime]) -> Event | None:
        """See `Dialect.spoken`: seconds from where the sound of the piece begins, at the speed that is heard."""
        times = times_of(words, 0.0, self._given.get("speed") or 1)
        return event("speech.audio.words", text=text, words=times) if times else None

    def ended(self, utterance: Utterance) -> Event:
        """See `Dialect.ended`."""
        self._spoken.remove(utterance)
        transcript, usage = " ".join(filter(None, utterance.texts)), utterance.usage()
        return event("speech.audio.done", status=utterance.status, transcript=transcript, usage=usage)

    def error(self, error: HttpError, data: bytes = b"", utterance: Utterance | None = None) -> Event:
        """See `Dialect.error`."""
        return error_event(error, event_id_of(data))


async def _encoder_of(speaker: TextSpeaker, given: dict[str, Any]) -> Encoder:
    return await made_encoder(given["response_format"], speaker.description.sample_rate, given.get("speed"))
