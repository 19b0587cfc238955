"""Answers in place of the application's, to what never reaches it."""

from __future__ import annotations

import msgspec

from omni_actors.http_server.errors import HttpError

REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def refusal(status: int, message: str, code: str) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    body = msgspec.json.encode(HttpError(status, message, code=code).body())
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
