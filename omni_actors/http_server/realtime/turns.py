"""The user's turns: the sound that waits, where turns begin and end, and what all sessions share for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import distribution
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from omni_actors.host.processes import give_back_memory
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime.config import BYTES_PER_SECOND, RATE, ServerVad, WireFormat
from omni_actors.http_server.realtime.formats import SoundDecoder
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget, reserved
from omni_actors.telemetry.metrics import REALTIME_SESSIONS, Meters

SAMPLE_BYTES = 2
MIN_COMMIT = RATE // 10  # samples: OpenAI's bound of 100 ms

BEGIN_WINDOWS = 2  # that must be speech before a turn begins, so that a click is none
HYSTERESIS = 0.15  # by which the probability must fall below the threshold to count as silence

MODEL_RATE = 16_000
QUIET = 1e-3  # of full scale (-60 dB): less is no speech, as where a microphone is muted
SETTLED_WINDOWS = 10  # after which more silence changes nothing in what the model remembers
MODEL_WINDOW, MODEL_CONTEXT = 512, 64  # samples at MODEL_RATE: of a window, and of those before it
WINDOW = MODEL_WINDOW * RATE // MODEL_RATE

# Samples after the part to compute: resampling and features differ where sound ends.
MARGIN = RATE // 20
SHARE = 1 / 30  # of the conversation's sound that must be new, because all of it is sent with each request

LAG_SECONDS = 0.5  # behind real time, from which turns are found too late


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


class TurnEnds(NamedTuple):
    """The user has stopped; `end` includes the silence that showed it, `silence` is its length in samples."""

    end: int
    silence: int


class TurnDetector:
    """The state of one session's turn."""

    def __init__(self, config: ServerVad) -> None:
        self._config = config
        self._speech_windows = 0
        self._speech_start = 0
        self._speech_end = 0
        self.speaking = False

    def feed(self, window: SpeechWindow) -> TurnBegins | TurnEnds | None:
        """Take the next window."""
        if window.probability >= self._config.threshold:
            if not self._speech_windows:
                self._speech_start = window.start
            self._speech_windows += 1
            self._speech_end = window.end
            if not self.speaking and self._speech_windows >= BEGIN_WINDOWS:
                self.speaking = True
                return TurnBegins(self.needed_from(window.end))
            return None
        if not self.speaking:
            self._speech_windows = 0
            return None
        if window.probability >= self._config.threshold - HYSTERESIS:
            self._speech_end = window.end
        silence = window.end - self._speech_end
        if milliseconds(silence) < self._config.silence_duration_ms:
            return None
        self.reset()
        return TurnEnds(window.end, silence)

    def reset(self) -> None:
        """Forget the turn, as when its sound was committed or discarded."""
        self.speaking = False
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
    """

    def __init__(self, position: int) -> None:
        import soxr

        self._resampler = soxr.ResampleStream(RATE, MODEL_RATE, 1, dtype="float32", quality="LQ")
        self._sound = numpy.zeros(MODEL_CONTEXT, numpy.float32)  # what was heard last, and what waits
        self._position = position
        self._quiet = 0  # windows so far
        self.memory = numpy.zeros((2, 128), numpy.float32)

    def add(self, pcm: bytes) -> None:
        """Add sound."""
        samples = numpy.frombuffer(pcm, "<i2").astype(numpy.float32) / 32768
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
# How much of a turn is computed before its end


class AheadOfTurn:
    """Decides when enough new sound has come to compute the prompt so far.

    Args:
        seconds: sound per request; best is a window of the model's encoder. 0 turns it off.
    """

    def __init__(self, seconds: float) -> None:
        self._step = round(seconds * RATE)
        self._start = 0
        self._done = 0  # samples of the turn

    def due(self, start: int, end: int, conversation_bytes: int) -> int | None:
        """The position up to which to compute the turn now; `None` for not yet.

        Args:
            start: position of the turn's first sample.
            end: position behind the last sample that has come.
            conversation_bytes: sound of the earlier turns.
        """
        if not self._step:
            return None
        if start != self._start:
            self._start, self._done = start, 0
        reached = (end - start - MARGIN) // self._step * self._step
        seconds = conversation_bytes / BYTES_PER_SECOND + reached / RATE
        if reached - self._done < max(self._step, seconds * SHARE * RATE):
            return None
        self._done = reached
        return start + reached + MARGIN


# ---------------------------------------------------------------------------------------------------------------------
# How far the detection falls behind


class Lag:
    """How far processing lags behind a sender who sends in real time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended = 0.0
        self._told = False

    def add(self, began: float, ended: float, seconds: float) -> bool:
        """Record that a piece of sound was processed from `began` to `ended` (seconds of any clock).

        Returns true once when the lag exceeds `LAG_SECONDS`, and again only after it was 0.
        """
        waited = self.seconds if began - self._ended < LAG_SECONDS else 0.0  # longer pauses are the sender's
        self._ended = ended
        self.seconds = max(0.0, waited + ended - began - seconds)
        told, self._told = self._told, self.seconds > LAG_SECONDS or (self._told and self.seconds > 0)
        return self._told and not told


DETECTOR_THREADS = 2
MOST_AT_ONCE = 64  # sessions whose sound a thread takes at a time
LAG_RETRY_SECONDS = 2.0  # for which no session begins after turns were found too late


class Realtime:
    """One per server."""

    def __init__(self, settings: ServerSettings, bodies: Budget) -> None:
        self.settings = settings
        self.meters = Meters()
        self.detects = available()
        self.threads = ThreadPoolExecutor(DETECTOR_THREADS, "voice activity")
        self._unheard: deque[tuple[VoiceActivity, bytes, Future[list[SpeechWindow]]]] = deque()
        self.bodies = bodies
        self._sessions: Counter[str] = Counter()  # by tenant
        self._lagged = 0.0  # until when no session begins (monotonic clock)
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
        if (seconds := self._lagged - time.monotonic()) > 0:
            message = f"The server finds the turns of its sessions over {LAG_SECONDS:g} s too late: try again."
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

    async def listen(self, activity: VoiceActivity, pcm: bytes) -> list[SpeechWindow]:
        """The windows that are complete after this PCM of a session, looked at together with what others have sent."""
        result: Future[list[SpeechWindow]] = Future()
        self._unheard.append((activity, pcm, result))
        self.threads.submit(self._listen)
        return await asyncio.wrap_future(result)

    def _listen(self) -> None:
        """Look for speech in all that waits, if no other thread has taken it."""
        taken: list[tuple[VoiceActivity, bytes, Future[list[SpeechWindow]]]] = []
        with contextlib.suppress(IndexError):  # as soon as nothing is left
            while len(taken) < MOST_AT_ONCE:
                piece = self._unheard.popleft()
                if piece[2].set_running_or_notify_cancel():  # else the session has ended
                    taken.append(piece)
        try:
            found = self._model.listen([(activity, pcm) for activity, pcm, _ in taken])
        except Exception as error:  # noqa: BLE001 - each session ends with it
            for _, _, result in taken:
                result.set_exception(error)
            return
        for (_, _, result), windows in zip(taken, found, strict=True):
            result.set_result(windows)

    def lags(self) -> None:
        """Refuse sessions for a while: turns are found too late."""
        self._lagged = time.monotonic() + LAG_RETRY_SECONDS

    def _count(self, tenant: str, change: int) -> None:
        self._sessions[tenant] += change
        self._sessions = +self._sessions  # without those that have none
        self.meters.set(REALTIME_SESSIONS, to=self._sessions.total())

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)
