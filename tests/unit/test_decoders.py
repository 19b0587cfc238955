"""Decoders: a process that crashes, hangs or takes too much memory costs only the request that it works for."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from omni_actors.errors import Aborted, MalformedMedia
from omni_actors.media import decoders
from omni_actors.media.decoders import DecoderThreads, MediaDecoder, Reply
from omni_actors.media.limits import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    IMAGE_FILE,
    UNKNOWN_FILE,
    VIDEO_FILE,
    Item,
    MediaLimits,
    MediaTooLarge,
)
from tests.support.waiting import until

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
Given = tuple[Item, bytes]


def png(array: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(array).save(sink, "PNG")
    return sink.getvalue()


def item(kind: str, data: bytes, what: str = "it", rate: int = 0) -> Given:
    return Item(kind, what, len(data), rate), data


SMALL = item(IMAGE_FILE, png(PIXELS))
BOMB = item(IMAGE_FILE, png(np.zeros((3000, 4000, 3), np.uint8)), "the bomb")


def decode(threads: DecoderThreads, *media: Given, limits: MediaLimits = MediaLimits()) -> list[np.ndarray]:  # noqa: B008
    decoded: list[np.ndarray] = threads.submit(lambda decoder: decoder.decode(media, limits)).future.result(100)
    return decoded


def works(threads: DecoderThreads) -> bool:
    return np.array_equal(decode(threads, SMALL)[0], PIXELS)


@pytest.fixture(scope="module")
def shared() -> Iterator[DecoderThreads]:
    with contextlib.closing(DecoderThreads(count=1)) as threads:
        yield threads


@pytest.fixture
def threads(shared: DecoderThreads) -> Iterator[DecoderThreads]:
    """The one of this module, which works before and after the test."""
    assert works(shared)
    yield shared
    assert works(shared)


def test_media_are_decoded_in_order_and_measured_together(threads: DecoderThreads) -> None:
    sound = np.zeros(48_000, np.float32)
    decoded = decode(threads, SMALL, item(AUDIO_ARRAY, sound.tobytes(), rate=48_000), SMALL)
    assert [array.shape for array in decoded] == [(60, 80, 3), (16_000,), (60, 80, 3)]
    assert all(array.flags.writeable for array in decoded)

    def measured(*media: Given) -> Reply:
        reply: Reply = threads.submit(lambda decoder: decoder.measure(media, MediaLimits())).future.result(100)
        return reply

    assert measured(SMALL, SMALL, SMALL).size == 3 * PIXELS.nbytes
    assert measured(item(UNKNOWN_FILE, SMALL[1])).modality == "image"


def test_a_request_whose_media_exceed_the_limit_together_is_refused_before_any_is_decoded(
    threads: DecoderThreads,
) -> None:
    (pid,) = threads.pids
    broken = item(IMAGE_FILE, SMALL[1][:2000])  # its header is whole, so only decoding could notice
    limits = MediaLimits(decoded_bytes=3 * PIXELS.nbytes - 1)
    with pytest.raises(MediaTooLarge, match=f"third: the media of the request exceed {limits.decoded_bytes} bytes"):
        decode(threads, broken, SMALL, item(IMAGE_FILE, SMALL[1], "third"), limits=limits)
    assert threads.pids == [pid], "a refusal costs no decoder"


def stopped_with_work(threads: DecoderThreads) -> tuple[psutil.Process, MediaDecoder]:
    """A decoder that is stopped before it reads its work, and that work."""
    process = psutil.Process(threads.pids[0])
    process.suspend()
    stopped = threads.submit(lambda decoder: decoder.decode([BOMB], MediaLimits()))
    until(lambda: stopped.process, 60, "the decoder is taken")
    return process, stopped


def test_one_that_is_killed_from_outside_costs_nothing(threads: DecoderThreads) -> None:
    process, stopped = stopped_with_work(threads)
    process.kill()
    (decoded,) = stopped.future.result(60)
    assert decoded.shape == (3000, 4000, 3)


def test_one_that_is_stopped_from_outside_goes_on(threads: DecoderThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "RESUME_SECONDS", 0.2)
    process, stopped = stopped_with_work(threads)
    (decoded,) = stopped.future.result(60)
    assert decoded.shape == (3000, 4000, 3)
    assert threads.pids == [process.pid]


def test_one_that_crashes_is_replaced_and_the_medium_is_named(threads: DecoderThreads) -> None:
    process, stopped = stopped_with_work(threads)
    process.send_signal(signal.SIGSEGV)
    process.resume()
    with pytest.raises(MalformedMedia, match=r"the bomb cannot be read: .*killed by signal 11"):
        stopped.future.result(60)


def test_one_that_comes_to_no_end_is_ended_at_its_deadline() -> None:
    sink = io.BytesIO()
    soundfile.write(sink, np.zeros(299 * 192_000, np.int16), 192_000, format="FLAC")  # a second or two of work
    with contextlib.closing(DecoderThreads(count=1, seconds=0.5)) as threads:
        assert works(threads)
        process = psutil.Process(threads.pids[0])
        with pytest.raises(MediaTooLarge, match=r"the sound was not decoded within 0.5 s"):
            decode(threads, item(AUDIO_FILE, sink.getvalue(), "the sound", 16_000))
        assert not process.is_running()
        assert works(threads)


def test_memory_is_bounded() -> None:
    with contextlib.closing(DecoderThreads(count=1, memory_bytes=16 << 20)) as threads:
        with pytest.raises((MediaTooLarge, MalformedMedia), match="the bomb"):
            decode(threads, BOMB)
        assert works(threads)


def test_it_has_no_secrets_and_can_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ACTORS_API_KEY", "secret")
    with contextlib.closing(DecoderThreads(count=1)) as threads:
        with socket.socket() as other:
            other.set_inheritable(True)
            assert works(threads)
        process = psutil.Process(threads.pids[0])
        assert "OMNI_ACTORS_API_KEY" not in process.environ()
        folder = Path(f"/proc/{process.pid}")
        (descriptors,) = [line for line in (folder / "limits").read_text().splitlines() if "open files" in line]
        assert descriptors.split()[3:5] == ["0", "0"]
        opened = {os.readlink(descriptor).partition(":")[0] for descriptor in (folder / "fd").iterdir()}
        assert opened == {"pipe", "/dev/null"}
        with pytest.raises(MalformedMedia):
            decode(threads, item(VIDEO_FILE, b"ffconcat version 1.0\nfile secret.mp4\n"))


AS_ANY_USER = ("setpriv", "--bounding-set=-sys_resource,-sys_admin") if os.geteuid() == 0 else ()
HOLD_ALL_PIPES = """
import contextlib, fcntl, os
with contextlib.suppress(PermissionError):
    while True:
        fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)
