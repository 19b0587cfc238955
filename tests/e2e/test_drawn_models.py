"""Omni and speech models of drawn seeds and sizes, stage by stage, against their references: logits, codes, sound.

Greedy requests have the published penalties, and all logits after penalties are compared, not only which is largest.
For sampled requests what is drawn from is compared: penalties, temperature, top_k and top_p.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen3OmniMoeForConditionalGeneration

from omni_actors.engine.rows import to_torch
from omni_actors.protocol.fields import HostTensor
from omni_actors.stage.engine_interface import StageInputs, TextEvent
from tests.support import drawn_sizes
from tests.support.code2wav import sound_of
from tests.support.drawn_sizes import DRAWS, draw_text
from tests.support.penalties import Sampled, draw_parameters, recorded_sampling
from tests.support.qwen3_reference import Qwen3Reference, Qwen3Result
from tests.support.qwen3_tts_reference import Qwen3TtsReference
from tests.support.reference import Reference, ReferenceResult
from tests.support.spoken_texts import RATE, clip_information, frames_of, speak
from tests.support.stage_driver import Driver, encode_media_prompt, make_engine, talker_inputs, token_inputs
from tools.checkpoints import omni, tts
from tools.checkpoints.tts import KINDS, SAMPLING, TINY_VOICES

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

TEXT_TOKENS, CODES, DRAWN = 12, 20, 8
THINKER: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.05}  # as in stage_configs/qwen2_5_omni.yaml
PROMPTS = (range(1, 4), range(4, 12), range(40, 60))  # words


# -- what a reference computes, and how far an engine agrees with it --------------------------------------------

TIE = 1e-3  # logits that are closer may be ordered either way by rounding


class Scores:
    """A logits processor of transformers that keeps what it gets: logits after all penalties.

    Args:
        excluded: tokens that are not to be sampled, as a vocoder has no sound for them.
    """

    def __init__(self, excluded: Sequence[int] = ()) -> None:
        self.excluded = list(excluded)
        self.rows: list[torch.Tensor] = []

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.excluded] = -torch.inf
        self.rows.append(scores[0].clone())
        return scores


@contextmanager
def residual_scores(predictor: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collects the logits of all codes but the first of each frame, while the block runs: frame after frame."""
    rows: list[torch.Tensor] = []
    with ExitStack() as stack:
        for head in predictor.lm_head:
            hook = head.register_forward_hook(lambda _module, _args, logits: rows.append(logits[0, -1].clone()))
            stack.callback(hook.remove)
        yield rows


def agreed(
    sampled: Sampled,
    name: str,
    tokens: Any,
    wanted: Any,
    scores: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor] = (),
) -> int:
    """Compare a greedy request with the reference: logits after penalties, then what was chosen.

    Where two candidates tie but for rounding, the engine may choose the other one; nothing after it is compared.

    Args:
        tokens: the engine's, [n], or frames [n, codes].
        wanted: the reference's.
        scores: of the tokens, or of the first codes of the frames.
        residuals: of the other codes.

    Returns:
        How many of `tokens` are equal.
    """
    made, given = (torch.as_tensor(each).reshape(len(each), -1) for each in (tokens, wanted))
    assert made.shape == given.shape
    differing = (made != given).nonzero().tolist()
    equal, group = differing[0] if differing else (len(made), 0)
    for number, step in enumerate(sampled.steps(name, len(made))[: equal + 1]):
        if number < len(scores):
            where = partial("{}, token {}: {}".format, name, number)
            torch.testing.assert_close(step.processed, scores[number], atol=TIE / 2, rtol=0, msg=where)
    if differing:
        row = residuals[equal * (made.shape[1] - 1) + group - 1] if group else scores[equal]
        assert row[given[equal, group]] - row[made[equal, group]] < TIE, f"{name}, token {equal}, code {group}"
    return equal


# -- prompts and answers -----------------------------------------------------------------------------------------------


def published(model: type) -> dict[str, Any]:
    """How transformers' talker of a family draws its codes, unless it is told otherwise."""
    given = inspect.signature(model.generate).parameters
    assert given["talker_do_sample"].default is True
    names = ("temperature", "top_k", "top_p", "repetition_penalty")
    return {name: given[f"talker_{name}"].default for name in names}


