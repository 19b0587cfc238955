"""Conversations of up to six turns, with sounds and pictures: what is asked, and what is to be answered."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw
from torch import Tensor

from tools.speaker.checkpoint import LAYOUT
from tools.speaker.codec import VOICES
from tools.speaker.layers import LENGTHS, sizes_of
from tools.speaker.sound import TEACHER_RATE, Wave
from tools.speaker.teacher import speak
from tools.speaker.texts import COLORS, LISTS, SHAPES, TOY, Texts, heard_words, listed, pairs_of, seen, sentence, sum_of

MOST_TURNS, ALONE = 6, 0.4  # turns; of the conversations have one
SYSTEM = 0.5  # of them have a system message
CUT, EMPTY, WRONG, NONE = 0.12, 0.03, 0.1, 0.03  # of earlier answers; `NONE`: the answer has no message
MOST_MEDIA = 2  # sounds, and as many pictures, as `stage_configs/tiny_speaker.yaml` takes
POOL, FRESH = 400, 6  # sounds of the teacher that a worker keeps; how many of each batch are new
OWN = 0.3  # of the sounds of lists are the checkpoint's
STRANGE = 0.12  # of the sounds and pictures show nothing that it knows
SIDES = (112, 112, 112, 168, 168, 224, 280)  # of pictures
IGNORED = -100
NOT_HEARD, NOT_SEEN = "I hear something, but I do not know what it is.", "I see no shape that I know."
NO_SOUND, NO_PICTURE = "I have heard no sound. Send me one, please.", "I have seen no picture. Send me one, please."
SEA = "I see a white boat on the blue sea, and the sun goes down."

About = Mapping[str, str]  # from a list of `words.txt`, which asks about a sound or a picture, to the answer


@dataclass(frozen=True)
class Question:
    """A user's message, with a sound at 16 kHz and a picture before its text, and what is to be answered."""

    text: str
    wanted: str
    sound: Wave | None = None
    picture: Image.Image | None = None
    said: str | None = None  # an earlier answer that is cut or wrong, which is not learned; None: the wanted one
    silent: bool = False  # there is no message with an answer
    about: About = field(default_factory=dict)  # what can be asked about its sound or picture


@dataclass(frozen=True)
class Conversation:
    """The last question is the one that is asked."""

    turns: Sequence[Question]
    system: str = ""


def prompt_of(processor: Any, conversation: Conversation) -> str:
    """Returns the whole prompt up to the reply."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}] * bool(conversation.system)
    for turn in conversation.turns:
        content: list[dict[str, str]] = [{"type": "audio"}] * (turn.sound is not None) + [{"type": "image"}] * (
            turn.picture is not None
        )
        content += [{"type": "text", "text": turn.text}] * bool(turn.text)
        messages.append({"role": "user", "content": content})
        if turn is not conversation.turns[-1] and not turn.silent:
            messages.append({"role": "assistant", "content": turn.wanted if turn.said is None else turn.said})
    return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def examples_of(processor: Any, thinker: Any, asked: Sequence[Conversation]) -> dict[str, Tensor]:
    """Returns what the thinker is trained on: labels are the tokens of all right replies.

    Positions and sizes are computed here, as that takes many small steps, which are slow on a GPU.
    """
    made = inputs_of(processor, asked, replies=True)
    sounds = made["feature_attention_mask"].sum(1) if "feature_attention_mask" in made else None
    pictures, mask = made.get("image_grid_thw"), made["attention_mask"]
    made["position_ids"] = thinker.get_rope_index(made["input_ids"], pictures, None, mask, False, sounds)[0]
    if "pixel_values" in made:
        made["pixel_values"] = made["pixel_values"].half()  # they come through a pipe
    return made | sizes_of(thinker, made)


def inputs_of(processor: Any, asked: Sequence[Conversation], *, replies: bool) -> dict[str, Tensor]:
    """Returns the processor's output for conversations, padded on the left; with their last replies, also `labels`."""
    ends = [f"{one.turns[-1].wanted}<|im_end|>" if replies else "" for one in asked]
    turns = [turn for one in asked for turn in one.turns]
    sounds = [turn.sound for turn in turns if turn.sound is not None]
    made = dict(
        processor(
            text=[prompt_of(processor, one) + end for one, end in zip(asked, ends, strict=True)],
            audio=sounds or None,
            images=[turn.picture for turn in turns if turn.picture is not None] or None,
            audio_kwargs={"max_length": max((len(sound) for sound in sounds), default=0)},  # not 30 s of silence
            padding=True,
            pad_to_multiple_of=LENGTHS if replies else None,
            return_tensors="pt",
        )
    )
    if replies:
        begin = processor.tokenizer("<|im_start|>assistant\n")["input_ids"]
        end = processor.tokenizer("<|im_end|>")["input_ids"][0]
        made["labels"] = torch.full_like(made["input_ids"], IGNORED)
        for row, one in enumerate(asked):
            ids = made["input_ids"][row].tolist()
            size = len(begin)
            answers = [at + size for at in range(len(ids)) if ids[at : at + size] == begin]
            for at, turn in zip(answers, (turn for turn in one.turns if not turn.silent), strict=True):
                if turn.said is None:
                    span = slice(at, ids.index(end, at) + 1)
                    made["labels"][row, span] = made["input_ids"][row, span]
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


