"""Runs work that needs media decoded on threads, each with a decoder: a process that ends alone if it has to.

A file of a stranger may crash the C code that reads it, keep it busy for ever, or unpack to gigabytes. A decoder that
does not answer within `DECODE_SECONDS`, or dies, costs only the request that it was working for; the next one gets a
new decoder. Pools of libraries take results as pickles, by which a decoder that a file has taken over could run code in
this process, and their workers have its environment (docs/decisions.md).

`python -m omni_actors.media.decoders` is the decoder. Standard input has jobs, standard output the replies: 4 bytes of
length, a head in msgpack, and the raw data that the head announces.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from omni_actors.errors import Aborted, EngineError, InvalidRequest, MalformedMedia, OmniError
from omni_actors.host.processes import describe_exit, die_with_parent, give_back_memory
from omni_actors.media.limits import (
    DOCUMENT_FILE,
    IMAGE_FILE,
    IMAGE_MODES,
    SOUNDS,
    UNKNOWN_FILE,
    Item,
    MediaLimits,
    MediaTooLarge,
    take_decoded,
)
from omni_actors.sharing import Budget

THREADS: Final = 2
DECODE_SECONDS: Final = 60.0  # for all media of a request
START_SECONDS: Final = 60.0
RESUME_SECONDS: Final = 5.0  # after which a decoder that somebody stopped is resumed
MEMORY_BYTES: Final = 1 << 30  # that decoding may take, above what the libraries take
TRIM_BYTES: Final = 16 << 20  # decoded for a request, after which the allocator gives back what it holds in reserve
HEAD_BYTES: Final = 1 << 20
KILLED: Final = describe_exit(-signal.SIGKILL)
ABORTED: Final = "The request was aborted while its media were decoded."
PIPE_BYTES: Final = 1 << 20  # that one end writes before the other end has to read
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
Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class Job(Struct, frozen=True):
    """Measure all items; then decode them, unless `measure` says that this is all. An unknown file is only named.

    Other media of the request have `used` bytes of what the limits allow. The data of the items follow.
    """

    items: tuple[Item, ...]
    limits: MediaLimits
    used: int = 0
    measure: bool = False


class Reply(Struct, frozen=True):
    """The first one to a job measures it, the others are the decoded items; one with an `error` ends the job.

    Args:
        size: bytes of all items after decoding, as their headers say.
        seconds: length of all sounds, 0 if one does not say its own.
        modality: of an unknown file.
        shape: of an item; its data follow, f32 of a sound and else u8.
        error: name of the class.
    """

    size: int = 0
    seconds: float = 0.0
    modality: str = ""
    shape: tuple[int, ...] = ()
    error: str = ""
    message: str = ""
    hint: str = ""


def _send(stream: Any, head: Struct, data: Sequence[Buffer] = ()) -> None:
    packed = msgspec.msgpack.encode(head)
    stream.write(len(packed).to_bytes(4, "big") + packed)
    for buffer in data:
        stream.write(buffer)
    stream.flush()


def _receive(stream: Any, kind: type[T]) -> T:
    length = int.from_bytes(_fill(stream, bytearray(4)), "big")
    if length > HEAD_BYTES:
        raise ValueError(f"a head of {length} bytes")
    return msgspec.msgpack.decode(_fill(stream, bytearray(length)), type=kind)


def _reply(process: subprocess.Popen[bytes]) -> Reply:
    reply = _receive(process.stdout, Reply)
    if reply.error:
        raise _ERRORS.get(reply.error, EngineError)(reply.message, hint=reply.hint)
    return reply


def _fill(stream: Any, into: Any) -> Any:
    """Fill a buffer with what comes next. Raises `EOFError` if the other end closes before."""
    if stream.readinto(into) < memoryview(into).nbytes:
        raise EOFError("the other end is closed")
    return into


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill a process that takes longer. One that was stopped from outside is told to go on."""
    over, deadline = threading.Event(), time.monotonic() + seconds

    def watch() -> None:
        while not over.wait(min(RESUME_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                process.kill()
                break
            process.send_signal(signal.SIGCONT)

    threading.Thread(target=watch, name="media-deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _end(process: subprocess.Popen[bytes]) -> str:
    """End a decoder and return how it ended."""
    process.kill()  # does nothing to one that has ended by itself
    process.communicate()  # which closes the pipes
    return describe_exit(process.returncode)


class MediaDecoder:
    """Work on a thread of `DecoderThreads`, with the process that decodes for it at the moment.

    The work's result is in `future`. Only `cancel` may be called from another thread.
    """

    def __init__(self, idle: list[subprocess.Popen[bytes]], seconds: float, memory_bytes: int) -> None:
        self.future: Future[Any] = Future()  # of the thread, once the work has been submitted
        self._idle, self._seconds, self._memory_bytes = idle, seconds, memory_bytes
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # around what changes `process`
        self._cancelled = False
        self._decoded_bytes = 0

    def cancel(self) -> None:
        """Give the work up; what it decodes at the moment is ended. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self.process is not None:
                self.process.kill()

    def run(self, work: Callable[[MediaDecoder], Any]) -> Any:
        """Do the work."""
        try:
            return work(self)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold what has been decoded
            raise
        finally:
            if self._decoded_bytes > TRIM_BYTES:
                give_back_memory()

    def decode(self, items: Sequence[tuple[Item, Buffer]], limits: MediaLimits, used: int = 0) -> list[Array]:
        """Decode the media of a request; see `readers.decode` for the results.

        Args:
            used: bytes that other media of the request take after decoding.

        Raises:
            MalformedMedia, InvalidRequest: as the readers say, or the decoder crashed on the media or takes too long.
            EngineError: no decoder starts.
            Aborted: the work was given up.
        """
        return self._run(items, Job(tuple(item for item, _ in items), limits, used))[1]

    def measure(self, items: Sequence[tuple[Item, Buffer]], limits: MediaLimits, used: int = 0) -> Reply:
        """Check media by their headers. Raises as `decode` does."""
        return self._run(items, Job(tuple(item for item, _ in items), limits, used, measure=True))[0]

    def _run(self, items: Sequence[tuple[Item, Buffer]], job: Job, *, again: bool = False) -> tuple[Reply, list[Array]]:
        process, done = self._started(), list[Array]()
        pixels, deadline = job.limits.decoded_bytes - job.used, time.monotonic() + self._seconds
        try:
            with _killed_after(process, self._seconds):
                _send(process.stdin, job, [data for _, data in items])
                measured = _reply(process)
                for item, _ in () if job.measure else items:
                    array = _room_for(_reply(process).shape, item, job.limits, pixels)
                    _fill(process.stdout, array.data.cast("B"))
                    pixels -= array.nbytes if array.dtype == np.uint8 else 0
                    done.append(array)
                    self._decoded_bytes += array.nbytes
            return measured, done
        except (EOFError, OSError, msgspec.MsgspecError, ValueError) as error:
            what, how = items[len(done)][0].what, self._lost()
            if time.monotonic() >= deadline:
                raise MediaTooLarge(
                    f"{what} was not decoded within {self._seconds:g} s.", hint="Send less, or a simpler format."
                ) from None
            if how == KILLED and not again:  # from outside, which no file does
                return self._run(items, job, again=True)
            raise MalformedMedia(f"{what} cannot be read: the decoder ended on it ({how}; {error}).") from error
        finally:
            with self._lock:
                left, self.process = self.process, None
            if left is not None:
                late = self._cancelled or time.monotonic() >= deadline  # killed after its last word
                (_end if late else self._idle.append)(left)

    def _started(self) -> subprocess.Popen[bytes]:
        """Return a process that waits for a job."""
        with contextlib.suppress(IndexError):  # none is idle
            while (process := self._idle.pop()).poll() is not None:  # the one that was used last
                _end(process)
            return self._take(process)
        if self._cancelled:
            raise Aborted(ABORTED)
        env = {name: os.environ[name] for name in INHERITED if name in os.environ} | OWN
        command = [sys.executable, "-m", "omni_actors.media.decoders", str(os.getpid()), str(self._memory_bytes)]
        try:
            process = self._take(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        except OSError as error:
            raise EngineError(f"The media decoder cannot be started: {error}.") from error
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(PermissionError):  # all pipes of a user may hold 64 MiB; a smaller one is slower
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[arg-type]
        try:
            with _killed_after(process, START_SECONDS):
                _reply(process)
        except (EOFError, OSError, msgspec.MsgspecError, ValueError) as error:
            raise EngineError(f"The media decoder did not start: {self._lost()}; {error}.") from error
        return process

    def _take(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            self.process = process
            if self._cancelled:
                process.kill()
        return process

    def _lost(self) -> str:
        """End the process and return how it ended. Raises `Aborted` if the work was given up."""
        with self._lock:
            process, self.process = self.process, None
        how = _end(process) if process is not None else describe_exit(None)
        if self._cancelled:
            raise Aborted(ABORTED)
        return how


def _room_for(shape: tuple[int, ...], item: Item, limits: MediaLimits, pixels: int) -> Array:
    """Return an array for what a decoder announces. Raises `ValueError` for what it must not send."""
    sound = item.kind in SOUNDS
    dimensions = 1 if sound or item.kind == DOCUMENT_FILE else 3 if item.kind in IMAGE_MODES else 4
    channels = len(IMAGE_MODES.get(item.kind, IMAGE_MODES[IMAGE_FILE]))
    size = math.prod(shape)
    most = int((limits.audio_seconds + 1) * limits.audio_rate) if sound else pixels
    if len(shape) != dimensions or not 0 < size <= most or (dimensions > 1 and shape[-1] != channels) or min(shape) < 1:
        raise ValueError(f"it answered the shape {shape}")
    return np.empty(shape, np.float32 if sound else np.uint8)


class DecoderThreads:
    """Threads for work that needs media decoded. A decoder's process starts when work needs it, and stays.

    Args:
        count: threads, which is how many requests have their media decoded at a time.
        seconds: for the media of one request.
        memory_bytes: that decoding may take in each process.
    """

    def __init__(self, count: int = THREADS, seconds: float = DECODE_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        # Threads that last as long as the decoders: the kernel ends a decoder with the thread that started it.
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="media")
        self._idle: list[subprocess.Popen[bytes]] = []
        self._limits = seconds, memory_bytes
        self._running: set[MediaDecoder] = set()

    def submit(self, work: Callable[[MediaDecoder], Any]) -> MediaDecoder:
        """Run `work` on the next free thread."""
        decoder = MediaDecoder(self._idle, *self._limits)
        self._running.add(decoder)
        decoder.future = self._executor.submit(decoder.run, work)
        decoder.future.add_done_callback(lambda _: self._running.discard(decoder))
        return decoder

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that run."""
        used = [decoder.process for decoder in list(self._running)]
        return [process.pid for process in (*self._idle, *used) if process is not None]

    def close(self) -> None:
        """Give up all work and end the processes."""
        for decoder in list(self._running):
            decoder.cancel()
        self._executor.shutdown(wait=True)
        while self._idle:
            _end(self._idle.pop())


# ---------------------------------------------------------------------------------------------------------------------
# The decoder's own process


def main(parent: int, memory_bytes: int) -> None:
    """Serve jobs until the other end closes standard input.

    Whatever takes this process over finds no file or socket that it could open: the kernel gives it no descriptor.

    Args:
        parent: process id of the process that this one works for.
        memory_bytes: address space that decoding may take.
    """
    from omni_actors.media.readers import preload  # the libraries are not loaded where only their results are used

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    preload()
    with open(os.devnull, "wb") as silence:
        for output in (1, 2):  # a file could make C libraries write between the replies, or many lines into the log
            os.dup2(silence.fileno(), output)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    _send(replies, Reply())  # its limits are in force
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other end has gone
        while True:
            job = _receive(jobs, Job)
            try:
                _serve(job, [bytes(_fill(jobs, bytearray(item.size))) for item in job.items], replies)
            except OmniError as error:
                _send(replies, Reply(error=type(error).__name__, message=error.message, hint=error.hint))


def _serve(job: Job, data: list[bytes], replies: IO[bytes]) -> None:
    from omni_actors.media.readers import decode, measure, sniff

    if job.items and job.items[0].kind == UNKNOWN_FILE:
        _send(replies, Reply(modality=sniff(data[0])))
        return
    announced, budget = Budget(job.limits.decoded_bytes), Budget(job.limits.decoded_bytes)
    announced.take(None, job.used)
    budget.take(None, job.used)
    measured = []
    for item, content in zip(job.items, data, strict=True):
        measured.append(measure(item.kind, content, job.limits, item.what))
        take_decoded(announced, measured[-1].size, item.what)
    _send(replies, Reply(sum(one.size for one in measured), sum(one.seconds for one in measured)))
    for index, item in enumerate(() if job.measure else job.items):
        content, data[index] = data[index], b""
        decoded = decode(item.kind, content, item.rate, job.limits, budget, item.what)
        _send(replies, Reply(shape=decoded.shape), [decoded.data.cast("B")])
        del decoded, content


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
