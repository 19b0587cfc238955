"""The web page in a real browser: conversations in text and sound, messages and files, errors, keys."""

from __future__ import annotations

import base64

import httpx
import pytest
from playwright.sync_api import Page, expect

from omni_actors.http_server.settings import ServerSettings
from tests.support.browser import (
    answered,
    ask,
    axe_violations,
    data,
    in_flight,
    needs_chromium,
    open_page,
    plays,
    sent,
    sent_messages,
    until,
)
from tests.support.realtime import serving_sessions
from tests.support.servers import HttpPipeline, pdf, picture, sound

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
    half = 'data: {"choices":[{"index":0,"delta":{"content":"half an"}}]}\n\n'
    page.route("**/v1/chat/**", lambda route: route.fulfill(body=half, content_type="text/event-stream"))
    ask(page, "hello")
    expect(page.locator("#error")).to_contain_text("cut short")
    expect(page.locator("li.assistant").last).to_contain_text("failed")


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


def test_page_with_an_api_key(echo: HttpPipeline, page: Page) -> None:
    with serving_sessions(ServerSettings(endpoint=echo.endpoint, api_key="sesame")) as url:
        page.goto(url)
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


MARKDOWN = """# Salt

The **sea** is *salty*:

1. rain
2. rivers

| Sea | Salt |
|---|---|
| Dead Sea | 34 % |

```python
salt = 35
```
[more](https://example.com/)"""
HOSTILE = """<img src=x onerror="window.broken = 1"><script>window.broken = 2</script>
[press](javascript:window.broken=3) ![pixel](https://example.com/pixel.png)
<a href="javascript:window.broken=4" onclick="window.broken=5">here</a> <style>body { display: none }</style>"""


def file(name: str, kind: str, content: bytes) -> dict:
    return {"name": name, "mimeType": kind, "buffer": content}


@pytest.fixture
def silent(echo: HttpPipeline, page: Page) -> Page:
    open_page(page, echo)
    page.locator("#speak").uncheck()
    return page


def test_markdown_is_shown_as_it_is_meant(silent: Page) -> None:
    ask(silent, MARKDOWN)
    answered(silent)
    say = silent.locator("li.assistant .say")
    expect(say.locator("h3")).to_have_text("Salt")
    expect(say.locator("strong")).to_have_text("sea")
    expect(say.locator("ol li")).to_have_text(["rain", "rivers"])
    expect(say.locator("td")).to_have_text(["Dead Sea", "34 %"])
    expect(say.locator("pre code")).to_have_text("salt = 35\n")
    link = say.get_by_role("link")
    assert link.get_attribute("href") == "https://example.com/"
    assert link.get_attribute("rel") == "noopener noreferrer"
    expect(silent.locator("li.user .say strong")).to_have_text("sea")  # and so is a question


def test_what_the_model_writes_cannot_act_on_the_page(silent: Page) -> None:
    asked: list[str] = []
    silent.on("request", lambda request: asked.append(request.url))
    ask(silent, HOSTILE)
    answered(silent)
    say = silent.locator("li.assistant .say")
    expect(say).to_contain_text('<img src=x onerror="window.broken = 1">')  # shown, not carried out
    assert say.locator("img, script, style, a, [onclick], [onerror]").count() == 0
    assert silent.evaluate("window.broken") is None
    assert not [url for url in asked if "/v1/" not in url]


def test_what_was_not_answered_is_asked_again_with_its_files(silent: Page) -> None:
    silent.locator("#file").set_input_files([file("sea.png", "image/png", picture())])
    expect(silent.locator("#attachments li")).to_have_count(1)
    silent.route("**/v1/chat/**", lambda route: route.abort())
    ask(silent, "hello")
    expect(silent.locator("#error")).to_have_text("The server cannot be reached.")
    expect(silent.locator("li.user .say")).to_have_text("hello")
    silent.unroute("**/v1/chat/**")
    messages = sent_messages(silent, silent.get_by_label("Try again").click)
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "text"]
    answered(silent)
    expect(silent.locator("li.assistant")).to_have_count(1)
    expect(silent.locator("#error")).to_be_hidden()


