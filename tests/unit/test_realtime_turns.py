"""How a realtime session finds the turns of the user, and what is measured of its time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from omni_actors.http_server.connections import BURST_SECONDS, EventRate
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.config import ServerVad
from omni_actors.http_server.realtime.conversation import heard
from omni_actors.http_server.realtime.formats import RATE
from omni_actors.http_server.realtime.session import Ask
from omni_actors.http_server.realtime.turns import (
    MEAN_OF,
    RETRY_SECONDS,
    Realtime,
    SpeechModel,
    SpeechWindow,
    TurnBegins,
    TurnDetector,
    TurnEnds,
    TurnEvent,
    TurnPauses,
    VoiceActivity,
)
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget
from tests.support.realtime import WINDOW, Talk, error_of, kinds, speech
from tests.support.waiting import PATIENCE


def ignore(windows: Sequence[SpeechWindow], late: float) -> None:
    """The model alone is asked."""


VAD = ServerVad(prefix_padding_ms=64, silence_duration_ms=160)  # two and five windows


def events(detector: TurnDetector, probabilities: list[float]) -> list[TurnEvent]:
    windows = [SpeechWindow(index * WINDOW, (index + 1) * WINDOW, value) for index, value in enumerate(probabilities)]
    return [event for window in windows if (event := detector.feed(window)) is not None]


def found(detector: TurnDetector, probabilities: list[float]) -> list[TurnBegins | TurnEnds]:
    return [event for event in events(detector, probabilities) if isinstance(event, TurnBegins | TurnEnds)]


@pytest.mark.parametrize(
    ("probabilities", "count"),
    [
        ([0.9, 0.1, 0.9, 0.1, 0.9, 0.1], 0),  # clicks
        ([0.49] * 20, 0),  # below the threshold
        ([0.9] * 20, 1),  # does not end
        ([0.9] * 2 + [0.1] * 4 + [0.9] + [0.1] * 4, 1),  # pauses that are too short
        ([0.9] * 2 + [0.4] * 20, 1),  # not quite silence
        ([0.9] * 2 + [0.1] * 5 + [0.9] * 2 + [0.1] * 5, 4),
    ],
)
def test_turns_are_counted(probabilities: list[float], count: int) -> None:
    assert len(found(TurnDetector(VAD), probabilities)) == count


@pytest.mark.parametrize(
    ("silence_ms", "windows", "pause", "end"), [(500, 40, 10, 16), (160, 40, 3, 5), (800, 40, 19, 25), (0, 40, None, 1)]
)
def test_a_pause_is_told_a_little_before_it_ends_the_turn(
    silence_ms: int, windows: int, pause: int | None, end: int
) -> None:
    detector = TurnDetector(ServerVad(silence_duration_ms=silence_ms))
    begins, *silence = events(detector, [0.9] * 2 + [0.1] * windows)
    told = [] if pause is None else [TurnPauses((2 + pause) * WINDOW, pause * WINDOW)]
    assert begins == TurnBegins(0)
    assert silence == [*told, TurnEnds((2 + end) * WINDOW, end * WINDOW)]


def pausing(*before: str, **config: Any) -> tuple[Talk, Ask]:
    """A user who has spoken and pauses, and the answer that is begun in the pause."""
    talk = Talk(vad=VAD, **config)
    for text in before:
        talk.say(text)
    talk.hear(0.9, 10)
    assert talk.hear(0.1, 3) == talk.cancelled == []
    (early,) = talk.asked
    return talk, early


@pytest.mark.parametrize(
    "change",
    [
        lambda talk: talk.hear(0.9),
        lambda talk: talk.say("And this."),
        lambda talk: talk.send("session.update", session={"type": "realtime", "instructions": "Be brief."}),
        lambda talk: talk.send("input_audio_buffer.clear"),
        lambda talk: talk.send("response.create", response={"instructions": "Be brief."}),
    ],
)
def test_an_early_answer_is_dropped_when_something_changes(change: Callable[[Talk], object]) -> None:
    talk, early = pausing()
    change(talk)
    assert talk.cancelled == [early.response_id]
    talk.hear(0.1, 5)
    assert early.response_id not in [ask.response_id for ask in talk.asked[1:]]
    assert talk.cancelled.count(early.response_id) == 1


def test_who_asks_for_an_answer_in_a_pause_has_ended_the_turn() -> None:
    talk, early = pausing()
    *ended, created = talk.send("response.create")
    assert kinds(ended)[:2] == ["input_audio_buffer.speech_stopped", "input_audio_buffer.committed"]
    assert ended[0]["audio_end_ms"] == 13 * 32
    assert created["response"]["id"] == early.response_id
    assert talk.prompt() == [("user", f"{13 * WINDOW / RATE:g} s")]
    assert (talk.cancelled, talk.hear(0.1, 10)) == ([], [])


def test_speech_does_not_interrupt_where_that_is_off() -> None:
    talk = Talk(vad=ServerVad(silence_duration_ms=160, interrupt_response=False))
    response = talk.respond()
    assert kinds(talk.hear(0.9, 2)) == ["input_audio_buffer.speech_started"]
    assert talk.cancelled == []
    ended = talk.hear(0.1, 5)
    assert error_of(ended[-1:])["code"] == "conversation_already_has_active_response"
    assert len(talk.asked) == 1, "no other one is begun early"
    assert kinds(talk.take(talk.session.text(response, "Still")))[-1] == "response.output_audio_transcript.delta"


def test_an_answer_that_begins_while_the_user_speaks_gives_way_to_the_turn() -> None:
    talk = Talk(vad=VAD)
    talk.hear(0.9, 2)
    early = talk.respond()
    events = talk.hear(0.1, 5)
    assert talk.cancelled == [early]
    assert kinds(events)[:2] == ["input_audio_buffer.speech_stopped", "response.done"]
    assert kinds(events)[-1] == "response.created"
    assert "error" not in kinds(events)
    assert talk.prompt()[-1][0] == "user"


def test_semantic_detection_is_shown_as_what_it_is() -> None:
    for eagerness, silence in (("low", 800), ("medium", 500), ("high", 300), (None, 500)):
        given = {"type": "semantic_vad", "eagerness": eagerness, "interrupt_response": False}
        (updated,) = Talk().send("session.update", session={"audio": {"input": {"turn_detection": given}}})
        shown = updated["session"]["audio"]["input"]["turn_detection"]
        assert (shown["type"], shown["silence_duration_ms"]) == ("server_vad", silence)
        assert shown["create_response"]
        assert not shown["interrupt_response"]


def test_silence_after_an_answer_is_answered() -> None:
    """It counts from where the answer has been heard. Each answer is followed by another one."""
    talk = Talk(vad=ServerVad(idle_timeout_ms=1000))
    assert talk.hear(0.0, 100) == [], "nothing has been answered yet"
    for number in range(2):
        begin = talk.session.position
        talk.answer("Hello?", seconds=2.0)
        assert talk.hear(0.0, (begin + 3 * RATE - talk.session.position) // WINDOW) == []
        events = talk.hear(0.0)
        assert kinds(events) == [
            "input_audio_buffer.timeout_triggered",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
        ]
        triggered = events[0]
        assert triggered["audio_start_ms"] == (begin + 2 * RATE) * 1000 // RATE
        assert 1000 <= triggered["audio_end_ms"] - triggered["audio_start_ms"] <= 1032
        assert triggered["item_id"] == events[1]["item_id"]
        assert talk.prompt()[-1] == ("user", "0.3 s"), number
        assert talk.hear(0.0, 100) == [], "while it is answered"
        talk.send("response.cancel")
    assert talk.hear(0.0, 100) == [], "the client did not want that answer"


def test_detection_can_be_turned_off_within_a_turn() -> None:
    talk = Talk(vad=VAD)
    talk.hear(0.9, 10)
    talk.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
    assert not talk.session.detecting
    assert kinds(talk.send("input_audio_buffer.commit"))[0] == "input_audio_buffer.committed"


def test_sessions_that_the_model_hears_together_are_heard_as_if_alone() -> None:
    """Sound of different lengths, in pieces of different lengths."""
    model, noise = SpeechModel(), numpy.random.default_rng(1).normal(0, 300, RATE // 4).astype("<i2")
    pieces = {}
    for seconds, size in ((0.3, 960), (1.0, 4800), (0.6, 2880)):
        pcm = numpy.concatenate([speech(seconds), noise]).tobytes()
        pieces[VoiceActivity(RATE, ignore)] = [pcm[start : start + size] for start in range(0, len(pcm), size)]
    alone = []
    for own in pieces.values():
        activity = VoiceActivity(RATE, ignore)
        alone.append([window for piece in own for window in model.listen([(activity, piece)])[0]])
        assert alone[-1][0].start == RATE, "positions count from that of the first sample"
        assert all(following.start == window.end for window, following in itertools.pairwise(alone[-1]))
        assert sum(map(len, own)) // 2 - (alone[-1][-1].end - RATE) < 3 * WINDOW, "little is held back"
    together: list[list[SpeechWindow]] = [[] for _ in pieces]
    for at_once in itertools.zip_longest(*pieces.values(), fillvalue=b""):
        for heard_before, windows in zip(together, model.listen(list(zip(pieces, at_once, strict=True))), strict=True):
            heard_before.extend(windows)
    for one, other in zip(alone, together, strict=True):
        assert [window[:2] for window in one] == [window[:2] for window in other]
        assert [window.probability for window in one] == pytest.approx(
            [window.probability for window in other], abs=1e-4
        )
        assert max(window.probability for window in one) > 0.5


def test_a_muted_microphone_takes_no_model_and_turns_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    muted = numpy.zeros(4 * RATE, "<i2")
    sound = numpy.concatenate([muted, speech(0.5), muted])
    pieces = [sound[start : start + 960].tobytes() for start in range(0, len(sound), 960)]

    def heard_windows() -> tuple[list[SpeechWindow], int]:
        """All windows, and for how many of them the model ran."""
        model, activity, runs = SpeechModel(), VoiceActivity(0, ignore), []
        run = model.session.run
        model.session = SimpleNamespace(run=lambda *given: runs.append(given) or run(*given))
        return [window for piece in pieces for window in model.listen([(activity, piece)])[0]], len(runs)

    windows, ran = heard_windows()
    monkeypatch.setattr("omni_actors.http_server.realtime.turns.QUIET", 0.0)
    all_windows, all_ran = heard_windows()
    assert ran < 0.4 * all_ran
    assert all_ran == len(all_windows)
    assert [window[:2] for window in windows] == [window[:2] for window in all_windows]
    turns = [found(TurnDetector(VAD), [window.probability for window in these]) for these in (windows, all_windows)]
    (begun, ended), (all_begun, all_ended) = turns
    assert abs(begun.start - all_begun.start) <= WINDOW
    assert ended == all_ended
    assert abs(begun.start - 3.936 * RATE) < 0.1 * RATE


@pytest.fixture
async def realtime() -> AsyncIterator[Realtime]:
    found = Realtime(ServerSettings(endpoint="ipc:///nowhere"), Budget(1 << 20))
    yield found
    await found.close()


class Ear:
    """A session's sound, and what was found in it."""

    def __init__(self, realtime: Realtime) -> None:
        self.realtime = realtime
        self.activity = VoiceActivity(0, self.take)
        self.windows: list[SpeechWindow] = []
        self.late = 0.0

    def take(self, windows: Sequence[SpeechWindow], late: float) -> None:
        self.windows += windows
        self.late = max(self.late, late)

    def listen(self, pcm: bytes) -> int:
        return self.realtime.listen(self.activity, pcm)

    async def caught_up(self) -> None:
        async with asyncio.timeout(10 * PATIENCE):
            await self.activity.caught_up.wait()


