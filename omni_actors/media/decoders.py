"""Runs work that needs media decoded on threads, each with a decoder: a process that ends alone if it has to.

A file of a stranger may crash the C code that reads it, keep it busy for ever, or unpack to gigabytes. A decoder that
does not answer within `DECODE_SECONDS`, or dies, costs only the request that it was working for; the next one gets a
new decoder.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_actors.errors import Aborted, EngineError, InvalidRequest, MalformedMedia, OmniError
from omni_actors.host.processes import describe_exit, give_back_memory
from omni_actors.media.limits import MediaLimits, MediaTooLarge
from omni_actors.media.messages import (
    AUDIO_ARRAY,
    AUDIO_FILE,
    IMAGE_FILE,
    IMAGE_MODES,
    Buffer,
    Channel,
    Decoded,
    Item,
    Job,
    Measured,
    Refused,
    Reply,
    Started,
)

THREADS: Final = 2
DECODE_SECONDS: Final = 60.0  # for all media of a request
START_SECONDS: Final = 60.0
MEMORY_BYTES: Final = 1 << 30  # that decoding may take, above what the libraries take
TRIM_BYTES: Final = 16 << 20  # decoded for a request, after which the allocator gives back what it holds in reserve
# What a decoder may see of the environment, and what keeps its memory small.
INHERITED: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV")
OWN: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # larger pieces go back to the system when they are freed
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
_ERRORS: Final[dict[str, type[OmniError]]] = {
    error.__name__: error for error in (InvalidRequest, MalformedMedia, MediaTooLarge, EngineError)
}
Array = NDArray[Any]
T = TypeVar("T")


class Decoder:
    """A process that decodes, started when it is first needed and again after it ended.

    One thread uses it at a time; `give_up` may come from another.
    """

    def __init__(self, seconds: float = DECODE_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds = seconds
        self._arguments = (str(os.getpid()), str(memory_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._lock = threading.Lock()  # around the start and the end of a process
        self._given_up = False
        self.decoded_bytes = 0  # for the present request

    @property
    def pid(self) -> int | None:
        """The process id, if there is a process."""
        process = self._process
        return process.pid if process is not None else None

    def begin(self) -> None:
        """Begin with another request, after one that may have been given up."""
        with self._lock:
            self._given_up, self.decoded_bytes = False, 0

    def decode(self, items: Sequence[tuple[Item, Buffer]], limits: MediaLimits, used: int = 0) -> list[Array]:
        """Decode the media of a request; see `readers.decode` for the results.

        Args:
            used: bytes that other media of the request take after decoding.

        Raises:
            MalformedMedia, InvalidRequest: as the readers say, or the decoder crashed on the media or takes too long.
            EngineError: no decoder starts.
            Aborted: the request was given up.
        """
        return self._run(items, Job(tuple(item for item, _ in items), limits, used))[1]

    def measure(self, items: Sequence[tuple[Item, Buffer]], limits: MediaLimits, used: int = 0) -> Measured:
        """Check media by their headers. Raises as `decode` does."""
        return self._run(items, Job(tuple(item for item, _ in items), limits, used, measure=True))[0]

    def _run(self, items: Sequence[tuple[Item, Buffer]], job: Job) -> tuple[Measured, list[Array]]:
        channel = self.start()
        done: list[Array] = []
        pixels = job.limits.decoded_bytes - job.used
        channel.deadline = time.monotonic() + self._seconds
        try:
            channel.send(job, [data for _, data in items])
            measured = self._reply(channel, Measured)
            for item, _ in () if job.measure else items:
                array = _room_for(self._reply(channel, Decoded).shape, item, job.limits, pixels)
                channel.data(array.data.cast("B"))
                pixels -= array.nbytes if array.dtype == np.uint8 else 0
                done.append(array)
                self.decoded_bytes += array.nbytes
            return measured, done
        except TimeoutError:
            self.close()
            raise MediaTooLarge(
                f"{items[len(done)][0].what} was not decoded within {self._seconds:g} s.",
                hint="Send less, or a simpler format.",
            ) from None
        except (EOFError, OSError, msgspec.MsgspecError, ValueError) as error:
            what, how = items[len(done)][0].what, self.close()
            self._check_given_up()
            raise MalformedMedia(f"{what} cannot be read: the decoder ended on it ({how}; {error}).") from error

    def _reply(self, channel: Channel, kind: type[T]) -> T:
        reply: Reply = channel.receive(Reply)
        if isinstance(reply, Refused):
            raise _ERRORS.get(reply.error, EngineError)(reply.message, hint=reply.hint)
        if not isinstance(reply, kind):
            raise ValueError(f"it answered {type(reply).__name__}")
        return reply

    def start(self) -> Channel:
        """Start a process unless there is one; return the channel to it. Raises as `decode` does."""
        with self._lock:
            if self._given_up:
                self._end()
            self._check_given_up()
            if self._process is not None and self._process.poll() is None and self._channel is not None:
                return self._channel
            self._end()
            ours, theirs = socket.socketpair()
            environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | OWN
            command = [sys.executable, "-m", "omni_actors.media.worker", *self._arguments]
            try:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, close_fds=True
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"The media decoder cannot be started: {error}.") from error
            finally:
                theirs.close()
            channel = self._channel = Channel(ours)
        channel.deadline = time.monotonic() + START_SECONDS
        try:
            self._reply(channel, Started)
        except (EOFError, OSError, msgspec.MsgspecError, ValueError) as error:
            how = self.close()
            self._check_given_up()
            raise EngineError(f"The media decoder did not start: {how}; {error}.") from error
        return channel

    def _check_given_up(self) -> None:
        if self._given_up:
            raise Aborted("The request was aborted while its media were decoded.")

    def give_up(self) -> None:
        """End the process, so that the thread that uses it gets an error. Callable from any thread."""
        with self._lock:
            self._given_up = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> str:
        """End the process, if there is one, and return how it ended. For the thread that uses it."""
        with self._lock:
            return self._end()

    def _end(self) -> str:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is None:
            return describe_exit(None)
        process.kill()  # does nothing to one that has ended by itself
        return describe_exit(process.wait())


def _room_for(shape: tuple[int, ...], item: Item, limits: MediaLimits, pixels: int) -> Array:
    """Return an array for what a decoder announces. Raises `ValueError` for what it must not send."""
    sound = item.kind in (AUDIO_ARRAY, AUDIO_FILE)
    dimensions = 1 if sound else 3 if item.kind in IMAGE_MODES else 4
    channels = len(IMAGE_MODES.get(item.kind, IMAGE_MODES[IMAGE_FILE]))
    size = math.prod(shape)
    most = int((limits.audio_seconds + 1) * limits.audio_rate) if sound else pixels
    if len(shape) != dimensions or not 0 < size <= most or (not sound and shape[-1] != channels) or min(shape) < 1:
        raise ValueError(f"it answered the shape {shape}")
    return np.empty(shape, np.float32 if sound else np.uint8)


class Task(Generic[T]):
    """Work on a thread of `DecoderThreads`."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self._lock = threading.Lock()
        self._decoder: Decoder | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Give the work up; what it decodes at the moment is ended. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self._decoder is not None:
                self._decoder.give_up()

    def run(self, work: Callable[[Decoder], T], decoder: Decoder) -> None:
        """Do the work, on the thread that has this decoder, and report it in `future`."""
        if not self.future.set_running_or_notify_cancel():
            return
        with self._lock:
            decoder.begin()
            if self._cancelled:
                decoder.give_up()
            self._decoder = decoder
        try:
            result = work(decoder)
        except BaseException as error:  # noqa: BLE001 - reported in the future
            self._released()
            traceback.clear_frames(error.__traceback__)  # they hold what has been decoded
            self.future.set_exception(error)
        else:
            self._released()
            self.future.set_result(result)

    def _released(self) -> None:
        with self._lock:
            self._decoder = None


