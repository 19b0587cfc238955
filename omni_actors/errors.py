"""Every error a user of omni_actors can meet: a code, who is at fault, whether a retry can help, and what to do next.

The codes are part of the wire protocol (`docs/protocol.md`): clients switch on them, so they are never renamed.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class ErrorCode(enum.StrEnum):
    """Stable names of failures. The comment beside each says who has to act."""

    INVALID_REQUEST = "invalid_request"  # caller: the request contradicts itself or lacks something
    INVALID_PAYLOAD = "invalid_payload"  # sender of the payload: shape, dtype, size or exclusivity is wrong
    PROMPT_TOO_LONG = "prompt_too_long"  # caller: shorten the prompt
    UNKNOWN_VOICE = "unknown_voice"  # caller: choose one of the voices listed
    UNKNOWN_MODALITY = "unknown_modality"  # caller: choose one of the modalities listed
    MALFORMED_MEDIA = "malformed_media"  # caller: the audio, image or video cannot be read
    OVERLOADED = "overloaded"  # caller: wait and try again
    SLOW_CLIENT = "slow_client"  # caller: read what was asked for; too much of it waited unread
    DEADLINE_EXCEEDED = "deadline_exceeded"  # caller: allow more time or ask for less
    ABORTED = "aborted"  # nobody: the caller ended the request
    STAGE_UNAVAILABLE = "stage_unavailable"  # operator: a stage the request needs is down
    STAGE_LOST = "stage_lost"  # nobody: a stage died while it held the request; a retry may succeed
    POISON = "poison"  # operator: two replicas of a stage died while they held the request; look at it, do not retry
    ENGINE_ERROR = "engine_error"  # operator: the model failed on this request
    PROTOCOL_ERROR = "protocol_error"  # developer: peers of different versions, or a broken peer
    CONFIG_ERROR = "config_error"  # operator: the pipeline's configuration is wrong
    STARTUP_ERROR = "startup_error"  # operator: a stage did not become ready
    TIMEOUT = "timeout"  # caller: the peer did not answer in time


class OmniError(Exception):
    """Base of all errors. `str(error)` is the message followed by the hint, ready to show to a person.

    Args:
        message: what happened, with the offending values.
        hint: what to do next; each class has a default.
        stage: name of the stage where it happened, if any.
        retry_after: seconds after which a retry is sensible, for `Overloaded`.
    """

    code: ClassVar[ErrorCode] = ErrorCode.ENGINE_ERROR
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "See the stage's log for the cause."

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


class InvalidRequest(OmniError):
    code = ErrorCode.INVALID_REQUEST
    default_hint = "Change the request as the message says; a retry of the same request fails again."


class InvalidPayload(OmniError):
    code = ErrorCode.INVALID_PAYLOAD
    default_hint = "Send the shape, dtype and size that the message names."


class PromptTooLong(OmniError):
    code = ErrorCode.PROMPT_TOO_LONG
    default_hint = "Shorten the prompt or its media, or ask for fewer tokens."


class UnknownVoice(OmniError):
    code = ErrorCode.UNKNOWN_VOICE
    default_hint = "Choose one of the voices named."


class UnknownModality(OmniError):
    code = ErrorCode.UNKNOWN_MODALITY
    default_hint = "Choose among the modalities named."


class MalformedMedia(OmniError):
    code = ErrorCode.MALFORMED_MEDIA
    default_hint = "Send the medium again in a supported form."


class Overloaded(OmniError):
    code = ErrorCode.OVERLOADED
    retryable = True
    default_hint = "Try again after the time given."


class SlowClient(OmniError):
    code = ErrorCode.SLOW_CLIENT
    retryable = True
    default_hint = "Read answers as they come, or ask for fewer at a time."


class DeadlineExceeded(OmniError):
    code = ErrorCode.DEADLINE_EXCEEDED
    default_hint = "Allow more time, or ask for fewer tokens."


class Aborted(OmniError):
    code = ErrorCode.ABORTED
    default_hint = "The request was ended by its owner."


class StageUnavailable(OmniError):
    code = ErrorCode.STAGE_UNAVAILABLE
    retryable = True
    default_hint = "Ask only for modalities whose stages are up, or try again when the stage is back."


class StageLost(OmniError):
    code = ErrorCode.STAGE_LOST
    retryable = True
    default_hint = "Send the request again."


class Poison(OmniError):
    code = ErrorCode.POISON
    default_hint = "Do not send it again; the logs of the replicas named tell what it did to them."


class EngineError(OmniError):
    code = ErrorCode.ENGINE_ERROR


class ProtocolError(OmniError):
    code = ErrorCode.PROTOCOL_ERROR
    default_hint = "Run the same omni_actors version on both sides."


class ConfigError(OmniError):
    code = ErrorCode.CONFIG_ERROR
    default_hint = "Correct the configuration; `--check` validates it without starting anything."


class StartupError(OmniError):
    code = ErrorCode.STARTUP_ERROR
    default_hint = "The log tail above names the cause."


class RequestTimeout(OmniError):
    code = ErrorCode.TIMEOUT
    retryable = True
    default_hint = "Check that the coordinator runs and that the endpoint is right."


ERROR_CLASSES: dict[ErrorCode, type[OmniError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, InvalidPayload, PromptTooLong, UnknownVoice, UnknownModality, MalformedMedia, Overloaded,
        SlowClient, DeadlineExceeded, Aborted, StageUnavailable, StageLost, Poison, EngineError, ProtocolError,
        ConfigError, StartupError, RequestTimeout,
    )
}  # fmt: skip