@dataclass
class Asked:
    """A prompt for the engine, and what transformers answers, with the logits of every token that it chooses."""

    inputs: StageInputs
    processed: dict[str, Any]
    voice: str
    answer: Any = None
    texts: Scores = field(default_factory=Scores)
    codes: Scores = field(default_factory=Scores)
    residuals: Sequence[torch.Tensor] = ()

    def ask(self, reference: Reference | Qwen3Reference, **options: Any) -> None:
        """Have the reference answer."""
        self.answer = reference.generate(
            self.processed,
            voice=self.voice,
            thinker_max_tokens=TEXT_TOKENS,
            talker_max_tokens=CODES,
            thinker_eos=[],
            talker_eos=[],
            thinker_sampling={"do_sample": False, "repetition_penalty": 1.05, "logits_processor": [self.texts]},
            talker_sampling={"do_sample": False, "logits_processor": [self.codes]},
            **options,
        )
        assert self.answer.prompt_token_ids == list(self.inputs.token_ids)


def prompts(generator: Random, reference: Reference | Qwen3Reference, folder: Path) -> list[Asked]:
    """Three texts, and a question about a sound and a picture."""
    asked = []
    voices = sorted(reference.voices)
    for words in PROMPTS:
        processed = reference.inputs([{"role": "user", "content": draw_text(generator, words)}])
        inputs = token_inputs(processed["input_ids"][0].tolist())
        asked.append(Asked(inputs, processed, generator.choice(voices)))
    noise = np.random.default_rng(generator.randrange(1 << 32))
    samples = (noise.standard_normal(generator.randrange(8_000, 24_000)) * 0.1).astype(np.float32)
    sides = [32 * generator.randrange(2, 5) for _ in range(2)]
    picture = Image.fromarray(noise.integers(0, 256, (*sides, 3), dtype=np.uint8))
    parts = [{"type": "audio"}, {"type": "image"}, {"type": "text", "text": draw_text(generator, PROMPTS[1])}]
    text = reference.prompt([{"role": "user", "content": parts}])
    heard: Any = [(samples, 16_000)] if isinstance(reference, Reference) else [samples]
    processed = reference.inputs(text, audios=heard, images=[picture])
    inputs = encode_media_prompt(folder, text, {"audio": (samples, 16_000), "image": picture})
    return [*asked, Asked(inputs, processed, generator.choice(voices))]


@contextmanager
def running(folder: Path, stage: str, generator: Random) -> Iterator[tuple[Driver, Sampled]]:
    """An engine, with the logits of its tokens."""
    engine = make_engine(folder, stage, asynchronous=generator.choice((False, True)))
    try:
        driver = Driver(engine)
        with recorded_sampling(engine) as sampled:
            yield driver, sampled
        driver.assert_idle()
    finally:
        engine.shutdown()


def written(thinker: Driver, name: str) -> list[int]:
    """All tokens of a text, and none of its prompt, which goes to some talkers."""
    return [token for event in thinker.events[name] if isinstance(event, TextEvent) for token in event.token_ids]


def check_thinker(generator: Random, folder: Path, asked: Sequence[Asked]) -> dict[str, HostTensor]:
    """Returns what the talker gets of the media of the last prompt."""
    with running(folder, "thinker", generator) as (thinker, sampled):
        drawn = [draw_parameters(generator, range(thinker.engine.adapter.vocabulary), DRAWN) for _ in asked]
        for number, each in enumerate(asked):
            thinker.start(f"greedy{number}", each.inputs, max_tokens=TEXT_TOKENS, ignore_eos=True, **THINKER)
            thinker.start(f"drawn{number}", each.inputs, seed=number, streams=False, **drawn[number])
        thinker.run()
        equal = 0
        for number, each in enumerate(asked):
            answer, greedy, name = each.answer, f"greedy{number}", f"drawn{number}"
            same = agreed(sampled, greedy, written(thinker, greedy), answer.thinker_tokens, each.texts.rows)
            equal += same
            given = dict(thinker.streams(greedy)[0].tensors)
            if isinstance(answer, ReferenceResult):
                wanted = answer.thinker_rows[: len(answer.prompt_token_ids) + same]
                torch.testing.assert_close(thinker.rows(greedy)[: len(wanted)], wanted, atol=1e-3, rtol=1e-4)
            elif len(answer.media_rows):
                torch.testing.assert_close(to_torch(given["media_rows"]), answer.media_rows, atol=1e-3, rtol=1e-4)
                assert torch.equal(to_torch(given["mrope_positions"]), answer.mrope_positions)
            sampled.check(name, drawn[number], answer.prompt_token_ids, written(thinker, name))
        assert equal > len(asked) * TEXT_TOKENS // 2, "ties are rare"
    return {name: tensor for name, tensor in given.items() if name in ("media_rows", "mrope_positions")}


