"""When sound is made and sent: whose comes next, when a first sound may leave, and who lets whom have the device.

A piece of sound is due when its listener has heard everything before it; a first piece is due a moment after its input
came. Pieces are served in the order of their requests' priority and, among equals, of when they are due. While one of
them is due soon, those that are not may only fill a step that stays light, because every chunk makes a step longer.

None starves: a piece's due time is fixed, and those of new ones lie ever later.

Pictures are in the same order. One is due when it has taken `STRETCH` times as long as it would alone: of those that
came together the smallest goes first, and a large one, which takes seconds, yields to small ones until it is overdue.

Under load the second piece of an answer may be made later than the first one has been heard, and the longest one later
than all before it. A listener who starts at once then hears a gap, and one who starts a little later hears none. How
much later that is follows from what the stage has to make before each of the pieces, in the order of `choose`,
from how fast it computes, and from how fast their input comes; what answers before have needed says what others that
begin later make of it. Without load nothing is kept.

A device runs the kernels of several processes by turns, so a vocoder that is busy anyway makes every thinker's prefill
two or three times as long, and with it the time to the first token. A stage with `yields_to: [thinker]` skips steps
while a thinker on the same device computes first outputs, for at most half of the time, so that it never starves.
A request that still waits for input does not count, because yielding could delay that very input. A vocoder wants the
device while a listener falls silent.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from omni_actors.host.run_directory import DEMAND_PREFIX
from omni_actors.logs import get_logger
from omni_actors.telemetry.request_log import AUDIBLE_SECONDS, Playback

logger = get_logger(__name__)

FIRST_SECONDS = 0.25  # from the first input of an answer to when its first sound is due
HEARD_SECONDS = 0.4  # priority bonus in seconds for requests whose playback has started
PRESSING_SECONDS = 0.3  # a piece that is due this soon keeps a step light

LATE_SECONDS = 0.05  # before a piece is due, from which on other stages leave the device to this one
INPUT_SECONDS = 0.2  # before a piece is due whose input is missing, from which on the stages that make it do not

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
    """Whether the stages before this one shall leave the device to it, because a listener falls silent.

    Not while a listener who soon does so lacks the very input that they make.

    Args:
        able: when the pieces are due that could be made at once.
        waiting: when those are due that lack input.
    """
    late = min(able, default=math.inf) < now + LATE_SECONDS
    return late and min(waiting, default=math.inf) > now + INPUT_SECONDS


FIXED_SHARE = 0.45  # of a light step: what every step takes besides its pieces, on the host and an H200
MEMORY_SECONDS = 0.5  # of computing, after which a step's time counts a third
USUAL_SECONDS = 10.0  # the same, for what is usual
PHASE_SECONDS = 0.5  # for which what is slow now stays slow; the stages before are busy with an answer's beginning
LATE_WEIGHT = 0.1  # of a step, in the mean of what late steps had in them
PAUSE_SECONDS = 0.01  # between steps, from which on the stage had nothing to do
INPUT_MARGIN = 1.25  # of the time until a piece's input is foreseen to have come
QUEUE_MARGIN = 1.5  # of that for all pieces before it: those of answers that begin later come before it, too
HORIZON_SECONDS = 6.0  # of sound; pieces that are due later are not looked at
PROVEN_SECONDS = 1.5  # of an answer's sound; with less the pieces are small, and little is known
MOST = 0.9  # of the answers, which need no more than is foreseen for all
LONGEST_SECONDS = 5.0  # to keep sound
PIECES_AHEAD = 6  # of an answer that are looked at


@dataclass(frozen=True, slots=True)
class Ahead:
    """A piece of an answer's sound that is to be made.

    Args:
        before: seconds of the answer's sound before it.
        share: the part that it takes of a light step.
        steps: that it has to be in.
        missing: tokens of its input that are not there yet.
    """

    before: float
    share: float
    steps: int
    missing: int = 0


class Pace:
    """Seconds for a unit of something, of all of it together; what is longer ago counts less.

    Not the mean of ratios, in which what is slow and little would count as much as what is fast and much.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: float) -> None:
        """Note that so many units took so long."""
        kept = math.exp(-seconds / self._memory)
        self._seconds, self._units = kept * self._seconds + seconds, kept * self._units + units

    @property
    def seconds(self) -> float:
        """For a unit; 0 if nothing is known."""
        return self._seconds / self._units if self._units else 0.0


