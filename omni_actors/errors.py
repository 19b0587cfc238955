"""Every error a user of omni_actors can meet: a code, who is at fault, whether a retry can help, and what to do next.

The codes are part of the wire protocol (`docs/protocol.md`): clients switch on them, so they never change.
`docs/troubleshooting.md` has a section on each.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


class ErrorCode(enum.StrEnum):
    """Stable names of failures. Each has a class below, whose docstring says what happened."""

    INVALID_REQUEST = "invalid_request"
    INVALID_PAYLOAD = "invalid_payload"
    PROMPT_TOO_LONG = "prompt_too_long"
    UNKNOWN_VOICE = "unknown_voice"
    UNKNOWN_MODALITY = "unknown_modality"
    MALFORMED_MEDIA = "malformed_media"
    OVERLOADED = "overloaded"
    SLOW_CLIENT = "slow_client"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ABORTED = "aborted"
    STAGE_UNAVAILABLE = "stage_unavailable"
    STAGE_LOST = "stage_lost"
    POISON = "poison"
    ENGINE_ERROR = "engine_error"
    PROTOCOL_ERROR = "protocol_error"
    CONFIG_ERROR = "config_error"
    STARTUP_ERROR = "startup_error"
    TIMEOUT = "timeout"
    UNAUTHORIZED = "unauthorized"


class Fault(enum.StrEnum):
    """Who has to act."""

    CALLER = "caller"
    OPERATOR = "operator"
    DEVELOPER = "developer"
    NO_ONE = "no one"


ERROR_CLASSES: dict[ErrorCode, type[OmniError]] = {}  # filled by the classes that set a code


class OmniError(Exception):
    """Base of all errors. `str(error)` is the message followed by the hint, ready to show to a person.

    A class with its own code says who is at fault, whether the same request may succeed later, and what to do next.

    Args:
        message: what happened, with the offending values.
        hint: what to do next; the class's own hint by default.
        stage: name of the stage where it happened, if any.
        retry_after: seconds after which a retry is sensible, for `Overloaded`.
        field: name of the request's field that is wrong, such as "logit_bias", where it is a single one.
    """

    code: ClassVar[ErrorCode] = ErrorCode.ENGINE_ERROR
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "See the stage's log for the cause."

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "code" in cls.__dict__:  # else it is a finer class that shares the code of its base
            ERROR_CLASSES[cls.code] = cls

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        stage: str | None = None,
        retry_after: float | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.stage = stage
        self.retry_after = retry_after
        self.field = field

    def __str__(self) -> str:
        place = f"[{self.stage}] " if self.stage else ""
        return f"{place}{self.message} {self.hint}".strip()


class InvalidRequest(OmniError):
    """The request contradicts itself or lacks something."""

    code = ErrorCode.INVALID_REQUEST
    fault = Fault.CALLER
    default_hint = "Change the request as the message says; the same request would fail again."


class InvalidPayload(OmniError):
    """The shape, dtype or size of a tensor is wrong, or fields are set that exclude one another."""

    code = ErrorCode.INVALID_PAYLOAD
    fault = Fault.CALLER
    default_hint = "Send the shape, dtype and size that the message names."


class PromptTooLong(OmniError):
    """The prompt, including its media, has more tokens than a stage accepts."""

    code = ErrorCode.PROMPT_TOO_LONG
    fault = Fault.CALLER
    default_hint = "Shorten the prompt or its media, or request fewer tokens."


class UnknownVoice(OmniError):
    """No stage has the requested voice."""

    code = ErrorCode.UNKNOWN_VOICE
    fault = Fault.CALLER
    default_hint = "Choose one of the voices listed."


class UnknownModality(OmniError):
    """The pipeline cannot answer in the requested modality."""

    code = ErrorCode.UNKNOWN_MODALITY
    fault = Fault.CALLER
    default_hint = "Choose among the modalities listed."


class MalformedMedia(OmniError):
    """An audio, image or video file cannot be read."""

    code = ErrorCode.MALFORMED_MEDIA
    fault = Fault.CALLER
    default_hint = "Send it again in a supported format."


class Overloaded(OmniError):
    """The limit on requests in flight, or on the bytes held for them, is reached."""

    code = ErrorCode.OVERLOADED
    fault = Fault.CALLER
    retryable = True
    default_hint = "Try again after the time given."


class SlowClient(OmniError):
    """The client read its response too slowly."""

    code = ErrorCode.SLOW_CLIENT
    fault = Fault.CALLER
    retryable = True
    default_hint = "Read responses as they arrive, or request fewer at a time."


class DeadlineExceeded(OmniError):
    """The request's deadline passed before its response was complete."""

    code = ErrorCode.DEADLINE_EXCEEDED
    fault = Fault.CALLER
    default_hint = "Allow more time, or request fewer tokens."


class Aborted(OmniError):
    """The caller ended the request or disconnected."""

    code = ErrorCode.ABORTED
    fault = Fault.NO_ONE
    default_hint = "The caller ended the request; there is nothing to do."


class StageUnavailable(OmniError):
    """A stage that the request needs is down."""

    code = ErrorCode.STAGE_UNAVAILABLE
    retryable = True
    default_hint = "Request only modalities whose stages are up, or try again when the stage is back."


class StageLost(OmniError):
    """A stage died while it held the request, and the request could not be run again."""

    code = ErrorCode.STAGE_LOST
    retryable = True
    default_hint = "Send the request again."


class Poison(OmniError):
    """Several replicas of a stage died while they computed the request."""

    code = ErrorCode.POISON
    default_hint = "Do not send it again; the logs of the replicas named show what it did to them."


class EngineError(OmniError):
    """The model failed on the request."""

    code = ErrorCode.ENGINE_ERROR


class ModelOutputInvalid(EngineError):
    """The model computed NaN or infinite numbers."""

    default_hint = (
        "If all requests fail like this the weights are broken: compare the checkpoint's files with their source. If "
        "some do, the dtype may be too narrow for the model, or the device may be faulty."
    )


class ProtocolError(OmniError):
    """Two processes run different versions, or one of them has a bug."""

    code = ErrorCode.PROTOCOL_ERROR
    fault = Fault.DEVELOPER
    default_hint = "Run the same omni_actors version on both sides."


class ConfigError(OmniError):
    """The pipeline's configuration, or an option of a command, is wrong."""

    code = ErrorCode.CONFIG_ERROR
    default_hint = "Correct the configuration; `--check` validates it without starting anything."


class StartupError(OmniError):
    """A stage did not become ready."""

    code = ErrorCode.STARTUP_ERROR
    default_hint = "The log lines above name the cause."


class RequestTimeout(OmniError):
    """The coordinator did not answer in time."""

    code = ErrorCode.TIMEOUT
    fault = Fault.CALLER
    retryable = True
    default_hint = "Check that the coordinator is running and that the endpoint is right."


class Unauthorized(OmniError):
    """Keys are missing, wrong or not allowed, or do not permit the operation."""

    code = ErrorCode.UNAUTHORIZED
    default_hint = "Compare the key folders on both sides."


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the nearest known word, else a list of the known words."""
    known = sorted(known)
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if nearest:
        return f" Did you mean {nearest[0]!r}?"
    return f" Known: {', '.join(known)}." if known else ""


def counted(count: int, noun: str) -> str:
    """A count for messages: "1 answer", "2 answers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Return the state of a machine after `event`; raises `ProtocolError` where its table has none for `state`."""
    following = table.get((state, event))
    if following is None:
        raise ProtocolError(f"{event.value} cannot happen while {state.value}.")
    return following
