"""The items of a conversation: what was said by whom, as text or as sound."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy

from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.realtime.client_events import InputSound, InputText, Message, OutputSound, OutputText
from omni_actors.http_server.realtime.heard import heard
from omni_actors.http_server.realtime.server_events import new_id
from omni_actors.http_server.realtime.session_config import BYTES_PER_SECOND, RATE

Kind = Literal["input_text", "input_audio", "output_text", "output_audio"]
ALLOWED: dict[str, tuple[type, ...]] = {
    "user": (InputText, InputSound),
    "assistant": (OutputText, OutputSound),
    "system": (InputText,),
}


class Weight(NamedTuple):
    """What items take of a conversation's bounds."""

    characters: int = 0
    audio_bytes: int = 0
    audios: int = 0

    def __add__(self, other: tuple[int, ...]) -> Weight:  # type: ignore[override]
        return Weight(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __sub__(self, other: tuple[int, ...]) -> Weight:
        return Weight(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass
class Part:
    """A part of an item.

    Args:
        text: the text, or the transcript of sound; that of the user's is "" until there is one.
        audio: PCM of the user. The sound of answers is not kept, only its length.
        seconds: length of a spoken answer's sound that was sent.
    """

    kind: Kind
    text: str = ""
    audio: bytes = b""
    seconds: float = 0.0

    def shown(self, with_audio: bool) -> dict[str, Any]:
        """The part as clients see it."""
        if self.kind == "output_audio":
            return {"type": self.kind, "transcript": self.text}
        if self.kind != "input_audio":
            return {"type": self.kind, "text": self.text}
        sound = {"audio": base64.b64encode(self.audio).decode()} if with_audio else {}
        return {"type": self.kind, "transcript": self.text or None, **sound}

    def prompt(self) -> dict[str, Any]:
        """The part as the client library takes it."""
        if self.kind == "input_audio":
            return {"type": "audio", "audio": (numpy.frombuffer(self.audio, "<i2"), RATE)}
        return {"type": "text", "text": self.text}


@dataclass
class Item:
    """An item; `complete` is false while its answer is made, and stays so if that was cut short."""

    id: str
    role: str
    parts: list[Part]
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    @classmethod
    def of(cls, message: Message, where: str) -> Item:
        """Convert an item of a client. Raises `HttpError` 400 for content that its role cannot have."""
        parts = []
        for index, content in enumerate(message.content):
            if not isinstance(content, ALLOWED[message.role]):
                allowed = " or ".join(kind.__struct_config__.tag for kind in ALLOWED[message.role])  # type: ignore[attr-defined]
                raise bad_field(f"{where}.content[{index}].type", f"The content of {message.role} is {allowed}.")
            if isinstance(content, InputSound) and (not content.audio or len(content.audio) % 2):
                raise bad_field(f"{where}.content[{index}].audio", "The audio must be samples of two bytes each.")
            parts.append(_part(content))
        return cls(message.id or new_id("item"), message.role, parts)

    @classmethod
    def of_sound(cls, item_id: str, pcm: bytes) -> Item:
        """A spoken turn of the user."""
        return cls(item_id, "user", [Part("input_audio", audio=pcm)])

    @property
    def weight(self) -> Weight:
        """What its content takes of a conversation's bounds."""
        return Weight(
            sum(len(part.text) for part in self.parts),
            sum(len(part.audio) for part in self.parts),
            sum(bool(part.audio) for part in self.parts),
        )

    def shown(self, *, with_audio: bool = False, with_parts: bool = True) -> dict[str, Any]:
        """The item as clients see it."""
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "role": self.role,
            "status": self.status,
            "content": [part.shown(with_audio) for part in self.parts] if with_parts else [],
        }

    def check_truncation(self, content_index: int, end_ms: int) -> None:
        """Raise `HttpError` 400 unless this is a spoken answer with so much sound."""
        if self.role != "assistant" or content_index >= len(self.parts):
            message = "Only a part of an answer can be truncated, and this item has no such part."
            raise bad_field("content_index", message)
        part = self.parts[content_index]
        if part.kind != "output_audio" or not part.seconds:
            raise bad_field("item_id", "This item has no sound of this session that could be truncated.")
        length = round(part.seconds * 1000)
        if end_ms > length:
            raise bad_field("audio_end_ms", f"The sound of this item has {length} ms; it cannot end at {end_ms} ms.")

    def truncate(self, content_index: int, end_ms: int, characters_per_second: float | None) -> None:
        """Cut a spoken answer where the user stopped hearing it, after `check_truncation`.

        Args:
            characters_per_second: how fast answers of this session are spoken, if that is known.
        """
        part = self.parts[content_index]
        complete = self.status == "completed"
        own_rate = len(part.text) / part.seconds
        # The text of an answer that was cut short is longer than its sound.
        rate = own_rate if complete else min(characters_per_second or own_rate, own_rate)
        part.text = heard(part.text, end_ms / 1000, part.seconds, rate, complete=complete)
        part.seconds = end_ms / 1000


def _part(content: InputText | InputSound | OutputText | OutputSound) -> Part:
    match content:
        case InputText(text=text):
            return Part("input_text", text)
        case OutputText(text=text):
            return Part("output_text", text)
        case OutputSound(transcript=text):
            return Part("output_audio", text)
        case InputSound(audio=audio):
            return Part("input_audio", audio=audio)


def seconds_of(pcm: bytes) -> float:
    """Length of PCM."""
    return len(pcm) / BYTES_PER_SECOND