def foreseen(units: float, now: float, usual: float) -> float:
    """Estimated seconds for `units`: at the current rate for the first 0.5 s, then at the long-run rate."""
    if units * now <= PHASE_SECONDS:
        return units * now
    return PHASE_SECONDS + (units - PHASE_SECONDS / now) * usual


@dataclass(slots=True)
class Arrivals:
    """How fast an answer's input comes: when tokens first and last came, and how many did by then. Seconds.

    `usual` is the pace of all answers.
    """

    usual: Pace = field(default_factory=lambda: Pace(USUAL_SECONDS))
    first: float = 0.0
    first_tokens: int = 0
    last: float = 0.0
    last_tokens: int = 0

    def add(self, now: float, tokens: int) -> None:
        """Note that there are so many tokens now."""
        if tokens > self.last_tokens:
            if self.last_tokens:
                self.usual.add(now - self.last, tokens - self.last_tokens)
            else:
                self.first, self.first_tokens = now, tokens
            self.last, self.last_tokens = now, tokens

    def foresee(self, tokens: int) -> float:
        """Seconds until so many more have come.

        The first tokens of an answer are slow because the stages before this one begin with it. So what is slow now
        becomes usual, and what is fast now stays so.
        """
        more, usual = self.last_tokens - self.first_tokens, self.usual.seconds
        now = (self.last - self.first) / more if more else usual
        return foreseen(tokens, now, min(now, usual))


@dataclass(slots=True)
class Outlook:
    """An answer: what was made of it, when its next piece is due, how its input comes, and all pieces to come.

    `smooth_start` is the result: when a listener can start and hear no gap, as far as is foreseen.
    """

    made: Playback
    due: float
    arrivals: Arrivals
    ahead: Sequence[Ahead]
    smooth_start: float = field(default=0.0)

    def leaves(self) -> float:
        """When its first sound may leave."""
        wait = self.smooth_start - self.made.first
        return self.made.first + (min(wait, LONGEST_SECONDS) if wait > AUDIBLE_SECONDS else 0.0)


