"""The page in front of the real architecture: the tiny Qwen2.5-Omni with all its processes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import answered, ask, data, needs_chromium, open_page, until, watched_page
from tests.support.servers import HttpPipeline, picture

pytestmark = [needs_chromium, pytest.mark.e2e, pytest.mark.nightly]


def test_speech_in_and_out_with_the_tiny_model(tiny_http: HttpPipeline, browser: Browser) -> None:
    """Send a recording from the (fake) microphone; receive text and speech."""
    with watched_page(browser) as page:
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        open_page(page, tiny_http)
        page.locator("#voice").select_option("Ethan")
        page.locator("#tokens").fill("24")
        page.locator("#file").set_input_files(
            [{"name": "sea.png", "mimeType": "image/png", "buffer": picture(112, 112)}]
        )
        page.locator("#record").click()
        page.wait_for_timeout(900)
        page.locator("#record").click()
        expect(page.locator("#attachments li")).to_have_count(2)
        ask(page, "What do you hear, and what do you see?")
        answered(page)
        assert page.locator("li.assistant .say").inner_text()
        assert data(page, "audio-seconds") > 0.2
        until(page, lambda: data(page, "peak") > 0.01, "sound")
        measured = page.locator("#measurements").inner_text()
        first, smooth = (re.search(rf"{name}\s*(\d+) ms", measured) for name in ("First sound", "Smooth start"))
        assert int(first[1]) <= int(smooth[1])
