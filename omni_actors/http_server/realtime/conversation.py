"""The conversation of a session: its items, the prompt that they make, and transcripts of the user's turns."""

from __future__ import annotations

import base64
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy
from msgspec import Struct, field

from omni_actors.http_server.bodies import MAX_TEXT
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.generation import MAX_MESSAGES, InputText, OutputText
from omni_actors.http_server.realtime.config import (
    Event,
    GivenMessage,
    InputSound,
    OutputSound,
    ShownPicture,
    event,
    new_id,
)
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND, RATE
from omni_actors.protocol.payloads import WordTime

MAX_IMAGE_BYTES = 64 << 20  # of a conversation
FIRST = "root"  # `previous_item_id` of an item that is to be the first
Kind = Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
ALLOWED: dict[str, tuple[type, ...]] = {
    "user": (InputText, InputSound, ShownPicture),
    "assistant": (OutputText, OutputSound),
    "system": (InputText,),
}


# ---------------------------------------------------------------------------------------------------------------------
# Items


class ItemPart(Struct, omit_defaults=True):
    """A part of an item.

    Args:
        text: the text, or the transcript of sound; that of the user's is "" until there is one.
        image: a picture as a file.
        audio: PCM of the user. The sound of answers is not kept, only its length.
        seconds: length of a spoken answer's sound that was sent, or was heard.
        words: when its words are said, if that is known.
    """

    kind: Kind
    text: str = ""
    audio: bytes = b""
    seconds: float = 0.0
    image: bytes = b""
    words: list[WordTime] = []

    def shown(self, with_audio: bool) -> dict[str, Any]:
        """The part as clients see it."""
        if self.kind == "output_audio":
            return {"type": self.kind, "transcript": self.text}
        if self.kind == "input_image":
            return {"type": self.kind}
        if self.kind != "input_audio":
            return {"type": self.kind, "text": self.text}
        sound = {"audio": base64.b64encode(self.audio).decode()} if with_audio else {}
        return {"type": self.kind, "transcript": self.text or None, **sound}

    def prompt(self) -> dict[str, Any]:
        """The part as the client library takes it."""
        if self.kind == "input_audio":
            return {"type": "audio", "audio": (numpy.frombuffer(self.audio, "<i2"), RATE)}
        if self.kind == "input_image":
            return {"type": "image", "image": self.image}
        return {"type": "text", "text": self.text}


class MessageItem(Struct, tag="message"):
    """An item; `complete` is false while its answer is made, and stays so if that was cut short."""

    id: str
    role: str
    parts: list[ItemPart]
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    @classmethod
    def of(cls, message: GivenMessage, where: str, pictures: Iterator[bytes]) -> MessageItem:
        """Convert an item of a client. Raises `HttpError` 400 for content that its role cannot have.

        Args:
            pictures: those of its event, in order, as files.
        """
        parts = []
        for index, content in enumerate(message.content):
            if not isinstance(content, ALLOWED[message.role]):
                allowed = " or ".join(kind.__struct_config__.tag for kind in ALLOWED[message.role])  # type: ignore[attr-defined]
                raise bad_field(f"{where}.content[{index}].type", f"The content of {message.role} is {allowed}.")
            if isinstance(content, InputSound) and (not content.audio or len(content.audio) % 2):
                raise bad_field(f"{where}.content[{index}].audio", "The audio must be samples of two bytes each.")
            image = next(pictures) if isinstance(content, ShownPicture) else b""
            text = getattr(content, "text", None) or getattr(content, "transcript", None) or ""
            kind: Any = content.__struct_config__.tag
            parts.append(ItemPart(kind, text, getattr(content, "audio", None) or b"", image=image))
        return cls(message.id or new_id("item"), message.role, parts)

    @classmethod
    def of_sound(cls, item_id: str, pcm: bytes) -> MessageItem:
        """A spoken turn of the user."""
        return cls(item_id, "user", [ItemPart("input_audio", audio=pcm)])

    @property
    def weight(self) -> Counter[str]:
        """What its content takes of a conversation's bounds."""
        return Counter(
            items=1,
            characters=sum(len(part.text) for part in self.parts),
            audio_bytes=sum(len(part.audio) for part in self.parts),
            audios=sum(bool(part.audio) for part in self.parts),
            image_bytes=sum(len(part.image) for part in self.parts),
            images=sum(bool(part.image) for part in self.parts),
        )

    def shown(self, *, with_audio: bool = False, with_parts: bool = True) -> dict[str, Any]:
        """The item as clients see it."""
        content = [part.shown(with_audio) for part in self.parts] if with_parts else []
        return _shown(self.id, "message", self.status, role=self.role, content=content)

    def check_truncation(self, content_index: int, end_ms: int) -> None:
        """Raise `HttpError` 400 unless this is a spoken answer with so much sound."""
        if self.role != "assistant" or content_index >= len(self.parts):
            message = "Only a part of an answer can be truncated, and this item has no such part."
            raise bad_field("content_index", message)
        part = self.parts[content_index]
        if part.kind != "output_audio" or not part.seconds:
            raise bad_field("item_id", "This item has no sound of this session that could be truncated.")
        length = math.ceil(part.seconds * 1000)
        if end_ms > length:
            raise bad_field("audio_end_ms", f"The sound of this item has {length} ms; it cannot end at {end_ms} ms.")

    def truncate(self, content_index: int, end_ms: int, characters_per_second: float | None) -> None:
        """Cut a spoken answer where the user stopped hearing it, after `check_truncation`.

        Args:
            characters_per_second: how fast answers of this session are spoken, if that is known.
        """
        part = self.parts[content_index]
        part.seconds, seconds = end_ms / 1000, part.seconds
        if part.words:
            part.text = said_until(part.text, part.words, part.seconds)
            return
        complete = self.status == "completed"
        own_rate = len(part.text) / seconds
        # The text of an answer that was cut short is longer than its sound.
        rate = own_rate if complete else min(characters_per_second or own_rate, own_rate)
        part.text = heard(part.text, part.seconds, seconds, rate, complete=complete)

    def timed(self, text: str, words: Sequence[WordTime]) -> None:
        """Take when the words of a spoken answer are said; if it was cut, cut it there, and not where it was estimated.

        Args:
            text: its transcript before it was cut.
        """
        part = self.parts[0]
        if part.text != text:
            part.text = said_until(text, words, part.seconds)
        part.words = [*words]


