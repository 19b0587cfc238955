"""Answers of the pipeline as HTTP responses, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_actors.client import Audio, ChoiceItem, ChoiceStreams, StreamItem, Text
from omni_actors.errors import Aborted, OmniError
from omni_actors.host.processes import end_tasks
from omni_actors.http_server.bodies import Submission, reserve
from omni_actors.http_server.encoders import Samples, Tempo
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.generation import AudioParameters
from omni_actors.http_server.state import ServerState
from omni_actors.logs import get_logger
from omni_actors.protocol.messages import Description, FinishReason, StageUsage
from omni_actors.protocol.payloads import CollectedCalls, PositionLogprobs, PromptPosition, TokenLogprob

if TYPE_CHECKING:
    from omni_actors.http_server.speech.recital import Recital

logger = get_logger(__name__)

PICTURES = ("image", "latents")  # modalities
STREAM_FORMAT = "pcm16"  # of sound in events
EVENTS = "text/event-stream"
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's value
JOINED_BYTES = 65_536  # of ready pieces that wait for one write


def request_options(request: HTTPConnection, state: ServerState, body: Submission) -> dict[str, Any]:
    """What `AsyncOmniClient.submit` takes with each request that serves an HTTP request or a WebSocket."""
    return {
        "timeout": state.settings.request_timeout if body.timeout is None else body.timeout,
        "priority": body.priority or 0,
        "traceparent": request.state.traceparent,
        "tenant": state.tenant(request),
    }


class Answer:
    """Iterates over the `Text` and `Audio` of an answer, or with `choices` over those of several answers to one prompt.

    Make it with `begin`, and always `close` it.

    `begin` awaits the first item before anything is sent to the client, so that an early failure is a plain HTTP status
    and not an error inside a stream.
    """

    def __init__(
        self,
        streams: ChoiceStreams | Recital,
        request: Request,
        fields: Mapping[str, str],
        turns: asyncio.Lock,
        tempos: Sequence[Tempo] = (),
    ) -> None:
        self._streams = streams
        self._tempos = tempos  # of the choices; none if their sound stays as it is
        self._fields = fields
        self._turns = turns
        self._held: list[ChoiceItem] = []  # that come next
        # Is awaited before the iteration waits for an item that has not arrived.
        self.before_waiting: Callable[[], Awaitable[None]] = _nothing
        self._watch = asyncio.create_task(self._abort_when_gone(request), name="watch for disconnect")

    @classmethod
    async def begin(
        cls,
        request: Request,
        state: ServerState,
        body: Submission,
        prompt: Any,
        fields: Mapping[str, str],
        *,
        n: int = 1,
        speed: float = 1,
        **options: Any,
    ) -> Answer:
        """Submit a request and wait for its first item. Raises `HttpError`.

        The pipeline's request has the id and the trace context of the HTTP request, so that their logs can be joined.

        Args:
            body: seed, timeout and priority.
            fields: the field of the HTTP request that is at fault, by error code or by name in the pipeline.
            n: how many answers.
            speed: at which sound is heard, as a multiple of that at which it is made.
            options: for `AsyncOmniClient.submit_choices`.
        """
        tempos = [await asyncio.to_thread(Tempo, speed) for _ in range(n)] if speed != 1 else []
        common = request_options(request, state, body)
        try:
            streams = await state.client.submit_choices(
                await state.heard(prompt, **common),
                n,
                seed=body.seed,
                request_id=request.state.request_id,
                **common,
                **options,
            )
        except OmniError as error:
            raise HttpError.of(error, fields) from error
        return await cls.of(streams, request, state, fields, tempos)

    @classmethod
    async def of(
        cls,
        streams: ChoiceStreams | Recital,
        request: Request,
        state: ServerState,
        fields: Mapping[str, str],
        tempos: Sequence[Tempo] = (),
    ) -> Answer:
        """Wait for the first item of what was asked for. Raises `HttpError`."""
        answer = cls(streams, request, fields, state.turns, tempos)
        try:
            async for item in answer.choices():
                answer._held.insert(0, item)
                break
        except BaseException:  # a cancelled task's, too: a client that goes away early must not leave its request
            await answer.close()
            raise
        return answer

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
            while True:
                while self._held:
                    yield self._held.pop(0)
                if not self._streams.ready:
                    await self.before_waiting()
                try:
                    found = await anext(self._streams)
                except StopAsyncIteration:
                    return
                if isinstance(found.item, Audio):
                    # A vocoder's step ends with sound for many answers: to encode all of it in one turn of the loop
                    # would hold up every text that arrives meanwhile.
                    async with self._turns:
                        await asyncio.sleep(0)
                heard = await self._tempos[found.choice].follow(found.item) if self._tempos else [found.item]
                self._held += [ChoiceItem(found.choice, item) for item in heard]
        except OmniError as error:
            raise HttpError.of(error, self._fields) from error

    async def close(self) -> None:
        """End the request in every stage, unless it has ended. Idempotent."""
        await end_tasks(self._watch)
        await self._streams.abort()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _abort_when_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue
        logger.info("the client went away", extra={"request_id": request.state.request_id})
        await self._streams.abort()


class AnswerResponse(Response):
    """Sends the pieces of an answer as they arrive, those that are ready at once in one write; closes it at the end.

    Args:
        answer: what is closed at the end; `None` if the pieces do that themselves, and then each is sent at once.
        pieces: bytes to send. An `HttpError` becomes the last event of `EVENTS`. In other formats the connection is
            cut, so that the client does not mistake a part for the whole.
        write_timeout: seconds for which the client may leave a piece unread before its request is ended.
    """

    def __init__(
        self, answer: Answer | None, pieces: AsyncIterator[bytes], media_type: str, write_timeout: float
    ) -> None:
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
        held = bytearray()

        async def flush() -> None:
            if not held:
                return
            body = bytes(held)
            held.clear()
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        if self._answer is not None:
            self._answer.before_waiting = flush
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._pieces:
                held += piece
                if len(held) >= JOINED_BYTES or self._answer is None:
                    await flush()
            await send({"type": "http.response.body", "body": bytes(held), "more_body": False})
        except TimeoutError:
            logger.warning("the client does not read; its request is aborted", extra=about)
        except HttpError as error:
            if self.media_type == EVENTS:
                body = bytes(held) + event(error.body())
                await send({"type": "http.response.body", "body": body, "more_body": False})
            elif error.code != Aborted.code:
                logger.warning("response cut short: %s", error.code, extra=about)
        finally:
            if isinstance(self._pieces, AsyncGenerator):
                await self._pieces.aclose()
            if self._answer is not None:
                await self._answer.close()


def speech_of(
    modalities: Sequence[str] | None,
    audio: AudioParameters | None,
    stream: bool | None,
    description: Description,
    state: ServerState,
) -> tuple[str | None, dict[str, Any]]:
    """How an answer that is a message is spoken.

    Args:
        modalities: of the answer; text alone by default.
        audio: how it is to be spoken, if the request says so.

    Returns:
        The format of its sound, `None` if it is not spoken; and options of `Answer.begin`.

    Raises:
        HttpError: they do not go together, or `modalities` are those of pictures.
    """
    spoken, given = "audio" in (modalities or ()), audio or AudioParameters()
    if set(modalities or ()) & set(PICTURES):
        message = "A message has no pictures: ask /v1/images/generations for them."
        raise bad_field("modalities", message, "unknown_modality")
    if audio is not None and not spoken:
        raise bad_field("audio", 'audio needs "audio" among the modalities: modalities: ["text", "audio"].')
    if stream and given.format not in (None, STREAM_FORMAT):
        message = f"With stream: true the format must be {STREAM_FORMAT!r}."
        raise bad_field("audio.format", message, "unsupported_value")
    voice = state.voice(given.voice, description, "audio.voice")
    options = {"modalities": list(modalities or ["text"]), "voice": voice, "speed": given.speed or 1}
    return (STREAM_FORMAT if stream else given.format or "wav") if spoken else None, options


async def _nothing() -> None:
    """Nothing has to be done before waiting."""


def event(data: Any) -> bytes:
    """A server-sent event with JSON data; bytes become base64."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE_EVENT = b"data: [DONE]\n\n"


