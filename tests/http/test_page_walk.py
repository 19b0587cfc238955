"""A walk through the web page that every change has to pass; the other tests of the page are `nightly`."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import answered, ask, data, lanes, needs_chromium, open_page, plays, until
from tests.support.servers import HttpPipeline

pytestmark = needs_chromium

TEXT = " ".join(["hello, sea. do you hear me?"] * 20)  # 11 s, so that it still plays when a busy machine listens


def test_text_is_answered_in_text_and_sound(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    expect(page.locator("#text")).to_be_focused()
    ask(page, TEXT)
    answer = page.locator("li.assistant .say")
    expect(answer).to_have_text(TEXT)
    answered(page)
    assert data(page, "audio-seconds") == pytest.approx(len(TEXT) * 0.02)
    until(page, lambda: data(page, "peak") > 0.2, "sound")  # what the analyser hears on the way to the loudspeaker
    page.keyboard.press("Escape")
    expect(page.locator("body")).to_have_attribute("data-playing", "false")
    plays(page, page.get_by_label("Play again (11.2 s)").click)
    expect(page.locator("#timeline")).to_have_attribute("data-source", "pipeline")  # not a routed answer
    assert lanes(page) == ["prompt", "thinker", "talker", "code2wav", "this page"]
    expect(page.locator("#measurements")).to_contain_text("First sound")
    expect(page.locator("#error")).to_be_hidden()
    # The next turn brings the first one along; the echo repeats both.
    page.locator("#speak").uncheck()
    ask(page, "!")
    expect(page.locator("li.assistant .say").nth(1)).to_have_text(TEXT * 2 + "!")
    page.locator("#clear").click()
    expect(page.locator("#empty")).to_be_visible()
