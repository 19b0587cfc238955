"""CosyVoice 2's talker in a real vLLM engine core, compared with transformers' Qwen2, and how it draws tokens."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from omni_actors.engine.models.cosyvoice2.talker import repetition_aware
from omni_actors.errors import InvalidRequest, UnknownVoice
from omni_actors.protocol.messages import FinishReason
from tests.support.cosyvoice_reference import CosyVoiceReference
from tests.support.drawn_sizes import DRAWS, cosyvoice2_sizes
from tests.support.spoken_texts import speak
from tests.support.stage_driver import Driver, make_engine
from tools.checkpoints.cosyvoice import END, SPOKEN, write_tiny

pytestmark = pytest.mark.e2e

INSTRUCTIONS = "with one of the"
# By request: text, voice and instructions.
CASES = {
    "continued": ("the sea is", "bass", None),
    "without its text": ("[laughter] you are, and", "alto", None),
    "instructed": ("<strong>now</strong>", "bass", INSTRUCTIONS),
    "short": ("the", "alto", None),
}


def start(talker: Driver, request: str, case: str, **params: Any) -> None:
    text, voice, instructions = CASES[case]
    information = {"instructions": instructions} if instructions else {}
    speak(talker, request, text, voice=voice, information=information, **params)


def check(talker: Driver, reference: CosyVoiceReference) -> set[FinishReason]:
    """Compare what is spoken in one batch and alone; return how speech ended."""
    waiting, sounds, ends = list(CASES), reference.voice("bass").tokens.tolist(), set()

    def join(step: int) -> None:
        if waiting and step % 3 == 0:
            name = waiting.pop(0)
            start(talker, name, name, temperature=0.0)

    join(0)
    talker.run(join)
    for name, (text, voice, instructions) in CASES.items():
        before = f"{instructions}<|endofprompt|>" if instructions else SPOKEN if voice == "bass" else ""
        codes = reference.speak(text, before, sounds if before == SPOKEN else ())
        longest = len(codes) == 20 * len(reference.tokenizer(text)["input_ids"])
        ends.add(reason := FinishReason.LENGTH if longest else FinishReason.STOP)
        start(talker, f"{name}, alone", name, temperature=0.0)
        talker.run()
        for request in (name, f"{name}, alone"):
            assert talker.tokens(request) == codes, request
            assert talker.finished(request).reason is reason, request
    return ends


def test_speech_in_one_batch_and_alone_is_that_of_transformers(driver: Any, tiny_cosyvoice2: Path):
    talker: Driver = driver(tiny_cosyvoice2, "talker", asynchronous=True, max_num_batched_tokens=32)
    assert len(check(talker, CosyVoiceReference(tiny_cosyvoice2))) == 2


@pytest.mark.nightly
@DRAWS
def test_that_of_drawn_models_is_too(draw: str, tmp_path: Path):
    generator = Random(f"cosyvoice2 {draw}")
    sizes, seed = cosyvoice2_sizes(generator), generator.randrange(1 << 31)
    print(f"seed {seed}, {sizes}")
    write_tiny(tmp_path, seed, sizes=sizes)
    talker = Driver(make_engine(tmp_path, "talker"))
    try:
        check(talker, CosyVoiceReference(tmp_path))
    finally:
        talker.engine.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_drawn_as_the_models_code_draws_them(seed: int):
    """All outcomes of its two draws, for each the chance."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, 30, generator=generator)
    recent = torch.full((2, 10), -1)
    recent[0, :4] = logits[0].topk(4).indices[torch.randperm(4, generator=generator)]
    recent[0, 4:] = torch.randint(30, (6,), generator=generator)
    recent[1, :3] = torch.tensor([int(logits[1].argmax()), 0, 0])
    top_p, top_k = (0.8, 0.5), (25, 3)
    given = torch.tensor(top_p, dtype=torch.float64), torch.tensor(top_k)
    drawn = repetition_aware(logits, recent, *given).double().exp()
    for row, scores in enumerate(logits.double()):
        chances, expected = scores.softmax(0).tolist(), [0.0] * 30
        nucleus: dict[int, float] = {}
        for token in sorted(range(30), key=lambda each: -chances[each]):
            if sum(nucleus.values()) < top_p[row] and len(nucleus) < top_k[row]:
                nucleus[token] = chances[token]
        for token, chance in nucleus.items():
            share = chance / sum(nucleus.values())
            if token not in recent[row]:
                expected[token] += share
                continue
            for other in range(30):
                if other != token:
                    expected[other] += share * chances[other] / (1 - chances[token])
        assert drawn[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_token_that_would_repeat_one_of_the_last_ten_gives_way(driver: Any, tiny_cosyvoice2: Path):
    """The likeliest token alone is drawn (`top_p`), so it is seen when another one takes its place."""
    reference = CosyVoiceReference(tiny_cosyvoice2)
    sounds, text = reference.voice("bass").tokens.tolist(), CASES["continued"][0]
    talker: Driver = driver(tiny_cosyvoice2, "talker", asynchronous=True, max_num_batched_tokens=32)
    given = {"top_p": 1e-6, "max_tokens": 90}
    for seed in (1, 2):
        start(talker, f"{seed}", "continued", seed=seed, **given)
    start(talker, "greedy", "short", temperature=0.0)
    start(talker, "one", "continued", logit_bias={0: 50.0}, max_tokens=40)
    talker.run()
    assert [place for place, code in enumerate(talker.tokens("one")) if code == 0] == [0, 11, 22, 33]
    start(talker, "1, alone", "continued", seed=1, **given)
    talker.run()
    assert talker.tokens("1, alone") == talker.tokens("1") != talker.tokens("2")
    for seed in (1, 2):
        codes = talker.tokens(f"{seed}")
        likeliest = reference.likeliest(text, codes, SPOKEN, sounds)
        repeats = [likeliest[place] in codes[max(0, place - 10) : place] for place in range(len(codes))]
        assert any(repeats)
        assert [likeliest[place] != code for place, code in enumerate(codes)] == repeats


def test_speech_has_two_tokens_at_least_for_each_of_its_text(driver: Any, tiny_cosyvoice2: Path):
    talker: Driver = driver(tiny_cosyvoice2, "talker", asynchronous=True, max_num_batched_tokens=32)
    start(talker, "r", "short", logit_bias={END: 100.0})
    talker.run()
    assert len(talker.tokens("r")) == 2 * 3
    assert talker.finished("r").reason is FinishReason.STOP


def test_what_it_cannot_speak_is_refused_by_name(driver: Any, tiny_cosyvoice2: Path):
    talker: Driver = driver(tiny_cosyvoice2, "talker", asynchronous=True, max_num_batched_tokens=32)
    assert talker.engine.facts.voices == ("alto", "bass")
    with pytest.raises(UnknownVoice, match="no voice 'tenor'; the voices are alto, bass"):
        speak(talker, "r", "the sea", voice="tenor", information={})
    with pytest.raises(InvalidRequest, match="no information named \\['language'\\]"):
        speak(talker, "r", "the sea", information={"language": "english"})
    with pytest.raises(InvalidRequest, match="instructions: must be a text"):
        speak(talker, "r", "the sea", information={"instructions": " "})
    with pytest.raises(InvalidRequest, match="text to speak is empty"):
        speak(talker, "r", " ", information={})
