"""The route /v1/audio/speech/stream, with events named as those of OpenAI's realtime sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, assert_never

import msgspec
from msgspec import Meta
from starlette.websockets import WebSocket

from omni_actors.http_server.bodies import decode
from omni_actors.http_server.encoders import Encoder, made_encoder
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.config import ClientEvent, Event, UpdateSession, error_event, event, event_id_of
from omni_actors.http_server.speech.narrator import Narrator, SpeechSession
from omni_actors.http_server.speech.recital import Manner, TextSpeaker, Utterance, request_ids, times_of
from omni_actors.http_server.speech.texts import MAX_TEXT
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.payloads import WordTime

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
        self._complete = False

    async def take(self, data: bytes, session: SpeechSession) -> None:
        """See `Dialect.take`."""
        found: AnyEvent = decode(data, AnyEvent)  # type: ignore[arg-type]  # a union is not a class
        if self._complete and not isinstance(found, CancelText):
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
                if self._utterance is None and not self._complete:
                    await self._written()
                for utterance in self._spoken:
                    await narrator.recital.stop(utterance, "cancelled")
                if not self._complete:
                    await self._flush(narrator)
            case _:
                assert_never(found)
        if isinstance(found, EndText):
            self._complete = True
            narrator.recital.end()
            session.finish()

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
