"""The web page at three widths, light and dark: nothing is cut off, and everybody can use it."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import SIZES, answered, ask, axe_violations, looks_good, needs_chromium, open_page, resize
from tests.support.servers import HttpPipeline, picture, sound

pytestmark = [needs_chromium, pytest.mark.nightly]
TABLET = (768, 1024)
CONVERSATION = "# Salt\n\nThe **sea** is [salty](https://example.com):\n\n| a | b |\n|---|---|\n| `c` | d |"


def attach(page: Page) -> None:
    files = [("sea.png", "image/png", picture()), ("sea.wav", "audio/wav", sound())]
    page.locator("#file").set_input_files([{"name": n, "mimeType": kind, "buffer": data} for n, kind, data in files])
    expect(page.locator("#attachments li")).to_have_count(2)


def show(page: Page, panel: str) -> None:
    if page.locator(f"#{panel}").is_hidden():
        page.locator(f"#toggle-{panel}").click()


def test_axe_finds_nothing_at_any_width(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    assert axe_violations(page) == []
    attach(page)
    ask(page, CONVERSATION)
    answered(page)
    page.route("**/v1/chat/**", lambda route: route.fulfill(status=500, json={"error": {"message": "x", "code": "y"}}))
    ask(page, "this fails")
    expect(page.locator("#error")).to_be_visible()
    attach(page)
    for size in (*SIZES, TABLET):
        resize(page, size)
        for panel in ("settings-panel", "details-panel"):
            show(page, panel)
            looks_good(page)
        page.keyboard.press("Escape")
        looks_good(page)


def test_answers_are_announced_once_and_whole(echo: HttpPipeline, page: Page) -> None:
    """A screen reader is not given every word as it arrives."""
    open_page(page, echo)
    page.evaluate(
        """() => {
            window.announced = [];
            const announcer = document.getElementById("announcer");
            new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach(
                (node) => window.announced.push(node.data)))).observe(announcer, { childList: true });
        }"""
    )
    ask(page, "salt, and more salt")
    answered(page)
    assert page.evaluate("window.announced") == ["The answer begins.", "salt, and more salt"]
    expect(page.locator("#announcer")).to_have_attribute("role", "status")
    assert page.locator("#messages").evaluate("list => list.closest('[aria-live]')") is None
    expect(page.get_by_role("listitem").filter(has_text="You: salt")).to_have_count(1)