def usage_of(usages: Sequence[Mapping[str, StageUsage]], description: Description, prompts: int = 1) -> dict[str, Any]:
    """OpenAI's usage of one or several answers to a prompt, whose tokens count once, or to as many `prompts`.

    Prompt tokens are those that the text stage read; completion tokens are those that it wrote plus the audio tokens.
    `stages` is an extension: what each did for all answers, and seconds, those of the first and of the last of them,
    from the moment at which a request was opened in all stages.
    """
    text_stage = description.outputs.get("text", "")
    order = list(dict.fromkeys(status.stage for status in description.stages))
    speaker = _speaker(order, text_stage, description.outputs.get("audio", ""))
    by_stage = {stage: [usage[stage] for usage in usages if stage in usage] for stage in (*order, text_stage, "")}
    prompt_tokens = sum(part.input_tokens for part in by_stage[text_stage][:prompts])
    text_tokens, audio_tokens = (sum(part.output_tokens for part in by_stage[stage]) for stage in (text_stage, speaker))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": text_tokens + audio_tokens,
        "total_tokens": prompt_tokens + text_tokens + audio_tokens,
        "completion_tokens_details": {"text_tokens": text_tokens, "audio_tokens": audio_tokens},
        "stages": {stage: _work(by_stage[stage]) for stage in order if by_stage[stage]},
    }


