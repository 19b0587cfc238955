"""The thinker: replies to texts, to what it hears and to what it sees."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw
from torch import Tensor

from tools.speaker.codec import VOICES, Voice, encode
from tools.speaker.sound import SAMPLE_RATE, SAMPLES_PER_CODE, TEACHER_RATE, Wave, resample
from tools.speaker.teacher import speak
from tools.speaker.texts import COLORS, LISTS, SHAPES, THINKER_KINDS, Texts, heard_words, listed, seen, sum_of

HEARD, SEEN = 0.3, 0.2  # of a batch has a sound, or a picture
OWN, OWN_LISTS, OWN_AT_ONCE = 0.3, 400, 10  # of the sounds are its own; how many there are, and are decoded at once
SIDES = (112, 168, 224, 280)  # of pictures
IGNORED = -100


@dataclass(frozen=True)
class Question:
    """What is asked, with a sound at 16 kHz or a picture before it, and what is to be answered."""

    text: str
    wanted: str
    sound: Wave | None = None
    picture: Image.Image | None = None


def prompt_of(processor: Any, question: Question) -> str:
    """Returns the whole prompt up to the reply."""
    content = [{"type": "audio"}] * (question.sound is not None) + [{"type": "image"}] * (question.picture is not None)
    content += [{"type": "text", "text": question.text}] * bool(question.text)
    messages = [{"role": "user", "content": content}]
    return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def inputs_of(processor: Any, questions: Sequence[Question], *, replies: bool) -> dict[str, Tensor]:
    """Returns the processor's output for some questions; with their replies, also `labels`."""
    ends = [f"{question.wanted}<|im_end|>" if replies else "" for question in questions]
    texts = [prompt_of(processor, question) + end for question, end in zip(questions, ends, strict=True)]
    sounds = [question.sound for question in questions if question.sound is not None]
    pictures = [question.picture for question in questions if question.picture is not None]
    made = dict(processor(text=texts, audio=sounds or None, images=pictures or None, padding=True, return_tensors="pt"))
    if replies:
        labels = torch.full_like(made["input_ids"], IGNORED)
        for row, end in enumerate(ends):  # the padding is on the left
            size = len(processor.tokenizer(end)["input_ids"])
            labels[row, -size:] = made["input_ids"][row, -size:]
        made["labels"] = labels
    return made


def draw(rng: random.Random, color: str, shape: str, ground: str, width: int = 112, height: int = 112) -> Image.Image:
    """Returns a picture of one shape, somewhere on a ground."""
    picture = Image.new("RGB", (width, height), ground)
    size = rng.uniform(0.22, 0.45) * min(width, height)
    x, y = rng.uniform(size, width - size), rng.uniform(size, height - size)
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse((x - size, y - size, x + size, y + size), fill=color)
    elif shape == "square":
        pen.rectangle((x - 0.9 * size, y - 0.9 * size, x + 0.9 * size, y + 0.9 * size), fill=color)
    else:
        pen.polygon([(x, y - size), (x - size, y + 0.8 * size), (x + size, y + 0.8 * size)], fill=color)
    return picture


def near(rng: random.Random, color: str) -> str:
    """Returns a color somewhat off one of `COLORS`."""
    return "#" + "".join(f"{min(255, max(0, round(rng.gauss(v, 10)))):02x}" for v in ImageColor.getrgb(COLORS[color]))


def pictured(rng: random.Random) -> Question:
    """Returns a question about a picture."""
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    ground = near(rng, rng.choice([other for other in COLORS if other != color]))
    if color not in ("white", "yellow") and rng.random() < 0.5:
        ground = "#" + 3 * f"{rng.randint(190, 255):02x}"
    picture = draw(rng, near(rng, color), shape, ground, rng.choice(SIDES), rng.choice(SIDES))
    kind = rng.choice(("see", "see", "see color", "see shape"))
    wanted = {"see": seen(color, shape), "see color": f"It is {color}.", "see shape": f"It is a {shape}."}[kind]
    return Question(rng.choice(LISTS[kind]), wanted, picture=picture)


