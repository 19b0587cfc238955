"""Errors in OpenAI's format, `{"error": {"message", "type", "param", "code"}}`, with the status that clients expect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from omni_actors.errors import ERROR_CLASSES, ErrorCode, Fault, OmniError

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that went away; only the log shows it
RETRY_SECONDS = 1.0
STOPPING = "The server is stopping. Send the request again when it has been started, or to another server."

# Where the status does not follow from the fault. OpenAI's clients retry 408, 409, 429 and 5xx automatically.
STATUS: dict[ErrorCode, int] = {
    ErrorCode.OVERLOADED: 429,
    ErrorCode.SLOW_CLIENT: 429,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.ABORTED: CLIENT_CLOSED_REQUEST,
    ErrorCode.TIMEOUT: 503,  # to HTTP clients, a coordinator that does not answer is the server's fault
}
KINDS = {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    507: "server_error",
}


def status_of(code: ErrorCode) -> int:
    """The HTTP status of a pipeline error: 400 if the caller is at fault, 503 if a retry helps, else 500."""
    error = ERROR_CLASSES[code]
    if code in STATUS:
        return STATUS[code]
    if error.fault is Fault.CALLER:
        return 400
    return 503 if error.retryable else 500


class HttpError(Exception):
    """A response other than success.

    Args:
        param: the field of the request that is wrong, such as `messages[0].content[1].image_url.url`.
        code: a stable identifier for programs; an `ErrorCode` for errors of the pipeline.
        retry_after: seconds for the Retry-After header; `RETRY_SECONDS` by default where a retry may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = KINDS.get(status, "invalid_request_error")
        self.retry_after = RETRY_SECONDS if retry_after is None and status in (429, 503) else retry_after
        self.headers: dict[str, str] = {}  # further ones of the response

    @classmethod
    def of(cls, error: OmniError | HttpError, fields: Mapping[str, str] | None = None) -> HttpError:
        """Convert an error of the pipeline.

        Args:
            fields: the field of the HTTP request at fault, by the field that the error names, or else by its code.
        """
        if isinstance(error, HttpError):
            return error
        status = status_of(error.code)
        param = {"params": "stage_params", **(fields or {})}.get(error.field or error.code, error.field)
        return cls(status, str(error), param=param, code=error.code.value, retry_after=error.retry_after)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response, with the headers that belong to the status."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, headers, media_type="application/json")


def fields_at_fault(prompt: str, media: str, modality: str = "model", /, **others: str) -> dict[str, str]:
    """The field of a route's requests that is at fault, by error code or by name in the pipeline, for `HttpError.of`.

    Args:
        prompt, media, modality: the fields for what is too long, for files, and for what is to be made.
    """
    found: dict[str, str] = {ErrorCode.PROMPT_TOO_LONG: prompt, ErrorCode.MALFORMED_MEDIA: media}
    return {**found, ErrorCode.UNKNOWN_MODALITY: modality, **others}


def internal_error() -> HttpError:
    """Make the error 500 of what nobody has thought of, whose traceback the log has."""
    return HttpError(500, "Internal error: see the server's log.", code="internal_error")


def too_large(message: str, param: str | None = None, code: str = "media_too_large") -> HttpError:
    """Make an error 413."""
    return HttpError(413, message, param=param, code=code)


def bad_field(param: str, message: str, code: str = "invalid_value") -> HttpError:
    """Make an error 400 for one field."""
    return HttpError(400, message, param=param, code=code)
