"""Who looks on while the coordinator decides. The decisions do not depend on it."""

from __future__ import annotations

from omni_actors.errors import OmniError
from omni_actors.messages import AudioChunk, Header, Hop, StageDone, Submit, TextDelta


class Observer:
    """Sees nothing; subclasses override what they want to see. No method may raise."""

    def refused(self, error: OmniError) -> None:
        """A request was not admitted."""

    def admitted(self, request_id: str, submit: Submit) -> None: ...

    def bound(self, request_id: str, attempt: int, route: tuple[Hop, ...]) -> None:
        """An attempt is announced to these replicas."""

    def replayed(self, request_id: str, error: OmniError) -> None:
        """The attempt is lost; the next one follows as soon as it can be bound."""

    def came(self, header: Header, body: TextDelta | AudioChunk) -> None:
        """Text or audio of the running attempt came from a stage."""

    def delivered(self, request_id: str, body: TextDelta | AudioChunk) -> None:
        """What of it is new was sent to the client."""

    def stage_done(self, header: Header, body: StageDone) -> None:
        """A stage has finished its part of the running attempt."""

    def ended(self, request_id: str, error: OmniError | None) -> None:
        """The one end of an admitted request; `None`: it is done."""
