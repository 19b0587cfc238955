"""The user's turns: the sound that waits, where turns begin and end, and what all sessions share for it."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import distribution
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from omni_actors.host.processes import end_tasks, give_back_memory
from omni_actors.http_server.encoders import samples_of
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime.config import ServerVad
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND, RATE, SoundDecoder, WireFormat
from omni_actors.http_server.settings import ServerSettings
from omni_actors.logs import get_logger
from omni_actors.sharing import Budget, reserved
from omni_actors.telemetry.metrics import REALTIME_SESSIONS, Meters

logger = get_logger(__name__)

SAMPLE_BYTES = 2
MIN_COMMIT = RATE // 10  # samples: OpenAI's bound of 100 ms

BEGIN_WINDOWS = 2  # that must be speech before a turn begins, so that a click is none
HYSTERESIS = 0.15  # by which the probability must fall below the threshold to count as silence
HEAD_START_MS = 200  # before a silence ends the turn, at most half of it, its answer is begun (docs/decisions.md)

MODEL_RATE = 16_000
QUIET = 1e-3  # of full scale (-60 dB): quieter is not speech, such as a muted microphone
SETTLED_WINDOWS = 32  # of silence that the model hears; after ten it took later speech for noise
MODEL_WINDOW, MODEL_CONTEXT = 512, 64  # samples at MODEL_RATE: of a window, and of those before it
WINDOW = MODEL_WINDOW * RATE // MODEL_RATE


# ---------------------------------------------------------------------------------------------------------------------
# The user's sound that is not part of an item yet


class AudioBuffer:
    """PCM with its place in all the sound of the session. Positions count samples from the session's first one.

    Args:
        limit_seconds: how much may wait for a commit.
        wire: the format in which it comes.
    """

    def __init__(self, limit_seconds: float, wire: WireFormat) -> None:
        self._limit_seconds = limit_seconds
        self._data = bytearray()
        self._decoder = SoundDecoder(wire)
        self.start = 0

    @property
    def end(self) -> int:
        """Position behind the last sample."""
        return self.start + len(self._data) // SAMPLE_BYTES

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return len(self._data)

    def append(self, data: bytes) -> None:
        """Add sound. Raises `HttpError` 400 for half a sample, 413 if too much waits; then nothing was added."""
        wire = self._decoder.wire
        samples, rest = divmod(len(data), wire.sample_bytes)
        if rest:
            raise bad_field("audio", "The audio ends within a sample: a sample of audio/pcm has two bytes.")
        if len(self._data) / BYTES_PER_SECOND + samples / wire.hertz > self._limit_seconds:
            message = f"The buffer is limited to {self._limit_seconds:g} s of audio: commit or clear it."
            raise HttpError(413, message, param="audio", code="media_too_large")
        self._data += self._decoder.decode(data)

    def end_sound(self, wire: WireFormat | None = None) -> None:
        """Decode the rest of the sound; what is appended then begins anew, in another format if one is given."""
        self._data += self._decoder.decode(b"", last=True)
        if wire not in (None, self._decoder.wire):
            self._decoder = SoundDecoder(wire)

    def make_room(self, size: int) -> None:
        """Forget the oldest sound if there is no room for what `size` more bytes become."""
        wire = self._decoder.wire
        more = math.ceil(size * BYTES_PER_SECOND / (wire.hertz * wire.sample_bytes))
        excess = len(self._data) + more - int(self._limit_seconds * BYTES_PER_SECOND)
        if excess > 0:
            self.take(end=self.start + -(-excess // SAMPLE_BYTES))

    def read(self, start: int, end: int) -> bytes:
        """The sound between two positions, which stays."""
        return bytes(self._data[self._offset(start) : self._offset(end)])

    def take(self, start: int | None = None, end: int | None = None) -> bytes:
        """Remove everything before `end` and return it from `start` on; the whole buffer by default."""
        first = self._offset(self.start if start is None else start)
        last = self._offset(self.end if end is None else end)
        taken = bytes(self._data[first:last])
        del self._data[:last]
        self.start += last // SAMPLE_BYTES
        return taken

    def _offset(self, position: int) -> int:
        return min(max(position - self.start, 0) * SAMPLE_BYTES, len(self._data))


def milliseconds(samples: int) -> int:
    """A position, or a length, in milliseconds."""
    return samples * 1000 // RATE


# ---------------------------------------------------------------------------------------------------------------------
# Where turns begin and end


class SpeechWindow(NamedTuple):
    """A stretch of the session's sound, in samples, and the probability that it is speech."""

    start: int
    end: int
    probability: float


