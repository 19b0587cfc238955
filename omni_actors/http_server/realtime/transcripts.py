"""What is written down of the user's turns: the question about a turn's sound, and the events of the answer.

A turn that is no item of the conversation any more is not written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime import server_events as events
from omni_actors.http_server.realtime.conversation import Conversation
from omni_actors.http_server.realtime.items import Item

Events = Sequence[events.ServerEvent]


class Transcripts:
    """Of the turns of one conversation. The methods return the events to send, none for a turn that is gone."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def messages(self, item_id: str, question: str) -> Sequence[Mapping[str, Any]]:
        """The prompt that asks about a turn, empty if it is gone."""
        item = self._turn(item_id)
        if item is None:
            return ()
        return [{"role": "user", "content": [item.parts[0].prompt(), {"type": "text", "text": question}]}]

    def delta(self, item_id: str, text: str) -> Events:
        """The next text."""
        return [events.TurnDelta(item_id=item_id, delta=text)] if self._turn(item_id) is not None else ()

    def completed(self, item_id: str, text: str, usage: Mapping[str, Any]) -> Events:
        """The whole text, which the item keeps."""
        item = self._turn(item_id)
        if item is None:
            return ()
        item.parts[0].text = text
        self._conversation.weigh(item)
        return [events.TurnTranscribed(item_id=item_id, transcript=text, usage=dict(usage))]

    def failed(self, item_id: str, error: HttpError) -> Events:
        """There will be no text."""
        if self._turn(item_id) is None:
            return ()
        about = {"type": error.kind, "code": error.code, "message": error.message, "param": error.param}
        return [events.TurnNotTranscribed(item_id=item_id, error=about)]

    def _turn(self, item_id: str) -> Item | None:
        found = next((item for item in self._conversation if item.id == item_id), None)
        return found if isinstance(found, Item) else None
