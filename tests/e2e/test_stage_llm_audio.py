"""The vocoder alone, in the caller's process, through `StageLLM`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile

from omni_actors.engine.stage_llm import StageLLM
from omni_actors.errors import InvalidRequest, UnknownVoice
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, StageInputs
from tests.support.code2wav import arguments, codec_tokens, difference, expected
from tests.support.paths import REPOSITORY
from tests.support.reference import Reference

pytestmark = pytest.mark.e2e

SAMPLES = 480  # per codec token
CHUNK_ERROR = 0.01  # of chunks against the whole, relative to the peak (tests/e2e/diffusion/test_chunks.py)
PARAMS = {"num_steps": 4, "guidance_scale": 0.5}


@pytest.fixture(scope="module")
def shared_vocoder(tiny_checkpoint: Path) -> Iterator[StageLLM]:
    decode = {"first_blocks": 1, "largest_blocks": 2}
    with StageLLM(arguments(tiny_checkpoint, decode=decode, max_num_seqs=1)) as stage:
        yield stage


@pytest.fixture
def vocoder(shared_vocoder: StageLLM) -> Iterator[StageLLM]:
    """A vocoder that computes one chunk at a time; nothing of a test may be left in it."""
    yield shared_vocoder
    assert not shared_vocoder.engine.runnable()
    assert set(shared_vocoder.engine.counts().values()) == {0}, shared_vocoder.engine.counts()


def test_sound_is_joined_from_its_chunks_for_each_prompt(vocoder: StageLLM, reference: Reference) -> None:
    prompts = [{"prompt_token_ids": codec_tokens(40, 7)}, StageInputs(token_ids=codec_tokens(7, 8))]
    outputs = vocoder.generate(prompts, PARAMS, seed=7, voice=["Ethan", None])
    for output, spec, seed in zip(outputs, [(40, 4, "Ethan", 0.5), (7, 4, "Chelsie", 0.5)], (7, 8), strict=True):
        assert output.error is None
        assert output.sample_rate == 24_000
        assert len(output.audio) == spec[0] * SAMPLES
        assert difference(output.audio, expected(reference, spec, seed)) < CHUNK_ERROR
        assert output.finish_reasons == {"code2wav": "stop"}
        usage = output.usage["code2wav"]
        assert usage.input_tokens == spec[0]
        assert usage.output_tokens % 3 == 0, "steps: each chunk has one less than points in time"
        assert 0 < usage.first_output <= usage.finished
    assert outputs[0].usage["code2wav"].output_tokens > outputs[1].usage["code2wav"].output_tokens


def test_incomplete_inputs_end_with_what_they_suffice_for_and_an_error(vocoder: StageLLM) -> None:
    tokens = codec_tokens(40, 1)
    whole, part = vocoder.generate(
        [StageInputs(token_ids=tokens), StageInputs(token_ids=tokens, complete=False)], PARAMS, seed=[1, 1]
    )
    assert isinstance(part.error, InvalidRequest)
    assert part.error.stage == "code2wav"
    assert "complete=True" in str(part.error)
    assert 0 < len(part.audio) < len(whole.audio)
    assert difference(part.audio, whole.audio[: len(part.audio)]) < CHUNK_ERROR
    assert part.finish_reasons == {}
    assert part.usage == {}
    assert whole.error is None


def test_what_an_incomplete_request_held_is_free_for_others(vocoder: StageLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocoder.engine.core.scheduler.budget, "limit_bytes", 1)  # room for one request at a time
    part, whole = vocoder.generate(
        [StageInputs(token_ids=codec_tokens(40, 1), complete=False), StageInputs(token_ids=codec_tokens(40, 2))],
        PARAMS,
        priority=[0, 1],
    )
    assert isinstance(part.error, InvalidRequest)
    assert whole.error is None
    assert len(whole.audio) == 40 * SAMPLES
    assert whole.finish_reasons == {"code2wav": "stop"}


def test_the_engine_takes_urgent_prompts_first(vocoder: StageLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = vocoder.engine.step

    def step() -> object:
        events = original()
        order.extend(event.request_id for event in events if isinstance(event, AudioEvent))
        return events

    monkeypatch.setattr(vocoder.engine, "step", step)
    prompts = [{"prompt_token_ids": codec_tokens(7, seed)} for seed in range(3)]
    outputs = vocoder.generate(prompts, PARAMS, priority=[2, 0, 1])
    assert order == [outputs[index].request_id for index in (1, 2, 0)]


def test_every_prompt_has_its_own_parameters_and_refusals(vocoder: StageLLM) -> None:
    tokens = {"prompt_token_ids": codec_tokens(7, 3)}
    params = [None, StageParams(num_steps=2), {"num_steps": 2, "seed": 0}, {"temperature": 0.5}]
    plain, *two, foreign = vocoder.generate([tokens] * 4, params, seed=[0, 0, 5, 0])
    assert [output.usage["code2wav"].output_tokens for output in two] == [1, 1]
    assert plain.usage["code2wav"].output_tokens > 1
    assert (two[0].audio == two[1].audio).all(), "the seed of its parameters wins"
    assert isinstance(foreign.error, InvalidRequest)
    (unknown,) = vocoder.generate([tokens], voice="Nobody")
    assert isinstance(unknown.error, UnknownVoice)


def test_the_example_speaks(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wav = tmp_path / "sound.wav"
    monkeypatch.setattr(sys, "argv", ["one_stage.py", str(tiny_checkpoint), "--voice", "Ethan", "--answer", str(wav)])
    runpy.run_path(str(REPOSITORY / "examples" / "one_stage.py"), run_name="__main__")
    samples, rate = soundfile.read(wav)
    assert rate == 24_000
    assert len(samples) == 50 * SAMPLES
    assert f"1 s of sound in {wav}: 9 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"params": [{}]}, "params has 1 entries for 2 prompts"),
        ({"params": {"num_stepps": 2}}, "num_stepps"),
        ({"params": 4}, "mapping such as .* got a int"),
        ({"priority": [0]}, "priority has 1 values for 2 prompts"),
        ({"priority": 5000}, "priority: Expected `int` <= 1000"),
        ({"seed": "x"}, "seed: Expected `int`"),
        ({"voice": [None, 3]}, "voice: Expected `str | null`"),
        ({"prompts": {"prompt_token_ids": [1]}}, "prompts is a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_argument_is_refused_by_name(vocoder: StageLLM, wrong: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        vocoder.generate(**{"prompts": [{"prompt_token_ids": [1]}] * 2, **wrong})
