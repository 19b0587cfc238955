"""What the web page plays: one thing at a time, for as long as the user wants to hear it."""

from __future__ import annotations

import itertools

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import answered, ask, needs_chromium, open_page, until
from tests.support.servers import HttpPipeline, sound

pytestmark = [needs_chromium, pytest.mark.nightly]

SLOWER = 8  # times as long as it would does each sound last, so that none ends while a busy machine does something else
LONG = "w" * 200
# Slows sound down, and notes when each piece of it begins and ends on the audio clock of the page.
LISTEN = (
    f"""
  const createBuffer = BaseAudioContext.prototype.createBuffer;
  BaseAudioContext.prototype.createBuffer = function (channels, length, rate) {{
    return createBuffer.call(this, channels, length, rate / {SLOWER});
  }};
"""
    + """
  window.heard = [];
  const start = AudioBufferSourceNode.prototype.start, stop = AudioBufferSourceNode.prototype.stop;
  AudioBufferSourceNode.prototype.start = function (when) {
    this.piece = { from: when, to: when + this.buffer.duration, wait: when - this.context.currentTime };
    window.heard.push(this.piece);
    return start.call(this, when);
  };
  AudioBufferSourceNode.prototype.stop = function () {
    this.piece.to = Math.min(this.piece.to, this.context.currentTime);
    return stop.call(this);
  };
"""
)


def heard(page: Page) -> list[tuple[float, float]]:
    """Beginning and end of each piece that was heard, in seconds of the audio clock."""
    pieces = page.evaluate("window.heard")
    return sorted((piece["from"], piece["to"]) for piece in pieces if piece["to"] > piece["from"])


def overlap(pieces: list[tuple[float, float]]) -> float:
    """The longest time for which two pieces are heard at once."""
    ends = itertools.accumulate((end for _, end in pieces), max)
    return max((end - begin for end, (begin, _) in zip(ends, pieces[1:], strict=False)), default=0.0)


def expect_playing(page: Page, playing: bool) -> None:
    expect(page.locator("body")).to_have_attribute("data-playing", str(playing).lower())


def expect_more_heard(page: Page, pieces: int) -> None:
    """Wait until more pieces have begun than before, however soon they end: looking at times may miss a short one."""
    until(page, lambda: page.evaluate("window.heard.length") > pieces, "sound")


@pytest.fixture
def speaking(echo: HttpPipeline, page: Page) -> Page:
    """The page after the end of a stream whose sound still plays."""
    page.add_init_script(LISTEN)
    open_page(page, echo)
    ask(page, LONG)
    answered(page)
    expect_playing(page, True)
    expect(page.locator("#stop")).to_be_visible()
    return page


def test_nothing_speaks_over_anything(speaking: Page) -> None:
    page = speaking
    ask(page, LONG.replace("w", "v"))
    answered(page, 2)
    expect(page.get_by_label("Stop sound")).to_have_count(1)
    for _ in range(2):  # the first answer, while the second one plays, then the other way round
        pieces = page.evaluate("window.heard.length")
        page.get_by_label("Play again").click()
        expect(page.get_by_label("Stop sound")).to_have_count(1)
        assert page.evaluate(f"window.heard[{pieces}].wait") < 0.1, "it is queued behind the other one"
    page.locator("#file").set_input_files([{"name": "sea.wav", "mimeType": "audio/wav", "buffer": sound()}])
    pieces = page.evaluate("window.heard.length")
    page.get_by_label("Listen to sea.wav").click()
    expect(page.get_by_label("Stop sound")).to_have_count(0)
    expect_more_heard(page, pieces)
    expect_playing(page, False)  # at the end of the file by itself
    assert len(heard(page)) >= 4
    assert overlap(heard(page)) < 0.005
