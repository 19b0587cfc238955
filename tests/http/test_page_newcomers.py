"""What the web page shows to newcomers, and what it keeps for those who come back; at two sizes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser import SIZES, answered, ask, looks_good, needs_chromium, plays, resize, take_picture, until
from tests.support.servers import HttpPipeline, pdf

pytestmark = [needs_chromium, pytest.mark.nightly]
sizes = pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])


def visit(page: Page, pipeline: HttpPipeline, size: tuple[int, int]) -> None:
    resize(page, size)
    page.goto(pipeline.url)
    expect(page.locator("#health")).to_have_text("ready")


@sizes
def test_an_example_is_sent_by_a_click(echo: HttpPipeline, page: Page, size: tuple[int, int]) -> None:
    visit(page, echo, size)
    expect(page.locator("aside")).to_be_hidden()
    expect(page.locator("#model-name")).to_have_text("echo")
    expect(page.locator("#about")).to_contain_text("pictures, sounds and videos, and answers in text and speech")
    expect(page.locator("#examples button")).to_have_count(6)
    looks_good(page)
    take_picture(page, f"web-first-{size[0]}.png")
    page.get_by_role("button", name="What do you see?").click()
    answered(page)
    expect(page.locator("li.user img")).to_have_js_property("naturalWidth", 224)
    page.locator("#clear").click()
    page.get_by_role("button", name="What do you hear?").click()
    answered(page)
    expect(page.locator("li.user .card.audio")).to_contain_text("The tide comes in at seven.")


@sizes
def test_a_conversation_survives_a_reload(echo: HttpPipeline, page: Page, size: tuple[int, int]) -> None:
    def show_list() -> None:
        if page.locator("#conversations-panel").is_hidden():
            page.locator("#toggle-conversations-panel").click()

    visit(page, echo, size)
    files = [("sea.md", "text/markdown", b"salt"), ("rain.pdf", "application/pdf", pdf("rain"))]
    page.locator("#file").set_input_files([{"name": n, "mimeType": kind, "buffer": data} for n, kind, data in files])
    expect(page.locator("#attachments li")).to_have_text(["sea.md1 kB", "rain.pdf1 kB"])
    ask(page, "**hello** sea")
    answered(page)
    expect(page.locator("li.assistant .latency")).to_contain_text("first sound")
    page.get_by_label("Regenerate").click()
    expect(page.locator(".variants")).to_contain_text("2/2")
    page.get_by_label("Answer before").click()
    expect(page.locator(".variants")).to_contain_text("1/2")
    show_list()
    expect(page.locator("#conversations li")).to_have_count(1)
    looks_good(page)
    page.reload()
    expect(page.locator("#empty")).to_be_attached()
    show_list()
    page.locator("#conversations .open").click()
    expect(page.locator("li.user .card .name")).to_have_text(["sea.md", "rain.pdf"])
    expect(page.locator("li.assistant .say")).to_contain_text("rainhello sea")
    expect(page.locator(".variants")).to_contain_text("1/2")
    page.get_by_label("Rename").click()
    page.get_by_label("Title").fill("The sea")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations .open")).to_have_text("The sea")
    with page.expect_download() as download:
        page.get_by_label("Export The sea").click()
    assert download.value.suggested_filename == "The-sea.md"
    written = download.value.path().read_text()
    assert written.startswith("# The sea\n\n## You\n\n[sea.md](data:")
    assert "[rain.pdf](data:application/pdf;base64," in written
    assert '<audio controls src="data:audio/wav;base64,' in written
    if size[0] < 900:
        page.keyboard.press("Escape")
    plays(page, page.get_by_label("Play again").click)
    show_list()
    for _ in range(2):  # the first press asks
        expect(page.locator("#conversations li")).to_have_count(1)
        page.get_by_label("Delete The sea").click()
    expect(page.locator("#conversations li")).to_have_count(0)
    expect(page.locator("#empty")).to_be_attached()


def test_a_model_on_a_cpu_says_so_once(echo: HttpPipeline, page: Page) -> None:
    page.route("**/v1/status", lambda route: route.fulfill(json={**route.fetch().json(), "on_cpu": True}))
    visit(page, echo, SIZES[1])
    expect(page.locator("#pace")).to_have_text("This model computes on a CPU; answers can take a while.")
    for count in (1, 2):
        ask(page, "hello, sea")
        answered(page, count)
    pace = re.compile(r"^This model computes on a CPU: \d+\.\d s of sound per second so far\.$")
    expect(page.get_by_text(re.compile("CPU"))).to_have_text([pace])
    looks_good(page)
    page.unroute_all(behavior="wait")


def test_each_sound_becomes_a_file_once(echo: HttpPipeline, page: Page) -> None:
    page.add_init_script(
        """window.files = 0;
        window.Blob = class extends Blob {
            constructor(parts, options) { super(parts, options); files += options?.type === "audio/wav"; }
        };"""
    )
    visit(page, echo, SIZES[0])
    for count in (1, 2, 3):
        ask(page, "hello, sea")
        answered(page, count)
        until(page, lambda made=count: page.evaluate("files") == made, f"{count} files")


@sizes
def test_several_pictures_are_made_and_one_is_dragged(
    pictures: HttpPipeline, page: Page, size: tuple[int, int]
) -> None:
    visit(page, pictures, size)
    expect(page.locator("#examples button")).to_have_count(6)
    page.locator("#preset").select_option("landscape")
    page.locator("#count").select_option("2")
    sent: list[dict] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if "/images/" in request.url else None)
    ask(page, "The sea")
    answered(page)
    expect(page.get_by_label("Download picture")).to_have_count(2)
    assert [fields["size"] for fields in sent] == ["80x56"] * 2
    looks_good(page)
    page.locator("img.picture").first.drag_to(page.locator("#composer"))
    expect(page.locator("#attachments img")).to_have_count(1)
