"""Messages that travel on several channels."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError
from omni_actors.protocol.fields import Count
from omni_actors.protocol.header import Body

MAX_MESSAGE, MAX_HINT, MAX_FIELD = 8192, 2048, 256  # characters


class Credit(Body, tag="credit", frozen=True):
    """Receiver -> sender of an edge: you may send this much more. Credit itself costs no credit.

    A sender starts with the window of the configuration (`flow`). `bytes` are of frames, without arena blocks.
    `released` are the tickets of arena blocks that the receiver no longer needs. `mapped` says that it can read the
    sender's arena, so that blocks may be sent to it.
    """

    messages: Count = 0
    bytes: Count = 0
    released: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()
    mapped: bool = False


class Abort(Body, tag="abort", frozen=True):
    """Client -> coordinator, coordinator -> stage: end the request named in the header. Idempotent."""


class Failed(Body, tag="failed", frozen=True):
    """Stage -> coordinator -> client, terminal: the request ended with an error.

    `retry_after` is in seconds; `field` names the field of the request that is wrong.
    """

    code: ErrorCode
    message: Annotated[str, Meta(max_length=MAX_MESSAGE)]
    hint: Annotated[str, Meta(max_length=MAX_HINT)] = ""
    stage: str | None = None
    retryable: bool = False
    retry_after: float | None = None
    field: Annotated[str, Meta(max_length=MAX_FIELD)] | None = None

    @classmethod
    def from_error(cls, error: OmniError, stage: str | None = None) -> Failed:
        """Describe an error; `stage` is used if the error names none. Long texts are cut."""
        return cls(
            code=error.code,
            message=error.message[:MAX_MESSAGE],
            hint=error.hint[:MAX_HINT],
            stage=error.stage or stage,
            retryable=error.retryable,
            retry_after=error.retry_after,
            field=error.field[:MAX_FIELD] if error.field is not None else None,
        )

    def to_error(self) -> OmniError:
        """Return the typed exception that this message stands for."""
        return ERROR_CLASSES[self.code](
            self.message, hint=self.hint, stage=self.stage, retry_after=self.retry_after, field=self.field
        )
