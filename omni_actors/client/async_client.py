"""The asyncio client of a running pipeline; several answers to one prompt. Imports neither torch nor vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_actors.client.prompts import AudioInput, ImageInput, Prompting, VideoInput, spoken, to_params, to_prompt
from omni_actors.client.streams import ChoiceStreams, OmniRequestOutput, RequestStream, item_of
from omni_actors.errors import Aborted, InvalidRequest, OmniError, ProtocolError, RequestTimeout, StageLost
from omni_actors.host.addresses import is_tcp
from omni_actors.host.processes import STEADY, at_most, end_tasks
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import BadBody, BadHeader, BufferList, Decoder, encode
from omni_actors.protocol.delivery import Delivery
from omni_actors.protocol.fields import TRACEPARENT, Body, Header, Limits
from omni_actors.protocol.messages import (
    MAX_TEXT_IN_PARTS,
    Abort,
    CoordinatorToClient,
    Credit,
    Describe,
    Description,
    Done,
    Failed,
    MoreText,
    Observation,
    Observe,
    Operate,
    Operation,
    Report,
    RequestTimeline,
    Snapshot,
    Submit,
)
from omni_actors.protocol.payloads import StageParams, text_prompt
from omni_actors.transport.curve import load_keys
from omni_actors.transport.link import wire_size
from omni_actors.transport.sockets import SocketReader, Sockets, try_send

logger = get_logger(__name__)


MAX_CHOICES = 16
SEEDS = 1 << 63


def check_choices(count: int) -> None:
    """Raise `InvalidRequest` for a number of answers that a request cannot have."""
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidRequest(
            f"n: a prompt has 1 to {MAX_CHOICES} answers; {count} were asked for.",
            hint="Send the prompt more than once: a prompt that is still in the cache is not computed again.",
            field="n",
        )


def of_choice(options: Mapping[str, Any], choice: int) -> dict[str, Any]:
    """The options of `submit` for one of several answers. Seeds count up from the first answer's, as with vLLM.

    Only the first answer comes with the prompt's log probabilities.
    """
    own = dict(options)
    if not choice:
        return own
    own["request_id"] = f"{options['request_id']}-{choice}"
    own["seed"] = _counted(options.get("seed"), choice)
    own["params"] = {
        stage: msgspec.structs.replace(given, seed=_counted(given.seed, choice), prompt_logprobs=None)
        for stage, given in to_params(options.get("params") or {}).items()
    }
    return own


def _counted(seed: int | None, choice: int) -> int | None:
    return seed if seed is None else (seed + choice) % SEEDS


@dataclass
class _Request:
    """A request until its end, with all that it takes to submit it once more. `coordinator` has it, "" for unknown."""

    stream: RequestStream
    body: Submit
    buffers: BufferList
    deadline: float
    coordinator: str = ""
    submitted: int = 0  # times
    aborted: bool = False
    next_seq: int = 0
    delivery: Delivery = field(default_factory=Delivery)


MAX_COORDINATORS = 16  # that may be lost under one request, which may be the reason
ANSWER_SECONDS = 10.0  # a coordinator that does not answer `Describe` within this time is gone
STANDING_SECONDS = 45.0  # until a launcher has replaced a coordinator that stands still, however busy the host is
GRANT_MESSAGES, GRANT_BYTES = 64, 256 << 10  # received messages after which credit is granted at once
GRANT_SECONDS = 0.05  # after which credit is granted for fewer
PING_SECONDS = 2.0  # how often a client with requests asks whether they are still alive
SILENT_SECONDS = 7.0  # without an answer to that from another host; requests then end within 10 s of its loss

Answer = Description | Report | Observation
A = TypeVar("A", Description, Report, Observation)


class AsyncOmniClient:
    """A connection to a coordinator for many requests at once. Use it as an async context manager.

    Args:
        endpoint: client endpoint, as the launcher prints it, for instance `ipc:///tmp/omni-x/client` or `tcp://127.0.0.1:5555`.
        limits: largest message to send or accept.
        keys: folder of CURVE keys, for the `tcp://` endpoint of a pipeline with keys.

    Raises:
        ConfigError: the folder of keys is missing, broken, or open to others.
        Unauthorized: from any method, if the pipeline does not accept these keys, or requires keys.
    """

    def __init__(self, endpoint: str, limits: Limits | None = None, keys: str | Path | None = None) -> None:
        self._endpoint = endpoint
        self._keys = load_keys(keys)
        self._limits = limits or Limits()
        self._decoder: Decoder[CoordinatorToClient] = Decoder(CoordinatorToClient, self._limits)
        self._requests: dict[str, _Request] = {}
        self._coordinator = ""  # its name, once it has answered
        self._modalities: tuple[str, ...] = ()  # all that the pipeline answers in, likewise
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._questions: dict[str, Describe | Observe] = {}  # those that may be asked twice
        self._last_heard = self._connection_changed = time.monotonic()
        self._is_local = not is_tcp(endpoint)
        self._sockets: Sockets | None = None
        self._received, self._received_bytes = 0, 0  # not yet granted back as credit
        self._grant_timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> AsyncOmniClient:
        sockets = Sockets(max_message_bytes=self._limits.message_bytes, keys=self._keys)
        self._socket, self._handshake = sockets.dealer(self._endpoint, uuid.uuid4().bytes)
        self._sockets = sockets
        self._look = asyncio.Event()  # this client is connected again
        self._monitor = SocketReader(self._handshake.socket, self._on_handshake)
        self._reader = SocketReader(self._socket, self._on_message)
        self._watch = asyncio.create_task(self._watch_coordinator(), name="client watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort all requests in flight and disconnect. Idempotent."""
        if self._sockets is None:
            return
        await end_tasks(self._watch)
        for request_id in list(self._requests):
            self._give_up(request_id, RequestTimeout("The client was closed."))
        self._fail_answers(RequestTimeout("The client was closed."))
        self._grant()
        if self._grant_timer is not None:
            self._grant_timer.cancel()
        sockets, self._sockets = self._sockets, None
        self._monitor.close()
        self._handshake.close()
        self._reader.close()
        self._socket.close()
        await asyncio.get_running_loop().run_in_executor(None, sockets.context.term)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompting,
        *,
        modalities: Sequence[str] | None = None,
        voice: str | None = None,
        params: Mapping[str, StageParams | Mapping[str, Any]] | None = None,
        seed: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
        audios: Sequence[AudioInput] = (),
        images: Sequence[ImageInput] = (),
        videos: Sequence[VideoInput] = (),
        traceparent: str | None = None,
        additional_information: Mapping[str, Any] | None = None,
        tenant: str = "",
        more_text: bool = False,
    ) -> RequestStream:
        """Send a request and return the stream of its answer.

        Args:
            prompt: a user's text, chat messages (`[{"role": ..., "content": str | [parts]}]` with parts
                `{"type": "text", "text": ...}`, `{"type": "audio", "audio": AudioInput}`, and likewise `image` and
                `video`), or a mapping: an `OmniTokensPrompt`, or `{"messages": [...]}`, which may have `tools` that the
                model may call, `tool_choice` and `parallel_tool_calls`, as OpenAI defines them.
            modalities: of the answer, such as `["text", "audio"]` or `["image"]`; `None` for all that the pipeline has.
            voice: a speaker from `describe().voices`.
            params: parameters by stage name, for instance `{"thinker": {"max_tokens": 64, "temperature": 0.7}}`.
            seed: makes sampling and the vocoder's noise repeatable; drawn if `None`.
            timeout: seconds after which the request ends with `DeadlineExceeded`.
            priority: from -1000 to 1000; in every stage, waiting requests with a lower value go first.
            request_id: name of the request in all logs; `None` makes a new one.
            audios: audio placed before a text prompt, or for the placeholders of token ids: (f32 [samples], Hz), a
                file's bytes, or a path.
            images: images placed likewise: u8 [height, width, 3], a file's bytes, or a path.
            videos: videos placed likewise: (u8 [frames, height, width, 3], frames per second).
            traceparent: the caller's span (W3C Trace Context), which becomes the parent of the request's spans.
            additional_information: values by name for the stages that want them: numbers, texts, lists of these, and
                arrays. A name that no stage of the request wants is refused.
            tenant: the user behind this request, in up to 64 characters. Tenants share its slots fairly.
            more_text: the prompt, a text or `spoken(text, ...)`, perhaps an empty one, is still being written:
                `RequestStream.append_text` and `end_text` bring the rest. For pipelines that speak, and whose
                `describe().speech.text_in_parts` is true.

        Raises:
            InvalidRequest, InvalidPayload, MalformedMedia: the request is wrong; nothing was sent.
            RequestTimeout: the coordinator does not answer.
        """
        buffers = BufferList()
        if more_text and isinstance(prompt, str):
            prompt = spoken(prompt)  # it may be empty as yet
        try:
            message, information = to_prompt(prompt, audios, images, videos, additional_information, buffers)
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"The prompt does not have the documented form: {error}.") from error
        body = Submit(
            prompt=message,
            modalities=tuple(modalities if modalities is not None else await self._all_modalities()),
            voice=voice,
            params=to_params(params or {}),
            seed=secrets.randbelow(SEEDS) if seed is None else seed,
            priority=priority,
            traceparent=_checked_traceparent(traceparent),
            information=information,
            tenant=tenant,
            more_text=True if more_text else None,
        )
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._requests:
            raise InvalidRequest(f"The request id {request_id!r} is in use.")
        deadline = STEADY() + timeout if timeout is not None else 0.0
        stream = RequestStream(request_id, self.abort, self._add_text)
        request = _Request(stream, body, buffers, deadline)
        self._submit(request)
        self._requests[request_id] = request
        return stream

    async def generate(self, prompt: Prompting, **options: Any) -> OmniRequestOutput:
        """Send a request, as `submit` does, and wait for the whole answer. The request ends when this is cancelled."""
        async with await self.submit(prompt, **options) as stream:
            return await stream.result()

    async def submit_choices(self, prompt: Prompting, n: int, **options: Any) -> ChoiceStreams:
        """Send a prompt for `n` answers, at most 16, each with sampling and sound of its own.

        Each is a request, and the thinker computes what they share of the prompt only once. Options are those of
        `submit`. The first answer has `request_id` and `seed`, the others the id with a number and the next seeds.
        """
        check_choices(n)
        options["request_id"] = options.get("request_id") or uuid.uuid4().hex
        return await self.submit_all({"prompt": prompt, **of_choice(options, choice)} for choice in range(n))

    async def submit_all(self, requests: Iterable[Mapping[str, Any]]) -> ChoiceStreams:
        """Send several requests, each with the arguments of `submit`; if one cannot be sent, the others end."""
        streams: list[RequestStream] = []
        try:
            for arguments in requests:
                streams.append(await self.submit(**arguments))
        except BaseException:  # also when the task is cancelled: the caller never hears of this answer, so it must end
            for stream in streams:
                await stream.abort()
            raise
        return ChoiceStreams(streams)

    async def generate_choices(self, prompt: Prompting, n: int, **options: Any) -> list[OmniRequestOutput]:
        """Send a prompt for `n` answers, as `submit_choices` does, and wait for all of them."""
        streams = await self.submit_choices(prompt, n, **options)
        return await streams.results()

    def abort(self, request_id: str) -> None:
        """End a request in all stages. Idempotent."""
        request = self._requests.get(request_id)
        if request is not None:
            request.aborted = True
            self._send(request_id, Abort())

    def _add_text(self, request_id: str, text: str, final: bool) -> None:
        """Send more of a request's text, and keep it for a coordinator that may have to be told all of it."""
        request = self._requests.get(request_id)
        if request is None:
            return  # it has ended, and its stream says how
        had = request.body.prompt.only_text or ""
        if not request.body.more_text:
            raise InvalidRequest("The text of this request is complete.", field="more_text")
        if len(had) + len(text) > MAX_TEXT_IN_PARTS:
            raise InvalidRequest(
                f"The text has more than {MAX_TEXT_IN_PARTS} characters.", hint="Go on in another request."
            )
        request.body = msgspec.structs.replace(request.body, prompt=text_prompt(had + text), more_text=not final)
        self._send(request_id, MoreText(text=text, start=len(had), final=final))

    async def describe(self, timeout: float = ANSWER_SECONDS) -> Description:
        """Return what the pipeline offers and the state of its stages. Raises `RequestTimeout` if no answer comes."""
        asked_about = [(request_id, request, request.submitted) for request_id, request in self._requests.items()]
        description = await self._ask(Describe(), Description, timeout)
        self._coordinator, self._modalities = description.coordinator, description.modalities
        for request_id, request, submitted in asked_about:
            if self._requests.get(request_id) is not request or request.submitted != submitted:
                continue  # it has ended, or is on its way behind the question
            if request_id in description.requests:
                request.coordinator = description.coordinator
            else:
                self._resume(request)
        return description

    async def _all_modalities(self) -> tuple[str, ...]:
        return self._modalities or (await self.describe()).modalities

    def _submit(self, request: _Request) -> None:
        request.coordinator = self._coordinator
        self._send(request.stream.request_id, request.body, request.buffers, request.deadline)
        request.submitted += 1

    def _resume(self, request: _Request) -> None:
        """Submit a request once more, to a coordinator that does not know it; what was delivered will be left out.

        Messages keep their order: a request submitted before the question that is neither in the answer nor ended by
        now never will be. Either another coordinator had it, or this one could not reach this client for a while.
        """
        request_id = request.stream.request_id
        if request.aborted:
            self._end(request_id, Aborted("The client aborted the request."))
            return
        if request.coordinator == self._coordinator or request.submitted > MAX_COORDINATORS:
            self._end(request_id, StageLost("The coordinator does not know this request any more."))
            return
        logger.info("submitting a request once more: another coordinator has come", extra={"request_id": request_id})
        request.next_seq = 0
        request.body = msgspec.structs.replace(request.body, delivered=request.delivery.state())
        try:
            self._submit(request)
        except OmniError as error:
            self._end(request_id, error)

    async def operate(
        self,
        operation: Operation,
        stage: str = "",
        replica: int = 0,
        timeout: float = ANSWER_SECONDS,
        count: int | None = None,
        node: int | None = None,
    ) -> Report:
        """Inspect the pipeline, drain or restart a replica, scale a stage, or shut down, as an operator.

        Args:
            count: for `scale`: the replicas that the stage is to have.
            node: for `scale`: rank of the node on which to add or remove them; the coordinator's choice if `None`.

        Raises:
            InvalidRequest, ProtocolError: there is no such stage, replica or node, its state does not permit the
                operation, or there is no room.
            StageUnavailable: the pipeline still starts, or stops.
            Unauthorized: the operation changes something, which requires an operator's key.
            RequestTimeout: no answer comes.
        """
        order = Operate(operation=operation, stage=stage, replica=replica, count=count, node=node)
        return await self._ask(order, Report, timeout)

    async def metrics(self, timeout: float = ANSWER_SECONDS) -> str:
        """Return all metrics of the pipeline as Prometheus text. Raises `RequestTimeout` if no answer comes."""
        return (await self._ask(Observe(subject="metrics"), Observation, timeout)).text

    def report(self, metrics: Snapshot) -> None:
        """Send this process's own metrics, which the pipeline's then include: what an HTTP server counts, in all.

        Raises:
            RequestTimeout: the coordinator takes no messages.
        """
        self._send("", metrics)

    async def timeline(self, request_id: str, timeout: float = ANSWER_SECONDS) -> RequestTimeline:
        """Return the timed events of a request that is running or among the last 200 that ended.

        Raises:
            InvalidRequest: the request is unknown or too old.
            RequestTimeout: no answer comes.
        """
        question = Observe(subject="timeline", request_id=request_id)
        return (await self._ask(question, Observation, timeout)).timelines[0]

    async def recent(self, count: int = 20, timeout: float = ANSWER_SECONDS) -> tuple[RequestTimeline, ...]:
        """Return the timelines of the requests that ended last (at most 200), the newest first."""
        return (await self._ask(Observe(subject="recent", count=count), Observation, timeout)).timelines

    # -- messages -----------------------------------------------------------------------------------------------------

    async def _ask(self, question: Body, kind: type[A], timeout: float) -> A:
        token = uuid.uuid4().hex
        future = self._answers[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(token, question)
            if isinstance(question, Describe | Observe):
                self._questions[token] = question
            async with asyncio.timeout(timeout):  # wait_for would lose a cancellation that comes with the answer
                answer = await future
        except TimeoutError:
            raise RequestTimeout(f"The coordinator at {self._endpoint} did not answer within {timeout:g} s.") from None
        finally:
            del self._answers[token]
            self._questions.pop(token, None)
        if not isinstance(answer, kind):
            raise ProtocolError("The coordinator answered another question.")
        return answer

    def _send(self, request_id: str, body: Body, buffers: BufferList | None = None, deadline: float = 0.0) -> None:
        if self._sockets is None:
            raise InvalidRequest("This client is not connected.", hint="Use it as a context manager.")
        refusal = self._handshake.refusal
        if refusal is not None:
            raise refusal
        header = Header("", request_id=request_id, deadline=deadline, sent=time.time())
        frames = encode(header, body, buffers.buffers if buffers is not None else (), self._limits)
        if not try_send(self._socket, frames):
            self._monitor.drain()  # the reason may be a refusal that was not read yet
            raise self._handshake.refusal or RequestTimeout(f"The coordinator at {self._endpoint} accepts no messages.")
        self._reader.poke()

    def _on_handshake(self, frames: Sequence[bytes]) -> None:
        """Handle an event of the connection; a refusal ends everything that waits for an answer."""
        self._handshake.on(frames)
        self._connection_changed = time.monotonic()
        if self._handshake.connected and self._handshake.disconnected:
            self._handshake.disconnected = False
            with contextlib.suppress(OmniError):  # the next ping says so, too
                self._send("", Credit())  # this client is still there, on a new connection
                for token, question in self._questions.items():  # they may be lost with the coordinator before
                    self._send(token, question)
            self._look.set()
        refusal = self._handshake.refusal
        if refusal is None:
            return
        for request_id in list(self._requests):
            self._end(request_id, refusal)
        self._fail_answers(refusal)

    def _fail_answers(self, error: OmniError) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _on_message(self, frames: Sequence[bytes]) -> None:
        self._last_heard = time.monotonic()
        self._count_received(wire_size(frames))
        try:
            envelope = self._decoder.decode(frames)
        except BadHeader as error:
            logger.warning("dropped a message with a bad header: %s", error.reason)
            return
        except BadBody as error:
            self._give_up(error.header.request_id, error.error)
            return
        header, body = envelope.header, envelope.body
        answer = self._answers.get(header.request_id)
        if answer is not None:
            if isinstance(body, Answer) and not answer.done():
                answer.set_result(body)
            elif isinstance(body, Failed) and not answer.done():
                answer.set_exception(body.to_error())
            return
        request = self._requests.get(header.request_id)
        if request is None or isinstance(body, Answer):
            return
        if header.seq != request.next_seq and not isinstance(body, Failed):
            wrong = ProtocolError(f"Message {header.seq} came where {request.next_seq} was due.")
            self._give_up(header.request_id, wrong)
            return
        request.next_seq += 1
        if isinstance(body, Failed):
            self._end(header.request_id, body.to_error())
        elif isinstance(body, Done):
            self._end(header.request_id, body)
        else:
            request.delivery.take(body, envelope.buffers)
            request.stream.deliver(item_of(body, envelope.tensor))

    def _count_received(self, size: int) -> None:
        """Grant credit for received messages: at once if there are many, else a little later."""
        self._received += 1
        self._received_bytes += size
        if self._received >= GRANT_MESSAGES or self._received_bytes >= GRANT_BYTES:
            self._grant()
        elif self._grant_timer is None:
            self._grant_timer = asyncio.get_running_loop().call_later(GRANT_SECONDS, self._grant_rest)

    def _grant_rest(self) -> None:
        self._grant_timer = None
        self._grant()
        if self._received and self._sockets is not None:
            self._grant_timer = asyncio.get_running_loop().call_later(GRANT_SECONDS, self._grant_rest)

    def _grant(self) -> None:
        if self._received:
            with contextlib.suppress(OmniError):  # it stays counted, and goes with the next grant
                self._send("", Credit(messages=self._received, bytes=self._received_bytes))
                self._received, self._received_bytes = 0, 0

    def _end(self, request_id: str, last: Done | OmniError) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.stream.deliver(last)

    def _give_up(self, request_id: str, error: OmniError) -> None:
        """End a request here and tell the coordinator, which may not know of it."""
        if request_id in self._requests:
            with contextlib.suppress(OmniError):  # `error` is the one to report
                self._send(request_id, Abort())
            self._end(request_id, error)

    async def _watch_coordinator(self) -> None:
        """Ask about requests that wait, at once when connected again; end all if the coordinator does not answer."""
        while True:
            await at_most(PING_SECONDS, self._look.wait())
            self._look.clear()
            if not self._requests:
                continue
            asked = time.monotonic()
            try:
                await self.describe(ANSWER_SECONDS if self._is_local else SILENT_SECONDS)
            except OmniError as error:
                if self._last_heard > asked or (self._is_local and self._is_replaced()):
                    continue
                for request_id in list(self._requests):
                    self._end(request_id, error)

    def _is_replaced(self) -> bool:
        """Whether the launcher of this host may still replace a coordinator that has ended or stands still."""
        silent = time.monotonic() - max(self._last_heard, self._connection_changed)
        return (self._handshake.connected or self._handshake.disconnected) and silent < STANDING_SECONDS


def _checked_traceparent(traceparent: str | None) -> str | None:
    if traceparent is not None and not re.match(TRACEPARENT, traceparent):
        raise InvalidRequest(
            f"traceparent {traceparent[:80]!r} is not a W3C Trace Context.", hint="Send 00-<32 hex>-<16 hex>-<2 hex>."
        )
    return traceparent
