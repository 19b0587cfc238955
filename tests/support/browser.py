"""What tests of the web page do in a real browser."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline
from tests.support.waiting import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: scripts/install_chromium.sh installs it as root on a system with apt"
)
WAIT = 15_000 * PATIENCE  # milliseconds in which the page does what it is asked to
ARGUMENTS = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]


@contextmanager
def chromium(microphone: Path | None = None) -> Iterator[Browser]:
    """The system's Chromium, headless, with a fake microphone that beeps, or hears a WAV file again and again."""
    heard = [f"--use-file-for-fake-audio-capture={microphone}"] if microphone is not None else []
    with sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []  # Chromium's sandbox refuses to run as root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS, *heard, *sandbox])
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, **options: object) -> Iterator[Page]:
    """A page of its own, on which no script may fail and nothing may be refused by the page's policy."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.set_default_timeout(WAIT)
    expect.set_options(timeout=WAIT)
    yield page
    context.close()
    # The browser itself logs refused requests and WebSockets; refused scripts and styles would be our fault.
    expected = ("Failed to load resource", "WebSocket connection to")
    unexpected = [problem for problem in problems if not any(words in problem for words in expected)]
    assert not unexpected, unexpected


OPEN_SETTINGS = "localStorage.panel ??= 'settings-panel'"


def open_page(page: Page, pipeline: HttpPipeline) -> None:
    """Open the page as those have it who opened its settings before."""
    page.add_init_script(OPEN_SETTINGS)
    page.goto(pipeline.url)
    expect(page.locator("#health")).to_have_text("ready")


def ask(page: Page, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def answered(page: Page, count: int = 1) -> None:
    """Wait until that many answers are complete; fails at once with the page's error when one has ended otherwise."""
    expect(page.locator("li.assistant.done, #error:visible").nth(count - 1)).to_be_attached()
    error = page.locator("#error")
    assert error.is_hidden(), error.inner_text()
    expect(page.locator("li.assistant.done")).to_have_count(count)


def data(page: Page, name: str) -> float:
    return float(page.locator("body").get_attribute(f"data-{name}") or 0)


def lanes(page: Page) -> list[str]:
    return page.locator(".timeline .lane span").all_inner_texts()


def until(page: Page, condition: Callable[[], object], what: str, seconds: float = 5.0) -> None:
    """Wait for a condition while the page's events are handled, which they are not in a sleep."""
    for _ in range(round(seconds * PATIENCE / 0.03)):
        if condition():
            return
        page.wait_for_timeout(30)
    raise TimeoutError(f"waited {seconds * PATIENCE} s for {what}")


def until_playing(page: Page) -> None:
    """Wait until an answer is heard; looks at every frame, as it may be short."""
    page.wait_for_selector("body[data-playing=true]", state="attached")


def plays(page: Page, act: Callable[[], None]) -> None:
    """Wait until the page plays something after an action, for however short a time."""
    page.evaluate(
        """() => {
            const body = document.body, note = () => { window.played ||= body.dataset.playing === "true"; };
            window.played = false;
            new MutationObserver(note).observe(body, { attributeFilter: ["data-playing"] });
        }"""
    )
    act()
    until(page, lambda: page.evaluate("window.played"), "something to play")


def in_flight(pipeline: HttpPipeline) -> int:
    return httpx.get(f"{pipeline.url}/v1/status").json()["in_flight"]


def sent_messages(page: Page, act: Callable[[], None]) -> list[dict]:
    """The messages of the request that an action sends."""
    return sent(page, act)["messages"]


def sent(page: Page, act: Callable[[], None]) -> dict:
    """The body of the request that an action sends."""
    with page.expect_request("**/v1/chat/completions") as request:
        act()
    return request.value.post_data_json


def axe_violations(page: Page, *rules: str) -> list[str]:
    """What axe-core finds by some or all of its rules, as rule and the elements that break it."""
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = Axe().run(page, options=options).response["violations"]
    return [f"{rule['id']}: {[node['html'][:200] for node in rule['nodes']]}" for rule in found]


SIZES = ((1280, 800), (390, 844))  # of a desk and of a phone


def resize(page: Page, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})


def looks_good(page: Page) -> None:
    """Nothing is cut off, and axe finds nothing in light or dark."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(color_scheme="light")
    assert axe_violations(page) == []
    page.emulate_media(color_scheme="dark")
    assert axe_violations(page, "color-contrast") == []


def take_picture(page: Page, name: str, scheme: str = "light") -> None:
    """Write a picture of the documentation, with few colours so that it is small, if scripts/page_pictures.sh asks."""
    if "OMNI_TEST_SCREENSHOTS" in os.environ:
        page.emulate_media(color_scheme=scheme)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(method=Image.Quantize.MAXCOVERAGE).save(REPOSITORY / "docs" / "images" / name, optimize=True)
