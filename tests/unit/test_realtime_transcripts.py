"""What is written down of the user's turns in a realtime session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.client import RequestStream
from omni_actors.http_server.realtime.config import ServerVad, Transcription
from omni_actors.http_server.realtime.conversation import TurnText, agreed
from omni_actors.http_server.realtime.requests import Asker, Outbox, Transcriber
from omni_actors.http_server.realtime.session import Transcribe
from omni_actors.protocol.messages import Done
from omni_actors.protocol.payloads import HearingAbility
from tests.support.realtime import SECOND, Talk, error_of, kinds
from tests.support.waiting import PATIENCE, eventually

USAGE = {"type": "tokens", "input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
DELTA, COMPLETED, FAILED = (
    f"conversation.item.input_audio_transcription.{kind}" for kind in ("delta", "completed", "failed")
)


def spoken_turn(**transcription: Any) -> tuple[Talk, Transcribe]:
    talk = Talk(transcription=Transcription(**transcription))
    talk.append(SECOND)
    talk.send("input_audio_buffer.commit")
    (turn,) = talk.transcribed
    return talk, turn


def test_a_turn_is_written_down_and_keeps_its_transcript() -> None:
    talk, turn = spoken_turn(language="en", prompt="Dr Zhivago")
    assert talk.session.sound_of(turn.item_id)["type"] == "audio"
    assert (turn.transcription.language, turn.transcription.prompt) == ("en", "Dr Zhivago")
    events = talk.take(talk.session.written("delta", turn.item_id, delta="Sea"))
    events += talk.take(talk.session.written("completed", turn.item_id, transcript="Sea salt.", usage=USAGE))
    assert kinds(events) == [DELTA, COMPLETED]
    assert events[1]["transcript"] == "Sea salt."
    (retrieved,) = talk.send("conversation.item.retrieve", item_id=turn.item_id)
    assert retrieved["item"]["content"][0]["transcript"] == "Sea salt."
    talk.respond()
    assert talk.prompt() == [("user", "1 s")], "the model hears the turn, and does not read it"


def test_a_session_may_only_transcribe() -> None:
    talk = Talk(vad=ServerVad(silence_duration_ms=64))
    heard = {"transcription": {"model": "gpt-4o-transcribe", "language": "en"}}
    (updated,) = talk.send("session.update", session={"type": "transcription", "audio": {"input": heard}})
    assert updated["session"]["object"] == "realtime.transcription_session"
    assert updated["session"]["type"] == "transcription"
    assert updated["session"]["audio"]["input"]["transcription"] == heard["transcription"]
    assert updated["session"]["audio"].keys() == {"input"}
    talk.hear(0.9, windows=60)
    talk.hear(0.0, windows=4)
    (turn,) = talk.transcribed
    assert turn.transcription.language == "en"
    assert talk.asked == []
    assert error_of(talk.send("response.create"))["code"] == "unsupported_value"
    (updated,) = talk.send("session.update", session={"audio": {"input": {"transcription": None}}})
    assert updated["session"]["type"] == "transcription"
    assert updated["session"]["audio"]["input"]["transcription"] == {}, "it would do nothing else"


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("", "The capital of", ""),
        ("The cap.", "The capital of", "The"),
        ("The capital.", "The capital of Italy", "The capital"),  # a point at the end of what was heard so far
        ("The capital of", "The capital of.", "The capital"),  # the last word may go on, whatever is behind it
        ("The capital of", "The Capitol of Italy", "The"),
        ("It's 3.5 per", "It's 3.5 percent", "It's 3.5"),
        ("今天天", "今天天气好", "今天天"),
        ("今天。", "今天天。", "今天"),
        ("Größe?", "Größe? Ja", "Größe?"),
        (" Well", " Well then", " Well"),
        ("...", "...", ""),
    ],
)
def test_what_two_transcripts_of_a_growing_sound_agree_on(before: str, now: str, same: str) -> None:
    assert agreed(before, now) == same


TEXTS = st.text(st.sampled_from("ab天.' "), max_size=12)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["English", "Thai"]))))
def test_nothing_that_is_said_for_sure_is_taken_back(transcripts: list[tuple[str, str]]) -> None:
    said, deltas = TurnText("item"), []
    for rest, language in transcripts:
        known = said.text
        deltas.append(said.add(rest, language))
        assert (known + rest).startswith(said.text)
        assert said.text == "".join(deltas)


def test_words_are_not_sure_before_their_language_is() -> None:
    said = TurnText("item")
    steps = [("So far", "English"), ("So far so", "Danish"), ("So far so good", "Danish"), (" good it", "")]
    assert [said.add(*step) for step in steps] == ["", "", "So far so", " good"]
    assert (said.text, said.language) == ("So far so good", "Danish")


def test_a_turn_that_is_to_be_written_down_is_known_while_it_is_spoken() -> None:
    talk = Talk(vad=ServerVad(silence_duration_ms=64, prefix_padding_ms=0), transcription=Transcription(language="en"))
    talk.hear(0.0)
    assert talk.session.spoken is None
    (started,) = talk.hear(0.9, windows=3)
    assert talk.session.spoken == (Transcribe(started["item_id"], Transcription(language="en")), 768)
    talk.hear(0.0, windows=4)
    assert talk.session.spoken is None
    talk.send("session.update", session={"type": "realtime", "audio": {"input": {"transcription": None}}})
    talk.hear(0.9, windows=3)
    assert talk.session.spoken is None, "nobody reads it"


async def test_nothing_is_written_of_a_turn_that_is_spoken_while_one_that_has_ended_is_written() -> None:
    streams: list[RequestStream] = []

    async def submit(**request: Any) -> RequestStream:
        streams.append(RequestStream(f"{len(streams)}", lambda _: None, lambda *_: None))
        return streams[-1]

    async def transcriber() -> tuple[Any, Any]:
        facts = SimpleNamespace(hearing=HearingAbility(("English",)), outputs={"text": "scribe"}, stages=())
        return SimpleNamespace(submit=submit), facts

    async def sent(text: str) -> None:
        """The client reads all."""

    async def speak() -> None:
        """For a second, in which it is looked at twice whether something is to be written down."""
        for _ in range(2):
            talk.hear(0.9, windows=16)
            writer.listen()
            await asyncio.sleep(0.01)

    talk = Talk(vad=ServerVad(silence_duration_ms=64), transcription=Transcription())
    asker = SimpleNamespace(state=SimpleNamespace(ears=None, deaf=False, transcriber=transcriber), common={})
    writer = Transcriber(talk.session, Outbox(sent, 1.0, None), cast(Asker, asker))
    writing = asyncio.create_task(writer.run())
    talk.hear(0.9, windows=10)
    talk.hear(0.0, windows=4)
    writer.add(talk.transcribed[0])
    await eventually(lambda: len(streams) == 1)
    await speak()
    assert len(streams) == 1
    streams[0].deliver(Done(usage={}))
    await asyncio.sleep(0.01)
    await speak()
    assert len(streams) == 2
    writing.cancel()


async def test_a_client_that_leaves_an_event_unread_ends_its_session() -> None:
    async def never(text: str) -> None:
        await asyncio.Event().wait()

    outbox = Outbox(never, 0.01, None)
    outbox.append({"type": "session.created"})
    writing = asyncio.create_task(outbox.write())
    await asyncio.wait((writing,), timeout=5 * PATIENCE)
    assert isinstance(writing.exception(), TimeoutError)
