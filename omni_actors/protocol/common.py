"""Messages that travel on more than one channel."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omni_actors.errors import ERROR_CLASSES, ErrorCode, OmniError
from omni_actors.protocol.fields import Count
from omni_actors.protocol.header import Body


class Credit(Body, tag="credit", frozen=True):
    """Receiver -> sender of an edge: you may send this much more. Itself it costs no credit.

    The sender starts with the window of the configuration (`flow`). `released` are tickets of arena blocks that the
    receiver needs no more; `mapped` says that it can read the sender's arena, so that blocks may be sent to it.
    """

    messages: Count = 0
    bytes: Count = 0
    released: Annotated[tuple[Count, ...], Meta(max_length=65536)] = ()
    mapped: bool = False


class Abort(Body, tag="abort", frozen=True):
    """Client -> coordinator, and coordinator -> stage: end the request named in the header. Idempotent."""


class Failed(Body, tag="failed", frozen=True):
    """Terminal, on every channel: the request ended with an error."""

    code: ErrorCode
    message: Annotated[str, Meta(max_length=8192)]
    hint: Annotated[str, Meta(max_length=2048)] = ""
    stage: str | None = None
    retryable: bool = False
    retry_after: float | None = None

    @classmethod
    def from_error(cls, error: OmniError, stage: str | None = None) -> Failed:
        return cls(
            code=error.code,
            message=error.message[:8192],
            hint=error.hint[:2048],
            stage=error.stage or stage,
            retryable=error.retryable,
            retry_after=error.retry_after,
        )

    def to_error(self) -> OmniError:
        """The typed exception that this message stands for."""
        return ERROR_CLASSES[self.code](self.message, hint=self.hint, stage=self.stage, retry_after=self.retry_after)
