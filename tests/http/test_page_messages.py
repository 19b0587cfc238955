"""Messages on the web page: how they are written, shown, sent again, and what goes with them."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.support.browser import answered, ask, needs_chromium, open_page, plays, sent, sent_messages, until
from tests.support.servers import HttpPipeline, picture, sound

pytestmark = [needs_chromium, pytest.mark.nightly]

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
    """The page with answers in text only."""
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
    expect(silent.locator("li.user .say")).to_contain_text("**sea**")  # a question stays as it was written


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


def test_an_answer_is_copied_as_it_was_written_also_without_https(silent: Page) -> None:
    silent.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(silent, MARKDOWN)
    answered(silent)
    silent.locator("li.assistant").get_by_label("Copy").click()
    expect(silent.locator("li.assistant .copy")).to_have_text("Copied")
    assert silent.evaluate("navigator.clipboard.readText()") == MARKDOWN
    silent.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    silent.evaluate("navigator.clipboard.write([new ClipboardItem({ 'text/plain': '' })])")
    silent.locator("li.assistant .copy").click()
    silent.wait_for_function("async () => await navigator.clipboard.readText() !== ''")
    assert silent.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_the_last_answer_is_regenerated(silent: Page) -> None:
    for count, text in enumerate(("one", "two"), 1):
        ask(silent, text)
        answered(silent, count)
    expect(silent.get_by_label("Regenerate").first).to_be_hidden()  # what followed builds on that answer
    messages = sent_messages(silent, silent.get_by_label("Regenerate").last.click)
    assert [message["content"] for message in messages] == ["one", "one", "two"]
    answered(silent, 2)
    expect(silent.locator("li.assistant .say").last).to_have_text("oneonetwo")


def test_a_question_is_edited_with_its_files(silent: Page) -> None:
    silent.locator("#file").set_input_files([file("sea.png", "image/png", picture())])
    expect(silent.locator("#attachments img")).to_be_visible()
    ask(silent, "first")
    answered(silent)
    ask(silent, "second")
    answered(silent, 2)
    silent.locator("#text").fill("a draft")
    silent.get_by_label("Edit").first.click()
    expect(silent.locator("#text")).to_have_value("first")
    silent.keyboard.press("Escape")  # the conversation and the draft are as before
    expect(silent.locator("#text")).to_have_value("a draft")
    answered(silent, 2)
    silent.get_by_label("Edit").first.click()
    messages = sent_messages(silent, lambda: ask(silent, "better"))
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "text"]
    assert messages[0]["content"][1]["text"] == "better"
    answered(silent)
    expect(silent.locator("li.user")).to_have_count(1)
    expect(silent.locator("li.user img")).to_have_js_property("naturalWidth", 64)


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


def test_the_page_stays_where_its_reader_has_scrolled_to(slow: HttpPipeline, page: Page) -> None:
    def distance() -> float:
        return page.locator("#messages").evaluate("list => list.scrollHeight - list.scrollTop - list.clientHeight")

    def grown(before: int) -> bool:
        return len(page.locator("li.assistant .say").inner_text()) > before + 8

    open_page(page, slow)
    ask(page, "ab\n\n" * 200)
    until(page, lambda: grown(0), "an answer")
    assert distance() < 48
    page.locator("#messages").evaluate("list => { list.scrollTop = 0; }")
    expect(page.locator("#latest")).to_be_visible()
    before = len(page.locator("li.assistant .say").inner_text())
    until(page, lambda: grown(before), "more of the answer")
    assert page.locator("#messages").evaluate("list => list.scrollTop") == 0
    page.locator("#latest").click()
    before = len(page.locator("li.assistant .say").inner_text())
    until(page, lambda: grown(before), "more of the answer")
    assert distance() < 48
    expect(page.locator("#latest")).to_be_hidden()
    page.keyboard.press("Escape")


# ---------------------------------------------------------------------------------------------------------------------
# Files and the microphone


def test_files_and_recordings_are_sent(echo: HttpPipeline, page: Page) -> None:
    open_page(page, echo)
    page.locator("#file").set_input_files(
        [
            file("sea.png", "image/png", picture()),
            file("sea.wav", "audio/wav", sound()),
            file("notes.txt", "text/plain", b"x"),
        ]
    )
    expect(page.locator("#attachments li")).to_have_count(2)
    expect(page.locator("#error")).to_contain_text("notes.txt")
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


def test_files_are_attached_by_drop_and_by_paste(silent: Page) -> None:
    taken = silent.evaluate(
        """async (bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "sea.png", { type: "image/png" }));
            const options = { bubbles: true, cancelable: true };
            const events = [new DragEvent("drop", { ...options, dataTransfer: transfer }),
                            new ClipboardEvent("paste", { ...options, clipboardData: transfer })];
            // An event that nobody takes makes the browser open the file.
            return events.map((event) => !document.getElementById("text").dispatchEvent(event));
        }""",
        list(picture()),
    )
    assert taken == [True, True]
    expect(silent.locator("#attachments img")).to_have_count(2)
    expect(silent.locator("#attachments img").last).to_have_js_property("naturalWidth", 64)


def sent_image(page: Page) -> Image.Image:
    message = sent_messages(page, lambda: ask(page, "what is this?"))[0]
    answered(page)
    url = message["content"][0]["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_a_picture_of_30_megapixels_is_sent_smaller_and_upright(silent: Page) -> None:
    sink = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees
    Image.new("RGB", (6400, 4800), "teal").save(sink, "JPEG", exif=exif)
    silent.locator("#file").set_input_files([file("photo.jpg", "image/jpeg", sink.getvalue())])
    expect(silent.locator("#attachments img")).to_be_visible()
    image = sent_image(silent)
    assert image.format == "JPEG"
    assert image.height / image.width == pytest.approx(4 / 3, rel=0.01)
    assert 4_000_000 < image.width * image.height <= 2048 * 2048


def test_pictures_that_only_the_browser_reads_are_converted_and_others_left_alone(silent: Page) -> None:
    silent.locator("#file").set_input_files([file("sea.gif", "image/gif", picture(format="GIF"))])
    expect(silent.locator("#attachments img")).to_be_visible()
    assert sent_image(silent).format == "PNG"
    silent.locator("#file").set_input_files([file("sea.jpg", "image/jpeg", b"no picture")])
    expect(silent.locator("#error")).to_contain_text("sea.jpg cannot be read.")
    expect(silent.locator("#attachments li")).to_have_count(0)


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def test_settings_are_sent_and_kept(silent: Page) -> None:
    for name, value in {"system": "Be brief.", "temperature": "0.5", "tokens": "64", "seed": "7"}.items():
        silent.locator(f"#{name}").fill(value)
    silent.locator("#voice").select_option("Ethan")
    body = sent(silent, lambda: ask(silent, "hello"))
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert body["temperature"] == 0.5
    assert body["max_completion_tokens"] == 64
    assert body["seed"] == 7
    assert body["modalities"] == ["text"]
    answered(silent)
    silent.reload()
    expect(silent.locator("#voice")).to_have_value("Ethan")
    expect(silent.locator("#speak")).not_to_be_checked()
    expect(silent.locator("#temperature")).to_have_value("0.5")
    silent.locator("#temperature").fill("3")
    ask(silent, "too hot")
    expect(silent.locator("#text")).to_have_value("too hot")  # nothing was sent, nothing is lost
    expect(silent.locator("li.user")).to_have_count(0)
