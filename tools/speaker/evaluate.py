"""Asks a checkpoint for what it is to know, hear, see and say, through transformers' own `generate()`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.checkpoints.measure import generate_arguments, load_reference_model
from tools.speaker.codec import VOICES, edit_distance, phones_of
from tools.speaker.judge import Judge, held_out_speech
from tools.speaker.recogniser import Recogniser, word_errors
from tools.speaker.sound import Wave
from tools.speaker.texts import COLORS, SHAPES, TOY, lines_of, listed, pairs_of, seen, sum_of
from tools.speaker.conversations import Conversation, Question, draw, inputs_of, spoken_lists

MAX_TEXT_TOKENS, MAX_CODES = 96, 900


class Speaker:
    """transformers' model of a checkpoint: float32, greedy, one thread, the vocoder's noise of seed 0."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5OmniProcessor

        torch.set_num_threads(1)
        self.model, self.processor = load_reference_model(folder), Qwen2_5OmniProcessor.from_pretrained(folder)
        config = self.model.config.talker_config
        self.ends = [config.tts_codec_end_token_id, config.tts_codec_pad_token_id]

    def reply(self, question: Question) -> str:
        """Returns the thinker's text."""
        inputs = inputs_of(self.processor, [question], replies=False)
        ids = self.model.thinker.generate(**inputs, max_new_tokens=MAX_TEXT_TOKENS, do_sample=False)
        return self.decode(ids, inputs)

    def decode(self, ids: torch.Tensor, inputs: dict[str, Any]) -> str:
        """Returns the text behind the prompt."""
        return str(self.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def say(self, prompt: str, voice: str) -> tuple[str, list[int], Wave]:
        """Returns the whole chain's answer to a text: its own text, codes and wave at 24 kHz."""
        inputs, codes = inputs_of(self.processor, [Question(prompt, "")], replies=False), list[torch.Tensor]()
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
                talker_eos_token_id=self.ends,
            )
        finally:
            hook.remove()
        return self.decode(sequences, inputs), codes[0][0].tolist(), wave.numpy().reshape(-1)


def pictures() -> Iterator[Question]:
    """Yields each shape in each color on white and on two other colors, with three questions about each."""
    rng = random.Random(5)
    for color in COLORS:
        for shape in SHAPES:
            others = [other for other in COLORS if other != color]
            for ground in ("white" if color not in ("white", "yellow") else "black", *rng.sample(others, 2)):
                picture = draw(rng, COLORS[color], shape, COLORS[ground])
                yield Question("What do you see?", seen(color, shape), picture=picture)
                yield Question("What color is it?", f"It is {color}.", picture=picture)
                yield Question("What shape is it?", f"It is a {shape}.", picture=picture)


def sounds() -> Iterator[Question]:
    """Yields lists of words that the teacher says in both voices, and sums of two digits."""
    rng = random.Random(23)
    for voice in VOICES.values():
        for words, sound in spoken_lists(rng, voice, 60):
            yield Question("What do you hear?", listed(words), sound)
            if total := sum_of(words):
                yield Question("What is the sum?", total, sound)


ASKED: dict[str, Callable[[], Iterator[Question]]] = {
    "tasks": lambda: (Question(*pair) for pair in pairs_of("tasks.txt")),
    "facts": lambda: (Question(*pair) for pair in pairs_of("facts.txt")),
    "spelling": lambda: (Question(f"Spell {w}.", f"{', '.join(w.upper())}.") for w in lines_of("spelling.txt")),
    "strange": lambda: (Question(text, TOY) for text in lines_of("strange.txt")),
    "pictures": pictures,
    "sounds": sounds,
}
STAGES = (*ASKED, "chain")


def ask(stage: str, speaker: Speaker) -> Iterator[str]:
    """Yields a line for every answer that is not the wanted one, at the end how many are."""
    exact = asked = 0
    for question in ASKED[stage]():
        reply = speaker.reply(question).strip()
        exact, asked = exact + (reply == question.wanted), asked + 1
        if reply != question.wanted:
            yield f"    {question.text!r}: {reply!r} for {question.wanted!r}"
    yield f"{stage:8} text exact {exact} of {asked}"


def chain(speaker: Speaker, sentences: int, recognise: Recogniser | None) -> Iterator[str]:
    """Yields how well held-out sentences are said in each voice; words only with a recogniser."""
    judge = Judge.load()
    for voice in VOICES:
        exact, phones, words, frames = 0, np.zeros(2, int), np.zeros(2, int), list[float]()
        for text, _, true_codes in held_out_speech()[:sentences]:
            said, codes, wave = speaker.say(f"Say: {text}", voice)
            wanted = phones_of(true_codes)  # the same in both voices
            exact += said.strip() == text
            phones += edit_distance(wanted, phones_of(codes)), len(wanted)
            frames.append(judge.wrong_frames(wave, codes))
            words += word_errors(text, recognise(wave)) if recognise else (0, 0)
        line = f"chain    {voice:8} text exact {exact} of {sentences}, phone errors {phones[0] / phones[1]:.3f}"
        line += f", wrong frames {np.mean(frames):.3f}"
        yield line + (f", word errors {words[0] / words[1]:.3f} ({words[0]} of {words[1]})" if recognise else "")
