"""What a realtime session has computed of a turn before the turn is over."""

from __future__ import annotations

import numpy
import pytest

from omni_actors.http_server.realtime.config import BYTES_PER_SECOND, RATE, Pipeline, ServerVad
from omni_actors.http_server.realtime.session import EndPreparation, Prepare
from omni_actors.http_server.realtime.turns import MARGIN, AheadOfTurn
from tests.support.realtime import PIPELINE, SECOND, WINDOW, Talk

VAD = ServerVad(prefix_padding_ms=64, silence_duration_ms=160)
LOUD, SILENT = 0.9, 0.0


def talking(**options) -> Talk:
    return Talk(ahead=AheadOfTurn(2.0), **options)


def sound_of(prepare: Prepare) -> numpy.ndarray:
    """The sound of the turn that is not over yet."""
    (part,) = prepare.messages[-1]["content"]
    samples, rate = part["audio"]
    assert rate == RATE
    return samples


def test_every_two_seconds_are_computed_once_what_follows_them_has_come() -> None:
    ahead = AheadOfTurn(2.0)
    assert ahead.due(100, 100 + 2 * RATE, 0) is None
    assert ahead.due(100, 100 + 2 * RATE + MARGIN, 0) == 100 + 2 * RATE + MARGIN
    assert ahead.due(100, 100 + 3 * RATE, 0) is None
    assert ahead.due(100, 100 + 7 * RATE, 0) == 100 + 6 * RATE + MARGIN
    assert ahead.due(9 * RATE, 12 * RATE, 0) == 11 * RATE + MARGIN, "the next turn"


def test_a_conversation_with_much_sound_is_sent_less_often() -> None:
    ahead = AheadOfTurn(2.0)
    earlier = 120 * BYTES_PER_SECOND
    due = [second for second in range(31) if ahead.due(0, second * RATE, earlier) is not None]
    assert due == [7, 13, 19, 25]


def test_nothing_is_computed_where_that_is_off() -> None:
    assert AheadOfTurn(0.0).due(0, 100 * RATE, 0) is None


def test_what_is_computed_is_the_beginning_of_the_question() -> None:
    talk = talking(instructions="Be brief.")
    talk.say("Hello.")
    talk.answer("Good morning.")
    pcm = numpy.random.default_rng(0).integers(-9000, 9000, 3 * RATE).astype("<i2").tobytes()
    assert talk.session.prepare() is None
    talk.append(pcm[: 2 * BYTES_PER_SECOND])
    assert talk.session.prepare() is None
    talk.append(pcm[2 * BYTES_PER_SECOND :])
    prepare = talk.session.prepare()
    assert prepare is not None
    assert talk.session.prepare() is None
    talk.send("input_audio_buffer.commit")
    assert talk.instructions.count(EndPreparation()) == 1
    talk.respond()
    asked = talk.asked[-1].messages
    assert prepare.messages[:-1] == asked[:-1]
    assert prepare.config == talk.asked[-1].config
    whole = asked[-1]["content"][0]["audio"][0]
    assert len(whole) == 3 * RATE
    numpy.testing.assert_array_equal(sound_of(prepare), whole[: 2 * RATE + MARGIN])


def test_nothing_is_computed_while_an_answer_runs() -> None:
    talk = talking()
    response = talk.respond()
    talk.append(3 * SECOND)
    assert talk.session.prepare() is None
    talk.take(talk.session.answered(response, {}, cut=False))
    assert talk.session.prepare() is not None


def test_sound_that_is_discarded_is_not_computed_any_further() -> None:
    talk = talking()
    talk.append(3 * SECOND)
    assert talk.session.prepare() is not None
    talk.send("input_audio_buffer.clear")
    assert talk.instructions.count(EndPreparation()) == 1
    talk.append(SECOND)
    assert talk.session.prepare() is None


def test_with_detection_only_the_turn_is_computed() -> None:
    talk = talking(vad=VAD)
    talk.hear(SILENT, 100)
    assert talk.session.prepare() is None
    talk.hear(LOUD, 2 * RATE // WINDOW + 1)
    prepare = talk.session.prepare()
    assert prepare is not None
    assert len(sound_of(prepare)) == 2 * RATE + MARGIN
    talk.hear(SILENT, 5)
    assert talk.instructions.count(EndPreparation()) == 1
    whole = talk.asked[-1].messages[-1]["content"][0]["audio"][0]
    numpy.testing.assert_array_equal(sound_of(prepare), whole[: 2 * RATE + MARGIN])


@pytest.mark.parametrize(("earlier", "computed"), [(1, True), (2, False)])
def test_a_turn_that_will_drop_the_oldest_is_not_computed_before_its_end(earlier: int, computed: bool) -> None:
    pipeline = Pipeline(voices=PIPELINE.voices, stages=PIPELINE.stages, speaks=True, max_audios=2)
    talk = talking(pipeline=pipeline)
    for _ in range(earlier):
        talk.append(SECOND)
        talk.send("input_audio_buffer.commit")
    talk.append(3 * SECOND)
    assert (talk.session.prepare() is not None) is computed
