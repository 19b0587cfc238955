"""When sound is made and sent: whose comes next, when a first sound may leave, and which stage has the device.

One rule stands behind all of it: every chunk of sound has a moment at which its listener runs dry.

* **Order** (`choose`). Chunks are served in the order of their requests' priority and, among equals, of these moments;
  a first chunk is due a moment after its input came. While one of them is due soon, those that are not may only fill a
  step that stays light, because every chunk makes a step longer. None starves: a due time is fixed, and those of new
  ones lie ever later.
* **Start** (`foresee`). A first sound leaves once all chunks of the next seconds can be made before they are heard, as
  far as the pace of its input, its own steps and the work that is due before it tell. Alone, it leaves at once.
* **Room** (`Costs.listeners`). Sound of another answer is begun only while the stage makes the sound of those that are
  running faster than they hear it.
* **Device** (`needs_device`, `DemandFlag`, `DevicePriority`). A GPU runs the kernels of several processes by turns, so
  computing tokens early delays sound that is due. A stage with `yields_to: [code2wav]` skips
  steps while a chunk that can be made is due soon, unless a listener who is due earlier lacks the tokens that it makes;
  one that computes texts or codes is waited for while the first output of a request is computed. A stage yields for at
  most half of the time, so that it never starves.

Pictures are in the same order. One is due when it has taken `STRETCH` times as long as it would alone: of those that
came together the smallest goes first, and a large one, which takes seconds, yields to small ones until it is overdue.

A demand flag is eight bytes of memory per replica, mapped from a file in the run directory: until when the replica
wants the device, on the clock that all processes of a host share. It expires when its owner dies or hangs. The file's
name says which replica it is and where it computes, so that replicas which come later, or to another device, are found.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from omni_actors.host.run_directory import DEMAND_PREFIX
from omni_actors.logs import get_logger
from omni_actors.telemetry.request_log import AUDIBLE_SECONDS, Playback

logger = get_logger(__name__)

FIRST_SECONDS = 0.25  # from the first input of an answer to when its first sound is due
PRESSING_SECONDS = 0.3  # a chunk that is due this soon keeps a step light

LATE_SECONDS = 0.5  # before a chunk is due, from which on other stages leave the device to this one
INPUT_SECONDS = 0.2  # by which a chunk without input must be due later, or the stages that make its input do not

# What one H200 computes of a transformer with 6 billion parameters: 31,000 in pictures of 2048 x 2048 pixels, 43,000 in
# those of 1024 x 1024, 49,000 in those of 512 x 512. On a slower device the order is closer to that of arrival, on a
# faster one the small ones pass more of the others.
TOKENS_PER_SECOND = 40_000.0
STRETCH = 4.0
LONG_STEP_TOKENS = 8192  # a step of more takes a quarter of a second; behind it, no other is queued

KeyT = TypeVar("KeyT")


def picture_due(arrived: float, tokens: int) -> float:
    """When a picture is due that arrived then (seconds) and has so many tokens in all of its steps together.

    What has been computed of it does not count. Otherwise a large picture would pass all small ones once half of it is
    made, and they would wait for seconds.
    """
    return arrived + STRETCH * tokens / TOKENS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Piece(Generic[KeyT]):
    """The next piece of an answer's sound.

    Args:
        key: what the caller knows it by.
        priority: of its request; lower values go first.
        due: when its listener falls silent, in seconds by the stage's monotonic clock.
        share: the part that it takes of a light step; all the pieces of such a step take at most 1.
    """

    key: KeyT
    priority: int
    due: float
    share: float = 0.0


def choose(
    pieces: Iterable[Piece[KeyT]], now: float, places: int, fits: Callable[[KeyT], bool] = lambda _: True
) -> list[KeyT]:
    """Return the keys of the pieces in the next step, in order of precedence; equals keep the order of `pieces`.

    Args:
        pieces: all that could be in it.
        places: the most pieces that a step takes.
        fits: asked in order of precedence, and never again in a step; a piece that does not fit is passed over.
    """
    chosen: list[KeyT] = []
    share, pressed = 0.0, False
    for piece in sorted(pieces, key=lambda piece: (piece.priority, piece.due)):
        presses = piece.due < now + PRESSING_SECONDS
        if len(chosen) >= places or (pressed and not presses and share + piece.share > 1):
            break
        if fits(piece.key):
            chosen.append(piece.key)
            share += piece.share
            pressed |= presses
    return chosen


def needs_device(able: Iterable[float], waiting: Iterable[float], now: float) -> bool:
    """Whether the stages before this one shall leave the device to it.

    Args:
        able: when the chunks are due that could be made at once.
        waiting: when those are due that lack input.
    """
    first = min(able, default=math.inf)
    return first < now + LATE_SECONDS and first < min(waiting, default=math.inf) - INPUT_SECONDS


FIXED_SHARE = 0.45  # of a light step: what every step costs besides its chunks
MEMORY_SECONDS = 1.0  # of computing, after which what a step cost counts a third
PAUSE_SECONDS = 0.01  # between steps, from which on the stage had nothing to do
ROOM = 1.2  # times as fast as it is heard the sound of all running answers is to be made
HORIZON_SECONDS = 2.0  # of sound; chunks that are due later are not looked at
INPUT_MARGIN = 1.1  # of the time until a chunk's input is expected
WORK_MARGIN = 1.5  # of that for all work that is due before: chunks of answers that begin later come before it, too
LONGEST_SECONDS = 5.0  # to keep sound
CHUNKS_AHEAD = 6  # of an answer that are looked at


@dataclass(frozen=True, slots=True)
class Ahead:
    """A chunk that is to be made.

    Args:
        before: seconds of the answer's sound before it.
        share: the part that it takes of a light step; 0 if its model has none.
        steps: that it has to be in.
        missing: tokens of its input that are not there yet.
    """

    before: float
    share: float
    steps: int
    missing: int = 0


class Costs:
    """What the steps of a stage have cost lately. Moments are in seconds, all by one clock.

    Args:
        places: the most chunks that a step takes.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._seconds = self._work = self._steps = 0.0  # what is longer ago counts less
        self._ended = 0.0
        self._largest, self._sound = Ahead(0.0, 0.0, 1), 0.0  # and the seconds of its sound

    def work(self, share: float) -> float:
        """The work of a chunk in one step, in light steps."""
        return share or 1 / self._places

    def stepped(self, shares: Sequence[float], began: float, ended: float) -> None:
        """Note a step with chunks that take these shares of a light one."""
        # Without a pause the time between steps is theirs: that of the host.
        seconds = ended - (self._ended if began - self._ended < PAUSE_SECONDS else began)
        self._ended = ended
        kept = math.exp(-seconds / MEMORY_SECONDS)
        self._seconds = kept * self._seconds + seconds
        self._work = kept * self._work + sum(map(self.work, shares))
        self._steps = kept * self._steps + 1

    def completed(self, share: float, steps: int, seconds: float) -> None:
        """Note how long the sound of a finished chunk is. Most sound is in the largest ones."""
        if self.work(share) >= self.work(self._largest.share) or not self._sound:
            self._largest, self._sound = Ahead(0.0, share, steps), seconds

    @property
    def unit(self) -> float:
        """Seconds for the work of a light step, in steps like the last ones."""
        return self._seconds / self._work if self._work else 0.0

    @property
    def step(self) -> float:
        """Seconds for a step."""
        return self._seconds / self._steps if self._steps else 0.0

    @property
    def listeners(self) -> float:
        """For how many listeners the stage makes sound `ROOM` times as fast as they hear it, in full steps."""
        if not (self._sound and self._seconds):
            return math.inf
        full = FIXED_SHARE + self._places * self.work(self._largest.share)
        seconds = self._seconds / (self._work + FIXED_SHARE * self._steps) * full * self._largest.steps
        return max(1.0, self._places * self._sound / (seconds * ROOM))


