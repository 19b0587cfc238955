"""Makes the chat messages of a response from the items of its conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from omni_actors.http_server.realtime.call_items import CallItem, ResultItem
from omni_actors.http_server.realtime.items import Item

AnyItem = Item | CallItem | ResultItem


def prompt_of(instructions: str, items: Iterable[AnyItem]) -> Sequence[dict[str, Any]]:
    """The messages, as the client library takes them.

    Calls belong to the assistant's message before them. A result whose call was dropped is left out.
    """
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case Item():
                parts = [part.prompt() for part in item.parts if part.text or part.audio]
                if parts:
                    messages.append({"role": item.role, "content": parts})
            case CallItem():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": item.call_id, "name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append(call)
                called.add(item.call_id)
            case ResultItem():
                if item.call_id in called:
                    messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    return messages