"""


def test_it_needs_no_large_pipes_and_ends_with_the_process_that_it_works_for() -> None:
    program = (
        f"{HOLD_ALL_PIPES}\nimport time; from omni_actors.media.decoders import DecoderThreads, MediaDecoder;"
        "from tests.unit.test_decoders import works; threads = DecoderThreads(); assert works(threads);"
        "print(threads.pids[0], flush=True); time.sleep(600)"
    )
    command = [*AS_ANY_USER, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        worker.suspend()  # as if a file kept it busy, so that it cannot see its pipe close
        parent.kill()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, what="the decoder has ended")


def test_work_that_is_given_up_frees_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "RESUME_SECONDS", 600.0)
    with contextlib.closing(DecoderThreads(count=1)) as threads:
        assert works(threads)
        psutil.Process(threads.pids[0]).suspend()
        hanging, waiting, after = (
            threads.submit(lambda decoder: decoder.decode([SMALL], MediaLimits())) for _ in range(3)
        )
        until(lambda: hanging.process, 60, "the decoder is taken")
        waiting.cancel()
        hanging.cancel()
        for given_up in (hanging, waiting):
            with pytest.raises(Aborted):
                given_up.future.result(60)
        assert np.array_equal(after.future.result(60)[0], PIXELS)
    assert threads.pids == []
