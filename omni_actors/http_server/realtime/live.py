"""The route /v1/live/sessions: OpenAI's Live API, as another way to talk to a realtime session.

`LiveSession` stands between a client and a `RealtimeSession`. It takes the events of either and gives the other one
those that they mean, and it sends sound all the time, in real time: that of answers, and silence between them. So it
knows what the user has heard when speech cuts an answer short.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import msgspec
import numpy
from msgspec import UNSET, Struct
from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_actors.errors import OmniError
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.generation import FlatTool, InputText
from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.config import AnyEvent, Event, WireFormat, new_id
from omni_actors.http_server.realtime.connection import (
    SUBPROTOCOL,
    SessionConnection,
    SessionOver,
    WebSocketLine,
    begun,
    new_session,
)
from omni_actors.http_server.realtime.conversation import AnyItem, heard, said_until
from omni_actors.http_server.realtime.delegations import Delegations
from omni_actors.http_server.realtime.formats import g711_codes
from omni_actors.http_server.realtime.live_events import (
    AppendCommentary,
    AppendContext,
    AppendInput,
    AppendInstructions,
    AppendThinking,
    ClientDelegation,
    CloseLive,
    ContinueWork,
    CreateBackendItem,
    LiveAudio,
    LiveEvent,
    LiveFields,
    LiveOutput,
    MuteInput,
    ResponsesDelegation,
    StartLive,
    UnmuteInput,
    UpdateLive,
)
from omni_actors.http_server.realtime.playing import Loudspeaker, Unplayed
from omni_actors.http_server.realtime.requests import ANSWER_BYTES, Outbox
from omni_actors.http_server.realtime.session import KeptSession, RealtimeSession
from omni_actors.http_server.state import ServerState

PATH = "/v1/live/sessions"
PIECE_SECONDS = 0.1  # of sound that is sent at a time
LEAD_SECONDS = 0.1  # by which sound is sent before it is due, so that a late packet is no gap
MOST_LATE = 1.0  # seconds of silence that are sent later, if nothing could be sent for a while
MOST_WAITING = 128  # items, while the model answers
PACE = 15.0  # characters a second, as people speak: of an answer of which not all is made
DELEGATE = FlatTool(
    type="function",
    name="delegate",
    description="Have somebody look up or do what the user asks for and you cannot. You get the result later: tell "
    "the user that you are on it, and go on with the conversation.",
    parameters={"type": "object", "properties": {}},
)
CLOSE_REQUESTED = "close_requested"
ENDS = {CLOSE_REQUESTED: CLOSE_REQUESTED, "session_expired": "expired", "session_idle": "expired"}
BACKEND = "session.delegation.responses"


def realtime_fields(fields: LiveFields, delegates: bool) -> dict[str, Any]:
    """The fields of a realtime session for what its model is told, and may call."""
    backend = fields.delegation.responses if isinstance(fields.delegation, ResponsesDelegation) else None
    told = (fields.instructions, backend.instructions if backend is not None else None)
    found: dict[str, Any] = {"instructions": "\n\n".join(filter(None, told))}
    if backend is not None:
        names = ("tools", "tool_choice", "parallel_tool_calls", "max_output_tokens")
        found |= {name: value for name in names if (value := getattr(backend, name)) is not None}
    elif delegates:
        found["tools"] = [DELEGATE]
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


def check_tools(given: ResponsesDelegation, delegates: bool) -> None:
    """Raise `HttpError` 400 for tools that the pipeline cannot call."""
    if given.responses.tools and not delegates:
        message = "This pipeline calls no tools: its operator can set a tool_call_parser."
        raise bad_field(f"{BACKEND}.tools", message, "unsupported_value")


class HeardTurn(Struct):
    """A turn of the user that is not written down yet, on the session's clock in ms, and what waits for that."""

    begin: int
    end: int
    waiting: list[Event] = []


