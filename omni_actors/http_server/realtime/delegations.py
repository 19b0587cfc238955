"""Work that the model of a Live session delegates: to the client, or to itself with the client's tools."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime import config
from omni_actors.http_server.realtime.config import Event, new_id

ANSWERED = {"failed": "failed", "incomplete": "incomplete"}  # else completed: what ends early was cut in its speech
NO_DETAILS = {
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}


class Delegations:
    """The delegations of one session.

    Args:
        send: sends an event to the client.
        now: the session's clock in ms.
    """

    def __init__(self, send: Callable[[Event], None], now: Callable[[], int]) -> None:
        self._send, self._now = send, now
        self.model = ""  # which answers
        self._calls: dict[str, str | None] = {}  # of delegations to the client, until there is a result
        self._open: set[str] = set()  # calls of the backend that have no result
        self._last: str | None = None  # the backend's last delegation
        self._continues = False  # the next answer goes on with it
        self._responses: dict[str, str | None] = {}  # delegations of the backend by response
        self._numbers = itertools.count()  # of the backend's events

    def to_client(self, call_id: str) -> Event:
        """Delegate a call to the client; returns the event that says so."""
        self._calls[delegation_id := new_id("dlg")] = call_id
        return self._created(delegation_id, "client")

    def result_of(self, delegation_id: str | None, answers: bool) -> str | None:
        """The call whose result is what the client says of a delegation; `None` if it has one, or needs none.

        Raises:
            HttpError: 400 for a delegation that was not made to the client.
        """
        if delegation_id is None:
            return None
        if delegation_id not in self._calls:
            message = f"The session has no delegation {delegation_id[:100]!r} to the client."
            raise bad_field("delegation_id", message, "delegation_not_found")
        if not answers:
            return None
        call_id, self._calls[delegation_id] = self._calls[delegation_id], None
        return call_id

    def add_result(self, call_id: str) -> None:
        """Note that a call of the backend has its result."""
        self._open.discard(call_id)

    def go_on(self) -> None:
        """Have the next answer be the backend's. Raises `HttpError` 400 while a result is missing."""
        if self._open:
            message = f"The backend waits for the results of {', '.join(self._open)}: send them first."
            raise HttpError(400, message, code="function_call_outputs_required")
        self._continues = True

    def begin(self, response: Mapping[str, Any]) -> None:
        """Take the beginning of an answer."""
        if self._continues:
            self._continues = False
            self._begin(response["id"])

    def item(self, response_id: str, index: int, item: Mapping[str, Any]) -> None:
        """Take an item of an answer where the session has a backend: a call is work that is delegated to it."""
        called = item["type"] == "function_call"
        if called:
            self._open.add(item["call_id"])
            if response_id not in self._responses:
                self._last = new_id("dlg")
                self._send(self._created(self._last, "responses", response_id=response_id))
                self._begin(response_id)
        if response_id in self._responses:
            shown = {name: value for name, value in item.items() if name != "object"}
            if not called:
                text = "".join(part.get("transcript") or part.get("text", "") for part in item["content"])
                shown["content"] = [{"type": "output_text", "text": text, "annotations": []}]
            self._tell(response_id, "response.output_item.done", output_index=index, item=shown)

    def end(self, response: Mapping[str, Any]) -> None:
        """Take the end of an answer."""
        response_id, status = response["id"], ANSWERED.get(response["status"], "completed")
        if response_id not in self._responses:
            return
        details, usage = response["status_details"] or {}, response["usage"]
        shown = self._response(response_id, status)
        if status == "failed":
            shown["error"] = {**details["error"], "message": "The answer failed: see the error before."}
        elif status == "incomplete":
            shown["incomplete_details"] = {"reason": details["reason"]}
        if usage:
            counts = {name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")}
            shown["usage"] = counts | NO_DETAILS
        self._tell(response_id, f"response.{status}", response=shown)
        del self._responses[response_id]

    def _begin(self, response_id: str) -> None:
        self._responses[response_id] = self._last
        self._tell(response_id, "response.created", response=self._response(response_id, "in_progress"))

    def _created(self, delegation_id: str, target: str, **fields: str) -> Event:
        delegation = {"id": delegation_id, "type": "delegation", "target": target, **fields}
        return config.event("session.delegation.created", offset_ms=self._now(), delegation=delegation)

    def _tell(self, response_id: str, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        self._send(config.event("response.event", delegation_id=self._responses[response_id], event=event))

    def _response(self, response_id: str, status: str) -> Event:
        about = {"object": "response", "created_at": int(time.time()), "model": self.model}
        return {"id": response_id, **about, "status": status, "output": []}
