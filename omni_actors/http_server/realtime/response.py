"""One answer: the events that its pieces become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from omni_actors.http_server.realtime.config import Event, SessionConfig, event, new_id
from omni_actors.http_server.realtime.conversation import CallItem, ItemPart, MessageItem, RealtimeConversation
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND, SoundEncoder
from omni_actors.protocol.payloads import ToolCallPiece

Status = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
Events = list[Event]


class RunningResponse:
    """The state of an answer from its creation to its end.

    Args:
        conversation: what the answer becomes part of; `None` for an answer aside from it.
        metadata: what the client gave to recognise it by.
    """

    def __init__(
        self, config: SessionConfig, conversation: RealtimeConversation | None, metadata: Mapping[str, str] | None
    ) -> None:
        self.id = new_id("resp")
        self.config = config
        self.item: MessageItem | None = None
        self._conversation = conversation
        self._metadata = metadata
        self._encoder = SoundEncoder(config.output_format.law, config.output_format.hertz)
        self._requests = 0
        self._output: list[MessageItem | CallItem] = []
        self._previous: dict[str, str | None] = {}  # the items before those that the conversation has, too
        self._calls: dict[int, CallItem] = {}

    @property
    def spoken(self) -> bool:
        """Whether the answer is sound with a transcript."""
        return self.config.output == "audio"

    def next_request_id(self) -> str:
        """An id for a request to the pipeline; the first one is the response's own."""
        self._requests += 1
        return self.id if self._requests == 1 else f"{self.id}-{self._requests}"

    def text(self, delta: str) -> Events:
        """The next text."""
        item, sent = self._begun()
        item.parts[0].text += delta
        kind = "output_audio_transcript" if self.spoken else "output_text"
        return [*sent, event(f"response.{kind}.delta", **self._ids(item), content_index=0, delta=delta)]

    def sound(self, pcm: bytes) -> Events:
        """The next sound."""
        item, sent = self._begun()
        item.parts[0].seconds += len(pcm) / BYTES_PER_SECOND
        return [*sent, *self._encoded(item, pcm)]

    def _encoded(self, item: MessageItem, pcm: bytes, last: bool = False) -> Events:
        data = self._encoder.encode(pcm, last)
        ids = {**self._ids(item), "content_index": 0}
        return [event("response.output_audio.delta", **ids, delta=data)] if data else []

    def call(self, piece: ToolCallPiece) -> Events:
        """The next piece of a call of a tool, which has an item of its own."""
        sent: Events = []
        if piece.index not in self._calls:
            made = CallItem(piece.id or new_id("call"), piece.name, status="in_progress")
            self._calls[piece.index] = made
            sent = self._added(made, made.shown())
        call = self._calls[piece.index]
        call.arguments += piece.arguments
        if piece.arguments:
            ids = {**self._ids(call), "call_id": call.call_id}
            sent.append(event("response.function_call_arguments.delta", **ids, delta=piece.arguments))
        return sent

    def end(
        self,
        status: Status,
        *,
        reason: str | None = None,
        error: Mapping[str, str | None] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> Events:
        """The last events; those of the item only if it had begun or the answer is complete."""
        sent = self._begun()[1] if status in ("completed", "incomplete") and not self._calls else []
        if self.item is not None:
            if self.item.parts[0].seconds and status in ("completed", "incomplete"):
                sent += self._encoded(self.item, b"", last=True)
            self.item.status = "completed" if status == "completed" else "incomplete"
            sent += [*self._end_part(self.item), *self._done(self.item)]
        for call in self._calls.values():
            sent += self._end_call(call) if status == "completed" else self._drop_call(call)
        details = None if status == "completed" else {"type": status, "reason": reason, "error": error}
        shown = self.shown(status, status_details=details, usage=usage)
        return [*sent, event("response.done", response=shown), event("rate_limits.updated", rate_limits=[])]

    def shown(
        self, status: Status, status_details: Any = None, usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The response as clients see it."""
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": status_details,
            "output": [item.shown() for item in self._output],
            "conversation_id": self._conversation.id if self._conversation is not None else None,
            "output_modalities": [self.config.output],
            "max_output_tokens": self.config.max_output_tokens,
            "audio": {"output": {"format": self.config.output_format, "voice": self.config.voice}},
            "metadata": self._metadata,
            "usage": usage,
        }

    # -- items --------------------------------------------------------------------------------------------------------

    def _ids(self, item: MessageItem | CallItem) -> dict[str, Any]:
        place = next(index for index, other in enumerate(self._output) if other is item)
        return {"response_id": self.id, "item_id": item.id, "output_index": place}

    def _added(self, item: MessageItem | CallItem, shown: Mapping[str, Any]) -> Events:
        """Make an item part of the output, and of the conversation."""
        self._output.append(item)
        place = {"response_id": self.id, "output_index": len(self._output) - 1}
        sent: Events = [event("response.output_item.added", **place, item=shown)]
        if self._conversation is not None:
            previous = self._previous[item.id] = self._conversation.add(item)
            sent.append(event("conversation.item.added", item=shown, previous_item_id=previous))
        return sent

    def _done(self, item: MessageItem | CallItem) -> Events:
        ids, shown = self._ids(item), item.shown()
        sent: Events = []
        if self._conversation is not None:
            self._conversation.weigh(item)
            sent.append(event("conversation.item.done", item=shown, previous_item_id=self._previous[item.id]))
        place = {"response_id": self.id, "output_index": ids["output_index"]}
        return [*sent, event("response.output_item.done", **place, item=shown)]

    def _begun(self) -> tuple[MessageItem, Events]:
        """The item; made with the first piece, so that an answer that fails before has none, with its first events."""
        if self.item is not None:
            return self.item, []
        part = ItemPart("output_audio" if self.spoken else "output_text")
        self.item = item = MessageItem(new_id("item"), "assistant", [part], "in_progress")
        sent = self._added(item, item.shown(with_parts=False))
        place = {**self._ids(item), "content_index": 0}
        return item, [*sent, event("response.content_part.added", **place, part=self._shown_part(""))]

    def _end_part(self, item: MessageItem) -> Events:
        ids, text = {**self._ids(item), "content_index": 0}, item.parts[0].text
        if self.spoken:
            sent: Events = [
                event("response.output_audio.done", **ids),
                event("response.output_audio_transcript.done", **ids, transcript=text),
            ]
        else:
            sent = [event("response.output_text.done", **ids, text=text)]
        return [*sent, event("response.content_part.done", **ids, part=self._shown_part(text))]

    def _end_call(self, call: CallItem) -> Events:
        call.status = "completed"
        whole = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        return [event("response.function_call_arguments.done", **self._ids(call), **whole), *self._done(call)]

    def _drop_call(self, call: CallItem) -> Events:
        """Take a call that is not complete out of the conversation: no result can belong to it."""
        call.status = "incomplete"
        if self._conversation is None or call not in self._conversation:
            return []
        self._conversation.remove(call.id)
        return [event("conversation.item.deleted", item_id=call.id)]

    def _shown_part(self, text: str) -> dict[str, str]:
        return {"type": "audio", "transcript": text} if self.spoken else {"type": "text", "text": text}
