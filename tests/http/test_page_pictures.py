"""Pictures and videos on the web page: made, watched, stopped, kept and changed."""

from __future__ import annotations

import base64
from collections.abc import Callable

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import (
    SIZES,
    answered,
    ask,
    in_flight,
    looks_good,
    needs_chromium,
    open_page,
    resize,
    take_picture,
    until,
)
from tests.support.servers import HttpPipeline, picture, sound

pytestmark = [needs_chromium, pytest.mark.nightly]
# Notes what is shown while pictures are made, and presses Escape after `window.stopAfter` steps.
WATCH = """
  window.seen = { previews: 0, steps: [] };
  addEventListener("DOMContentLoaded", () => new MutationObserver((changes) => changes.forEach(({ target }) => {
    if (target.matches?.(".picture.preview")) window.seen.previews++;
    if (target.matches?.(".making progress")) window.seen.steps.push(target.value);
    if (window.seen.steps.length !== window.stopAfter) return;
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  })).observe(document.getElementById("messages"), { subtree: true, attributeFilter: ["src", "value"] }));
"""


@pytest.fixture
def easel(pictures: HttpPipeline, page: Page) -> Page:
    page.add_init_script(WATCH)
    open_page(page, pictures)
    expect(page.get_by_placeholder("Describe a picture")).to_be_focused()
    return page


def fill(page: Page, **fields: object) -> None:
    for name, value in fields.items():
        page.locator(f"#{name}").fill(str(value))


def pixels(page: Page) -> tuple[int, int]:
    image = page.locator("img.picture").last
    return image.evaluate("image => image.naturalWidth"), image.evaluate("image => image.naturalHeight")


def test_a_picture_is_made_watched_and_kept(easel: Page, pictures: HttpPipeline) -> None:
    expect(easel.locator("#record, #converse, #voice, #speak").filter(visible=True)).to_have_count(0)
    fill(easel, width=128, height=64, steps=12, guidance=2.5, negative="fog", seed=7)
    with easel.expect_request("**/v1/images/generations") as request:
        ask(easel, "The sea at night")
    answered(easel)
    expect(easel.get_by_alt_text("The sea at night")).to_be_visible()
    assert pixels(easel) == (128, 64)
    seen = easel.evaluate("window.seen")
    assert seen["steps"] == sorted(seen["steps"])
    assert seen["steps"][-1] == 12
    assert seen["previews"] == 3
    expect(easel.locator(".making")).to_be_hidden()
    expect(easel.locator("#timeline")).to_have_attribute("data-source", "pipeline")
    expect(easel.locator("#measurements")).to_contain_text("First preview")
    file = downloaded(easel, easel.get_by_label("Download picture").click)
    fields = request.value.post_data_json
    assert fields["negative_prompt"] == "fog"
    whole = {name: fields[name] for name in fields if name not in ("stream", "progress", "partial_images")}
    again = httpx.post(f"{pictures.url}/v1/images/generations", json=whole).json()
    assert file == base64.b64decode(again["data"][0]["b64_json"])
    easel.locator("#previews").uncheck()
    with easel.expect_request("**/v1/images/generations") as request:
        easel.get_by_label("Regenerate").click()
    assert "partial_images" not in request.value.post_data_json
    answered(easel)


def downloaded(page: Page, act: Callable[[], None], name: str = "picture.png") -> bytes:
    with page.expect_download() as download:
        act()
    assert download.value.suggested_filename == name
    return download.value.path().read_bytes()


