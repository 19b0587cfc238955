"""What is kept of a session for another connection."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.resuming import SLACK_BYTES, SessionKeeper, find
from omni_actors.http_server.store import Journals
from tests.support.realtime import SECOND, Talk


async def test_the_journal_of_a_long_session_stays_short_and_has_all_of_it(tmp_path: Path) -> None:
    journals, talk = Journals(str(tmp_path), "sessions"), Talk(audio_seconds=10.0)
    keeper, seen = SessionKeeper(talk.session, "me", journals), 0
    writing = asyncio.create_task(keeper.run())
    file = tmp_path / "sessions" / talk.session.id
    for turn in range(60):
        talk.append(SECOND[: -2 * turn or None])
        talk.send("input_audio_buffer.commit")
        seen, new = len(talk.events), talk.events[seen:]
        for event in new:
            keeper.note(event)
        await keeper.caught_up.wait()
        assert file.stat().st_size <= 2 * talk.session.held + SLACK_BYTES + 2 * len(SECOND)
    with file.open("ab") as torn:
        torn.write(b"\0\0\1\0died")
    kept = await find(talk.session.id, "me", journals)
    assert [len(item.parts[0].audio) for item in kept.items] == [len(SECOND) - 2 * turn for turn in range(50, 60)]
    with pytest.raises(HttpError, match="no session"):
        await find(talk.session.id, "you", journals)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await keeper.close(ended=True)
    assert os.listdir(file.parent) == []
