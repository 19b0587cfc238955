"""The routes /v1/responses: OpenAI's newer form of a chat, in text, speech and calls of functions."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from omni_actors.http_server.answer import EVENTS, Answer, AnswerResponse, speech_of
from omni_actors.http_server.bodies import Strict, reserve
from omni_actors.http_server.errors import bad_field, fields_at_fault
from omni_actors.http_server.responses.events import END, Keep, ResponseReply, SentEvents
from omni_actors.http_server.responses.items import BODY, ResponsesRequest, turns_of
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.http_server.store import Journal, KeptResponse

OTHER_FIELDS = {"messages": "input", "prompt": "input", "structured_outputs": "text.format"}
OTHER_FIELDS["structured_outputs.json"] = "text.format.schema"
FIELDS = fields_at_fault("input", "input", "modalities", unknown_voice="audio.voice", **OTHER_FIELDS)
Conversation = list[dict[str, Any]]
SEED_BITS = 63
LAST_EVENT = "Last-Event-ID"
EVENT_ID = re.compile(r"[0-9]{1,15}")


class StreamHead(msgspec.Struct):
    """What the journal of a streamed response begins with: what it is made from again."""

    body: bytes
    created: int


class RetrieveQuery(Strict, frozen=True):
    """The query of GET /v1/responses/ID."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    include_obfuscation: bool | None = None  # without effect


async def create(request: Request, state: ServerState, body: ResponsesRequest) -> Response:
    """Answer in text, speech or calls of functions; complete or as server-sent events."""
    if body.stream and body.seed is None:
        body = msgspec.structs.replace(body, seed=secrets.randbits(SEED_BITS))
    sent = SentEvents(f"resp_{request.state.request_id}", int(time.time()))
    answer, reply, keep = await _begun(request, state, body, sent)
    if body.stream:
        pieces = reply.events(answer, keep)
        if body.store is not False:
            pieces = _written(pieces, state, sent, body)
        return AnswerResponse(answer, pieces, EVENTS, state.settings.write_timeout)
    async with answer:
        await reply.read(answer)
    return Response(await keep(), media_type="application/json")


async def _begun(
    request: Request, state: ServerState, body: ResponsesRequest, sent: SentEvents
) -> tuple[Answer, ResponseReply, Keep]:
    """Ask for an answer. Returns it with what makes a response of it, and what keeps that at its end, as JSON."""
    description, model = await state.model(body.model)
    form, options = speech_of(body.modalities, body.audio, body.stream, description, state)
    before = await _before(body, state)
    known = {call["id"] for message in before for call in message.get("tool_calls", ())}
    asked = await state.media.messages(turns_of(body.input), description.max_media, known)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    answer = await Answer.begin(
        request,
        state,
        body,
        {"messages": [*instructions, *before, *asked], **body.tool_options()},
        FIELDS,
        params=state.stage_params(body.model, body.params_by_stage(), description, body.stage_fields()),
        **options,
    )
    reply = ResponseReply(sent, model, form, body, description)

    async def keep() -> bytes:
        content = msgspec.json.encode(reply.object("completed"))
        if body.store is not False:
            conversation = [*before, *asked, reply.message()]
            size = _size(conversation)
            kept = KeptResponse(len(content), conversation, size)
            await asyncio.to_thread(state.responses.add, sent.id, kept, len(content) + size, content)
        return content

    return answer, reply, keep


async def _written(
    pieces: AsyncIterator[bytes], state: ServerState, sent: SentEvents, body: ResponsesRequest
) -> AsyncIterator[bytes]:
    """Write down the events of a stream before they are sent, so that any process can go on with it."""
    head = msgspec.json.encode(StreamHead(msgspec.json.encode(body), sent.created))
    journal = await asyncio.to_thread(state.streams.begin, sent.id, head + END)
    try:
        async for piece in pieces:
            if journal is not None:
                journal.append(piece)
            yield piece
    finally:
        if journal is not None:
            journal.close()


async def retrieve(request: Request, state: ServerState, query: RetrieveQuery, response_id: str) -> Response:
    """A response that is still kept; or the rest of its stream, also if the process that sent it has died."""
    if query.stream:
        return await _resumed(request, state, response_id, _last_event(request, query))
    if query.starting_after is not None:
        raise bad_field("starting_after", "starting_after needs stream=true.")
    found = await state.responses.get(response_id)
    headers = {"content-length": str(found.size)}
    return StreamingResponse(state.responses.pieces(response_id, found.size), 200, headers, "application/json")


def _last_event(request: Request, query: RetrieveQuery) -> int:
    """The number of the last event that the client has, -1 for none. Browsers repeat the URL and add the header."""
    given = request.headers.get(LAST_EVENT)
    if given is None:
        return -1 if query.starting_after is None else query.starting_after
    if not EVENT_ID.fullmatch(given):
        raise bad_field(LAST_EVENT, f"{LAST_EVENT} must be the id of an event of this stream: a number.")
    return int(given)


async def _resumed(request: Request, state: ServerState, response_id: str, after: int) -> Response:
    journal = await asyncio.to_thread(state.streams.find, response_id)
    if journal is None:
        await state.responses.get(response_id)
        message = f"The stream of {response_id[:100]!r} is not kept any more, or there was none: leave out stream."
        raise bad_field("stream", message, "response_not_resumable")
    pieces = _rest(request, state, response_id, journal, after)
    return AnswerResponse(None, pieces, EVENTS, state.settings.write_timeout)


async def _rest(
    request: Request, state: ServerState, response_id: str, journal: Journal, after: int
) -> AsyncIterator[bytes]:
    """The events after one: those in the journal and, as long as another process writes, those that it writes.

    If none does before the end, the answer is made again from the request, and what was sent of it is left out.
    """
    try:
        parts = journal.follow()
        head = msgspec.json.decode(await anext(parts), type=StreamHead)
        sent = SentEvents(response_id, head.created)
        async for part in parts:
            if sent.add(part) > after:
                yield part
            if sent.ended:
                return
        reserve(len(head.body))
        answer, reply, keep = await _begun(request, state, await asyncio.to_thread(BODY.decoded, head.body), sent)
        async with answer:
            async for piece in reply.events(answer, keep):
                if piece:
                    journal.append(piece)
                    yield piece
    finally:
        journal.close()


async def delete(request: Request, state: ServerState, response_id: str) -> Response:
    """Forget a response."""
    if (journal := await asyncio.to_thread(state.streams.find, response_id)) is not None:
        journal.remove()
        journal.close()
        await asyncio.to_thread(state.responses.remove, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})
    return json_response(await state.responses.delete(response_id))


def _size(value: Any) -> int:
    """Bytes of the texts and media in nested lists and mappings, with something for each container."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(_size(item) for item in value.values())
    if isinstance(value, list | tuple):
        return 64 + sum(_size(item) for item in value)
    return int(getattr(value, "nbytes", 8))


async def _before(body: ResponsesRequest, state: ServerState) -> Conversation:
    """The turns that the request continues. They are sent to the pipeline again, so they count as if in the body."""
    if body.previous_response_id is None:
        return []
    found = await asyncio.to_thread(state.responses.find, body.previous_response_id)
    if found is None:
        message = f"{state.responses.unknown(body.previous_response_id).message} Send its items again."
        raise bad_field("previous_response_id", message, "previous_response_not_found")
    reserve(found.conversation_bytes)
    return found.conversation