class LiveSession:
    """One session of the Live API.

    Args:
        start: the event that it began with.
        wire: how sound travels in both directions.
        delegates: whether the model can call tools.
    """

    def __init__(self, start: StartLive, wire: WireFormat, delegates: bool) -> None:
        self._start, self._wire = start, wire
        self._fields = start.session
        self._capabilities = {"full_duplex": False, "delegation": delegates, "recording": False}
        self.speaker = Loudspeaker(wire.hertz * wire.sample_bytes)
        self._silence = b"\0\0" if wire.law is None else g711_codes(wire.law, numpy.zeros(1, "<i2")).tobytes()
        self._outbox: Outbox
        self._act: Callable[[AnyEvent], None]
        self._began = time.monotonic()
        self._shown: Event = {}  # the session, as it was told last
        self._updating: UpdateLive | None = None
        self._closing: CloseLive | None = None
        # The user
        self._muted = False
        self._received = 0  # bytes of sound
        self._turns: dict[str, HeardTurn] = {}  # by item
        self._speaking = False
        # Answers
        self._answering = False
        self._wanted = False  # another one, once it is possible
        self._waiting: list[config.CreateItem] = []
        self._appending: dict[str, AppendContext] = {}  # by item
        self._playing: Unplayed | None = None
        self._work = Delegations(lambda event: self._outbox.append(event), self._now)

    def begin(self, outbox: Outbox, act: Callable[[AnyEvent], None]) -> None:
        """Begin. `act` has the realtime session take an event."""
        self._outbox, self._act = outbox, act

    def _now(self) -> int:
        """The session's clock: milliseconds since its start."""
        return int(1000 * (time.monotonic() - self._began))

    def _send(self, kind: str, given: Any = None, **fields: Any) -> None:
        """Send an event; `given` is the client's that it answers."""
        event = config.event(kind, **fields)
        if given is not None and given.event_id is not None:
            event["client_event_id"] = given.event_id
        self._outbox.append(event)

    # -- events of the client -----------------------------------------------------------------------------------------

    def meant(self, event: LiveEvent) -> AnyEvent | None:
        """What an event asks of the realtime session, if it asks for anything. Raises `HttpError`, or `SessionOver`."""
        match event:
            case AppendInput(audio=audio):
                self._received += len(audio)
                if self._muted:
                    audio = self._silence * (len(audio) // len(self._silence))
                return config.AppendAudio(event_id=event.event_id, audio=audio)
            case MuteInput() | UnmuteInput():
                self._muted = isinstance(event, MuteInput)
                self._send(f"session.input_audio.{'muted' if self._muted else 'unmuted'}", event)
                return None
            case AppendInstructions() | AppendThinking() | AppendCommentary():
                return self._context(event)
            case UpdateLive():
                return self._update(event)
            case CreateBackendItem(item=item):
                self._check_backend()
                if isinstance(item, config.FunctionCallOutput):
                    self._work.add_result(item.call_id)
                return self._add(config.CreateItem(event_id=event.event_id, item=item))
            case ContinueWork():
                self._check_backend()
                self._work.go_on()
                self._wanted = True
                self._go_on()
                return None
            case CloseLive():
                self._closing = event
                raise SessionOver(HttpError(400, "The client has closed the session.", code=CLOSE_REQUESTED))
            case StartLive():
                raise bad_field("type", "The session has begun.", "session_already_started")
            case _:
                assert_never(event)

    def _check_backend(self) -> None:
        if not isinstance(self._fields.delegation, ResponsesDelegation):
            raise bad_field("type", "This session has no backend: its delegation is not 'responses'.")

    def _update(self, event: UpdateLive) -> AnyEvent:
        own, given = self._fields.delegation or ClientDelegation(), event.session.delegation
        fields: dict[str, Any] = {}
        if given is not None and type(given) is not type(own):
            raise bad_field("session.delegation.type", "Who does delegated work stays what it was at the start.")
        if isinstance(given, ResponsesDelegation) and isinstance(own, ResponsesDelegation):
            check_tools(given, self._capabilities["delegation"])
            named = msgspec.structs.asdict(given.responses).items()
            changes = {name: value for name, value in named if value is not None}
            backend = msgspec.structs.replace(own.responses, **changes)
            delegation = msgspec.structs.replace(own, responses=backend)
            self._fields = msgspec.structs.replace(self._fields, delegation=delegation)
            fields = realtime_fields(self._fields, self._capabilities["delegation"])
        self._updating = event
        return config.UpdateSession(event_id=event.event_id, session=fields)

    def _context(self, event: AppendContext) -> AnyEvent | None:
        """Add an item to the conversation: the first of a delegation is the result of its call."""
        item_id = new_id("item")
        call_id = self._work.result_of(event.delegation_id, answers=not isinstance(event, AppendInstructions))
        item: config.GivenItem
        if call_id is not None:
            item = config.FunctionCallOutput(id=item_id, call_id=call_id, output=event.content)
        else:
            item = config.GivenMessage(id=item_id, role="system", content=[InputText(event.content)])
        self._appending[item_id] = event
        return self._add(config.CreateItem(event_id=event.event_id, item=item))

    def _add(self, event: config.CreateItem) -> AnyEvent | None:
        """Add an item: behind the answer that runs, which does not know it. Raises `HttpError`."""
        if config.pictures_of(event):
            raise bad_field("item.content", "A Live session takes no pictures.", "unsupported_value")
        if not self._answering:
            return event
        if len(self._waiting) == MOST_WAITING:
            raise HttpError(429, f"{MOST_WAITING} items wait for the end of an answer.", code="overloaded")
        self._waiting.append(event)
        return None

    def _go_on(self) -> None:
        """Have the model answer what it was told, but not while the user speaks: that turn is answered anyway."""
        if self._wanted and not self._answering and not self._speaking:
            self._act(config.CreateResponse())

    # -- events of the realtime session -------------------------------------------------------------------------------

    def told(self, event: Event) -> None:
        """Send what an event means to the client, if it means anything."""
        match event["type"]:
            case "session.created":
                self._began = time.monotonic()
                self._send("session.started", self._start, session=self._resource(event["session"]))
            case "session.updated":
                self._send("session.updated", self._updating, session=self._resource(event["session"]))
            case "error":
                self._error(event["error"])
            case "input_audio_buffer.speech_started":
                begin, self._speaking = self._place(event["audio_start_ms"]), True
                self._turns[event["item_id"]] = HeardTurn(begin, begin)
            case "input_audio_buffer.speech_stopped":
                turn, self._speaking = self._turns[event["item_id"]], False
                turn.end = max(turn.begin, self._place(event["audio_end_ms"]))
            case (
                "conversation.item.input_audio_transcription.completed"
                | "conversation.item.input_audio_transcription.failed"
                | "conversation.item.deleted"
            ):
                self._written(event["item_id"], event.get("transcript"))
            case "conversation.item.done":
                self._appended(event["item"]["id"])
            case "response.created":
                self._answering, self._wanted = True, False
                self._work.begin(event["response"])
            case "response.output_item.done":
                self._item(event["response_id"], event["output_index"], event["item"])
            case "response.done":
                self._done(event["response"])
            case "output_audio_buffer.stopped":
                self._say(self._now(), self._now(), last=True)
            case _:  # clients of the Live API do not know it
                pass

    def _resource(self, session: Mapping[str, Any]) -> Event:
        """The session as clients of the Live API see it, from what those of a realtime session see."""
        fields, delegation = self._fields, msgspec.to_builtins(self._fields.delegation or ClientDelegation())
        if "responses" in delegation:
            shown = {name: session[name] for name in ("tools", "tool_choice", "parallel_tool_calls")}
            delegation["responses"] |= {**shown, "model": delegation["responses"]["model"] or session["model"]}
        self._work.model = session["model"]
        wire = {"type": self._wire.type, "rate": self._wire.hertz}
        self._shown = {
            **{name: session[name] for name in ("id", "expires_at", "model")},
            "status": "active",
            "instructions": fields.instructions,
            "audio": {"format": wire, "output": {"voice": session["audio"]["output"]["voice"]}},
            "delegation": delegation,
            "input": fields.input or [],
            "store": False,
            "capabilities": self._capabilities,
        }
        return self._shown

    def _error(self, error: Mapping[str, Any]) -> None:
        code = error["code"] or "error"
        if code != CLOSE_REQUESTED:
            self._outbox.append(live_error(error))
        if code in ENDS:
            self._send("session.closed", self._closing, reason=ENDS[code], session=self._shown, usage=self._usage())

    def _usage(self) -> Event:
        return {"seconds": self._now() / 1000}

    def _place(self, position: int) -> int:
        """The session's clock when sound came; `position` is its place in all sound, in ms."""
        return max(0, self._now() - 1000 * self._received // self.speaker.bytes_per_second + position)

    def _written(self, item_id: str, text: str | None) -> None:
        """Send what was written down of a turn, if anything was, and what has waited for that."""
        if (turn := self._turns.pop(item_id, None)) is not None:
            if text:
                self._send("session.input_transcript.delta", delta=text, start_ms=turn.begin, end_ms=turn.end)
            for event in turn.waiting:
                self._outbox.append(event)

    def _appended(self, item_id: str) -> None:
        if (given := self._appending.pop(item_id, None)) is None:
            return
        now = self._now()
        self._send(f"{given.__struct_config__.tag}ed", given, start_ms=now, end_ms=now)
        if isinstance(given, AppendCommentary):
            self._wanted = True
            self._go_on()

    def _done(self, response: Mapping[str, Any]) -> None:
        self._work.end(response)
        self._send("session.usage.updated", usage=self._usage())
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            self._act(item)
        self._answering = False
        self._go_on()

    def _item(self, response_id: str, index: int, item: Mapping[str, Any]) -> None:
        """Take a call, which delegates work, or what the model says when it does such work."""
        if isinstance(self._fields.delegation, ResponsesDelegation):
            self._work.item(response_id, index, item)
        elif item["type"] == "function_call":
            turns = [*self._turns.values()]  # the client knows the task from what the user has said
            put = turns[-1].waiting.append if turns else self._outbox.append
            put(self._work.to_client(item["call_id"]))

    # -- sound --------------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Send sound in real time for as long as the session lasts, and with it what is said."""
        due, rate, hertz = 0.0, self.speaker.bytes_per_second, self._wire.hertz  # due: seconds of the session's clock
        while True:
            await self._outbox.room(ANSWER_BYTES)
            await asyncio.sleep(due - LEAD_SECONDS - self._now() / 1000)
            due = max(due, self._now() / 1000 - MOST_LATE)
            if (found := self.speaker.next(1, int(PIECE_SECONDS * hertz) * self._wire.sample_bytes)) is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(due + PIECE_SECONDS - self._now() / 1000):
                        await self.speaker.more()
                if (missing := int((self._now() / 1000 - due) * hertz)) > 0:
                    self._sound(self._silence * missing)
                    due += missing / hertz
                continue
            clip, pcm = found
            self._playing = clip
            begin = max(due, self._now() / 1000)
            due = begin + len(pcm) / rate
            self._sound(pcm)
            self._say(int(1000 * begin), int(1000 * due))

    def _sound(self, data: bytes) -> None:
        self._outbox.append({"type": "session.output_audio.delta", "delta": data})

    def _say(self, begin: int, end: int, last: bool = False) -> None:
        """Send what was said up to now in the answer that is played."""
        clip, rate = self._playing, self.speaker.bytes_per_second
        if clip is None:
            return
        complete, seconds = clip.status in ("completed", "incomplete"), (clip.played + len(clip.pcm)) / rate
        pace = len(clip.text) / seconds if complete else min(PACE, len(clip.text) / seconds)
        text = heard(clip.text, clip.played / rate, seconds, pace, complete=complete)
        text = said_until(clip.text, clip.words, clip.played / rate) if clip.words else text
        text = clip.text if last and complete else text
        if delta := text[clip.told :]:
            clip.told = len(text)
            self._send("session.output_transcript.delta", delta=delta, start_ms=begin, end_ms=end)


def live_error(error: Mapping[str, Any]) -> Event:
    """The event of an error, from that of a realtime session."""
    param = (error["param"] or "").replace("session.tool", f"{BACKEND}.tool") or None
    known = {"client_event_id": error["event_id"]} if error["event_id"] is not None else {}
    shown = {"type": error["type"], "code": error["code"] or "error", "message": error["message"], "param": param}
    return config.event("error", error={**shown, **known}, **known)


# ---------------------------------------------------------------------------------------------------------------------
# The route


async def live(websocket: WebSocket) -> None:
    """Converse, with the events of OpenAI's Live API. A refusal before them is a plain HTTP response."""
    state: ServerState = websocket.app.state.server
    for name in websocket.query_params:
        raise bad_field(name[:64], f"{PATH} has no parameters: the session says what it is.", "unknown_parameter")
    line = WebSocketLine(websocket)
    with state.realtime.session(state.tenant(websocket), line), contextlib.suppress(WebSocketDisconnect):
        await state.realtime.load()
        await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None)
        data = b""
        try:
            async with asyncio.timeout(state.settings.realtime_idle_seconds):
                data = await line.receive()
            session = await _started(data, line, state)
        except (HttpError, OmniError, TimeoutError) as error:
            idle = HttpError(408, "No session.start came in time.", code="session_idle")
            refusal = idle if isinstance(error, TimeoutError) else HttpError.of(error)
            event = live_error(config.error_event(refusal, config.event_id_of(data))["error"])
            await line.send(msgspec.json.encode(event).decode())
            await line.close(refusal.code or "")
        else:
            await SessionConnection(line, websocket, state, session).run()


async def _started(data: bytes, line: WebSocketLine, state: ServerState) -> RealtimeSession:
    """The session that the first event asks for. Raises `HttpError` or `OmniError`."""
    start = config.parse(data, LiveEvent)
    if not isinstance(start, StartLive):
        raise bad_field("type", "The first event is session.start.", "session_not_started")
    fields, description = start.session, await state.describe()
    audio, delegation = fields.audio or LiveAudio(), fields.delegation
    if isinstance(delegation, ResponsesDelegation):
        state.model_name(delegation.responses.model, description)
        check_tools(delegation, description.calls_tools)
    spoken = {"input": {"transcription": {}}, "output": msgspec.to_builtins(audio.output or LiveOutput())}
    asked = {"model": fields.model, "audio": spoken, **realtime_fields(fields, description.calls_tools)}
    settings, pipeline = begun(asked, state, description, called=True)
    if settings.turn_detection is None or settings.output != "audio":
        message = "A Live session needs a pipeline that speaks, and omni_actors[realtime] to find turns."
        raise bad_field("session.model", message, "unsupported_value")
    wire = config.wire_format(audio.format or UNSET, WireFormat(), "session.audio.format")
    settings = msgspec.structs.replace(settings, input_format=wire, output_format=wire)
    session = new_session(settings, pipeline, state)
    items: list[AnyItem] = [given.item() for given in fields.input or ()]
    order = [item.id for item in items]
    session.go_on(session.id, KeptSession("", session.expires, new_id("conv"), settings, order, items))
    line.live = LiveSession(start, wire, description.calls_tools)
    return session
