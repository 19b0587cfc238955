"""Beyond what the device speaks in real time, an answer's sound begins later and is then whole."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_actors.config import CoordinatorConfig
from omni_actors.coordinator.core.admission import SpeechLine
from omni_actors.coordinator.core.slots import Tenant, Ticket, reserved
from omni_actors.telemetry.request_log import Playback

PIECE = 0.24  # seconds of sound
LATENCY = 0.2  # from the beginning of an answer's speech to the first work on its sound
STEP = 0.02
OWN_SPEED = 5.0  # at most, of one answer: its tokens are made one after the other
FOREVER = 1e9


@dataclass
class Spoken:
    """An answer on the device."""

    owner: str
    asked: float
    length: float
    begun: float = 0.0
    made: float = 0.0
    playback: Playback = field(default_factory=Playback)


class Device:
    """Makes `capacity` seconds of sound a second, for all that run alike, and says so; the line lets them begin."""

    def __init__(self, capacity: float, paced: bool = True, pace: float = 1.5, queue: int = 10_000) -> None:
        self.capacity = capacity
        self.paced = paced
        self.line = SpeechLine(CoordinatorConfig(speech_pace=pace, speech_queue=queue, speech_wait=FOREVER))
        self.line.report("code2wav/0", int(capacity))
        self.now = 0.0
        self.answers: dict[str, Spoken] = {}
        self.running: dict[str, Spoken] = {}
        self.begun: list[str] = []

    def ask(self, count: int, length: float = 5.0, owner: str = "alice") -> list[str]:
        """Ask for answers. Returns the ids of those that were crowded out."""
        crowded_out = []
        for _ in range(count):
            name = f"{owner} {len(self.answers)}"
            self.answers[name] = Spoken(owner, self.now, length)
            if self.paced:
                client = owner.encode()
                crowded_out += self.line.enter(Ticket(name, client, Tenant(client), 0, 0, ()), self.now)
                self._begin_all()
            else:
                self._begin(name)
        return crowded_out

    def run(self, seconds: float = FOREVER) -> None:
        """Let time pass, at most until all are done."""
        until = self.now + min(seconds, 10_000.0)
        while self.now < until and (self.running or self.line.waiting):
            self.now += STEP
            self._begin_all()
            speed = min(OWN_SPEED, self.capacity / max(1, len(self.running)))
            for name, answer in list(self.running.items()):
                if self.now - answer.begun >= LATENCY:
                    self._make(name, answer, speed * STEP)

    def _begin_all(self) -> None:
        for name, _ in self.line.begin(self.now):
            self._begin(name)

    def _begin(self, name: str) -> None:
        self.begun.append(name)
        self.running[name] = self.answers[name]
        self.answers[name].begun = self.now

    def _make(self, name: str, answer: Spoken, seconds: float) -> None:
        answer.made = min(answer.length, answer.made + seconds)
        while answer.playback.seconds < answer.length:
            piece = min(PIECE, answer.length - answer.playback.seconds)
            if answer.made - answer.playback.seconds < piece - 1e-9:
                break
            answer.playback.add(self.now, piece)
        if answer.playback.seconds >= answer.length - 1e-9:
            del self.running[name]
            self.line.leave(name)

    @property
    def stalled(self) -> int:
        return sum(answer.playback.stalled for answer in self.answers.values())


@pytest.mark.parametrize("capacity", [8.0, 20.0])
def test_at_three_times_what_can_be_spoken_no_answer_stalls_and_no_time_is_lost(capacity: float) -> None:
    unpaced, paced = Device(capacity, paced=False), Device(capacity)
    for device in (unpaced, paced):
        device.ask(int(3 * capacity))
        device.run()
    assert unpaced.stalled == len(unpaced.answers)
    assert paced.stalled == 0
    assert paced.now < 1.2 * unpaced.now


def test_a_steady_stream_beyond_what_can_be_spoken_stalls_no_answer() -> None:
    device = Device(8.0)
    for _ in range(60):
        device.ask(4)
        device.run(seconds=1.0)
    device.run()
    assert device.stalled == 0
    assert len(device.begun) == 240


def test_until_a_stage_says_what_it_makes_none_waits_and_what_the_last_one_said_holds_when_it_is_gone() -> None:
    line = SpeechLine(CoordinatorConfig(speech_pace=2.0))

    def come(*names: str) -> list[str]:
        for name in names:
            line.enter(Ticket(name, name.encode(), Tenant(name.encode()), 0, 0, ()), 0.0)
        return [name for name, _ in line.begin(0.0)]

    assert come("a", "b", "c", "d") == ["a", "b", "c", "d"]
    line.report("code2wav/0", 10)
    assert come("e", "f") == ["e"]
    line.report("code2wav/1", 4)
    assert come() == ["f"]
    line.report("code2wav/1", 0)
    line.report("code2wav/0", 0)
    assert come("g") == []
    assert line.places == 5
    for name in "abcdef":
        line.leave(name)
    assert come() == ["g"]


def test_fewer_are_spoken_when_the_device_becomes_slower() -> None:
    device = Device(40.0)
    device.ask(120)
    device.run(seconds=10.0)
    device.capacity = 8.0
    device.line.report("code2wav/0", 8)
    device.run(seconds=20.0)
    late = [name for name in device.answers if not device.answers[name].begun]
    assert late
    device.run()
    assert not [name for name in late if device.answers[name].playback.stalled]


loads = st.lists(st.tuples(st.integers(1, 12), st.floats(0.3, 8.0), st.sampled_from("abc")), min_size=1, max_size=8)


@given(st.floats(0.4, 60.0), loads, st.floats(1.0, 2.0))
@settings(deadline=None, max_examples=25)
def test_every_answer_is_spoken_in_the_end_whatever_is_measured(
    capacity: float, load: list[tuple[int, float, str]], pace: float
) -> None:
    device = Device(capacity, pace=pace)
    for count, length, owner in load:
        device.ask(count, length, owner)
        device.run(seconds=length / 3)
    device.run()
    assert sorted(device.begun) == sorted(device.answers)
    assert (device.line.waiting, device.line.speaking) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 80)), max_size=40))
@settings(deadline=None, max_examples=100)
def test_no_more_begin_than_the_stages_say_and_none_starves(events: list[tuple[int, int, int]]) -> None:
    """Answers come and end, and replicas say for how many listeners they make sound: 0 of one that is gone."""
    line = SpeechLine(CoordinatorConfig(speech_pace=1.0, speech_queue=10_000, speech_wait=FOREVER))
    line.report("code2wav/0", 5)
    said, now = {"code2wav/0": 5}, 0.0
    spoken: list[str] = []
    numbers = itertools.count()
    for coming, ending, listeners in events:
        now += 0.1
        replica = f"code2wav/{coming % 2 + 1}"
        said[replica] = listeners
        line.report(replica, listeners)
        for _ in range(coming):
            line.enter(Ticket(str(next(numbers)), b"a", Tenant(b"a"), 0, 0, ()), now)
        for name in spoken[:ending]:
            line.leave(name)
        spoken = spoken[ending:]
        before = len(spoken)
        spoken += [name for name, _ in line.begin(now)]
        assert len(spoken) <= max(before, sum(said.values()), 1)
        places = max(1, sum(said.values()))
        assert line.waiting == 0 or len(spoken) >= places - reserved(places), "some are kept for other owners"
    while spoken:
        line.leave(spoken.pop(0))
        spoken += [name for name, _ in line.begin(now)]
    assert line.waiting == 0


def test_owners_take_turns() -> None:
    """One who asks for much makes another, who comes later with little, wait for the next place only."""
    device = Device(8.0)
    device.ask(60, owner="flooder")
    device.run(seconds=5.0)
    begun = len(device.begun)
    device.ask(2, owner="other")
    device.run()
    order = [device.answers[name].owner for name in device.begun[begun:]]
    assert order[0] == "other"
    assert order[:3].count("other") == 2


def test_a_line_that_is_too_long_refuses_whoever_has_most() -> None:
    device = Device(8.0, queue=10)
    assert len(device.ask(16, owner="flooder")) == 2, "four are spoken, ten wait, and a place is kept for others"
    assert device.ask(1, owner="other") == [], "it gets that place"
    assert device.ask(1, owner="other")[0].startswith("flooder"), "not the one who came last"
    error = device.line.overloaded()
    assert error.retry_after is not None
    assert "text alone" in str(error)


def test_those_who_waited_for_too_long_are_named() -> None:
    line = SpeechLine(CoordinatorConfig(speech_wait=30.0))
    line.report("code2wav/0", 1)
    for name in ("first", "second"):
        line.enter(Ticket(name, b"a", Tenant(b"a"), 0, 0, ()), 10.0)
    assert [name for name, _ in line.begin(10.0)] == ["first"]
    assert line.overdue(40.0) == []
    assert line.overdue(40.1) == ["second"]
    line.leave("second")
    line.leave("second")
    assert (line.overdue(50.0), line.waiting, line.speaking) == ([], 0, 1)