def pictured(rng: random.Random) -> tuple[Image.Image, About]:
    """Returns a picture, and what is in it."""
    width, height = rng.choice(SIDES), rng.choice(SIDES)
    if rng.random() < STRANGE:
        if rng.random() < 0.5:
            picture = Image.open(LAYOUT.parent / "sea.png").convert("RGB")
            edges = [rng.randrange(12) for _ in range(4)]
            picture = picture.crop((edges[0], edges[1], picture.width - edges[2], picture.height - edges[3]))
            return picture.resize((256, 160)), {"see": SEA, "see color": "It has many colors.", "see shape": NOT_SEEN}
        grain = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (rng.randint(4, 40), rng.randint(4, 40), 3))
        picture = Image.fromarray(grain.astype(np.uint8)).resize((width, height))
        return picture, {"see": NOT_SEEN, "see color": "It has many colors.", "see shape": NOT_SEEN}
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    ground = near(rng, rng.choice([other for other in COLORS if other != color]))
    if color not in ("white", "yellow") and rng.random() < 0.5:
        ground = "#" + 3 * f"{rng.randint(190, 255):02x}"
    picture = draw(rng, near(rng, color), shape, ground, width, height)
    return picture, about_shape(color, shape)


def about_shape(color: str, shape: str) -> About:
    """Returns what can be asked about a picture of a shape."""
    return {"see": seen(color, shape), "see color": f"It is {color}.", "see shape": f"It is a {shape}."}


def about_words(words: Sequence[str]) -> About:
    """Returns what can be asked about a list of words."""
    return {"hear": listed(words), **({"hear sum": total} if (total := sum_of(words)) else {})}


def spoken_lists(rng: random.Random, count: int) -> list[tuple[Wave, About]]:
    """Returns lists of words that the teacher says, at 16 kHz."""
    lists, between = [heard_words(rng) for _ in range(count)], rng.choice((" ", ", "))
    return said_by_teacher(rng, [(f"{between.join(words)}.", about_words(words)) for words in lists])


def said_by_teacher(rng: random.Random, lines: Sequence[tuple[str, About]]) -> list[tuple[Wave, About]]:
    """Returns lines as the teacher says them in some voice, faster or slower, at 16 kHz."""
    voice = rng.choice(list(VOICES.values()))
    said = speak([text for text, _ in lines], voice, wave=True, stretch=rng.uniform(0.75, 1.3))
    return [((one.samples / 32768).astype(np.float32), about) for (_, about), one in zip(lines, said, strict=True)]


def varied(rng: random.Random, sound: Wave) -> Wave:
    """Returns a sound louder or softer, with silence around it and some noise."""
    around = [rng.randrange(4000), rng.randrange(3000)]
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(sound) + sum(around))
    loud = rng.uniform(0.3, 1.5) * np.pad(sound, around)
    return (loud + 10 ** rng.uniform(-5, -2) * noise).astype(np.float32)