class Forecast:
    """Follows how fast a stage computes, and foresees smooth starts. Moments are in seconds, all by one clock.

    Args:
        places: the most pieces that a step takes.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._late, self._usual = Pace(MEMORY_SECONDS), Pace(USUAL_SECONDS)  # of a light step's pieces
        self._tokens = Pace(USUAL_SECONDS)  # of all answers' input
        self._share = 0.0  # of a light step, in a late one on average
        self._ended = 0.0
        self._largest = Ahead(0.0, 0.0, 1)
        self._seconds = 0.0  # of the sound of that one
        self._proven = False
        self._need, self._needed_by = 0.0, 0  # seconds that first sounds had to be kept, and of how many answers

    def arrivals(self) -> Arrivals:
        """Those of another answer's input."""
        return Arrivals(self._tokens)

    def stepped(self, share: float, began: float, ended: float) -> None:
        """Note a step, with pieces that together take this share of a light step."""
        # Without a pause the time between steps is theirs: that of the host.
        seconds = ended - (self._ended if began - self._ended < PAUSE_SECONDS else began)
        self._ended = ended
        self._share += LATE_WEIGHT * (share - self._share)
        for pace in (self._late, self._usual):
            pace.add(seconds, FIXED_SHARE + share)

    def completed(self, share: float, steps: int, seconds: float, made: float) -> None:
        """Record a finished chunk: its duration and the request's total audio so far.

        The largest pieces are those of which most sound consists.
        """
        self._proven |= made >= PROVEN_SECONDS
        if share >= self._largest.share:
            self._largest, self._seconds = Ahead(0.0, share, steps), seconds

    @property
    def listeners(self) -> int | None:
        """For how many listeners the stage makes sound as fast as they hear it, in full steps.

        0 until enough of an answer was made; `None` if pieces do not say what part of a step they take.
        """
        piece, unit = self._largest, self._usual.seconds
        if not (self._proven and unit):
            return 0
        if not piece.share:
            return None
        step = unit * (FIXED_SHARE + self._places * piece.share)
        return max(1, int(self._places * self._seconds / (piece.steps * step)))

    def look(self, answers: Sequence[Outlook], now: float) -> None:
        """Foresee the smooth starts of all answers of the stage."""
        pieces = []
        for answer in answers:
            answer.smooth_start = answer.made.smooth_start
            for piece in answer.ahead:
                later = piece.before - answer.made.seconds
                if later > HORIZON_SECONDS:
                    break
                pieces.append((max(answer.due, now) + later, answer.due, piece, answer))
        pieces.sort(key=lambda entry: entry[:2])
        late, usual = self._late.seconds, self._usual.seconds
        step = self._share + FIXED_SHARE  # of those before
        under_way = step * usual
        work, steps = 0.0, 0
        for _, _, piece, answer in pieces:
            work += piece.share * piece.steps
            steps += piece.steps
            queue = foreseen(work + FIXED_SHARE * max(piece.steps, steps / self._places), late, usual)
            # The steps in which it is made have as much else in them as those before. Two others end first: the one
            # that the device computes, and the one that is queued behind it. The margin of the queue holds one of them.
            own = foreseen((piece.share + step) * (piece.steps + 2), late, usual)
            done = now + max(
                QUEUE_MARGIN * queue + under_way, INPUT_MARGIN * answer.arrivals.foresee(piece.missing) + own
            )
            answer.smooth_start = max(answer.smooth_start, done - piece.before)
        self._learn(answers)

    def _learn(self, answers: Sequence[Outlook]) -> None:
        """Use the 90th percentile of observed startup delays as the minimum for all requests.

        It applies while at least as many requests are concurrent as when it was observed.
        """
        needs = sorted(answer.made.gaps for answer in answers if answer.made.seconds > PROVEN_SECONDS)
        if needs:
            self._need, self._needed_by = needs[int(MOST * len(needs))], len(answers)
        if len(answers) >= MOST * self._needed_by:
            for answer in answers:
                answer.smooth_start = max(answer.smooth_start, answer.made.first + self._need)


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
        self._raised = False

    def set(self, wanted: bool) -> None:
        """Tell other replicas whether this one's requests await their first output."""
        if self._memory is not None and (wanted or self._raised):
            FLAG.pack_into(self._memory, 0, self._clock() + VALID_SECONDS if wanted else 0.0)
        self._raised = wanted


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
        stages: those to whose replicas on the same device this one yields.
        devices: its own GPUs, as for `DemandFlag`.
    """

    def __init__(
        self,
        folder: Path,
        stages: Iterable[str],
        devices: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._stages = frozenset(stages)
        self._places = _places(devices)
        self._flags: dict[str, mmap.mmap] = {}  # by the file's name
        self._clock = clock
        self._search_at = 0.0
        self._yielding_since: float | None = None
        self._works_until = 0.0

    def yields(self) -> bool:
        """Whether to skip a step now, and ask again after `POLL_SECONDS`."""
        if not self._stages:
            return False
        now = self._clock()
        if now >= self._search_at:
            self._search_at = now + SEARCH_SECONDS
            with contextlib.suppress(OSError):  # the run directory is being removed, for instance
                self._search()
        if now < self._works_until or not any(FLAG.unpack_from(flag)[0] > now for flag in self._flags.values()):
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
                    self._flags[name] = mmap.mmap(file.fileno(), FLAG.size, access=mmap.ACCESS_READ)


def _is_allocated(path: Path) -> bool:
    """Whether the flag's owner has made all of the file; a mapping of less would end this process."""
    return path.stat().st_size == FLAG.size
