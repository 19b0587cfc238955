"""A session's requests to the pipeline: answers, and transcripts of turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from omni_actors.client import RequestStream, Text
from omni_actors.errors import OmniError
from omni_actors.host.processes import end_tasks
from omni_actors.http_server.ears import WORDS_SECONDS, to_write_down
from omni_actors.http_server.encoders import samples_of
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.generation import tool_options
from omni_actors.http_server.realtime.config import Event
from omni_actors.http_server.realtime.conversation import MessageItem, TurnText, heard, transcription_event
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND, RATE
from omni_actors.http_server.realtime.resuming import SessionKeeper
from omni_actors.http_server.realtime.session import Ask, RealtimeSession, Transcribe
from omni_actors.http_server.state import ServerState
from omni_actors.http_server.transcriptions import token_usage
from omni_actors.logs import get_logger
from omni_actors.protocol.messages import Description
from omni_actors.protocol.payloads import WordTime

logger = get_logger(__name__)

TRANSCRIPT_PRIORITY = 1  # after the answers, which the user waits for: lower values go first
LISTENING_PRIORITY = 2  # and what is written of turns that are still spoken after that of those that have ended
NEW_SECONDS = 0.2  # of sound, before a turn that is spoken is written down again: a syllable
NEW_TOKENS = 32  # of text that is not said for sure yet: some 10 s of speech
ANSWER_BYTES = 64 << 10  # that may wait before no more of an answer is taken: a second of sound


class Outbox:
    """A queue with one writer, so that nothing that a session decides has to wait for the network.

    Args:
        send: sends a text to the client, and waits while it does not read.
        write_timeout: seconds for which a client may leave an event unread.
        keeper: writes down what events have changed before they are sent.
        told: takes events in place of the client, and appends those that the client is to get.
    """

    def __init__(
        self,
        send: Callable[[str], Awaitable[None]],
        write_timeout: float,
        keeper: SessionKeeper | None,
        told: Callable[[Event], None] | None = None,
    ) -> None:
        self._send = send
        self._write_timeout = write_timeout
        self._keeper = keeper
        self._told = told or self.append
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self._bytes = 0  # of those that were not sent
        self._drained = asyncio.Event()

    def put(self, event: Event) -> None:
        """Take an event of the session."""
        if self._keeper is not None:
            self._keeper.note(event)
        self._told(event)

    def append(self, event: Event) -> None:
        """Append an event as it is."""
        data = msgspec.json.encode(event)
        self._waiting.put_nowait(data)
        self._bytes += len(data)

    async def room(self, limit: int) -> None:
        """Wait until at most `limit` bytes wait. The deadline is that of the writer, which ends the session."""
        while self._bytes > limit:
            self._drained.clear()
            await self._drained.wait()

    async def write(self) -> None:
        """Send events for as long as the session lasts. Raises `TimeoutError` if the client does not read them."""
        while True:
            data = await self._waiting.get()
            async with asyncio.timeout(self._write_timeout):
                if self._keeper is not None:
                    await self._keeper.caught_up.wait()
                await self._send(data.decode())
            self._bytes -= len(data)
            self._drained.set()


class Asker:
    """Sends a session's requests to the pipeline.

    Args:
        tenant: the client whose share of the slots the requests use.
        traceparent: trace context of the session.
    """

    def __init__(self, state: ServerState, tenant: str, traceparent: str | None) -> None:
        self.state = state
        self.common: dict[str, Any] = {"tenant": tenant, "traceparent": traceparent}
        self.common["timeout"] = state.settings.request_timeout

    async def answer(self, ask: Ask, description: Description) -> RequestStream:
        """Send the request of a response. Raises `OmniError` or `HttpError`."""
        config, state = ask.config, self.state
        limit = {} if config.max_output_tokens == "inf" else {"max_tokens": config.max_output_tokens}
        spoken = config.output == "audio"
        tools = tool_options(config.tools, config.tool_choice, config.parallel_tool_calls, "tool_choice")
        return await state.client.submit(
            await state.heard({"messages": ask.messages, **tools}, **self.common),
            modalities=["text", "audio"] if spoken else ["text"],
            voice=config.voice if spoken else None,
            params=state.stage_params(config.model, config.stage_params, description, limit),
            seed=config.seed,
            request_id=ask.request_id,
            **self.common,
        )

    async def word_times(self, text: str, pcm: bytes, pace: float | None) -> Sequence[WordTime]:
        """When the words of a spoken answer are said, as far as another pipeline knows that.

        Args:
            pcm: its sound, i16 at `RATE`.
            pace: characters a second, if the sound ends before the text does. What is then taken not to be said
                comes behind the words, as one more that ends after the sound.
        """
        if (aligner := await self.state.aligner()) is None:
            return ()
        seconds = len(pcm) / BYTES_PER_SECOND
        said = text if pace is None else heard(text, seconds, seconds, pace, complete=False)
        samples = samples_of(pcm)
        options = {**self.common, "timeout": WORDS_SECONDS, "priority": TRANSCRIPT_PRIORITY}
        words = await aligner.words(samples, RATE, said, **options)
        return [*words, WordTime("", seconds, seconds + 1, len(said))] if words and said != text else words


class Transcriber:
    """Has the turns of a session written down, one after the other.

    A pipeline of hearing writes down a turn while it is spoken, too: all of its sound so far, again and again, as soon
    as it has answered and `NEW_SECONDS` have come. Under load it answers later, and so is asked less often.
    """

    def __init__(self, session: RealtimeSession, outbox: Outbox, asker: Asker) -> None:
        self._session = session
        self._outbox = outbox
        self._asker = asker
        self._waiting: asyncio.Queue[Transcribe] = asyncio.Queue()  # of items, whose number the conversation bounds
        self._writing = False
        self._said = TurnText("")  # in the turn that was spoken last
        self._heard = 0  # position up to which it was listened to
        self._listening: asyncio.Task[None] | None = None
        self._listens = True  # until it is known that the pipeline cannot go on with the beginning of a text

    async def run(self) -> None:
        """Write down turns for as long as the session lasts. When it is cancelled, its request ends in all stages."""
        try:
            while True:
                turn = await self._waiting.get()
                self._writing = True
                try:
                    await self._write_down(turn)
                except (HttpError, OmniError) as error:
                    self._send("failed", turn, error=HttpError.of(error).body()["error"])
                self._writing = False
        finally:
            await end_tasks(self._listening)

    def add(self, turn: Transcribe) -> None:
        """Have a turn written down that has ended."""
        self._waiting.put_nowait(turn)
        self._end_listening(turn, self._session.sound_of(turn.item_id))

    def pause(self, sound: Mapping[str, Any]) -> None:
        """Listen no more to a turn that may be over with this sound, and whose answer has been begun."""
        spoken = self._session.spoken
        self._end_listening(spoken[0] if spoken is not None else None, sound)

    def _end_listening(self, turn: Transcribe | None, sound: Mapping[str, Any] | None) -> None:
        if self._listening is not None:
            self._listening.cancel()
        ears = self._asker.state.ears
        if ears is not None and self._asker.state.deaf and sound is not None and turn is not None:
            ears.listen(sound, self._about(turn), self._asker.common)  # the turn's answer waits for the same text

    def listen(self) -> None:
        """Have the turn that is spoken written down so far, unless too little of it is new, or others are not done."""
        busy = self._writing or not self._waiting.empty() or (self._listening and not self._listening.done())
        if not self._listens or busy or self._session.pausing or (spoken := self._session.spoken) is None:
            return
        turn, start = spoken
        if self._said.item_id != turn.item_id:
            self._said, self._heard = TurnText(turn.item_id), self._session.position
        if self._session.position - self._heard >= NEW_SECONDS * RATE:
            self._heard = self._session.position
            self._listening = asyncio.create_task(self._listen(turn, start), name="realtime listener")

    async def _listen(self, turn: Transcribe, start: int) -> None:
        """Send what is said for sure in a turn. When it is cancelled, its request ends in all stages."""
        try:
            client, description = await self._asker.state.transcriber()
            if description.hearing is None:
                self._listens = False
                return
            sound = MessageItem.of_sound(turn.item_id, self._session.sound_from(start)).parts[0].prompt()
            request = to_write_down(sound, description, **self._about(turn))
            stage = description.outputs["text"]
            request["params"] = {stage: msgspec.structs.replace(request["params"][stage], max_tokens=NEW_TOKENS)}
            answer = await client.generate(**request, **self._asker.common, priority=LISTENING_PRIORITY)
        except (HttpError, OmniError) as error:
            logger.info("a turn is not written down while it is spoken: %s", error)
            return
        if more := self._said.add(answer.text, answer.usage[stage].language):
            self._outbox.put(transcription_event("delta", turn.item_id, delta=more))

    def _about(self, turn: Transcribe) -> dict[str, Any]:
        """What is known of a turn, as `to_write_down` takes it."""
        about, said = turn.transcription, self._said if self._said.item_id == turn.item_id else TurnText("")
        language = about.language or (said.language if said.text else "")
        return {"language": language, "prompt": about.prompt or "", "begun": said.text}

    async def _write_down(self, turn: Transcribe) -> None:
        sound, about = self._session.sound_of(turn.item_id), self._about(turn)
        if sound is None:
            return
        state, common, begun = self._asker.state, self._asker.common, about["begun"]
        client, description = await state.transcriber()
        if state.ears is not None and state.deaf:
            text = await state.ears.text(sound, **common)
            self._send("delta", turn, delta=text[len(begun.lstrip()) :])
            self._send("completed", turn, transcript=text, usage=token_usage([], description))
            return
        request = to_write_down(sound, description, **about)
        told: dict[str, Any] = {"priority": TRANSCRIPT_PRIORITY, "request_id": turn.item_id}
        async with await client.submit(**request, **common, **told) as stream:
            async for item in stream:
                if not isinstance(item, Text) or not item.text:
                    continue
                begun += item.text
                if not self._send("delta", turn, delta=item.text):
                    return
                await self._outbox.room(ANSWER_BYTES)
        self._send("completed", turn, transcript=begun.strip(), usage=token_usage([stream.usage], description))

    def _send(self, kind: str, turn: Transcribe, **fields: Any) -> bool:
        """Send an event about a turn, unless it is gone; says whether it is there."""
        events = self._session.written(kind, turn.item_id, **fields)
        for event in events:
            self._outbox.put(event)
        return bool(events)
