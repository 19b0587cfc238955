"""Asks the pipeline to write down the turns of a session, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omni_actors.client import Text
from omni_actors.errors import OmniError
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.outbox import ANSWER_BYTES, Outbox
from omni_actors.http_server.realtime.server_events import ServerEvent
from omni_actors.http_server.realtime.session import Transcribe
from omni_actors.http_server.realtime.transcripts import Transcripts
from omni_actors.http_server.state import ServerState
from omni_actors.http_server.transcriptions import token_usage
from omni_actors.protocol.payloads import StageParams

PRIORITY = 1  # after the answers, which the user waits for: lower values go first


class Transcriber:
    """One per session.

    Args:
        tenant: whom the requests are for.
        traceparent: trace context of the session.
    """

    def __init__(
        self, transcripts: Transcripts, outbox: Outbox, state: ServerState, tenant: str, traceparent: str | None
    ) -> None:
        self._transcripts = transcripts
        self._outbox = outbox
        self._state = state
        self._tenant = tenant
        self._traceparent = traceparent
        self._waiting: asyncio.Queue[Transcribe] = asyncio.Queue()  # of items, whose number the conversation bounds

    def put(self, turn: Transcribe) -> None:
        """Append a turn."""
        self._waiting.put_nowait(turn)

    async def run(self) -> None:
        """Write down turns for as long as the session lasts. When it is cancelled, its request ends in all stages."""
        while True:
            turn = await self._waiting.get()
            try:
                await self._write_down(turn)
            except HttpError as error:
                self._send(self._transcripts.failed(turn.item_id, error))
            except OmniError as error:
                self._send(self._transcripts.failed(turn.item_id, HttpError.of(error)))

    async def _write_down(self, turn: Transcribe) -> None:
        messages = self._transcripts.messages(turn.item_id, turn.question)
        if not messages:
            return
        description = await self._state.facts()
        stream = await self._state.client.submit(
            messages,
            modalities=["text"],
            params={self._state.text_stage(description): StageParams(temperature=0.0)},
            priority=PRIORITY,
            timeout=self._state.settings.request_timeout,
            request_id=turn.item_id,
            traceparent=self._traceparent,
            tenant=self._tenant,
        )
        texts: list[str] = []
        try:
            async for item in stream:
                if not isinstance(item, Text) or not item.text:
                    continue
                texts.append(item.text)
                if not self._send(self._transcripts.delta(turn.item_id, item.text)):
                    return
                await self._outbox.room(ANSWER_BYTES)
        finally:
            await stream.abort()  # nothing, if it has ended
        usage = token_usage(stream.usage, description)
        self._send(self._transcripts.completed(turn.item_id, "".join(texts).strip(), usage))

    def _send(self, events: Sequence[ServerEvent]) -> bool:
        """Send events; says whether there were any."""
        for event in events:
            self._outbox.put(event)
        return bool(events)
