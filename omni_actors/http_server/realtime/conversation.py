"""The conversation of a session: its items in order, bounded."""

from __future__ import annotations

from collections.abc import Iterator

from omni_actors.http_server.chat_messages import MAX_MESSAGES
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fields import MAX_TEXT
from omni_actors.http_server.realtime.items import Weight
from omni_actors.http_server.realtime.prompts import AnyItem
from omni_actors.http_server.realtime.session_config import BYTES_PER_SECOND

FIRST = "root"  # `previous_item_id` of an item that is to be the first


class Conversation:
    """Items that the model is shown. When they become too many, the oldest are dropped.

    Args:
        audio_seconds: sound of all items together.
        max_audios: pieces of sound; `None` for no limit.
    """

    def __init__(self, audio_seconds: float, max_audios: int | None) -> None:
        self._audio_seconds = audio_seconds
        self._max_audios = max_audios
        self._items: list[AnyItem] = []
        self._weights: dict[str, Weight] = {}
        self._total = Weight()

    def __iter__(self) -> Iterator[AnyItem]:
        return iter(self._items)

    @property
    def size(self) -> int:
        """Characters and bytes of sound of all items."""
        return self._total.characters + self._total.audio_bytes

    @property
    def audio_bytes(self) -> int:
        """Bytes of sound of all items."""
        return self._total.audio_bytes

    @property
    def last_id(self) -> str | None:
        """Id of the newest item."""
        return self._items[-1].id if self._items else None

    def find(self, item_id: str) -> AnyItem:
        """An item. Raises `HttpError` 404."""
        for item in self._items:
            if item.id == item_id:
                return item
        raise HttpError(404, f"The conversation has no item {item_id!r}.", param="item_id", code="item_not_found")

    def add(self, item: AnyItem, after: str | None = None) -> str | None:
        """Insert an item, at the end by default; returns the id of the one before it. Raises `HttpError`."""
        if any(other.id == item.id for other in self._items):
            raise bad_field("item.id", f"The conversation has an item {item.id!r} already.", "item_exists")
        if self._exceeds(item.weight, 1):
            message = f"The conversation is limited to {self._audio_seconds:g} s of audio and {MAX_TEXT} characters."
            raise HttpError(413, message, param="item", code="item_too_large")
        index = len(self._items)
        if after == FIRST:
            index = 0
        elif after is not None:
            index = self._items.index(self._before(after)) + 1
        self._items.insert(index, item)
        self._weights[item.id] = Weight()
        self.weigh(item)
        return self._items[index - 1].id if index else None

    def has_room(self, item: AnyItem) -> bool:
        """Whether no item would be dropped for a further one."""
        return not self._exceeds(self._total + item.weight, len(self._items) + 1)

    def remove(self, item_id: str) -> None:
        """Remove an item. Raises `HttpError` 404."""
        self._items.remove(self.find(item_id))
        self._total -= self._weights.pop(item_id)

    def weigh(self, item: AnyItem) -> None:
        """Count an item again, when its content has changed. An item that was removed counts nothing."""
        if item.id in self._weights:
            self._total += item.weight - self._weights[item.id]
            self._weights[item.id] = item.weight

    def drop_oldest(self) -> list[str]:
        """Drop items until the bounds hold; returns their ids. The newest item always stays."""
        dropped = []
        while len(self._items) > 1 and self._exceeds(self._total, len(self._items)):
            dropped.append(self._items[0].id)
            self.remove(dropped[-1])
        return dropped

    def drop_half(self) -> list[str]:
        """Drop the older half of the user's turns with their answers; returns the ids, none if there is one turn."""
        turns = [index for index, item in enumerate(self._items) if item.role == "user"]
        if len(turns) < 2:
            return []
        kept = turns[(len(turns) + 1) // 2]
        dropped = [item.id for item in self._items[:kept] if item.role != "system"]
        for item_id in dropped:
            self.remove(item_id)
        return dropped

    def _before(self, item_id: str) -> AnyItem:
        try:
            return self.find(item_id)
        except HttpError as error:
            error.param = "previous_item_id"
            raise

    def _exceeds(self, weight: Weight, items: int) -> bool:
        return (
            items > MAX_MESSAGES
            or weight.characters > MAX_TEXT
            or weight.audio_bytes > self._audio_seconds * BYTES_PER_SECOND
            or (self._max_audios is not None and weight.audios > self._max_audios)
        )
