"""The items of a conversation that are calls of tools, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from omni_actors.http_server.realtime.client_events import FunctionCall, FunctionCallOutput
from omni_actors.http_server.realtime.items import Weight
from omni_actors.http_server.realtime.server_events import new_id


@dataclass
class CallItem:
    """A call that the model has made."""

    call_id: str
    name: str = ""
    arguments: str = ""
    id: str = field(default_factory=lambda: new_id("item"))
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role = "assistant"

    @classmethod
    def of(cls, given: FunctionCall) -> CallItem:
        """Convert an item of a client, as of an earlier conversation."""
        return cls(given.call_id or new_id("call"), given.name, given.arguments, given.id or new_id("item"))

    @property
    def weight(self) -> Weight:
        """What it takes of a conversation's bounds."""
        return Weight(characters=len(self.name) + len(self.arguments))

    def shown(self, **_: bool) -> dict[str, Any]:
        """The item as clients see it."""
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


@dataclass
class ResultItem:
    """What a call has brought."""

    call_id: str
    output: str
    id: str
    role = "tool"

    @classmethod
    def of(cls, given: FunctionCallOutput) -> ResultItem:
        """Convert an item of a client."""
        return cls(given.call_id, given.output, given.id or new_id("item"))

    @property
    def weight(self) -> Weight:
        """What it takes of a conversation's bounds."""
        return Weight(characters=len(self.output))

    def shown(self, **_: bool) -> dict[str, Any]:
        """The item as clients see it."""
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": self.output,
        }