def heard(text: str, end: float, seconds: float, rate: float, *, complete: bool) -> str:
    """Estimate the part of a transcript that was heard until the playback of its sound was stopped.

    The model makes the text before its sound, and does not say which sound belongs to which word. While nobody else
    does, the estimate takes the speech as even, and cuts at the last whole word before that point.

    Args:
        end: seconds of sound that were played.
        seconds: length of all sound that was sent.
        rate: characters per second.
        complete: whether the sound is that of the whole text.
    """
    if complete and end >= seconds:
        return text
    count = min(int(end * rate), len(text))
    if count == len(text) or text[count].isspace() or not count:
        return text[:count].rstrip()
    words = text[:count]
    border = max((index for index, character in enumerate(words) if character.isspace()), default=-1)
    if border < 0:  # one word, or a script without spaces
        return words if not text[count].isascii() else ""
    return words[:border].rstrip()


def said_until(text: str, words: Sequence[WordTime], end: float) -> str:
    """The part of a text whose words are said by `end` seconds, with the marks behind the last one."""
    return text[: next((word.place for word in words if word.end > end), len(text))].rstrip()


class CallItem(Struct, tag="call"):
    """A call that the model has made."""

    call_id: str
    name: str = ""
    arguments: str = ""
    id: str = field(default_factory=lambda: new_id("item"))
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role = "assistant"

    @property
    def weight(self) -> Counter[str]:
        """What it takes of a conversation's bounds."""
        return Counter(items=1, characters=len(self.name) + len(self.arguments))

    @property
    def can_be_read(self) -> bool:
        """Whether its arguments are the JSON of an object, as prompts need them: a model may write anything."""
        try:
            msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return False
        return True

    def shown(self, **_: bool) -> dict[str, Any]:
        """The item as clients see it."""
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return _shown(self.id, "function_call", self.status, **call)


class ResultItem(Struct, tag="result"):
    """What a call has brought."""

    call_id: str
    output: str
    id: str
    role = "tool"
    status = "completed"

    @property
    def weight(self) -> Counter[str]:
        """What it takes of a conversation's bounds."""
        return Counter(items=1, characters=len(self.output))

    def shown(self, **_: bool) -> dict[str, Any]:
        """The item as clients see it."""
        return _shown(self.id, "function_call_output", self.status, call_id=self.call_id, output=self.output)


def _shown(item_id: str, kind: str, status: str, **content: Any) -> dict[str, Any]:
    return {"id": item_id, "object": "realtime.item", "type": kind, "status": status, **content}


# ---------------------------------------------------------------------------------------------------------------------
# The conversation

AnyItem = MessageItem | CallItem | ResultItem


