"""The state machine of a session, without I/O and clocks.

Every method returns instructions, in the order in which they are to be carried out. An event that is refused changes
nothing and becomes an `error` event.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from omni_actors.errors import ErrorCode
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.config import (
    Event,
    Pipeline,
    SessionConfig,
    Transcription,
    error_event,
    event,
    new_id,
)
from omni_actors.http_server.realtime.conversation import (
    AnyItem,
    CallItem,
    MessageItem,
    RealtimeConversation,
    ResultItem,
    prompt_of,
    transcription_event,
)
from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.realtime.response import RunningResponse
from omni_actors.http_server.realtime.turns import (
    MIN_COMMIT,
    SAMPLE_BYTES,
    AudioBuffer,
    SpeechWindow,
    TurnBegins,
    TurnDetector,
    TurnEnds,
    TurnGoesOn,
    TurnPauses,
    milliseconds,
)
from omni_actors.protocol.payloads import ToolCallPiece, WordTime


class Ask(NamedTuple):
    """Ask the pipeline for an answer.

    Args:
        request_id: the response's id, or another one if it is asked again.
        silence: seconds between the end of the user's speech and now.
        early: whether nothing of it is to be taken until it is asked for again, as its turn may not be over.
    """

    response_id: str
    request_id: str
    config: SessionConfig
    messages: Sequence[Mapping[str, Any]]
    silence: float
    early: bool = False


class Cancel(NamedTuple):
    """End a request in all stages, unless it has ended."""

    response_id: str


class Transcribe(NamedTuple):
    """Write down a turn of the user."""

    item_id: str
    transcription: Transcription


class Silence(NamedTuple):
    """Drop the sound that the server has not played yet, and tell `RealtimeSession.cut` how much was played."""


Instruction = Event | Ask | Cancel | Transcribe | Silence
Instructions = list[Instruction]  # an event is sent to the client


class EarlyAnswer(NamedTuple):
    """An answer to a turn that may be over; it hears the turn up to the end of its `pause` so far."""

    response: RunningResponse
    pause: TurnPauses


class KeptSession(Struct):
    """What is kept of a session for another connection.

    Args:
        owner: whose session it is.
        expires: Unix time.
        order: ids of all items of the conversation.
        items: those of them that have changed since it was last kept.
    """

    owner: str
    expires: int
    conversation_id: str
    config: SessionConfig
    order: list[str]
    items: list[AnyItem]


class RealtimeSession:
    """One conversation.

    Args:
        config: the configuration at the start.
        pipeline: what answers.
        expires: Unix time at which the session ends.
    """

    def __init__(self, config: SessionConfig, pipeline: Pipeline, expires: int) -> None:
        self.id = new_id("sess")
        self._config = config
        self._pipeline = pipeline
        self.expires = expires
        self._conversation = RealtimeConversation(pipeline.audio_seconds, pipeline.max_audios, pipeline.max_images)
        self._buffer = AudioBuffer(pipeline.audio_seconds, config.input_format)
        self._detector = TurnDetector(config.turn_detection) if config.turn_detection is not None else None
        self._turn_id = ""
        self._turn_start = 0
        self._plays_until = 0  # position at which an answer that is played as it comes has been heard
        self._idle_from: int | None = None  # the same, while nothing has come after it
        self._response: RunningResponse | None = None
        self._early: EarlyAnswer | None = None
        self._pictures: Iterator[bytes] = iter(())  # of the event that is taken
        self._aside: Sequence[AnyItem] | None = None  # what the response answers in place of the conversation
        self._spoken_characters, self._spoken_seconds = 0, 0.0  # of the answers that were complete

    @property
    def detecting(self) -> bool:
        """Whether the server looks for turns in the sound."""
        return self._detector is not None

    @property
    def answering(self) -> bool:
        """Whether a response is running."""
        return self._response is not None

    @property
    def position(self) -> int:
        """Samples of sound received so far."""
        return self._buffer.end

    def sound_from(self, position: int) -> bytes:
        """The sound that was received since a position, and is in no item yet."""
        return self._buffer.read(position, self._buffer.end)

    @property
    def spoken(self) -> tuple[Transcribe, int] | None:
        """The turn that the user speaks, if it is to be written down, and the position where it begins."""
        transcription = self._config.transcription
        if self._detector is None or not self._detector.speaking or transcription is None:
            return None
        return Transcribe(self._turn_id, transcription), self._turn_start

    @property
    def pausing(self) -> bool:
        """Whether that turn may be over, and its answer has been begun."""
        return self._early is not None

    @property
    def held(self) -> int:
        """Bytes of what the session keeps, about."""
        return self._conversation.size + self._buffer.size

    def opened(self) -> Instructions:
        """The first events of a session; of one that goes on, with the items that it has."""
        created = event("session.created", session=self._config.shown(self.id, self.expires))
        before = (None, *(item.id for item in self._conversation))
        shown = [
            event(f"conversation.item.{kind}", item=item.shown(), previous_item_id=previous)
            for previous, item in zip(before, self._conversation, strict=False)
            for kind in ("added", "done")
        ]
        return [created, *shown]

    def kept(self, owner: str, changed: Container[str] | None = None) -> KeptSession:
        """What another connection goes on with; of the items those with these ids, or all.

        An answer that is still made is none of them.
        """
        whole = [item for item in self._conversation if item.status != "in_progress"]
        order = [item.id for item in whole]
        items = [item for item in whole if changed is None or item.id in changed]
        return KeptSession(owner, self.expires, self._conversation.id, self._config, order, items)

    def go_on(self, session_id: str, kept: KeptSession) -> None:
        """Become this session, in place of a new one that has not been opened."""
        self.id, self.expires, self._conversation.id = session_id, kept.expires, kept.conversation_id
        self._configure(kept.config)
        self.restore(kept.items)

    def restore(self, items: Iterable[AnyItem]) -> None:
        """Have a session that has not been opened begin with these items."""
        for item in items:
            self._conversation.add(item)

    def receive(self, given: config.AnyEvent, pictures: Sequence[bytes] = ()) -> Instructions:
        """Take an event of the client. `pictures` are those of `pictures_of`, as files."""
        self._pictures = iter(pictures)
        answers = isinstance(given, config.CreateResponse) and given.response is None  # an answer begun early will do
        dropped = [] if answers or isinstance(given, config.AppendAudio) else self._drop_early()
        try:
            return [*dropped, *self._receive(given)]
        except HttpError as error:
            return [*dropped, error_event(error, given.event_id)]

    def _receive(self, given: config.AnyEvent) -> Instructions:
        match given:
            case config.UpdateSession():
                return self._update(given)
            case config.AppendAudio():
                if self._pipeline.called:
                    self._buffer.make_room(len(given.audio))
                self._buffer.append(given.audio)
                return []
            case config.CommitAudio():
                return self._commit()
            case config.ClearAudio():
                self._buffer.end_sound()
                self._buffer.take()
                self._forget_turn()
                return [event("input_audio_buffer.cleared")]
            case config.ClearOutput():
                if not self._pipeline.called:
                    raise bad_field("type", "Only over WebRTC the server has an output_audio_buffer.")
                return [Silence()]
            case config.CreateItem():
                return self._add(self._item_of(given.item, "item"), given.previous_item_id)
            case config.RetrieveItem():
                shown = self._conversation.find(given.item_id).shown(with_audio=True)
                return [event("conversation.item.retrieved", item=shown)]
            case config.DeleteItem():
                self._conversation.remove(given.item_id)
                return [event("conversation.item.deleted", item_id=given.item_id)]
            case config.TruncateItem():
                return self._truncate(given)
            case config.CreateResponse() if self._early is not None:
                self._forget_turn()
                return self._end_turn(TurnEnds(*self._early.pause))
            case config.CreateResponse():
                return self._respond_to(given.response or config.ResponseFields())
            case config.CancelResponse():
                return self._cancel(given)

    # -- configuration and items --------------------------------------------------------------------------------------

    def _update(self, given: config.UpdateSession) -> Instructions:
        config, refused = self._config.updated(given.session, self._pipeline)
        self._configure(config)
        updated = event("session.updated", session=config.shown(self.id, self.expires))
        return [updated, *(error_event(error, given.event_id) for error in refused)]

    def _configure(self, config: SessionConfig) -> None:
        if config.turn_detection != self._config.turn_detection:
            self._detector = TurnDetector(config.turn_detection) if config.turn_detection is not None else None
        if config.input_format != self._config.input_format:
            self._buffer.end_sound(config.input_format)
        self._config = config

    def _item_of(self, given: config.GivenItem, where: str) -> AnyItem:
        match given:
            case config.FunctionCall():
                call_id = given.call_id or new_id("call")
                return CallItem(call_id, given.name, given.arguments, given.id or new_id("item"))
            case config.FunctionCallOutput():
                if not any(isinstance(item, CallItem) and item.call_id == given.call_id for item in self._conversation):
                    raise bad_field(f"{where}.call_id", "The conversation has no function_call with this call_id.")
                return ResultItem(given.call_id, given.output, given.id or new_id("item"))
            case config.GivenMessage():
                return MessageItem.of(given, where, self._pictures)

    def _add(self, item: AnyItem, after: str | None = None) -> Instructions:
        previous = self._conversation.add(item, after)
        shown = item.shown()
        return [
            event("conversation.item.added", item=shown, previous_item_id=previous),
            event("conversation.item.done", item=shown, previous_item_id=previous),
            *self._deleted(self._conversation.drop_oldest()),
        ]

    def _deleted(self, item_ids: Sequence[str]) -> Instructions:
        return [event("conversation.item.deleted", item_id=item_id) for item_id in item_ids]

    def _truncate(self, given: config.TruncateItem) -> Instructions:
        item = self._conversation.find(given.item_id)
        running = self._response if self._response is not None and self._response.item is item else None
        if not isinstance(item, MessageItem):
            raise bad_field("item_id", "This item is not a spoken answer.")
        item.check_truncation(given.content_index, given.audio_end_ms)
        done = self._cut_short("client_cancelled") if running is not None else []
        item.truncate(given.content_index, given.audio_end_ms, self.pace)
        self._conversation.weigh(item)
        cut = {"content_index": given.content_index, "audio_end_ms": given.audio_end_ms}
        return [*done, event("conversation.item.truncated", item_id=item.id, **cut)]

    @property
    def pace(self) -> float | None:
        """Characters a second of the answers that were complete; `None` before the first one."""
        return self._spoken_characters / self._spoken_seconds if self._spoken_seconds else None

    def timed(self, item_id: str, text: str, words: Sequence[WordTime]) -> None:
        """Take when the words of a spoken answer are said: see `MessageItem.timed`. One that is gone needs none."""
        if (item := self._conversation.message(item_id)) is not None:
            item.timed(text, words)
            self._conversation.weigh(item)

    def sound_of(self, item_id: str) -> Mapping[str, Any] | None:
        """The sound of a turn, as a part of a message; `None` if it is gone."""
        item = self._conversation.message(item_id)
        return None if item is None else item.parts[0].prompt()

    def written(self, kind: str, item_id: str, **fields: Any) -> Sequence[Event]:
        """The event about what is written down of a turn, which keeps its whole `transcript`; none if it is gone."""
        if (item := self._conversation.message(item_id)) is None:
            return ()
        item.parts[0].text = fields.get("transcript", item.parts[0].text)
        self._conversation.weigh(item)
        return [transcription_event(kind, item_id, **fields)]

    def cut(self, item_id: str, end_ms: int) -> Instructions:
        """Take how much of an answer was played before it was silenced."""
        try:
            return self._truncate(config.TruncateItem(item_id=item_id, content_index=0, audio_end_ms=end_ms))
        except HttpError:  # the item is gone, or was never part of the conversation
            return []

    # -- the user's turn ----------------------------------------------------------------------------------------------

    def detect(self, windows: Sequence[SpeechWindow]) -> Instructions:
        """Look for turns in windows of the sound that was received."""
        done: Instructions = []
        for window in windows:
            if self._detector is None:
                break
            match self._detector.feed(window):
                case TurnBegins(start):
                    done += self._begin_turn(start)
                case TurnPauses() as pause:
                    done += self._answer_early(pause)
                case TurnGoesOn():
                    done += self._drop_early()
                case TurnEnds() as end:
                    done += self._end_turn(end)
                case None:
                    pass
        if self._detector is not None and windows and not self._detector.speaking:
            start = self._detector.needed_from(windows[-1].end)
            done += self._answer_silence(start, windows[-1].end)
            self._buffer.take(end=start)
        return done

    def _answer_silence(self, start: int, end: int) -> Instructions:
        """Make a turn of what was heard last, if the user has said nothing for long enough."""
        timeout = self._config.turn_detection.idle_timeout_ms if self._config.turn_detection is not None else None
        if timeout is None or self._idle_from is None or milliseconds(end - self._idle_from) < timeout:
            return []
        since, self._idle_from = self._idle_from, None
        if self._config.kind != "realtime":
            return []
        item_id = new_id("item")
        place = {"audio_start_ms": milliseconds(since), "audio_end_ms": milliseconds(end), "item_id": item_id}
        pcm = self._buffer.read(start, end).rjust(SAMPLE_BYTES * MIN_COMMIT, b"\0")
        return [event("input_audio_buffer.timeout_triggered", **place), *self._take_turn(item_id, pcm, answer=True)]

    def _begin_turn(self, start: int) -> Instructions:
        self._idle_from = None
        self._turn_id = new_id("item")
        self._turn_start = max(start, self._buffer.start)
        place = {"audio_start_ms": milliseconds(self._turn_start), "item_id": self._turn_id}
        started = event("input_audio_buffer.speech_started", **place)
        detection = self._config.turn_detection
        if detection is None or not detection.interrupt_response:
            return [started]
        silence: Instructions = [Silence()] if self._pipeline.called else []
        return [started, *self._cut_short("turn_detected"), *silence]

    def _cut_short(self, reason: str) -> Instructions:
        """End the answer that is made, if there is one."""
        cancel: Instructions = [Cancel(self._response.id)] if self._response is not None else []
        return [*cancel, *self._end("cancelled", reason=reason)]

    @property
    def _answers_turns(self) -> bool:
        detection = self._config.turn_detection
        return detection is not None and detection.create_response and self._config.kind == "realtime"

    def _answer_early(self, pause: TurnPauses) -> Instructions:
        """Ask for the answer to the turn as if it were over."""
        if not self._answers_turns or self._response is not None:
            return []
        try:
            response = self._new_response(config.ResponseFields())
        except HttpError:  # the end of the turn says so
            return []
        turn = MessageItem.of_sound(self._turn_id, self._buffer.read(self._turn_start, pause.end))
        self._early = EarlyAnswer(response, pause)
        return [self._ask(response, pause.silence / RATE, [*self._conversation, turn], early=True)]

    def _drop_early(self) -> Instructions:
        early, self._early = self._early, None
        return [Cancel(early.response.id)] if early is not None else []

    def _end_turn(self, end: TurnEnds) -> Instructions:
        place = {"audio_end_ms": milliseconds(end.end), "item_id": self._turn_id}
        stopped = event("input_audio_buffer.speech_stopped", **place)
        pcm = self._buffer.read(self._turn_start, end.end if self._early is None else self._early.pause.end)
        self._buffer.take(end=end.end)
        detection = self._config.turn_detection
        interrupts = self._answers_turns and detection is not None and detection.interrupt_response
        begun = self._cut_short("turn_detected") if interrupts else []  # while the user spoke
        taken = self._take_turn(self._turn_id, pcm, answer=self._answers_turns, silence=end.silence / RATE)
        return [stopped, *begun, *taken, *self._transcribe(self._turn_id)]

    def _take_turn(self, item_id: str, pcm: bytes, *, answer: bool, silence: float = 0.0) -> Instructions:
        done: Instructions = []
        try:
            done += self._commit_sound(item_id, pcm)
            if answer:
                done += self._respond_to(config.ResponseFields(), silence)
        except HttpError as error:
            done += [*self._drop_early(), error_event(error)]
        return done

    def _commit(self) -> Instructions:
        self._buffer.end_sound()
        waiting = self._buffer.end - self._buffer.start
        if waiting < MIN_COMMIT:
            message = f"The buffer has {milliseconds(waiting)} ms of audio; 100 are needed."
            raise HttpError(400, message, code="input_audio_buffer_commit_empty")
        speaking = self._detector is not None and self._detector.speaking
        item_id = self._turn_id if speaking else new_id("item")
        start = self._turn_start if speaking else None
        self._forget_turn()
        return [*self._commit_sound(item_id, self._buffer.take(start)), *self._transcribe(item_id)]

    def _commit_sound(self, item_id: str, pcm: bytes) -> Instructions:
        place = {"item_id": item_id, "previous_item_id": self._conversation.last_id}
        committed = event("input_audio_buffer.committed", **place)
        return [committed, *self._add(MessageItem.of_sound(item_id, pcm))]

    def _transcribe(self, item_id: str) -> Instructions:
        """Comes after the answer has been asked for, which is more urgent."""
        transcription = self._config.transcription
        return [Transcribe(item_id, transcription)] if transcription is not None else []

    def _forget_turn(self) -> None:
        if self._detector is not None:
            self._detector.reset()

    # -- answers ------------------------------------------------------------------------------------------------------

    def _respond_to(self, fields: config.ResponseFields, silence: float = 0.0) -> Instructions:
        early, self._early = self._early, None
        response = early.response if early is not None else self._new_response(fields)
        if self._response is not None:
            message = f"The response {self._response.id} is running: wait for its end, or send response.cancel."
            raise HttpError(400, message, code="conversation_already_has_active_response")
        self._idle_from = None
        self._aside = self._aside_of(fields.input) if fields.input is not None else None
        self._response = response
        items = self._aside if self._aside is not None else self._conversation
        created = event("response.created", response=response.shown("in_progress"))
        return [created, self._ask(response, silence, items)]

    def _new_response(self, fields: config.ResponseFields) -> RunningResponse:
        config = self._config.with_answer(fields, self._pipeline, "response")
        if config.kind != "realtime":
            raise bad_field("type", "A session of the type 'transcription' gives no answers.", "unsupported_value")
        conversation = self._conversation if fields.conversation == "auto" else None
        return RunningResponse(config, conversation, fields.metadata)

    def _aside_of(self, given: Sequence[config.GivenItem | config.ItemReference]) -> Sequence[AnyItem]:
        items: list[AnyItem] = []
        for index, entry in enumerate(given):
            where = f"response.input[{index}]"
            if isinstance(entry, config.ItemReference):
                items.append(self._conversation.find(entry.id, f"{where}.id"))
            else:
                items.append(self._item_of(entry, where))
        return items

    def _ask(self, response: RunningResponse, silence: float, items: Iterable[AnyItem], early: bool = False) -> Ask:
        messages = prompt_of(response.config.instructions, items)
        return Ask(response.id, response.next_request_id(), response.config, messages, silence, early)

    def _cancel(self, given: config.CancelResponse) -> Instructions:
        running = self._response
        if running is None or given.response_id not in (None, running.id):
            found = "no response is running" if running is None else f"the response {running.id} is running"
            message = f"Cancellation failed: {found}."  # LiveKit's agents know this error by its beginning
            raise HttpError(400, message, param="response_id", code="response_cancel_not_active")
        return self._cut_short("client_cancelled")

    def text(self, response_id: str, delta: str, calls: Sequence[ToolCallPiece] = ()) -> Instructions:
        """Take the next text of an answer, and the next pieces of its calls of tools."""
        response = self._running(response_id)
        if response is None:
            return []
        sent = response.text(delta) if delta else []
        return [*sent, *(made for piece in calls for made in response.call(piece))]

    def sound(self, response_id: str, pcm: bytes) -> Instructions:
        """Take the next sound of an answer."""
        response = self._running(response_id)
        if response is None or not pcm:
            return []
        self._plays_until = max(self._plays_until, self._buffer.end) + len(pcm) // SAMPLE_BYTES
        return [*response.sound(pcm)]

    def answered(self, response_id: str, usage: Mapping[str, Any], cut: bool) -> Instructions:
        """Take the end of an answer; `cut` if the limit of tokens ended it."""
        response = self._running(response_id)
        if response is None:
            return []
        if cut:
            return self._end("incomplete", reason="max_output_tokens", usage=usage)
        if response.item is not None and response.spoken:
            self._spoken_characters += response.item.weight["characters"]
            self._spoken_seconds += response.item.parts[0].seconds
        return self._end("completed", usage=usage)

    def failed(self, response_id: str, error: HttpError) -> Instructions:
        """Take the failure of an answer. A prompt that is too long is asked again without its older half."""
        response = self._running(response_id)
        if response is None:
            return []
        too_long = error.code == ErrorCode.PROMPT_TOO_LONG and response.item is None and self._aside is None
        if too_long and response.config.truncation == "auto" and (dropped := self._conversation.drop_half()):
            return [*self._deleted(dropped), self._ask(response, 0.0, self._conversation)]
        about = {"type": error.kind, "code": error.code}
        return [error_event(error), *self._end("failed", error=about)]

    def _running(self, response_id: str) -> RunningResponse | None:
        return self._response if self._response is not None and self._response.id == response_id else None

    def _end(self, status: Any, **options: Any) -> Instructions:
        response, self._response = self._response, None
        self._plays_until = max(self._plays_until if status != "cancelled" else 0, self._buffer.end)
        self._idle_from = self._plays_until if status in ("completed", "incomplete") else None
        return [*response.end(status, **options)] if response is not None else []
