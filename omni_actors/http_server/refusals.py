"""Answers in place of the application's, to what never reaches it."""

from __future__ import annotations

from omni_actors.http_server.errors import HttpError

REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def refusal(status: int, message: str, code: str) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    response = HttpError(status, message, code=code).response()
    headers = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\n{headers}connection: close\r\n\r\n"
    return head.encode() + bytes(response.body)
