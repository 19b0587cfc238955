"""Every error a user of omni_actors can meet: a code, who is at fault, whether a retry can help, and what to do next.

The codes are part of the wire protocol (`docs/protocol.md`): clients switch on them, so they are never renamed.
`docs/troubleshooting.md` has a section on each.
"""

from __future__ import annotations

import enum
from typing import Any, ClassVar


class ErrorCode(enum.StrEnum):
    """Stable names of failures. Each has a class below, whose text says what happened."""

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
    NOBODY = "nobody"


ERROR_CLASSES: dict[ErrorCode, type[OmniError]] = {}  # filled by the classes that give a code


class OmniError(Exception):
    """Base of all errors. `str(error)` is the message followed by the hint, ready to show to a person.

    A subclass with a code of its own names it, who is at fault, whether the same request may succeed later, and what
    to do next.

    Args:
        message: what happened, with the offending values.
        hint: what to do next; each class has a default.
        stage: name of the stage where it happened, if any.
        retry_after: seconds after which a retry is sensible, for `Overloaded`.
    """

    code: ClassVar[ErrorCode] = ErrorCode.ENGINE_ERROR
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "See the stage's log for the cause."

    def __init_subclass__(
        cls,
        code: ErrorCode | None = None,
        fault: Fault | None = None,
        hint: str = "",
        retryable: bool = False,
        **rest: Any,
    ) -> None:
        super().__init_subclass__(**rest)
        if code is None:
            return  # a finer class under the code of its base
        cls.code, cls.fault, cls.retryable = code, fault or cls.fault, retryable
        cls.default_hint = hint or cls.default_hint
        ERROR_CLASSES[code] = cls

    def __init__(
        self, message: str, *, hint: str | None = None, stage: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.stage = stage
        self.retry_after = retry_after

    def __str__(self) -> str:
        place = f"[{self.stage}] " if self.stage else ""
        return f"{place}{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.stage, self.retry_after))


def _rebuild(cls: type[OmniError], message: str, hint: str, stage: str | None, retry_after: float | None) -> OmniError:
    return cls(message, hint=hint, stage=stage, retry_after=retry_after)


class InvalidRequest(
    OmniError,
    code=ErrorCode.INVALID_REQUEST,
    fault=Fault.CALLER,
    hint="Change the request as the message says; a retry of the same request fails again.",
):
    """The request contradicts itself or lacks something."""


class InvalidPayload(
    OmniError,
    code=ErrorCode.INVALID_PAYLOAD,
    fault=Fault.CALLER,
    hint="Send the shape, dtype and size that the message names.",
):
    """Shape, dtype, size or exclusivity of a payload is wrong."""


class PromptTooLong(
    OmniError,
    code=ErrorCode.PROMPT_TOO_LONG,
    fault=Fault.CALLER,
    hint="Shorten the prompt or its media, or ask for fewer tokens.",
):
    """The prompt, with its media, has more tokens than a stage takes."""


class UnknownVoice(OmniError, code=ErrorCode.UNKNOWN_VOICE, fault=Fault.CALLER, hint="Choose one of the voices named."):
    """No stage has the voice asked for."""


class UnknownModality(
    OmniError, code=ErrorCode.UNKNOWN_MODALITY, fault=Fault.CALLER, hint="Choose among the modalities named."
):
    """The pipeline does not answer in the modality asked for."""


class MalformedMedia(
    OmniError, code=ErrorCode.MALFORMED_MEDIA, fault=Fault.CALLER, hint="Send the medium again in a supported form."
):
    """An audio, image or video cannot be read."""


class Overloaded(
    OmniError, code=ErrorCode.OVERLOADED, fault=Fault.CALLER, retryable=True, hint="Try again after the time given."
):
    """As many requests are in flight, or as many bytes are held, as may be."""


class SlowClient(
    OmniError,
    code=ErrorCode.SLOW_CLIENT,
    fault=Fault.CALLER,
    retryable=True,
    hint="Read answers as they come, or ask for fewer at a time.",
):
    """Too much of the answer waited unread."""


class DeadlineExceeded(
    OmniError, code=ErrorCode.DEADLINE_EXCEEDED, fault=Fault.CALLER, hint="Allow more time, or ask for fewer tokens."
):
    """The request's deadline passed before its answer was whole."""


class Aborted(OmniError, code=ErrorCode.ABORTED, fault=Fault.NOBODY, hint="The request was ended by its owner."):
    """The caller ended the request, or went away."""


class StageUnavailable(
    OmniError,
    code=ErrorCode.STAGE_UNAVAILABLE,
    fault=Fault.OPERATOR,
    retryable=True,
    hint="Ask only for modalities whose stages are up, or try again when the stage is back.",
):
    """A stage that the request needs is down."""


class StageLost(
    OmniError, code=ErrorCode.STAGE_LOST, fault=Fault.OPERATOR, retryable=True, hint="Send the request again."
):
    """A stage died while it held the request, and it could not be made up for."""


class Poison(
    OmniError,
    code=ErrorCode.POISON,
    fault=Fault.OPERATOR,
    hint="Do not send it again; the logs of the replicas named tell what it did to them.",
):
    """Several replicas of a stage died while they computed the request."""


class EngineError(OmniError, code=ErrorCode.ENGINE_ERROR, fault=Fault.OPERATOR):
    """The model failed on the request."""


class ProtocolError(
    OmniError,
    code=ErrorCode.PROTOCOL_ERROR,
    fault=Fault.DEVELOPER,
    hint="Run the same omni_actors version on both sides.",
):
    """Peers are of different versions, or one of them is broken."""


class ConfigError(
    OmniError,
    code=ErrorCode.CONFIG_ERROR,
    fault=Fault.OPERATOR,
    hint="Correct the configuration; `--check` validates it without starting anything.",
):
    """The pipeline's configuration, or an option of a command, is wrong."""


class StartupError(
    OmniError, code=ErrorCode.STARTUP_ERROR, fault=Fault.OPERATOR, hint="The log tail above names the cause."
):
    """A stage did not become ready."""


class RequestTimeout(
    OmniError,
    code=ErrorCode.TIMEOUT,
    fault=Fault.CALLER,
    retryable=True,
    hint="Check that the coordinator runs and that the endpoint is right.",
):
    """The coordinator did not answer in time."""


class Unauthorized(
    OmniError, code=ErrorCode.UNAUTHORIZED, fault=Fault.OPERATOR, hint="Compare the folders of keys on both sides."
):
    """Keys are missing, wrong or not allowed, or do not allow what was asked for."""