async def test_a_session_that_has_left_or_cannot_take_its_windows_holds_up_nobody(realtime: Realtime) -> None:
    sound = speech(0.2).tobytes()
    left, broken, other = Ear(realtime), Ear(realtime), Ear(realtime)
    broken.activity = VoiceActivity(0, lambda *_: [][0])
    for ear in (left, broken, other):
        ear.listen(sound)
    realtime.forget(left.activity)
    await other.caught_up()
    assert other.windows
    assert left.windows == []
    with pytest.raises(IndexError):
        broken.listen(sound)
    other.listen(b"x" * 3)  # no whole samples
    await other.caught_up()
    with pytest.raises(ValueError, match="buffer size"):
        other.listen(sound)
    last = Ear(realtime)
    last.listen(sound)
    await last.caught_up()
    assert last.windows, "it goes on after an error of the model"


async def test_much_sound_at_once_is_looked_at_in_turns(realtime: Realtime) -> None:
    long, short = Ear(realtime), Ear(realtime)
    assert long.listen(bytes(20 * RATE)) == 20 * RATE
    await asyncio.sleep(0)
    short.listen(speech(0.1).tobytes())
    await short.caught_up()
    assert not long.activity.caught_up.is_set()
    await long.caught_up()
    assert len(long.windows) == 10 * RATE // WINDOW


