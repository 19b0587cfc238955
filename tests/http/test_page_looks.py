"""The web page at three widths, light and dark: nothing is cut off, and everybody can use it."""

from __future__ import annotations

import io

import numpy
import pytest
from PIL import Image
from playwright.sync_api import Page, Route, expect

from tests.support.browser import (
    SIZES,
    answered,
    ask,
    axe_violations,
    looks_good,
    needs_chromium,
    open_page,
    resize,
    take_picture,
)
from tests.support.servers import HttpPipeline, picture, sound

pytestmark = [needs_chromium, pytest.mark.nightly]
TABLET = (768, 1024)
ANSWER = """Rivers make it salty. Rain dissolves a little of the **rock** it runs over and carries it to the sea:

1. The water evaporates and falls again as rain.
2. The minerals stay, mostly sodium and chloride.

| Sea | Salt |
|---|---|
| Baltic | 0.8 % |
| Atlantic | 3.5 % |
| Dead Sea | 34 % |"""
CONVERSATION = "# Salt\n\nThe **sea** is [salty](https://example.com):\n\n| a | b |\n|---|---|\n| `c` | d |"


def seascape() -> bytes:
    rows = numpy.linspace(0, 1, 240)[:, None, None]
    sky, sea = numpy.array([150, 200, 235]) * (0.7 + 0.5 * rows), numpy.array([10, 95, 110]) * (1.5 - 0.7 * rows)
    waves = 12 * numpy.sin(numpy.arange(320)[None, :, None] / 9 + 40 * rows**2)
    pixels = numpy.where(rows < 0.45, numpy.broadcast_to(sky, (240, 320, 3)), sea + waves)
    sink = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(sink, "JPEG", quality=90)
    return sink.getvalue()


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


def test_an_example_conversation_fits_every_width(echo: HttpPipeline, page: Page) -> None:
    def answer(route: Route) -> None:
        body = route.request.post_data_json
        body["messages"] = [{"role": "user", "content": ANSWER}]  # which the echo stages repeat
        route.continue_(post_data=body)

    page.route("**/v1/chat/completions", answer)
    open_page(page, echo)
    page.locator("#file").set_input_files([{"name": "sea.jpg", "mimeType": "image/jpeg", "buffer": seascape()}])
    expect(page.locator("#attachments img")).to_be_visible()
    ask(page, "Why is the sea salt?")
    answered(page)
    expect(page.locator("#timeline")).to_have_attribute("data-source", "pipeline")
    for size, name in ((TABLET, ""), (SIZES[1], "web-phone.png"), (SIZES[0], "web.png")):
        resize(page, size)
        if size == SIZES[0]:
            show(page, "details-panel")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        page.locator("#text").focus()
        if name:
            take_picture(page, name)
    take_picture(page, "web-dark.png", "dark")


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
