"""One stage in the caller's process, through `StageLLM`: every form of a prompt, text, codes and sound."""

from __future__ import annotations

import runpy
import sys

import numpy
import pytest
import soundfile
import torch
from PIL import Image

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.rows import to_torch
from omni_actors.engine.stage_llm import StageLLM
from omni_actors.errors import InvalidRequest, UnknownVoice
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import AudioEvent, StageInputs
from tests.support.code2wav import arguments, codec_tokens, difference, expected
from tests.support.paths import REPOSITORY
from tests.support.stage_driver import SMALL, prompt_length, talker_inputs

pytestmark = pytest.mark.e2e

SAMPLES = 480  # per codec token
CHUNK_ERROR = 0.01  # of chunks against the whole, relative to the peak (tests/e2e/diffusion/test_chunks.py)
PARAMS = {"num_steps": 4, "guidance_scale": 0.5}
SOUND = ((0.3 * numpy.sin(numpy.arange(16_000) / 10)).astype(numpy.float32), 16_000)
PICTURE = numpy.random.default_rng(0).integers(0, 255, (112, 112, 3), dtype=numpy.uint8)
ROOMY = {**SMALL, "max_model_len": 1024, "max_num_batched_tokens": 1024}  # for the places of all media


def stage_of(checkpoint, name, kind="autoregressive", engine=SMALL):
    return StageLLM(OmniEngineArgs(OmniModelConfig(str(checkpoint), name), kind, engine))


