"""An answer as a response of /v1/responses and as its events; what of them was sent before, where it is made again."""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from omni_actors.client import Audio, Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import Answer, WholeAnswer, finish_reason, token_counts, usage_of
from omni_actors.http_server.bodies import free_form
from omni_actors.http_server.encoders import encoded_base64, pcm16
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.generation import TextFormat, called_tool
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import ToolCallPiece

if TYPE_CHECKING:
    from omni_actors.http_server.responses import ResponsesRequest

REPEATED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")
Keep = Callable[[], Awaitable[bytes]]
DIFFERS = "The answer was made again and became another one, so the rest would not fit: send the request again."
END = b"\n\n"  # of an event
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
SOUND = "response.audio.delta"


class SentEvents:
    """What was sent of a response: nothing, unless its answer is made again.

    That brings the same texts and as much sound, but perhaps in other pieces and in another order. So events that come
    once are known by their type and place, and of deltas all that came of one type at one place.

    Args:
        response_id: id of the response.
        created: Unix time.
    """

    def __init__(self, response_id: str, created: int) -> None:
        self.id, self.created = response_id, created
        self.number = 0  # of the next event
        self.ended = False
        self._once: set[tuple[str, int]] = set()
        self._pieces: defaultdict[tuple[str, int], deque[Any]] = defaultdict(deque)
        self._calls: dict[str, str] = {}  # ids by that of their items

    def add(self, data: bytes) -> int:
        """Take an event that was sent. Returns its number."""
        event = msgspec.json.decode(data.partition(b"\ndata: ")[2])
        kind, number, item, delta = event["type"], event["sequence_number"], event.get("item"), event.get("delta")
        place = (kind, event.get("output_index", 0))
        if delta is None:
            self._once.add(place)
        else:
            self._pieces[place].append(base64.b64decode(delta) if kind == SOUND else delta)
        if item is not None and "call_id" in item:
            self._calls[item["id"]] = item["call_id"]
        self.number = number + 1
        self.ended = kind in ENDS
        return int(number)

    def call_id(self, item_id: str, made: str) -> str:
        """The id that the client knows a call by; that of one that is new was `made`."""
        return self._calls.get(item_id, made)

    def rest(self, kind: str, output_index: int = 0, delta: Any = None, **_: Any) -> Any:
        """What was not sent of an event: its delta, or whether there is one without; nothing if it was sent.

        Raises:
            HttpError: 500 if the answer has become another one. Sound is not compared: its last bits may differ.
        """
        place = (kind, output_index)
        if delta is None:
            return place not in self._once
        while (sent := self._pieces.get(place)) and delta:
            piece = sent.popleft()
            size = min(len(piece), len(delta))
            if kind != SOUND and piece[:size] != delta[:size]:
                raise HttpError(500, DIFFERS, code=ErrorCode.STAGE_LOST)
            if size < len(piece):
                sent.appendleft(piece[size:])
            delta = delta[size:]
        return delta


