"""Pieces of a text, and requests for them, one after the other: what comes of them is one stream of sound.

A text that is still being written is cut where its sentences end. A sentence ends at a mark with white space behind it,
which belongs to it, or at a mark of Chinese or Japanese with any character behind it, or at a newline. So nothing ends
inside of `3.5` or an address, and where a text is cut does not depend on the pieces in which it arrives.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta
from starlette.requests import HTTPConnection

from omni_actors.client import Audio, ChoiceItem, RequestStream, StreamItem, Text
from omni_actors.client.async_client import SEEDS
from omni_actors.client.prompts import read_aloud, speech_ability
from omni_actors.errors import Aborted, ErrorCode, OmniError, suggest
from omni_actors.http_server.answer import request_options, token_counts, usage_of
from omni_actors.http_server.bodies import StagedSubmission
from omni_actors.http_server.ears import WORDS_SECONDS, Ears
from omni_actors.http_server.encoders import Encoder, Samples, fed
from omni_actors.http_server.errors import bad_field, fields_at_fault
from omni_actors.http_server.generation import Speed, VoiceId
from omni_actors.http_server.speech.voices import recording_of
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.messages import Description, StageUsage
from omni_actors.protocol.payloads import (
    ADDITIONAL_INFORMATION,
    AUTO,
    CLIP,
    CLIP_RATE,
    INSTRUCTIONS,
    LANGUAGE,
    TRANSCRIPT,
    SpeechAbility,
    WordTime,
)

LONGEST = 400  # characters of a piece: half a minute of speech
CLOSERS = r"[\"'”’»)\]}」』）】》〉]*+"
END = re.compile(rf"[.!?…]++{CLOSERS}\s|[。！？][。！？…]*+{CLOSERS}(?=.)|\n", re.S)
CLAUSE, SPACE = re.compile(r"[,;:—–]\s|[，、；：]"), re.compile(r"\s")
# Words behind which a full stop ends no sentence: initials, numbers such as those of a list, and these.
SHORTENED = re.compile(
    r"\b(?:\w|\d\d|approx|bzw|ca|capt|cf|co|col|dr|etc|evtl|fig|ggf|hr|inc|jr|ltd|mme|mrs?|ms|mt|nr|prof|rev|sr|st|usw|vs)"
    r"\Z",
    re.I,
)
SHORTENED_CHARACTERS = 8  # that show such a word


class SentenceCutter:
    """Takes a text in any pieces and gives its sentences; together they are the text, with all its white space.

    Args:
        longest: characters after which a sentence is cut at the end of a clause, else at a space, else in a word.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self.rest = ""  # the sentence that has not ended

    def append(self, text: str) -> list[str]:
        """Add text; returns the sentences that have ended."""
        text, begin, found = self.rest + text, 0, []
        while end := self._end(text, begin):
            found.append(text[begin:end])
            begin = end
        self.rest = text[begin:]
        return found

    def flush(self) -> list[str]:
        """End the sentence that has not ended, if there is one."""
        rest, self.rest = self.rest, ""
        return [rest] if rest else []

    def _end(self, text: str, begin: int) -> int:
        """Where the sentence that begins at `begin` ends; 0 if that is not known yet."""
        limit = begin + self._longest
        for mark in END.finditer(text, begin, limit + 1):
            if mark.end() <= limit and not _shortens(text[begin : mark.start()], mark[0]):
                return mark.end()
        if len(text) <= limit:
            return 0
        for pattern, least in ((CLAUSE, begin + self._longest // 2), (SPACE, begin)):
            if ends := [place.end() for place in pattern.finditer(text, least, limit)]:
                return ends[-1]
        return limit


def _shortens(before: str, mark: str) -> bool:
    """Whether a full stop ends no sentence but `Dr.`, an initial, `e.g.`, or the number of a list."""
    is_full_stop = mark.startswith(".") and not mark.startswith("..") and "\n" not in mark
    return is_full_stop and SHORTENED.search(before[-SHORTENED_CHARACTERS:]) is not None


def pieces_of(text: str) -> list[str]:
    """Cut a whole text into pieces of whole sentences, as many in each as `LONGEST` characters hold."""
    cutter, pieces = SentenceCutter(), [""]
    for sentence in (*cutter.append(text), *cutter.flush()):
        if pieces[-1] and len(pieces[-1]) + len(sentence) > LONGEST:
            pieces.append("")
        pieces[-1] += sentence
    return pieces


def speakable(text: str) -> str:
    """What a model is given of a piece of a text: nothing, if there is nothing in it to say."""
    return text.strip() if any(map(str.isalnum, text)) else ""


# ---------------------------------------------------------------------------------------------------------------------
# How texts are spoken

MAX_INSTRUCTIONS = 4096
LEAST_SECONDS = 0.001  # of a request whose time is over: the pipeline then says so
# The clip and what is said in it belong to the voice that the request names.
OF_VOICES = dict.fromkeys((ErrorCode.UNKNOWN_VOICE, CLIP, CLIP_RATE, TRANSCRIPT), "voice")
FIELDS = fields_at_fault("input", "voice", **OF_VOICES)


class Manner(StagedSubmission, frozen=True, kw_only=True):
    """How a client wants texts spoken."""

    voice: str | VoiceId | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm", "aac"] = "mp3"
    speed: Speed | None = None
    instructions: Annotated[str, Meta(max_length=MAX_INSTRUCTIONS)] | None = None
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


@dataclass(frozen=True)
class TextSpeaker:
    """Asks the pipeline to speak texts, all in one manner and with one seed. Make it with `of`.

    Args:
        answers: whether the model answers, so that what it says may not be what it was given.
        in_parts: whether it can begin with a text that is still being written.
        limit: seconds for each request.
        expires: when all of them must be complete (monotonic clock).
        aligner: knows when words are said.
    """

    state: ServerState
    description: Description
    answers: bool
    in_parts: bool
    prompt: Callable[[str], Any]
    options: Mapping[str, Any]
    limit: float
    expires: float
    ids: Iterator[str]
    aligner: Ears | None

    @classmethod
    async def of(
        cls,
        connection: HTTPConnection,
        state: ServerState,
        manner: Manner,
        ids: Iterator[str],
        expires: float = math.inf,
    ) -> TextSpeaker:
        """Check a manner against the pipeline.

        Args:
            connection: of the client whose share of the slots the requests use.
            ids: names of the requests to come.
            expires: when all of them must be complete (monotonic clock); each has the time of one request besides.

        Raises:
            HttpError: 400 for what this model does not take, or takes and does not get; 404 for another model.
        """
        description, _ = await state.model(manner.model)
        ability = speech_ability(description)
        prompt: Callable[[str], Any]
        if ability is not None:
            options, prompt = await _spoken(manner, state, description, ability), _said_by_user
        else:
            options = _read_aloud(manner, state, description)
            prompt = functools.partial(read_aloud, instructions=manner.instructions)
        # With the voice of a recording that goes on from its transcript, a model speaks whole texts only.
        whole = TRANSCRIPT in options.get(ADDITIONAL_INFORMATION, ())
        in_parts = ability is not None and ability.text_in_parts and not whole
        options |= {
            "params": state.stage_params(manner.model, manner.params_by_stage(), description, {}),
            "seed": secrets.randbelow(SEEDS) if manner.seed is None else manner.seed,
            **request_options(connection, state, manner),
        }
        limit = options.pop("timeout")
        aligner = await state.aligner()
        return cls(state, description, ability is None, in_parts, prompt, options, limit, expires, ids, aligner)

    async def ask(self, text: str, more_text: bool = False) -> RequestStream:
        """Send the request for a text, or with `more_text` for its beginning. Raises `OmniError`."""
        timeout = max(min(self.limit, self.expires - time.monotonic()), LEAST_SECONDS)
        named: dict[str, Any] = {"request_id": next(self.ids), "timeout": timeout, "more_text": more_text}
        return await self.state.client.submit(self.prompt(text), **named, **self.options)

    async def words(self, text: str, sound: Sequence[Samples]) -> Sequence[WordTime]:
        """When the words of a text are said in its sound, as far as another pipeline knows that."""
        if self.aligner is None or not sound:
            return ()
        options = {"tenant": self.options["tenant"], "timeout": WORDS_SECONDS}
        return await self.aligner.words(numpy.concatenate(sound), self.description.sample_rate, text, **options)


def times_of(words: Iterable[WordTime], begin: float, speed: float) -> list[dict[str, Any]]:
    """Words as clients see them, in seconds of the sound that they hear; `begin` is where that of the text begins."""
    heard = [(one.word, (begin + one.start) / speed, (begin + one.end) / speed) for one in words]
    return [{"word": word, "start": start, "end": end} for word, start, end in heard]


def request_ids(first: str) -> Iterator[str]:
    """Names for the requests of one HTTP request, whose own name the first one has."""
    return itertools.chain([first], (f"{first}-{number}" for number in itertools.count(1)))


def _said_by_user(text: str) -> list[dict[str, str]]:
    """The prompt of a model that speaks the text that it is given."""
    return [{"role": "user", "content": text}]


def _read_aloud(manner: Manner, state: ServerState, description: Description) -> dict[str, Any]:
    """Options for a model that answers."""
    if manner.language is not None:
        message = "This model finds the language of a text out by itself: leave language out."
        raise bad_field("language", message, "unsupported_parameter")
    return {"modalities": ["text", "audio"], "voice": state.voice(manner.voice, description, "voice")}


async def _spoken(
    manner: Manner, state: ServerState, description: Description, ability: SpeechAbility
) -> dict[str, Any]:
    """Options for a model that speaks the text that it is given."""
    information: dict[str, Any] = {}
    if manner.language is not None:
        languages = {name.casefold(): name for name in (*ability.languages, AUTO)}
        if manner.language.casefold() not in languages:
            nearest = suggest(manner.language, list(languages.values()))
            raise bad_field("language", f"language must be one of {', '.join(languages.values())}.{nearest}")
        information[LANGUAGE] = languages[manner.language.casefold()]
    if manner.instructions and ability.instructions == "none":
        message = "This model takes no instructions: it speaks in the manner of its voice."
        raise bad_field("instructions", message, "unsupported_parameter")
    if manner.instructions:
        information[INSTRUCTIONS] = manner.instructions
    elif ability.instructions == "required":
        message = "instructions: this model makes up a voice: describe it, and how it speaks."
        raise bad_field("instructions", message, "missing_required_parameter")
    if ability.clip == "none":
        voice = state.voice(manner.voice, description, "voice")
        known = {name.casefold(): name for name in description.voices}
        voice = known.get(voice.casefold(), voice) if voice is not None else None
        return {"modalities": ["audio"], "voice": voice, ADDITIONAL_INFORMATION: information}
    recorded, samples = await recording_of(manner.voice, state)
    information |= {CLIP: samples, CLIP_RATE: recorded.rate}
    if recorded.transcript is not None:
        information[TRANSCRIPT] = recorded.transcript
    return {"modalities": ["audio"], ADDITIONAL_INFORMATION: information}


# ---------------------------------------------------------------------------------------------------------------------
# Pieces

Status = Literal["completed", "cancelled", "failed"]


class Utterance:
    """A text with a beginning and an end, which one speaker speaks and one encoder writes down.

    Args:
        name: what its client calls it.
        timed: its client is told when words are said, if that is known.
    """

    def __init__(self, speaker: TextSpeaker, encoder: Encoder, name: str | None = None, timed: bool = True) -> None:
        self.speaker = speaker
        self.timed = timed
        self.encoder = encoder
        self.name = name
        self.cutter = SentenceCutter()
        self.growing: TextPiece | None = None  # that of the sentence which is still being written
        self.usages: list[dict[str, StageUsage]] = []  # of its pieces
        self.texts: list[str] = []  # what was said in each piece
        self.status: Status = "completed"  # unless something else is known

    @property
    def over(self) -> bool:
        """Whether nothing more of it is spoken."""
        return self.status != "completed"

    def usage(self) -> dict[str, int]:
        """The tokens of all its pieces, as OpenAI names them."""
        return token_counts(usage_of(self.usages, self.speaker.description, len(self.usages)))


@dataclass(eq=False)
class TextPiece:
    """A piece of an utterance. One without text is not spoken; one that is not `whole` grows.

    Args:
        last: whether nothing of the utterance follows.
        stream: its request, or why there is none; `None` until it is asked for.
        said: what is said, as far as the model says it.
        seconds: of its sound so far.
        sound: that sound, if the utterance is timed.
    """

    utterance: Utterance
    text: str
    whole: bool = True
    last: bool = False
    stream: RequestStream | OmniError | None = None
    said: str = ""
    seconds: float = 0.0
    sound: list[Samples] = field(default_factory=list)

    async def take(self, item: StreamItem) -> bytes:
        """Take what comes of its request; returns the sound that is ready, encoded."""
        if isinstance(item, Text):
            self.said += item.text
        if not isinstance(item, Audio):
            return b""
        self.seconds += len(item.samples) / item.sample_rate
        if self.utterance.timed and self.utterance.speaker.aligner is not None:
            self.sound.append(item.samples)
        return await fed(self.utterance.encoder, item.samples)

    async def complete(self) -> Sequence[WordTime]:
        """Note what was said; returns when its words were, as far as that is known."""
        text = self.said if self.utterance.speaker.answers else self.text
        self.utterance.texts.append(text)
        return await self.utterance.speaker.words(text, self.sound)

    async def abort(self) -> None:
        """End its request, if it has one. Idempotent."""
        if isinstance(self.stream, RequestStream):
            await self.stream.abort()


class Recital:
    """Speaks pieces one after the other: iterate for their items, with `None` at the end of each; `piece` is whose.

    The next piece is asked for once the first sound of the one before it is there: then it is in time, and it does not
    take from the first one what that needs to begin.

    Args:
        grows: whether more pieces will come, until `end`.
    """

    piece: TextPiece

    def __init__(self, pieces: Iterable[TextPiece] = (), *, grows: bool = False) -> None:
        self.waiting = 0  # characters of the pieces that were added and not asked for
        self._pieces = deque(pieces)
        self._asked: deque[TextPiece] = deque()
        self._grows = grows
        self._changed = asyncio.Event()

    def add(self, piece: TextPiece) -> None:
        """Append a piece."""
        self.waiting += len(piece.text)
        self._pieces.append(piece)
        self._changed.set()

    async def grow(self, piece: TextPiece, text: str, whole: bool) -> None:
        """Make `text` the text of a piece, which began with what it had before."""
        more = text[len(piece.text) :]
        piece.text, piece.whole = text, whole
        if isinstance(piece.stream, RequestStream):
            await piece.stream.append_text(more)
            if whole:
                await piece.stream.end_text()
        elif piece not in self._asked:
            self.waiting += len(more)

    def end(self) -> None:
        """Take no more pieces: the iteration ends with those that wait."""
        self._grows = False
        self._changed.set()

    async def stop(self, utterance: Utterance, status: Status) -> None:
        """Speak nothing more of an utterance. Its pieces still come, at once and without sound."""
        if not utterance.over:
            utterance.status = status
        for piece in self._asked:
            if piece.utterance is utterance:
                await piece.abort()

    async def abort(self) -> None:
        """End all requests. Idempotent."""
        self._pieces.clear()
        self.end()
        for piece in self._asked:
            await piece.abort()

    @property
    def usages(self) -> list[dict[str, StageUsage]]:
        """The usage by stage of each piece of the utterance that is heard."""
        return self.piece.utterance.usages

    @property
    def ready(self) -> bool:
        """Whether the next step of the iteration need not wait."""
        stream = self._asked[0].stream if self._asked else None
        return isinstance(stream, RequestStream) and stream.unread > 0

    @property
    def busy(self) -> bool:
        """Whether there is something to say that does not wait for more of its text."""
        return any(piece.whole for piece in (*self._asked, *self._pieces))

    async def __anext__(self) -> ChoiceItem:
        while not self._asked:
            if self._pieces:
                await self._ask()
            elif self._grows:
                self._changed.clear()
                await self._changed.wait()
            else:
                raise StopAsyncIteration
        self.piece = piece = self._asked[0]
        if isinstance(piece.stream, OmniError) and not piece.utterance.over:
            raise piece.stream
        if isinstance(piece.stream, RequestStream) and not piece.utterance.over:
            try:
                item = await anext(piece.stream)
            except StopAsyncIteration:
                piece.utterance.usages.append(piece.stream.usage)
            except Aborted:
                if not piece.utterance.over:
                    raise
            else:
                if isinstance(item, Audio) and self._pieces and len(self._asked) == 1:
                    await self._ask()
                return ChoiceItem(0, item)
        self._asked.popleft()
        return ChoiceItem(0, None)

    async def _ask(self) -> None:
        """Send the request of the next piece. That this fails is known when its turn comes."""
        piece = self._pieces.popleft()
        self.waiting -= len(piece.text)
        if piece.text and not piece.utterance.over:
            try:
                piece.stream = await piece.utterance.speaker.ask(piece.text, more_text=not piece.whole)
            except OmniError as error:
                piece.stream = error
        self._asked.append(piece)