class RealtimeConversation:
    """Items that the model is shown. When they become too many, the oldest are dropped.

    Args:
        audio_seconds: sound of all items together.
        max_audios: pieces of sound; `None` for no limit.
        max_images: the same of pictures.
    """

    def __init__(self, audio_seconds: float, max_audios: int | None, max_images: int | None = None) -> None:
        self.id = new_id("conv")
        self._audio_seconds = audio_seconds
        self._most: dict[str, float] = {
            "items": MAX_MESSAGES,
            "characters": MAX_TEXT,
            "audio_bytes": audio_seconds * BYTES_PER_SECOND,
            "audios": math.inf if max_audios is None else max_audios,
            "image_bytes": MAX_IMAGE_BYTES,
            "images": math.inf if max_images is None else max_images,
        }
        self._items: list[AnyItem] = []
        self._weights: dict[str, Counter[str]] = {}
        self._total = Counter[str]()

    def __iter__(self) -> Iterator[AnyItem]:
        return iter(self._items)

    @property
    def size(self) -> int:
        """Characters and bytes of sound and pictures of all items."""
        return self._total["characters"] + self._total["audio_bytes"] + self._total["image_bytes"]

    @property
    def last_id(self) -> str | None:
        """Id of the newest item."""
        return self._items[-1].id if self._items else None

    def find(self, item_id: str, param: str = "item_id") -> AnyItem:
        """An item. Raises `HttpError` 404, for the field that names it."""
        for item in self._items:
            if item.id == item_id:
                return item
        raise HttpError(404, f"The conversation has no item {item_id!r}.", param=param, code="item_not_found")

    def message(self, item_id: str) -> MessageItem | None:
        """A message; `None` if it is gone."""
        return next((item for item in self._items if item.id == item_id and isinstance(item, MessageItem)), None)

    def add(self, item: AnyItem, after: str | None = None) -> str | None:
        """Insert an item, at the end by default; returns the id of the one before it. Raises `HttpError`."""
        if any(other.id == item.id for other in self._items):
            raise bad_field("item.id", f"The conversation has an item {item.id!r} already.", "item_exists")
        if self._exceeds(item.weight):
            message = f"The conversation is limited to {self._audio_seconds:g} s of audio, {MAX_TEXT} characters, "
            message += f"{MAX_IMAGE_BYTES} bytes of pictures, and as many sounds and pictures as the model takes."
            raise HttpError(413, message, param="item", code="item_too_large")
        index = len(self._items)
        if after == FIRST:
            index = 0
        elif after is not None:
            index = self._items.index(self.find(after, "previous_item_id")) + 1
        self._items.insert(index, item)
        self._weights[item.id] = Counter()
        self.weigh(item)
        return self._items[index - 1].id if index else None

    def remove(self, item_id: str) -> None:
        """Remove an item. Raises `HttpError` 404."""
        self._items.remove(self.find(item_id))
        self._total.subtract(self._weights.pop(item_id))

    def weigh(self, item: AnyItem) -> None:
        """Count an item again, when its content has changed. An item that was removed counts nothing."""
        if item.id in self._weights:
            self._total.subtract(self._weights[item.id])
            self._weights[item.id] = item.weight
            self._total.update(item.weight)

    def drop_oldest(self) -> list[str]:
        """Drop items until the bounds hold; returns their ids. The newest item always stays."""
        dropped = []
        while len(self._items) > 1 and self._exceeds(self._total):
            dropped.append(self._items[0].id)
            self.remove(dropped[-1])
        return dropped

    def drop_half(self) -> list[str]:
        """Drop the older half of the user's turns with their answers; returns the ids, none if there is one turn."""
        turns = [index for index, item in enumerate(self._items) if item.role == "user"]
        if len(turns) < 2:
            return []
        kept = turns[(len(turns) + 1) // 2]
        dropped = [item.id for item in self._items[:kept] if item.role != "system"]
        for item_id in dropped:
            self.remove(item_id)
        return dropped

    def _exceeds(self, weight: Counter[str]) -> bool:
        return any(weight[name] > most for name, most in self._most.items())


def prompt_of(instructions: str, items: Iterable[AnyItem]) -> Sequence[dict[str, Any]]:
    """The messages, as the client library takes them.

    Calls belong to the assistant's message before them. A call that is not well-formed is left out, as it would have
    every later answer refused, and so is the result of a call that is not there.
    """
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem():
                parts = [part.prompt() for part in item.parts if part.text or part.audio or part.image]
                if parts:
                    messages.append({"role": item.role, "content": parts})
            case CallItem():
                if not item.can_be_read:
                    continue
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": item.call_id, "name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append(call)
                called.add(item.call_id)
            case ResultItem():
                if item.call_id in called:
                    messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    return messages


# ---------------------------------------------------------------------------------------------------------------------
# What is written down of the user's turns

ALONE = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # in scripts without spaces
WORD = re.compile(rf"\s*(?:[{ALONE}]|[^\W{ALONE}]+|[^\w\s])")  # or a mark
LAST_WORD = re.compile(rf"\s*(?:[{ALONE}]|[^\W{ALONE}]+)?\W*\Z")


def agreed(before: str, now: str) -> str:
    """The words with which two transcripts of a growing sound begin, without the last one now: it may go on."""
    words = zip(WORD.findall(before), WORD.findall(LAST_WORD.sub("", now, count=1)), strict=False)
    return "".join(word for word, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], words))


class TurnText:
    """What is said for sure in a turn that is still spoken: what two transcripts in a row agree on, as it stands.

    Each transcript is one of all sound so far, and goes on with what is said for sure, so nothing of it is taken back.
    """

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self.text = ""
        self.language = ""
        self._rest = ""

    def add(self, rest: str, language: str) -> str:
        """Take the next transcript, without `text`, and its language; returns what is said for sure in addition."""
        same = self.text or language == self.language
        more = agreed(self._rest, rest) if same else ""
        if not self.text:
            self.language = language
        self.text += more
        self._rest = rest[len(more) :]
        return more


def transcription_event(kind: str, item_id: str, **fields: Any) -> Event:
    """An event about what is written down of a turn."""
    kind = f"conversation.item.input_audio_transcription.{kind}"
    return event(kind, item_id=item_id, content_index=0, **fields)
