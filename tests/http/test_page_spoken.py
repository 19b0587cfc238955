"""Spoken conversations on the web page, in which tests speak in the place of its microphone."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.config import error_event
from tests.support.browser import (
    SIZES,
    looks_good,
    needs_chromium,
    open_page,
    resize,
    sent_messages,
    take_picture,
    until,
    until_playing,
)
from tests.support.realtime import speech
from tests.support.servers import HttpPipeline

pytestmark = [needs_chromium, pytest.mark.nightly]
ECHOED = "Write down what is said"  # what the echo stages understand of any speech
ANSWER = """Rivers make it salty. Rain dissolves a little of the rock it runs over and carries it to the sea. \
The water evaporates and falls again as rain, but the minerals stay: mostly sodium and chloride. \
In a litre of the Atlantic there are thirty-five grams of them, in a litre of the Baltic eight."""
ROUTE = "**/v1/realtime"
MILLISECONDS_PER_CHARACTER = 20  # of what the echo stages speak
LONG = "hello sea " * 150  # 30 s: on a busy machine it takes long until the server hears what is said meanwhile
Event = dict[str, Any]
APPEND, CREATE, TRUNCATE = "input_audio_buffer.append", "conversation.item.create", "conversation.item.truncate"


class Line:
    """The page's connection to the server: notes what the page sends, and speaks in the place of its microphone.

    Sound that a page plays and records has gaps where others have the processor. What a test says here has none.
    """

    def __init__(self) -> None:
        self.sent: list[Event] = []
        self._speech = bytearray()

    def connect(self, route: WebSocketRoute, change: Callable[[Event], Event | None] = lambda event: event) -> None:
        """Connect a page, which receives the server's events as `change` returns them, except those that it drops."""
        server = route.connect_to_server()

        def back(data: str) -> None:
            if (changed := change(json.loads(data))) is not None:
                route.send(json.dumps(changed))

        def forward(data: str) -> None:
            event = json.loads(data)
            if event["type"] == APPEND:
                count = len(base64.b64decode(event["audio"]))
                heard, self._speech = self._speech[:count], self._speech[count:]
                event["audio"] = base64.b64encode(heard.ljust(count, b"\0")).decode()
            self.sent.append(event)
            server.send(json.dumps(event))

        route.on_message(forward)
        server.on_message(back)

    def speak(self) -> None:
        """Say something, followed by silence."""
        self._speech += speech(1.0).tobytes()  # shorter vowels are not always taken for speech

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.sent if event["type"] == kind]


@pytest.fixture
def line(page: Page) -> Line:
    """That of the page, for connections to which a test gives no route of its own."""
    made = Line()
    page.route("**/v1/realtime/calls", lambda route: route.abort())  # the page then takes a WebSocket
    page.route_web_socket(ROUTE, lambda route: made.connect(route))
    return made


def converse(page: Page, pipeline: HttpPipeline, instructions: str) -> None:
    """Begin a conversation, in which the echo stages repeat the instructions and what they said before."""
    open_page(page, pipeline)
    page.locator("#system").fill(instructions)
    page.locator("#converse").click()
    expect(page.locator("#spoken")).to_be_visible()


def said(page: Page, index: int) -> Any:
    return page.locator("li.assistant .say").nth(index)


def speak(page: Page, line: Line) -> int:
    """Speak a turn once there is a session that hears it; returns the turn's index."""
    turn = page.locator("li.user").count()
    expect(page.locator("#spoken-state")).to_have_text(re.compile("Listening|Thinking|Speaking"))
    line.speak()
    expect(page.locator("li.user")).to_have_count(turn + 1)
    return turn


def speak_and_hear(page: Page, line: Line) -> int:
    """Speak a turn, and wait for its answer and for what was understood; returns the turn's index."""
    turn = speak(page, line)
    expect(page.locator("li.assistant.done")).to_have_count(turn + 1)
    expect(page.locator("li.user.working")).to_have_count(0)
    return turn


def test_several_turns_are_spoken_and_written_down(echo: HttpPipeline, page: Page, line: Line) -> None:
    converse(page, echo, "sea")
    expect(page.locator("#mute")).to_be_focused()
    expect(page.locator("#composer")).to_be_hidden()
    speak_and_hear(page, line)
    expect(page.locator("li.user .say").nth(0)).to_contain_text(ECHOED)
    expect(said(page, 0)).to_have_text("sea")
    expect(page.locator("li.assistant").nth(0).get_by_label("Play again (0.1 s)")).to_be_visible()
    expect(page.locator("#timeline")).to_have_attribute("data-source", "pipeline")
    expect(page.locator("#captions")).to_have_text("sea")
    expect(page.locator("#spoken-delay")).to_have_text(re.compile(r"First sound \d+\.\d s after your last word"))
    page.locator("#type").click()
    page.locator("#typed").fill("!")
    page.locator("#typed").press("Enter")
    expect(said(page, 1)).to_have_text("seasea!")  # the session goes on, and has the answer before
    expect(page.locator("li.assistant.done")).to_have_count(2)
    page.locator("#end-spoken").click()
    expect(page.locator("#converse")).to_be_focused()
    until(page, lambda: "omni_realtime_sessions 0" in metrics(page, echo), "the end of the session")
    page.locator("#text").fill("and now in writing")
    messages = sent_messages(page, page.locator("#send").click)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert messages[1]["content"].startswith(ECHOED)
    assert messages[2]["content"] == "sea"
    assert messages[-1]["content"] == "and now in writing"
    page.locator("#voice").select_option("Ethan")
    page.locator("#speed").select_option("2×")
    page.locator("#converse").click()
    until(page, lambda: len(line.of_kind("session.update")) == 2, "another session", 15)
    spoken = [event["session"]["audio"]["output"] for event in line.of_kind("session.update")]
    assert spoken == [{"voice": None, "speed": 1}, {"voice": "Ethan", "speed": 2}]
    page.locator("#end-spoken").click()


