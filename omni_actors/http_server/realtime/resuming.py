"""Sessions that another connection goes on with: what is written down of each while it lasts, in a journal."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator

import msgspec
from starlette.requests import HTTPConnection

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.client_secrets import key_of
from omni_actors.http_server.realtime.config import Event
from omni_actors.http_server.realtime.conversation import AnyItem
from omni_actors.http_server.realtime.session import KeptSession, RealtimeSession
from omni_actors.http_server.state import ServerState
from omni_actors.http_server.store import LOST_SECONDS, Journal, Journals

SLACK_BYTES = 1 << 20  # of a journal beyond twice what its session holds, before it is written anew
LENGTH_BYTES = 4  # before each entry of a journal
CHANGES = frozenset(
    {
        "session.created",
        "session.updated",
        "conversation.item.done",
        "conversation.item.deleted",
        "conversation.item.truncated",
        "conversation.item.input_audio_transcription.completed",
    }
)


def owner_of(connection: HTTPConnection, state: ServerState) -> str:
    """Who may go on with a session: the holder of the key that it began with, or without keys, the same address."""
    key = key_of(connection.headers) if state.settings.api_key is not None else state.tenant(connection)
    return hashlib.blake2b(key.encode(), digest_size=8, key=state.secret).hexdigest()


async def find(session_id: str, owner: str, journals: Journals) -> KeptSession:
    """The session of an owner, with all items. Raises `HttpError` 404."""
    found = await asyncio.to_thread(_read, session_id, journals)
    if found is None or found.owner != owner:
        message = f"You have no session {session_id[:100]!r} that could go on: you have closed it, or it is more than "
        message += f"{LOST_SECONDS:g} s since you lost it. Begin another one."
        raise HttpError(404, message, param="session", code="session_not_found")
    return found


def _read(session_id: str, journals: Journals) -> KeptSession | None:
    journal = journals.find(session_id)
    if journal is None:
        return None
    with contextlib.closing(journal):
        data = journal.read()
    items: dict[str, AnyItem] = {}
    found = None
    for found in _entries(data):
        items.update((item.id, item) for item in found.items)
    if found is not None:
        found.items = [items[item_id] for item_id in found.order]
    return found


def _entries(data: bytes) -> Iterator[KeptSession]:
    """The entries of a journal, without a last one that is not whole, because its process died over it."""
    rest = memoryview(data)
    while len(rest) > LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(rest[:LENGTH_BYTES])
        if end > len(rest):
            return
        yield msgspec.msgpack.decode(rest[LENGTH_BYTES:end], type=KeptSession)
        rest = rest[end:]


class SessionKeeper:
    """Writes down what changes in a session.

    Args:
        owner: whose session it is.
    """

    def __init__(self, session: RealtimeSession, owner: str, journals: Journals) -> None:
        self._session, self._owner, self._journals = session, owner, journals
        self._journal: Journal | None = None
        self._changed: set[str] = set()  # ids of items
        self._wake = asyncio.Event()
        self._writing: asyncio.Future[bool] | None = None
        self.caught_up = asyncio.Event()

    def note(self, event: Event) -> None:
        """Take an event of the server."""
        if event["type"] in CHANGES:
            self._changed.add(event.get("item_id") or event.get("item", {}).get("id", ""))
            self._wake.set()
            self.caught_up.clear()

    async def run(self) -> None:
        """Write down what has changed, turn by turn, until another connection goes on with the session."""
        while True:
            if not self._changed:
                self.caught_up.set()
            await self._wake.wait()
            self._wake.clear()
            changed, self._changed = self._changed, set()
            anew = self._journal is None or self._journal.size > 2 * self._session.held + SLACK_BYTES
            data = msgspec.msgpack.encode(self._session.kept(self._owner, None if anew else changed))
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, data, anew))
            if not await asyncio.shield(self._writing):
                self.caught_up.set()
                return

    def _write(self, data: bytes, anew: bool) -> bool:
        """Write an entry, or all anew; false if the session is not this connection's any more. Runs on a thread."""
        entry, journal = len(data).to_bytes(LENGTH_BYTES) + data, self._journal
        if journal is not None and journal.is_replaced:
            return False
        if journal is not None and not anew:
            journal.append(entry)
            return True
        self._journal = self._journals.begin(self._session.id, entry)
        if journal is not None:
            journal.close()
        return True

    async def close(self, ended: bool) -> None:
        """Leave the session to another connection, or to none if it has `ended`."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        if self._journal is not None:
            if ended:
                self._journal.remove()
            self._journal.close()
