"""OpenAI's Live API, as another way to talk to a realtime session.

`LiveSession` stands between a client and a `RealtimeSession`. It takes the events of either and gives the other one
those that they mean, and it sends sound all the time, in real time: that of answers, and silence between them. So it
knows what the user has heard when speech cuts an answer short.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import msgspec
import numpy
from msgspec import Struct

from omni_actors.host.processes import at_most
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.generation import FlatTool, InputText
from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.config import AnyEvent, Event, new_id
from omni_actors.http_server.realtime.conversation import heard, said_until
from omni_actors.http_server.realtime.formats import WireFormat, g711_codes
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
    LiveEvent,
    LiveFields,
    MuteInput,
    ResponsesDelegation,
    StartLive,
    UnmuteInput,
    UpdateLive,
)
from omni_actors.http_server.realtime.playing import Loudspeaker, Unplayed
from omni_actors.http_server.realtime.requests import ANSWER_BYTES, Outbox

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
    """The fields of a realtime session for what its model is told, and may call.

    Raises:
        HttpError: 400 for tools that the pipeline cannot call.
    """
    backend = fields.delegation.responses if isinstance(fields.delegation, ResponsesDelegation) else None
    told = (fields.instructions, backend.instructions if backend is not None else None)
    found: dict[str, Any] = {"instructions": "\n\n".join(filter(None, told))}
    if backend is not None and backend.tools and not delegates:
        message = "This pipeline calls no tools: its operator can set a tool_call_parser."
        raise bad_field(f"{BACKEND}.tools", message, "unsupported_value")
    if backend is not None:
        names = ("tools", "tool_choice", "parallel_tool_calls", "max_output_tokens")
        found |= {name: getattr(backend, name) for name in names}
    elif delegates:
        found["tools"] = [DELEGATE]
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


def with_update(fields: LiveFields, given: ClientDelegation | ResponsesDelegation | None) -> LiveFields:
    """The fields of a session with what an update changes. Raises `HttpError` 400 for another kind of delegation."""
    own = fields.delegation or ClientDelegation()
    if given is not None and type(given) is not type(own):
        raise bad_field("session.delegation.type", "Who does delegated work stays what it was at the start.")
    if not isinstance(given, ResponsesDelegation) or not isinstance(own, ResponsesDelegation):
        return fields
    changes = {name: value for name, value in msgspec.structs.asdict(given.responses).items() if value is not None}
    backend = msgspec.structs.replace(own.responses, **changes)
    return msgspec.structs.replace(fields, delegation=msgspec.structs.replace(own, responses=backend))


# ---------------------------------------------------------------------------------------------------------------------
# Work that the model delegates: to the client, or to itself with the client's tools

ANSWERED = {"failed": "failed", "incomplete": "incomplete"}  # else completed: what ends early was cut in its speech
NO_DETAILS = {
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}


class Delegations:
    """The delegations of one session.

    Args:
        send: sends an event to the client.
        now: the session's clock in ms.
    """

    def __init__(self, send: Callable[[Event], None], now: Callable[[], int]) -> None:
        self._send, self._now = send, now
        self.model = ""  # which answers
        self._calls: dict[str, str | None] = {}  # of delegations to the client, until there is a result
        self._open: set[str] = set()  # calls of the backend that have no result
        self._last: str | None = None  # the backend's last delegation
        self._continues = False  # the next answer goes on with it
        self._responses: dict[str, str | None] = {}  # delegations of the backend by response
        self._numbers = itertools.count()  # of the backend's events

    def to_client(self, call_id: str) -> Event:
        """Delegate a call to the client; returns the event that says so."""
        self._calls[delegation_id := new_id("dlg")] = call_id
        return self._created(delegation_id, "client")

    def result_of(self, delegation_id: str | None, answers: bool) -> str | None:
        """The call whose result is what the client says of a delegation; `None` if it has one, or needs none.

        Raises:
            HttpError: 400 for a delegation that was not made to the client.
        """
        if delegation_id is None:
            return None
        if delegation_id not in self._calls:
            message = f"The session has no delegation {delegation_id[:100]!r} to the client."
            raise bad_field("delegation_id", message, "delegation_not_found")
        if not answers:
            return None
        call_id, self._calls[delegation_id] = self._calls[delegation_id], None
        return call_id

    def add_result(self, call_id: str) -> None:
        """Note that a call of the backend has its result."""
        self._open.discard(call_id)

    def go_on(self) -> None:
        """Have the next answer be the backend's. Raises `HttpError` 400 while a result is missing."""
        if self._open:
            message = f"The backend waits for the results of {', '.join(self._open)}: send them first."
            raise HttpError(400, message, code="function_call_outputs_required")
        self._continues = True

    def begin(self, response: Mapping[str, Any]) -> None:
        """Take the beginning of an answer."""
        if self._continues:
            self._continues = False
            self._begin(response["id"])

    def item(self, response_id: str, index: int, item: Mapping[str, Any]) -> None:
        """Take an item of an answer where the session has a backend: a call is work that is delegated to it."""
        called = item["type"] == "function_call"
        if called:
            self._open.add(item["call_id"])
            if response_id not in self._responses:
                self._last = new_id("dlg")
                self._send(self._created(self._last, "responses", response_id=response_id))
                self._begin(response_id)
        if response_id in self._responses:
            shown = {name: value for name, value in item.items() if name != "object"}
            if not called:
                text = "".join(part.get("transcript") or part.get("text", "") for part in item["content"])
                shown["content"] = [{"type": "output_text", "text": text, "annotations": []}]
            self._tell(response_id, "response.output_item.done", output_index=index, item=shown)

    def end(self, response: Mapping[str, Any]) -> None:
        """Take the end of an answer."""
        response_id, status = response["id"], ANSWERED.get(response["status"], "completed")
        if response_id not in self._responses:
            return
        details, usage = response["status_details"] or {}, response["usage"]
        shown = self._response(response_id, status)
        if status == "failed":
            shown["error"] = {**details["error"], "message": "The answer failed: see the error before."}
        elif status == "incomplete":
            shown["incomplete_details"] = {"reason": details["reason"]}
        if usage:
            counts = {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}
            shown["usage"] = counts | NO_DETAILS
        self._tell(response_id, f"response.{status}", response=shown)
        del self._responses[response_id]

    def _begin(self, response_id: str) -> None:
        self._responses[response_id] = self._last
        self._tell(response_id, "response.created", response=self._response(response_id, "in_progress"))

    def _created(self, delegation_id: str, target: str, **fields: str) -> Event:
        delegation = {"id": delegation_id, "type": "delegation", "target": target, **fields}
        return config.event("session.delegation.created", offset_ms=self._now(), delegation=delegation)

    def _tell(self, response_id: str, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        self._send(config.event("response.event", delegation_id=self._responses[response_id], event=event))

    def _response(self, response_id: str, status: str) -> Event:
        about = {"object": "response", "created_at": int(time.time()), "model": self.model}
        return {"id": response_id, **about, "status": status, "output": []}


# ---------------------------------------------------------------------------------------------------------------------
# Sessions


class HeardTurn(Struct):
    """A turn of the user that is not all written down, and what waits for that.

    Args:
        begin: of what is not written down, on the session's clock in ms.
        end: of the turn; `None` while it is spoken.
    """

    begin: int
    end: int | None = None
    waiting: list[Event] = []


class LiveSession:
    """One session of the Live API.

    Args:
        start: the event that it began with.
        wire: how sound travels in both directions.
        delegates: whether the model can call tools.
        speaker: what plays answers; made if `None`.
    """

    def __init__(self, start: StartLive, wire: WireFormat, delegates: bool, speaker: Loudspeaker | None = None) -> None:
        self._start, self._wire = start, wire
        self.fields = start.session  # as they are now
        # Further connections, which get all events, and the sound if it is PCM at `RATE`.
        self.listeners: set[Outbox] = set()
        self._capabilities = {"full_duplex": False, "delegation": delegates, "recording": False}
        self.speaker = speaker or Loudspeaker(wire.hertz * wire.sample_bytes)
        self.speaker.heard = self._heard
        self._silence = b"\0\0" if wire.law is None else g711_codes(wire.law, numpy.zeros(1, "<i2")).tobytes()
        self._outbox: Outbox
        self._act: Callable[[AnyEvent], None]
        self._end: Callable[[HttpError], None]
        self._began = time.monotonic()
        self._shown: Event = {}  # the session, as it was told last
        self._updating: UpdateLive | None = None
        self._closing: CloseLive | None = None
        self.closed = asyncio.Event()
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
        self._work = Delegations(self._tell, self._now)

    def begin(self, outbox: Outbox, act: Callable[[AnyEvent], None], end: Callable[[HttpError], None]) -> None:
        """Begin. `act` has the realtime session take an event, `end` has it end."""
        self._outbox, self._act, self._end = outbox, act, end

    def _now(self) -> int:
        """The session's clock: milliseconds since its start."""
        return int(1000 * (time.monotonic() - self._began))

    def _send(self, kind: str, given: Any = None, **fields: Any) -> None:
        """Send an event; `given` is the client's that it answers."""
        event = config.event(kind, **fields)
        if given is not None and given.event_id is not None:
            event["client_event_id"] = given.event_id
        self._tell(event)

    def _tell(self, event: Event) -> None:
        if self.closed.is_set():  # the client knows that it is over
            return
        for outbox in (self._outbox, *self.listeners):
            outbox.append(event)

    def _reflect(self, event: Event) -> None:
        """Give sound to the further connections."""
        for outbox in self.listeners if self._wire == WireFormat() else ():
            outbox.append(event)

    # -- events of the client -----------------------------------------------------------------------------------------

    def meant(self, event: LiveEvent) -> AnyEvent | None:
        """What an event asks of the realtime session, if it asks for anything. Raises `HttpError`."""
        match event:
            case AppendInput(audio=audio):
                self._received += len(audio)
                self._reflect({"type": "session.input_audio.append", "audio": audio})
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
                self._end(HttpError(400, "The client has closed the session.", code=CLOSE_REQUESTED))
                return None
            case StartLive():
                raise bad_field("type", "The session has begun.", "session_already_started")
            case _:
                assert_never(event)

    def _check_backend(self) -> None:
        if not isinstance(self.fields.delegation, ResponsesDelegation):
            raise bad_field("type", "This session has no backend: its delegation is not 'responses'.")

    def _update(self, event: UpdateLive) -> AnyEvent:
        fields = with_update(self.fields, event.session.delegation)
        asked = realtime_fields(fields, self._capabilities["delegation"])
        self.fields, self._updating = fields, event
        return config.UpdateSession(event_id=event.event_id, session=asked)

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
                self._turns[event["item_id"]] = HeardTurn(begin)
            case "input_audio_buffer.speech_stopped":
                turn, self._speaking = self._turns[event["item_id"]], False
                turn.end = max(turn.begin, self._place(event["audio_end_ms"]))
            case "conversation.item.input_audio_transcription.delta":
                self._write(event["item_id"], event["delta"])
            case (
                "conversation.item.input_audio_transcription.completed"
                | "conversation.item.input_audio_transcription.failed"
                | "conversation.item.deleted"
            ):
                self._written(event["item_id"])
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
        fields, delegation = self.fields, msgspec.to_builtins(self.fields.delegation or ClientDelegation())
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
            "store": bool(fields.store),
            "capabilities": self._capabilities,
        }
        return self._shown

    def _error(self, error: Mapping[str, Any]) -> None:
        code = error["code"] or "error"
        if code != CLOSE_REQUESTED:
            self._tell(live_error(error))
        if code in ENDS:
            self.close(ENDS[code])

    def close(self, reason: str) -> None:
        """Say that the session is over, unless that was said."""
        if not self.closed.is_set():
            self._send("session.closed", self._closing, reason=reason, session=self._shown, usage=self._usage())
            self.closed.set()

    def _usage(self) -> Event:
        return {"seconds": self._now() / 1000}

    def _place(self, position: int) -> int:
        """The session's clock when sound came; `position` is its place in all sound, in ms."""
        return max(0, self._now() - 1000 * self._received // self.speaker.bytes_per_second + position)

    def _write(self, item_id: str, text: str) -> None:
        """Send what else was written down of a turn."""
        if (turn := self._turns.get(item_id)) is not None:
            begin, turn.begin = turn.begin, max(turn.begin, self._now() if turn.end is None else turn.end)
            self._send("session.input_transcript.delta", delta=text, start_ms=begin, end_ms=turn.begin)

    def _written(self, item_id: str) -> None:
        """Send what has waited until a turn was written down."""
        if (turn := self._turns.pop(item_id, None)) is not None:
            for event in turn.waiting:
                self._tell(event)

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
        if isinstance(self.fields.delegation, ResponsesDelegation):
            self._work.item(response_id, index, item)
        elif item["type"] == "function_call":
            turns = [*self._turns.values()]  # the client knows the task from what the user has said
            put = turns[-1].waiting.append if turns else self._tell
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
                await at_most(due + PIECE_SECONDS - self._now() / 1000, self.speaker.more())
                if (missing := int((self._now() / 1000 - due) * hertz)) > 0:
                    self._sound(self._silence * missing)
                    due += missing / hertz
                continue
            clip, pcm = found
            begin = max(due, self._now() / 1000)
            due = begin + len(pcm) / rate
            self._sound(pcm)
            self._playing = clip
            self._say(int(1000 * begin), int(1000 * due))

    def _heard(self, clip: Unplayed, pcm: bytes) -> None:
        """Take what a call has sent as sound."""
        now, self._playing = self._now(), clip
        self._reflect({"type": "session.output_audio.delta", "delta": pcm})
        self._say(now, now + 1000 * len(pcm) // self.speaker.bytes_per_second)

    def _sound(self, data: bytes) -> None:
        if self.closed.is_set():
            return
        event = {"type": "session.output_audio.delta", "delta": data}
        self._outbox.append(event)
        self._reflect(event)

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
