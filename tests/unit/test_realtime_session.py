"""What a realtime session decides, and what is kept of it. Every event is checked against OpenAI's types."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.generation import MAX_MESSAGES
from omni_actors.http_server.realtime.config import Pipeline, ServerVad
from omni_actors.http_server.realtime.conversation import ItemPart, MessageItem, RealtimeConversation, TurnText, agreed
from omni_actors.http_server.realtime.requests import Outbox
from omni_actors.http_server.realtime.resuming import SLACK_BYTES, SessionKeeper, find
from omni_actors.http_server.store import Journals
from omni_actors.protocol.payloads import ToolCallPiece, WordTime
from tests.support.realtime import PIPELINE, SECOND, Talk, error_of, kinds
from tests.support.waiting import PATIENCE

BEGIN_SPOKEN = ["response.output_item.added", "conversation.item.added", "response.content_part.added"]
END = ["response.content_part.done", "conversation.item.done", "response.output_item.done", "response.done"]
END_SPOKEN = ["response.output_audio.done", "response.output_audio_transcript.done", *END, "rate_limits.updated"]


def update(talk: Talk, **session: Any) -> list[dict[str, Any]]:
    return talk.send("session.update", session={"type": "realtime", **session})


def test_an_update_changes_what_it_names_only() -> None:
    talk = Talk()
    assert talk.events[0]["session"]["audio"]["output"]["format"] == {"type": "audio/pcm", "rate": 24000}
    (updated,) = update(talk, instructions="Be brief.", max_output_tokens=9, audio={"output": {"voice": "Ethan"}})
    assert updated["session"]["max_output_tokens"] == 9
    (updated,) = update(talk, max_output_tokens="inf")
    assert updated["session"]["max_output_tokens"] == "inf"
    (updated,) = update(talk, audio={"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}})
    assert updated["session"]["instructions"] == "Be brief."
    assert updated["session"]["audio"]["output"]["voice"] == "Ethan"
    assert updated["session"]["audio"]["input"]["turn_detection"]["threshold"] == 0.7
    (updated,) = update(talk, audio={"input": {"turn_detection": None}}, output_modalities=["text"])
    assert updated["session"]["audio"]["input"]["turn_detection"] is None
    assert updated["session"]["output_modalities"] == ["text"]
    assert updated["session"]["instructions"] == "Be brief."


def listening(**fields: Any) -> dict[str, Any]:
    return {"audio": {"input": {"transcription": {}, **fields}}}


@pytest.mark.parametrize(
    ("session", "param", "code"),
    [
        ({"instruction": ""}, "session.instruction", "unknown_parameter"),
        ({"audio": {"output": {"voice": "alloy"}}}, "session.audio.output.voice", "unknown_voice"),
        ({"audio": {"output": {"speed": 4.2}}}, "session.audio.output.speed", "invalid_value"),
        ({"output_modalities": ["text", "audio"]}, "session.output_modalities", "invalid_value"),
        ({"max_output_tokens": 0}, "session.max_output_tokens", "invalid_value"),
        ({"tool_choice": "required"}, "session.tool_choice", "invalid_value"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "session.tools[0].type", "invalid_value"),
        (
            {"tools": [{"type": "function", "name": "time"}], "tool_choice": {"type": "function", "name": "tim"}},
            "session.tool_choice.name",
            "invalid_value",
        ),
        (listening(format={"type": "audio/mp3"}), "session.audio.input.format.type", "invalid_value"),
        (listening(format={"type": "audio/pcmu", "rate": 16_000}), "session.audio.input.format", "invalid_value"),
        (
            listening(turn_detection={"type": "no_vad", "threshold": 0.5}),
            "session.audio.input.turn_detection.type",
            "invalid_value",
        ),
        (listening(transcription={"delay": "low"}), "session.audio.input.transcription.delay", "invalid_value"),
        ({"model": "gpt-realtime"}, "session.model", "model_not_changeable"),
        ({"stage_params": {"nose": {}}}, "session.stage_params", "invalid_value"),
        ({"prompt": {"id": "pmpt_1"}}, "session.prompt", "invalid_value"),
    ],
)
def test_a_refused_field_leaves_the_others(session: dict[str, Any], param: str, code: str) -> None:
    talk = Talk()
    given = {"type": "realtime", "instructions": "Yes.", **session}
    updated, refused = talk.send("session.update", event_id="e1", session=given)
    error = error_of([refused])
    assert error["param"] == param
    assert error["code"] == code
    assert error["event_id"] == "e1"
    assert updated["session"]["instructions"] == "Yes."
    assert updated["session"]["model"] == "echo"
    assert updated["session"]["audio"]["output"]["voice"] is None
    heard = updated["session"]["audio"]["input"]
    assert (heard["transcription"] == {}) is ("input" in session.get("audio", ()))
    assert heard["turn_detection"] is None
    assert update(talk) == [{**updated, "event_id": talk.events[-1]["event_id"]}]


def test_a_pipeline_without_speech_answers_in_text() -> None:
    talk = Talk(Pipeline(voices=(), stages=("thinker",), speaks=False))
    assert talk.events[0]["session"]["output_modalities"] == ["text"]
    assert error_of(update(talk, output_modalities=["audio"])[1:])["code"] == "unknown_modality"


def test_a_written_turn_is_answered_in_text() -> None:
    talk = Talk()
    update(talk, output_modalities=["text"], instructions="Be brief.")
    talk.say("Why is the sea salt?")
    response = talk.respond()
    assert talk.asked[-1].config.output == "text"
    assert talk.prompt() == [("system", "Be brief."), ("user", "Why is the sea salt?")]
    assert kinds(talk.take(talk.session.text(response, "Rivers"))) == [*BEGIN_SPOKEN, "response.output_text.delta"]
    assert kinds(talk.take(talk.session.text(response, "."))) == ["response.output_text.delta"]
    ended = talk.take(talk.session.answered(response, {"total_tokens": 3}, cut=False))
    assert kinds(ended) == ["response.output_text.done", *END, "rate_limits.updated"]
    assert ended[0]["text"] == "Rivers."
    done = ended[-2]["response"]
    assert done["status"] == "completed"
    assert done["output"][0]["content"] == [{"type": "output_text", "text": "Rivers."}]
    assert done["usage"] == {"total_tokens": 3}


def test_items_can_be_put_in_retrieved_and_deleted() -> None:
    talk = Talk()
    talk.say("b", id="b")
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], "id": "a"}
    assert talk.send("conversation.item.create", item=item, previous_item_id="root")[0]["previous_item_id"] is None
    sound = {"type": "input_audio", "audio": base64.b64encode(SECOND).decode(), "transcript": "Sea salt."}
    added = talk.send("conversation.item.create", item={**item, "id": "m", "content": [sound]}, previous_item_id="a")[0]
    assert added["previous_item_id"] == "a"
    assert added["item"]["content"] == [{"type": "input_audio", "transcript": "Sea salt."}]
    talk.respond()
    assert talk.prompt() == [("user", "a"), ("user", "1 s"), ("user", "b")]
    (found,) = talk.send("conversation.item.retrieve", item_id="m")
    assert base64.b64decode(found["item"]["content"][0]["audio"]) == SECOND
    assert kinds(talk.send("conversation.item.delete", item_id="m")) == ["conversation.item.deleted"]
    assert error_of(talk.send("conversation.item.retrieve", item_id="m"))["code"] == "item_not_found"
    assert error_of(talk.send("conversation.item.create", item=item))["code"] == "item_exists"
    unknown = {**item, "id": "c"}
    refused = error_of(talk.send("conversation.item.create", item=unknown, previous_item_id="z"))
    assert refused["param"] == "previous_item_id"


@pytest.mark.parametrize(
    ("role", "content", "param"),
    [
        ("assistant", {"type": "input_text", "text": "a"}, "item.content[0].type"),
        ("user", {"type": "output_text", "text": "a"}, "item.content[0].type"),
        ("system", {"type": "input_audio", "audio": "AAAA"}, "item.content[0].type"),
        ("assistant", {"type": "input_image", "image_url": "data:"}, "item.content[0].type"),
        ("user", {"type": "input_audio", "audio": "AAAA"}, "item.content[0].audio"),
    ],
)
def test_content_that_a_role_cannot_have_is_refused(role: str, content: dict[str, str], param: str) -> None:
    item = {"type": "message", "role": role, "content": [content]}
    assert error_of(Talk().send("conversation.item.create", item=item))["param"] == param


def test_sound_that_does_not_fit_is_refused() -> None:
    talk = Talk(audio_seconds=1.5)
    assert error_of(talk.append(b"\0"))["param"] == "audio"
    assert error_of(talk.send("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"
    talk.append(SECOND)
    assert error_of(talk.append(SECOND))["code"] == "media_too_large"
    assert kinds(talk.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    assert talk.append(SECOND) == []
    assert talk.session.held == len(SECOND)


def test_a_conversation_has_so_many_items_and_sounds() -> None:
    conversation = RealtimeConversation(10.0, None)
    for number in range(MAX_MESSAGES + 1):
        conversation.add(MessageItem(f"{number}", "user", [ItemPart("input_text", "four")]))
    assert conversation.drop_oldest() == ["0"]
    assert conversation.size == 4 * MAX_MESSAGES
    talk = Talk(msgspec.structs.replace(PIPELINE, max_audios=1))
    for _ in range(2):
        talk.append(SECOND)
        talk.send("input_audio_buffer.commit")
    talk.respond()
    assert talk.prompt() == [("user", "1 s")]


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}


def show(talk: Talk, *pictures: bytes) -> list[dict[str, Any]]:
    content = [{"type": "input_text", "text": "See:"}, *[PICTURE for _ in pictures]]
    return talk.send("conversation.item.create", pictures, item={"type": "message", "role": "user", "content": content})


def test_a_user_shows_pictures() -> None:
    talk = Talk(msgspec.structs.replace(PIPELINE, max_images=3))
    added, _ = show(talk, b"one", b"two")
    assert added["item"]["content"] == [{"type": "input_text", "text": "See:"}, *[{"type": "input_image"}] * 2]
    assert talk.session.held == len("See:onetwo")
    talk.respond()
    assert talk.prompt() == [("user", "See: <one> <two>")]
    assert kinds(show(talk, b"three", b"four"))[-1] == "conversation.item.deleted", "the model takes three"
    assert error_of(show(talk, *[b"five"] * 4))["code"] == "item_too_large"
    assert talk.session.held == len("See:threefour")


def test_a_response_may_differ_from_its_session() -> None:
    talk = Talk(instructions="Be brief.")
    talk.say("Hello")
    talk.respond(instructions="Sing.", output_modalities=["text"], max_output_tokens=5, metadata={"a": "b"}, seed=7)
    asked = talk.asked[-1].config
    assert asked.instructions == "Sing."
    assert asked.output == "text"
    assert asked.max_output_tokens == 5
    assert asked.seed == 7
    assert talk.events[-1]["response"]["metadata"] == {"a": "b"}
    assert update(talk)[0]["session"]["instructions"] == "Be brief."


def test_a_response_aside_leaves_the_conversation_alone() -> None:
    talk = Talk()
    item = talk.say("Hello")
    given = [
        {"type": "item_reference", "id": item},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "In one word"}]},
    ]
    response = talk.respond(conversation="none", input=given)
    assert talk.prompt() == [("user", "Hello"), ("user", "In one word")]
    events = talk.take(talk.session.text(response, "Hi"))
    events += talk.take(talk.session.answered(response, {}, cut=False))
    assert "conversation.item.added" not in kinds(events)
    assert events[-2]["response"]["conversation_id"] is None
    talk.respond()
    assert talk.prompt() == [("user", "Hello")]


def test_one_response_runs_at_a_time() -> None:
    talk = Talk()
    response = talk.respond()
    error = error_of(talk.send("response.create", event_id="e2"))
    assert error["code"] == "conversation_already_has_active_response"
    assert error["event_id"] == "e2"
    assert error_of(talk.send("response.cancel", response_id="resp_other"))["code"] == "response_cancel_not_active"
    assert talk.cancelled == []
    talk.send("response.cancel", response_id=response)
    assert talk.cancelled == [response]
    assert error_of(talk.send("response.cancel"))["code"] == "response_cancel_not_active"


@pytest.mark.parametrize(
    ("cut", "status", "reason"), [(True, "incomplete", "max_output_tokens"), (False, "cancelled", "client_cancelled")]
)
def test_a_response_that_is_cut_ends_at_once_and_takes_nothing_more(cut: bool, status: str, reason: str) -> None:
    """By its limit of tokens, or by the client."""
    talk = Talk()
    response = talk.respond()
    talk.take(talk.session.text(response, "One two"))
    events = talk.take(talk.session.answered(response, {}, cut=True)) if cut else talk.send("response.cancel")
    assert kinds(events) == END_SPOKEN
    done = events[-2]["response"]
    assert (done["status"], done["status_details"]["reason"]) == (status, reason)
    assert done["output"][0]["status"] == "incomplete"
    assert talk.take(talk.session.text(response, " three")) == []
    assert talk.take(talk.session.sound(response, SECOND)) == []
    assert talk.take(talk.session.answered(response, {}, cut=False)) == []
    assert talk.fail(response, "aborted") == []


def test_a_prompt_that_is_too_long_is_shortened() -> None:
    talk = Talk()
    talk.say("Rules", role="system")
    for number in range(4):
        talk.say(f"Question {number}")
        talk.say(f"Answer {number}", role="assistant")
    talk.say("Last")
    response = talk.respond()
    assert set(kinds(talk.fail(response, "prompt_too_long"))) == {"conversation.item.deleted"}
    assert talk.prompt()[:2] == [("system", "Rules"), ("user", "Question 3")]
    assert set(kinds(talk.fail(response, "prompt_too_long"))) == {"conversation.item.deleted"}
    assert talk.prompt() == [("system", "Rules"), ("user", "Last")]
    assert len({asked.request_id for asked in talk.asked}) == 3, "the pipeline remembers ids"
    assert kinds(talk.fail(response, "prompt_too_long"))[1] == "response.done"
    update(talk, truncation="disabled")
    talk.say("One more")
    assert kinds(talk.fail(talk.respond(), "prompt_too_long"))[:2] == ["error", "response.done"]


def test_the_text_of_an_interrupted_answer_is_cut_at_the_pace_of_earlier_ones() -> None:
    """Its text is longer than its sound, so its own proportion would leave words that nobody heard."""
    talk = Talk()
    talk.answer("a" * 10, seconds=1.0)
    response = talk.respond()
    item = talk.take(talk.session.text(response, "one two three four five six seven"))[0]["item"]["id"]
    talk.take(talk.session.sound(response, SECOND))
    talk.send("response.cancel")
    talk.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1000)
    talk.respond()
    assert talk.prompt()[-1] == ("assistant", "one two")


@pytest.mark.parametrize("late", [True, False], ids=["times come late", "times are known"])
@pytest.mark.parametrize(
    ("end_ms", "heard"),
    [(400, ""), (500, "One,"), (1499, "One, two,"), (1500, "One, two, three."), (2000, "One, two, three.")],
)
def test_an_answer_is_cut_by_the_times_of_its_words(late: bool, end_ms: int, heard: str) -> None:
    """In its first second it says one word, and most of its text in the next half."""
    talk, text = Talk(), "One, two, three."
    item = talk.answer(text, seconds=2.0)
    words = [WordTime("One", 0.1, 0.5, 0), WordTime("two", 1.0, 1.2, 5), WordTime("three", 1.3, 1.5, 10)]
    if not late:
        talk.session.timed(item, text, words)
    talk.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=end_ms)
    if late:
        talk.session.timed(item, text, words)
    (retrieved,) = talk.send("conversation.item.retrieve", item_id=item)
    assert retrieved["item"]["content"][0]["transcript"] == heard
    talk.send("conversation.item.delete", item_id=item)
    talk.session.timed(item, text, words)  # of an answer that is gone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"audio_end_ms": 1001}, "audio_end_ms"),
        ({"content_index": 1}, "content_index"),
        ({"item_id": "user"}, "content_index"),
        ({"item_id": "told"}, "item_id"),
    ],
)
def test_what_cannot_be_truncated_is_refused(change: dict[str, Any], param: str) -> None:
    talk = Talk()
    talk.say("Hello", id="user")
    talk.say("Hello", role="assistant", id="told")
    fields = {"item_id": talk.answer("one"), "content_index": 0, "audio_end_ms": 500, **change}
    assert error_of(talk.send("conversation.item.truncate", **fields))["param"] == param


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
    other = SessionKeeper(talk.session, "me", journals)
    goes_on = asyncio.create_task(other.run())
    other.note(talk.events[0])
    await other.caught_up.wait()
    assert not writing.done()
    keeper.note(talk.events[-1])
    await writing  # another connection has the session
    goes_on.cancel()
    await asyncio.gather(goes_on, return_exceptions=True)
    for each in (keeper, other):
        await each.close(ended=True)
    assert os.listdir(file.parent) == []


WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}
ARGUMENTS = '{"city": "Kiel"}'
CALL = [ToolCallPiece(0, "call_1", "weather"), ToolCallPiece(0, arguments=ARGUMENTS[:5])]


@pytest.fixture
def asked_with_a_tool() -> Talk:
    made = Talk()
    made.send("session.update", session={"type": "realtime", "tools": [WEATHER], "parallel_tool_calls": False})
    made.say("How is the weather?")
    return made


@pytest.mark.parametrize("arguments", ["true", "[1]", '{"city": '])
def test_a_call_that_is_not_well_formed_does_not_spoil_later_answers(asked_with_a_tool: Talk, arguments: str) -> None:
    talk = asked_with_a_tool
    response = talk.respond()
    talk.take(talk.session.text(response, "", [ToolCallPiece(0, "call_1", "weather", arguments)]))
    events = talk.take(talk.session.answered(response, {}, cut=False))
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["arguments"] == arguments, "the client sees what the model wrote"
    talk.send("conversation.item.create", item={"type": "function_call_output", "call_id": "call_1", "output": "?"})
    talk.respond()
    assert [message["role"] for message in talk.asked[-1].messages] == ["user"]


def test_calls_of_an_earlier_conversation_can_be_told() -> None:
    talk = Talk()
    result = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    assert error_of(talk.send("conversation.item.create", item=result))["param"] == "item.call_id"
    given = {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}", "id": "first"}
    talk.send("conversation.item.create", item=given)
    talk.send("conversation.item.create", item=result)
    talk.respond()
    assert [message["role"] for message in talk.asked[-1].messages] == ["assistant", "tool"]
    talk.send("response.cancel")
    talk.send("conversation.item.delete", item_id="first")
    talk.respond()
    assert talk.asked[-1].messages == [], "a result alone would belong to nothing"


def test_a_call_that_was_cut_short_is_dropped(asked_with_a_tool: Talk) -> None:
    talk = asked_with_a_tool
    response = talk.respond()
    item = talk.take(talk.session.text(response, "", CALL))[0]["item"]["id"]
    events = talk.send("response.cancel")
    assert kinds(events) == ["conversation.item.deleted", "response.done", "rate_limits.updated"]
    assert events[0]["item_id"] == item
    assert events[1]["response"]["output"][0]["status"] == "incomplete"
    talk.respond()
    assert [message["role"] for message in talk.asked[-1].messages] == ["user"]


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


async def test_a_client_that_leaves_an_event_unread_ends_its_session() -> None:
    async def never(text: str) -> None:
        await asyncio.Event().wait()

    outbox = Outbox(never, 0.01, None)
    outbox.append({"type": "session.created"})
    writing = asyncio.create_task(outbox.write())
    await asyncio.wait((writing,), timeout=5 * PATIENCE)
    assert isinstance(writing.exception(), TimeoutError)
