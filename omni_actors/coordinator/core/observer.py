"""Who looks on while the coordinator decides. The decisions do not depend on it."""

from __future__ import annotations

from collections.abc import Sequence

from omni_actors.errors import OmniError
from omni_actors.protocol.client import Submit
from omni_actors.protocol.header import Header, ReplicaId
from omni_actors.protocol.results import AudioChunk, StageDone, TextDelta


class Observer:
    """Sees nothing; subclasses override what they want to see. No method may raise."""

    def refused(self, error: OmniError) -> None:
        """A request was not admitted."""

    def admitted(self, request_id: str, submit: Submit) -> None: ...

    def bound(self, request_id: str, attempt: int, route: tuple[ReplicaId, ...], begun: Sequence[str]) -> None:
        """An attempt is announced to the replicas of the stages `begun`; the others of the route go on as they were."""

    def replayed(self, request_id: str, error: OmniError, counts: bool) -> None:
        """The work of a stage is lost; it begins anew, with those that depend on it, as soon as they can be bound.

        `counts` is false for what follows from a loss that was told before.
        """

    def came(self, header: Header, body: TextDelta | AudioChunk) -> None:
        """Text or audio came from a stage, of the attempt that it works on."""

    def delivered(self, request_id: str, body: TextDelta | AudioChunk) -> None:
        """What of it is new was sent to the client."""

    def stage_done(self, header: Header, body: StageDone) -> None:
        """A stage has finished the attempt that it works on."""

    def ended(self, request_id: str, error: OmniError | None) -> None:
        """The one end of an admitted request; `None`: it is done."""
