"""Callbacks for watching decisions about requests; they must not affect them."""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.errors import OmniError
from omni_actors.protocol.client import Submit
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.results import Output, StageDone


class Observer:
    """Does nothing; subclasses override the events they need. No method may raise."""

    def refused(self, error: OmniError) -> None:
        """A request was not admitted."""

    def admitted(self, request_id: str, submit: Submit) -> None:
        """A request was accepted; `ended` will follow."""

    def bound(self, request_id: str, attempt: int, route: tuple[ReplicaId, ...], begun: Sequence[str]) -> None:
        """An attempt was announced to the replicas of the stages `begun`; the rest of the route goes on as it was."""

    def speech_begun(self, request_id: str, waited: float) -> None:
        """Its speech may be made; it has waited for this for so many seconds."""

    def replayed(self, request_id: str, error: OmniError, counts: bool) -> None:
        """The work of a stage is lost; it runs again, with those that depend on it, as soon as they can be bound.

        `counts` is false for a consequence of a loss that was reported before.
        """

    def came(self, header: Header, body: Output) -> None:
        """Output of the present attempt came from a stage."""

    def delivered(self, request_id: str, body: Output) -> None:
        """The new part of a result was sent to the client."""

    def stage_done(self, header: Header, body: StageDone) -> None:
        """A stage has finished its present attempt."""

    def ended(self, request_id: str, error: OmniError | None) -> None:
        """An admitted request has ended, exactly once; `error` is `None` if it is done."""