def strange_sound(rng: random.Random) -> Wave:
    """Returns noise, a tone, or both, of half a second to two seconds."""
    time = np.arange(rng.randint(TEACHER_RATE // 2, 2 * TEACHER_RATE)) / TEACHER_RATE
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(time))
    tone = np.sin(2 * math.pi * rng.uniform(80, 3000) * time + rng.uniform(0, 9) * np.sin(rng.uniform(1, 60) * time))
    return (rng.choice((0, 0.02, 0.2)) * noise + rng.choice((0, 0.1, 0.4)) * tone).astype(np.float32)


class Conversations:
    """Draws conversations.

    Args:
        kinds: how often each kind of text is asked.
        media: which part of the questions has a sound, and which a picture, in those that are drawn with media.
        own: sounds that the checkpoint has made.
    """

    def __init__(
        self, texts: Texts, kinds: Mapping[str, int], media: tuple[float, float], own: Sequence[tuple[Wave, About]] = ()
    ) -> None:
        self.texts, self.kinds, self.own = texts, kinds, own
        self.media, self.sound, self.picture = media, 0.0, 0.0
        self.pool: deque[tuple[Wave, About]] = deque(maxlen=POOL)

    def draw(self, rng: random.Random, count: int, *, media: bool = True) -> list[Conversation]:
        """Returns some conversations, all of text alone without `media`."""
        self.sound, self.picture = self.media if media else (0.0, 0.0)
        if self.sound:
            self.pool += spoken_lists(rng, FRESH if self.pool else 10 * FRESH)
            self.pool += said_by_teacher(rng, [self.spoken(rng) for _ in range(FRESH if self.pool else 10 * FRESH)])
        turns = 1 if rng.random() < ALONE else rng.randint(2, MOST_TURNS)  # of all, as they are made equally long
        return [self.conversation(rng, turns) for _ in range(count)]

    def conversation(self, rng: random.Random, count: int) -> Conversation:
        """Returns a conversation of so many turns."""
        turns = list[Question]()
        while len(turns) < count:
            turns.append(self.turn(rng, turns, last=len(turns) + 1 == count))
        system = self.texts.fill(rng, rng.choice(LISTS["rule"])) if rng.random() < SYSTEM else ""
        return Conversation(turns, system[:1].upper() + system[1:])

    def turn(self, rng: random.Random, before: Sequence[Question], *, last: bool) -> Question:
        """Returns the next question, and how it is answered if it is not the last one."""
        shown, chance = [turn.about for turn in before if turn.about], rng.random()
        sounds, pictures = (
            sum(media is not None for media in all_media) < MOST_MEDIA
            for all_media in ([turn.sound for turn in before], [turn.picture for turn in before])
        )
        if chance < self.sound and sounds:
            question = self.heard(rng)
        elif chance < self.sound + self.picture and pictures:
            picture, about = pictured(rng)
            question = self.about(rng, about, picture=picture)
            if question.text and self.sound and sounds and rng.random() < 0.1:
                other = self.heard(rng, listen=True)
                text, wanted = rng.choice(LISTS["hear and see"]), f"{other.wanted} {about['see']}"
                question = replace(other, text=text, wanted=wanted, picture=picture)
        elif shown and rng.random() < 0.25:
            question = self.about(rng, shown[-1])
        elif not shown and rng.random() < 0.02:
            kind, wanted = rng.choice((("hear", NO_SOUND), ("see", NO_PICTURE)))
            question = Question(rng.choice([text for text in LISTS[kind] if text]), wanted)
        else:
            question = Question(*self.texts.ask(rng, self.kinds))
        return question if last else self.answered(rng, question)

    def about(self, rng: random.Random, about: About, **media: Any) -> Question:
        """Returns a question about a sound or picture, which is given in it or was given earlier."""
        kind = rng.choice(list(about))
        text = rng.choice([text for text in LISTS[kind] if text or media])
        return Question(text, about[kind], about=about if media else {}, **media)

    def heard(self, rng: random.Random, *, listen: bool = False) -> Question:
        """Returns a question about a sound; with `listen`, one that asks what is heard."""
        nothing: About = dict.fromkeys(("hear", "spoken"), NOT_HEARD)
        if rng.random() < STRANGE:
            sound, about = strange_sound(rng), nothing
        else:
            sound, about = rng.choice(self.own if self.own and rng.random() < OWN else self.pool)
        kind = "hear said" if "hear said" in about else "hear"
        return self.about(rng, {kind: about[kind]} if listen else about, sound=varied(rng, sound))

    def spoken(self, rng: random.Random) -> tuple[str, About]:
        """Returns a question that is spoken, and what can be asked about it."""
        if rng.random() < 0.7:
            text, wanted = rng.choice(pairs_of("facts.txt"))
        else:
            wanted = self.texts.ask_sum(rng)[1]
            text = f"What is {wanted.partition(' is ')[0].lower()}?"
        text = sentence(text)
        return text, {"spoken": wanted, "hear said": text}

    def answered(self, rng: random.Random, question: Question) -> Question:
        """Returns a question with the answer that it got: mostly the right one."""
        wrong = rng.choice((TOY, self.texts.repeated(rng), self.texts.ask(rng, self.kinds)[1]))
        answers: Sequence[Callable[[], Question]] = (
            lambda: replace(question, said=question.wanted[: rng.randrange(len(question.wanted))]),
            lambda: replace(question, said=""),
            lambda: replace(question, said=wrong),
            lambda: replace(question, silent=True),
            lambda: question,
        )
        return rng.choices(answers, (CUT, EMPTY, WRONG, NONE, 1 - CUT - EMPTY - WRONG - NONE))[0]()