def test_files_and_recordings_are_sent(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    given = [file("sea.png", "image/png", picture()), file("sea.wav", "audio/wav", sound())]
    page.locator("#file").set_input_files([*given, file("notes.xyz", "application/x", b"x")])
    expect(page.locator("#attachments li")).to_have_count(2)
    expect(page.locator("#error")).to_contain_text("notes.xyz")
    expect(page.locator("#attachments img")).to_have_js_property("naturalWidth", 64)
    page.get_by_label("Remove sea.png").click()
    expect(page.locator("#attachments li")).to_have_count(1)
    page.keyboard.press("Alt+m")
    expect(page.locator("#record")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#progress")).to_contain_text("recording 0.")
    page.wait_for_timeout(700)
    page.locator("#record").click()
    expect(page.locator("#attachments li")).to_have_count(2)
    plays(page, page.get_by_label("Listen to recording").click)
    messages = sent_messages(page, lambda: ask(page, "what is this?"))
    assert [part["type"] for part in messages[0]["content"]] == ["audio_url", "audio_url", "text"]
    expect(page.locator("li.assistant .say")).to_have_text("what is this?")
    plays(page, page.locator("li.user").get_by_label("Listen to recording").click)


def test_a_pdf_that_is_dropped_is_read(silent: Page) -> None:
    silent.evaluate(
        """(data) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([bytes], "salt.pdf", { type: "application/pdf" }));
            document.dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
        }""",
        base64.b64encode(pdf("Salt is 35.")).decode(),
    )
    expect(silent.locator("#attachments .card .name")).to_have_text("salt.pdf")
    expect(silent.locator("#attachments .card small")).to_have_text("1 kB")
    ask(silent, "!")
    expect(silent.locator("li.assistant .say")).to_have_text("salt.pdf:\nSalt is 35.!", use_inner_text=False)
    expect(silent.locator("li.user .card")).to_contain_text("salt.pdf")


def test_settings_that_change_in_a_conversation_count_from_the_next_message(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    first = sent(page, lambda: ask(page, "hello, sea"))
    assert first["audio"] == {"voice": "default", "format": "pcm16", "speed": 1}
    answered(page)
    page.locator("#system").fill("Be brief.")
    page.locator("#temperature").fill("0.5")
    page.locator("#voice").select_option("Ethan")
    page.locator("#speed").select_option("2×")
    second = sent(page, lambda: ask(page, "!"))
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "hello, sea", "hello, sea", "!"]
    assert second["temperature"] == 0.5
    assert second["audio"] == {"voice": "Ethan", "format": "pcm16", "speed": 2}
    answered(page, 2)
    said = page.locator("li.assistant .say").last.inner_text()
    assert data(page, "audio-seconds") == pytest.approx(len(said) * 0.02 / 2, rel=0.1)
    page.locator("#speak").uncheck()
    assert sent(page, lambda: ask(page, "?"))["modalities"] == ["text"]
    answered(page, 3)


def test_settings_are_sent_and_kept(silent: Page) -> None:
    for name, value in {"temperature": "0.5", "tokens": "64", "seed": "7"}.items():
        silent.locator(f"#{name}").fill(value)
    body = sent(silent, lambda: ask(silent, "hello"))
    assert [body[name] for name in ("temperature", "max_completion_tokens", "seed")] == [0.5, 64, 7]
    answered(silent)
    silent.reload()
    expect(silent.locator("#speak")).not_to_be_checked()
    expect(silent.locator("#temperature")).to_have_value("0.5")
    silent.locator("#temperature").fill("3")
    ask(silent, "too hot")
    expect(silent.locator("#text")).to_have_value("too hot")  # nothing was sent, nothing is lost
    expect(silent.locator("li.user")).to_have_count(0)
