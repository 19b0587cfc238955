"""Media in the messages of an HTTP request: counted before any is read, and read by decoders."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterator

import msgspec
import pytest

from omni_actors.http_server.bodies import FormFile
from omni_actors.http_server.chat import turns_of
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.generation import AnyMessage, Turn
from omni_actors.http_server.media import Fetcher, MediaReader
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.store import Store, UploadedFile
from omni_actors.media.decoders import DecoderThreads
from tests.support.servers import data_uri, film, pdf, picture, sound
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def decoders() -> Iterator[DecoderThreads]:
    with contextlib.closing(DecoderThreads()) as threads:
        yield threads


@pytest.fixture
def files() -> Store[UploadedFile]:
    return Store(None, "files", UploadedFile, 10, 1 << 20, 60.0)


@pytest.fixture
def reader(decoders: DecoderThreads, files: Store[UploadedFile]) -> MediaReader:
    return MediaReader(ServerSettings(endpoint="ipc:///nowhere"), Fetcher([], 1), files, decoders)


def part(modality: str, data: bytes) -> dict:
    url = f"data:{modality}/any;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def messages(*parts: dict) -> dict[str, Turn]:
    given = json.dumps([{"role": "user", "content": list(parts)}])
    return turns_of(
        msgspec.json.decode(given, type=list[AnyMessage]), Store(None, "transcripts", str, 10, 1 << 20, 60.0)
    )


async def test_more_media_than_a_prompt_may_have_are_refused_before_any_is_read(
    reader: MediaReader, files: Store[UploadedFile], decoders: DecoderThreads
) -> None:
    broken = part("audio", b"this would be malformed_media")
    with pytest.raises(HttpError, match=r"3 media of the kind audio; at most 2") as refused:
        await reader.messages(messages(broken, broken, broken), {"audio": 2, "image": 1})
    assert refused.value.param == "messages"
    assert decoders.pids == []


async def test_uploaded_files_are_counted_as_what_they_are(reader: MediaReader, files: Store[UploadedFile]) -> None:
    data = picture(8, 8)
    files.add("file-1", UploadedFile("file-1", "a", "user_data", len(data), 0, 0), len(data), data)
    upload = {"type": "file", "file": {"file_id": "file-1"}}
    with pytest.raises(HttpError, match=r"2 media of the kind image; at most 1"):
        await reader.messages(messages(upload, part("image", picture(8, 8))), {"image": 1})


@pytest.mark.parametrize(
    ("data", "text"), [(pdf("Salt is 35.", "So is the sea."), "Salt is 35.\n\nSo is the sea."), (b"salt\n", "salt")]
)
async def test_documents_become_text_under_their_names(
    reader: MediaReader, files: Store[UploadedFile], data: bytes, text: str
) -> None:
    files.add("file-1", UploadedFile("file-1", "b", "user_data", len(data), 0, 0), len(data), data)
    given = [
        {"file_data": data_uri("application/pdf", data), "filename": "a"},
        {"file_data": data_uri("text/plain", data)},
        {"file_id": "file-1"},
        {"file_id": "file-1", "filename": "c"},
    ]
    parts = [{"type": "file", "file": file} for file in given]
    (message,) = await reader.messages(messages(*parts), {"audio": 0, "image": 0, "video": 0})
    found = [part["text"] for part in message["content"] if part["type"] == "text"]
    assert found == [f"a:\n\n{text}", text, f"b:\n\n{text}", f"c:\n\n{text}"]


async def test_a_document_that_cannot_be_read_is_named(reader: MediaReader) -> None:
    for file, status, code in (
        (data_uri("application/pdf", pdf("x", password="sesame")), 400, "malformed_media"),
        (data_uri("text/plain", b"x" * 1_000_001), 413, "media_too_large"),
        ("text/plain,x", 400, "url_not_allowed"),
        (base64.b64encode(pdf("x")).decode(), 400, "invalid_url"),
    ):
        with pytest.raises(HttpError) as refused:
            await reader.messages(messages({"type": "file", "file": {"file_data": file}}), {})
        assert (refused.value.status, refused.value.code) == (status, code)
        assert refused.value.param == "messages[0].content[0].file.file_data"


async def test_a_video_without_a_sound_track_is_refused_with_its_field(reader: MediaReader) -> None:
    with pytest.raises(HttpError, match="sound track that use_audio_in_video asks for is missing") as refused:
        await reader.messages(messages(part("video", film(1.0))), {}, sound_in_video=True)
    assert refused.value.status == 400
    assert refused.value.param == "messages[0].content[0].video_url.url"


async def test_sound_tracks_count_as_sounds(reader: MediaReader) -> None:
    videos = [part("video", b"not read")] * 2
    with pytest.raises(HttpError, match="2 media of the kind audio; at most 1"):
        await reader.messages(messages(*videos), {"audio": 1}, sound_in_video=True)


@pytest.mark.parametrize(
    ("most", "message"),
    [({"image": 0}, "This model takes no pictures, only a text."), ({"image": 1}, "There are 2 pictures; at most 1")],
)
async def test_more_reference_pictures_than_the_model_takes_are_refused(
    reader: MediaReader, most: dict[str, int], message: str
) -> None:
    with pytest.raises(HttpError, match=message) as caught:
        await reader.pictures([FormFile("image", "a", picture(8, 8))] * 2, most)
    assert caught.value.param == "image"
    parts = await reader.pictures([FormFile("image", "a", picture(8, 8))], {})
    assert [part["type"] for part in parts] == ["image"]


class MeetingFetcher(Fetcher):
    """Every fetch waits until another one is under way."""

    def __init__(self) -> None:
        super().__init__([], 1)
        self._meeting = asyncio.Barrier(2)

    async def fetch(self, url: str, param: str) -> bytes:
        async with asyncio.timeout(5 * PATIENCE):
            await self._meeting.wait()
        return picture(8, 8) if url.endswith("1") else sound(0.1)


async def test_media_of_one_request_are_fetched_side_by_side(
    decoders: DecoderThreads, files: Store[UploadedFile]
) -> None:
    settings = ServerSettings(endpoint="ipc:///nowhere")
    reader = MediaReader(settings, MeetingFetcher(), files, decoders)
    parts = [
        {"type": "image_url", "image_url": {"url": "https://a.example/1"}},
        {"type": "audio_url", "audio_url": {"url": "https://a.example/2"}},
    ]
    (message,) = await reader.messages(messages(*parts), {})
    assert message["content"] == [{"type": "image", "image": picture(8, 8)}, {"type": "audio", "audio": sound(0.1)}]
