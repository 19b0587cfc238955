"""ElevenLabs' dialect: the routes /v1/text-to-speech/VOICE/stream-input and multi-stream-input."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta
from starlette.websockets import WebSocket

from omni_actors.client.prompts import speech_ability
from omni_actors.http_server.bodies import ANY, Nothing, Strict, decode, ignoring
from omni_actors.http_server.encoders import FileEncoder, Samples, pcm16, samples_of
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime.config import Event
from omni_actors.http_server.realtime.formats import SoundEncoder
from omni_actors.http_server.speech.recital import Manner, TextPiece, TextSpeaker, Utterance, request_ids
from omni_actors.http_server.speech.stream import Narrator, SpeechSession
from omni_actors.http_server.speech.texts import MAX_TEXT
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.fields import Seed
from omni_actors.protocol.payloads import WordTime

PATH = "/v1/text-to-speech/{voice_id}"
SINGLE, MULTI = f"{PATH}/stream-input", f"{PATH}/multi-stream-input"
MAX_CONTEXTS = 5  # ElevenLabs' limit
MODEL = re.compile(r"eleven_\w+")
VOICE = re.compile(r"[A-Za-z0-9]{20}")  # an id of ElevenLabs'
# Names of Qwen3-TTS's languages by their codes.
LANGUAGES = {
    **{"de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian", "ja": "Japanese"},
    **{"ko": "Korean", "pt": "Portuguese", "ru": "Russian", "zh": "Chinese"},
}
FORMAT = re.compile(
    r"pcm_(8000|16000|22050|24000|32000|44100|48000)|[ua]law_8000|mp3_(22050|24000|44100)(_\d{2,3})?|opus_48000(_\d{2,3})?"
)
LAWS = {"ulaw": "audio/pcmu", "alaw": "audio/pcma"}


class QueryFields(Strict, frozen=True, kw_only=True):
    """The parameters of the query that have an effect. With `auto_mode`, each message is a whole sentence or phrase."""

    model_id: str | None = None
    language_code: Annotated[str, Meta(max_length=35)] | None = None
    output_format: Annotated[str, Meta(max_length=32)] = "mp3_44100_128"
    inactivity_timeout: Annotated[float, Meta(gt=0)] = 20.0
    seed: Seed | None = None
    auto_mode: bool = False
    enable_ssml_parsing: Literal["false"] = "false"  # tags would be read out


class VoiceSettingFields(Strict, frozen=True, kw_only=True):
    """How a voice speaks, as far as that can be asked for."""

    speed: Annotated[float, Meta(ge=1, le=1)] | None = None  # a voice has one speed


IGNORED_SETTINGS = dict.fromkeys(("similarity_boost", "stability", "style", "use_speaker_boost"), ANY)
VoiceSettings = ignoring(VoiceSettingFields, IGNORED_SETTINGS)


class MessageFields(Strict, frozen=True, kw_only=True):
    """What a client sends, as far as it has an effect."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)] | None = None
    context_id: Annotated[str, Meta(max_length=128)] | None = None
    flush: bool = False
    close_context: bool = False
    close_socket: bool = False
    voice_settings: VoiceSettings | None = None  # type: ignore[valid-type]  # which is made at run time
    pronunciation_dictionary_locators: Nothing = None


IGNORED_PARAMETERS = "apply_text_normalization apply_language_text_normalization enable_logging"
IGNORED_PARAMETERS += " optimize_streaming_latency sync_alignment"
IGNORED_FIELDS = "authorization generation_config try_trigger_generation xi_api_key"  # the key comes with the request
Query = ignoring(QueryFields, dict.fromkeys(IGNORED_PARAMETERS.split(), ANY))
Message = ignoring(MessageFields, dict.fromkeys(IGNORED_FIELDS.split(), ANY))


class WireSound:
    """Makes sound of one of ElevenLabs' output formats: an `Encoder`. The bit rate of a codec is its own.

    Args:
        name: such as `pcm_16000`, `ulaw_8000` or `mp3_44100_128`.
        source: samples a second of what it is fed.

    Raises:
        HttpError: 400 for another format, and for a rate that takes what is not installed.
    """

    def __init__(self, name: str, source: int) -> None:
        found = FORMAT.fullmatch(name)
        codec, rate = name.split("_")[0], int(name.split("_")[1]) if found else 0
        if found is None or (rate != source and importlib.util.find_spec("soxr") is None):
            message = f"output_format: there are pcm, mp3, opus, ulaw and alaw at ElevenLabs' rates, not {name!r}."
            message += f" Without omni_actors[realtime] the rate must be {source}."
            raise bad_field("output_format", message, "unsupported_value")
        self._pcm = SoundEncoder(LAWS.get(codec), rate, source)
        self._file = FileEncoder(codec, rate) if codec in ("mp3", "opus") else None

    def feed(self, samples: Samples) -> bytes:
        """See `Encoder.feed`."""
        return self._written(self._pcm.encode(pcm16(samples)))

    def finish(self) -> bytes:
        """See `Encoder.finish`."""
        rest = self._written(self._pcm.encode(b"", last=True))
        return rest if self._file is None else rest + self._file.finish()

    def _written(self, pcm: bytes) -> bytes:
        if self._file is None:
            return pcm
        return self._file.feed(samples_of(pcm))


async def stream_input(websocket: WebSocket, state: ServerState, query: QueryFields, voice_id: str) -> None:
    """Speak a text while it is written, or several, each in its own context. A refusal is a plain HTTP response."""
    speaker = await _speaker(websocket, state, query, voice_id)
    WireSound(query.output_format, speaker.description.sample_rate)  # which may refuse the format
    multi = websocket.url.path.endswith(MULTI.removeprefix(PATH))
    await SpeechSession(websocket, state, Contexts(speaker, query, state.settings.realtime_idle_seconds, multi)).run()


