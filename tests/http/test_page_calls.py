"""A spoken conversation of the web page over WebRTC: a real browser, whose microphone hears a recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import soundfile
from playwright.sync_api import Page, expect

from omni_actors.http_server.realtime.formats import RATE
from tests.support.browser import chromium, data, needs_chromium, open_page, until, until_playing, watched_page
from tests.support.realtime import speech
from tests.support.servers import HttpPipeline

pytestmark = [needs_chromium, pytest.mark.nightly]
SENTENCE = "hello sea and"
SECONDS = len(SENTENCE) * 0.2


@contextmanager
def conversation(drawling: HttpPipeline, folder: Path, says: str, pause: float = 0.0) -> Iterator[Page]:
    """The page, whose microphone hears a turn, and another one after a pause if there is any, again and again.

    On a busy machine the first ones may be over before there is a session.
    """
    recording = folder / "turns.wav"
    parts = [numpy.zeros(2 * RATE, numpy.int16), speech(1.0)]
    if pause:
        parts += [numpy.zeros(round(pause * RATE), numpy.int16), speech(2.0, seed=1)]
    soundfile.write(recording, numpy.concatenate([*parts, parts[0]]), RATE)
    with chromium(recording) as browser, watched_page(browser) as page:
        open_page(page, drawling)
        page.locator("#system").fill(says)
        page.locator("#converse").click()
        expect(page.locator("li.user").first).to_be_attached()
        yield page


def test_a_turn_is_spoken_and_its_answer_is_heard(drawling: HttpPipeline, tmp_path: Path) -> None:
    with conversation(drawling, tmp_path, SENTENCE) as page:
        page.locator("#mute").click()
        until_playing(page)
        until(page, lambda: data(page, "peak") > 0.05, "sound of the answer")
        expect(page.locator("li.assistant.done .say").first).to_have_text(SENTENCE)
        expect(page.locator("body")).to_have_attribute("data-playing", "false")
        button = page.locator("li.assistant").first.get_by_label("Play again")
        heard = float(button.get_attribute("aria-label").partition("(")[2].partition(" s")[0])
        assert heard > SECONDS / 2  # a busy browser leaves gaps
        page.locator("#end-spoken").click()
        until(
            page, lambda: "omni_realtime_sessions 0.0" in page.request.get(f"{drawling.url}/metrics").text(), "its end"
        )
        assert "POST /v1/realtime/calls 201" in drawling.log()
        assert "WEBSOCKET" not in drawling.log()


def test_speech_and_a_key_cut_the_answer_to_what_was_heard(drawling: HttpPipeline, tmp_path: Path) -> None:
    text = f"{SENTENCE} " * 5  # 14 s
    with conversation(drawling, tmp_path, text, pause=4.0) as page:
        answers = page.locator("li.assistant")
        expect(answers.nth(1)).to_be_attached()
        first = answers.nth(0)
        expect(first.locator("small")).to_contain_text("interrupted")
        until(page, lambda: 0 < len(first.locator(".say").inner_text()) < len(text) / 2, "the text that was heard", 15)
        assert text.startswith(first.locator(".say").inner_text())
        until_playing(page)
        page.keyboard.press("Escape")
        expect(page.locator("body")).to_have_attribute("data-playing", "false")
        expect(answers.nth(1).locator("small")).to_contain_text("interrupted")
        expect(page.locator("#spoken")).to_be_visible()
        expect(page.locator("#error")).to_be_hidden()