async def test_a_server_that_is_late_in_the_mean_begins_no_session(
    realtime: Realtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_actors.http_server.realtime.turns.BUSY_SECONDS", 0.04)
    ear = Ear(realtime)
    slow = realtime.thread.submit

    def submit(*job: Any) -> Any:
        slow(time.sleep, 0.2)
        return slow(*job)

    realtime.thread.submit = submit
    with realtime.session("a", "first"):
        pass
    for _ in range(MEAN_OF // 2):
        ear.listen(bytes(960))
        await ear.caught_up()
    assert ear.late >= 0.2
    with pytest.raises(HttpError) as refused, realtime.session("a", "second"):
        pass
    assert refused.value.status == 429
    assert 0 < (refused.value.retry_after or 0) <= RETRY_SECONDS
    assert "turns are found" in caplog.text


@pytest.mark.parametrize(
    ("text", "end", "complete", "wanted"),
    [
        ("one two three four", 2.0, True, "one two three four"),
        ("one two three four", 1.0, True, "one two"),
        ("one two three four", 0.7, True, "one"),
        ("one two three four", 0.0, True, ""),
        ("one", 1.0, True, ""),
        ("one two three four", 2.0, False, "one two three four"),
        ("海水为什么是咸的", 1.0, True, "海水为什"),
        ("", 1.0, True, ""),
    ],
)
def test_what_was_heard_ends_with_a_whole_word(text: str, end: float, complete: bool, wanted: str) -> None:
    assert heard(text, end, 2.0, len(text) / 2.0, complete=complete) == wanted


def test_too_many_events_are_slowed_down() -> None:
    pace = EventRate(10, now=0.0)
    burst = int(10 * BURST_SECONDS)
    assert [pace.wait(0.0) for _ in range(burst)] == pytest.approx([0.0] * burst)
    assert pace.wait(0.0) == pytest.approx(0.1)
    assert pace.wait(0.0) == pytest.approx(0.2)
    assert pace.wait(60.0) == 0.0, "a pause is forgiven"


def lateness(activity: VoiceActivity, piece: float, now: float) -> float:
    """How late it is now to have looked at the next seconds of sound."""
    return activity.found([], bytes(int(2 * RATE * piece)), now)


def test_work_that_is_slower_than_speech_is_late_until_all_is_done() -> None:
    """Pieces of 0.1 s come in time, and each takes 0.3 s."""
    activity = VoiceActivity(0, ignore)
    late = []
    for piece in range(10):
        activity.append(bytes(RATE // 5), 100.0 + 0.1 * piece)
        while piece == 9 and activity.take():
            continue
        late.append(lateness(activity, 0.1, 100.3 + 0.3 * piece))
    assert late == pytest.approx([0.3 + 0.2 * piece for piece in range(10)])
    activity.append(b"", 200.0)
    assert lateness(activity, 0.1, 200.01) == pytest.approx(0.01)
    at_once = VoiceActivity(0, ignore)
    at_once.append(bytes(10 * RATE), 0.0)
    assert [lateness(at_once, 0.25, 0.1 * piece) for piece in range(1, 10)] == [0.1, *[0.0] * 8], "it is not late"
