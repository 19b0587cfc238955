"""Tools in realtime sessions: calls and results as items. Every event is checked against OpenAI's types."""

from __future__ import annotations

from typing import Any

import pytest

from omni_actors.protocol.payloads import ToolCallPiece
from tests.support.realtime import Talk, error_of, kinds

WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}
ARGUMENTS = '{"city": "Kiel"}'
CALL = [ToolCallPiece(0, "call_1", "weather"), ToolCallPiece(0, arguments=ARGUMENTS[:5])]
REST = [ToolCallPiece(0, arguments=ARGUMENTS[5:])]


@pytest.fixture
def talk() -> Talk:
    """A session with a tool and a question."""
    made = Talk()
    made.send("session.update", session={"type": "realtime", "tools": [WEATHER], "parallel_tool_calls": False})
    made.say("How is the weather?")
    return made


def call(talk: Talk, text: str = "") -> list[dict[str, Any]]:
    """Answers with a call; returns all events from its first piece on."""
    response = talk.respond()
    events = talk.take(talk.session.text(response, text, CALL))
    events += talk.take(talk.session.text(response, "", REST))
    return [*events, *talk.take(talk.session.answered(response, {}, cut=False))]


def test_a_call_is_an_item_of_its_own(talk: Talk) -> None:
    events = call(talk)
    assert kinds(events) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
        "rate_limits.updated",
    ]
    assert events[0]["item"]["status"] == "in_progress"
    assert events[0]["output_index"] == 0
    done = events[4]
    assert done["name"] == "weather"
    assert done["arguments"] == ARGUMENTS
    (item,) = events[-2]["response"]["output"]
    assert item["type"] == "function_call"
    assert item["call_id"] == done["call_id"] == "call_1"


@pytest.mark.parametrize("arguments", ["true", "[1]", '{"city": '])
def test_a_call_that_is_not_well_formed_does_not_spoil_later_answers(talk: Talk, arguments: str) -> None:
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


def test_a_call_that_was_cut_short_is_dropped(talk: Talk) -> None:
    response = talk.respond()
    item = talk.take(talk.session.text(response, "", CALL))[0]["item"]["id"]
    events = talk.send("response.cancel")
    assert kinds(events) == ["conversation.item.deleted", "response.done", "rate_limits.updated"]
    assert events[0]["item_id"] == item
    assert events[1]["response"]["output"][0]["status"] == "incomplete"
    talk.respond()
    assert [message["role"] for message in talk.asked[-1].messages] == ["user"]