def start_speech(start: Callable[..., None], number: int, drawn: dict[str, Any]) -> None:
    """Start the requests of a talker for one prompt: greedy, with the published parameters, and with random ones."""
    start(f"greedy{number}", max_tokens=CODES, min_tokens=CODES, temperature=0.0)
    start(f"published{number}", max_tokens=DRAWN, ignore_eos=True)
    start(f"drawn{number}", **drawn)


def close(sound: torch.Tensor, wanted: torch.Tensor) -> None:
    assert sound.shape == wanted.shape
    peak = float(wanted.abs().max())
    assert peak > 1e-3, "silence proves nothing"
    assert float((sound - wanted).abs().max()) < 1e-4 * peak


@DRAWS
def test_qwen2_5_omni_equals_transformers(draw: str, tmp_path: Path) -> None:
    generator = Random(f"qwen2.5-omni {draw}")
    sizes, seed = drawn_sizes.qwen2_5_omni_sizes(generator), generator.randrange(1 << 31)
    print(seed, sizes)
    omni.write_tiny(tmp_path, seed, sizes=sizes)
    reference = Reference(tmp_path)
    asked = prompts(generator, reference, tmp_path)
    chosen = omni.QWEN2_5_OMNI.tiny_sizes(sizes)
    for number, each in enumerate(asked):
        each.codes = Scores(range(chosen["codes"], chosen["codec_vocabulary"]))
        each.ask(reference, speaks=number == 1, seed=seed)
    media = check_thinker(generator, tmp_path, asked)

    answers: list[ReferenceResult] = [each.answer for each in asked]
    sampling = published(Qwen2_5OmniForConditionalGeneration)
    with running(tmp_path, "talker", generator) as (talker, sampled):
        config = talker.engine.core.worker.model_runner.model.config
        drawn = [draw_parameters(generator, range(talker.engine.adapter.vocabulary), DRAWN) for _ in asked]
        for number, (each, answer) in enumerate(zip(asked, answers, strict=True)):
            inputs = talker_inputs(answer.thinker_rows, len(answer.prompt_token_ids))
            if each is asked[-1]:
                inputs = msgspec.structs.replace(inputs, tensors={**inputs.tensors, **media})
            start = partial(talker.start, inputs=inputs, voice=each.voice, seed=number)
            start_speech(start, number, drawn[number])
        talker.run()
        prompt = [config.tts_codec_mask_token_id, config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
        equal = 0
        for number, each in enumerate(asked):
            greedy = f"greedy{number}"
            equal += agreed(sampled, greedy, talker.tokens(greedy), answers[number].codec_tokens, each.codes.rows)
            for name, params in ((f"published{number}", sampling), (f"drawn{number}", drawn[number])):
                sampled.check(name, params, prompt, talker.tokens(name))
        assert equal > len(asked) * CODES // 2, "ties are rare"

    spoken = answers[1]
    sound = sound_of(tmp_path, spoken.codec_tokens, {}, asked[1].voice, seed)
    close(sound, spoken.waveform)


@DRAWS
def test_qwen3_omni_equals_transformers(draw: str, tmp_path: Path) -> None:
    generator = Random(f"qwen3-omni {draw}")
    sizes, seed = drawn_sizes.qwen3_omni_sizes(generator), generator.randrange(1 << 31)
    print(seed, sizes)
    omni.write_tiny(tmp_path, seed, family=omni.QWEN3_OMNI, sizes=sizes)
    reference = Qwen3Reference(tmp_path)
    asked = prompts(generator, reference, tmp_path)
    for each in asked:
        each.codes = Scores([reference.model.config.talker_config.codec_eos_token_id])
        with residual_scores(reference.model.talker.code_predictor) as each.residuals:
            each.ask(reference)
    media = check_thinker(generator, tmp_path, asked)

    answers: list[Qwen3Result] = [each.answer for each in asked]
    sampling = published(Qwen3OmniMoeForConditionalGeneration)
    with running(tmp_path, "talker", generator) as (talker, sampled):
        drawn = [draw_parameters(generator, range(talker.engine.adapter.vocabulary), DRAWN) for _ in asked]
        for number, (each, answer) in enumerate(zip(asked, answers, strict=True)):
            spoken = [*answer.prompt_token_ids, *answer.thinker_tokens[:-1]]
            scalars = {"prompt_tokens": len(answer.prompt_token_ids)}
            inputs = StageInputs(spoken, media if each is asked[-1] else {}, scalars)
            start = partial(talker.start, inputs=inputs, voice=each.voice, seed=number)
            start_speech(start, number, drawn[number])
        talker.run()
        equal = 0
        for number, (each, answer) in enumerate(zip(asked, answers, strict=True)):
            made = torch.tensor(talker.tokens(f"greedy{number}")).reshape(-1, sizes["groups"])
            equal += agreed(sampled, f"greedy{number}", made, answer.codes, each.codes.rows, each.residuals)
            for name, params in ((f"published{number}", sampling), (f"drawn{number}", drawn[number])):
                sampled.check(name, params, [], talker.tokens(name)[:: sizes["groups"]])
        assert equal > len(asked) * CODES // 2, "ties are rare"
    close(sound_of(tmp_path, answers[1].codes.flatten().tolist(), {}), answers[1].waveform)


@dataclass(frozen=True)
class Manner:
    """How a text is spoken, for the reference and for us."""

    asked: dict[str, Any]
    voice: str | None = None
    information: dict[str, Any] = field(default_factory=dict)


def manners(generator: Random, kind: str) -> list[Manner]:
    """Two manners of a kind of checkpoint."""
    if kind == "custom_voice":
        voices = generator.sample(TINY_VOICES, 2)
        told = Manner({"speaker": voices[1], "instruct": "Softly."}, voices[1], {"instructions": "Softly."})
        return [Manner({"speaker": voices[0], "language": "english"}, voices[0], {"language": "English"}), told]
    if kind == "voice_design":
        texts = [draw_text(generator, range(1, 9)) for _ in range(2)]
        return [Manner({"instruct": text}, None, {"instructions": text}) for text in texts]
    noise = np.random.default_rng(generator.randrange(1 << 32))
    clip = (noise.standard_normal(generator.randrange(13_000, 50_000)) * 0.1).astype(np.float32)
    text = draw_text(generator, range(1, 30))
    return [
        Manner({"ref_audio": (clip, RATE), "x_vector_only_mode": True}, None, clip_information(clip)),
        Manner({"ref_audio": (clip, RATE), "ref_text": text}, None, clip_information(clip, transcript=text)),
    ]


@DRAWS
def test_qwen3_tts_equals_qwens_package(draw: str, tmp_path: Path) -> None:
    generator = Random(f"qwen3-tts {draw}")
    sizes, seed = drawn_sizes.qwen3_tts_sizes(generator), generator.randrange(1 << 31)
    kind = generator.choice(KINDS)
    print(kind, seed, sizes)
    tts.write_tiny(tmp_path, kind, seed, sizes=sizes)
    reference = Qwen3TtsReference(tmp_path)
    cases = [(draw_text(generator, PROMPTS[1 + index]), each) for index, each in enumerate(manners(generator, kind))]
    sampling = {name: SAMPLING[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    with running(tmp_path, "talker", generator) as (talker, sampled):
        drawn = [draw_parameters(generator, range(talker.engine.adapter.vocabulary), DRAWN) for _ in cases]
        for number, (text, manner) in enumerate(cases):
            say = partial(speak, talker, text=text, voice=manner.voice, information=manner.information, seed=number)
            start_speech(say, number, drawn[number])
        talker.run()
        equal = 0
        for number, (text, manner) in enumerate(cases):
            talking = reference.model.talker
            scores = Scores([reference.model.config.talker_config.codec_eos_token_id])
            noted = partial(talking.generate, logits_processor=[scores])
            with patch.object(talking, "generate", noted), residual_scores(talking.code_predictor) as residuals:
                answer = reference.speak(text, frames=CODES - 1, **manner.asked)
            greedy = f"greedy{number}"
            equal += agreed(sampled, greedy, frames_of(talker, greedy), answer.codes, scores.rows, residuals)
            for name, params in ((f"published{number}", sampling), (f"drawn{number}", drawn[number])):
                sampled.check(name, params, [], frames_of(talker, name)[:, 0].tolist())
        assert equal > len(cases) * CODES // 2, "ties are rare"
        scalars = talker.streams(greedy)[0].scalars
        lead = talker.tokens(greedy)[: scalars.get("unheard", 0)]
    sound = sound_of(tmp_path, [*lead, *answer.codes.flatten().tolist()], scalars)
    close(sound, answer.waveform[-len(sound) :])  # the reference may keep a sample of the clip
