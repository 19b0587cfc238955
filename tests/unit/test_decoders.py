"""Decoders: a process that crashes, hangs or takes too much memory costs only the request that it works for."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from omni_actors.errors import Aborted, MalformedMedia
from omni_actors.media.decoders import Decoder, DecoderThreads
from omni_actors.media.limits import MediaLimits, MediaTooLarge
from omni_actors.media.messages import AUDIO_ARRAY, IMAGE_FILE, UNKNOWN_FILE, VIDEO_FILE, Channel, Item
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


def works(decoder: Decoder) -> bool:
    (decoded,) = decoder.decode([SMALL], MediaLimits())
    return np.array_equal(decoded, PIXELS)


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoder]:
    decoder = Decoder()
    yield decoder
    decoder.close()


@pytest.fixture
def decoder(shared: Decoder) -> Iterator[Decoder]:
    """The one of this module, which works before and after the test."""
    assert works(shared)
    yield shared
    assert works(shared)


def test_media_are_decoded_in_order_and_measured_together(decoder: Decoder) -> None:
    sound = np.zeros(48_000, np.float32)
    media = [SMALL, item(AUDIO_ARRAY, sound.tobytes(), rate=48_000), SMALL]
    decoded = decoder.decode(media, MediaLimits())
    assert [array.shape for array in decoded] == [(60, 80, 3), (16_000,), (60, 80, 3)]
    assert decoder.measure([SMALL] * 3, MediaLimits()).size == 3 * PIXELS.nbytes
    assert decoder.measure([item(UNKNOWN_FILE, SMALL[1])], MediaLimits()).modality == "image"


def test_a_request_whose_media_exceed_the_limit_together_is_refused_before_any_is_decoded(decoder: Decoder) -> None:
    broken = item(IMAGE_FILE, SMALL[1][:2000])  # its header is whole, so only decoding could notice
    limits = MediaLimits(decoded_bytes=3 * PIXELS.nbytes - 1)
    with pytest.raises(MediaTooLarge, match=f"third: the media of the request exceed {limits.decoded_bytes} bytes"):
        decoder.decode([broken, SMALL, item(IMAGE_FILE, SMALL[1], "third")], limits)


def test_one_that_crashes_is_replaced_and_the_medium_is_named(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = decoder.pid or 0
    sent, receive = threading.Event(), Channel.receive

    def received(channel: Channel, kind: Any) -> Any:
        sent.set()  # the job has been sent
        return receive(channel, kind)

    monkeypatch.setattr(Channel, "receive", received)
    psutil.Process(pid).suspend()  # as if a file kept it busy
    with ThreadPoolExecutor(1) as thread:
        failing = thread.submit(decoder.decode, [BOMB], MediaLimits())
        assert sent.wait(60)
        psutil.Process(pid).send_signal(signal.SIGSEGV)
        psutil.Process(pid).resume()
        with pytest.raises(MalformedMedia, match=r"the bomb cannot be read: .*killed by signal 11"):
            failing.result()


def test_one_that_died_while_it_was_idle_costs_nobody_anything(decoder: Decoder) -> None:
    process = psutil.Process(decoder.pid)
    process.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert works(decoder)


def test_one_that_hangs_is_ended_at_its_deadline() -> None:
    decoder = Decoder(seconds=0.5)
    try:
        decoder.start()
        process = psutil.Process(decoder.pid)
        process.suspend()
        with pytest.raises(MediaTooLarge, match=r"the bomb was not decoded within 0\.5 s"):
            decoder.decode([BOMB], MediaLimits())
        assert not process.is_running()
    finally:
        decoder.close()


def test_memory_is_bounded() -> None:
    decoder = Decoder(memory_bytes=16 << 20)
    try:
        with pytest.raises((MediaTooLarge, MalformedMedia), match="the bomb"):
            decoder.decode([BOMB], MediaLimits())
        assert works(decoder)
    finally:
        decoder.close()


def test_it_has_no_secrets_and_can_open_nothing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ACTORS_API_KEY", "secret")
    decoder.close()
    assert works(decoder)
    process = psutil.Process(decoder.pid)
    assert "OMNI_ACTORS_API_KEY" not in process.environ()
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    (descriptors,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert descriptors.split()[3:5] == ["0", "0"]
    with pytest.raises(MalformedMedia):
        decoder.decode([item(VIDEO_FILE, b"ffconcat version 1.0\nfile secret.mp4\n")], MediaLimits())


def test_it_ends_with_the_process_that_it_works_for() -> None:
    program = (
        "import sys, time; from omni_actors.media.decoders import Decoder;"
        "from tests.unit.test_decoders import works; decoder = Decoder(); assert works(decoder);"
        "print(decoder.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        worker.suspend()  # as if a file kept it busy, so that it cannot see its socket close
        parent.kill()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, what="the decoder has ended")


def test_work_that_is_given_up_frees_its_thread() -> None:
    threads = DecoderThreads(count=1)
    try:
        assert threads.submit(works).future.result()
        (pid,) = threads.pids
        psutil.Process(pid).suspend()
        begun = threading.Event()

        def decode(decoder: Decoder) -> list[np.ndarray]:
            begun.set()
            return decoder.decode([SMALL], MediaLimits())

        hanging, waiting, after = threads.submit(decode), threads.submit(works), threads.submit(works)
        assert begun.wait(60)
        waiting.cancel()
        hanging.cancel()
        for given_up in (hanging, waiting):
            with pytest.raises(Aborted):
                given_up.future.result(60)
        assert after.future.result(60)
    finally:
        threads.close()
    assert threads.pids == []