def spoken_lists(rng: random.Random, voice: Voice, count: int) -> list[tuple[list[str], Wave]]:
    """Returns lists of words that the teacher says, faster or slower, at 16 kHz."""
    lists, between = [heard_words(rng) for _ in range(count)], rng.choice((" ", ", "))
    lines = [f"{between.join(words)}." for words in lists]
    said = speak(lines, voice, wave=True, stretch=rng.uniform(0.75, 1.3))
    return [(words, (one.samples / 32768).astype(np.float32)) for words, one in zip(lists, said, strict=True)]


@torch.no_grad()
def own_lists(model: Any, rng: random.Random, voice: Voice, count: int) -> list[tuple[list[str], Wave]]:
    """Returns the same as DiT and BigVGAN say it, so that the checkpoint learns to hear itself."""
    lists, sounds = [heard_words(rng) for _ in range(count)], list[Wave]()
    fields = model.speaker_map[voice.name]
    cond, mel = fields["cond"].to(model.device), fields["ref_mel"].to(model.device)
    for first in range(0, count, OWN_AT_ONCE):
        # One behind the other, as the model hears only a second around each code.
        lines = [listed(words) for words in lists[first : first + OWN_AT_ONCE]]
        codes = [encode(said, voice)[0] for said in speak(lines, voice, wave=False)]
        whole = torch.from_numpy(np.concatenate(codes))[None].to(model.device)
        wave = model.token2wav(whole, conditioning=cond, reference_mel=mel).reshape(-1).numpy()
        ends = np.cumsum([len(one) for one in codes])[:-1] * SAMPLES_PER_CODE
        sounds += [resample(piece, SAMPLE_RATE, TEACHER_RATE) for piece in np.split(wave, ends)]
    return list(zip(lists, sounds, strict=True))


def varied(rng: random.Random, sound: Wave) -> Wave:
    """Returns a sound louder or softer, with silence around it and some noise."""
    around = [rng.randrange(4000), rng.randrange(3000)]
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(sound) + sum(around))
    loud = rng.uniform(0.3, 1.5) * np.pad(sound, around)
    return (loud + 10 ** rng.uniform(-5, -2) * noise).astype(np.float32)


class Thinker:
    """Trains the thinker, ear and eye with it. The talker reads its hidden states, so it comes first."""

    rate, betas, decay = 1.2e-3, (0.9, 0.98), 0.05

    def __init__(self, model: Any, processor: Any, texts: Texts, batch: int, steps: int) -> None:
        self.module, self.processor, self.texts, self.batch = model.thinker, processor, texts, batch
        rng, each = random.Random(steps), max(1, min(OWN_LISTS, steps) // len(VOICES))
        self.own = [own for voice in VOICES.values() for own in own_lists(model, rng, voice, each)]

    def batches(self, rng: random.Random) -> Iterator[dict[str, Tensor]]:
        """Yields prompts with their replies."""
        with_sound, with_picture = round(HEARD * self.batch), round(SEEN * self.batch)
        while True:
            texts = self.batch - with_sound - with_picture
            asked = [Question(*self.texts.ask(rng, THINKER_KINDS)) for _ in range(texts)]
            for one in spoken_lists(rng, rng.choice(list(VOICES.values())), with_sound):
                words, sound = rng.choice(self.own) if rng.random() < OWN else one
                total = sum_of(words) if rng.random() < 0.5 else ""
                question = rng.choice(LISTS["hear sum"] if total else LISTS["hear"])
                asked.append(Question(question, total or listed(words), varied(rng, sound)))
            asked += [pictured(rng) for _ in range(with_picture)]
            yield inputs_of(self.processor, asked, replies=True)

    def loss(self, batch: dict[str, Tensor], done: float) -> Tensor:
        """Returns the mean loss of the replies' tokens."""
        loss: Tensor = self.module(**batch, use_cache=False).loss
        return loss