def metrics(page: Page, pipeline: HttpPipeline) -> str:
    return page.request.get(f"{pipeline.url}/metrics").text()


def test_speech_cuts_the_answer_to_what_was_heard(echo: HttpPipeline, page: Page, line: Line) -> None:
    converse(page, echo, LONG)
    speak(page, line)
    until_playing(page)
    speak(page, line)
    until(page, lambda: line.of_kind(TRUNCATE), "speech during the answer", 15)
    cut = line.of_kind(TRUNCATE)[0]
    characters = cut["audio_end_ms"] / MILLISECONDS_PER_CHARACTER
    remaining = said(page, 0)
    expect(page.locator("li.assistant").nth(0).locator("small")).to_contain_text("interrupted")
    least = characters - len("hello ") - 1
    until(page, lambda: least <= len(remaining.inner_text()) <= characters, "the text that was heard", 15)
    assert LONG.startswith(remaining.inner_text())
    assert 0 < cut["audio_end_ms"] < MILLISECONDS_PER_CHARACTER * len(LONG)
    until_playing(page)  # the next answer
    cuts = len(line.of_kind(TRUNCATE))
    page.keyboard.press("Escape")
    expect(page.locator("body")).to_have_attribute("data-playing", "false")
    expect(page.locator("#spoken")).to_be_visible()
    until(page, lambda: len(line.of_kind(TRUNCATE)) == cuts + 1, "the truncation")
    page.keyboard.press("Alt+c")
    expect(page.locator("#spoken")).to_be_hidden()
    expect(page.locator("#error")).to_be_hidden()


def test_a_lost_connection_is_opened_again_with_the_conversation(echo: HttpPipeline, page: Page, line: Line) -> None:
    connections: list[WebSocketRoute] = []
    understood: list[Event] = []

    def connect(route: WebSocketRoute) -> None:
        first = not connections
        connections.append(route)

        def change(event: Event) -> Event | None:
            if first or "input_audio_transcription" not in event["type"]:
                return event
            understood.append(event)  # the second connection is lost when the page knows the beginning of what was said
            return event if len(understood) == 1 else None

        line.connect(route, change)

    def in_words() -> list[tuple[str, str]]:
        """What the page has told the sessions that it opened again."""
        created = [event["item"] for event in line.of_kind(CREATE)]
        return [(item["role"], item["content"][0]["text"]) for item in created]

    page.route_web_socket(ROUTE, connect)
    converse(page, echo, "sea")
    speak_and_hear(page, line)
    connections[0].close(code=1012)
    until(page, lambda: len(in_words()) == 2, "the conversation", 15)
    question, answer = in_words()
    assert question[0] == "user"
    assert question[1].startswith(ECHOED)
    assert answer == ("assistant", "sea")
    speak(page, line)
    expect(said(page, 1)).to_contain_text(f"sea{ECHOED}")  # it has both
    expect(page.locator("li.assistant.done")).to_have_count(2)
    until(page, lambda: understood, "the beginning of what was said")
    connections[1].close(code=1012)
    until(page, lambda: len(in_words()) == 6, "the longer conversation", 15)
    assert in_words()[2:4] == [question, answer]
    assert in_words()[4] == ("user", f"{understood[0]['delta']} …")  # which no model shall take for the whole
    expect(page.locator("#error")).to_be_hidden()


def test_what_fails_is_said_in_words_and_the_conversation_goes_on(echo: HttpPipeline, page: Page, line: Line) -> None:
    failures = {
        "The server cannot answer at the moment.": HttpError(503, "Something else.", code="new"),
        "The server does not accept this message.": HttpError(400, "Something else.", code="new"),
    }
    coming = iter(failures.values())

    def change(event: Event) -> Event:
        """Have a failure in the place of what follows the end of an answer."""
        return error_event(next(coming)) if event["type"] == "rate_limits.updated" else event

    page.route_web_socket(ROUTE, lambda route: line.connect(route, change))
    converse(page, echo, "sea")
    for words in failures:
        speak_and_hear(page, line)
        expect(page.locator("#error")).to_contain_text(words)


def test_everybody_can_converse_at_any_width(echo: HttpPipeline, page: Page, line: Line) -> None:
    def change(event: Event) -> Event | None:
        """Have the page told that the user says this, in place of what the echo stages say of any sound."""
        if event["type"].endswith("input_audio_transcription.completed"):
            event["transcript"] = "Why is the sea salt?"
        return None if event["type"].endswith("input_audio_transcription.delta") else event

    page.route_web_socket(ROUTE, lambda route: line.connect(route, change))
    converse(page, echo, f"{ANSWER} " * 5)  # 30 s
    speak(page, line)
    expect(page.locator("#interrupt")).to_be_visible()
    expect(page.locator("#spoken")).to_have_attribute("data-state", "speaking")
    expect(page.locator("#captions mark")).to_have_text(re.compile(r"^\w+[.,]?$"))  # the word that is spoken
    for size in SIZES:
        resize(page, size)
        take_picture(page, f"web-spoken-{size[0]}.png")
    for name in ("type", "interrupt", "end-spoken"):
        page.keyboard.press("Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
    expect(page.locator("li.user .say")).to_have_text("Why is the sea salt?")
    for size in SIZES:
        resize(page, size)
        page.keyboard.press("Control")  # shows the focus
        box = page.locator("#end-spoken").bounding_box()
        assert box["x"] + box["width"] <= size[0]
        assert box["y"] + box["height"] <= size[1]
        looks_good(page)
