"""Every error a user of omni_actors can meet: a code, who is at fault, whether a retry can help, and what to do next.

The codes are part of the wire protocol (`docs/protocol.md`): clients switch on them, so they never change.
`docs/troubleshooting.md` has a section on each.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeVar

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=str)


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

    def __init_subclass__(
        cls, code: ErrorCode | None = None, fault: Fault = Fault.OPERATOR, retryable: bool = False
    ) -> None:
        super().__init_subclass__()
        if code is not None:  # else it is a finer class, with what its base says
            cls.code, cls.fault, cls.retryable = code, fault, retryable
            ERROR_CLASSES[code] = cls

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


class InvalidRequest(OmniError, code=ErrorCode.INVALID_REQUEST, fault=Fault.CALLER):
    """The request contradicts itself or lacks something."""

    default_hint = "Change the request as the message says; the same request would fail again."


class InvalidPayload(OmniError, code=ErrorCode.INVALID_PAYLOAD, fault=Fault.CALLER):
    """The shape, dtype or size of a tensor is wrong, or fields are set that exclude one another."""

    default_hint = "Send the shape, dtype and size that the message names."


class PromptTooLong(OmniError, code=ErrorCode.PROMPT_TOO_LONG, fault=Fault.CALLER):
    """The prompt, including its media, has more tokens than a stage accepts."""

    default_hint = "Shorten the prompt or its media, or request fewer tokens."


class UnknownVoice(OmniError, code=ErrorCode.UNKNOWN_VOICE, fault=Fault.CALLER):
    """No stage has the requested voice."""

    default_hint = "Choose one of the voices listed."


class UnknownModality(OmniError, code=ErrorCode.UNKNOWN_MODALITY, fault=Fault.CALLER):
    """The pipeline cannot answer in the requested modality."""

    default_hint = "Choose among the modalities listed."


class MalformedMedia(OmniError, code=ErrorCode.MALFORMED_MEDIA, fault=Fault.CALLER):
    """An audio, image or video file cannot be read."""

    default_hint = "Send it again in a supported format."


class Overloaded(OmniError, code=ErrorCode.OVERLOADED, fault=Fault.CALLER, retryable=True):
    """The limit on requests in flight, or on the bytes held for them, is reached."""

    default_hint = "Try again after the time given."


class SlowClient(OmniError, code=ErrorCode.SLOW_CLIENT, fault=Fault.CALLER, retryable=True):
    """The client read its response too slowly."""

    default_hint = "Read responses as they arrive, or request fewer at a time."


class DeadlineExceeded(OmniError, code=ErrorCode.DEADLINE_EXCEEDED, fault=Fault.CALLER):
    """The request's deadline passed before its response was complete."""

    default_hint = "Allow more time, or request fewer tokens."


class Aborted(OmniError, code=ErrorCode.ABORTED, fault=Fault.NO_ONE):
    """The caller ended the request or disconnected."""

    default_hint = "The caller ended the request; there is nothing to do."


class StageUnavailable(OmniError, code=ErrorCode.STAGE_UNAVAILABLE, retryable=True):
    """A stage that the request needs is down."""

    default_hint = "Request only modalities whose stages are up, or try again when the stage is back."


class StageLost(OmniError, code=ErrorCode.STAGE_LOST, retryable=True):
    """A stage died while it held the request, and the request could not be run again."""

    default_hint = "Send the request again."


class Poison(OmniError, code=ErrorCode.POISON):
    """Several replicas of a stage died while they computed the request."""

    default_hint = "Do not send it again; the logs of the replicas named show what it did to them."


class EngineError(OmniError, code=ErrorCode.ENGINE_ERROR):
    """The model failed on the request."""


class ModelOutputInvalid(EngineError):
    """The model computed NaN or infinite numbers."""

    default_hint = (
        "If all requests fail like this the weights are broken: compare the checkpoint's files with their source. If "
        "some do, the dtype may be too narrow for the model, or the device may be faulty."
    )


class ProtocolError(OmniError, code=ErrorCode.PROTOCOL_ERROR, fault=Fault.DEVELOPER):
    """Two processes run different versions, or one of them has a bug."""

    default_hint = "Run the same omni_actors version on both sides."


class ConfigError(OmniError, code=ErrorCode.CONFIG_ERROR):
    """The pipeline's configuration, or an option of a command, is wrong."""

    default_hint = "Correct the configuration; `--check` validates it without starting anything."


class StartupError(OmniError, code=ErrorCode.STARTUP_ERROR):
    """A stage did not become ready."""

    default_hint = "The log lines above name the cause."


class RequestTimeout(OmniError, code=ErrorCode.TIMEOUT, fault=Fault.CALLER, retryable=True):
    """The coordinator did not answer in time."""

    default_hint = "Check that the coordinator is running and that the endpoint is right."


class Unauthorized(OmniError, code=ErrorCode.UNAUTHORIZED):
    """Keys are missing, wrong or not allowed, or do not permit the operation."""

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
        raise ProtocolError(f"{event} cannot happen while {state.value}.")
    return following
