"""Asks a checkpoint for what it is to know, hear, see and say, through transformers' own `generate()`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.checkpoints.reference import generate_arguments, load_reference_model
from tools.speaker.codec import VOICES
from tools.speaker.conversations import Conversation, Question, about_shape, draw, inputs_of, spoken_lists
from tools.speaker.judge import Judge, edit_distance, held_out_speech, phones_of
from tools.speaker.recogniser import Recogniser, word_errors
from tools.speaker.sound import Wave
from tools.speaker.texts import COLORS, SHAPES, TOY, lines_of, pairs_of

MAX_TEXT_TOKENS, MAX_CODES = 96, 900
LENGTHS = {"thinker_max_new_tokens": MAX_TEXT_TOKENS, "talker_max_new_tokens": MAX_CODES}
GREEDY = {"thinker_do_sample": False, "talker_do_sample": False}
GUIDANCE = 1.0  # as in stage_configs/tiny_speaker.yaml
PLAIN = {
    **{"see": "What do you see?", "see color": "What color is it?", "see shape": "What shape is it?"},
    **{"hear": "What do you hear?", "hear sum": "What is the sum?"},
}


class Speaker:
    """transformers' model of a checkpoint: float32, greedy, one thread, the vocoder's noise of seed 0."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5OmniProcessor

        torch.set_num_threads(1)
        self.model, self.processor = load_reference_model(folder), Qwen2_5OmniProcessor.from_pretrained(folder)
        config = self.model.config.talker_config
        self.ends = [config.tts_codec_end_token_id, config.tts_codec_pad_token_id]

    def reply(self, conversation: Conversation) -> str:
        """Returns the thinker's text."""
        inputs = inputs_of(self.processor, [conversation], replies=False)
        ids = self.model.thinker.generate(**inputs, max_new_tokens=MAX_TEXT_TOKENS, do_sample=False)
        return self.decode(ids, inputs)

    def decode(self, ids: torch.Tensor, inputs: dict[str, Any]) -> str:
        """Returns the text behind the prompt."""
        return str(self.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def say(self, prompt: str, voice: str) -> tuple[str, list[int], Wave]:
        """Returns the whole chain's answer to a text: its own text, codes and wave at 24 kHz."""
        asked, codes = Conversation([Question(prompt, "")]), list[torch.Tensor]()
        inputs = inputs_of(self.processor, [asked], replies=False)
        hook = self.model.token2wav.register_forward_pre_hook(lambda module, args: codes.append(args[0]))
        torch.manual_seed(0)
        try:
            given = {"speaker": voice, "talker_eos_token_id": self.ends, "token2wav_guidance_scale": GUIDANCE}
            sequences, wave = self.model.generate(**generate_arguments(inputs), **given, **LENGTHS, **GREEDY)
        finally:
            hook.remove()
        return self.decode(sequences, inputs), codes[0][0].tolist(), wave.numpy().reshape(-1)


def pictures() -> Iterator[Conversation]:
    """Yields each shape in each color on white and on two other colors, with three questions about each."""
    rng = random.Random(5)
    for color in COLORS:
        for shape in SHAPES:
            others = [other for other in COLORS if other != color]
            for ground in ("white" if color not in ("white", "yellow") else "black", *rng.sample(others, 2)):
                picture = draw(rng, COLORS[color], shape, COLORS[ground])
                for kind, wanted in about_shape(color, shape).items():
                    yield Conversation([Question(PLAIN[kind], wanted, picture=picture)])


def sounds() -> Iterator[Conversation]:
    """Yields lists of words that the teacher says, and sums of two digits."""
    rng = random.Random(23)
    for sound, about in [one for _ in range(4) for one in spoken_lists(rng, 30)]:
        for kind, wanted in about.items():
            yield Conversation([Question(PLAIN[kind], wanted, sound)])


def conversations() -> Iterator[Conversation]:
    """Yields each conversation of data/conversations.txt up to each of its three questions."""
    for line in lines_of("conversations.txt"):
        system, *texts = line.split("|")
        turns = [Question(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
        yield from (Conversation(turns[:count], system) for count in range(1, len(turns) + 1))


def asked(pairs: Iterable[tuple[str, str]]) -> Iterator[Conversation]:
    """Yields prompts with their replies, each alone."""
    yield from (Conversation([Question(*pair)]) for pair in pairs)


ASKED: dict[str, Callable[[], Iterator[Conversation]]] = {
    "conversations": conversations,
    "tasks": lambda: asked(pairs_of("tasks.txt")),
    "facts": lambda: asked(pairs_of("facts.txt")),
    "spelling": lambda: asked((f"Spell {word}.", f"{', '.join(word.upper())}.") for word in lines_of("spelling.txt")),
    "strange": lambda: asked((text, TOY) for text in lines_of("strange.txt")),
    "pictures": pictures,
    "sounds": sounds,
}
# What is said in both voices: sentences that no training has seen, and what people try first.
SAID: dict[str, Callable[[], Sequence[tuple[str, str]]]] = {
    "chain": lambda: [(f"Say: {text}", text) for text, _, _ in held_out_speech()],
    "sentences": lambda: [(f"Say: {text}", text) for text in lines_of("sentences.txt")],
    "first": lambda: pairs_of("first.txt"),
}
STAGES = (*ASKED, *SAID)


def ask(stage: str, speaker: Speaker) -> Iterator[str]:
    """Yields a line for every answer that is not the wanted one, at the end how many are."""
    exact = count = 0
    for conversation in ASKED[stage]():
        reply, question = speaker.reply(conversation).strip(), conversation.turns[-1]
        exact, count = exact + (reply == question.wanted), count + 1
        if reply != question.wanted:
            yield f"    {question.text!r}: {reply!r} for {question.wanted!r}"
    yield f"{stage:8} text exact {exact} of {count}"


def say(stage: str, speaker: Speaker, count: int, recognise: Recogniser | None) -> Iterator[str]:
    """Yields how well the first `count` replies are said in each voice; words only with a recogniser."""
    judge, true_codes = Judge.load(), {text: codes for text, _, codes in held_out_speech()}
    for voice in VOICES:
        exact, phones, words, frames = 0, np.zeros(2, int), np.zeros(2, int), list[float]()
        pairs = SAID[stage]()[:count]
        for prompt, wanted in pairs:
            said, codes, wave = speaker.say(prompt, voice)
            exact += said.strip() == wanted
            if wanted in true_codes:  # the same phones in both voices
                true = phones_of(true_codes[wanted])
                phones += edit_distance(true, phones_of(codes)), len(true)
            frames.append(judge.wrong_frames(wave, codes))
            words += (errors := word_errors(wanted, heard := recognise(wave))) if recognise else (0, 0)
            if recognise and errors[0]:
                yield f"    {wanted!r}: heard {heard!r}"
        line = f"{stage:8} {voice:8} text exact {exact} of {len(pairs)}, wrong frames {np.mean(frames):.3f}"
        line += f", phone errors {phones[0] / phones[1]:.3f}" if phones[1] else ""
        yield line + (f", word errors {words[0] / words[1]:.3f} ({words[0]} of {words[1]})" if recognise else "")
