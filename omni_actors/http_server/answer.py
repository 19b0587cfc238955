"""A pipeline request on behalf of an HTTP request. When the HTTP client goes away, it ends in all stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_actors.client import Audio, ChoiceItem, ChoiceStreams, StreamItem
from omni_actors.errors import Aborted, OmniError
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.fields import Submission
from omni_actors.http_server.shares import Turns
from omni_actors.http_server.state import ServerState
from omni_actors.logs import get_logger
from omni_actors.protocol.client import Description
from omni_actors.protocol.payloads import PositionLogprobs, PromptPosition, TokenLogprob
from omni_actors.protocol.results import StageUsage

logger = get_logger(__name__)

PICTURES = ("image", "latents")  # modalities
EVENTS = "text/event-stream"
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's value
JOINED_BYTES = 65_536  # of ready pieces that wait for one write


class Answer:
    """Iterates over the `Text` and `Audio` of an answer, or with `choices` over those of several answers to one prompt.

    Make it with `begin`, and always `close` it.

    `begin` awaits the first item before anything is sent to the client, so that an early failure is a plain HTTP status
    and not an error inside a stream.
    """

    def __init__(self, streams: ChoiceStreams, request: Request, fields: Mapping[str, str], turns: Turns) -> None:
        self._streams = streams
        self._fields = fields
        self._turns = turns
        self._first: list[ChoiceItem] = []
        self.before_waiting: Callable[[], Awaitable[None]] = _nothing
        """Is awaited before the iteration waits for an item that has not arrived."""
        self._watch = asyncio.create_task(self._abort_when_gone(request), name="watch for disconnect")

    @classmethod
    async def begin(
        cls,
        request: Request,
        state: ServerState,
        body: Submission,
        prompt: Any,
        fields: Mapping[str, str],
        **options: Any,
    ) -> Answer:
        """Submit a request and wait for its first item. Raises `HttpError`.

        The pipeline's request has the id and the trace context of the HTTP request, so that their logs can be joined.

        Args:
            body: seed, timeout and priority.
            fields: the field of the HTTP request that is at fault, by error code or by name in the pipeline.
            options: for `AsyncOmniClient.submit_choices`.
        """
        try:
            streams = await state.client.submit_choices(
                prompt,
                options.pop("n", 1),
                seed=body.seed,
                timeout=state.settings.request_timeout if body.timeout is None else body.timeout,
                priority=body.priority or 0,
                request_id=request.state.request_id,
                traceparent=request.state.traceparent,
                tenant=state.tenants.name(request.client.host if request.client is not None else ""),
                **options,
            )
        except OmniError as error:
            raise HttpError.of(error, fields) from error
        answer = cls(streams, request, fields, state.turns)
        try:
            async for item in answer.choices():
                answer._first.append(item)
                break
        except BaseException:  # a cancelled task's, too: a client that goes away early must not leave its request
            await answer.close()
            raise
        return answer

    @property
    def usage(self) -> dict[str, StageUsage]:
        """Usage of the first answer by stage, complete when the iteration has ended."""
        return self.usages[0]

    @property
    def usages(self) -> list[dict[str, StageUsage]]:
        """Usage of each answer by stage. That of an answer is complete when its last item was `None`."""
        return self._streams.usages

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        """Yield the items of the only answer. Raises `HttpError` if the request fails."""
        async for _, item in self.choices():
            if item is not None:
                yield item

    async def choices(self) -> AsyncIterator[ChoiceItem]:
        """Yield the items of all answers, sound when it has its turn. Raises `HttpError` if one of them fails."""
        try:
            while self._first:
                yield self._first.pop()
            while True:
                if not self._streams.ready:
                    await self.before_waiting()
                try:
                    found = await anext(self._streams)
                except StopAsyncIteration:
                    return
                if isinstance(found.item, Audio):
                    await self._turns.take()
                yield found
        except OmniError as error:
            raise HttpError.of(error, self._fields) from error

    async def close(self) -> None:
        """End the request in every stage, unless it has ended. Idempotent."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._streams.abort()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _abort_when_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue
        logger.info("the client went away", extra={"request_id": self._streams.streams[0].request_id})
        await self._streams.abort()


class AnswerResponse(Response):
    """Sends the pieces of an answer as they arrive, those that are ready at once in one write; closes it at the end.

    Args:
        pieces: bytes to send. An `HttpError` becomes the last event of `EVENTS`. In other formats the connection is
            cut, so that the client does not mistake a part for the whole.
        write_timeout: seconds for which the client may leave a piece unread before its request is ended.
    """

    def __init__(self, answer: Answer, pieces: AsyncIterator[bytes], media_type: str, write_timeout: float) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"  # nginx would hold the stream back
        self._answer = answer
        self._pieces = pieces
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and the pieces; close the answer at the end, and when the client stops reading."""
        about = {"request_id": scope["state"]["request_id"]}
        held: list[bytes] = []
        held_bytes = 0

        async def flush() -> None:
            nonlocal held_bytes
            if not held:
                return
            body = b"".join(held)
            held.clear()
            held_bytes = 0
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        self._answer.before_waiting = flush
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._pieces:
                held.append(piece)
                held_bytes += len(piece)
                if held_bytes >= JOINED_BYTES:
                    await flush()
            await send({"type": "http.response.body", "body": b"".join(held), "more_body": False})
        except TimeoutError:
            logger.warning("the client does not read; its request is aborted", extra=about)
        except HttpError as error:
            if self.media_type == EVENTS:
                held.append(event(error.body()))
                await send({"type": "http.response.body", "body": b"".join(held), "more_body": False})
            elif error.code != Aborted.code:
                logger.warning("response cut short: %s", error.code, extra=about)
        finally:
            await self._answer.close()


def text_or_sound(modalities: Sequence[str] | None, audio: object) -> list[str]:
    """The modalities of an answer that is a message.

    Args:
        audio: how it is to be spoken, if the request says so.

    Raises:
        HttpError: they are those of pictures, or `audio` is given for an answer that is not spoken.
    """
    for modality in modalities or ():
        if modality in PICTURES:
            message = "A message has no pictures: ask /v1/images/generations for them."
            raise bad_field("modalities", message, "unknown_modality")
    if audio is not None and "audio" not in (modalities or ()):
        raise bad_field("audio", 'audio needs "audio" among the modalities: modalities: ["text", "audio"].')
    return list(modalities or ["text"])


async def _nothing() -> None:
    """Nothing has to be done before waiting."""


def event(data: Any) -> bytes:
    """A server-sent event with JSON data; bytes become base64."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE_EVENT = b"data: [DONE]\n\n"


