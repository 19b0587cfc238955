"""Reading audio, images and video within limits: headers are checked first and not trusted afterwards."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest
import soundfile
import soxr
from PIL import Image

from omni_actors.errors import InvalidRequest, MalformedMedia
from omni_actors.media.limits import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    AUDIO_RATE,
    DOCUMENT_FILE,
    IMAGE_FILE,
    VIDEO_FILE,
    MediaLimits,
    MediaTooLarge,
)
from omni_actors.media.readers import BLOCK_BYTES, Decoded, decode, measure, sniff
from omni_actors.sharing import Budget
from tests.support.servers import film, pdf

RANDOM = np.random.default_rng(0)


def sound(
    shape: tuple[int, ...], rate: int, kind: str = "WAV", subtype: str | None = "FLOAT", loud: float = 0.1
) -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, (loud * RANDOM.standard_normal(shape)).astype(np.float32), rate, subtype=subtype, format=kind)
    return sink.getvalue()


def picture(width: int, height: int, kind: str = "PNG", frames: int = 1) -> bytes:
    sink = io.BytesIO()
    first, *rest = [Image.new("RGB", (width, height), (index, 0, 0)) for index in range(frames)]
    first.save(sink, kind, **({"save_all": True, "append_images": rest} if rest else {}))
    return sink.getvalue()


def wav_header(rate: int, channels: int, announced: int) -> bytes:
    layout = (16, 1, channels, rate, 2 * channels * rate & 0xFFFFFFFF, 2 * channels & 0xFFFF, 16)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", announced + 36, b"WAVE", b"fmt ", *layout, b"data", announced)


def read(kind: str, data: bytes, rate: int = 0, **limits: float) -> Decoded:
    given = MediaLimits(**limits)  # type: ignore[arg-type]
    return decode(kind, data, rate, given, Budget(given.decoded_bytes), "it")


def header(kind: str, data: bytes, **limits: float) -> int:
    return measure(kind, data, MediaLimits(**limits), "it").size  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [1000, 8000, 11_025, 44_100, 48_000, 96_000, 655_350])
def test_resampling_in_blocks_changes_no_bit(rate: int) -> None:
    block = BLOCK_BYTES // 4
    for length in (17, rate // 3, block, block + 1):
        samples = (0.1 * RANDOM.standard_normal(length)).astype(np.float32)
        whole = soxr.resample(samples, rate, AUDIO_RATE)
        if len(whole):
            assert np.array_equal(read(AUDIO_ARRAY, samples.tobytes(), rate), whole)


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")],
)
def test_files_are_read_mixed_and_resampled_in_blocks_to_the_same_bits(kind: str, subtype: str) -> None:
    data = sound((BLOCK_BYTES // 4, 2), 48_000, kind, subtype)  # two blocks
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert np.array_equal(read(AUDIO_FILE, data), soxr.resample(samples.mean(axis=1), 48_000, AUDIO_RATE))


def test_a_flac_of_a_few_kilobytes_and_many_samples_is_refused_by_its_header() -> None:
    data = sound((655_350, 8), 655_350, "FLAC", "PCM_16", loud=0.0)
    assert len(data) < 20_000
    assert header(AUDIO_FILE, data) == 655_350 * 8 * 4
    with pytest.raises(MediaTooLarge, match=r"lasts 1.0 s; at most 0.5 s"):
        header(AUDIO_FILE, data, audio_seconds=0.5)


def test_a_file_that_does_not_tell_its_length_is_read_up_to_the_limit() -> None:
    data = bytearray(sound((48_000, 8), 48_000, "FLAC", "PCM_16", loud=0.0))
    data[21] &= 0xF0  # STREAMINFO: 36 bits of the number of samples, of which 0 is "unknown"
    data[22:26] = bytes(4)
    assert header(AUDIO_FILE, bytes(data)) == 0
    with pytest.raises(MediaTooLarge, match="exceed 1000000 bytes when decoded"):
        read(AUDIO_FILE, bytes(data), decoded_bytes=1_000_000)
    with pytest.raises(MediaTooLarge, match=r"at most 0\.9 s"):
        read(AUDIO_FILE, bytes(data), audio_seconds=0.9)
    assert len(read(AUDIO_FILE, bytes(data))) == AUDIO_RATE
    longer = wav_header(AUDIO_RATE, 1, 0xFFFFFF00) + bytes(2 * 800)  # than what it holds
    assert header(AUDIO_FILE, longer) == 4 * 800
    assert len(read(AUDIO_FILE, longer)) == 800
    chained = sound((8000, 1), 8000, "OGG", "VORBIS") + sound((48_000, 2), 48_000, "OGG", "VORBIS")
    assert len(read(AUDIO_FILE, chained)) <= 2 * AUDIO_RATE, "it is read like the first of its streams"


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (wav_header(1, 1, 200) + bytes(200), InvalidRequest, "1 Hz is outside"),
        (wav_header(AUDIO_RATE, 17, 3400) + bytes(3400), InvalidRequest, "17 channels"),
        (wav_header(AUDIO_RATE, 65_535, 131_070) + bytes(131_070), MalformedMedia, "cannot be read"),
        (wav_header(0xFFFFFFFF >> 3, 1, 200) + bytes(200), InvalidRequest, "Hz is outside"),
        (wav_header(AUDIO_RATE, 1, 0), MalformedMedia, "no samples"),
        (b"", MalformedMedia, "is in no format that can be read: send WAV"),
    ],
)
def test_audio_with_a_strange_header_is_refused(data: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read(AUDIO_FILE, data)


RECORDINGS = {"m4a": ("ipod", "aac"), "aac": ("adts", "aac"), "webm": ("webm", "libopus"), "mp4": ("mp4", "aac")}


def recording(kind: str, *, cover: bool = False) -> bytes:
    """A second of a tone of 400 Hz as phones and browsers record it, on the left of two channels."""
    container, codec = RECORDINGS[kind]
    tone = (0.5 * np.sin(2 * np.pi * 400 * np.arange(48_000) / 48_000)).astype(np.float32)
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as file:
        if cover:
            picture = file.add_stream("mjpeg")
            picture.width = picture.height = 64
            picture.pix_fmt = "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        stream = file.add_stream(codec, rate=48_000, layout="stereo")
        if cover:
            image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), "rgb24")
            file.mux(picture.encode(image))
            file.mux(picture.encode())
        frame = av.AudioFrame.from_ndarray(np.stack([tone, 0 * tone]), "fltp", "stereo")
        frame.sample_rate, frame.pts = 48_000, 0
        for part in av.AudioResampler(stream.codec_context.format, "stereo", 48_000).resample(frame):
            file.mux(stream.encode(part))
        file.mux(stream.encode())
    return sink.getvalue()


@pytest.mark.parametrize("kind", RECORDINGS)
def test_recordings_of_phones_and_browsers_are_read(kind: str) -> None:
    data = recording(kind, cover=kind == "mp4")
    samples = read(AUDIO_FILE, data)
    assert abs(len(samples) - AUDIO_RATE) < AUDIO_RATE // 8, "coders add and cut a little"
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(int(spectrum.argmax()) * AUDIO_RATE / len(samples) - 400) < 5
    middle = samples[AUDIO_RATE // 4 : AUDIO_RATE // 2]
    assert abs(np.sqrt((middle**2).mean()) - 0.25 / np.sqrt(2)) < 0.02, "the mean of both channels"
    assert sniff(data) == "audio", "a cover is no video"
    with pytest.raises(MediaTooLarge, match=r"at most 0.5 s"):
        read(AUDIO_FILE, data, audio_seconds=0.5)
    with pytest.raises(MediaTooLarge, match="exceed 50000 bytes"):
        read(AUDIO_FILE, data, decoded_bytes=50_000)
    if kind in ("m4a", "mp4"):
        assert abs(header(AUDIO_FILE, data) - 48_000 * 2 * 4) < 48_000


@pytest.mark.parametrize("kind", [AUDIO_FILE, VIDEO_FILE, IMAGE_FILE])
def test_what_is_no_medium_is_refused_without_names_of_objects(kind: str) -> None:
    for data in (b"RIFF\x00\x00\x00\x00WAVEnothing", b"hello" * 50, recording("m4a")[:3000], film(0.3, 64)[:700]):
        with pytest.raises(MalformedMedia) as caught:
            read(kind, data)
        assert "0x" not in str(caught.value)
        assert "BytesIO" not in str(caught.value)
    with pytest.raises(MalformedMedia, match="PNG, JPEG, WEBP or GIF"):
        read(IMAGE_FILE, picture(64, 32, "TIFF", frames=30))
    with pytest.raises(MalformedMedia, match="has no sound"):
        read(AUDIO_FILE, film(0.3, 64))


def test_samples_that_are_not_finite_are_refused_in_any_block() -> None:
    samples = np.zeros(BLOCK_BYTES // 4 + 10, np.float32)
    samples[-1] = np.nan
    with pytest.raises(MalformedMedia, match="NaN"):
        read(AUDIO_ARRAY, samples.tobytes(), 48_000)


def test_an_image_announces_its_pixels_and_is_refused_before_it_is_unpacked() -> None:
    data = picture(2000, 1500)
    assert header(IMAGE_FILE, data) == 2000 * 1500 * 3
    with pytest.raises(MediaTooLarge, match="2000 x 1500 pixels; at most 2000000"):
        header(IMAGE_FILE, data, image_pixels=2_000_000)
    with pytest.raises(MediaTooLarge, match="exceed 8999999 bytes"):
        read(IMAGE_FILE, data, decoded_bytes=8_999_999)
    assert read(IMAGE_FILE, data, decoded_bytes=9_000_000).shape == (1500, 2000, 3)
    for kind in ("PNG", "WEBP", "GIF"):
        first = read(IMAGE_FILE, picture(64, 32, kind, frames=30), decoded_bytes=64 * 32 * 3)
        assert first.shape == (32, 64, 3), "of an animation only the first picture is read"


def test_a_photograph_of_too_many_pixels_is_decoded_smaller() -> None:
    """As a camera makes them: 30 megapixels in a JPEG. Other formats can only be decoded whole."""
    data = picture(6720, 4480, "JPEG")
    pixels = read(IMAGE_FILE, data, decoded_bytes=6720 * 4480 * 3 // 4)
    assert pixels.shape == (2240, 3360, 3)
    assert header(IMAGE_FILE, data) == 2240 * 3360 * 3
    assert read(IMAGE_FILE, data, image_pixels=1000 * 700).shape == (560, 840, 3)
    with pytest.raises(MediaTooLarge, match="at most 100000"):
        read(IMAGE_FILE, data, image_pixels=100_000)
    with pytest.raises(MediaTooLarge, match="6720 x 4480"):
        read(IMAGE_FILE, picture(6720, 4480, "PNG"))


def test_two_frames_a_second_of_a_video_are_kept_within_limits() -> None:
    data = film(2, 64)
    assert read(VIDEO_FILE, data).shape == (4, 64, 64, 3)
    assert read(VIDEO_FILE, film(0.5, 1280)).shape == (2, 640, 640, 3)
    with pytest.raises(MediaTooLarge, match="64 x 64 pixels; at most 4095"):
        read(VIDEO_FILE, data, film_pixels=64 * 64 - 1)
    with pytest.raises(MediaTooLarge, match="more than 19 frames"):
        read(VIDEO_FILE, data, film_frames=19)
    with pytest.raises(MediaTooLarge, match="exceed 24576 bytes"):
        read(VIDEO_FILE, data, decoded_bytes=2 * 64 * 64 * 3)
    with pytest.raises(MediaTooLarge, match="at most 1 s"):
        read(VIDEO_FILE, data, video_seconds=1.0)


def test_a_video_that_names_other_files_is_not_followed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("films")
    (folder / "secret.mp4").write_bytes(film(0.5, 64))
    monkeypatch.chdir(folder)
    with pytest.raises(MalformedMedia):
        read(VIDEO_FILE, b"ffconcat version 1.0\nfile secret.mp4\n")


def test_files_are_told_apart_by_their_content() -> None:
    files = (picture(8, 8), sound((99, 1), 16_000), film(0.2))
    assert [sniff(data) for data in files] == ["image", "audio", "video"]
    assert [sniff(data) for data in (pdf("Salt"), "Ä".encode(), "Ä".encode("latin-1"))] == ["text", "text", "video"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (pdf("Salt is 35.", "So is the sea."), "Salt is 35.\n\nSo is the sea."),
        (pdf("Read, but do not write.", owner="secret"), "Read, but do not write."),
        ("\ufeffsälzig\n".encode(), "sälzig"),
    ],
)
def test_documents_become_their_text(data: bytes, text: str) -> None:
    assert read(DOCUMENT_FILE, data).tobytes().decode() == text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pdf("secret", password="sesame"), "it is an encrypted PDF: remove its password"),
        (pdf("", ""), "it has no text in it, as scans have none"),
        (b" \n", "it has no text in it"),
        (b"%PDF-1.7 and nothing else", "it cannot be read"),
        (b"\0text", "neither a PDF nor text in UTF-8"),
        ("Ä".encode("latin-1"), "neither a PDF nor text in UTF-8"),
    ],
)
def test_a_document_that_cannot_be_read_says_why(data: bytes, words: str) -> None:
    with pytest.raises(MalformedMedia, match=words):
        read(DOCUMENT_FILE, data)


def test_documents_have_limits() -> None:
    limits = {"document_pages": 2, "document_characters": 10, "decoded_bytes": 12}
    with pytest.raises(MediaTooLarge, match="it has 3 pages; at most 2"):
        read(DOCUMENT_FILE, pdf("a", "b", "c"), **limits)
    for document in (pdf("12345", "678901"), b"12345678901"):
        with pytest.raises(MediaTooLarge, match="more than 10 characters"):
            read(DOCUMENT_FILE, document, **limits)
    with pytest.raises(MediaTooLarge, match="exceed 12 bytes when decoded"):
        read(DOCUMENT_FILE, "äöüäöüä".encode(), **limits)
