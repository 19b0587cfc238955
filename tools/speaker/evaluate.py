"""Says how well a checkpoint speaks, stage by stage, by transformers' own `generate()` and a recogniser."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.checkpoints.measure import generate_arguments, load_reference_model, quiet_transformers
from tools.speaker.codec import VOICES, Voice, edit_distance, encode, phones_of
from tools.speaker.layout import SIZES
from tools.speaker.recogniser import Recogniser, word_errors
from tools.speaker.sentences import DIGITS
from tools.speaker.skills import SKILLS, ask
from tools.speaker.sound import Wave, teacher_wave
from tools.speaker.tasks import held_out_tasks
from tools.speaker.teacher import speak

HELD_OUT = Path(__file__).parent / "data" / "held_out.txt"
MAX_TEXT_TOKENS, MAX_CODES = 96, 900


def held_out_sentences(count: int) -> list[str]:
    """Returns the first sentences that no corpus may hold."""
    return HELD_OUT.read_text(encoding="utf-8").splitlines()[:count]


@dataclass(frozen=True)
class Spoken:
    """What was said, and what should have been: text, wave at 24 kHz, and codes where there are any."""

    wanted: str
    text: str
    wave: Wave
    codes: list[int]


@dataclass
class Score:
    """Counts over some answers in one voice."""

    stage: str
    voice: str
    answers: int = 0
    exact: int = 0
    words: int = 0
    word_errors: int = 0
    phones: int = 0
    phone_errors: int = 0

    def __str__(self) -> str:
        """Return one line for the terminal."""
        line = f"{self.stage:8} {self.voice:8} text exact {self.exact} of {self.answers}"
        if self.words:
            line += f", word errors {self.word_errors / self.words:.3f} ({self.word_errors} of {self.words})"
        if self.phones:
            line += f", phone errors {self.phone_errors / self.phones:.3f}"
        return line


class Speaker:
    """transformers' model of a checkpoint: float32, greedy, one thread, the vocoder's noise of seed 0."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5OmniProcessor

        quiet_transformers()
        torch.set_num_threads(1)
        self.model = load_reference_model(folder)
        self.processor = Qwen2_5OmniProcessor.from_pretrained(folder)

    def inputs(self, text: str, sound: Wave | None = None, picture: Any = None) -> dict[str, Any]:
        """Returns the processor's output for a user's message, with a sound at 16 kHz or a picture before its text."""
        content: list[dict[str, str]] = [] if sound is None else [{"type": "audio"}]
        content += [] if picture is None else [{"type": "image"}]
        content += [{"type": "text", "text": text}] if text else []
        messages = [{"role": "user", "content": content}]
        prompt = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        media: dict[str, Any] = {} if sound is None else {"audio": [sound]}
        media |= {} if picture is None else {"images": [picture]}
        return dict(self.processor(text=prompt, **media, return_tensors="pt"))

    def reply(self, inputs: dict[str, Any]) -> str:
        """Returns the thinker's text."""
        ids = self.model.thinker.generate(**inputs, max_new_tokens=MAX_TEXT_TOKENS, do_sample=False)
        return str(self.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def answer(self, prompt: str, wanted: str, voice: str) -> Spoken:
        """Returns the whole chain's answer to a text."""
        inputs = self.inputs(prompt)
        codes: list[torch.Tensor] = []
        hook = self.model.token2wav.register_forward_pre_hook(lambda module, args: codes.append(args[0]))
        torch.manual_seed(0)
        try:
            sequences, wave = self.model.generate(
                **generate_arguments(inputs),
                speaker=voice,
                thinker_max_new_tokens=MAX_TEXT_TOKENS,
                thinker_do_sample=False,
                talker_max_new_tokens=MAX_CODES,
                talker_do_sample=False,
                talker_eos_token_id=[SIZES["codec_end"], SIZES["codec_pad"]],
            )
        finally:
            hook.remove()
        tokens = sequences[0, inputs["input_ids"].shape[1] :]
        text = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return Spoken(wanted, text, wave.numpy().reshape(-1), codes[0][0].tolist())

    def voice_codes(self, codes: Iterable[int], voice: str) -> Wave:
        """Returns the wave that the DiT and BigVGAN make of codes."""
        fields = self.model.speaker_map[voice]
        torch.manual_seed(0)
        with torch.no_grad():
            wave = self.model.token2wav(
                torch.tensor([list(codes)]),
                conditioning=fields["cond"].float(),
                reference_mel=fields["ref_mel"].float(),
            )
        return np.asarray(wave.reshape(-1).numpy(), np.float32)


def teacher_answers(lines: list[str], voice: Voice) -> Iterator[Spoken]:
    """Yields the teacher's own sound of each line: the floor of all errors."""
    for line, utterance in zip(lines, speak(lines, voice, wave=True), strict=True):
        codes, start = encode(utterance, voice)
        yield Spoken(line, line, teacher_wave(utterance.samples, start, len(codes)), codes.tolist())


def answers_of(stage: str, speaker: Speaker, lines: list[str], tasks: int, voice: Voice) -> Iterator[Spoken]:
    """Yields the answers of a stage: `teacher`, `codes` (its true codes in our voice), `chain` or `tasks`."""
    if stage == "tasks":
        yield from (speaker.answer(prompt, wanted, voice.name) for prompt, wanted in held_out_tasks()[:tasks])
    elif stage == "chain":
        yield from (speaker.answer(f"Say: {line}", line, voice.name) for line in lines)
    else:
        for said in teacher_answers(lines, voice):
            wave = said.wave if stage == "teacher" else speaker.voice_codes(said.codes, voice.name)
            yield Spoken(said.wanted, said.text, wave, said.codes)


def score(stage: str, answers: Iterable[Spoken], voice: Voice, recognise: Recogniser | None) -> Iterator[Score | str]:
    """Yields a line for every answer with a mistake, at the end the score. Phones are compared with the teacher's."""
    result = Score(stage, voice.name)
    for said in answers:
        result.answers += 1
        result.exact += said.text.strip() == said.wanted
        wrong = phones_of(encode(speak([said.wanted], voice, wave=False)[0], voice)[0])
        result.phones += len(wrong)
        result.phone_errors += edit_distance(wrong, phones_of(said.codes))
        heard = recognise(said.wave) if recognise else ""
        errors, words = word_errors(said.wanted, heard) if recognise else (0, 0)
        result.words += words
        result.word_errors += errors
        if errors or said.text.strip() != said.wanted:
            yield f"    {said.wanted!r}: text {said.text!r}, heard {heard!r}"
    yield result


def digits_heard(speaker: Speaker, strings: int = 10, seed: int = 11) -> tuple[int, int]:
    """Returns (spoken digits written down in their place, digits) over strings of one to four digits, both voices."""
    rng = random.Random(seed)
    right = total = 0
    for voice in VOICES.values():
        lines = [[rng.choice(DIGITS) for _ in range(rng.randrange(1, 5))] for _ in range(strings)]
        for digits, said in zip(lines, speak([f"{' '.join(line)}." for line in lines], voice, wave=True), strict=True):
            sound = (said.samples / 32768).astype(np.float32)
            reply = speaker.reply(speaker.inputs("What do you hear?", sound))
            heard = [word.strip(".,").lower() for word in reply.split()]
            right += sum(a == b for a, b in zip(digits, heard, strict=False))
            total += len(digits)
    return right, total


def evaluate(
    folder: Path,
    stages: Iterable[str],
    sentences: int,
    tasks: int,
    recognise: Recogniser | None,
    keep: Callable[..., None],
) -> Iterator[Score | str]:
    """Yields lines and scores of the stages in both voices; every answer goes to `keep(stage, voice, number, said)`."""
    speaker, lines = Speaker(folder), held_out_sentences(sentences)
    for stage in stages:
        if stage in SKILLS:
            yield from ask(stage, speaker)
            continue
        if stage == "digits":
            right, total = digits_heard(speaker)
            yield f"digits   heard {right} of {total}"
            continue
        for voice in VOICES.values():
            answers = list(answers_of(stage, speaker, lines, tasks, voice))
            for number, said in enumerate(answers):
                keep(stage, voice.name, number, said)
            yield from score(stage, answers, voice, recognise)
