"""Answers in place of the application's, to what never reaches it."""

from __future__ import annotations

import msgspec

from omni_actors.http_server.errors import KINDS, RETRY_SECONDS, HttpError

REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def refusal(status: int, message: str, code: str) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    error = HttpError(status, message, code=code, kind=KINDS.get(status, "invalid_request_error"))
    body = msgspec.json.encode(error.body())
    retry = f"retry-after: {RETRY_SECONDS:.0f}\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body