async def _speaker(websocket: WebSocket, state: ServerState, query: QueryFields, given: str) -> TextSpeaker:
    """The speaker of all texts. A model of ElevenLabs' is the one that is served, and so is the voice of an id."""
    description = await state.facts()
    ability = speech_ability(description)
    known = {*map(str.casefold, (*description.voices, *state.voice_aliases(description.voices)))}
    presets = ability is None or ability.clip == "none"
    voice = None if presets and given.casefold() not in known and VOICE.fullmatch(given) else given
    model = None if query.model_id is None or MODEL.fullmatch(query.model_id) else query.model_id
    code = query.language_code
    language = LANGUAGES.get(code.lower().partition("-")[0], code) if code is not None else None
    manner = Manner(model=model, voice=voice, language=language, seed=query.seed)
    return await TextSpeaker.of(websocket, state, manner, request_ids(websocket.state.request_id))


@dataclass
class SpokenContext:
    """A text that is being written, as its client sees it.

    Args:
        pending: whether some of it came after the last flush.
        closed: whether nothing more of it may come.
    """

    utterance: Utterance
    narrator: Narrator
    pending: bool = False
    closed: bool = False


class Contexts:
    """The messages of the routes: a `Dialect`. A socket without contexts has one without a name."""

    def __init__(self, speaker: TextSpeaker, query: QueryFields, idle: float, multi: bool) -> None:
        self.idle = min(query.inactivity_timeout, idle)
        self._speaker = speaker
        self._format = query.output_format
        self._whole = query.auto_mode
        self._multi = multi
        self._contexts: dict[str, SpokenContext] = {}
        self._asking = ""  # the context of the message that is handled

    async def take(self, data: bytes, session: SpeechSession) -> None:
        """See `Dialect.take`."""
        self._asking = ""
        message = decode(data, Message)
        self._asking = name = (message.context_id or "") if self._multi else ""
        ends = message.close_socket or (message.text == "" and not self._multi)
        if message.text or message.flush or (ends and not message.close_socket):
            context = self._context(name, session)
            text = message.text or ""
            await context.narrator.append(context.utterance, text)
            flushes = message.flush or not text
            context.pending = not flushes and (context.pending or bool(text.strip()))
            if flushes or self._whole:
                await context.narrator.flush(context.utterance, last=False)
        closes = [name] if message.close_context else list(self._contexts) if ends else []
        for context in filter(None, map(self._contexts.get, closes)):
            await self._close(context)
        if ends:
            session.complete.set()

    def _context(self, name: str, session: SpeechSession) -> SpokenContext:
        context = self._contexts.get(name)
        if session.complete.is_set() or (context is not None and context.closed):
            raise bad_field("context_id", "This context is closed: send the text in another one.")
        if context is None:
            if len(self._contexts) >= MAX_CONTEXTS:
                raise bad_field("context_id", f"There may be {MAX_CONTEXTS} contexts at a time: close one.")
            encoder = WireSound(self._format, self._speaker.description.sample_rate)
            context = SpokenContext(Utterance(self._speaker, encoder, name), session.narrator())
            self._contexts[name] = context
        return context

    async def _close(self, context: SpokenContext) -> None:
        """Say what was flushed to its end; what was not is interrupted, and so is what is closed once more."""
        recital, utterance = context.narrator.recital, context.utterance
        if context.pending or context.closed:
            await recital.stop(utterance, "cancelled")
        self._end(context)

    def _end(self, context: SpokenContext) -> None:
        if not context.closed:
            context.closed = True
            context.narrator.recital.add(TextPiece(context.utterance, "", last=True))
            context.narrator.recital.end()

    # -- messages of the server ---------------------------------------------------------------------------------------

    def sound(self, utterance: Utterance, data: bytes) -> Event:
        """See `Dialect.sound`."""
        return _message(utterance.name, audio=data)

    def spoken(self, utterance: Utterance, text: str, seconds: float, words: Sequence[WordTime]) -> Event:
        """See `Dialect.spoken`: the times of its characters, from the piece's beginning.

        Within a word, between two of them, and in a text of whose words no times are known, all take the same.
        """
        characters = [*text, " "]
        known = {0: 0.0, **dict(_known(words)), len(characters): seconds}
        moments = numpy.interp(range(len(characters) + 1), [*known], [*known.values()])
        places = [round(1000 * float(moment)) for moment in moments]
        lengths = [end - begin for begin, end in itertools.pairwise(places)]
        times = {"chars": characters, "charStartTimesMs": places[:-1], "charDurationsMs": lengths}
        return _message(utterance.name, alignment=times, normalizedAlignment=times)

    def ended(self, utterance: Utterance) -> Event:
        """See `Dialect.ended`."""
        self._contexts.pop(utterance.name or "")
        return _message(utterance.name, isFinal=True)

    def error(self, error: HttpError, data: bytes = b"", utterance: Utterance | None = None) -> Event:
        """See `Dialect.error`."""
        name = utterance.name if utterance is not None else self._asking if data else None
        if utterance is not None:
            self._end(self._contexts[name or ""])
        return {"error": error.message, "code": error.code, "param": error.param, "contextId": name or None}


def _known(words: Sequence[WordTime]) -> Iterator[tuple[int, float]]:
    """Places in a text with the moments at which they are said."""
    for word in words:
        yield word.place, word.start
        yield word.place + len(word.word), word.end


def _message(name: str | None, **fields: Any) -> Event:
    nothing: dict[str, Any] = {"audio": None, "isFinal": False, "alignment": None, "normalizedAlignment": None}
    return {**nothing, **fields, "contextId": name or None}