def test_a_thinker_takes_every_form_of_a_prompt(tiny_checkpoint, answers, reference):
    content = [{"type": "audio"}, {"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = reference.prompt([{"role": "user", "content": content}])
    wanted = reference.inputs(text, audios=[SOUND], images=[Image.fromarray(PICTURE)])
    spoken = reference.generate(wanted, thinker_max_tokens=8, speaks=False)
    token_ids = list(reference.processor.tokenizer(text)["input_ids"])
    with_media = {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": SOUND, "image": PICTURE}}
    with stage_of(tiny_checkpoint, "thinker", engine=ROOMY) as stage:
        table = stage.engine.core.worker.model_runner.model.language_model.model.embed_tokens.weight.detach()
        tokens = answers[0].prompt_token_ids
        first, embeds, media, *wrong = stage.generate(
            [
                {"prompt_token_ids": tokens},
                {"prompt_embeds": table[torch.tensor(tokens)]},
                with_media,
                {"prompt_token_id": [5]},
                {"prompt_token_ids": []},
                {**with_media, "multi_modal_data": {"audio": SOUND}},
                {"prompt_token_ids": [5], "additional_information": {"style": 1}},
                {"prompt_embeds": table[:2, 1:]},
            ],
            StageParams(max_tokens=8),
        )
        with pytest.raises(InvalidRequest, match="params has 0 entries for 1 prompts"):
            stage.generate([{"prompt_token_ids": [1]}], [])
        with pytest.raises(InvalidRequest, match="'thinker' has no voices"):
            stage.generate([{"prompt_token_ids": [1]}], voice="Ethan")
        assert set(stage.engine.counts().values()) == {0}
    assert first.token_ids == embeds.token_ids == answers[0].thinker_tokens[:8]
    assert media.token_ids == spoken.thinker_tokens
    assert first.finish_reasons == {"thinker": "length"}
    assert first.text
    usage = first.usage["thinker"]
    assert (usage.input_tokens, usage.output_tokens) == (len(tokens), 8)
    assert usage.finish_reason is FinishReason.LENGTH
    assert 0 < usage.first_output <= usage.finished
    rows = to_torch(first.tensors["rows"])
    torch.testing.assert_close(rows, answers[0].thinker_rows[: len(rows)], atol=1e-4, rtol=1e-5)
    words = ["Did you mean 'prompt_token_ids'", "", "media", "does not want 'style'", "prompt_embeds: needs the shape"]
    for result, word in zip(wrong, words, strict=True):
        assert word in str(result.error), result
    with stage_of(tiny_checkpoint, "prompt", "prompt", ROOMY) as stage:
        (encoded,) = stage.generate([with_media])
        assert encoded.error is None
        assert len(encoded.token_ids) > len(token_ids), "a medium takes many places"
        assert "vllm.0" in encoded.tensors


def test_incomplete_rows_end_a_request_only_if_it_needs_more_of_them(tiny_checkpoint, answers):
    rows, length = answers[0].thinker_rows, prompt_length(answers[0])
    inputs = talker_inputs(rows, length, replies=15)  # rows after the first, and no more will come
    long = {"max_tokens": 30, "min_tokens": 30}
    with_media = {"prompt_token_ids": [1], "multi_modal_data": {"audio": SOUND}}
    with stage_of(tiny_checkpoint, "talker") as stage:
        starved, short, whole, media = stage.generate(
            [inputs, inputs, talker_inputs(rows, length), with_media], [long, {"max_tokens": 3}, long, {}], seed=[0] * 4
        )
        assert set(stage.engine.counts().values()) == {0}, "the request that starved is gone, too"
        assert stage.generate([inputs], {"max_tokens": 3}, seed=0)[0].token_ids == short.token_ids
    assert isinstance(starved.error, InvalidRequest)
    assert starved.error.stage == "talker"
    assert starved.finish_reasons == starved.usage == {}
    assert starved.token_ids == whole.token_ids[:12], "codec tokens leave in blocks of the vocoder"
    assert short.error is None
    assert short.token_ids == whole.token_ids[:3]
    assert len(whole.token_ids) == 30
    assert "'talker' takes no media" in media.error.message


@pytest.fixture(scope="module")
def shared_vocoder(tiny_checkpoint):
    decode = {"first_blocks": 1, "largest_blocks": 2}
    with StageLLM(arguments(tiny_checkpoint, decode=decode, max_num_seqs=1)) as stage:
        yield stage


@pytest.fixture
def vocoder(shared_vocoder):
    """A vocoder that computes one chunk at a time; nothing of a test may be left in it."""
    yield shared_vocoder
    assert not shared_vocoder.engine.runnable()
    assert set(shared_vocoder.engine.counts().values()) == {0}, shared_vocoder.engine.counts()


def test_sound_is_joined_from_its_chunks_for_each_prompt(vocoder, reference):
    prompts = [{"prompt_token_ids": codec_tokens(40, 7)}, StageInputs(token_ids=codec_tokens(7, 8))]
    outputs = vocoder.generate(prompts, PARAMS, seed=7, voice=["Ethan", None])
    for output, spec, seed in zip(outputs, [(40, 4, "Ethan", 0.5), (7, 4, "Chelsie", 0.5)], (7, 8), strict=True):
        assert output.error is None
        assert output.sample_rate == 24_000
        assert difference(output.audio, expected(reference, spec, seed)) < CHUNK_ERROR
        assert output.finish_reasons == {"code2wav": "stop"}
        usage = output.usage["code2wav"]
        assert usage.input_tokens == spec[0]
        assert usage.output_tokens % 3 == 0, "steps: each chunk has one less than points in time"
    assert outputs[0].usage["code2wav"].output_tokens > outputs[1].usage["code2wav"].output_tokens


def test_incomplete_inputs_end_with_what_they_suffice_for_and_free_what_they_held(vocoder, monkeypatch):
    monkeypatch.setattr(vocoder.engine.core.scheduler.budget.held, "limit", 1)  # room for one request at a time
    tokens = codec_tokens(40, 1)
    prompts = [StageInputs(token_ids=tokens, complete=False), StageInputs(token_ids=tokens)]
    part, whole = vocoder.generate(prompts, PARAMS, seed=[1, 1], priority=[0, 1])
    assert isinstance(part.error, InvalidRequest)
    assert part.error.stage == "code2wav"
    assert "complete=True" in str(part.error)
    assert part.finish_reasons == part.usage == {}
    assert whole.error is None
    assert 0 < len(part.audio) < len(whole.audio) == 40 * SAMPLES
    assert difference(part.audio, whole.audio[: len(part.audio)]) < CHUNK_ERROR


def test_every_prompt_has_its_own_priority_parameters_and_refusals(vocoder, monkeypatch):
    order, original = [], vocoder.engine.step

    def step():
        events = original()
        order.extend(event.request_id for event in events if isinstance(event, AudioEvent))
        return events

    monkeypatch.setattr(vocoder.engine, "step", step)
    tokens = {"prompt_token_ids": codec_tokens(7, 3)}
    params = [None, StageParams(num_steps=2), {"num_steps": 2, "seed": 0}, {"temperature": 0.5}]
    outputs = vocoder.generate([tokens] * 4, params, seed=[0, 0, 5, 0], priority=[2, 0, 1, 0])
    assert order == [outputs[index].request_id for index in (1, 2, 0)]
    plain, *two, foreign = outputs
    assert [output.usage["code2wav"].output_tokens for output in two] == [1, 1]
    assert plain.usage["code2wav"].output_tokens > 1
    assert numpy.array_equal(two[0].audio, two[1].audio), "the seed of its parameters wins"
    assert isinstance(foreign.error, InvalidRequest)
    (unknown,) = vocoder.generate([tokens], voice="Nobody")
    assert isinstance(unknown.error, UnknownVoice)


def test_the_example_speaks(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    wav = tmp_path / "sound.wav"
    monkeypatch.setattr(sys, "argv", ["one_stage.py", str(tiny_checkpoint), "--voice", "Ethan", "--answer", str(wav)])
    runpy.run_path(str(REPOSITORY / "examples" / "one_stage.py"), run_name="__main__")
    samples, rate = soundfile.read(wav)
    assert (len(samples), rate) == (50 * SAMPLES, 24_000)
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
def test_a_wrong_argument_is_refused_by_name(vocoder, wrong, message):
    with pytest.raises(InvalidRequest, match=message):
        vocoder.generate(**{"prompts": [{"prompt_token_ids": [1]}] * 2, **wrong})