@dataclass(slots=True)
class Arrivals:
    """How an answer's input comes: when tokens first and last came, and how many did by then. Seconds."""

    first: float = 0.0
    first_tokens: int = 0
    last: float = 0.0
    last_tokens: int = 0

    def add(self, now: float, tokens: int) -> None:
        """Note that there are so many tokens now."""
        if tokens > self.last_tokens:
            if not self.last_tokens:
                self.first, self.first_tokens = now, tokens
            self.last, self.last_tokens = now, tokens

    def pace(self, usual: float) -> float:
        """Seconds for a token; `usual` while none has come after the first ones."""
        more = self.last_tokens - self.first_tokens
        return (self.last - self.first) / more if more else usual


@dataclass(slots=True)
class Outlook:
    """An answer: what was made of it, when its next chunk is due, seconds for a token of its input, all chunks to come.

    `smooth_start` is the result: when a listener can start and hear no gap, as far as is foreseen.
    """

    made: Playback
    due: float
    pace: float
    ahead: Sequence[Ahead]
    smooth_start: float = field(default=0.0)

    @property
    def leaves(self) -> float:
        """When its first sound may leave."""
        wait = self.smooth_start - self.made.first
        return self.made.first + (min(wait, LONGEST_SECONDS) if wait > AUDIBLE_SECONDS else 0.0)