class ResponseReply:
    """Converts an answer to OpenAI's response and its events.

    Args:
        form: format of the sound of an answer that is spoken, `None` for others.
    """

    def __init__(
        self, sent: SentEvents, model: str, form: str | None, body: ResponsesRequest, description: Description
    ) -> None:
        self._sent = sent
        self._form = form
        self._body = body
        self._description = description
        self._model = model
        self._came = WholeAnswer()  # of a stream, all but the sound
        self._audio: msgspec.Raw | None = None
        self._usage: dict[str, Any] | None = None
        self._length = False  # whether the limit of tokens ended it

    async def read(self, answer: Answer) -> None:
        """Read the whole answer."""
        came = self._came
        async for item in answer:
            came.add(item)
        if self._form is not None and (came.pieces or not came.calls):
            self._audio = await encoded_base64(came.samples, self._form, self._description.sample_rate or 24_000)
        self._end(answer)

    def _end(self, answer: Answer) -> None:
        usage = usage_of(answer.usages, self._description)
        self._length = finish_reason(answer.usages[0], self._description) == "length"
        self._usage = {
            **token_counts(usage),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
            "stages": usage["stages"],
        }

    # -- objects ------------------------------------------------------------------------------------------------------

    def object(self, status: str, error: HttpError | None = None) -> dict[str, Any]:
        """The response as it stands; `status` as it is unless the limit of tokens ended it."""
        body = self._body
        status = "incomplete" if status == "completed" and self._length else status
        return {
            "id": self._sent.id,
            "object": "response",
            "created_at": self._sent.created,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: getattr(body, name) for name in REPEATED},
            "metadata": free_form(body.metadata, dict[str, str], "metadata") or {},
            "model": self._model,
            "output": self._output(status) if status in ("completed", "incomplete") else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "text": {"format": _plain((body.text and body.text.format) or TextFormat())},
            "tool_choice": body.tool_choice or "auto",
            "tools": _plain(body.tools or []),
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": self._usage,
        }

    def message(self) -> dict[str, Any]:
        """The answer as a message of the next turn."""
        items = [item for item in self._output("completed") if item["type"] == "function_call"]
        calls = [called_tool(item["call_id"], item["name"], item["arguments"]) for item in items]
        said = {"role": "assistant", "content": self._came.text}
        return {**said, "tool_calls": calls} if calls else said

    def _output(self, status: str) -> list[dict[str, Any]]:
        items = [self._message_item(status)] if self._has_message else []
        whole = self._came.calls.whole()
        return items + [self._call_item(index, call.id, call.name, call.arguments) for index, call in enumerate(whole)]

    @property
    def _has_message(self) -> bool:
        return not self._came.calls or any(self._came.texts)

    def _message_item(self, status: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if status != "in_progress":
            content.append(_text_part(self._came.text, self._came.logprobs))
        item: dict[str, Any] = {
            "id": f"msg_{self._sent.id[5:]}",
            "type": "message",
            "role": "assistant",
            "status": status,
        }
        item["content"] = content
        if self._audio is not None:  # OpenAI has no such field
            item["audio"] = {"data": self._audio, "transcript": self._came.text}
        return item

    def _call_item(
        self, index: int, call_id: str, name: str, arguments: str, status: str = "completed"
    ) -> dict[str, Any]:
        item_id = self._call_item_id(index)
        named = {"call_id": self._sent.call_id(item_id, call_id), "name": name, "arguments": arguments}
        return {"id": item_id, "type": "function_call", **named, "status": status}

    def _call_item_id(self, index: int) -> str:
        return f"fc_{self._sent.id[5:]}_{index}"

    # -- events -------------------------------------------------------------------------------------------------------

    async def events(self, answer: Answer, keep: Keep) -> AsyncIterator[bytes]:
        """Stream the events of an answer. A later failure becomes `response.failed` and `error`.

        Args:
            keep: awaited when the response is complete.
        """
        yield self._event("response.created", response=self.object("in_progress"))
        yield self._event("response.in_progress", response=self.object("in_progress"))
        opened = False  # the message
        sent = 0  # log probabilities
        came = self._came
        try:
            async for item in answer:
                if isinstance(item, Audio):
                    yield self._event("response.audio.delta", delta=pcm16(item.samples))
                if not isinstance(item, Text):
                    continue
                came.add(item)
                if item.text:
                    if not opened:
                        opened = True
                        yield self._open_message()
                    likely = came.logprobs[sent:]  # a token may end inside a character
                    sent = len(came.logprobs)
                    yield self._event("response.output_text.delta", **self._part, delta=item.text, logprobs=likely)
                    if self._form is not None:
                        yield self._event("response.audio.transcript.delta", delta=item.text)
                yield b"".join(map(self._call_events, item.tool_calls))
            self._end(answer)
        except HttpError as error:
            if error.code == ErrorCode.ABORTED:  # its client is gone, and may come back for the rest
                return
            about = {"code": error.code, "message": error.message, "param": error.param, **error.body()}
            failed = self._event("response.failed", response=self.object("failed", error))
            yield failed + self._event("error", **about)
            return
        if not opened and self._has_message:
            yield self._open_message()
        yield self._close()
        status = "incomplete" if self._length else "completed"
        yield self._event(f"response.{status}", response=msgspec.Raw(await keep()))

    @property
    def _part(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._sent.id[5:]}", "output_index": 0, "content_index": 0}

    def _open_message(self) -> bytes:
        item = self._message_item("in_progress")
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._event("response.content_part.added", **self._part, part=_text_part(""))

    def _call_events(self, piece: ToolCallPiece) -> bytes:
        """A call's begin, and its arguments. Calls end with the answer."""
        output_index = piece.index + (1 if any(self._came.texts) else 0)
        found = b""
        if piece.name:
            item = self._call_item(piece.index, piece.id, piece.name, "", "in_progress")
            found = self._event("response.output_item.added", output_index=output_index, item=item)
        if piece.arguments:
            where = {"item_id": self._call_item_id(piece.index), "output_index": output_index}
            found += self._event("response.function_call_arguments.delta", **where, delta=piece.arguments)
        return found

    def _close(self) -> bytes:
        """The ends of the message and of the calls."""
        found: list[bytes] = []
        status = "incomplete" if self._length else "completed"
        text, likely = self._came.text, self._came.logprobs
        if self._form is not None:
            found.append(self._event("response.audio.transcript.done"))
            found.append(self._event("response.audio.done"))
        for index, item in enumerate(self._output(status)):
            where = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                found.append(self._event("response.output_text.done", **self._part, text=text, logprobs=likely))
                found.append(self._event("response.content_part.done", **self._part, part=_text_part(text, likely)))
            else:
                named = {"arguments": item["arguments"], "name": item["name"]}
                found.append(self._event("response.function_call_arguments.done", **where, **named))
            found.append(self._event("response.output_item.done", output_index=index, item=item))
        return b"".join(found)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """An event, or what was not sent of it; empty if it was."""
        if not (rest := self._sent.rest(kind, **fields)):
            return b""
        if "delta" in fields:
            fields["delta"] = rest
        number, self._sent.number = self._sent.number, self._sent.number + 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, kind.encode(), data)


def _plain(value: Any) -> Any:
    """A copy in plain lists and mappings: the structs of a request hold parts of its body, and so all of it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _text_part(text: str, logprobs: Sequence[Raw] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
