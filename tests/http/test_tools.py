"""Tools with the unchanged `openai` package: a scripted stage answers, vLLM's own parser reads what it says."""

from __future__ import annotations

import base64
import json

import openai
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from tests.support.realtime import MANUAL, openai_session, until_event
from tests.support.scripted import SAY, SHOW, called
from tests.support.servers import HttpPipeline

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FLAT_TOOLS = [
    {"type": "function", "name": name, "description": f"The {name} of a city.", "parameters": CITY}
    for name in ("weather", "time")
]
NAMES = ("name", "description", "parameters")
TOOLS = [{"type": "function", "function": {name: tool[name] for name in NAMES}} for tool in FLAT_TOOLS]
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
BYTES_PER_TOKEN = 2 * 480


ONE_CALL = called("weather", city="Kiel")
TWO_CALLS = f"{ONE_CALL}\n{called('time', city='Kiel')}"


def asked(answer: str) -> list[dict]:
    return [{"role": "user", "content": SAY + answer}]


def test_a_call_is_an_answer_of_its_own_kind(scripted: HttpPipeline) -> None:
    answer = scripted.openai().chat.completions.create(
        model="scripted", messages=asked(f"Let me look.\n{TWO_CALLS}"), tools=TOOLS
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look.\n"
    assert {made.type for made in choice.message.tool_calls} == {"function"}
    assert [made.function.name for made in choice.message.tool_calls] == ["weather", "time"]
    assert {json.loads(made.function.arguments)["city"] for made in choice.message.tool_calls} == {"Kiel"}
    assert len({made.id for made in choice.message.tool_calls}) == 2


def test_calls_are_streamed_as_the_openai_package_puts_them_together(scripted: HttpPipeline) -> None:
    with scripted.openai().chat.completions.stream(model="scripted", messages=asked(TWO_CALLS), tools=TOOLS) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert len(pieces) > 8, "arguments come bit by bit"
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert [json.loads(made.function.arguments) for made in choice.message.tool_calls] == [{"city": "Kiel"}] * 2


def test_a_call_is_not_spoken(scripted: HttpPipeline) -> None:
    """The talker echoes the tokens that it gets, which here are the bytes of the text."""
    client = scripted.openai()
    text = "Let me look."
    answer = client.chat.completions.create(model="scripted", messages=asked(text + ONE_CALL), tools=TOOLS, **SPOKEN)
    message = answer.choices[0].message
    assert message.audio.transcript == text
    assert message.tool_calls[0].function.name == "weather"
    spoken = client.chat.completions.create(model="scripted", messages=asked(text), **SPOKEN).choices[0].message
    assert len(message.audio.data) == len(spoken.audio.data)
    assert len(base64.b64decode(spoken.audio.data)) >= len(text) * BYTES_PER_TOKEN


def test_results_of_calls_are_part_of_later_turns(scripted: HttpPipeline) -> None:
    client = scripted.openai()
    turns: list = asked(ONE_CALL)
    message = client.chat.completions.create(model="scripted", messages=turns, tools=TOOLS).choices[0].message
    turns += [
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "14 degrees"},
        {"role": "user", "content": SHOW},
    ]
    prompt = client.chat.completions.create(model="scripted", messages=turns, tools=TOOLS, tool_choice="none")
    shown = prompt.choices[0].message.content
    assert '"description": "The weather of a city."' in shown
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>' in shown
    assert "<tool_response>\n14 degrees\n</tool_response>" in shown
    turns[2]["tool_call_id"] = "call_of_another"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=turns, tools=TOOLS)
    assert caught.value.param == "messages[2].tool_call_id"


def test_no_choice_leaves_the_answer_as_it_is_and_no_parallel_calls_leave_the_first(scripted: HttpPipeline) -> None:
    client = scripted.openai()
    plain = client.chat.completions.create(model="scripted", messages=asked(TWO_CALLS), tools=TOOLS, tool_choice="none")
    assert plain.choices[0].message.content == TWO_CALLS
    assert plain.choices[0].finish_reason == "stop"
    first = client.chat.completions.create(
        model="scripted", messages=asked(TWO_CALLS), tools=TOOLS, parallel_tool_calls=False
    )
    assert [made.function.name for made in first.choices[0].message.tool_calls] == ["weather"]


def test_responses_call_functions_and_take_what_they_gave(scripted: HttpPipeline) -> None:
    client = scripted.openai()
    options = {"model": "scripted", "tools": FLAT_TOOLS}
    answer = client.responses.create(input=f"{SAY}Let me look. {TWO_CALLS}", **options)
    message, *calls = answer.output
    assert message.content[0].text == "Let me look. "
    assert [(made.type, made.name, json.loads(made.arguments)) for made in calls] == [
        ("function_call", "weather", {"city": "Kiel"}),
        ("function_call", "time", {"city": "Kiel"}),
    ]
    results = [{"type": "function_call_output", "call_id": made.call_id, "output": "14"} for made in calls]
    show = {"role": "user", "content": SHOW}
    items = [{"role": "user", "content": "ask"}, *answer.output, *results, show]
    for given in ({"input": items}, {"input": [*results, show], "previous_response_id": answer.id}):
        shown = client.responses.create(**given, **options, tool_choice="none").output_text
        assert shown.count("<tool_response>\n14\n</tool_response>") == 2
        answered = shown.partition("<|im_start|>assistant\n")[2]
        assert answered.count('"arguments": {"city": "Kiel"}') == 2


def test_calls_in_a_stream_of_responses_are_events(scripted: HttpPipeline) -> None:
    with scripted.openai().responses.stream(
        model="scripted", input=f"{SAY}Look. {TWO_CALLS}", tools=FLAT_TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert json.loads(final.output[2].arguments) == {"city": "Kiel"}


def test_tools_that_do_not_fit_are_refused_by_name(scripted: HttpPipeline) -> None:
    named = {"type": "function", "function": {"name": "wether"}}
    for changes, param in (
        ({"tool_choice": named}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ):
        body = {"tools": TOOLS, **changes}
        with pytest.raises(openai.BadRequestError) as caught:
            scripted.openai().chat.completions.create(model="scripted", messages=asked("x"), **body)
        assert caught.value.param == param


async def test_a_voice_session_calls_tools(scripted: HttpPipeline) -> None:
    """The call, its result, and a second answer that has both in its prompt."""
    async with openai_session(scripted.url, "scripted") as connection:
        await connection.session.update(session={**MANUAL, "tools": FLAT_TOOLS})
        await tell(connection, f"{SAY}Let me look.{ONE_CALL}")
        events = await until_event(connection, "response.done")
        message, made = events[-1].response.output
        assert message.content[0].transcript == "Let me look."
        assert made.name == "weather"
        assert json.loads(made.arguments) == {"city": "Kiel"}
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == made.arguments
        result = {"type": "function_call_output", "call_id": made.call_id, "output": "14 degrees"}
        await connection.conversation.item.create(item=result)
        await connection.session.update(session={"type": "realtime", "tool_choice": "none"})
        await tell(connection, SHOW)
        shown = (await until_event(connection, "response.done"))[-1].response.output[0].content[0].transcript
        assert "<tool_response>\n14 degrees\n</tool_response>" in shown
        assert '"description": "The weather of a city."' in shown


async def tell(connection: AsyncRealtimeConnection, text: str) -> None:
    content = [{"type": "input_text", "text": text}]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    await connection.response.create()
