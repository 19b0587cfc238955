"""The web page in a real browser: a conversation in text and sound, the pipeline, errors, keys."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import ask, axe_violations, data, in_flight, needs_chromium, open_page, sent_messages, until
from tests.support.servers import HttpPipeline

pytestmark = [needs_chromium, pytest.mark.nightly]


def test_sound_plays_before_the_answer_is_complete(slow: HttpPipeline, page: Page) -> None:
    open_page(page, slow)
    page.locator("#toggle-details-panel").click()
    ask(page, "w" * 80)  # four seconds of text, then four seconds of sound, one step each 50 ms
    expect(page.locator("li.assistant .say")).to_contain_text("wwwww")
    expect(page.locator(".stages .busy").first).to_be_visible()
    until(page, lambda: data(page, "peak") > 0.2, "sound", 10)
    expect(page.locator("li.assistant.working")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("body")).to_have_attribute("data-playing", "false")


def test_stop_ends_the_request_in_every_stage(slow: HttpPipeline, page: Page) -> None:
    open_page(page, slow)
    for stop in (lambda: page.locator("#stop").click(), lambda: page.keyboard.press("Escape")):
        ask(page, "w" * 900)
        expect(page.locator("li.assistant .say").last).to_contain_text("www")
        assert in_flight(slow) == 1
        stop()
        expect(page.locator("li.assistant").last).to_contain_text("stopped")
        until(page, lambda: in_flight(slow) == 0, "the end of the request")
        expect(page.locator("#stop")).to_be_hidden()
        expect(page.locator("#details")).to_have_text("It was stopped.")  # and not how it was just before
    ask(page, "w" * 900)
    expect(page.locator("li.assistant .say").last).to_contain_text("www")
    messages = sent_messages(page, lambda: ask(page, "next"))  # ends the one before
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]  # with what was said
    expect(page.locator("li.assistant.stopped")).to_have_count(3)
    expect(page.locator("li.assistant").last).to_contain_text("www")
    page.keyboard.press("Escape")
    expect(page.locator("#error")).to_be_hidden()


def test_errors_are_shown_and_the_page_stays_usable(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    ask(page, "x" * 5000)
    expect(page.locator("#error")).to_contain_text("prompt_too_long")
    expect(page.locator("#error")).to_have_attribute("role", "alert")
    ask(page, "again")
    expect(page.locator("li.assistant .say").last).to_have_text("again")
    expect(page.locator("#error")).to_be_hidden()


def test_an_answer_that_is_cut_short_is_an_error(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    half = 'data: {"choices":[{"index":0,"delta":{"content":"half an"}}]}\n\n'
    page.route("**/v1/chat/**", lambda route: route.fulfill(body=half, content_type="text/event-stream"))
    ask(page, "hello")
    expect(page.locator("#error")).to_contain_text("cut short")
    expect(page.locator("li.assistant")).to_contain_text("failed")


def test_everything_works_by_keyboard(echo: HttpPipeline, page: Page) -> None:
    """Tab reaches every control in visual order, and the focus is visible."""
    open_page(page, echo)
    reached = []
    for _ in range(13):
        page.keyboard.press("Tab")
        reached.append(page.locator(":focus").get_attribute("id"))
    assert reached == [
        *("attach", "record", "converse", "send", "speak", "voice", "sample", "speed"),
        *("system", "temperature", "tokens", "seed", "key"),
    ]
    page.locator("#toggle-details-panel").focus()
    for name in ("toggle-settings-panel", "toggle-conversations-panel", "clear"):
        page.keyboard.press("Shift+Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
    style = page.locator(":focus").evaluate("element => getComputedStyle(element).outlineStyle")
    assert style == "solid"


def test_page_with_an_api_key(page: Page) -> None:
    with HttpPipeline(environment={"OMNI_ACTORS_API_KEY": "sesame"}) as pipeline:
        page.goto(pipeline.url)
        expect(page.locator("#health")).to_have_text("unavailable")
        expect(page.locator("#pipeline")).to_contain_text("API key")
        expect(page.locator("#asked-key")).to_be_focused()
        expect(page.locator("#key-wanted")).to_have_text("The server asks for an API key.")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert axe_violations(page) == []
        page.locator("#converse").click()
        expect(page.locator("#error")).to_contain_text("API key")
        expect(page.locator("#composer")).to_be_visible()
        page.locator("#asked-key").fill("open")
        page.locator("#asked-key").press("Enter")
        expect(page.locator("#key-wanted")).to_have_text("The server does not take this API key.")
        page.locator("#asked-key").fill("sesame")
        page.locator("#asked-key").press("Enter")
        expect(page.locator("#health")).to_have_text("ready")
        expect(page.locator("#ask-key:visible, #error:visible")).to_have_count(0)
        expect(page.locator("#text")).to_be_focused()
        ask(page, "open")
        expect(page.locator("li.assistant .say")).to_have_text("open")
        page.locator("#converse").click()
        expect(page.locator("#spoken-state")).to_have_text("Listening")
        page.locator("#end-spoken").click()
        page.locator("#toggle-details-panel").click()
        expect(page.locator("#stages li.ready")).to_have_count(4)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # who comes back sees what is so now
    expect(page.locator("#health")).to_have_text("unreachable")
    expect(page.locator("#stages li.unknown")).to_have_count(4)


def test_nothing_is_loaded_from_elsewhere(echo: HttpPipeline, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    open_page(page, echo)
    assert all(url.startswith((echo.url, "data:")) for url in asked), asked
    headers = httpx.get(echo.url).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "require-trusted-types-for 'script'" in headers["content-security-policy"]  # no text becomes HTML unchecked