def test_a_picture_is_changed(easel: Page, pictures: HttpPipeline) -> None:
    fill(easel, seed=5)
    ask(easel, "The sea")
    answered(easel)
    first = downloaded(easel, easel.get_by_label("Download picture").click)
    easel.get_by_label("Edit this").click()
    expect(easel.locator("#attachments img")).to_be_visible()
    expect(easel.locator("#text")).to_be_focused()
    ask(easel, "Add a ship")
    answered(easel, 2)
    fields = {"prompt": "Add a ship", "seed": "5"}
    again = httpx.post(f"{pictures.url}/v1/images/edits", data=fields, files={"image": ("a.png", first)}).json()
    second = downloaded(easel, easel.get_by_label("Download picture").last.click)
    assert second == base64.b64decode(again["data"][0]["b64_json"])
    assert second != first
    expect(easel.locator("li.user").last.locator("img")).to_be_visible()
    easel.locator("#file").set_input_files([{"name": "a.wav", "mimeType": "audio/wav", "buffer": sound()}])
    expect(easel.locator("#error")).to_contain_text("only pictures can be changed")
    easel.locator("#file").set_input_files([{"name": "a.png", "mimeType": "image/png", "buffer": picture()}])
    expect(easel.locator("#attachments li")).to_have_count(1)
    easel.locator("#send").click()
    expect(easel.locator("#error")).to_contain_text("Say what to change")


def test_a_picture_is_stopped_in_every_stage(easel: Page, pictures: HttpPipeline) -> None:
    fill(easel, steps=1000)
    easel.evaluate("window.stopAfter = 3")
    ask(easel, "The sea, slowly")
    expect(easel.locator("li.assistant.stopped")).to_have_count(1)
    until(easel, lambda: in_flight(pictures) == 0, "the end of the request")
    expect(easel.get_by_label("Download picture")).to_have_count(0)  # a preview is no result
    expect(easel.locator("#error")).to_be_hidden()


def test_everybody_can_make_pictures_at_any_width(easel: Page) -> None:
    fill(easel, width=512, height=320, seed=3)
    ask(easel, "The sea at night")
    answered(easel)
    take_picture(easel, "web-pictures.png")
    fits_any_width(easel)


def fits_any_width(page: Page) -> None:
    for size in SIZES:
        resize(page, size)
        looks_good(page)
        box = page.locator(".picture").bounding_box()
        assert box is None or box["x"] + box["width"] <= size[0]


def test_a_video_is_made_shown_and_kept(videos: HttpPipeline, page: Page) -> None:
    open_page(page, videos)
    expect(page.get_by_placeholder("Describe a video")).to_be_focused()
    fill(page, width=512, height=320, seconds=2, steps=300, seed=7)
    ask(page, "The sea at night")
    expect(page.locator(".making")).to_contain_text("%")
    answered(page)
    video = page.locator("video.picture")
    expect(video).to_have_attribute("aria-label", "The sea at night")
    until(page, lambda: video.evaluate("video => video.readyState") > 1, "the video can be played")
    assert video.evaluate("video => [video.videoWidth, video.videoHeight]") == [512, 320]
    assert video.evaluate("video => video.duration") == pytest.approx(17 / 8, abs=0.1)
    expect(page.get_by_label("Edit this")).to_have_count(0)
    file = downloaded(page, page.get_by_label("Download video").click, "video.mp4")
    job = httpx.get(f"{videos.url}/v1/videos?limit=1").json()["data"][0]
    assert file == httpx.get(f"{videos.url}/v1/videos/{job['id']}/content").content
    fits_any_width(page)
    resize(page, SIZES[0])
    page.reload()
    page.locator("#toggle-conversations-panel").click()
    page.locator("#conversations .open").click()
    expect(page.locator("video.picture")).to_be_visible()


def test_a_video_is_stopped(videos: HttpPipeline, page: Page) -> None:
    open_page(page, videos)
    fill(page, steps=1000)
    ask(page, "The sea, slowly")
    expect(page.locator(".making")).to_contain_text("%")
    page.locator("#stop").click()
    expect(page.locator("li.assistant.stopped")).to_have_count(1)
    until(page, lambda: in_flight(videos) == 0, "the end of the request")
    assert "The sea, slowly" not in httpx.get(f"{videos.url}/v1/videos").text
