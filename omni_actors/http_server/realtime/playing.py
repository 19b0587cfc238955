"""Answers that are played in real time: what of them waits, and how much was played before the user interrupted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omni_actors.http_server.realtime.config import Event, event
from omni_actors.http_server.realtime.formats import BYTES_PER_SECOND
from omni_actors.protocol.payloads import WordTime

AHEAD_SECONDS = 30.0  # of an answer that wait to be played before no more of it is taken


@dataclass(eq=False)
class Unplayed:
    """The sound of an item that waits to be played.

    Args:
        text: its transcript so far.
        status: that of its response, once it has ended.
        played: bytes.
        told: characters of the transcript that the client has.
        words: when those of the whole transcript are said, if that is known.
    """

    response_id: str
    item_id: str
    pcm: bytearray = field(default_factory=bytearray)
    text: str = ""
    status: str = ""
    played: int = 0
    told: int = 0
    words: Sequence[WordTime] = ()


class Loudspeaker:
    """Holds the sound of answers until it is played, one answer after the other.

    Args:
        bytes_per_second: of the sound.
    """

    def __init__(self, bytes_per_second: int = BYTES_PER_SECOND) -> None:
        self.tell: Callable[[Event], None] = lambda _: None  # sends an event to the client
        self.heard: Callable[[Unplayed, bytes], None] = lambda *_: None  # takes what a call has sent
        self.bytes_per_second = bytes_per_second
        self._clips: deque[Unplayed] = deque()
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes that wait to be played."""
        return sum(len(clip.pcm) for clip in self._clips)

    def take(self, event: Event) -> bool:
        """Take the sound of an event, which is then not to be sent; says whether it had any."""
        match event["type"]:
            case "response.output_audio.delta":
                self._clip(event).pcm += event["delta"]
                self._filled.set()
                return True
            case "response.output_audio_transcript.delta":
                self._clip(event).text += event["delta"]
            case "response.done":
                for clip in self._clips:
                    if clip.response_id == event["response"]["id"]:
                        clip.status = event["response"]["status"]
                self._filled.set()
            case _:
                pass
        return False

    def _clip(self, event: Event) -> Unplayed:
        if not self._clips or self._clips[-1].response_id != event["response_id"]:
            self._clips.append(Unplayed(event["response_id"], event["item_id"]))
        return self._clips[-1]

    def timed(self, item_id: str, words: Sequence[WordTime]) -> None:
        """Take when the words of an answer are said, of which all sound is there."""
        for clip in self._clips:
            if clip.item_id == item_id:
                clip.words = words

    def silence(self) -> list[tuple[str, str, int]]:
        """Drop what was not played. Returns response, item and milliseconds played of what was cut."""
        cut = [clip for clip in self._clips if clip.pcm or clip.status != "completed"]
        self._clips = deque(clip for clip in self._clips if clip not in cut)
        self._drained.set()
        return [(clip.response_id, clip.item_id, 1000 * clip.played // self.bytes_per_second) for clip in cut]

    async def room(self) -> None:
        """Wait until not too much waits to be played."""
        while self.size > AHEAD_SECONDS * self.bytes_per_second:
            self._drained.clear()
            await self._drained.wait()

    def next(self, least: int, most: int) -> tuple[Unplayed, bytes] | None:
        """What is to be played now: `least` to `most` bytes, fewer at the end of an answer; `None` until there is some.

        Tells where playing begins and ends.
        """
        while self._clips:
            clip = self._clips[0]
            if clip.pcm and (clip.status or len(clip.pcm) >= least):
                if not clip.played:
                    self.tell(event("output_audio_buffer.started", response_id=clip.response_id))
                pcm = bytes(clip.pcm[:most])
                del clip.pcm[:most]
                clip.played += len(pcm)
                self._drained.set()
                return clip, pcm
            if not clip.status:
                break
            self._clips.popleft()
            if clip.played:
                self.tell(event("output_audio_buffer.stopped", response_id=clip.response_id))
        return None

    async def more(self) -> None:
        """Wait for more sound, or for the end of an answer."""
        self._filled.clear()
        await self._filled.wait()