class DecoderThreads:
    """Threads with a decoder each. A decoder's process starts with the first media.

    Args:
        count: threads, which is how many requests have their media decoded at a time.
        seconds: for the media of one request.
        memory_bytes: that decoding may take in each process.
    """

    def __init__(self, count: int = THREADS, seconds: float = DECODE_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        # Threads that last as long as the decoders: the kernel ends a decoder with the thread that started it.
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="media")
        self._decoders = [Decoder(seconds, memory_bytes) for _ in range(count)]
        self._idle = list(self._decoders)  # the last one was used last, and probably runs
        self._running: set[Task[Any]] = set()

    def submit(self, work: Callable[[Decoder], T]) -> Task[T]:
        """Run `work` on the next free thread."""
        task: Task[T] = Task()
        self._running.add(task)
        task.future.add_done_callback(lambda _: self._running.discard(task))
        self._executor.submit(self._run, task, work)
        return task

    def _run(self, task: Task[T], work: Callable[[Decoder], T]) -> None:
        decoder = self._idle.pop()  # there are as many as threads
        try:
            task.run(work, decoder)
            if decoder.decoded_bytes > TRIM_BYTES:
                give_back_memory()
        finally:
            self._idle.append(decoder)

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that run."""
        return [pid for decoder in self._decoders if (pid := decoder.pid) is not None]

    def close(self) -> None:
        """Give up all work and end the processes."""
        for task in list(self._running):
            task.cancel()
        self._executor.shutdown(wait=True)
        for decoder in self._decoders:
            decoder.close()