class TurnBegins(NamedTuple):
    """The user speaks; `start` includes the padding."""

    start: int


class TurnPauses(NamedTuple):
    """The user has perhaps stopped; `end` includes the silence so far, `silence` is its length in samples."""

    end: int
    silence: int


class TurnGoesOn(NamedTuple):
    """The user has only paused."""


class TurnEnds(NamedTuple):
    """The user has stopped; `end` includes the silence that showed it, `silence` is its length in samples."""

    end: int
    silence: int


TurnEvent = TurnBegins | TurnPauses | TurnGoesOn | TurnEnds


class TurnDetector:
    """The state of one session's turn."""

    def __init__(self, config: ServerVad) -> None:
        self._config = config
        self._speech_windows = 0
        self._speech_start = 0
        self._speech_end = 0
        self._pausing = False
        self.speaking = False

    def feed(self, window: SpeechWindow) -> TurnEvent | None:
        """Take the next window."""
        if window.probability >= self._config.threshold:
            if not self._speech_windows:
                self._speech_start = window.start
            self._speech_windows += 1
            if not self.speaking and self._speech_windows >= BEGIN_WINDOWS:
                self.speaking, self._speech_end = True, window.end
                return TurnBegins(self.needed_from(window.end))
        elif not self.speaking:
            self._speech_windows = 0
        return self._silence(window) if self.speaking else None

    def _silence(self, window: SpeechWindow) -> TurnEvent | None:
        if window.probability >= self._config.threshold - HYSTERESIS:
            paused, self._pausing, self._speech_end = self._pausing, False, window.end
            return TurnGoesOn() if paused else None
        silence, enough = window.end - self._speech_end, self._config.silence_duration_ms
        if milliseconds(silence) >= enough:
            self.reset()
            return TurnEnds(window.end, silence)
        if self._pausing or milliseconds(silence) < max(enough - HEAD_START_MS, enough / 2):
            return None
        self._pausing = True
        return TurnPauses(window.end, silence)

    def reset(self) -> None:
        """Forget the turn, as when its sound was committed or discarded."""
        self.speaking = self._pausing = False
        self._speech_windows = 0

    def needed_from(self, end: int) -> int:
        """Position of the first sample that a turn may need after the sound until `end`."""
        begun = self._speech_start if self._speech_windows else end
        return max(begun - self._config.prefix_padding_ms * RATE // 1000, 0)


# ---------------------------------------------------------------------------------------------------------------------
# The probability of speech, by Silero's model (docs/decisions.md). Part of the extra `realtime`


def available() -> bool:
    """Whether the extra is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("onnxruntime", "silero_vad", "soxr"))


class VoiceActivity:
    """The sound of one session that the model has not heard yet, and what it remembers of the rest.

    Args:
        position: of the first sample that it will be given.
        heard: called with windows that the model has heard, and how late, in seconds.
    """

    def __init__(self, position: int, heard: Callable[[Sequence[SpeechWindow], float], None]) -> None:
        import soxr

        self._waiting = bytearray()  # PCM
        self._since: float | None = None  # when the first piece came of those that have waited since (any clock)
        self._done = 0.0  # seconds of them that were looked at
        self._take = heard
        self.caught_up = asyncio.Event()
        self.error: Exception | None = None
        self._resampler = soxr.ResampleStream(RATE, MODEL_RATE, 1, dtype="float32", quality="LQ")
        self._sound = numpy.zeros(MODEL_CONTEXT, numpy.float32)  # what was heard last, and what waits
        self._position = position
        self._quiet = 0  # windows so far
        self.memory = numpy.zeros((2, 128), numpy.float32)

    def append(self, pcm: bytes, now: float) -> int:
        """Have sound wait until it is looked at. Returns the bytes that wait."""
        if self._since is None:
            self._since, self._done = now, 0.0
        self._waiting += pcm
        self.caught_up.clear()
        return len(self._waiting)

    def take(self) -> bytes:
        """The next sound to look at."""
        piece = bytes(self._waiting[:PIECE_BYTES])
        del self._waiting[:PIECE_BYTES]
        return piece

    def found(self, windows: Sequence[SpeechWindow], piece: bytes, now: float) -> float:
        """Pass on what was found in a piece of sound. Returns how late that is, in seconds.

        Sound that has come at once is not late as long as it is looked at faster than it is spoken.
        """
        late = max(0.0, now - (now if self._since is None else self._since) - self._done)
        self._done += len(piece) / BYTES_PER_SECOND
        if not self._waiting:
            self._since = None
            self.caught_up.set()
        self._take(windows, late)
        return late

    def close(self) -> None:
        """Pass on nothing more: the session has ended."""
        self._take = lambda *_: None

    def fail(self, error: Exception) -> None:
        """End with an error, which is raised when more sound comes."""
        self.error = error
        self.caught_up.set()

    def add(self, pcm: bytes) -> None:
        """Add sound to what the model hears."""
        samples = samples_of(pcm)
        self._sound = numpy.concatenate((self._sound, self._resampler.resample_chunk(samples)))

    @property
    def window(self) -> NDArray[numpy.float32] | None:
        """The model's next input, f32 [MODEL_CONTEXT + MODEL_WINDOW]; `None` until there is enough sound."""
        size = MODEL_CONTEXT + MODEL_WINDOW
        return self._sound[:size] if len(self._sound) >= size else None

    def pass_quiet(self) -> Iterator[SpeechWindow]:
        """Go on to the next window that the model has to hear: of a long silence, it hears the beginning only."""
        while (window := self.window) is not None:
            self._quiet = self._quiet + 1 if abs(window).max() < QUIET else 0
            if self._quiet <= SETTLED_WINDOWS:
                return
            yield self.heard(0.0, self.memory)

    def heard(self, probability: float, memory: NDArray[numpy.float32]) -> SpeechWindow:
        """Take the model's output for the window, and go on to the next one."""
        start, self._position = self._position, self._position + WINDOW
        self._sound, self.memory = self._sound[MODEL_WINDOW:], memory
        return SpeechWindow(start, self._position, probability)


class SpeechModel:
    """Silero's model, for the sessions of a server: one run computes a window of each that has one.

    A window of 32 ms takes 0.3 ms of a core alone, and 0.09 in a run for 64 sessions (docs/decisions.md).
    """

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # Found without an import of the package, which would import torch.
        path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad_16k_op15.onnx")
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def listen(self, pieces: Sequence[tuple[VoiceActivity, bytes]]) -> list[list[SpeechWindow]]:
        """The windows that are complete after a piece of PCM of each of several sessions."""
        found: list[list[SpeechWindow]] = [[] for _ in pieces]
        for (activity, pcm), windows in zip(pieces, found, strict=True):
            activity.add(pcm)
            windows += activity.pass_quiet()
        while ready := [
            (row, one, window) for row, (one, _) in enumerate(pieces) if (window := one.window) is not None
        ]:
            given = {
                "input": numpy.stack([window for _, _, window in ready]),
                "state": numpy.stack([activity.memory for _, activity, _ in ready], axis=1),
                "sr": numpy.array(MODEL_RATE, numpy.int64),
            }
            probabilities, memories = self.session.run(None, given)
            for index, (row, activity, _) in enumerate(ready):
                found[row].append(activity.heard(float(probabilities[index, 0]), memories[:, index]))
                found[row] += activity.pass_quiet()
        return found


# ---------------------------------------------------------------------------------------------------------------------
# What all sessions share

LOOK_SECONDS = 0.02  # between two looks at the sound of all sessions; a window has 32 ms
PIECE_BYTES = BYTES_PER_SECOND // 4  # of a session's sound in one look, so that sessions take turns
BUSY_SECONDS = 0.2  # by which turns are found late in the mean, from which no session begins
MEAN_OF = 10  # looks
RETRY_SECONDS = 2.0  # for which none begins then


class Realtime:
    """One per server."""

    def __init__(self, settings: ServerSettings, bodies: Budget) -> None:
        self.settings = settings
        self.meters = Meters()
        self.detects = available()
        self.thread = ThreadPoolExecutor(1, "voice activity")
        self._unheard: dict[VoiceActivity, None] = {}
        self._looking: asyncio.Task[None] | None = None
        self.bodies = bodies
        self._sessions: Counter[str] = Counter()  # by tenant
        self._late = 0.0  # by which turns were found late, the mean of the last looks
        self._busy_until = 0.0  # no session begins (monotonic clock)
        self.meters.set(REALTIME_SESSIONS, to=0)

    @contextmanager
    def session(self, tenant: str, holder: Hashable) -> Iterator[None]:
        """Take a place for a session; at its end, release the bytes that `holder` has for it.

        As with slots, the last sixteenth of the places is kept for clients that have none (docs/decisions.md).

        Raises:
            HttpError: 429 if the client can have no place, or if turns are found too late as it is.
        """
        places, own = self.settings.realtime_sessions, self._sessions[tenant]
        free = places - self._sessions.total()
        if free <= (reserved(places) if own else 0):
            whose = f"{own} are yours, and the last {free} are kept for other clients" if free else "all are in use"
            message = f"This server has {places} realtime sessions: {whose}. Try again."
            raise HttpError(429, message, code="overloaded")
        if (seconds := self._busy_until - time.monotonic()) > 0:
            message = "The server has as many realtime sessions as it can listen to: try again."
            raise HttpError(429, message, code="overloaded", retry_after=seconds)
        self._count(tenant, 1)
        try:
            yield
        finally:
            self._count(tenant, -1)
            self.bodies.release(holder)
            give_back_memory()  # messages in pieces that the allocator would keep for the next session

    @functools.cached_property
    def _model(self) -> SpeechModel:
        return SpeechModel()

    async def load(self) -> None:
        """Load the model, so that the first sound of the first session does not wait for that."""
        if self.detects:
            await asyncio.get_running_loop().run_in_executor(self.thread, lambda: self._model)

    def listen(self, activity: VoiceActivity, pcm: bytes) -> int:
        """Look for speech in the next sound of a session, with that of the others. Returns its bytes that wait.

        Raises:
            Exception: why this session's sound cannot be looked at.
        """
        if activity.error is not None:
            raise activity.error
        self._unheard[activity] = None
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="voice activity")
        return activity.append(pcm, time.monotonic())

    def forget(self, activity: VoiceActivity) -> None:
        """Look no more for the speech of a session that has ended. Idempotent."""
        activity.close()
        self._unheard.pop(activity, None)

    async def _look(self) -> None:
        """Look for speech in all that has come, again and again until nothing more has."""
        loop = asyncio.get_running_loop()
        while self._unheard:
            began = time.monotonic()
            pieces = [(activity, activity.take()) for activity in self._unheard]
            self._unheard.clear()
            try:
                found = await loop.run_in_executor(self.thread, self._model.listen, pieces)
            except Exception as error:  # noqa: BLE001 - each of these sessions ends with it
                for activity, _ in pieces:
                    activity.fail(error)
                continue
            all_heard = self._pass_on(pieces, found)
            await asyncio.sleep(began + LOOK_SECONDS - time.monotonic() if all_heard else 0.0)

    def _pass_on(self, pieces: Sequence[tuple[VoiceActivity, bytes]], found: Sequence[Sequence[SpeechWindow]]) -> bool:
        """Pass on what was found. Says whether no session has more sound than was looked at."""
        now, latest, all_heard = time.monotonic(), 0.0, True
        for (activity, piece), windows in zip(pieces, found, strict=True):
            try:
                latest = max(latest, activity.found(windows, piece, now))
            except Exception as error:  # noqa: BLE001 - its session ends with it, and no other
                activity.fail(error)
            if not activity.caught_up.is_set() and activity not in self._unheard:
                self._unheard[activity] = None
                all_heard = False
        self._late += (latest - self._late) / MEAN_OF
        if self._late > BUSY_SECONDS:
            if now > self._busy_until:
                logger.warning("turns are found %.1f s late: no realtime session begins for a while", self._late)
            self._busy_until = now + RETRY_SECONDS
        return all_heard

    def _count(self, tenant: str, change: int) -> None:
        self._sessions[tenant] += change
        self._sessions = +self._sessions  # without those that have none
        self.meters.set(REALTIME_SESSIONS, to=self._sessions.total())

    async def close(self) -> None:
        """End the task and its thread."""
        await end_tasks(self._looking)
        self.thread.shutdown(wait=False, cancel_futures=True)