def foresee(answers: Sequence[Outlook], costs: Costs, now: float) -> None:
    """Foresee the smooth starts of all answers of a stage."""
    chunks = []
    for answer in answers:
        answer.smooth_start = answer.made.smooth_start
        for chunk in answer.ahead:
            later = chunk.before - answer.made.seconds
            if later > HORIZON_SECONDS:
                break
            chunks.append((max(answer.due, now) + later, chunk, answer))
    chunks.sort(key=lambda entry: entry[0])
    work = 0.0
    for _, chunk, answer in chunks:
        work += costs.work(chunk.share) * chunk.steps
        own = INPUT_MARGIN * chunk.missing * answer.pace + (chunk.steps + 1) * costs.step  # one step is under way
        answer.smooth_start = max(answer.smooth_start, now + max(WORK_MARGIN * work * costs.unit, own) - chunk.before)


FLAG = struct.Struct("<d")
VALID_SECONDS = 0.25  # a flag that its owner does not renew, once per step, means nothing after that
PATIENCE_SECONDS = 0.25  # of yielding in a row; after that the stage works for as long
POLL_SECONDS = 0.001
SEARCH_SECONDS = 1.0  # between two searches for flags that were not there
CPU = "cpu"  # where a replica without a GPU computes


def _places(devices: Iterable[int]) -> set[str]:
    """Where a replica computes: its GPUs, or the host's CPU."""
    return {str(device) for device in devices} or {CPU}


def _flag_path(folder: Path, stage: str, replica: int, devices: Iterable[int]) -> Path:
    """Path of a replica's demand flag in the run directory, which `_search` reads; names of stages have no hyphen."""
    return folder / f"{DEMAND_PREFIX}{stage}-{replica}-{'+'.join(sorted(_places(devices)))}"


class DemandFlag:
    """A replica's own flag. Other replicas may read it at any time; if none does, it has no effect.

    `raised` is what was said last.

    Args:
        devices: the replica's GPUs, as the configuration counts them; none if it computes on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        replica: int,
        devices: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._memory = _allocate(_flag_path(folder, stage, replica, devices))
        self.raised = False

    def set(self, wanted: bool) -> None:
        """Tell other replicas whether this one's requests await their first output."""
        if self._memory is not None and (wanted or self.raised):
            FLAG.pack_into(self._memory, 0, self._clock() + VALID_SECONDS if wanted else 0.0)
        self.raised = wanted


def _allocate(path: Path) -> mmap.mmap | None:
    """Map the flag's memory; `None` if the disk is full: then no stage yields to this one.

    The file is allocated first, because a write into a hole of a file on a full disk would end the process.
    """
    try:
        with path.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, FLAG.size)
            return mmap.mmap(file.fileno(), FLAG.size)
    except OSError as error:
        logger.warning("other stages cannot yield to this one: %s: %s", path, error)
        return None


class DevicePriority:
    """Decides before each step of a replica whether to skip it.

    Args:
        stages: those to whose replicas on the same device this one yields; of each, whether also while it computes
            first outputs itself, as it does to those before it.
        devices: its own GPUs, as for `DemandFlag`.
    """

    def __init__(
        self,
        folder: Path,
        stages: Mapping[str, bool],
        devices: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._stages = stages
        self._places = _places(devices)
        self._flags: dict[str, tuple[bool, mmap.mmap]] = {}  # by the file's name
        self._clock = clock
        self._search_at = 0.0
        self._yielding_since: float | None = None
        self._works_until = 0.0

    def yields(self, urgent: bool = False) -> bool:
        """Whether to skip a step now, and ask again after `POLL_SECONDS`.

        Args:
            urgent: whether this replica computes the first output of a request itself.
        """
        if not self._stages:
            return False
        now = self._clock()
        if now >= self._search_at:
            self._search_at = now + SEARCH_SECONDS
            with contextlib.suppress(OSError):  # the run directory is being removed, for instance
                self._search()
        wanted = any(FLAG.unpack_from(flag)[0] > now for always, flag in self._flags.values() if always or not urgent)
        if now < self._works_until or not wanted:
            self._yielding_since = None
            return False
        if self._yielding_since is None:
            self._yielding_since = now
        if now - self._yielding_since < PATIENCE_SECONDS:
            return True
        self._works_until = now + PATIENCE_SECONDS
        self._yielding_since = None
        return False

    def _search(self) -> None:
        for name in os.listdir(self._folder):
            if name in self._flags or not name.startswith(DEMAND_PREFIX):
                continue
            stage, _, places = name.removeprefix(DEMAND_PREFIX).split("-")
            path = self._folder / name
            if stage in self._stages and self._places.intersection(places.split("+")) and _is_allocated(path):
                with path.open("rb") as file:
                    flag = mmap.mmap(file.fileno(), FLAG.size, access=mmap.ACCESS_READ)
                self._flags[name] = self._stages[stage], flag


def _is_allocated(path: Path) -> bool:
    """Whether the flag's owner has made all of the file; a mapping of less would end this process."""
    return path.stat().st_size == FLAG.size