def usage_of(usage: Mapping[str, StageUsage], description: Description) -> dict[str, Any]:
    """OpenAI's usage, from the usage of the stages.

    Prompt tokens are those that the text stage read; completion tokens are those that it wrote plus the audio tokens.
    `stages` is an extension; its seconds count from the moment at which the request was opened in all stages.
    """
    text_stage = description.outputs.get("text", "")
    text = usage.get(text_stage)
    order = list(dict.fromkeys(status.stage for status in description.stages))
    speaker = _speaker(order, text_stage, description.outputs.get("audio", ""))
    audio_tokens = usage[speaker].output_tokens if speaker in usage else 0
    prompt_tokens = text.input_tokens if text else 0
    text_tokens = text.output_tokens if text else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": text_tokens + audio_tokens,
        "total_tokens": prompt_tokens + text_tokens + audio_tokens,
        "completion_tokens_details": {"text_tokens": text_tokens, "audio_tokens": audio_tokens},
        "stages": {
            stage: {
                "finish_reason": usage[stage].finish_reason.value,
                "input_tokens": usage[stage].input_tokens,
                "output_tokens": usage[stage].output_tokens,
                "first_output": round(usage[stage].first_output, 4),
                "finished": round(usage[stage].finished, 4),
            }
            for stage in order
            if stage in usage
        },
    }


def usage_of_choices(usages: Sequence[Mapping[str, StageUsage]], description: Description) -> dict[str, Any]:
    """OpenAI's usage of one or several answers to a prompt, whose tokens count once.

    What the stages did for the answers is added up, and their seconds are those of the first and of the last of them.
    """
    whole, *others = [usage_of(usage, description) for usage in usages]
    for other in others:
        for name, count in other["completion_tokens_details"].items():
            whole["completion_tokens_details"][name] += count
        whole["completion_tokens"] += other["completion_tokens"]
        whole["total_tokens"] += other["completion_tokens"]
        for stage, did in other["stages"].items():
            whole["stages"][stage] = _added(whole["stages"].get(stage), did)
    return whole


def _added(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    if one is None:
        return other
    return {
        "finish_reason": "length" if "length" in (one["finish_reason"], other["finish_reason"]) else "stop",
        "input_tokens": one["input_tokens"] + other["input_tokens"],
        "output_tokens": one["output_tokens"] + other["output_tokens"],
        "first_output": min(one["first_output"], other["first_output"]),
        "finished": max(one["finished"], other["finished"]),
    }


def token_counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """The counts of a `usage_of`, as OpenAI's newer routes name them."""
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
    return {newer: usage[older] for newer, older in names.items()}


def _speaker(order: list[str], text_stage: str, audio_stage: str) -> str:
    """The stage that writes audio tokens, or "": the one after the text stage, or without text, before the audio stage.

    Later stages up to the audio stage count steps or pieces, not tokens.
    """
    if audio_stage not in order:
        return ""
    if text_stage not in order:
        return order[order.index(audio_stage) - 1] if order.index(audio_stage) else ""
    between = order[order.index(text_stage) + 1 : order.index(audio_stage)]
    return between[0] if between else ""


GOES_ON: dict[str, Any] = {"finish_reason": None, "stop_reason": None}  # of a choice that has not ended


def finish_reason(usage: Mapping[str, StageUsage], description: Description) -> str:
    """The finish reason of the stage that produces text: "stop" or "length"."""
    text = usage.get(description.outputs.get("text", ""))
    return text.finish_reason.value if text is not None else "stop"


def ending(usage: Mapping[str, StageUsage], description: Description) -> dict[str, Any]:
    """How a choice ended: OpenAI's `finish_reason`, and vLLM's `stop_reason`."""
    text = usage.get(description.outputs.get("text", ""))
    stop = text.stop_reason if text is not None else None
    return {"finish_reason": finish_reason(usage, description), "stop_reason": stop}


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
    """The `logprobs` of a chat completion's choice; `None` without any."""
    if not positions:
        return None
    return {"content": token_logprobs(positions), "refusal": None}


def token_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    """An entry for each token, as chats and responses have it."""
    return [
        {**_entry(position.token), "top_logprobs": [_entry(token) for token in position.top]} for position in positions
    ]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.text.encode())}


def prompt_logprobs(positions: Sequence[PromptPosition]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id at each position, the prompt's own token first.

    The first position has none, as nothing comes before it.
    """
    found: list[dict[str, Any] | None] = [None]
    for position in positions:
        ranked = {str(token.token_id): _ranked(token, rank) for rank, token in enumerate(position.top, 1)}
        own = {str(position.token.token_id): _ranked(position.token, position.rank)}
        found.append({**own, **ranked})
    return found


def _ranked(token: TokenLogprob, rank: int) -> dict[str, Any]:
    return {"logprob": max(token.logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": token.text}