def _work(parts: Sequence[StageUsage]) -> dict[str, Any]:
    """What a stage did for several answers."""
    return {
        "finish_reason": "length" if any(part.finish_reason is FinishReason.LENGTH for part in parts) else "stop",
        "input_tokens": sum(part.input_tokens for part in parts),
        "output_tokens": sum(part.output_tokens for part in parts),
        "first_output": round(min(part.first_output for part in parts), 4),
        "finished": round(max(part.finished for part in parts), 4),
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


def chat_logprobs(entries: Sequence[msgspec.Raw]) -> dict[str, Any] | None:
    """The `logprobs` of a chat completion's choice; `None` without any."""
    return {"content": entries, "refusal": None} if entries else None


def token_logprobs(positions: Sequence[PositionLogprobs]) -> list[msgspec.Raw]:
    """An entry for each token, as chats and responses have it.

    As JSON, because whole answers keep them: their objects take several times as much, and to encode those of 16,000
    tokens at once would stop the server for a second.
    """
    entries = (
        {**_entry(position.token), "top_logprobs": [_entry(token) for token in position.top]} for position in positions
    )
    return [msgspec.Raw(msgspec.json.encode(entry)) for entry in entries]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.text.encode())}


@dataclass
class WholeAnswer:
    """Keeps what comes of an answer, for a response that is sent whole.

    Args:
        entries: what log probabilities become.
    """

    entries: Callable[[Sequence[PositionLogprobs]], list[msgspec.Raw]] = token_logprobs
    texts: list[str] = field(default_factory=list)
    pieces: list[Samples] = field(default_factory=list)
    calls: CollectedCalls = field(default_factory=CollectedCalls)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    prompt_logprobs: list[PromptPosition] = field(default_factory=list)

    def add(self, item: StreamItem) -> None:
        """Keep an item. Log probabilities count as bytes of the request until the response is sent."""
        if isinstance(item, Text):
            self.texts.append(item.text)
            self.calls.add(item.tool_calls)
            likely = self.entries(item.logprobs)
            reserve(sum(memoryview(entry).nbytes for entry in likely))
            self.logprobs.extend(likely)
            self.prompt_logprobs.extend(item.prompt_logprobs)
        elif isinstance(item, Audio):
            self.pieces.append(item.samples)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def samples(self) -> Samples:
        """All sound."""
        return numpy.concatenate(self.pieces) if self.pieces else numpy.zeros(0, numpy.float32)


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
