"""Whose answer may be spoken next. Beyond what the device speaks in real time, an answer's sound begins later.

Text is not held up. The first stage that works for the sound alone holds a request back until it has a place; places
are shared as slots are (docs/decisions.md). The stage that makes the sound says how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from omni_actors.config import CoordinatorConfig, Modality, PipelineConfig
from omni_actors.coordinator.core.request import ActiveRequest
from omni_actors.coordinator.core.slots import Slots, Ticket
from omni_actors.errors import Overloaded, counted
from omni_actors.protocol.header import Body
from omni_actors.protocol.results import StageDone

UNLIMITED = 1_000_000
NO_BOUND = 1 << 62  # bytes: what waits for its speech is in flight, and counted there
RETRY_AFTER_SECONDS = 5.0


class SpeechLine:
    """Requests that wait for their speech to begin, and those that are spoken."""

    def __init__(self, settings: CoordinatorConfig) -> None:
        self._longest = settings.speech_wait
        self._pace = settings.speech_pace
        self._listeners: dict[str, int] = {}  # for how many a replica makes sound in time, of those that say so
        self._places = UNLIMITED
        self._slots = Slots(self._places, settings.speech_queue, NO_BOUND, lambda stages: False)
        self._since: dict[str, float] = {}  # when those that wait came
        self._speaking: set[str] = set()

    @property
    def waiting(self) -> int:
        """Answers whose speech waits."""
        return self._slots.waiting

    @property
    def speaking(self) -> int:
        """Answers whose speech has begun and is not complete."""
        return self._slots.held

    @property
    def places(self) -> int:
        """How many may be spoken at a time; until a stage says for how many it makes sound, none has to wait."""
        return self._places

    def report(self, replica: str, listeners: int) -> None:
        """Note for how many listeners a replica makes sound in time; 0 if it does not know, or is gone.

        When the last one is gone, what it said still holds for the one that will take its place.
        """
        self._listeners.pop(replica, None)
        if listeners and self._pace:
            self._listeners[replica] = listeners
        if self._listeners:
            self._places = max(1, int(sum(self._listeners.values()) / self._pace))

    def speaks(self, request_id: str) -> bool:
        """Whether an answer's speech may be made."""
        return request_id in self._speaking

    def knows(self, request_id: str) -> bool:
        """Whether an answer waits or is spoken."""
        return request_id in self._speaking or request_id in self._since

    def enter(self, ticket: Ticket, now: float) -> list[str]:
        """Join the line. Returns the ids of answers for which it is too long, perhaps this one's."""
        self._since[ticket.request_id] = now
        self._resize()
        crowded_out = self._slots.enter(ticket)
        for request_id in crowded_out:
            del self._since[request_id]
        return crowded_out

    def begin(self, now: float) -> Iterator[tuple[str, float]]:
        """Let answers begin that have a place now: ids, and the seconds for which they waited."""
        self._resize()
        while (ticket := self._slots.next()) is not None:
            self._speaking.add(ticket.request_id)
            yield ticket.request_id, now - self._since.pop(ticket.request_id)

    def leave(self, request_id: str) -> None:
        """All of an answer's sound is made, or it has ended. Idempotent."""
        if not self.knows(request_id):
            return
        self._since.pop(request_id, None)
        self._speaking.discard(request_id)
        self._slots.leave(request_id)

    def overdue(self, now: float) -> list[str]:
        """Answers that have waited for too long."""
        return [request_id for request_id, since in self._since.items() if now - since > self._longest]

    def overloaded(self, waited: float | None = None) -> Overloaded:
        """The error of an answer that found no place in line, or `waited` for too long."""
        why = f"{counted(self.waiting, 'answer')} waiting" if waited is None else f"this one waiting for {waited:.0f} s"
        return Overloaded(
            f"Its speech cannot begin: the device speaks {counted(self.speaking, 'answer')}, as many as it can in real "
            f"time, with {why}.",
            hint="Try again later, or ask for text alone.",
            retry_after=RETRY_AFTER_SECONDS,
        )

    def _resize(self) -> None:
        if self.places != self._slots.count:
            self._slots.resize(self.places)


class SpeechPacer(SpeechLine):
    """The same for the requests of a pipeline, from what its stages send.

    Speech is paced if its first stage takes the output of the stage that makes text, and is not needed for the text.

    Attributes:
        first_stage: begins the speech of an answer; "" if speech is not paced.
        stages: those that work for the sound alone.
    """

    def __init__(self, pipeline: PipelineConfig) -> None:
        super().__init__(pipeline.coordinator)
        made = {modality: stage.name for stage in pipeline.stages for modality in stage.outputs}
        self._text, self._sound = made.get(Modality.TEXT, ""), made.get(Modality.AUDIO, "")
        for_text = pipeline.route([Modality.TEXT])
        self.stages = tuple(stage for stage in pipeline.route([Modality.AUDIO]) if stage not in for_text)
        self.first_stage = self.stages[0] if self.stages and pipeline.coordinator.speech_pace else ""
        if self.first_stage and self._text not in pipeline.stage(self.first_stage).source_names:
            self.first_stage = ""

    @property
    def bound(self) -> int:
        """How many answers may be spoken at a time; 0 if none has to wait."""
        return self.places if self.first_stage and self.places < UNLIMITED else 0

    def take_beat(self, stage: str, index: int, listeners: int) -> None:
        """Note what a replica's heartbeat says of the sound that it makes; 0 of one that is gone."""
        if stage == self._sound:
            self.report(f"{stage}/{index}", listeners)

    def holds(self, request: ActiveRequest, stage: str) -> bool:
        """Whether a stage must not begin with a request yet, or is after one that must not."""
        paced = bool(self.first_stage) and self.first_stage in request.stages
        return paced and stage in self.stages and not self.speaks(request.request_id)

    def notice(self, request: ActiveRequest, stage: str, body: Body, now: float) -> list[str]:
        """Take note of what a stage sent. Returns the ids of answers for which the line is now too long."""
        if stage == self._sound and isinstance(body, StageDone):
            self.leave(request.request_id)
        elif stage == self._text and self.holds(request, self.first_stage) and not self.knows(request.request_id):
            return self.enter(request.ticket, now) if request.ticket is not None else []
        return []
